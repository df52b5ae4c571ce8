"""Configurations in words: what a key means, where each value comes from, what differs between two."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl.config.aliases import GLOBAL_MICRO_BATCH, MISNOMERS, alias_sections, aliases_in, canonical
from verl.config.base import Section
from verl.config.interpolate import escape
from verl.config.keys import defaults, facts, free_dict_of, leaves, one_line, sections, using, visible
from verl.config.load import LoadedConfig
from verl.config.schema_supervised import COMMANDS
from verl.config.settings import OPEN
from verl.config.translate import foreign_keys, foreign_sections, no_meaning, not_yet, unknown
from verl.errors import ConfigError
from verl.json_lines import json_value

_WIDTH = 100


def explain(word: str) -> str:
    """The answer to one key, section, alias or key of verl's, as lines. A last part alone (``lr``) stands for every key
    that ends with it. Raises ConfigError: nothing of that name, with the nearest there is."""
    spelled = word.partition("=")[0].strip().lstrip("+").rstrip(".")
    key = canonical(spelled)
    if (own := _own(key)) is not None:
        return "\n".join([*_other_spelling(spelled, own), _known(own)])
    if names := named(spelled):
        return "\n\n".join([f"{spelled} alone is no key; it may stand for:", *map(_known, names)])
    for command, schema in COMMANDS.items():
        with using(schema):
            if (own := _own(key)) is not None:
                return f"a key of {command}:\n\n{_known(own)}"
    foreign = "\n".join(_foreign(spelled, key))
    if foreign:
        return foreign
    if key in MISNOMERS:
        return f"{spelled} is no key; what is meant may be:\n\n{_known(MISNOMERS[key])}"
    shown, fix = unknown(spelled, key)
    raise ConfigError(f"unknown key {shown}", None if shown == spelled else spelled, fix)


def in_parts(word: str) -> dict[str, Any]:
    """For programs: the same ``text``, and the facts of every key that the word stands for; of all without one."""
    text, names = (explain(word), named(word.partition("=")[0])) if word else (overview(), [""])
    keys = [key for key in leaves() if any(name in ("", key) or key.startswith(f"{name}.") for name in names)]
    return {"asked": word, "text": text, "keys": [asdict(facts(key)) for key in keys]}


def named(spelled: str) -> list[str]:
    """Our keys and sections that a name stands for: in any spelling, or by their last parts alone."""
    key = canonical(spelled)
    if (own := _own(key)) is not None:
        return [own]
    ends = [name for name in [*leaves(), *sections()] if name.endswith("." + key)]
    return [name for name in ends if not any(name.startswith(other + ".") for other in ends)]


def _own(key: str) -> str | None:
    found = GLOBAL_MICRO_BATCH.get(key) or free_dict_of(key) or key
    return found if found in leaves() or found in sections() else None


def overview() -> str:
    return "\n".join([*_table((key, _about(key)) for key in sections()), "", "verl config explain KEY says more."])


def _other_spelling(spelled: str, key: str) -> Iterator[str]:
    canonical_name = canonical(spelled)
    if canonical_name in GLOBAL_MICRO_BATCH:
        yield from _wrapped(
            f"{spelled} is an older key that counts the responses of all ranks together: it is divided by the number "
            f"of ranks and read as {key}.\n"
        )
        yield ""
    elif key != canonical_name:
        yield f"{spelled} is an entry of the mapping {key}.\n"
    elif spelled != key:
        yield f"{spelled} is another spelling of {key}.\n"


def _known(key: str) -> str:
    if key in sections():
        inside = [name for name in [*leaves(), *sections()] if name.rpartition(".")[0] == key]
        about = _wrapped(f"{key}: {_about(key)}", "", "  ")
        nothing = no_meaning(key)
        verl = [f"verl's key of this name has no meaning here: {nothing.reason}."] if nothing else []
        own = {name: _about(name) for name in inside if name in sections()}
        own |= {name: f"({(fact := facts(name)).default}) {fact.meaning}" for name in inside if name not in own}
        return "\n".join([*about, *_table((name, own[name]) for name in inside), *verl])
    fact = facts(key)
    rows = {"takes": fact.takes, "unit": fact.unit, "default": fact.default, "in verl": fact.verl}
    rows |= {"acts in": fact.acts_in, "also": ", ".join(fact.spellings)}
    lines = [key, *_wrapped(fact.meaning, "  ")]
    for name, text in rows.items():
        lines += _wrapped(text, f"  {name:8} ", " " * 11) if text else []
    return "\n".join(lines)


def _about(key: str) -> str:
    return sections()[key].description or ""


def _foreign(spelled: str, key: str) -> Iterator[str]:
    """What is said about a key, or a section of keys, of verl's that is none here."""
    later, nothing = not_yet(key), no_meaning(key)
    if later is not None:
        accepted = ", ".join(one_line(value) for value in later.harmless)
        yield f"{spelled} is a key of verl's that is not built here: {later.what}."
        yield f"  accepted {accepted or 'nothing'}"
        yield from _wrapped(later.fix, "  instead  ", " " * 11)
    elif nothing is not None:
        yield f"{spelled} is a key of verl's that has no meaning here; it is accepted and changes nothing."
        yield from _wrapped(f"{nothing.reason}.", "  why      ", " " * 11)
    elif key in foreign_sections() | alias_sections():
        yield f"{spelled} holds keys of verl's:"
        same = ((old, f"another spelling of {new}") for old, new in aliases_in(key).items())
        yield from _table([*same, *foreign_keys(key)])


def _table(rows: Iterable[tuple[str, str]]) -> Iterator[str]:
    rows = list(rows)
    width = min(44, max(len(name) for name, _ in rows))
    for name, text in rows:
        yield from _wrapped(text, f"  {name:{width}}  ", " " * (width + 4))


def _wrapped(text: str, first: str = "", later: str | None = None) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=first,
        subsequent_indent=first if later is None else later,
        break_long_words=False,
        break_on_hyphens=False,
    )


_WIDEST = 56
"""Columns that a line may take before its origin; longer lines push their origin aside."""


def values_of(config: Section) -> dict[str, Any]:
    """The value of every key, as JSON knows it, in the schema's order."""
    tree, found = config.model_dump(mode="json"), {}
    for key in leaves():
        place = tree
        for name in key.split("."):
            place = place[name]
        found[key] = place
    return found


def select(loaded: LoadedConfig, only: Sequence[str] = (), changed: bool = False) -> list[str]:
    """Keys to be shown, in the schema's order. ``only``: keys and sections, in any spelling; empty for all.
    ``changed``: leave out what has its default value."""
    wanted, standard, values = [canonical(name) for name in only], json_value(defaults()), values_of(loaded.config)
    return [
        key
        for key, value in values.items()
        if (not wanted or any(key == name or key.startswith(name + ".") for name in wanted))
        and not (changed and key in standard and standard[key] == value)
    ]


def tree(loaded: LoadedConfig, keys: Iterable[str], with_origins: bool = True) -> list[tuple[str, str]]:
    """Lines of YAML, each with its origin as a comment (empty for sections, and where none is wanted)."""
    values = values_of(loaded.config)
    texts = {key: OPEN if key in loaded.missing else one_line(escape(values[key])) for key in keys}
    origins = {key: f"# {visible(str(origin))}" for key, origin in loaded.origins.items() if with_origins}
    origins |= dict.fromkeys(loaded.missing if with_origins else (), "# required, not given")
    lines = outline(texts, origins)
    width = max((len(line) for line, origin in lines if origin and len(line) <= _WIDEST), default=0)
    return [(f"{line:{width}}  " if origin else line, origin) for line, origin in lines]


def outline(texts: Mapping[str, str], comments: Mapping[str, str]) -> list[tuple[str, str]]:
    """Lines of YAML of dotted keys and their values, each with its comment, if it has one."""
    lines: dict[str, tuple[str, str]] = {}
    for key, text in texts.items():
        *parents, name = key.split(".")
        for depth, parent in enumerate(parents):
            lines.setdefault(".".join(parents[: depth + 1]), (f"{'  ' * depth}{parent}:", ""))
        lines[key] = (f"{'  ' * len(parents)}{name}: {text}", comments.get(key, ""))
    return list(lines.values())


def as_json(loaded: LoadedConfig, keys: Iterable[str]) -> dict[str, Any]:
    """``{key: {"value", "default", "origin": {"kind", "place", "written"}}}``; null where there is no value."""
    values, standard = values_of(loaded.config), json_value(defaults())
    return {
        key: {
            "value": None if key in loaded.missing else values[key],
            "default": standard.get(key),
            "origin": asdict(loaded.origins[key]),
        }
        for key in keys
    }


def difference(one: Section, other: Section) -> dict[str, tuple[Any, Any]]:
    theirs = values_of(other)
    return {key: (value, theirs[key]) for key, value in values_of(one).items() if value != theirs[key]}
