"""The losses of the value head: of a critic, and of a reward model on preference pairs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.aggregation import Denominators, aggregate_loss, loss_metric
from verl.algorithms.masking import require_same_shape, select
from verl.algorithms.metric import Metric, explained_variance_metrics, mean_metric
from verl.config.schema_roles import CriticConfig


@dataclass(frozen=True)
class ValueLossInputs:
    """One micro-batch for the critic, all (B, R). Raises ValueError: shapes that do not fit together."""

    values: Tensor  # current predictions, with gradient
    old_values: Tensor  # predictions at the start of this update
    returns: Tensor  # targets
    response_mask: Tensor  # bool, the trained tokens

    def __post_init__(self) -> None:
        require_same_shape(self.values.shape, **vars(self))


def value_loss(
    inputs: ValueLossInputs, config: CriticConfig, denominators: Denominators
) -> tuple[Tensor, dict[str, Metric]]:
    """Half the squared error, the larger of the plain and the clipped one (PPO's value clipping; Schulman et al.
    2017, as in the authors' code).

    Per token ``0.5 * max((v - R)^2, (clip(v, old - eps, old + eps) - R)^2)``: the clip is additive around the old
    value. ``config.cliprange_value`` None: plain, ``0.5 (v - R)^2``. With ``config.huber_delta`` d, an error e farther
    than d from 0 costs ``d (|e| - d / 2)`` instead of ``0.5 e^2`` (Huber 1964), in both terms.

    Metrics: ``critic/vf_loss``; ``critic/vf_clipfrac``, share of tokens whose value moved farther from the old one
    than the range, whichever term won; ``critic/vpred_mean``; ``critic/vf_explained_var``, formed at the end from the
    sums given here, of the predictions before the update (``old_values``, the ones that the advantages used).
    """
    mask = inputs.response_mask.bool()
    values, old, returns = (select(x, mask) for x in (inputs.values, inputs.old_values, inputs.returns))
    old, returns = old.detach(), returns.detach()
    cost = _cost(values - returns, config.huber_delta)
    moved_too_far = torch.zeros_like(mask)
    if config.cliprange_value is not None:
        eps = config.cliprange_value
        held = torch.minimum(torch.maximum(values, old - eps), old + eps)
        cost = torch.maximum(cost, _cost(held - returns, config.huber_delta))
        moved_too_far = (values - old).abs() > eps
    mode = config.loss_agg_mode
    loss = aggregate_loss(cost, mask, mode, denominators)
    return loss, {
        "critic/vf_loss": loss_metric(loss, mask, denominators),
        "critic/vf_clipfrac": mean_metric(moved_too_far.double(), mask),
        "critic/vpred_mean": mean_metric(values, mask),
        **explained_variance_metrics("critic/vf_explained_var", old, returns, mask),
    }


def _cost(error: Tensor, delta: float | None) -> Tensor:
    squared = 0.5 * error.square()
    return squared if delta is None else torch.where(error.abs() <= delta, squared, delta * (error.abs() - 0.5 * delta))


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor, pairs: float) -> tuple[Tensor, dict[str, Metric]]:
    """-log P(chosen beats rejected) under Bradley and Terry (1952), with a margin (Touvron et al. 2023, Llama 2).

    The mean over ``pairs`` of -log sigmoid(chosen - rejected - margin). Returns the micro-batch's addend, and metrics:
    loss, accuracy (the share of pairs whose chosen answer scores higher, a tie counting half), and the mean scores of
    both sides.

    Args:
        chosen, rejected, margins: (b,) scores and margins of a micro-batch.
        pairs: of the whole optimizer step, all micro-batches together: their losses add up.
    """
    difference = chosen - rejected
    losses = -logsigmoid(difference - margins)
    right = (difference > 0).double() + 0.5 * (difference == 0).double()
    return losses.sum() / max(pairs, 1), {
        "loss": mean_metric(losses),
        "accuracy": mean_metric(right),
        "score_chosen": mean_metric(chosen),
        "score_rejected": mean_metric(rejected),
    }
