"""Where each value of a configuration comes from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from verl.config.aliases import GLOBAL_MICRO_BATCH
from verl.config.keys import free_dict_of, leaves
from verl.config.overrides import Setting
from verl.config.problems import as_written


@dataclass(frozen=True)
class Origin:
    """Where one value comes from."""

    kind: str  # as of Source, in order of precedence
    place: str  # the same with its name: ``preset grpo``, ``run.yaml:12``, ``command line``
    written: str = ""
    """The setting as the user wrote it where that is another spelling of the key, or another value (a reference, or a
    value of verl's that was turned into ours); else empty."""

    def __str__(self) -> str:
        return f"{self.place}, as {self.written}" if self.written else self.place


DEFAULT = Origin("default", "default")


def overlay(lower: Mapping[str, Setting], upper: Mapping[str, Setting]) -> dict[str, Setting]:
    """Two layers of settings as one; the upper one wins, also over the other key for the same size."""
    same = {old: new for pair in GLOBAL_MICRO_BATCH.items() for old, new in (pair, pair[::-1])}
    gone = {same.get(key) for key in upper} | upper.keys()
    # A free mapping given whole replaces what a lower layer put into it key by key.
    kept = {key: setting for key, setting in lower.items() if key not in gone and free_dict_of(key) not in upper}
    return kept | dict(upper)


def origins_of(settings: Iterable[Setting], values: Mapping[str, Any]) -> dict[str, Origin]:
    """The origin of every key of the schema.

    Args:
        settings: what the user gave, lower layers first.
        values: what it came to, by key.
    """
    found = dict.fromkeys(leaves(), DEFAULT)
    for setting in settings:
        key = GLOBAL_MICRO_BATCH.get(setting.key, setting.key)
        if key in values:
            found[free_dict_of(key) or key] = Origin(
                setting.source.kind,
                setting.source.place(setting.spelled).removeprefix("the "),
                _written(setting, key, values),
            )
    return found


def _written(setting: Setting, key: str, values: Mapping[str, Any]) -> str:
    if setting.value != values[key]:
        return f"{setting.spelled}={as_written(setting.value)}"
    return "" if setting.spelled == key else setting.spelled
