"""Entry point: the parser with all commands, and what becomes of errors and signals."""

from __future__ import annotations

import argparse
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from importlib import import_module
from types import FrameType
from typing import NoReturn

from verl import __version__
from verl.cli import completion
from verl.cli.arguments import Parser
from verl.errors import ConfigError, VerlError, meant

EXIT_OK, EXIT_FAILED, EXIT_BAD_INPUT, EXIT_INTERRUPTED, EXIT_TERMINATED = 0, 1, 2, 130, 143

MODULES = ("init", "train", "evaluate", "generate", "data", "reward", "runs", "plan", "doctor", "config")
# What a person wants, and the commands for it, in the order of use.
GROUPS = {
    "prepare": ("init", "presets", "data", "model", "reward", "config", "plan", "completion"),
    "train": ("train", "sft", "reward-model", "scale"),
    "look": ("watch", "report", "serve", "run", "profile", "metrics"),
    "fix": ("doctor", "replay"),
    "use": ("eval", "generate", "export"),
}

EXAMPLES = """\
examples:
  verl model get smollm2-135m
  verl data reasoning-gym --task chain_sum --size 2000 --option min_terms=2
  verl init --model smollm2-135m --data data/chain_sum.parquet --out my.yaml
  verl reward test my_reward.py --data my.jsonl
  verl plan my.yaml
  verl doctor my.yaml
  verl train examples/quickstart.yaml trainer.total_training_steps=10
  verl export runs/quickstart --to my-model
  verl generate my-model --prompt "What is 2 + 2?"
  verl eval my-model data/chain_sum_val.parquet -n 4

exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted, 143 terminated
"""

_GO_ON = "; start the same command again to go on from the last checkpoint"


class _Terminated(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that everything started is stopped."""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``verl``; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a pipe may know ASCII alone, and a model says anything
    hint = _GO_ON if [word for word in words if word != "--debug"][:1] in (["train"], ["sft"], ["reward-model"]) else ""
    return guarded(lambda: _run(words), debug="--debug" in words, hint=hint)


def _run(words: list[str]) -> int:
    parser = build_parser()
    arguments, rest = parser.parse_known_args(words)
    if "words" in arguments:
        arguments.words += rest  # settings behind an option, which argparse does not join to those before it
    elif rest:
        raise ConfigError("one argument too many", rest[0], "see --help of the command")
    if not hasattr(arguments, "command"):
        parser.print_help()
        return EXIT_BAD_INPUT
    code = arguments.command(arguments) or EXIT_OK
    sys.stdout.flush()  # here, where an error of it is told
    return int(code)


def guarded(action: Callable[[], int], debug: bool, hint: str = _GO_ON) -> int:
    """The exit code of ``action``: its own, or that of the error or signal that ended it, told on standard error.
    ``hint``: what to do after an interruption."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_terminate)
    try:
        try:
            return action()
        except SystemError as error:
            raise meant(error) from None
    except VerlError as error:
        if debug:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT if error.bad_input else EXIT_FAILED
    except KeyboardInterrupt:
        print(f"interrupted{hint}", file=sys.stderr)
        return EXIT_INTERRUPTED
    except _Terminated:
        print(f"terminated{hint}", file=sys.stderr)
        return EXIT_TERMINATED
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_is_gone():
            return EXIT_FAILED
        if debug:
            traceback.print_exc()
        first_line = (str(error).strip().splitlines() or [""])[0]
        defect = "this is a defect of VeRL or of user code it called; --debug shows where"
        print(f"error: {type(error).__name__}: {first_line}\n  {defect}", file=sys.stderr)
        return EXIT_FAILED


def _reader_is_gone() -> bool:
    """Whether nobody reads standard output any more (``verl ... | head``); what is left for it goes nowhere then."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    if not any(event & select.POLLERR for _, event in output.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


def build_parser() -> Parser:
    parser = Parser(
        prog="verl",
        description="Reinforcement learning for large language models, from a laptop to a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"verl {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of errors")
    commands = parser.add_subparsers(metavar="COMMAND")
    for module in MODULES:
        import_module(f"verl.cli.{module}").add(commands)
    completion.add(commands, build_parser)
    parser.group_commands(commands, GROUPS)
    return parser


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
    raise _Terminated
