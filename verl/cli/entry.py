"""Entry point: the parser with all commands, and what becomes of errors and signals."""

from __future__ import annotations

import argparse
import signal
import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from verl import __version__
from verl.cli import data, models, runs, train
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="verl",
        description="Reinforcement learning for large language models, from a laptop to a cluster.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"verl {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND")
    for module in (train, data, models, runs):
        module.add(commands)
    return parser


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
    raise _Terminated
