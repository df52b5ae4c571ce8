"""From token losses to one number: the five aggregation modes, with the denominators of the whole optimizer step.

Over one mini-batch, all ranks together: l token loss, m mask, T* trained tokens, B* rows with a trained token, C a
fixed divisor (``actor.loss_scale_factor``, or the configured maximum response length).

| mode                      | value                                        |
|---------------------------|----------------------------------------------|
| ``token-mean``            | sum(m l) / T*                                |
| ``seq-mean-token-sum``    | sum(m l) / B*                                |
| ``seq-mean-token-mean``   | (1/B*) sum over rows of (sum(m l) / sum(m))  |
| ``seq-mean-token-sum-norm`` | sum(m l) / (B* C)   (Dr. GRPO)             |
| ``token-sum``             | sum(m l)                                     |

Since T*, B* and C belong to the whole step and are fixed before the first backward, the losses of micro-batches (and
of ranks) *add up* to the loss of the mini-batch, whatever the split; so do their gradients. Ranks whose gradients are
then averaged must multiply their loss by the number of ranks. A row is never split between micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from verl.algorithms.masking import masked_mean, masked_sum
from verl.algorithms.metric import Metric


@dataclass(frozen=True)
class Denominators:
    """Divisors of one optimizer step, over all its micro-batches on all ranks.

    Attributes:
        tokens: T*, trained tokens.
        rows: B*, rows with at least one trained token.
        max_response_length: C, the fixed divisor of ``seq-mean-token-sum-norm``.
    """

    tokens: float
    rows: float
    max_response_length: float


LOSS_AGGREGATIONS: dict[str, Callable[[Denominators], float]] = {
    "token-mean": lambda d: max(d.tokens, 1),
    "seq-mean-token-sum": lambda d: max(d.rows, 1),
    "seq-mean-token-mean": lambda d: max(d.rows, 1),
    "seq-mean-token-sum-norm": lambda d: max(d.rows, 1) * d.max_response_length,
    "token-sum": lambda d: 1,
}
"""What the sum of the token losses (``seq-mean-token-mean``: of the rows' means) is divided by."""


def count_denominators(response_mask: Tensor, max_response_length: float) -> Denominators:
    """Of a whole mini-batch: ``response_mask`` (B, R), and C. Rows without a trained token (fillers, rejected or
    unscored ones whose mask was cleared) count nowhere. Raises ValueError: C is not above 0."""
    if not max_response_length > 0:
        raise ValueError(f"the fixed divisor must be above 0, got {max_response_length}")
    trained = response_mask.bool()
    return Denominators(int(trained.sum()), int(trained.any(dim=-1).sum()), max_response_length)


def aggregate_loss(token_loss: Tensor, mask: Tensor, mode: str, denominators: Denominators) -> Tensor:
    """This micro-batch's addend to the loss of the whole mini-batch, a scalar. Raises ValueError: an unknown mode.

    Args:
        token_loss: (B, R). What stands at masked positions is never read; its gradient is exactly 0.
        mask: (B, R).
        mode: a key of `LOSS_AGGREGATIONS`.
        denominators: of the whole optimizer step. With 0 tokens the loss is 0 with zero gradient.
    """
    if mode not in LOSS_AGGREGATIONS:
        raise ValueError(f"loss_agg_mode {mode!r}, expected one of {', '.join(LOSS_AGGREGATIONS)}")
    by_row = mode == "seq-mean-token-mean"
    total = masked_mean(token_loss, mask, dim=-1).sum() if by_row else masked_sum(token_loss, mask)
    return total / LOSS_AGGREGATIONS[mode](denominators)


def loss_metric(loss: Tensor, mask: Tensor, denominators: Denominators) -> Metric:
    """The logged form of an aggregated loss: the mean over optimizer steps of the loss of a whole step.

    ``loss`` is one micro-batch's addend, and its weight is the micro-batch's share of the step's trained tokens. The
    shares of one step sum to 1, so after merging any split of it the value is the step's loss whatever the mode, and
    after merging several steps their mean. A NaN loss shows: it is not skipped.
    """
    return Metric(loss.detach().double(), mask.bool().sum().double() / max(denominators.tokens, 1))
