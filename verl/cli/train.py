"""``verl train``, ``sft``, ``reward-model train``, ``presets``, ``model``, ``export``: a thin shell over Python."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from verl.cli.arguments import Commands, a_run, command, group, positive, settings
from verl.cli.generate import DTYPES
from verl.errors import CheckpointError, ConfigError
from verl.json_lines import json_line


def add(commands: Commands) -> None:
    train = command(commands, "train", _train, late_epilog=list_presets)
    presets = "settings of an algorithm, below those of the file; may be repeated, the last one wins"
    train.add_argument("--preset", action="append", default=[], metavar="NAME", help=presets)
    sft = command(commands, "sft", _sft)
    model = command(group(commands, "reward-model", "models that score responses"), "train", _reward_model)
    for parser in (train, sft, model):
        words = "a configuration file, and settings that win over it (keys: docs/configuration.md)"
        parser.add_argument("words", nargs="*", metavar="CONFIG.yaml | key=value", help=words)
        parser.add_argument("--plain", action="store_true", help="plain lines, also on a terminal")

    command(commands, "presets", _presets, json="{name: what it sets up}")

    get = command(group(commands, "model", "models that VeRL knows by name"), "get", _model_get)
    get.add_argument("model", help="smollm2-135m, tiny-llama, a folder, a GGUF file or a hub id")

    export = command(commands, "export", _export)
    export.add_argument("run", help="name of a run in runs/, or a path")
    export.add_argument("--to", required=True, help="the folder to write")
    export.add_argument("--step", type=positive, help="of which checkpoint (default: the newest)")
    export.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default bfloat16")


def _presets(arguments: argparse.Namespace) -> None:
    """List the presets of verl train.

    verl presets
    """
    from verl.config.settings import presets

    print(json_line(presets()) if arguments.json else list_presets())


def list_presets() -> str:
    from verl.config.settings import presets

    width = max(map(len, presets()))
    return "\n".join(["presets:", *(f"  {name:<{width}}  {line}" for name, line in presets().items())])


def _train(arguments: argparse.Namespace) -> None:
    """Train a model, or go on with a run.

    verl train examples/quickstart.yaml
    verl train my.yaml --preset dapo trainer.experiment_name=first actor.optim.lr=1e-6
    """
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
    _require(source, overrides, "verl init writes a file for your model and data, verl presets lists algorithms")
    from verl.config import load_config
    from verl.trainer.api import Trainer

    trainer = Trainer(load_config(source, overrides, presets), display="plain" if plain else "auto")
    trainer.notices[:0] = notices
    trainer.fit()


def _require(source: str | None, overrides: Sequence[str], hint: str) -> None:
    if source is None and not overrides:
        what = "there is nothing to train: neither a configuration file nor a setting is given"
        raise ConfigError(what, None, f"give a file, or settings: model.path=... data.train_files=... ({hint})")


def _sft(arguments: argparse.Namespace) -> None:
    """Train a model to imitate conversations, before RL; or go on with it.

    verl sft examples/tiny/sft.yaml
    """
    _supervised(arguments, "verl sft")


def _reward_model(arguments: argparse.Namespace) -> None:
    """Train a reward model on preference pairs, or go on with it.

    verl reward-model train examples/reward_model/reward_model.yaml
    """
    _supervised(arguments, "verl reward-model train")


def _supervised(arguments: argparse.Namespace, name: str) -> None:
    source, overrides = settings(arguments.words)
    _require(source, overrides, "such as examples/tiny/sft.yaml")
    from verl.cluster.threads import process_threads, set_environment
    from verl.config import load_supervised
    from verl.config.schema_supervised import COMMANDS

    config, notices = load_supervised(COMMANDS[name], source, overrides)
    set_environment(process_threads(config))  # before torch is imported

    from rich.console import Console

    from verl.models.quiet import without_bars
    from verl.trainer.supervised import train_supervised

    console = Console(highlight=False, force_interactive=False if arguments.plain else None)
    for notice in notices:
        console.print(f"note: {notice}", soft_wrap=True, markup=False)
    with without_bars():
        train_supervised(config, console)


def _model_get(arguments: argparse.Namespace) -> None:
    """Download and convert a model into the cache; prints its path.

    verl model get smollm2-135m
    """
    from verl.models.resolve import resolve_model

    print(resolve_model(arguments.model))


def _export(arguments: argparse.Namespace) -> None:
    """Write a run's model as a Hugging Face folder.

    verl export runs/quickstart --to my-model
    """
    from verl.checkpoint.export import export_hf
    from verl.checkpoint.store import CheckpointStore

    run = a_run(arguments.run)
    store = CheckpointStore(run.checkpoints)
    which = arguments.step if arguments.step is not None else store.latest()
    if which is None:
        fix = "train with trainer.save_freq above 0"
        raise CheckpointError("the run has no complete checkpoint", str(run.path), fix)
    checkpoint = store.open(which)
    print(f"step {checkpoint.step} written to {export_hf(checkpoint, Path(arguments.to), arguments.dtype)}")
