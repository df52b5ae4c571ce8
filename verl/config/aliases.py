"""Other spellings of our keys that users have in their scripts, and words that people write for them.

The tables stand in spellings.yaml, each with what it is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def read_table(name: str) -> dict[str, Any]:
    """A table beside this file."""
    text = Path(__file__).with_name(name).read_text(encoding="utf-8")
    table: dict[str, Any] = yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return table


_TABLES = read_table("spellings.yaml")
PREFIXES: dict[str, str] = _TABLES["prefixes"]
ALIASES: dict[str, str] = _TABLES["aliases"]
GLOBAL_MICRO_BATCH: dict[str, str] = _TABLES["global_micro_batch"]
MISNOMERS: dict[str, str] = _TABLES["misnomers"]
VERL_DEFAULTS: dict[str, str] = _TABLES["verl_defaults"]
OTHER_ENGINES: list[str] = _TABLES["other_engines"]
OTHER_STRATEGIES: list[str] = _TABLES["other_strategies"]
OTHER_LOGGERS: list[str] = _TABLES["other_loggers"]


def canonical(key: str) -> str:
    """The name under which a key of any accepted spelling is looked up; unknown keys come back as they are."""
    key = key.removeprefix("actor_rollout_ref.")
    for old, new in PREFIXES.items():
        if key == old or key.startswith(old + "."):
            return new + key[len(old) :]
    return ALIASES.get(key, key)


def spellings(key: str) -> list[str]:
    """Every other name under which a key of ours is accepted."""
    longer = [f"actor_rollout_ref.{key}"] if key.partition(".")[0] in ("actor", "rollout", "ref", "model") else []
    prefixed = [old + key[len(new) :] for old, new in PREFIXES.items() if key == new or key.startswith(new + ".")]
    return longer + prefixed + [old for old, new in (ALIASES | GLOBAL_MICRO_BATCH).items() if new == key]


def aliases_in(section: str) -> dict[str, str]:
    """The other spellings that begin with a name, each with the key that it stands for."""
    found = {old: new for old, new in (ALIASES | PREFIXES).items() if old.startswith(section + ".")}
    if section == "actor_rollout_ref":
        found |= {f"{section}.{name}": name for name in ("model", "actor", "rollout", "ref")}
    return found


def alias_sections() -> set[str]:
    """Names that hold other keys only in an accepted spelling, such as ``training.optimizer``."""
    found = {"actor_rollout_ref"}
    for key in [*ALIASES, *PREFIXES]:
        parts = key.split(".")
        found.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return found
