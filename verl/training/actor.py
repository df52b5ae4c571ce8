"""The actor: log-probs of a batch and its update."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from verl.algorithms.aggregation import Denominators
from verl.algorithms.kl import is_full
from verl.algorithms.loss_inputs import LossInputs
from verl.algorithms.masking import select
from verl.algorithms.metric import Metric, correlation_metrics, max_metric, mean_metric, std_metrics
from verl.algorithms.policy_loss import POLICY_LOSSES, actor_loss, find_policy_loss
from verl.algorithms.rollout_correction import correct_rollout
from verl.config import ActorConfig
from verl.config.schema_roles import RolloutCorrectionConfig
from verl.models.policy import PolicyModel, model_device
from verl.protocol import DataProto
from verl.training.micro_batches import Limits, MicroBatch
from verl.training.optimizer import MasterWeights, Optimizer
from verl.training.passes import Passes
from verl.training.reference import sampled_sum

LOSS_COLUMNS = ("old_log_probs", "rollout_log_probs", "advantages", "response_mask")
OPTIONAL_COLUMNS = ("ref_log_probs", "importance_weights", "draws")


class Actor:
    """The policy being trained.

    Args:
        policy: loaded in float32; computes in ``compute_dtype`` from then on.
        config: of the actor.
        limits: of one forward.
        temperature: of the training sampling.
        correction: of the rollout; in bypass mode its weights are computed here.
        reference: in this process, for the KL over the whole vocabulary.
    """

    def __init__(
        self,
        policy: PolicyModel,
        config: ActorConfig,
        limits: Limits,
        temperature: float,
        weights: MasterWeights,
        correction: RolloutCorrectionConfig | None = None,
        reference: PolicyModel | None = None,
    ) -> None:
        self.policy, self.weights = policy, weights
        self._config, self._temperature = config, temperature
        self.passes = Passes("actor", limits, weights.ranks, config.auto_micro_batch, weights.abandon)
        self._correction = correction or RolloutCorrectionConfig()
        self._loss = POLICY_LOSSES["gpg"] if self._correction.reinforce else find_policy_loss(config.policy_loss)
        self._reference = reference if config.use_kl_loss and is_full(config.kl_loss_type) else None
        self.optimizer = Optimizer("actor", weights, config.optim, config.grad_clip)

    def log_probs(self, batch: DataProto) -> DataProto:
        """``old_log_probs`` (B, R) float32 under the current weights."""
        device = model_device(self.policy)
        values = self.passes.column(batch, device, lambda packed: self.policy(packed, self._temperature)[0])
        return DataProto.from_dict({"old_log_probs": values})

    def update(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        """One optimizer step on the mini-batch.

        Args:
            mini_batch: a processed batch; ``meta_info["learning_rate"]`` is this step's, ``meta_info["scheduled"]``
                this step's values of fields of the actor's configuration, and ``meta_info["fresh_weights"]`` says that
                the weights are still those that sampled it.
            denominators: of the whole mini-batch on all ranks.
        """
        config = self._config.model_copy(update=mini_batch.meta_info["scheduled"])
        columns = (*LOSS_COLUMNS, *(name for name in OPTIONAL_COLUMNS if name in mini_batch.tensors))
        statistics = self._statistics(mini_batch, config)

        def loss_of(part: MicroBatch) -> tuple[Tensor, dict[str, Metric]]:
            inputs, metrics = self._inputs(part, config)
            inputs = replace(inputs, statistics=_of_rows(statistics, part, len(mini_batch)))
            loss, found = actor_loss(self._loss, inputs, config, denominators)
            if mini_batch.meta_info["fresh_weights"]:
                metrics |= _engine_difference(inputs)
            return loss, metrics | found

        rate, device = mini_batch.meta_info["learning_rate"], model_device(self.policy)
        nothing = self._rows_without_gradient(mini_batch, config)
        metrics = self.passes.step(self.optimizer, mini_batch, device, columns, loss_of, rate, nothing)
        if self._reference is not None:
            metrics["training/ref_checksum"] = Metric(sampled_sum(self._reference), 1.0, "max")
        return metrics

    def _rows_without_gradient(self, mini_batch: DataProto, config: ActorConfig) -> list[int]:
        """Rows whose loss is 0 under any weights (``actor.skip_zero_loss``)."""
        if not (config.skip_zero_loss and self._loss.needs_advantage) or config.entropy_coeff or config.use_kl_loss:
            return []
        zero = select(mini_batch.tensors["advantages"], mini_batch.tensors["response_mask"].bool()) == 0
        return zero.all(1).nonzero().flatten().tolist()

    def _inputs(self, part: MicroBatch, config: ActorConfig) -> tuple[LossInputs, dict[str, Metric]]:
        """A micro-batch through the model; in bypass mode also corrected, with the metrics of that."""
        log_probs, entropy, *kl = self.policy(part.packed, self._temperature, self._reference)
        if config.entropy_coeff == 0:
            entropy = entropy.detach()
        inputs = replace(
            _loss_inputs(part.packed.scatter(log_probs), part.columns),
            entropy=part.packed.scatter(entropy),
            full_kl=part.packed.scatter(kl[0]) if kl else None,
        )
        if not (self._correction.bypass_mode and self._correction.active):
            return inputs, {}
        weights, metrics = correct_rollout(
            inputs.log_probs, part.columns["rollout_log_probs"], inputs.response_mask, self._correction
        )
        return replace(inputs, importance_weights=weights), metrics

    @torch.no_grad()
    def _statistics(self, mini_batch: DataProto, config: ActorConfig) -> dict[str, Tensor]:
        """What the policy loss needs to know of the whole mini-batch, by one more forward pass; mostly nothing."""
        if self._loss.statistics is None:
            return {}
        names = [name for name in (*LOSS_COLUMNS, *OPTIONAL_COLUMNS) if name in mini_batch.tensors]
        columns = {name: mini_batch.tensors[name] for name in names}
        current = self.log_probs(mini_batch).tensors["old_log_probs"]
        return self._loss.statistics(_loss_inputs(current, columns), config)


def _loss_inputs(log_probs: Tensor, columns: dict[str, Tensor]) -> LossInputs:
    return LossInputs(log_probs, **columns)  # type: ignore[arg-type]  # none of the columns is the statistics


def _of_rows(statistics: dict[str, Tensor], part: MicroBatch, rows: int) -> dict[str, Tensor]:
    """The statistics of a micro-batch: columns of its rows, everything else as it is."""
    device = part.packed.input_ids.device
    return {
        name: (value[part.rows] if value.dim() and value.shape[0] == rows else value).to(device)
        for name, value in statistics.items()
    }


@torch.no_grad()
def _engine_difference(inputs: LossInputs) -> dict[str, Metric]:
    """How far the trainer's probabilities of the sampled tokens, before its first optimizer step of a batch, are from
    the engine's (parity law: 0 on CPU), from the old ones (0 in every dtype) and from the reference's."""
    assert inputs.rollout_log_probs is not None
    name, mask = "training/rollout_probs_diff", inputs.response_mask.bool()
    ours, engine = inputs.log_probs.exp(), inputs.rollout_log_probs.exp()
    difference = (ours - engine).abs()
    metrics = {
        f"{name}_mean": mean_metric(difference, mask),
        f"{name}_max": max_metric(difference, mask),
        **std_metrics(f"{name}_std", difference, mask),
        **correlation_metrics("training/rollout_actor_probs_pearson_corr", ours, engine, mask),
        "training/rollout_ratio_diff_mean": _ratio_difference(inputs, inputs.rollout_log_probs, mask),
        "training/first_ratio_diff_mean": _ratio_difference(inputs, inputs.old_log_probs, mask),
    }
    if inputs.ref_log_probs is not None:
        metrics["training/ref_ratio_diff_mean"] = _ratio_difference(inputs, inputs.ref_log_probs, mask)
    return metrics


def _ratio_difference(inputs: LossInputs, others: Tensor, mask: Tensor) -> Metric:
    """Mean of ``|p / p_other - 1|`` over the trained tokens."""
    return mean_metric(((inputs.log_probs - others).exp() - 1).abs(), mask)
