"""The critic: values of a batch and its update."""

from __future__ import annotations

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric, merge_all
from verl.algorithms.value_loss import ValueLossInputs, value_loss
from verl.config import CriticConfig
from verl.models.policy import ValueModel, model_device
from verl.protocol import DataProto
from verl.training.micro_batches import Limits, column, micro_batches
from verl.training.optimizer import MasterWeights, Optimizer


class Critic:
    """The value function being trained; values[t] is read from the hidden state that predicts response token t.

    Args:
        model: loaded in float32; its backbone computes in the compute dtype, its head in float32.
        limits: of one forward.
    """

    def __init__(self, model: ValueModel, config: CriticConfig, limits: Limits, weights: MasterWeights) -> None:
        self.model, self.weights = model, weights
        self._config, self._limits = config, limits
        self.optimizer = Optimizer("critic", weights, config.optim, config.grad_clip)

    def values(self, batch: DataProto) -> DataProto:
        """``values`` (B, R) float32."""
        return DataProto.from_dict({"values": column(batch, self._limits, model_device(self.model), self.model)})

    def update(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on the mini-batch; ``meta_info["learning_rate"]`` is this step's."""
        parts: list[dict[str, Metric]] = []
        self.optimizer.clear()
        names = ("values", "returns", "response_mask")
        for part in micro_batches(mini_batch, self._limits, model_device(self.model), names):
            inputs = ValueLossInputs(
                values=part.packed.scatter(self.model(part.packed)),
                old_values=part.columns["values"],
                returns=part.columns["returns"],
                response_mask=part.columns["response_mask"],
            )
            loss, metrics = value_loss(inputs, self._config, denominators)
            self.optimizer.backward(loss)
            parts.append(metrics)
        return merge_all(parts) | self.optimizer.step(mini_batch.meta_info["learning_rate"])
