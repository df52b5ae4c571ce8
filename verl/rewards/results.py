"""What a reward function may return, and what is made of it. Nothing is guessed: a value is a score or it is not."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal

from verl.errors import RewardError

MAX_SCORE = 3.4028234663852886e38  # scores travel in float32

MEANINGFUL = ("acc", "pred", "answer")  # keys of a result that validation and majorities read

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
        seconds: that the call took, an equal share of it where it was for a batch.
    """

    value: float | None
    outcome: Outcome
    extras: dict[str, Any] = field(default_factory=dict)
    reason: str | None = None
    seconds: float = field(default=0.0, compare=False)


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


def check_batch(result: Any, count: int, name: str) -> list[Score]:
    """Read what a function returned for ``count`` responses at once: a list, one entry a response.

    A tuple, a one-dimensional array or tensor is a list too, and each entry is read as by :func:`check_result`.
    OpenRLHF's dict has the list under ``"rewards"``; its ``"scores"`` and the entries of its ``"extra_logs"`` (lists
    as long, or one value for all) become extras.

    Args:
        name: what the function is called in messages.

    Raises:
        RewardError: anything else, or a list of another length. Nothing is broadcast, cut or filled up.
    """
    extras: dict[str, list[Any]] = {}
    rewards = result
    if isinstance(result, Mapping) and "rewards" in result:
        rewards = result["rewards"]
        logs = result.get("extra_logs") or {}
        if not isinstance(logs, Mapping):
            raise RewardError(
                f'"extra_logs" is no dict: {name}', f"{type(logs).__name__} {_short(logs)}", "return a dict"
            )
        for key, value in {"scores": result.get("scores"), **logs}.items():
            single = isinstance(_plain(value), str | Real)
            if value is not None:
                extras[str(key)] = [value] * count if single else _aligned(value, count, f"{key} of {name}")
    scores = [check_result(entry) for entry in _aligned(rewards, count, name)]
    for i, score in enumerate(scores):
        score.extras.update({key: _plain(values[i]) for key, values in extras.items()})
    return scores


def _aligned(values: Any, count: int, name: str) -> list[Any]:
    if getattr(values, "ndim", None) == 1 and hasattr(values, "tolist"):
        values = values.tolist()
    fix = "return one number (or None: cannot be scored) for each response, in their order"
    if not isinstance(values, list | tuple):
        raise RewardError(
            f"The reward function returned no list for {count} responses: {name}",
            f"{type(values).__name__} {_short(values)}",
            fix,
        )
    if len(values) != count:
        raise RewardError(f"The reward function returned {len(values)} values for {count} responses: {name}", None, fix)
    return list(values)


def _plain(value: Any) -> Any:
    """Numpy scalars and zero-dimensional arrays and tensors as Python numbers; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _number(value: Any) -> float | None:
    if type(value) is float:
        return value
    if not isinstance(value, Real):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
