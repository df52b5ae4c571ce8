"""The whole configuration: all sections, and what follows from them together."""

from __future__ import annotations

from math import lcm
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import model_validator

from verl.config import batches, checks, notices
from verl.config.base import Section, part
from verl.config.batches import BatchPlan, SamplingPlan
from verl.config.schema_cluster import TRAINED, ClusterConfig, ProfilerConfig
from verl.config.schema_data import DataConfig, ModelConfig
from verl.config.schema_reward import RewardConfig
from verl.config.schema_roles import ActorConfig, CriticConfig, RefConfig
from verl.config.schema_run import AlgorithmConfig, RolloutConfig, TrainerConfig
from verl.errors import ConfigError


class Config(Section):
    """One run, complete.

    Building it checks everything that can be known without a machine, a model or a file: single fields raise
    pydantic's ``ValidationError`` (``load_config`` and ``build_config`` turn that into ``ConfigError``), and rules
    that tie fields together raise :class:`~verl.errors.ConfigError`.
    """

    acts_in: ClassVar[str] = "everywhere"

    data: DataConfig
    model: ModelConfig
    actor: ActorConfig = part(ActorConfig)
    rollout: RolloutConfig = part(RolloutConfig)
    ref: RefConfig = part(RefConfig)
    critic: CriticConfig = part(CriticConfig)
    algorithm: AlgorithmConfig = part(AlgorithmConfig)
    reward: RewardConfig = part(RewardConfig)
    trainer: TrainerConfig = part(TrainerConfig)
    cluster: ClusterConfig = part(ClusterConfig)
    profiler: ProfilerConfig = part(ProfilerConfig)

    @model_validator(mode="before")
    @classmethod
    def _correct_stale_responses(cls, tree: Any) -> Any:
        """Off policy by design, unless the user says what to do about it: truncated importance sampling."""
        trainer = tree.get("trainer") if isinstance(tree, dict) else None
        if not isinstance(trainer, dict) or not _off_policy(trainer.get("mode"), trainer.get("max_staleness", 1)):
            return tree
        algorithm = tree.get("algorithm") or {}
        if not isinstance(algorithm, dict) or "rollout_correction" in algorithm:
            return tree
        return tree | {"algorithm": algorithm | {"rollout_correction": {"rollout_is": "token"}}}

    @model_validator(mode="after")
    def _rules_between_fields(self) -> Self:
        checks.check(self)
        return self

    def notices(self) -> list[str]:
        """One sentence for every setting that is accepted but has no effect, or not the one it seems to have."""
        return notices.notices(self)

    def ranks_of(self, role: str) -> int | None:
        return batches.ranks(self, role)

    def nodes_of(self, pool: str) -> int:
        return batches.nodes(self, pool)

    def reference_batch(self) -> tuple[int | None, int | None]:
        return batches.reference_limits(self)

    @property
    def run_dir(self) -> Path:
        return self.trainer.folder

    @property
    def uses_critic(self) -> bool:
        return self.algorithm.uses_critic

    @property
    def off_policy(self) -> bool:
        return _off_policy(self.trainer.mode, self.trainer.max_staleness)

    @property
    def rollout_apart(self) -> bool:
        return (self.cluster.placement.rollout_alone or self.overlaps) and self.cluster.backend != "inline"

    @property
    def overlaps(self) -> bool:
        """Whether responses are sampled while others are trained on, where rollout is apart."""
        return self.trainer.mode != "sync" or self.trainer.stream_minibatches

    @property
    def engine_log_probs(self) -> bool:
        """Whether the engine's log-probs are the old ones, whatever the trainer's are: those of the weights that
        sampled a mini-batch are gone when it is streamed."""
        return self.algorithm.rollout_correction.bypass_mode or self.trainer.stream_minibatches

    @property
    def streamed_prompts(self) -> int:
        """Prompts that are trained together with trainer.stream_minibatches: whole mini-batches of actor and critic."""
        mini = self.actor_batch(1).mini_batch_prompts
        return lcm(mini, self.critic_batch(1).mini_batch_prompts) if self.uses_critic else mini

    @property
    def bootstraps(self) -> bool:
        """Whether the critic is asked for the value behind a response that was cut, which takes one token more."""
        return self.uses_critic and self.algorithm.bootstrap_truncated

    @property
    def uses_reference(self) -> bool:
        return self.algorithm.use_kl_in_reward or self.actor.use_kl_loss

    @property
    def roles(self) -> list[str]:
        """The roles that this run has, rollout apart."""
        needed = {"critic": self.uses_critic, "reference": self.uses_reference}
        return [role for role in TRAINED if needed.get(role, True)]

    @property
    def data_seed(self) -> int:
        return self.trainer.seed if self.data.seed is None else self.data.seed

    @property
    def critic_model_path(self) -> str:
        return self.critic.model.path or self.model.path

    @property
    def critic_code_trusted(self) -> bool:
        """Whether Python code that comes with :attr:`critic_model_path` may run."""
        return (self.critic.model if self.critic.model.path else self.model).trust_remote_code

    @property
    def tokenizer(self) -> tuple[str, bool]:
        """Its folder or hub id, and whether Python code that comes with it may run."""
        return self.model.tokenizer_path or self.model.path, self.data.trust_remote_code

    @property
    def loss_scale_factor(self) -> float:
        """The divisor C of seq-mean-token-sum-norm, in tokens."""
        return self.actor.loss_scale_factor or float(self.data.max_response_length)

    @property
    def ranks(self) -> int | None:
        """Training ranks of the actor; None where the machine decides (its number of GPUs)."""
        return batches.ranks(self)

    def device_of(self, role: str) -> str:
        """Where a role other than rollout computes: auto, cpu or cuda."""
        cluster = self.cluster
        return cluster.pool(cluster.placement.pool_of(role)).device or self.trainer.device

    def actor_batch(self, ranks: int | None = None) -> BatchPlan:
        """How the actor goes through a batch. ``ranks``: training ranks found at start; None: those of the role's pool,
        or 1 where that is unknown. Raises ConfigError: the batch sizes do not divide over that many ranks."""
        return batches.plan(self, "actor", ranks)

    def critic_batch(self, ranks: int | None = None) -> BatchPlan:
        """How the critic goes through a batch; arguments and errors as :meth:`actor_batch`."""
        return batches.plan(self, "critic", ranks)

    @property
    def training_sampling(self) -> SamplingPlan:
        rollout = self.rollout
        return SamplingPlan(rollout.temperature, rollout.top_p, rollout.top_k, rollout.n, self.algorithm.uses("remax"))

    @property
    def validation_sampling(self) -> SamplingPlan:
        """What the engine is asked for in validation; temperature 0 when greedy."""
        val = self.rollout.val_kwargs
        given = {name: getattr(val, name) for name in type(val).model_fields if name != "do_sample"}
        return SamplingPlan(**given | {"temperature": 0.0 if val.greedy else val.temperature})

    def total_training_steps(self, num_prompts: int) -> int:
        """Training steps of the run over a training set of ``num_prompts`` prompts (after filtering). Raises
        ConfigError: the training set does not fill one batch."""
        batch = self.data.train_batch_size
        if num_prompts < (batch if self.data.drop_last else 1):
            what = f"data.train_files do not fill one batch of data.train_batch_size={batch} prompts"
            less = f"set data.train_batch_size to at most {num_prompts} prompts, or give more data"
            fix = less if num_prompts else "give data files with at least one usable prompt"
            raise ConfigError(what, f"{num_prompts} prompts", fix)
        if self.trainer.total_training_steps is not None:
            return self.trainer.total_training_steps
        per_epoch = num_prompts // batch if self.data.drop_last else -(-num_prompts // batch)
        return per_epoch * self.trainer.total_epochs


def _off_policy(mode: Any, max_staleness: Any) -> bool:
    return mode == "one_step_off" or (mode == "async" and max_staleness != 0)
