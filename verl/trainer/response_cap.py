"""How long the training responses of the next step may become."""

from __future__ import annotations

import math
from typing import Any

from verl.config import Config
from verl.protocol import DataProto
from verl.trainer.advantages import cut_rows, response_lengths


class ResponseCap:
    """``rollout.response_length``: always the longest, or following the lengths that there are.

    Adaptive: the smallest length that a share ``quantile`` of the last ``window`` steps' responses do not exceed, times
    ``margin``, within [``min``, the longest]. A response that was cut says only that it wanted to be longer, so where
    more than ``max_cut_share`` of a step's responses were cut, these lengths are forgotten and the cap opens to the
    longest at once; the next step then shows what lengths there are.

    Attributes:
        value: tokens, for the step to come.
    """

    def __init__(self, config: Config) -> None:
        self._settings, self._longest = config.rollout.response_length, config.data.max_response_length
        self.value = self._longest
        self._recent: list[list[int]] = []  # lengths by step, newest last
        self._lengths: list[int] = []  # of the step under way, which may sample several batches
        self._cut = 0

    def learn(self, batch: DataProto) -> None:
        """Note a sampled batch."""
        self._lengths += response_lengths(batch).tolist()
        self._cut += int(cut_rows(batch).sum())

    def advance(self) -> dict[str, float]:
        """A step is over: find the cap of the next. Returns the metric of the one that is over; fixed: none."""
        settings, used, lengths = self._settings, self.value, self._lengths
        too_many = self._cut > settings.max_cut_share * len(lengths)
        self._lengths, self._cut = [], 0
        if settings.mode == "fixed":
            return {}
        if too_many and used < self._longest:
            self._recent, self.value = [], self._longest
        else:
            self._recent = [*self._recent, lengths][-settings.window :]
            known = sorted(length for step in self._recent for length in step)
            at = known[max(math.ceil(settings.quantile * len(known) - 1e-9), 1) - 1]
            least = settings.min or max(self._longest // 8, 1)
            self.value = min(max(math.ceil(settings.margin * at - 1e-9), least), self._longest)
        return {"response_length/cap": used}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the lengths; where the user has changed the mode or the longest since, that counts."""
        self._recent = state["recent"]
        if self._settings.mode == "adaptive":
            self.value = min(state["value"], self._longest)
