"""The reference of all keys as Markdown, made from the schema: docs/configuration.md. reference.md begins it."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

from verl.config.aliases import ALIASES, GLOBAL_MICRO_BATCH, PREFIXES, VERL_DEFAULTS
from verl.config.base import Section
from verl.config.keys import Facts, facts, leaves, one_line, sections, using
from verl.config.schema_supervised import COMMANDS, SftConfig
from verl.config.settings import presets
from verl.config.translate import NO_MEANING, NOT_YET


def reference() -> str:
    """The whole page."""
    tops = [key for key in sections() if "." not in key]
    ordered = [key for top in tops for key in sections() if key == top or key.startswith(top + ".")]
    overlays = ((_code(name), about) for name, about in presets().items())
    return "\n".join(
        [
            Path(__file__).with_suffix(".md").read_text(encoding="utf-8"),
            "## Presets\n",
            _table(("preset", "what it is"), overlays),
            *map(_section, ordered),
            *_supervised(),
            _other_spellings(),
            _other_defaults(),
            _foreign(),
        ]
    )


def _supervised() -> Iterator[str]:
    """The keys of supervised training, apart from the sections that it shares."""
    for command, schema in COMMANDS.items():
        about = " ".join((inspect.getdoc(schema) or "").split())
        if schema is SftConfig:
            about += (
                " Its sections are `data`, `model`, `optim`, `trainer` and `cluster`: `model` and `trainer` are those "
                "above, without `critic_warmup`, `log_val_generations`, `max_restarts` and `memory_save_freq` of "
                "`trainer`; the others have keys of their own."
            )
        yield f"## Keys of {command}\n\n{about}\n"
        with using(schema):
            own = ("data", "optim", "cluster") if schema is SftConfig else ("data",)
            yield from (_section(key, depth=3) for key in own)
        if schema is not SftConfig:
            yield "The other sections are those of `verl sft`.\n"


def _section(key: str, depth: int = 2) -> str:
    field = sections()[key]
    kind = field.annotation
    assert isinstance(kind, type) and issubclass(kind, Section)
    inside = [facts(name) for name in leaves() if name.rpartition(".")[0] == key]
    rows = ((_code(fact.key), _code(fact.default), _takes(fact), _meaning(fact, kind.acts_in)) for fact in inside)
    return "\n".join(
        [
            f"{'#' * (depth + ('.' in key))} {key}\n",
            f"{field.description} *{kind.acts_in}*\n",
            _table(("key", "default", "takes", "meaning"), rows),
        ]
    )


def _takes(fact: Facts) -> str:
    return f"{fact.takes} ({fact.unit})" if fact.unit not in (None, "plain number", "seed") else fact.takes


def _meaning(fact: Facts, usual: str) -> str:
    return fact.meaning if fact.acts_in == usual else f"{fact.meaning} *{fact.acts_in}*"


def _other_spellings() -> str:
    names: dict[str, list[str]] = {}
    for old, new in (PREFIXES | ALIASES | GLOBAL_MICRO_BATCH).items():
        names.setdefault(new, []).append(old)
    rows = ((_code(key), ", ".join(map(_code, also))) for key, also in names.items())
    return "\n".join(
        [
            "## Other spellings\n",
            "`actor_rollout_ref.` may stand before `actor`, `rollout`, `ref` and `model`, and these names for keys, or "
            f"for sections with all that is in them. {', '.join(map(_code, GLOBAL_MICRO_BATCH))} count the responses "
            "of all ranks and are divided by the ranks.\n",
            _table(("key", "also accepted"), rows),
        ]
    )


def _other_defaults() -> str:
    rows = ((_code(key), _code(facts(key).default), there) for key, there in VERL_DEFAULTS.items())
    return "## Where verl's default is another\n\n" + _table(("key", "here", "in verl"), rows)


def _foreign() -> str:
    nothing = ((", ".join(map(_code, row.patterns)), row.reason) for row in NO_MEANING)
    later = (
        (
            _code(row.pattern),
            ", ".join(_code(one_line(value)) for value in row.harmless) or "nothing",
            row.what,
            row.fix,
        )
        for row in NOT_YET
    )
    return "\n".join(
        [
            "## Keys of verl's without a meaning here\n",
            "Accepted, named once at start, and changing nothing. `*` stands for anything.\n",
            _table(("keys", "why"), nothing),
            "## Keys of verl's that are not built\n",
            "Accepted at the values that ask for nothing, refused at any other.\n",
            _table(("key", "accepted", "at any other value", "instead"), later),
        ]
    )


def _code(text: str) -> str:
    return f"`{text}`"


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)
