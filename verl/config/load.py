"""From presets, a YAML file and overrides to a checked :class:`~verl.config.schema.Config`, and back to YAML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from verl.config.aliases import GLOBAL_MICRO_BATCH
from verl.config.base import Section
from verl.config.interpolate import escape, nested, resolve
from verl.config.keys import free_dict_of, leaves, using
from verl.config.problems import Problem, as_written, raise_problems
from verl.config.report import problems_of
from verl.config.schema import Config
from verl.config.schema_supervised import SupervisedConfig
from verl.config.settings import COMMAND_LINE, MAPPING, OPEN, Setting, flatten, read_file, read_overrides, read_preset
from verl.config.translate import sort_out, translate
from verl.errors import ConfigError


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
    """The origin of every key: ``settings`` are what the user gave, lower layers first, ``values`` what it came to."""
    found = dict.fromkeys(leaves(), DEFAULT)
    for setting in settings:
        key = GLOBAL_MICRO_BATCH.get(setting.key, setting.key)
        if key in values:
            written = "" if setting.spelled == key else setting.spelled
            if setting.value != values[key]:
                written = f"{setting.spelled}={as_written(setting.value)}"
            place = setting.source.place(setting.spelled).removeprefix("the ")
            found[free_dict_of(key) or key] = Origin(setting.source.kind, place, written)
    return found


SupervisedT = TypeVar("SupervisedT", bound=SupervisedConfig)
AnySchema = type[Config] | type[SupervisedConfig]
Given = str | Path | Mapping[str, Any] | None
Overrides = Sequence[str] | Mapping[str, Any]


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and what its reader should know about it.

    Attributes:
        config: checked and complete.
        notices: one sentence for each thing that was accepted but has no effect, or another than it seems.
        origins: where the value of each key comes from, in the schema's order.
        missing: required keys that are not given and hold ``???``; empty unless ``load_config`` was told to go on.
    """

    config: Config
    notices: list[str]
    origins: dict[str, Origin]
    missing: tuple[str, ...] = ()


def load_config(
    source: str | Path | Mapping[str, Any] | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    presets: Sequence[str] = (),
    *,
    allow_missing: bool = False,
) -> LoadedConfig:
    """Presets, then a YAML file or a mapping (or none), then overrides; each wins over what stands before it.

    Keys may be spelled as in verl (``actor_rollout_ref.actor.X``, a leading + or ++, flat and ``training.*`` names,
    the older reward roots); keys of verl's that have no meaning here are accepted and named in a notice.

    Args:
        source: path of a YAML file, or nested mappings such as ``{"rollout": {"n": 8}}``.
        overrides: ``key=value`` words, or a mapping of (dotted) keys to values.
        presets: names of overlays that ship with VeRL, see ``verl presets``.
        allow_missing: put ``???`` where a required value is not given, for a look at the rest.

    Raises:
        ConfigError: with everything that is wrong in one message; each problem names the field, the value and a fix.
    """
    return LoadedConfig(*_load(Config, source, overrides, presets, allow_missing))


def load_supervised(
    schema: type[SupervisedT], source: Given = None, overrides: Overrides = ()
) -> tuple[SupervisedT, list[str]]:
    """A configuration of ``verl sft`` or ``verl reward-model train`` and its notices; otherwise as :func:`load_config`.
    Raises ConfigError: with everything that is wrong in one message."""
    with using(schema):
        config, notices, *_ = _load(schema, source, overrides, (), False)
    return config, notices


def _load(
    schema: AnySchema, source: Given, overrides: Overrides, presets: Sequence[str], allow_missing: bool
) -> tuple[Any, list[str], dict[str, Origin], tuple[str, ...]]:
    settings: dict[str, Setting] = {}
    for layer in _layers(source, overrides, presets):
        settings = overlay(settings, _merged(layer))
    _check_kind(schema, settings.values())
    required = [key for key, field in leaves().items() if field.is_required()]
    given = {key for key, setting in settings.items() if setting.value not in (None, OPEN)}
    missing = tuple(key for key in required if key not in given) if allow_missing else ()
    own, foreign_notices = sort_out({key: setting for key, setting in settings.items() if key not in missing})
    values, value_notices = translate(own, resolve(own))
    places = {key: own[key].place for key in values.keys() & own.keys() if own[key].source != COMMAND_LINE}
    config = _build(schema, nested(values | dict.fromkeys(missing, OPEN)), places)
    return config, [*foreign_notices, *value_notices, *config.notices()], origins_of(own.values(), values), missing


def _check_kind(schema: type[Section], settings: Iterable[Setting]) -> None:
    """Refuse a file of the other kind as a whole, not key by key."""
    files = {
        setting.key.partition(".")[0]: str(setting.source) for setting in settings if setting.source.kind == "file"
    }
    if schema is Config and "optim" in files:
        fix = "start it with verl sft, or verl reward-model train"
        raise ConfigError("this is a configuration of supervised training", files["optim"], fix)
    if schema is not Config and (odd := files.keys() & {"actor", "rollout", "algorithm", "reward"}):
        raise ConfigError("this is a configuration of RL training", files[min(odd)], "start it with verl train")


def _layers(source: Given, overrides: Overrides, presets: Sequence[str]) -> Iterator[list[Setting]]:
    for name in [presets] if isinstance(presets, str) else presets:
        yield read_preset(name)
    if source is not None:
        yield flatten("", dict(source), MAPPING) if isinstance(source, Mapping) else read_file(source)
    if isinstance(overrides, Mapping):
        yield flatten("", dict(overrides), MAPPING)
    else:
        yield read_overrides([overrides] if isinstance(overrides, str) else overrides)


def build_config(tree: Mapping[str, Any]) -> Config:
    """A :class:`Config` from nested mappings under our own key names, such as ``{"rollout": {"n": 8}}``. Raises
    ConfigError: with everything that is wrong in one message."""
    return _build(Config, tree, {})  # type: ignore[no-any-return]


def _build(schema: AnySchema, tree: Mapping[str, Any], places: Mapping[str, str]) -> Any:
    try:  # with both sections there, a missing field is reported by its own name
        return schema.model_validate({"data": {}, "model": {}} | dict(tree))
    except ValidationError as error:
        raise_problems(problems_of(error, places))
        raise


def _merged(settings: Iterable[Setting]) -> dict[str, Setting]:
    """Settings of one source by key; the last of equal spellings wins, different spellings must agree."""
    merged: dict[str, Setting] = {}
    problems = []
    for setting in settings:
        other = merged.get(setting.key)
        if other is not None and other.spelled != setting.spelled and other.value != setting.value:
            both = f"{other.spelled} and {setting.spelled} are the same key ({setting.key})"
            what, values = f"{both} and have different values {setting.place}", f"{other.value} and {setting.value}"
            problems.append(Problem(what, values, f"keep one of them, best {setting.key}"))
        merged[setting.key] = setting
    raise_problems(problems)
    return merged


def dump_yaml(config: Config | SupervisedConfig) -> str:
    """The complete configuration as YAML, defaults included; loading it gives an equal Config."""
    from omegaconf import OmegaConf

    return OmegaConf.to_yaml(OmegaConf.create(escape(config.model_dump(mode="json"))))
