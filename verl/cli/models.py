"""``verl model`` and ``verl export``: models in and out."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.cli.arguments import Commands, command, group, positive
from verl.cli.sampling import DTYPES


def add(commands: Commands) -> None:
    model = group(commands, "model", "models that VeRL knows by name")
    get = command(model, "get", _model_get)
    get.add_argument("model", help="smollm2-135m, tiny-llama, a folder, a GGUF file or a hub id")

    export = command(commands, "export", _export)
    export.add_argument("run", help="name of a run in runs/, or a path")
    export.add_argument("--to", required=True, help="the folder to write")
    export.add_argument("--step", type=positive, help="of which checkpoint (default: the newest)")
    export.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default bfloat16")


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
    from verl.errors import CheckpointError
    from verl.tracking.runs import find_run

    run = find_run(arguments.run)
    store = CheckpointStore(run.checkpoints)
    which = arguments.step if arguments.step is not None else store.latest()
    if which is None:
        fix = "train with trainer.save_freq above 0"
        raise CheckpointError("the run has no complete checkpoint", str(run.path), fix)
    checkpoint = store.open(which)
    target = export_hf(checkpoint, Path(arguments.to), arguments.dtype)
    print(f"step {checkpoint.step} written to {target}")
