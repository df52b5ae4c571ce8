"""Entry point: the parser with all commands, what becomes of errors and signals, and TAB in bash, zsh and fish."""

from __future__ import annotations

import argparse
import glob
import io
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import NoReturn

from verl import __version__
from verl.cli.arguments import Parser, command
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
    completion = command(commands, "completion", _completion)
    completion.add_argument("shell", metavar="SHELL", help=", ".join(SCRIPTS))
    completion.add_argument("line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False
    parser.group_commands(commands, GROUPS)
    return parser


def _on_terminate(number: int, frame: FrameType | None) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one ends at once
    raise _Terminated


ASK = "words"  # in the place of a shell: what the scripts call, with the words of the line behind it

SCRIPTS = {shell: Path(__file__).with_name(f"completion.{shell}") for shell in ("bash", "zsh", "fish")}


def _completion(arguments: argparse.Namespace) -> None:
    """Print what lets a shell complete verl's words.

    verl completion bash
    verl completion fish

    To have it in every shell, put into ~/.bashrc or ~/.zshrc (behind compinit) the line
      eval "$(verl completion bash)"        # or zsh
    and for fish write it into ~/.config/fish/completions/verl.fish.
    """
    if arguments.shell == ASK:
        for name, help in candidates(build_parser(), arguments.line or [""]):
            print(f"{name}\t{help}" if help else name)
    elif arguments.shell in SCRIPTS:
        print(SCRIPTS[arguments.shell].read_text(encoding="utf-8"), end="")
    else:
        raise ConfigError("no completion for this shell", arguments.shell, f"one of {', '.join(SCRIPTS)}")


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What the last of the words, which may be empty, can become, each with a line of help or "". What ends in ``.``,
    ``/`` or ``=`` is only the beginning of a word."""
    *before, current = words
    for word in before:
        parser = _commands(parser).get(word, parser)
    option = parser._option_string_actions.get(before[-1]) if before else None
    if option is not None and option.nargs != 0:
        found = _values(option)
    elif current.startswith("-"):
        shown = [action for action in parser._actions if action.help != argparse.SUPPRESS]
        found = ((name, action.help or "") for action in shown for name in action.option_strings)
    elif _commands(parser):
        found = ((name, child.description or "") for name, child in _commands(parser).items())
    else:
        found = _positional(parser, current)
    for name, help in found:
        if name.startswith(current):
            yield name, " ".join(help.split())


def _commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return actions[0].choices if actions else {}


def _values(action: argparse.Action) -> Iterator[tuple[str, str]]:
    from verl.config.settings import presets

    if action.dest == "preset":
        yield from presets().items()
    for choice in action.choices or ():
        yield str(choice), ""


def _positional(parser: argparse.ArgumentParser, current: str) -> Iterator[tuple[str, str]]:
    """Settings, keys and configuration files where the command takes them, and words of a fixed set."""
    from verl.config.keys import using
    from verl.config.schema import Config
    from verl.config.schema_supervised import COMMANDS

    for action in parser._actions:
        if action.option_strings:
            continue
        yield from _values(action)
        if action.dest in ("words", "key"):
            with using(COMMANDS.get(parser.prog, Config)):
                yield from _keys(current, "=" if action.dest == "words" else "")
        if action.dest == "words":
            for path in sorted(glob.glob(f"{glob.escape(current)}*")):
                if os.path.isdir(path):
                    yield f"{path}/", ""
                elif path.endswith((".yaml", ".yml")):
                    yield path, ""


def _keys(current: str, end: str) -> Iterator[tuple[str, str]]:
    """Keys up to the next dot; behind ``key=`` the words that the key may take."""
    from verl.config.keys import choices, leaves, sections

    key, equals, _ = current.partition("=")
    if equals:
        field = leaves().get(key)
        for word in [*choices(key), *(["true", "false"] if field is not None and field.annotation is bool else [])]:
            yield f"{key}={word}", ""
        return
    stem = current[: current.rfind(".") + 1]
    for name, field in {**sections(), **leaves()}.items():
        if name.startswith(stem) and "." not in name[len(stem) :]:
            yield name + ("." if name in sections() else end), field.description or ""
