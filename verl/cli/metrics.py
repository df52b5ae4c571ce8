"""``verl metrics``: what the names in ``metrics.jsonl`` mean."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.cli.arguments import Commands, command, group, print_json, write_page
from verl.json_lines import json_line


def add(commands: Commands) -> None:
    metrics = group(commands, "metrics", "what the metrics of a run mean")
    explain = command(metrics, "explain", _explain)
    explain.add_argument("name", nargs="+", metavar="NAME", help="as in metrics.jsonl")
    explain.add_argument("--json", action="store_true", help="as JSON")
    reference = command(metrics, "reference", _reference)
    reference.add_argument("--out", type=Path, help="file to write (default: standard output)")
    reference.add_argument("--json", action="store_true", help="in place of the page, as JSON")


def _explain(arguments: argparse.Namespace) -> None:
    """Meaning, formula, healthy range, what to do.

    verl metrics explain actor/grad_norm
    """
    from verl.config.names import did_you_mean
    from verl.errors import ConfigError
    from verl.tracking.metric_table import names, row_of

    found = []
    for name in arguments.name:
        row = row_of(name)
        if row is None:
            raise ConfigError("no such metric", name, f"{did_you_mean(name, names())}verl metrics reference lists all")
        found.append(row._asdict() | {"name": name})
        if arguments.json:
            continue
        print(f"{name}\n  {row.meaning}")
        for label, text in (
            ("formula", row.formula),
            ("unit", row.unit),
            ("healthy", row.healthy),
            ("otherwise", row.otherwise),
        ):
            if text:
                print(f"  {label + ':':<10} {text}")
    if arguments.json:
        print_json(found)


def _reference(arguments: argparse.Namespace) -> None:
    """Every metric on one page, as Markdown.

    verl metrics reference --out metrics.md
    """
    from verl.tracking.metric_table import PAGE, TABLE

    tables = {title: [row._asdict() for row in rows] for title, rows in TABLE.items()}
    write_page(json_line(tables) + "\n" if arguments.json else PAGE.read_text(encoding="utf-8"), arguments.out)
