"""The reference policy: the model that training started from, frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.models.packed import PackedBatch
from verl.models.policy import PolicyModel, model_device
from verl.protocol import DataProto
from verl.training.micro_batches import Limits, column


class Reference:
    """Log-probs of a frozen policy.

    Args:
        policy: is frozen here.
        limits: of one forward.
        temperature: of the training sampling, so that reference and actor are compared on the same footing.
    """

    def __init__(self, policy: PolicyModel, limits: Limits, temperature: float) -> None:
        self.policy = policy.requires_grad_(False)
        self._limits, self._temperature = limits, temperature

    def log_probs(self, batch: DataProto) -> DataProto:
        """``ref_log_probs`` (B, R) float32."""
        values = column(batch, self._limits, self._device, lambda packed: self.policy(packed, self._temperature)[0])
        return DataProto.from_dict({"ref_log_probs": values})

    def full_kl(self, batch: DataProto, policy: PolicyModel) -> DataProto:
        """``full_kl`` (B, R) float32: the KL divergence of ``policy`` from this one, over the whole vocabulary."""

        def divergence(packed: PackedBatch) -> Tensor:
            return policy(packed, self._temperature, self.policy)[2]

        return DataProto.from_dict({"full_kl": column(batch, self._limits, self._device, divergence)})

    @property
    def _device(self) -> torch.device:
        return model_device(self.policy)
