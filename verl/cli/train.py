"""``verl train`` and ``verl presets``: a thin shell over the Python API."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from verl.cli.arguments import Commands, command, settings
from verl.errors import ConfigError

_EXAMPLES = """\
  verl train examples/quickstart.yaml
  verl train my.yaml --preset dapo trainer.experiment_name=first actor.optim.lr=1e-6
"""


def add(commands: Commands) -> None:
    train = command(
        commands, "train", "train a model, or go on with a run", _train, _EXAMPLES, late_epilog=list_presets
    )
    train.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.yaml | key=value",
        help="a configuration file, and settings that win over it",
    )
    train.add_argument(
        "--preset",
        action="append",
        default=[],
        metavar="NAME",
        help="settings of an algorithm, below those of the file; may be repeated, the last one wins",
    )
    train.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")

    listing = command(commands, "presets", "list the presets of verl train", _presets, "  verl presets")
    listing.add_argument("--json", action="store_true", help="{name: what it sets up}")


def _presets(arguments: argparse.Namespace) -> None:
    from verl.config.overlays import presets
    from verl.run_dir import json_line

    print(json_line(presets()) if arguments.json else list_presets())


def list_presets() -> str:
    from verl.config.overlays import presets

    width = max(map(len, presets()))
    return "\n".join(["presets:", *(f"  {name:<{width}}  {line}" for name, line in presets().items())])


def _train(arguments: argparse.Namespace) -> None:
    source, overrides = settings(arguments.words)
    run_training(source, overrides, arguments.preset, plain=arguments.plain)


def run_training(
    source: str | None,
    overrides: Sequence[str],
    presets: Sequence[str] = (),
    notices: Sequence[str] = (),
    plain: bool = False,
) -> None:
    """Train with a file and settings as they stand on a command line; ``notices`` are told first."""
    if source is None and not overrides:
        raise ConfigError(
            "there is nothing to train: neither a configuration file nor a setting is given",
            None,
            "verl train my.yaml, or settings such as model.path=... data.train_files=... "
            "(verl init writes a file for your model and data, verl presets lists algorithms)",
        )
    from verl.config import load_config
    from verl.trainer.api import Trainer

    trainer = Trainer(load_config(source, overrides, presets), display="plain" if plain else "auto")
    trainer.notices[:0] = notices
    trainer.fit()
