"""What happens to scores between scoring and advantages: pure functions over one score and one length a response.

In this order, each only where it is configured (section ``reward``): length normalisation, length penalty, overlong
penalty, scaling, clipping. Lengths are in response tokens. Rows that could not be scored are 0 and enter no statistic.
The KL penalty per token comes after all of them, see `verl.algorithms.kl`.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from verl.algorithms.masking import Moments
from verl.algorithms.metric import Metric, mean_metric
from verl.config import Config
from verl.config.schema_reward import RewardConfig


def length_factors(scores: Tensor, lengths: Tensor, alpha: float, positive_only: bool) -> Tensor:
    """``1 / length^alpha`` for each response, (B,) float64; a length of 0 counts as 1.

    Negative scores are divided alike, so a long wrong answer then loses less than a short one; with
    ``positive_only`` they keep their size (factor 1).
    """
    factors = lengths.double().clamp(min=1) ** -alpha
    return torch.where(scores < 0, 1.0, factors) if positive_only else factors


def overlong_penalties(lengths: Tensor, max_length: int, buffer: int, factor: float) -> Tensor:
    """DAPO's soft overlong punishment (Yu et al. 2025, arXiv:2503.14476, eq. 13), (B,) float64, at most 0.

    0 up to ``max_length - buffer`` tokens, then falling in a line to ``-factor`` at ``max_length``, and staying there.
    """
    over = (lengths.double() - (max_length - buffer)) / buffer
    return -factor * over.clamp(0.0, 1.0)


def length_penalties(lengths: Tensor, max_length: int, size: float) -> Tensor:
    """``-size * length / max_length``, (B,) float64."""
    return -size * lengths.double() / max_length


class Shaped(NamedTuple):
    """Attributes: scores, baselines: (B,) float64; metrics: of what was done to the scores."""

    scores: Tensor
    baselines: Tensor | None
    metrics: dict[str, Metric]


@dataclass
class RewardShaper:
    """Shapes the scores of one batch after another; the statistics of ``scaling=running`` are its only state."""

    config: RewardConfig  # section ``reward``
    max_length: int  # ``data.max_response_length``
    seen: Moments = field(default_factory=Moments)  # count, mean and spread of all scores so far, before scaling

    def __call__(
        self,
        scores: Tensor,
        lengths: Tensor,
        scored: Tensor,
        baselines: Tensor | None = None,
        baseline_lengths: Tensor | None = None,
    ) -> Shaped:
        """Shape the scores (B,) of a step's batch. Those of rows not ``scored`` are never read and come back as 0;
        baselines, of greedy responses, are shaped alike, in no statistic and no metric."""
        scores, metrics = self._by_length(torch.where(scored, scores.double(), 0.0), lengths, scored)
        scale = 1.0
        if self.config.scaling != "none":
            batch = Moments.of(scores[scored])
            self.seen.add(batch)
            moments = batch if self.config.scaling == "batch" else self.seen
            std = math.sqrt(moments.variance)
            scale = 1.0 if std <= 1e-6 * abs(moments.mean) else std  # within rounding there is none
            metrics["reward/scale"] = Metric(scale, 1.0)
        clipped = self._clip(scores / scale)
        if self.config.clip is not None:
            metrics["reward/clip_ratio"] = mean_metric((clipped != scores / scale).double(), scored)
        if baselines is not None and baseline_lengths is not None:
            baselines = self._clip(self._by_length(baselines.double(), baseline_lengths, scored)[0] / scale)
        return Shaped(torch.where(scored, clipped, 0.0), baselines, metrics)

    def _by_length(self, scores: Tensor, lengths: Tensor, scored: Tensor) -> tuple[Tensor, dict[str, Metric]]:
        config, metrics = self.config, {}
        if config.length_normalization.alpha > 0:
            normalization = config.length_normalization
            factors = length_factors(scores, lengths, normalization.alpha, normalization.positive_only)
            metrics["reward/length_factor"] = mean_metric(factors, scored)
            scores = scores * factors
        if config.length_penalty > 0:
            penalties = length_penalties(lengths, self.max_length, config.length_penalty)
            metrics["reward/length_penalty"] = mean_metric(penalties, scored)
            scores = scores + penalties
        if config.overlong_buffer.enable:
            place = config.overlong_buffer.place(self.max_length)
            penalties = overlong_penalties(lengths, *place, config.overlong_buffer.penalty_factor)
            metrics["reward/overlong_penalty"] = mean_metric(penalties, scored)
            metrics["reward/overlong_ratio"] = mean_metric((penalties < 0).double(), scored)
            scores = scores + penalties
        return scores, metrics

    def _clip(self, scores: Tensor) -> Tensor:
        return scores if self.config.clip is None else scores.clamp(-self.config.clip, self.config.clip)

    def state_dict(self) -> dict[str, float]:
        return asdict(self.seen)

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.seen = Moments(**state)


def new_shaper(config: Config) -> RewardShaper:
    """Of a run's start."""
    return RewardShaper(config.reward, config.data.max_response_length)
