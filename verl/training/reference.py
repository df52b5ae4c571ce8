"""The reference policy: the model that training started from, frozen."""

from __future__ import annotations

from torch import Tensor

from verl.models.packed import PackedBatch
from verl.models.policy import PolicyModel, model_device
from verl.protocol import DataProto
from verl.training.passes import Passes


class Reference:
    """Log-probs of a frozen policy.

    Args:
        policy: is frozen here.
        passes: through a batch.
        temperature: of the training sampling, so that reference and actor are compared on the same footing.
    """

    def __init__(self, policy: PolicyModel, passes: Passes, temperature: float) -> None:
        self.policy = policy.requires_grad_(False)
        self.passes, self._temperature = passes, temperature

    def log_probs(self, batch: DataProto) -> DataProto:
        """``ref_log_probs`` (B, R) float32."""
        values = self.passes.column(
            batch, model_device(self.policy), lambda packed: self.policy(packed, self._temperature)[0]
        )
        return DataProto.from_dict({"ref_log_probs": values})

    def full_kl(self, batch: DataProto, policy: PolicyModel) -> DataProto:
        """``full_kl`` (B, R) float32: the KL divergence of ``policy`` from this one, over the whole vocabulary."""

        def divergence(packed: PackedBatch) -> Tensor:
            return policy(packed, self._temperature, self.policy)[2]

        return DataProto.from_dict({"full_kl": self.passes.column(batch, model_device(self.policy), divergence)})
