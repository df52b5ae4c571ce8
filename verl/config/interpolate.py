"""``${section.key}`` in values: resolved over the user's settings and the schema's defaults, and nothing else.

There are no resolvers: nothing in a configuration runs code or reads the environment.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from verl.config.aliases import canonical
from verl.config.keys import defaults, free_dict_of, leaves
from verl.config.names import nearest
from verl.config.overrides import Setting
from verl.config.problems import Problem, raise_problems
from verl.errors import ConfigError

_OPENING = re.compile(r"(?P<escape>\\*)\$\{")
_REFERENCE = re.compile(r"(?P<escape>\\*)\$\{(?P<name>[^\W\d]\w*(?:\.\w+)*)\}")


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """A tree of mappings from dotted keys; values of keys inside a free mapping go on top of the mapping itself."""
    tree: dict[str, Any] = {}
    for key, value in sorted(values.items(), key=lambda item: item[0].count(".")):
        *parents, last = key.split(".")
        place = tree
        for parent in parents:
            if not isinstance(place.get(parent), dict):
                place[parent] = {}
            place = place[parent]
        place[last] = _copied(value)
    return tree


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        # Names in a mapping are never resolved, so ${ means nothing there.
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)


def _unescaped(match: re.Match[str]) -> bool:
    return len(match["escape"]) % 2 == 0


def _complaints(setting: Setting, known: set[str]) -> Iterator[Problem]:
    for text in _texts(setting.value):
        references = {match.start(): match for match in _REFERENCE.finditer(text)}
        openings = [match.start() for match in _OPENING.finditer(text) if _unescaped(match)]
        if not references.keys() >= set(openings):
            yield Problem(
                f"{setting.spelled}: only ${{section.key}} may stand in a value; "
                "nothing that runs code or reads the environment is supported",
                text,
                "name another key, or write a literal ${ as \\${",
            )
            continue
        for name in (references[start]["name"] for start in openings):
            if canonical(name) not in known:
                settable = canonical(name) in leaves()
                yield Problem(
                    f"{setting.spelled}: ${{{name}}} " + ("is not set and has no default" if settable else "is no key"),
                    text,
                    f"set {name}" if settable else f"did you mean ${{{nearest(name, known)}}}?",
                )


def _rewritten(value: Any) -> Any:
    """The value with every reference under its canonical name."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda m: f"{m['escape']}${{{canonical(m['name'])}}}", value)
    if isinstance(value, dict):
        return {name: _rewritten(item) for name, item in value.items()}
    return [_rewritten(item) for item in value] if isinstance(value, list) else value


def resolve(settings: Mapping[str, Setting]) -> dict[str, Any]:
    """The settings' values without interpolations, by canonical key.

    Raises:
        ConfigError: a reference names no key, is not of the form ``${section.key}``, or leads back to itself.
    """
    values = {key: setting.value for key, setting in settings.items()}
    open_keys = [key for key, value in values.items() if any("${" in text for text in _texts(value))]
    if not open_keys:
        return values
    base = defaults()
    known = {key for key in base.keys() | values.keys() if key in leaves() or free_dict_of(key)}
    raise_problems([problem for key in open_keys for problem in _complaints(settings[key], known)])

    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        config = OmegaConf.create(nested(base | {key: _rewritten(value) for key, value in values.items()}))
        tree: Any = OmegaConf.to_container(config, resolve=True)
    except (OmegaConfBaseException, RecursionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"the references between keys cannot be resolved: {str(error).splitlines()[0]}",
            ", ".join(f"{settings[key].spelled}={values[key]}" for key in open_keys),
            "make sure that no key refers to itself, directly or through others",
        ) from error
    for key in open_keys:
        place = tree
        for part in key.split("."):
            place = place[part]
        values[key] = place
    return values


def escape(value: Any) -> Any:
    """The value with every text written so that :func:`resolve` gives it back unchanged."""
    if isinstance(value, str):
        return _OPENING.sub(lambda m: m["escape"] * 2 + "\\${", value)
    if isinstance(value, dict):
        return {name: escape(item) for name, item in value.items()}
    return [escape(item) for item in value] if isinstance(value, list | tuple) else value
