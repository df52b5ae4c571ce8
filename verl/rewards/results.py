"""What a reward function may return, and what is made of it. Nothing is guessed: a value is a score or it is not."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

MAX_SCORE = 3.4028234663852886e38  # scores travel in float32

Outcome = Literal["scored", "none", "invalid", "failed", "empty"]


@dataclass(frozen=True)
class Score:
    """Outcome for one response.

    Attributes:
        value: the score, None unless ``outcome`` is ``scored``.
        outcome: ``scored``; ``none`` (the function said None), ``invalid`` (it returned something that is no score),
            ``failed`` (it raised), ``empty`` (the response has no token to bear a score; the function was not asked).
        extras: the other keys of a dict result.
        reason: why it is invalid or failed.
    """

    value: float | None
    outcome: Outcome
    extras: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None


def check_result(result: Any) -> Score:
    """Read what a reward function returned.

    Numbers are Python's, numpy's and zero-dimensional tensors; a bool counts as 0 or 1. None is unscored. NaN, an
    infinity, text, a list or a dict without ``"score"`` is invalid: never a zero, never the first element of it.
    """
    extras: dict[str, Any] = {}
    if isinstance(result, dict):
        extras = {str(key): _plain(value) for key, value in result.items() if key != "score"}
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "none"
            return Score(None, "invalid", extras, f'a dict without "score" (keys: {keys})')
        result = result["score"]
    if result is None:
        return Score(None, "none", extras)
    value = _number(_plain(result))
    if value is None:
        return Score(None, "invalid", extras, f"{type(result).__name__} {_short(result)}, not a number")
    if not math.isfinite(value) or abs(value) > MAX_SCORE:
        return Score(None, "invalid", extras, f"{_short(result)}, not a finite float32")
    return Score(value, "scored", extras)


def _plain(value: Any) -> Any:
    """Numpy scalars and zero-dimensional arrays and tensors as Python numbers; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _number(value: Any) -> float | None:
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
