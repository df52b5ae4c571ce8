"""What a policy loss sees, what it returns, and the pieces that all of them share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from verl.algorithms.aggregation import Denominators, aggregate_loss, loss_metric
from verl.algorithms.masking import require_same_shape, select
from verl.algorithms.metric import Metric, mean_metric
from verl.config.schema_roles import ActorConfig

LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True)
class LossInputs:
    """One micro-batch as a policy loss sees it: (B, R) unless said otherwise, R free to differ between micro-batches.
    Raises ValueError: shapes that do not fit together.

    Attributes:
        log_probs: current ones, with gradient.
        old_log_probs: of the trainer's weights at the start of this update (the proximal policy).
        advantages: finished column.
        response_mask: bool, the trained tokens.
        rollout_log_probs: of the engine that sampled (the behaviour policy).
        ref_log_probs: of the reference.
        entropy: per token, with gradient where it enters the loss.
        group_ids: (B,) int.
        importance_weights: detached; multiply the token losses. A weight of 0 rejects the token, which stays in the
            denominators (clear its mask to take it out of them).
        full_kl: per-token KL(policy || reference) over the whole vocabulary, with gradient where it enters the loss.
        draws: uniforms by slot and position, for losses that choose tokens.
        statistics: what an entry's ``statistics`` computed over the whole mini-batch.
    """

    log_probs: Tensor
    old_log_probs: Tensor
    advantages: Tensor
    response_mask: Tensor
    rollout_log_probs: Tensor | None = None
    ref_log_probs: Tensor | None = None
    entropy: Tensor | None = None
    group_ids: Tensor | None = None
    importance_weights: Tensor | None = None
    full_kl: Tensor | None = None
    draws: Tensor | None = None
    statistics: dict[str, Tensor] | None = None

    def __post_init__(self) -> None:
        columns = {name: value for name, value in vars(self).items() if name not in ("group_ids", "statistics")}
        require_same_shape(self.log_probs.shape, **columns)
        require_same_shape(self.log_probs.shape[:1], group_ids=self.group_ids)

    def require(self, name: str, loss: str) -> Tensor:
        """A column that may be missing. Raises ValueError: it is."""
        column: Tensor | None = getattr(self, name)
        if column is None:
            raise ValueError(f"the policy loss {loss!r} needs {name}")
        return column

    @cached_property
    def tokens(self) -> Tokens:
        """The columns that nearly every loss starts from, clean at masked positions."""
        mask = self.response_mask.bool()
        log_probs, old = select(self.log_probs, mask), select(self.old_log_probs, mask)
        return Tokens(mask, select(self.advantages, mask), log_probs, log_probs - old)


@dataclass(frozen=True)
class Tokens:
    """(B, R) each, 0 (mask: False) where nothing is trained: mask, advantages, log_probs and log pi - log pi_old."""

    mask: Tensor
    advantages: Tensor
    log_probs: Tensor
    log_ratio: Tensor

    @cached_property
    def held(self) -> Tensor:
        """The log-ratio, held at -20 or 20 outside [-20, 20], with zero gradient there."""
        return guarded(self.log_ratio)

    @cached_property
    def ratio(self) -> Tensor:
        """pi / pi_old, guarded."""
        return self.held.exp()


LossResult = tuple[Tensor, dict[str, Metric]]
LossFunction = Callable[[LossInputs, "ActorConfig", Denominators], LossResult]
Statistics = Callable[[LossInputs, "ActorConfig"], dict[str, Tensor]]


@dataclass(frozen=True)
class PolicyLoss:
    """An entry of the table of policy losses.

    Attributes:
        function: one micro-batch's addend to the loss, and metrics still to be merged.
        statistics: for a loss that needs more than its own micro-batch: run without gradient over the whole
            mini-batch of all ranks before the first backward. Results of shape (B, R) or (B,) are split with the
            rows, others handed on whole, as ``LossInputs.statistics``.
        needs_advantage: a row all of whose advantages are 0 has loss 0, and no gradient, under any weights.
    """

    function: LossFunction
    statistics: Statistics | None = None
    needs_advantage: bool = False


def guarded(log_ratio: Tensor) -> Tensor:
    """A log-ratio held at -20 or 20 outside [-20, 20], with zero gradient there, so that its exp stays finite.

    Inside, not a bit changes. NaN stays NaN, in the gradient too (a clamp's own would be 0, and the optimizer would
    take the step): a broken log-prob must surface, not be clamped away.
    """
    return torch.where(log_ratio.isnan(), log_ratio, log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))


def finished(
    token_loss: Tensor, inputs: LossInputs, denominators: Denominators, mode: str, **shares: Tensor
) -> LossResult:
    """Weight and aggregate token losses (B, R), and report what every policy loss reports.

    Args:
        mode: the aggregation.
        shares: bool (B, R); each is logged as the share of trained tokens, as ``actor/<name>``.

    Metrics: ``actor/pg_loss``; ``actor/ppo_kl``, mean of old_log_probs - log_probs, the k1 estimate of
    KL(old || current); the shares.
    """
    mask = inputs.tokens.mask
    if inputs.importance_weights is not None:
        token_loss = token_loss * select(inputs.importance_weights, mask).detach()
    loss = aggregate_loss(token_loss, mask, mode, denominators)
    return loss, {
        "actor/pg_loss": loss_metric(loss, mask, denominators),
        "actor/ppo_kl": mean_metric(-inputs.tokens.log_ratio, mask),
        **{f"actor/{name}": mean_metric(share.double(), mask) for name, share in shares.items()},
    }


def clipped_surrogate(inputs: LossInputs, config: ActorConfig) -> tuple[Tensor, Tensor]:
    """PPO's ``max(-A rho, -A clip(rho, 1 - clip_low, 1 + clip_high))``, and where the clipped term won: (B, R)."""
    t = inputs.tokens
    plain = -t.advantages * t.ratio
    clipped = -t.advantages * t.ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    return torch.maximum(plain, clipped), clipped > plain
