"""Supervised training of one model: imitating conversations (SFT), or scoring the better of two answers higher."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from verl.algorithms.aggregation import Denominators, aggregate_loss
from verl.algorithms.metric import Metric, mean_metric, merge_all
from verl.algorithms.value_loss import bradley_terry
from verl.models.packed import PackedBatch
from verl.models.policy import PolicyModel, ValueModel, model_device
from verl.protocol import DataProto
from verl.training.micro_batches import Limits, MicroBatch, micro_batches
from verl.training.optimizer import MasterWeights, Optimizer
from verl.training.passes import watched
from verl.training.saving import load_trained, save_trained

# Of (b, R) values of a micro-batch and the number of values that count in the whole step.
Loss = Callable[[Tensor, MicroBatch, float], tuple[Tensor, dict[str, Metric]]]


def imitation_loss(log_probs: Tensor, part: MicroBatch, tokens: float) -> tuple[Tensor, dict[str, Metric]]:
    """Mean negative log-prob over the trained tokens of the whole step."""
    mask = part.columns["response_mask"].bool()
    loss = aggregate_loss(-log_probs, mask, "token-mean", Denominators(tokens, 1, 1))
    return loss, {"loss": mean_metric(-log_probs, mask)}


def preference_loss(scores: Tensor, part: MicroBatch, rows: float) -> tuple[Tensor, dict[str, Metric]]:
    """:func:`bradley_terry` over rows chosen, rejected, chosen, rejected, ..., each with one score."""
    mask = part.columns["response_mask"].bool()
    pairs = torch.where(mask, scores, 0.0).sum(1).view(-1, 2)
    return bradley_terry(pairs[:, 0], pairs[:, 1], part.columns["margins"][::2], rows / 2)


class SupervisedModel:
    """A model with its loss and its optimizer.

    Args:
        model: a policy is trained to imitate, a value model to score pairs.
        limits: of one forward. With ``share_prompts`` the rows of a pair stay together.
        optimizer: over ``weights``, the master weights of the model.
    """

    def __init__(
        self, model: PolicyModel | ValueModel, limits: Limits, weights: MasterWeights, optimizer: Optimizer
    ) -> None:
        self._model, self._limits, self._weights, self._optimizer = model, limits, weights, optimizer
        self._loss: Loss = imitation_loss if isinstance(model, PolicyModel) else preference_loss

    def update(self, batch: DataProto, learning_rate: float) -> dict[str, Metric]:
        """One optimizer step on the whole batch, whatever its micro-batches."""
        self._optimizer.clear()
        metrics = merge_all(self._losses(batch, backward=True))
        return {f"train/{name}": metric for name, metric in metrics.items()} | self._optimizer.step(learning_rate)

    @torch.no_grad()
    def evaluate(self, batch: DataProto) -> dict[str, Metric]:
        """The same metrics without a step."""
        return {f"val/{name}": metric for name, metric in merge_all(self._losses(batch, backward=False)).items()}

    def _losses(self, batch: DataProto, backward: bool) -> list[dict[str, Metric]]:
        counted = float(batch.tensors["response_mask"].sum())
        device, found = model_device(self._model), []
        for part in micro_batches(batch, self._limits, device, ("response_mask", "margins")):
            with watched(part, "the examples", "lower data.max_token_len_per_gpu"):
                packed = _counted_only(part)
                values = packed.scatter(self._values(packed))
                loss, metrics = self._loss(values, part, counted)
                if backward:
                    self._optimizer.backward(loss)
            found.append({name: metric.to_floats() for name, metric in metrics.items()})
        return found

    def _values(self, packed: PackedBatch) -> Tensor:
        """Log-probs or scores (M,)."""
        return self._model(packed) if isinstance(self._model, ValueModel) else self._model(packed, 1.0)[0]

    def save(self, folder: Path) -> None:
        save_trained(folder, self._weights, self._optimizer)

    def load(self, folder: Path) -> None:
        load_trained(folder, self._weights, self._optimizer)


def _counted_only(part: MicroBatch) -> PackedBatch:
    """Nothing is computed behind the decoder for tokens whose value does not count, such as a user's later turns."""
    packed = part.packed
    return packed.only(part.columns["response_mask"].bool()[packed.rows, packed.columns])
