"""A reward: the share of distinct characters, None for an empty response (it then trains nothing)."""

from __future__ import annotations

from typing import Any


def distinct(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float] | None:
    """``score`` is what training maximises; every other key is logged with the samples."""
    if not solution_str:
        return None
    return {"score": len(set(solution_str)) / len(solution_str), "characters": float(len(solution_str))}
