"""A reward for the tiny example: the share of the response's characters that are vowels."""

from __future__ import annotations

from typing import Any

VOWELS = frozenset("aeiou")


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """``score`` is what training maximises; every other key is logged with the samples."""
    vowels = sum(character in VOWELS for character in solution_str)
    return {"score": vowels / max(len(solution_str), 1), "length": float(len(solution_str))}
