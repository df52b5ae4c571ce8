"""The trained roles: actor, critic and reference, with their optimizers and batch sizes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator

from verl.config.base import FieldProblem, Section
from verl.config.names import did_you_mean

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")


def check_kl_type(value: str) -> str:
    """A KL estimator's name, with or without the trailing + of the straight-through gradient."""
    name = value.removesuffix("+")
    if name == "full":
        raise FieldProblem(
            "the KL over the full vocabulary is not supported yet",
            "use low_var_kl (k3), or another of " + ", ".join(KL_TYPES),
        )
    if name not in KL_TYPES:
        raise FieldProblem(
            "is not a KL estimator",
            f"{did_you_mean(name, KL_TYPES)}use one of {', '.join(KL_TYPES)}, "
            "each with an optional trailing + (straight-through gradient)",
        )
    return value


KlType = Annotated[str, AfterValidator(check_kl_type)]


def _betas(value: tuple[float, float]) -> tuple[float, float]:
    if not all(0 <= beta < 1 for beta in value):
        raise FieldProblem("each beta must be at least 0 and below 1", "for example [0.9, 0.999]")
    return value


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = Field(1e-6, ge=0, description="Peak learning rate.")
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of the learning rate after warm-up, down to lr x min_lr_ratio at the last step."
    )
    lr_warmup_steps: int = Field(
        -1, ge=-1, description="Training steps of linear warm-up from 0; -1: lr_warmup_steps_ratio of all steps."
    )
    lr_warmup_steps_ratio: float = Field(
        0.0, ge=0, le=1, description="Warm-up as a share of all training steps; used when lr_warmup_steps is -1."
    )
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="Where linear and cosine schedules end, as a share of lr.")
    weight_decay: float = Field(0.01, ge=0, description="Decoupled weight decay (AdamW).")
    betas: Annotated[tuple[float, float], AfterValidator(_betas)] = Field(
        (0.9, 0.999), description="Decay rates of Adam's first and second moment."
    )
    eps: float = Field(1e-8, gt=0, description="Added to the root of Adam's second moment.")


class CriticOptimConfig(OptimConfig):
    """As the actor's, with a higher learning rate: the value head starts from nothing."""

    lr: float = Field(1e-5, ge=0, description="Peak learning rate.")


class PolicyLossConfig(Section):
    """Which policy loss."""

    loss_mode: Literal["vanilla"] = Field(
        "vanilla", description="Policy loss; vanilla: PPO's clipped surrogate with dual clip."
    )


class ActorConfig(Section):
    """The policy being trained: its mini-batches, its loss and its optimizer."""

    ppo_mini_batch_size: int = Field(
        256, ge=1, description="Prompts in one optimizer step (all ranks together); divides data.train_batch_size."
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Responses in one backward pass on one rank; null: dynamic batching by tokens."
    )
    use_dynamic_bsz: bool | None = Field(
        None,
        description="Fill micro-batches up to ppo_max_token_len_per_gpu tokens instead of a fixed number of responses; "
        "null: true when no micro-batch size is given.",
    )
    ppo_max_token_len_per_gpu: int = Field(
        16384, ge=1, description="Most tokens (prompt and response) in one micro-batch on one rank, dynamic batching."
    )
    gradient_accumulation: int | None = Field(
        None,
        ge=1,
        description="Micro-batches in one optimizer step on one rank; derived, and when given it must agree.",
    )
    ppo_epochs: int = Field(1, ge=1, description="Passes over each batch of experience.")
    shuffle: bool = Field(False, description="Draw mini-batches in a seeded random order instead of as generated.")
    optim: OptimConfig = Field(default_factory=OptimConfig, description="Optimizer and schedule.")
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm of one optimizer step.")
    clip_ratio: float = Field(
        0.2, gt=0, le=1, description="Clip range of the probability ratio on both sides, unless low or high is given."
    )
    clip_ratio_low: float | None = Field(
        None, gt=0, le=1, description="Clip range below: the ratio's lower bound is 1 - this; null: clip_ratio."
    )
    clip_ratio_high: float | None = Field(
        None, gt=0, description="Clip range above: the ratio's upper bound is 1 + this; null: clip_ratio."
    )
    clip_ratio_c: float = Field(
        3.0, gt=1, description="Dual clip: bound of the loss at negative advantages, as a multiple of the advantage."
    )
    entropy_coeff: float = Field(0.0, ge=0, description="Weight of the entropy bonus in the loss.")
    use_kl_loss: bool = Field(False, description="Add a KL term against the reference model to the loss.")
    kl_loss_coef: float = Field(0.001, ge=0, description="Weight of that KL term.")
    kl_loss_type: KlType = Field(
        "low_var_kl",
        description="Estimator of that KL term: kl|k1, abs, mse|k2, low_var_kl|k3; a trailing + takes the value from "
        "this estimator and the gradient from k2 (straight-through).",
    )
    loss_agg_mode: LossAggMode = Field("token-mean", description="How token losses become one number.")
    loss_scale_factor: float | None = Field(
        None,
        gt=0,
        description="Fixed divisor of seq-mean-token-sum-norm, in tokens; null: data.max_response_length.",
    )
    policy_loss: PolicyLossConfig = Field(default_factory=PolicyLossConfig, description="Which policy loss.")
    prefix_sharing: Literal["auto", "on", "off"] = Field(
        "auto", description="Compute a group's prompt once per micro-batch; auto: when it saves work."
    )
    recompute_old_log_probs: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Pass that recomputes old log-probs with the trainer; auto: only where the engine's are not exact.",
    )

    @field_validator("prefix_sharing", mode="before")
    @classmethod
    def _yaml_on_off(cls, value: Any) -> Any:
        # YAML 1.1 reads the bare words on and off as booleans.
        return {True: "on", False: "off"}[value] if isinstance(value, bool) else value

    @property
    def clip_low(self) -> float:
        """Clip range below 1 that the loss uses."""
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        """Clip range above 1 that the loss uses."""
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def dynamic(self) -> bool:
        """Whether micro-batches are filled by tokens."""
        if self.use_dynamic_bsz is None:
            return self.ppo_micro_batch_size_per_gpu is None
        return self.use_dynamic_bsz


class RefConfig(Section):
    """The frozen reference model that KL terms compare with."""

    log_prob_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Responses in one forward pass on one rank; null: as log_prob_max_token_len_per_gpu."
    )
    log_prob_max_token_len_per_gpu: int | None = Field(
        None, ge=1, description="Most tokens in one forward pass on one rank; null: the actor's batching."
    )


class CriticModelConfig(Section):
    """Which model the critic starts from."""

    path: str | None = Field(None, description="As model.path; null: the actor's model with a new value head.")


class CriticConfig(Section):
    """The value model of PPO (algorithm.adv_estimator=gae only)."""

    optim: CriticOptimConfig = Field(default_factory=CriticOptimConfig, description="Optimizer and schedule.")
    model: CriticModelConfig = Field(default_factory=CriticModelConfig, description="Where the critic starts.")
    ppo_mini_batch_size: int | None = Field(
        None, ge=1, description="Prompts in one optimizer step of the critic; null: the actor's."
    )
    ppo_micro_batch_size_per_gpu: int | None = Field(
        None, ge=1, description="Responses in one backward pass on one rank; null: the actor's."
    )
    use_dynamic_bsz: bool | None = Field(
        None, description="As the actor's; null: false when the critic has a micro-batch size, else the actor's."
    )
    ppo_max_token_len_per_gpu: int = Field(
        32768, ge=1, description="Most tokens in one micro-batch on one rank, dynamic batching."
    )
    ppo_epochs: int | None = Field(None, ge=1, description="Passes over each batch; null: the actor's.")
    cliprange_value: float = Field(0.5, gt=0, description="How far a value may move from its old one before clipping.")
    grad_clip: float = Field(1.0, gt=0, description="Largest gradient norm of one optimizer step.")
    loss_agg_mode: LossAggMode = Field("token-mean", description="How token losses become one number.")
