"""The command line's parser: argparse with errors in our style, types of arguments, and what every command tells."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from verl.errors import ConfigError
from verl.json_lines import json_line
from verl.run_dir import RunDir, write_atomic

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


Commands = argparse._SubParsersAction  # what ``add_subparsers`` returns


class Parser(argparse.ArgumentParser):
    """Wrong use is a :class:`ConfigError` (what, value, fix) like every other error; nothing is printed here.
    ``late_epilog``: text behind the epilog that is made when help is asked for, not before."""

    def __init__(self, late_epilog: Callable[[], str] | None = None, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)
        self._late_epilog = late_epilog

    def format_help(self) -> str:
        if self._late_epilog is not None:
            self.epilog, self._late_epilog = f"{self.epilog or ''}\n{self._late_epilog()}", None
        return super().format_help()

    def group_commands(self, commands: Commands, groups: Mapping[str, Sequence[str]]) -> None:
        """Makes the help list the commands under titles, in the order given. Raises ValueError: a command is in no
        group, or a group names none."""
        lines = {action.dest: action for action in commands._choices_actions}
        if sorted(lines) != sorted(name for names in groups.values() for name in names):
            raise ValueError(f"groups do not hold each command once: {', '.join(lines)}")
        self.usage = self.format_usage().removeprefix("usage: ").strip()  # taken before the commands are hidden
        commands.help = argparse.SUPPRESS
        commands._choices_actions.clear()
        for title, names in groups.items():
            # Only for the help: actions of this group, which the parser itself does not know.
            self.add_argument_group(title)._group_actions.extend(lines[name] for name in names)

    def error(self, message: str) -> NoReturn:
        wanted = [action for action in self._actions if not action.option_strings or action.required]
        groups = [group for group in self._mutually_exclusive_groups if group.required]
        formatter = self._get_formatter()
        formatter.add_usage(None, [*wanted, *(a for group in groups for a in group._group_actions)], groups)
        usage = " ".join(formatter.format_help().split()).replace(self.prog, f"{self.prog} [options]", 1)
        lines = (self.epilog or "").splitlines()
        # Without what stands beside it in a column of its own.
        examples = [re.split(" {3,}", line.strip())[0] for line in lines if line.startswith("  verl ")]
        example = f"; for example: {examples[0]}" if examples else ""
        raise ConfigError(f"{self.prog}: {message}", None, f"{usage}{example} (options: {self.prog} --help)")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, rest = super().parse_known_args(args, namespace)
        # Here and not at the end: this parser knows the options of its command.
        for word in rest:
            if word.startswith("-") and word != "-":
                raise self._unknown_option(word)
        return found, rest

    def _unknown_option(self, word: str) -> ConfigError:
        from verl.config.names import did_you_mean

        name, equals, _ = word.partition("=")
        if equals and "." in name:
            fix = f"settings are written without dashes: {word.lstrip('-')}"
        else:
            options = [option for option in self._option_string_actions if option.startswith("--")]
            fix = f"{did_you_mean(name, options)}options: {', '.join(options)} (see {self.prog} --help)"
        return ConfigError(f"{self.prog} has no such option", word, fix)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        from verl.config.names import did_you_mean

        choices = [str(choice) for choice in action.choices]
        is_command = isinstance(action, argparse._SubParsersAction)
        name = action.option_strings[-1] if action.option_strings else action.metavar or action.dest
        what = f"{self.prog} has no such command" if is_command else f"{self.prog}: no such {name}"
        kind = "commands" if is_command else "possible"
        raise ConfigError(what, value, f"{did_you_mean(str(value), choices)}{kind}: {', '.join(choices)}")


def common() -> argparse.ArgumentParser:
    """Options of every command: ``parents=[common()]``."""
    parser = argparse.ArgumentParser(add_help=False)
    # Suppressed, so that a command without it leaves what stood before the command: verl --debug train ...
    parser.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help="show the traceback of errors")
    return parser


def command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], int | None], json: str = "", **late: Any
) -> argparse.ArgumentParser:
    """A command that does something. ``run``: does it. Its docstring is the help: what it does, then examples (lines
    that begin with ``verl``) and what else there is to say. ``json``: the help of --json, where it has one. ``late``:
    ``late_epilog``, see :class:`Parser`."""
    about, _, more = (inspect.getdoc(run) or name).partition("\n\n")
    more = re.sub("^verl ", "  verl ", more, flags=re.MULTILINE)
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        parents=[common()],
        help=f"{about[0].lower()}{about[1:].rstrip('.')}",
        description=about,
        epilog=f"examples:\n{more}" if more.startswith("  verl ") else more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        **late,
    )
    if json:
        parser.add_argument("--json", action="store_true", help=json)
    parser.set_defaults(command=run)
    return parser


def group(commands: Commands, name: str, help: str) -> Commands:
    """A command that holds others, such as ``verl data``."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")

    def needs_a_command(arguments: argparse.Namespace) -> NoReturn:
        raise ConfigError(f"verl {name} needs a command", None, f"one of {', '.join(inner.choices)}")

    parser.set_defaults(command=needs_a_command)
    inner = parser.add_subparsers(title="commands", metavar="COMMAND")
    return inner


def a_run(name: str) -> RunDir:
    """A run, by its name in runs/ or by a path."""
    from verl.tracking.runs import find_run

    return find_run(name)


def print_json(value: Any) -> None:
    print(json_line(value), flush=True)


def tell(notes: Iterable[str]) -> None:
    """Notes about what was asked for, on standard error."""
    for note in notes:
        print(f"note: {note}", file=sys.stderr)


def screen() -> Console:
    """Where tables and styled text are printed: words as they are, long lines left to the terminal."""
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, markup=False)


def table(*head: str, title: str, **more: Any) -> Table:
    """A table whose columns stand to the right, but for the first."""
    from rich.table import Table

    made = Table(*head, title=title, title_justify="left", **more)
    for column in made.columns[1:]:
        column.justify, column.no_wrap = "right", True
    return made


def histogram(counts: Sequence[tuple[str, int]]) -> Iterator[str]:
    """A line for each name, with its number and a bar of it."""
    wide, top = max(len(name) for name, _ in counts), max(count for _, count in counts)
    for name, count in counts:
        yield f"  {name:>{wide}} {count:>8} {'#' * -(-count * 40 // top)}".rstrip()


def write_page(text: str, out: Path | None) -> None:
    """Into the file, whose name is printed, or to standard output."""
    if out is None:
        print(text, end="")
    else:
        write_atomic(out, text)
        print(out)


def settings(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """The configuration file among a command's words, if there is one, and the ``key=value`` settings. Raises
    ConfigError: a word is blank, or more than one is neither."""
    if any(not word.strip() for word in words):
        fix = "a line of the script probably ends in a backslash and a space: remove the space"
        raise ConfigError("an argument is blank", None, fix)
    files = [word for word in words if "=" not in word and not word.startswith("~")]
    if len(files) > 1:
        odd = next((word for word in files if not word.endswith((".yaml", ".yml"))), None)
        if odd is not None:
            raise ConfigError("a setting needs the form key=value", odd, f"write it as {odd}=VALUE, or remove it")
        raise ConfigError("more than one configuration file is given", ", ".join(files), "keep one of them")
    return (files[0] if files else None), [word for word in words if word not in files]


def number(least: float = -inf, most: float = inf, above: bool = False, kind: type = float) -> Callable[[str], Any]:
    """The type of an argument: a number; where ``least`` is given a finite one from (or above) it up to ``most``."""
    words = f"{'above' if above else 'at least'} {least:g}" + ("" if most == inf else f" and at most {most:g}")

    def read(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a {'whole ' * (kind is int)}number") from None
        fits = isfinite(value) and (least < value if above else least <= value) and value <= most
        if least > -inf and not fits:
            raise argparse.ArgumentTypeError(f"{text} is not {words}")
        return value

    return read


positive, natural = number(1, kind=int), number(0, kind=int)
above_zero = number(0, above=True)


SECONDS_BETWEEN_LINES = 30.0


@contextmanager
def progress(total: int, what: str, plain: bool = False) -> Iterator[Callable[[int], None]]:
    """Gives a function that is told how many of ``total`` are done. No terminal, or ``plain``: lines, and none at all
    for what takes less than half a minute."""
    if plain or not sys.stderr.isatty():
        yield _lines(total, what)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def _lines(total: int, what: str) -> Callable[[int], None]:
    from verl.tracking.console import duration

    start = last = time.monotonic()

    def tell(done: int) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SECONDS_BETWEEN_LINES and done < total:
            last = now
            left = (now - start) / done * (total - done)
            print(f"{what}: {done} of {total}, {duration(left)} left", file=sys.stderr, flush=True)

    return tell
