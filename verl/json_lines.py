"""Text and JSON that no model output can break, and files of one JSON object a line.

Such a file grows by one complete line a write; readers skip a torn one.
"""

from __future__ import annotations

import errno
import json
import math
import os
import re
from pathlib import Path
from typing import Any

# Legal in JSON strings, yet some readers split lines at them and terminals obey the C1 range.
_ESCAPED_IN_JSON = re.compile("[\x7f-\x9f\u2028\u2029]")


def clean_text(text: str) -> str:
    """``text`` as valid Unicode: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def json_value(value: Any) -> Any:
    """``value`` as something strict JSON can hold.

    Numbers that are not finite become ``None`` (JSON has no NaN), numpy and torch values become Python ones, and what
    JSON does not know becomes its text.
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return int(value) if value.bit_length() <= 1024 else hex(value)  # Python refuses to print very long ones
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, dict):
        return {clean_text(str(key)): json_value(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_value(item) for item in value]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors: without importing either
        return json_value(value.tolist())
    return clean_text(str(value))


def json_line(record: Any) -> str:
    """``record`` as one line of strict JSON without the line break: UTF-8 readable, no raw control character."""
    text = json.dumps(json_value(record), ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return _ESCAPED_IN_JSON.sub(lambda match: f"\\u{ord(match.group()):04x}", text)


def parse_line(line: bytes) -> dict[str, Any] | None:
    """One line of a line file, or None where it is torn or not a JSON object."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return record if isinstance(record, dict) else None


def read_jsonl(path: Path) -> tuple[list[dict[str, Any]], int]:
    """All objects of a line file, and how many lines were torn or no JSON object. A missing file is empty."""
    records: list[dict[str, Any]] = []
    skipped = 0
    try:
        with open(path, "rb") as file:
            for line in file:
                if not line.strip():
                    continue
                record = parse_line(line)
                if record is None:
                    skipped += 1
                else:
                    records.append(record)
    except FileNotFoundError:
        return [], 0
    return records, skipped


def append_line(path: Path, line: str) -> None:
    """Appends one line in a single write; a torn last line (killed mid-write) is closed first, never joined.

    Raises:
        OSError: it cannot be written whole.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = ("\n" if torn else "").encode() + line.encode() + b"\n"
        if os.write(descriptor, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)
