"""Other spellings of our keys that users have in their scripts, and words that people write for them.

The tables stand in spellings.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_table(name: str) -> dict[str, Any]:
    """A table beside this file. (JSON, which is read in a twentieth of YAML's time: it is part of every start.)"""
    table: dict[str, Any] = json.loads(Path(__file__).with_name(name).read_text(encoding="utf-8"))
    return table


_TABLES = read_table("spellings.json")

PREFIXES: dict[str, str] = _TABLES["prefixes"]
"""Beginnings of keys, longer ones first: the first that fits is taken. ``actor_rollout_ref.`` is one beside them."""
ALIASES: dict[str, str] = _TABLES["aliases"]
"""Whole keys. The flat ppo_micro_batch_size is of one rank; actor.ppo_micro_batch_size, an older key, of all ranks."""
GLOBAL_MICRO_BATCH: dict[str, str] = _TABLES["global_micro_batch"]
"""Older keys that count responses of all ranks together; divided by the ranks when the configuration is read."""
MISNOMERS: dict[str, str] = _TABLES["misnomers"]  # no keys, and the key that was probably meant: for error messages
VERL_DEFAULTS: dict[str, str] = _TABLES["verl_defaults"]  # where ours are others
OTHER_VALUES: dict[str, list[str]] = _TABLES["other_values"]  # that a key of ours has elsewhere


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
