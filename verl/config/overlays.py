"""Presets: small named overlays between the defaults and the user's own file, YAML files in ``verl/config/presets``."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from verl.config.names import did_you_mean
from verl.config.overrides import Setting, Source, read_text
from verl.errors import ConfigError

_FOLDER = Path(__file__).with_name("presets")


@cache
def presets() -> dict[str, str]:
    """What each preset is, in a line: its file's first comment."""
    files = sorted(_FOLDER.glob("*.yaml"))
    return {file.stem: file.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ") for file in files}


def read_preset(name: str) -> list[Setting]:
    """Settings of a preset.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in presets():
        fix = f"{did_you_mean(name, presets())}presets: {', '.join(presets())}"
        raise ConfigError("unknown preset", name, fix)
    return read_text((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), Source("preset", name))
