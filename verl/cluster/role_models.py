"""The models of a worker's roles, loaded as its configuration and its ranks ask for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from verl.config import BatchPlan, Config
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import is_classifier, load_causal_lm, load_classifier
from verl.models.policy import PolicyModel, ValueModel, enable_checkpointing
from verl.training.actor import Actor
from verl.training.critic import Critic
from verl.training.micro_batches import Limits
from verl.training.optimizer import MasterWeights
from verl.training.parallel import Ranks
from verl.training.parallel_sharded import master_weights
from verl.training.passes import Passes
from verl.training.reference import Reference


@dataclass(frozen=True)
class RoleModels:
    """Loads them.

    Attributes:
        ranks: that train together.
        device: to compute on.
    """

    config: Config
    ranks: Ranks
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        """That models compute in."""
        found: torch.dtype = getattr(torch, self.config.model.dtype)
        return found

    def policy(self) -> PolicyModel:
        """One that is not trained here."""
        return PolicyModel(self._load(self.dtype, self.device))

    def actor(self, reference: Reference | None) -> Actor:
        """``reference``: in this process."""
        config, policy = self.config, PolicyModel(self._load_trained())
        return Actor(
            policy,
            config.actor,
            limits_of(config.actor_batch(1), config),
            config.rollout.temperature,
            self._master_weights(policy),
            config.algorithm.rollout_correction,
            None if reference is None else reference.policy,
        )

    def reference(self, abandon: Callable[[], None]) -> Reference:
        """``abandon``: of the actor in this process, whose layers take part in a KL over the whole vocabulary."""
        config, (rows, tokens) = self.config, self.config.reference_batch()
        limits = Limits(rows, tokens, limits_of(config.actor_batch(1), config).share_prompts)
        passes = Passes("reference", limits, self.ranks, config.actor.auto_micro_batch, abandon)
        return Reference(self.policy(), passes, config.rollout.temperature)

    def critic(self) -> Critic:
        config = self.config
        model = ValueModel(self._load_trained(critic=True))
        limits = limits_of(config.critic_batch(1), config)
        return Critic(model, config.critic, limits, self._master_weights(model), config.actor.auto_micro_batch)

    def _master_weights(self, role: PolicyModel | ValueModel) -> MasterWeights:
        actor, fp16 = self.config.actor, self.config.model.fp16
        settings = self.device, actor.reshard_after_forward, actor.auto_micro_batch
        return master_weights(role, self.dtype, fp16, self.ranks, *settings)

    def _load_trained(self, critic: bool = False) -> PreTrainedModel:
        """In float32; where the ranks will share it out, in main memory first."""
        return self._load(torch.float32, torch.device("cpu") if self.ranks.lockstep else self.device, critic)

    def _load(self, dtype: torch.dtype, device: torch.device, critic: bool = False) -> PreTrainedModel:
        config, settings = self.config, self.config.model
        load, path, trusted = load_causal_lm, settings.path, settings.trust_remote_code
        if critic:
            path, trusted = config.critic_model_path, config.critic_code_trusted
            load = load_classifier if is_classifier(path) else load_causal_lm
        model = load(path, dtype, trusted, attn_implementation=ATTENTION_NAME).to(device)
        if settings.enable_gradient_checkpointing:
            enable_checkpointing(model)
        return model


def limits_of(plan: BatchPlan, config: Config) -> Limits:
    """What one forward of a trained role may hold."""
    sharing = config.actor.prefix_sharing
    return Limits(
        plan.micro_batch_rows, plan.max_tokens, sharing == "on" or (sharing == "auto" and config.rollout.n > 1)
    )
