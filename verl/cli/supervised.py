"""``verl sft`` and ``verl reward-model train``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING

from verl.cli.arguments import Commands, command, group, settings
from verl.errors import ConfigError

if TYPE_CHECKING:
    from verl.config import SupervisedConfig


def add(commands: Commands) -> None:
    sft = command(
        commands,
        "sft",
        "train a model to imitate conversations, before RL; or go on with it",
        lambda arguments: _train(arguments, _sft_schema),
        "  verl sft examples/tiny/sft.yaml",
    )
    _add_words(sft)

    rewards = group(commands, "reward-model", "models that score responses")
    train = command(
        rewards,
        "train",
        "train a reward model on preference pairs, or go on with it",
        lambda arguments: _train(arguments, _pair_schema),
        "  verl reward-model train examples/reward_model/reward_model.yaml",
    )
    _add_words(train)


def _add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.yaml | key=value",
        help="a configuration file, and settings that win over it (keys: docs/configuration.md)",
    )
    parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")


def _sft_schema() -> type[SupervisedConfig]:
    from verl.config import SftConfig

    return SftConfig


def _pair_schema() -> type[SupervisedConfig]:
    from verl.config import RewardModelTrainingConfig

    return RewardModelTrainingConfig


def _train(arguments: argparse.Namespace, schema: Callable[[], type[SupervisedConfig]]) -> None:
    source, overrides = settings(arguments.words)
    if source is None and not overrides:
        raise ConfigError(
            "there is nothing to train: neither a configuration file nor a setting is given",
            None,
            "give a file such as examples/tiny/sft.yaml, or settings: model.path=... data.train_files=...",
        )
    from verl.cluster.threads import process_threads, set_environment
    from verl.config import load_supervised

    config, notices = load_supervised(schema(), source, overrides)
    set_environment(process_threads(config))  # before torch is imported

    from rich.console import Console

    from verl.models.quiet import without_bars
    from verl.trainer.supervised import train_supervised

    console = Console(highlight=False, force_interactive=False if arguments.plain else None)
    for notice in notices:
        console.print(f"note: {notice}", soft_wrap=True, markup=False)
    with without_bars():
        train_supervised(config, console)
