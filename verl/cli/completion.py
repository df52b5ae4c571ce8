"""``verl completion``: TAB in bash, zsh and fish. Their scripts ask the program itself, so that they never grow old."""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from verl.cli.arguments import Commands, command
from verl.errors import ConfigError

ASK = "words"  # in the place of a shell: what the scripts call, with the words of the line behind it

SCRIPTS = {shell: Path(__file__).with_name(f"completion.{shell}") for shell in ("bash", "zsh", "fish")}


def add(commands: Commands, root: Callable[[], argparse.ArgumentParser]) -> None:
    """``root`` makes the parser of the whole command line."""

    def run(arguments: argparse.Namespace) -> None:
        """Print what lets a shell complete verl's words.

        verl completion bash
        verl completion fish

        To have it in every shell, put into ~/.bashrc or ~/.zshrc (behind compinit) the line
          eval "$(verl completion bash)"        # or zsh
        and for fish write it into ~/.config/fish/completions/verl.fish.
        """
        if arguments.shell == ASK:
            for name, help in candidates(root(), arguments.line or [""]):
                print(f"{name}\t{help}" if help else name)
        elif arguments.shell in SCRIPTS:
            print(SCRIPTS[arguments.shell].read_text(encoding="utf-8"), end="")
        else:
            raise ConfigError("no completion for this shell", arguments.shell, f"one of {', '.join(SCRIPTS)}")

    completion = command(commands, "completion", run)
    completion.add_argument("shell", metavar="SHELL", help=", ".join(SCRIPTS))
    completion.add_argument("line", nargs=argparse.REMAINDER, help=argparse.SUPPRESS).required = False


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """What the last of the words, which may be empty, can become, each with a line of help or "".

    What ends in ``.``, ``/`` or ``=`` is only the beginning of a word.
    """
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
