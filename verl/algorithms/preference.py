"""The loss of a reward model on preference pairs."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import logsigmoid

from verl.algorithms.metric import Metric, mean_metric


def bradley_terry(chosen: Tensor, rejected: Tensor, margins: Tensor, pairs: float) -> tuple[Tensor, dict[str, Metric]]:
    """-log P(chosen beats rejected) under Bradley and Terry (1952), with a margin (Touvron et al. 2023, Llama 2).

    The mean over ``pairs`` of -log sigmoid(chosen - rejected - margin).

    Args:
        chosen, rejected, margins: (b,) scores and margins of a micro-batch.
        pairs: of the whole optimizer step, all micro-batches together: their losses add up.

    Returns:
        The micro-batch's addend, and metrics: loss, accuracy (the share of pairs whose chosen answer scores higher, a
        tie counting half), and the mean scores of both sides.
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
