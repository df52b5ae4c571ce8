"""``verl metrics``: what the names in ``metrics.jsonl`` mean."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.cli.arguments import Commands, command, group, write_page


def add(commands: Commands) -> None:
    metrics = group(commands, "metrics", "what the metrics of a run mean")
    explain = command(
        metrics,
        "explain",
        "meaning, formula, healthy range, what to do",
        _explain,
        "  verl metrics explain actor/grad_norm",
    )
    explain.add_argument("name", nargs="+", metavar="NAME", help="as in metrics.jsonl")
    reference = command(
        metrics,
        "reference",
        "every metric on one page, as Markdown",
        _reference,
        "  verl metrics reference --out metrics.md",
    )
    reference.add_argument("--out", type=Path, help="file to write (default: standard output)")


def _explain(arguments: argparse.Namespace) -> None:
    from verl.config.names import did_you_mean
    from verl.errors import ConfigError
    from verl.tracking.metric_table import names, row_of

    for name in arguments.name:
        row = row_of(name)
        if row is None:
            raise ConfigError("no such metric", name, f"{did_you_mean(name, names())}verl metrics reference lists all")
        print(f"{name}\n  {row.meaning}")
        for label, text in (
            ("formula", row.formula),
            ("unit", row.unit),
            ("healthy", row.healthy),
            ("otherwise", row.otherwise),
        ):
            if text:
                print(f"  {label + ':':<10} {text}")


def _reference(arguments: argparse.Namespace) -> None:
    from verl.tracking.metric_table import reference

    write_page(reference(), arguments.out)
