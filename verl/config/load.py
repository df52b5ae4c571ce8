"""From a YAML file and overrides to a checked :class:`~verl.config.schema.Config`, and back to YAML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from verl.config import checks
from verl.config.interpolate import escape, nested, resolve
from verl.config.keys import leaves
from verl.config.overrides import Setting, read_file, read_overrides
from verl.config.problems import Problem, raise_problems
from verl.config.report import problems_of
from verl.config.schema import Config
from verl.config.translate import place, sort_out, translate


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and what its reader should know about it.

    Attributes:
        config: checked and complete.
        notices: one sentence for each thing that was accepted but has no effect, or another than it seems.
    """

    config: Config
    notices: list[str]


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a YAML file (or none) and ``key=value`` overrides, which win over the file.

    Keys may be spelled as in verl (``actor_rollout_ref.actor.X``, a leading + or ++, flat and ``training.*`` names,
    the older reward roots); keys of verl's that have no meaning here are accepted and named in a notice.

    Raises:
        ConfigError: with everything that is wrong in one message; each problem names the field, the value and a fix.
    """
    settings = _merged(read_file(path) if path is not None else [])
    settings |= _merged(read_overrides(overrides))
    own, foreign_notices = sort_out(settings)
    values, value_notices = translate(own, resolve(own))
    config = build_config(nested(values))
    return LoadedConfig(config, [*foreign_notices, *value_notices, *checks.notices(config)])


def build_config(tree: Mapping[str, Any]) -> Config:
    """A :class:`Config` from nested mappings under our own key names, such as ``{"rollout": {"n": 8}}``.

    Raises:
        ConfigError: with everything that is wrong in one message.
    """
    # With both sections there, a missing field is reported by its own name.
    whole = {"data": {}, "model": {}} | dict(tree)
    try:
        return Config.model_validate(whole)
    except ValidationError as error:
        raise_problems(problems_of(error))
        raise


def _merged(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Settings of one source by key; the last of equal spellings wins, different spellings must agree."""
    merged: dict[str, Setting] = {}
    problems = []
    for setting in settings:
        other = merged.get(setting.key)
        if other is not None and other.spelled != setting.spelled and other.value != setting.value:
            problems.append(
                Problem(
                    f"{other.spelled} and {setting.spelled} are the same key ({setting.key}) "
                    f"and have different values {place(setting)}",
                    f"{other.value} and {setting.value}",
                    f"keep one of them, best {setting.key}",
                )
            )
        merged[setting.key] = setting
    raise_problems(problems)
    return merged


def dump_yaml(config: Config) -> str:
    """The complete configuration as YAML, defaults included; loading it gives an equal Config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(escape(config.model_dump(mode="json"))))


def describe() -> dict[str, str]:
    """What every key means: ``{"data.train_files": "Training files, ...", ...}``, in the schema's order."""
    return {key: field.description or "" for key, field in leaves().items()}
