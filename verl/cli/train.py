"""``verl train``."""

from __future__ import annotations

import argparse

from verl.cli.arguments import Commands, common


def add(commands: Commands) -> None:
    train = commands.add_parser("train", parents=[common()], help="train a model, or go on with a run")
    train.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.yaml | key=value",
        help="a configuration file, then settings that win over it",
    )
    train.set_defaults(command=_train)


def _train(arguments: argparse.Namespace) -> None:
    from verl.config import load_config

    words = list(arguments.words)
    path = words.pop(0) if words and "=" not in words[0] else None
    loaded = load_config(path, words)
    config = loaded.config

    from verl.cluster.threads import set_environment, worker_threads

    # Over Ray this process only steers; inline it is the worker. Both must be settled before torch is imported.
    set_environment(worker_threads(config) if config.cluster.backend == "inline" else 1)

    from rich.console import Console

    from verl.models.quiet import without_bars
    from verl.trainer.run import train

    console = Console(highlight=False)
    for notice in loaded.notices:
        console.print(f"note: {notice}", soft_wrap=True, markup=False)
    with without_bars():
        summary = train(config, console)
    if summary.reward_first is not None:
        console.print(
            f"reward: {summary.reward_first:.3f} (first {summary.window} steps) -> "
            f"{summary.reward_last:.3f} (last {summary.window})"
        )
    if summary.val_first is not None and summary.val_last_step != summary.val_first_step:
        console.print(
            f"held-out: {summary.val_first:.3f} (step {summary.val_first_step}) -> "
            f"{summary.val_last:.3f} (step {summary.val_last_step})"
        )
    console.print(f"report: {config.run_dir / 'report.html'}", soft_wrap=True)
