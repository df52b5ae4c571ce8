"""The reference policy: the model that training started from, frozen."""

from __future__ import annotations

import torch
from torch import Tensor

from verl.models.packed import PackedBatch
from verl.models.policy import PolicyModel, model_device
from verl.protocol import DataProto
from verl.training.optimizer import WATCHED
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
        """``ref_log_probs`` (B, R) float32; ``meta_info["ref_checksum"]``, as :func:`sampled_sum`."""
        values = self.passes.column(
            batch, model_device(self.policy), lambda packed: self.policy(packed, self._temperature)[0]
        )
        return DataProto.from_dict({"ref_log_probs": values}, meta_info={"ref_checksum": sampled_sum(self.policy)})

    def full_kl(self, batch: DataProto, policy: PolicyModel) -> DataProto:
        """``full_kl`` (B, R) float32: the KL divergence of ``policy`` from this one, over the whole vocabulary; with
        the checksum."""

        def divergence(packed: PackedBatch) -> Tensor:
            return policy(packed, self._temperature, self.policy)[2]

        values = self.passes.column(batch, model_device(self.policy), divergence)
        return DataProto.from_dict({"full_kl": values}, meta_info={"ref_checksum": sampled_sum(self.policy)})


def sampled_sum(policy: PolicyModel) -> float:
    """Of up to 16 numbers of each parameter, spread over it: the same as long as nobody changes the weights."""
    numbers = [p.detach().reshape(-1)[:: max(1, -(-p.numel() // WATCHED))] for p in policy.parameters()]
    return float(torch.cat(numbers).double().sum())
