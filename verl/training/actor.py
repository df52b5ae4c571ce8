"""The actor: log-probs of a batch and its update."""

from __future__ import annotations

import torch

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric, max_metric, mean_metric, merge_all, std_metrics
from verl.algorithms.policy_loss import LossInputs, actor_loss
from verl.config import ActorConfig
from verl.models.policy import PolicyModel, model_device
from verl.protocol import DataProto
from verl.training.micro_batches import Limits, column, micro_batches
from verl.training.optimizer import MasterWeights, Optimizer


class Actor:
    """The policy being trained.

    Args:
        policy: loaded in float32; computes in ``compute_dtype`` from then on.
        config: of the actor.
        limits: of one forward.
        temperature: of the training sampling.
    """

    def __init__(
        self,
        policy: PolicyModel,
        config: ActorConfig,
        limits: Limits,
        temperature: float,
        weights: MasterWeights,
    ) -> None:
        self.policy, self.weights = policy, weights
        self._config, self._limits, self._temperature = config, limits, temperature
        self.optimizer = Optimizer("actor", weights, config.optim, config.grad_clip)

    def log_probs(self, batch: DataProto) -> DataProto:
        """``old_log_probs`` (B, R) float32 under the current weights."""
        values = column(
            batch, self._limits, model_device(self.policy), lambda packed: self.policy(packed, self._temperature)[0]
        )
        return DataProto.from_dict({"old_log_probs": values})

    def update(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on the mini-batch.

        Args:
            mini_batch: a processed batch; ``meta_info["learning_rate"]`` is this step's, and
                ``meta_info["fresh_weights"]`` says that the weights are still those that sampled it.
            denominators: of the whole mini-batch on all ranks.
        """
        columns = ["old_log_probs", "rollout_log_probs", "advantages", "response_mask"]
        if self._config.use_kl_loss:
            columns.append("ref_log_probs")
        parts: list[dict[str, Metric]] = []
        self.optimizer.clear()
        for part in micro_batches(mini_batch, self._limits, model_device(self.policy), tuple(columns)):
            flat_log_probs, flat_entropy = self.policy(part.packed, self._temperature)
            if self._config.entropy_coeff == 0:
                flat_entropy = flat_entropy.detach()
            inputs = LossInputs(
                log_probs=part.packed.scatter(flat_log_probs),
                old_log_probs=part.columns["old_log_probs"],
                advantages=part.columns["advantages"],
                response_mask=part.columns["response_mask"],
                rollout_log_probs=part.columns["rollout_log_probs"],
                ref_log_probs=part.columns.get("ref_log_probs"),
                entropy=part.packed.scatter(flat_entropy),
            )
            loss, metrics = actor_loss(inputs, self._config, denominators)
            loss.backward()
            if mini_batch.meta_info["fresh_weights"]:
                metrics |= _engine_difference(inputs)
            parts.append(metrics)
        return merge_all(parts) | self.optimizer.step(mini_batch.meta_info["learning_rate"])


@torch.no_grad()
def _engine_difference(inputs: LossInputs) -> dict[str, Metric]:
    """How far the trainer's probabilities of the sampled tokens are from the engine's (parity law: 0 on CPU)."""
    assert inputs.rollout_log_probs is not None
    name, mask = "training/rollout_probs_diff", inputs.response_mask.bool()
    difference = (inputs.log_probs.exp() - inputs.rollout_log_probs.exp()).abs()
    return {
        f"{name}_mean": mean_metric(difference, mask),
        f"{name}_max": max_metric(difference, mask),
        **std_metrics(f"{name}_std", difference, mask),
    }
