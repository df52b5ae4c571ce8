"""The critic: values of a batch and its update."""

from __future__ import annotations

from torch import Tensor

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric
from verl.algorithms.value_loss import ValueLossInputs, value_loss
from verl.config import CriticConfig
from verl.models.policy import ValueModel, model_device
from verl.protocol import DataProto
from verl.training.micro_batches import Limits, MicroBatch
from verl.training.optimizer import MasterWeights, Optimizer
from verl.training.passes import Passes


class Critic:
    """The value function being trained; values[t] is read from the hidden state that predicts response token t.

    Args:
        model: loaded in float32; its backbone computes in the compute dtype, its head in float32.
        limits: of one forward.
        adapt: smaller micro-batches when memory runs out.
    """

    def __init__(
        self, model: ValueModel, config: CriticConfig, limits: Limits, weights: MasterWeights, adapt: bool = False
    ) -> None:
        self.model, self.weights = model, weights
        self._config = config
        self.passes = Passes("critic", limits, weights.ranks, adapt, weights.abandon)
        self.optimizer = Optimizer("critic", weights, config.optim, config.grad_clip)

    def values(self, batch: DataProto) -> DataProto:
        """``values`` (B, R) float32."""
        return DataProto.from_dict({"values": self.passes.column(batch, model_device(self.model), self.model)})

    def update(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on the mini-batch; ``meta_info["learning_rate"]`` is this step's."""

        def loss_of(part: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
            inputs = ValueLossInputs(
                values=part.packed.scatter(self.model(part.packed)),
                old_values=part.columns["values"],
                returns=part.columns["returns"],
                response_mask=part.columns["response_mask"],
            )
            return value_loss(inputs, self._config, denominators)

        names = ("values", "returns", "response_mask")
        rate, device = mini_batch.meta_info["learning_rate"], model_device(self.model)
        return self.passes.step(self.optimizer, mini_batch, device, names, loss_of, rate)
