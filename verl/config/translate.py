"""Keys and values of verl's: those that have no meaning here, those that are not built, typing errors; values as ours.

Keys without a meaning here are accepted and named once at start. Those that are not built are accepted at the values
that ask for nothing, and refused at any other: dropping them silently would train something else than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from pydantic import ValidationError

from verl.config.aliases import GLOBAL_MICRO_BATCH, MISNOMERS, OTHER_VALUES, alias_sections, canonical, read_table
from verl.config.interpolate import nested
from verl.config.keys import free_dict_of, free_dicts, leaves, sections
from verl.config.names import nearest
from verl.config.problems import Problem, as_written, raise_problems
from verl.config.schema import Config
from verl.config.settings import OPEN, Setting
from verl.errors import ConfigError


@dataclass(frozen=True)
class NoMeaning:
    """Keys that change nothing here (``*`` stands for anything), and why."""

    reason: str
    patterns: tuple[str, ...]


@dataclass(frozen=True)
class NotYet:
    """A key that asks for something not built yet, unless it has one of the harmless values."""

    pattern: str
    harmless: list[object]
    what: str
    fix: str = "remove it"


_TABLE = read_table("foreign.json")
NO_MEANING = [NoMeaning(reason, tuple(patterns)) for reason, patterns in _TABLE["no_meaning"].items()]
NOT_YET = [NotYet(pattern, **row) for pattern, row in _TABLE["not_yet"].items()]


def _fits(key: str, pattern: str) -> bool:
    # "x.*" also stands for x itself, given whole (x: {} or x: null).
    return fnmatchcase(key, pattern) or (pattern.endswith(".*") and fnmatchcase(key, pattern[:-2]))


def no_meaning(key: str) -> NoMeaning | None:
    """The row of the first table that covers a key."""
    return next((row for row in NO_MEANING if any(_fits(key, pattern) for pattern in row.patterns)), None)


def not_yet(key: str) -> NotYet | None:
    """The row of the second table that covers a key."""
    return next((row for row in NOT_YET if _fits(key, row.pattern)), None)


def is_harmless(row: NotYet, value: object) -> bool:
    """Whether a value asks for nothing; words are compared without case, so that "False" and "null" count."""
    words = {str(harmless).lower() for harmless in row.harmless} | ({"null"} if None in row.harmless else set())
    return str(value).lower() in words


def folded(keys: Iterable[str]) -> list[str]:
    """Keys without meaning in few words: a family by its name and number, keys of one section in braces."""
    families: dict[str, list[str]] = {}
    for key in keys:
        families.setdefault(_family(key), []).append(key)
    alone: dict[str, list[str]] = {}
    named = []
    for family, members in families.items():
        if family and len(members) > 1:
            named.append(f"{family}.* ({len(members)} keys)")
            continue
        for key in members:
            section, _, name = key.rpartition(".")
            alone.setdefault(section, []).append(name)
    return named + [
        (f"{section}.{{{', '.join(names)}}}" if len(names) > 1 else f"{section}.{names[0]}").lstrip(".")
        for section, names in alone.items()
    ]


def _family(key: str) -> str:
    """The shortest name ``x`` with a row for ``x.*`` that ``key`` lies in, such as ``actor.megatron``; else empty."""
    parts = key.split(".")
    names = [".".join(parts[:end]) for end in range(1, len(parts))]
    families = [pattern for pattern in _patterns() if pattern.endswith(".*")]
    return next((name for name in names if any(fnmatchcase(name, pattern[:-2]) for pattern in families)), "")


@cache
def _patterns() -> tuple[str, ...]:
    return (*(row.pattern for row in NOT_YET), *(pattern for row in NO_MEANING for pattern in row.patterns))


@cache
def exact_names() -> frozenset[str]:
    """The keys of both tables that stand there in full."""
    return frozenset(pattern for pattern in _patterns() if "*" not in pattern)


def foreign_keys(section: str) -> list[tuple[str, str]]:
    """The rows of both tables that lie in a section: pattern, and what is said about it."""
    rows = [(row.pattern, f"not built: {row.what}") for row in NOT_YET]
    rows += [(pattern, row.reason) for row in NO_MEANING for pattern in row.patterns]
    return [(pattern, said) for pattern, said in rows if pattern.startswith(section + ".")]


@cache
def foreign_sections() -> frozenset[str]:
    """Names that hold other keys only in these tables, such as ``algorithm.filter_groups``."""
    found: set[str] = set()
    for pattern in _patterns():
        parts = pattern.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return frozenset(name for name in found if "*" not in name)


def sort_out(settings: Mapping[str, Setting]) -> tuple[dict[str, Setting], list[str]]:
    """Our own settings, and a notice for every family of verl's keys that has no meaning here. Raises ConfigError:
    unknown keys (each with the nearest that exists), sections given a value, required values left open (???), and
    features that are not supported yet."""
    own: dict[str, Setting] = {}
    ignored: dict[str, list[str]] = {}
    problems: dict[str, Problem] = {}
    for key, setting in settings.items():
        if key in leaves() or free_dict_of(key) or key in GLOBAL_MICRO_BATCH:
            own[key] = setting
            if setting.value == OPEN:
                fix = f"set {setting.spelled}=... on the command line"
                problems[key] = Problem(f"{setting.spelled} is left open ({OPEN})", OPEN, fix)
        elif key == _FP16 and str(setting.value).lower() == "true":
            own["model.dtype"] = replace(setting, key="model.dtype", value="float16")
            given = settings.get("model.dtype", own["model.dtype"])
            if given.value not in _FLOAT16:
                fix = f"remove {setting.spelled}, or set {given.spelled}=float16"
                what = f"{setting.spelled} and {given.spelled} ask for different compute types"
                problems[key] = Problem(what, f"{setting.value} and {given.value}", fix)
        elif (key in sections() or key in alias_sections()) and no_meaning(key) is None:
            if setting.value not in (None, {}):
                example = next((leaf for leaf in leaves() if leaf.startswith(key + ".")), f"{key}.key")
                what = f"{setting.spelled} is a section of keys and takes no value itself ({setting.place})"
                problems[key] = Problem(what, setting.value, f"set the keys in it, for example {example}")
        elif (row := not_yet(key)) is not None and not is_harmless(row, setting.value):
            problems[key] = Problem(f"{setting.spelled}: {row.what}", setting.value, row.fix)
        elif (nothing := no_meaning(key)) is not None or row is not None:
            reason = nothing.reason if nothing else "this is how it works without the key"
            ignored.setdefault(reason, []).append(setting.spelled.removeprefix("actor_rollout_ref."))
        elif key not in foreign_sections() or setting.value not in (None, {}):
            shown, fix = unknown(setting.spelled, key)
            what, value = f"unknown key {shown} ({setting.place})", f"{setting.spelled}={as_written(setting.value)}"
            problems.setdefault(what, Problem(what, value, fix))
    raise_problems(list(problems.values()))
    return own, _without_meaning(ignored)


_FP16, _FLOAT16 = "training.fp16.enabled", ("float16", "fp16", "half", "torch.float16")


def _without_meaning(ignored: Mapping[str, list[str]]) -> list[str]:
    """One notice that names every key without meaning, by reason; families of keys by their name alone."""
    lines = [f"{reason}: {', '.join(folded(keys))}" for reason, keys in ignored.items()]
    if len(lines) < 2:
        return [f"no meaning here: {', '.join(folded(keys))} ({reason})" for reason, keys in ignored.items()]
    count = sum(map(len, ignored.values()))
    return ["\n  ".join([f"{count} keys have no meaning here (verl config explain KEY tells of each):", *lines])]


def unknown(spelled: str, key: str) -> tuple[str, str]:
    """The part of the key that does not exist, as it was spelled, and what to do about it. A misspelled section is
    named alone, so that all settings in it are one problem. ``spelled``: the key as the user wrote it. ``key``: its
    canonical name."""
    if no_meaning(key) or not_yet(key):
        return spelled, f"it is a key of verl's: verl config explain {spelled} says more"
    parts = key.split(".")
    known_sections = sections().keys() | alias_sections() | foreign_sections()
    ends = range(1, len(parts) + 1)
    depth = next((end for end in ends if ".".join(parts[:end]) not in known_sections), len(parts))
    wrong, rest = ".".join(parts[:depth]), len(parts) - depth
    # A key below a leaf (actor.clip_ratio.low) is wrong as a whole: the leaf itself exists.
    if wrong in leaves():
        wrong, rest = key, 0
    shown = ".".join(spelled.split(".")[: -rest or None])
    groups = [*sections(), *alias_sections(), *free_dicts()]
    misnomers = {name: key for name, key in MISNOMERS.items() if key in leaves()}
    found = nearest(wrong, groups if rest else [*leaves(), *sections(), *misnomers, *exact_names()], cutoff=0.5)
    if rest and (whole := canonical(".".join([found or "", *parts[depth:]]))) in leaves() | sections():
        found = whole
    if found is None:
        return shown, "remove it, or look for its name: verl config explain lists the sections and their keys"
    foreign = " (which has no meaning here)" if found in exact_names() else ""
    return shown, f"did you mean {MISNOMERS.get(found, found)}?{foreign}"


def translate(settings: Mapping[str, Setting], values: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Values of verl's kept keys as ours: names of engines and loggers, and micro-batch sizes of all ranks together.
    Raises ConfigError: a global micro-batch size does not divide over the ranks, or their number is not known."""
    values = dict(values)
    notices = [*_renamed(values), *_loggers(values)]
    problems = []
    for old, new in GLOBAL_MICRO_BATCH.items():
        size = values.pop(old, None)
        if size is None:
            continue
        spelled, ranks = settings[old].spelled, _ranks(values, _ROLES[new.partition(".")[0]])
        complaint = _global_micro_problem(spelled, new, size, ranks, values.get(new))
        if complaint is not None or ranks is None:
            problems += [complaint] if complaint else []
            continue
        values[new] = int(size) // ranks
        notices.append(
            f"{spelled}={size} counts the responses of all {ranks} rank(s) together: "
            f"read as {new}={values[new]} responses on each; set that key instead"
        )
    raise_problems(problems)
    return values, notices


def _renamed(values: dict[str, Any]) -> Iterator[str]:
    for key, own, why in (
        ("rollout.name", "embedded", "the embedded engine takes its place, the only one that is built in"),
        ("actor.strategy", "fsdp2", "fsdp2 takes its place, which shards weights over the ranks as well"),
    ):
        given = values.get(key)
        if isinstance(given, str) and given.lower() in OTHER_VALUES[key]:
            values[key] = own
            yield f"{key}={given}: {why}"


def _loggers(values: dict[str, Any]) -> Iterator[str]:
    given = values.get("trainer.logger")
    named = [given] if isinstance(given, str) else given if isinstance(given, list) else []
    if aside := [name for name in named if name in OTHER_VALUES["trainer.logger"]]:
        values["trainer.logger"] = [name for name in named if name not in aside] or ["console"]
        yield (
            f"trainer.logger: {', '.join(aside)} set aside; metrics stay in the run folder: metrics.jsonl, report.html "
            "and, with trainer.logger=[console, tensorboard], TensorBoard's events"
        )


def _global_micro_problem(spelled: str, new: str, size: Any, ranks: int | None, own: Any) -> Problem | None:
    fix, whole = f"set {new} (responses on one rank)", _whole_number(size)
    counts = f"{spelled} counts the responses of all ranks together, and"
    if own is not None:
        what = f"{spelled} (responses, all ranks) and {new} (responses on one rank) are both given"
        return Problem(what, f"{size} and {own}", f"keep {new}")
    if whole is None or whole < 1:
        what = f"{spelled} must be a whole number of at least 1 (responses, all ranks together)"
        return Problem(what, size, fix)
    if ranks is None:
        what = f"{counts} the number of ranks is not known here"
        return Problem(what, size, f"{fix}, or trainer.n_gpus_per_node")
    if whole % ranks:
        what, value = f"{counts} does not divide over the ranks", f"{whole} responses / {ranks} ranks"
        return Problem(what, value, f"{fix}, or a multiple of {ranks}")
    return None


_ROLES = {"actor": "actor", "critic": "critic", "ref": "reference"}
_ABOUT_RANKS = ("cluster.", "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.device", "actor.world_size")


def _ranks(values: Mapping[str, Any], role: str) -> int | None:
    """Ranks of a role by the keys that say something about them; None for nonsense, which is reported later."""
    said = {key: value for key, value in values.items() if key.startswith(_ABOUT_RANKS) and key != "cluster.backend"}
    try:
        return Config.model_validate(nested(said | {"data.train_files": ["-"], "model.path": "-"})).ranks_of(role)
    except (ValidationError, ConfigError):
        return None


def _whole_number(value: Any) -> int | None:
    try:
        return int(value) if not isinstance(value, bool) and int(value) == float(value) else None
    except (TypeError, ValueError, OverflowError):
        return None
