"""Values as YAML on one line."""

from __future__ import annotations

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_/][\w/.+@-]*(?: [\w/.+@-]+)*", re.ASCII)
_YAML_WORDS = frozenset(["null", "true", "false", "yes", "no", "on", "off", "y", "n"])


def one_line(value: Any) -> str:
    """A value of a configuration as YAML in flow style; every YAML reader and :func:`load_config` read it back."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{one_line(str(name))}: {one_line(item)}" for name, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(one_line, value)) + "]"
    if isinstance(value, str):
        plain = _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS
        return value if plain else visible(json.dumps(value, ensure_ascii=False))
    if isinstance(value, float):
        digits = repr(value)
        # Without a point YAML 1.1 reads 1e-06 as a text.
        return digits.replace("e", ".0e") if "e" in digits and "." not in digits else digits
    return json.dumps(value)


def visible(text: str) -> str:
    """Text on one line: what cannot be printed is written as in YAML's quotes, ``\\u000a``."""
    return "".join(
        char if char.isprintable() else f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"
        for char in text
    )
