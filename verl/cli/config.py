"""``verl config`` and ``verl metrics``: a configuration before anything runs; every key and every metric explained."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.cli.arguments import Commands, command, group, print_json, screen, tell, write_page
from verl.errors import ConfigError
from verl.json_lines import json_line

if TYPE_CHECKING:
    from verl.config import LoadedConfig


def add(commands: Commands) -> None:
    config = group(commands, "config", "look at a configuration, explain its keys")
    show = command(config, "show", _show, json="values, defaults and origins as JSON")
    words = "a YAML file, a run's folder or a preset; keys or sections to be shown alone; settings"
    show.add_argument("words", nargs="*", metavar="CONFIG | KEY | key=value", help=words)
    show.add_argument("--preset", action="append", default=[], metavar="NAME", help="under the file; may be repeated")
    show.add_argument("--changed", action="store_true", help="only what differs from the defaults")
    show.add_argument("--no-origins", action="store_true", help="the bare YAML")

    explain = command(config, "explain", _explain, json="the same as text, and the facts of each key, as JSON")
    explain.add_argument("key", nargs="*", metavar="KEY", help="a key or section in any spelling; none: all sections")

    diff = command(config, "diff", _diff, json="{key: [value in A, value in B]}")
    for name in ("A", "B"):
        diff.add_argument(name, help="a YAML file, a run's folder, or the name of a preset")

    reference = command(config, "reference", _reference)
    reference.add_argument("--out", type=Path, help="file to write (default: standard output)")

    metrics = group(commands, "metrics", "what the metrics of a run mean")
    meaning = command(metrics, "explain", _explain_metrics, json="as JSON")
    meaning.add_argument("name", nargs="+", metavar="NAME", help="as in metrics.jsonl")
    table = command(metrics, "reference", _metrics_reference, json="in place of the page, as JSON")
    table.add_argument("--out", type=Path, help="file to write (default: standard output)")


def _show(arguments: argparse.Namespace) -> None:
    """The resolved configuration with the origin of every value.

    Without CONFIG: the defaults. A value that is required and not given reads ???.
    The output is YAML; origins are comments in it. Notices go to standard error.

    verl config show examples/quickstart.yaml rollout.n=16
    verl config show runs/quickstart --changed
    verl config show actor.optim
    """
    from rich.text import Text

    from verl.config.explain import as_json, select, tree

    path, only, settings = _sorted(arguments.words)
    loaded = _named(path, settings, arguments.preset)
    keys = select(loaded, only, arguments.changed)
    if arguments.json:
        print_json(as_json(loaded, keys))
        return
    console = screen()
    for line, origin in tree(loaded, keys, not arguments.no_origins):
        console.print(Text(line).append(origin, "dim" if origin == "# default" else "cyan"))
    notes = [f"{key} is required and not given" for key in loaded.missing]
    notes += ["nothing differs from the defaults"] if not keys else []
    tell([*notes, *loaded.notices])


def _sorted(words: list[str]) -> tuple[str | None, list[str], list[str]]:
    """The configuration, the keys and the settings among the words of ``verl config show``. A word that names a key or
    a section is one, also where a file is called so (``./data`` names the folder). Raises ConfigError: a word is none
    of them."""
    from verl.config.explain import named
    from verl.config.translate import unknown

    settings = [word for word in words if "=" in word or word.startswith("~")]
    keys = {word: named(word) for word in words if word not in settings}
    files = [word for word, names in keys.items() if not names]
    for word in filter(_names_nothing, files):
        raise ConfigError("no file, run folder, preset, section or key of this name", word, unknown(word, word)[1])
    if len(files) > 1:
        raise ConfigError("one configuration is shown at a time", " and ".join(files), "remove one of them")
    return (files[0] if files else None), [name for names in keys.values() for name in names], settings


def _explain(arguments: argparse.Namespace) -> None:
    """Meaning, unit, default and spellings of keys.

    verl config explain actor.optim.lr
    """
    from verl.config.explain import explain, in_parts, overview

    if arguments.json:
        print_json([in_parts(word) for word in arguments.key or [""]])
        return
    print("\n\n".join(map(explain, arguments.key)) if arguments.key else overview())


def _diff(arguments: argparse.Namespace) -> None:
    """What differs between two configurations.

    verl config diff runs/first my.yaml

    The exit code is 0 whether they differ or not.
    """
    from verl.config.explain import difference
    from verl.config.keys import one_line

    one, other = _named(arguments.A), _named(arguments.B)
    found = difference(one.config, other.config)
    if arguments.json:
        print_json(found)
        return
    if not found:
        print(f"no difference: every key has the same value in {arguments.A} and {arguments.B}")
        return

    def shown(side: LoadedConfig, key: str, value: Any) -> str:
        return "(required)" if key in side.missing else one_line(value)

    values = ((key, shown(one, key, ours), shown(other, key, theirs)) for key, (ours, theirs) in found.items())
    rows = [("", arguments.A, arguments.B), *values]
    key_width, value_width = (min(44, max(len(row[column]) for row in rows)) for column in (0, 1))
    for key, ours, theirs in rows:
        print(f"{key:{key_width}}  {ours:{value_width}}  {theirs}")


def _names_nothing(word: str) -> bool:
    """Whether a word is neither a preset nor anything that looks like a path."""
    from verl.config.settings import presets

    return (
        word not in presets()
        and not Path(word).exists()
        and "/" not in word
        and Path(word).suffix not in (".yaml", ".yml")
    )


def _named(name: str | None, settings: Sequence[str] = (), under: Sequence[str] = ()) -> LoadedConfig:
    """The configuration that a preset, a file or a run's folder stands for."""
    from verl.config import load_config
    from verl.config.names import did_you_mean
    from verl.config.settings import presets

    if name is not None and _names_nothing(name):
        fix = f"{did_you_mean(name, presets())}presets: {', '.join(presets())}"
        raise ConfigError("no file, run folder or preset of this name", name, fix)
    if name in presets():
        return load_config(None, settings, [*under, name], allow_missing=True)
    return load_config(name, settings, under, allow_missing=True)


def _reference(arguments: argparse.Namespace) -> None:
    """Every key on one page, as Markdown.

    verl config reference --out configuration.md
    """
    from verl.config.reference import reference

    write_page(reference(), arguments.out)


def _explain_metrics(arguments: argparse.Namespace) -> None:
    """Meaning, formula, healthy range, what to do.

    verl metrics explain actor/grad_norm
    """
    from verl.config.names import did_you_mean
    from verl.tracking.metric_table import names, row_of

    found = []
    for name in arguments.name:
        row = row_of(name)
        if row is None:
            raise ConfigError("no such metric", name, f"{did_you_mean(name, names())}verl metrics reference lists all")
        found.append(row._asdict() | {"name": name})
    if arguments.json:
        print_json(found)
        return
    for facts in found:
        print(f"{facts['name']}\n  {facts['meaning']}")
        for label in ("formula", "unit", "healthy", "otherwise"):
            if facts[label]:
                print(f"  {label + ':':<10} {facts[label]}")


def _metrics_reference(arguments: argparse.Namespace) -> None:
    """Every metric on one page, as Markdown.

    verl metrics reference --out metrics.md
    """
    from verl.tracking.metric_table import PAGE, TABLE

    tables = {title: [row._asdict() for row in rows] for title, rows in TABLE.items()}
    write_page(json_line(tables) + "\n" if arguments.json else PAGE.read_text(encoding="utf-8"), arguments.out)
