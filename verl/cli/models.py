"""``verl model``, ``verl generate`` and ``verl export``: models in and out."""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.cli.arguments import Commands, common, group, positive, temperature


def add(commands: Commands) -> None:
    model = group(commands, "model", "models that VeRL knows by name")
    get = model.add_parser(
        "get", parents=[common()], help="download and convert a model into the cache; prints its path"
    )
    get.add_argument("model", help="smollm2-135m, tiny-llama, a folder, a GGUF file or a hub id")
    get.set_defaults(command=_model_get)

    generate = commands.add_parser("generate", parents=[common()], help="let a model answer a prompt")
    generate.add_argument("model", help="an alias, a folder (such as an export), a GGUF file or a hub id")
    generate.add_argument("--prompt", required=True, action="append", help="may be given several times")
    generate.add_argument("--raw", action="store_true", help="no chat template: the model continues the text")
    generate.add_argument("-n", type=positive, default=1, help="responses a prompt (default 1)")
    generate.add_argument("--max-new-tokens", type=positive, default=128, help="default 128")
    generate.add_argument("--temperature", type=temperature, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--seed", type=int, default=1, help="default 1")
    generate.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    generate.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    generate.set_defaults(command=_generate)

    export = commands.add_parser("export", parents=[common()], help="write a run's model as a Hugging Face folder")
    export.add_argument("run", help="folder of the run")
    export.add_argument("--to", required=True, help="the folder to write")
    export.add_argument("--step", type=positive, help="of which checkpoint (default: the newest)")
    export.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default bfloat16"
    )
    export.set_defaults(command=_export)


def _model_get(arguments: argparse.Namespace) -> None:
    from verl.models.loading import resolve_model

    print(resolve_model(arguments.model))


def _generate(arguments: argparse.Namespace) -> None:
    from verl.cluster.threads import available_cores, set_environment

    set_environment(available_cores())

    from verl.models.quiet import without_bars
    from verl.rollout.offline import generate_text

    with without_bars():
        texts = generate_text(
            arguments.model,
            arguments.prompt,
            raw=arguments.raw,
            n=arguments.n,
            max_new_tokens=arguments.max_new_tokens,
            temperature=arguments.temperature,
            seed=arguments.seed,
            dtype=arguments.dtype,
            trust_remote_code=arguments.trust_remote_code,
        )
    print("\n".join(texts))


def _export(arguments: argparse.Namespace) -> None:
    from verl.checkpoint.export import export_hf
    from verl.checkpoint.store import CheckpointStore
    from verl.errors import CheckpointError
    from verl.run_dir import RunDir

    run = Path(arguments.run)
    if not run.is_dir():
        raise CheckpointError("no such run folder", str(run), "give the folder of a run, such as runs/quickstart")
    store = CheckpointStore(RunDir(run).checkpoints)
    which = arguments.step if arguments.step is not None else store.latest()
    if which is None:
        raise CheckpointError("the run has no complete checkpoint", str(run), "train with trainer.save_freq above 0")
    checkpoint = store.open(which)
    target = export_hf(checkpoint, Path(arguments.to), arguments.dtype)
    print(f"step {checkpoint.step} written to {target}")
