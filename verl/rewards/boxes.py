r"""The last ``\boxed{...}`` of a text."""

from __future__ import annotations

import re

BOX = re.compile(r"\\f?boxed\s*|\\fbox\s*")


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, ``\fbox{...}`` or ``\boxed x``, nested braces kept; None if unclosed."""
    box = None
    for match in BOX.finditer(text):
        box = match
    if box is None:
        return None
    start = box.end()
    if text[start : start + 1] != "{":
        bare = re.match(r"[^\s$]+", text[start:]) if box.group().endswith((" ", "\t", "\n")) else None
        return bare.group() if bare else None
    depth, escaped = 0, False
    for at in range(start, len(text)):
        char = text[at]
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at].strip()
    return None
