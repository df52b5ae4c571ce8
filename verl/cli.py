"""The command line. Commands import what they need when they run, so that ``verl --help`` is immediate."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from verl import __version__
from verl.errors import VerlError

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 130, 143

EXAMPLES = """\
examples:
  verl model get smollm2-135m
  verl data reasoning-gym --task chain_sum --size 2000 --option min_terms=2
  verl train examples/quickstart.yaml trainer.total_training_steps=10
  verl export runs/quickstart --to my-model
  verl generate my-model --prompt "What is 2 + 2?"

exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted, 143 terminated
"""


class _Terminated(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that everything started is stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``verl``; returns the exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if "words" in arguments and not any(word.startswith("-") for word in rest):
        arguments.words += rest  # settings behind an option, which argparse does not join to those before it
    elif rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if not hasattr(arguments, "command"):
        parser.print_help()
        return EXIT_BAD_INPUT
    signal.signal(signal.SIGTERM, _on_terminate)
    try:
        arguments.command(arguments)
        return EXIT_OK
    except VerlError as error:
        if arguments.debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted; start the same command again to go on from the last checkpoint", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _Terminated:
        print("terminated; start the same command again to go on from the last checkpoint", file=sys.stderr)
        return EXIT_TERMINATED
    except Exception as error:
        if arguments.debug:
            traceback.print_exc()
        first_line = str(error).strip().splitlines()[0] if str(error).strip() else ""
        print(
            f"error: {type(error).__name__}: {first_line}\n  this is a defect of VeRL or of user code it called;"
            " --debug shows where",
            file=sys.stderr,
        )
        return EXIT_FAILED


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
    raise _Terminated


# commands ----------------------------------------------------------------------------------------------------------


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


def _report(arguments: argparse.Namespace) -> None:
    from verl.tracking.report import write_report

    print(write_report(Path(arguments.run)))


def _model_get(arguments: argparse.Namespace) -> None:
    from verl.models.loading import resolve_model

    print(resolve_model(arguments.model))


def _data_reasoning_gym(arguments: argparse.Namespace) -> None:
    from verl.data.generate import make_reasoning_gym
    from verl.data.options import parse_options

    made = make_reasoning_gym(
        arguments.task,
        arguments.size,
        arguments.out or f"data/{arguments.task}.parquet",
        seed=arguments.seed,
        options=parse_options(arguments.option),
        val_size=arguments.val_size,
        instruction=arguments.instruction,
    )
    for part in made:
        print(f"{part.path}: {part.rows} rows")


def _data_gsm8k(arguments: argparse.Namespace) -> None:
    from verl.data.generate import GSM8K_INSTRUCTION, make_gsm8k

    instruction = GSM8K_INSTRUCTION if arguments.instruction is None else arguments.instruction
    out = arguments.out or f"data/gsm8k_{arguments.split}.parquet"
    made = make_gsm8k(arguments.input, out, instruction, arguments.split)
    print(f"{made.path}: {made.rows} rows")


# parser ------------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
    parser = argparse.ArgumentParser(
        prog="verl",
        description="Reinforcement learning for large language models, from a laptop to a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"verl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")

    train = commands.add_parser("train", parents=[common], help="train a model, or go on with a run")
    train.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.yaml | key=value",
        help="a configuration file, then settings that win over it",
    )
    train.set_defaults(command=_train)

    _add_data_commands(commands, common)

    model = commands.add_parser("model", help="models that VeRL knows by name").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    get = model.add_parser("get", parents=[common], help="download and convert a model into the cache; prints its path")
    get.add_argument("model", help="smollm2-135m, tiny-llama, a folder, a GGUF file or a hub id")
    get.set_defaults(command=_model_get)

    generate = commands.add_parser("generate", parents=[common], help="let a model answer a prompt")
    generate.add_argument("model", help="an alias, a folder (such as an export), a GGUF file or a hub id")
    generate.add_argument("--prompt", required=True, action="append", help="may be given several times")
    generate.add_argument("--raw", action="store_true", help="no chat template: the model continues the text")
    generate.add_argument("-n", type=_positive, default=1, help="responses a prompt (default 1)")
    generate.add_argument("--max-new-tokens", type=_positive, default=128, help="default 128")
    generate.add_argument("--temperature", type=_temperature, default=0.0, help="0 is greedy (default)")
    generate.add_argument("--seed", type=int, default=1, help="default 1")
    generate.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="default bfloat16")
    generate.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    generate.set_defaults(command=_generate)

    export = commands.add_parser("export", parents=[common], help="write a run's model as a Hugging Face folder")
    export.add_argument("run", help="folder of the run")
    export.add_argument("--to", required=True, help="the folder to write")
    export.add_argument("--step", type=_positive, help="of which checkpoint (default: the newest)")
    export.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="default bfloat16"
    )
    export.set_defaults(command=_export)

    report = commands.add_parser("report", parents=[common], help="write a run's report page again; prints its path")
    report.add_argument("run", help="folder of the run")
    report.set_defaults(command=_report)
    return parser


def _add_data_commands(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    data = commands.add_parser("data", help="make data files").add_subparsers(
        title="commands", metavar="COMMAND", required=True
    )
    gym = data.add_parser("reasoning-gym", parents=[common], help="problems with verifiable answers, made by a program")
    gym.add_argument("--task", required=True, help="such as chain_sum")
    gym.add_argument("--size", type=_positive, required=True, help="training problems")
    gym.add_argument("--val-size", type=_not_negative, default=0, help="held-out problems, into <out>_val.parquet")
    gym.add_argument("--seed", type=int, default=0, help="default 0")
    gym.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="of the task; may be repeated")
    gym.add_argument("--instruction", help="system message put before every problem")
    gym.add_argument("--out", help="parquet file to write (default data/<task>.parquet)")
    gym.set_defaults(command=_data_reasoning_gym)

    gsm8k = data.add_parser("gsm8k", parents=[common], help="GSM8K's jsonl files, converted")
    gsm8k.add_argument("--input", required=True, help="train.jsonl or test.jsonl of GSM8K")
    gsm8k.add_argument("--out", help="parquet file to write (default data/gsm8k_<split>.parquet)")
    gsm8k.add_argument("--split", default="train", help="name noted in every row (default train)")
    gsm8k.add_argument("--instruction", help="text appended to every question (default asks for #### answer)")
    gsm8k.set_defaults(command=_data_gsm8k)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
