"""The types of fields: numbers with what they count, lists of texts, free mappings."""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from verl.config.base import FieldProblem, Takes, Unit


def must(holds: Callable[[Any], bool], what: str, fix: str) -> AfterValidator:
    """What a value that is given must be; else a :class:`FieldProblem`."""

    def check(value: Any) -> Any:
        if value is not None and not holds(value):
            raise FieldProblem(what, fix)
        return value

    return AfterValidator(check)


def _one_or_many(value: Any) -> Any:
    if value is None:
        return []
    return [value] if isinstance(value, str) else value


def _top_k(value: Any) -> Any:
    # -1, 0 and null are all spellings of "off" in the field; one of them reaches the engine.
    return -1 if value is None or (isinstance(value, int) and not isinstance(value, bool) and value == 0) else value


def _top_k_range(value: int) -> int:
    if value == 0:
        return -1
    if value < -1:
        raise FieldProblem("must be -1 (off) or at least 1", "use -1 to keep every token, or the number of tokens kept")
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        if not all(isinstance(name, str) for name in value):
            raise FieldProblem("every name in the mapping must be text", "put quotes around names that are numbers")
        for item in value.values():
            _plain(item)
    elif isinstance(value, list):
        for item in value:
            _plain(item)
    elif not isinstance(value, str | int | float | None) or (isinstance(value, float) and not isfinite(value)):
        fix = "use text, finite numbers, true, false and null"
        raise FieldProblem(f"holds {value!r}, which cannot be written to JSON", fix)
    return value


FreeDict = Annotated[dict[str, Any], AfterValidator(_plain)]
StringList = Annotated[list[str], BeforeValidator(_one_or_many), Takes("text or list of texts")]
Files = Annotated[StringList, must(bool, "names no file", "give at least one parquet or jsonl file")]

Prompts = Annotated[int, Unit("prompts")]
Responses = Annotated[int, Unit("responses")]
Tokens = Annotated[int, Unit("tokens")]
Steps = Annotated[int, Unit("training steps")]
Passes = Annotated[int, Unit("passes over the data")]
Seconds = Annotated[float, Unit("seconds")]
Seed = Annotated[int, Unit("seed")]
Number = Annotated[float, Unit("plain number")]
Share = Annotated[float, Unit("share, 0 to 1")]

_NEVER = "use -1 for never (or no limit), or a whole number from 1 up"
_NEVER_OR_POSITIVE = must(lambda value: value == -1 or value >= 1, "must be -1 or at least 1", _NEVER)
RowLimit = Annotated[int, _NEVER_OR_POSITIVE, Takes("-1, or a whole number from 1 up"), Unit("prompts")]
Every = Annotated[int, _NEVER_OR_POSITIVE, Takes("-1, or a whole number from 1 up"), Unit("training steps")]
TopK = Annotated[
    int,
    BeforeValidator(_top_k),
    AfterValidator(_top_k_range),
    Takes("-1 (or 0, or null), or a whole number from 1 up"),
    Unit("tokens"),
]
