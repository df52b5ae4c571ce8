"""What happens to a response's score before advantages are formed. Raw scores are logged all the same."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from verl.config.base import Number, Section, Tokens

SHAPING = "process: reward shaping"


class LengthNormalizationConfig(Section):
    """Score divided by a power of the response's length in tokens (0 counts as 1)."""

    acts_in: ClassVar[str] = SHAPING

    alpha: Number = Field(0.0, ge=0, description="The power: score / length^alpha; 0: off, 1: score per token.")
    positive_only: bool = False
    """Divide scores above 0 only; false favours long wrong answers where those score below 0."""


class OverlongBufferConfig(Section):
    """DAPO's soft penalty for responses near the length limit."""

    acts_in: ClassVar[str] = SHAPING

    enable: bool = Field(False, description="Whether to penalise.")
    len: Tokens | None = Field(None, ge=0)
    """The penalty grows over the last so many tokens before max_resp_len, from 0 to its full; null: a fifth of
    max_resp_len."""
    penalty_factor: Number = Field(1.0, ge=0, description="The full penalty, at max_resp_len tokens and beyond.")
    max_resp_len: Tokens | None = Field(None, ge=1, description="Where it is full; null: data.max_response_length.")

    def place(self, max_response_length: int) -> tuple[int, int]:
        """Where the penalty is full, and over how many tokens before it grows."""
        limit = self.max_resp_len or max_response_length
        return limit, max(limit // 5, 1) if self.len is None else self.len
