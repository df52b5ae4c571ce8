"""A policy loss: REINFORCE whose token weight is the ratio, truncated from above (and never from below)."""

from __future__ import annotations

from verl.algorithms.aggregation import Denominators
from verl.algorithms.loss_inputs import LossInputs, LossResult, finished
from verl.config import ActorConfig


def truncated(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """``-sg(min(rho, 1 + clip_high)) A log pi``; one micro-batch's addend, and metrics still to be merged.

    ``inputs.tokens`` is clean at masked positions; ``finished`` weighs, aggregates and reports.
    """
    t = inputs.tokens  # mask, advantages, log_probs, ratio: (B, R)
    limit = 1.0 + config.clip_high
    token_loss = -t.ratio.detach().clamp(max=limit) * t.advantages * t.log_probs
    return finished(token_loss, inputs, denominators, config.loss_agg_mode, truncated=t.ratio > limit)
