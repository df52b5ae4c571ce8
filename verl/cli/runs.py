"""``verl report``: looking at runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.cli.arguments import Commands, common


def add(commands: Commands) -> None:
    report = commands.add_parser("report", parents=[common()], help="write a run's report page again; prints its path")
    report.add_argument("run", help="folder of the run")
    report.set_defaults(command=_report)


def _report(arguments: argparse.Namespace) -> None:
    from verl.tracking.report import write_report

    print(write_report(Path(arguments.run)))
