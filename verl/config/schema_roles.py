"""The trained roles: actor, critic and reference, with their optimizers, batch sizes and losses."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from verl.config.base import FieldProblem, Section, Takes, Unit, also, field, in_stage, part
from verl.config.names import did_you_mean
from verl.config.units import Number, Prompts, Responses, Share, Steps, Tokens


class PolicyLossConfig(Section):
    """Which policy loss."""

    acts_in: ClassVar[str] = "update: the actor's loss"

    loss_mode: Literal[
        "vanilla", "decoupled", "gspo", "cispo", "gpg", "geo_mean", "sapo", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"
    ] = "vanilla"
    """Policy loss; vanilla: PPO's clipped surrogate with dual clip. See docs/algorithms.md."""
    path: str | None = field(None, "Python file with a policy loss of your own, instead of loss_mode.")
    name: str = field("policy_loss", "Its function in that file.")
    clip_cov_ratio: Share = field(2e-4, "clip_cov: share of all tokens that is left out.", ge=0, le=1)
    clip_cov_lb: Number = field(1.0, "clip_cov: tokens are left out only above this covariance.")
    clip_cov_ub: Number = field(5.0, "clip_cov: tokens are left out only below this covariance.")
    kl_cov_ratio: Share = field(2e-3, "kl_cov: share of tokens, those of most covariance, held back.", ge=0, le=1)
    ppo_kl_coef: Number = field(1.0, "kl_cov: weight of their penalty, the absolute log-ratio.", ge=0)

    @property
    def needs_draws(self) -> bool:
        return self.path is not None or self.loss_mode in ("clip_cov", "kl_cov")


class ScheduleConfig(Section):
    """How a coefficient moves over the run."""

    acts_in: ClassVar[str] = "update: the actor's loss"

    type: Literal["constant", "linear", "cosine", "adaptive"] = "constant"
    """constant; linear or cosine: to end after the last step; adaptive: towards target."""
    end: Number | None = field(None, "linear, cosine: the value at the end of the run.", ge=0)
    target: Number | None = field(None, "adaptive: what the watched metric is steered to.", gt=0)
    rate: Share = field(0.1, "adaptive: largest change in one training step, as a share.", gt=0, lt=1)
    min: Number | None = field(None, "adaptive: lower bound; null: a tenth of the start.", gt=0)
    max: Number | None = field(None, "adaptive: upper bound; null: ten times the start.", gt=0)

    def bounds(self, start: float) -> tuple[float, float]:
        """Between which values an adaptive coefficient stays."""
        return start / 10 if self.min is None else self.min, start * 10 if self.max is None else self.max


class ClipScheduleConfig(ScheduleConfig):
    """How the clip threshold moves: clip_ratio_high by the schedule, clip_ratio_low in proportion."""

    target_metric: Literal["ppo_kl", "pg_clipfrac"] = "ppo_kl"
    """adaptive: the metric that target is about, actor/ppo_kl or actor/pg_clipfrac."""


def _threshold(value: Any) -> Any:
    """A range may be written as the field writes it, ``0.5_5.0``."""
    if isinstance(value, str) and value.count("_") == 1:
        return [float(part) if part.replace(".", "", 1).isdigit() else part for part in value.split("_")]
    return value


def _range(value: float | tuple[float, float]) -> float | tuple[float, float]:
    if isinstance(value, tuple) and not 0 <= value[0] < value[1]:
        raise FieldProblem("a range goes from a lower to a higher ratio, from 0 up", "for example [0.5, 5.0]")
    if isinstance(value, float) and value <= 0:
        raise FieldProblem("must be above 0", "for example 2.0, or a range such as [0.5, 5.0]")
    return value


Threshold = Annotated[Number | tuple[Number, Number], BeforeValidator(_threshold), AfterValidator(_range)]

_OLDER_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
REJECTIONS = tuple(f"{over}_{k}" for over in ("token", "seq_sum", "seq_mean", "seq_max") for k in ("k1", "k2", "k3"))


def _rejection(value: str) -> str:
    value = _OLDER_REJECTIONS.get(value, value)
    if value not in REJECTIONS:
        fix = f"{did_you_mean(value, REJECTIONS)}use one of {', '.join(REJECTIONS)}"
        raise FieldProblem("is not a rejection statistic", fix)
    return value


class RolloutCorrectionConfig(Section):
    """Correction of the difference between the engine's probabilities and the trainer's."""

    acts_in: ClassVar[str] = "process: weights of the tokens"

    rollout_is: Literal["token", "sequence"] | None = None
    """Importance weights pi_old / pi_rollout of each token, or of the whole response; null: none."""
    rollout_is_threshold: Threshold = 2.0
    """A number: weights are cut to at most this (TIS); a range [lo, hi]: weights outside become 0 and those inside stay
    (IcePop; lo 0: MIS)."""
    rollout_rs: Annotated[str, AfterValidator(_rejection), Takes(f"one of {', '.join(REJECTIONS)}")] | None = None
    """Reject tokens, or responses, by a statistic of the log-ratio: token|seq_sum|seq_mean|seq_max, then _k1
    (seq_mean_k1: geometric mean of the ratio), _k2 or _k3; null: none."""
    rollout_rs_threshold: Threshold | None = None
    """k1: the ratio kept, as a range [lo, hi], or one number c for [1/c, c]; k2, k3: the largest divergence kept."""
    bypass_mode: bool = field(False, "Take the engine's log-probs as old ones: the loss's ratio corrects by itself.")
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """With bypass_mode: the policy loss as configured, or the policy gradient -A log pi times importance weights."""

    @property
    def active(self) -> bool:
        """Whether any token's loss is weighted."""
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def reinforce(self) -> bool:
        """Whether the policy gradient takes the place of the policy loss."""
        return self.bypass_mode and self.loss_type == "reinforce"


WORKERS = in_stage("start: the workers")
MEMORY = in_stage("every stage: the workers")

LossAggMode = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
KL_TYPES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "full")


def check_kl_type(value: str) -> str:
    """A KL estimator's name, with or without the trailing + of the straight-through gradient."""
    name = value.removesuffix("+")
    if name not in KL_TYPES:
        kinds = f"use one of {', '.join(KL_TYPES)}, each with an optional trailing + (straight-through gradient)"
        raise FieldProblem("is not a KL estimator", did_you_mean(name, KL_TYPES) + kinds)
    return value


KlType = Annotated[
    str, AfterValidator(check_kl_type), Takes(f"one of {', '.join(KL_TYPES)}, each with an optional trailing +")
]


Beta = Annotated[Number, Field(ge=0, lt=1)]


class OptimConfig(Section):
    """AdamW and its learning-rate schedule."""

    acts_in: ClassVar[str] = "update: the optimizer"

    lr: Number = field(1e-6, "Peak learning rate.", ge=0)
    lr_scheduler_type: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Course of the learning rate after warm-up, down to lr x min_lr_ratio after the last step; wsd: constant, then
    linear over lr_wsd_decay_steps."""
    lr_warmup_steps: Steps = Field(-1, ge=-1)
    """Training steps of linear warm-up from 0; -1: lr_warmup_steps_ratio of all steps."""
    lr_warmup_steps_ratio: Share = Field(0.0, ge=0, le=1)
    """Warm-up as a share of all training steps; used when lr_warmup_steps is -1."""
    lr_wsd_decay_steps: Steps | None = Field(None, ge=1)
    """wsd: training steps of the decay at the end; null: a tenth of all steps."""
    min_lr_ratio: Share = field(0.0, "Where linear, cosine and wsd end, as a share of lr.", ge=0, le=1)
    weight_decay: Number = field(0.01, "Decoupled weight decay (AdamW).", ge=0)
    betas: tuple[Beta, Beta] = field((0.9, 0.999), "Decay rates of Adam's first and second moment.")
    eps: Number = field(1e-8, "Added to the root of Adam's second moment.", gt=0)
    decay_norms_and_biases: bool = field(False, "Decay parameters of one dimension too (norms, biases), as verl does.")
    on_nonfinite: Literal["skip", "stop"] = "skip"
    """A gradient with NaN or infinity: leave the step out and count it (skipped_steps), or stop the run. What a dynamic
    loss scale can mend is always skipped."""


class CriticOptimConfig(OptimConfig):
    """As the actor's, with a higher learning rate: the value head starts from nothing."""

    lr: Number = field(1e-5, "Peak learning rate.", ge=0)


class ActorConfig(Section):
    """The policy being trained: its mini-batches, its loss and its optimizer."""

    acts_in: ClassVar[str] = "update: the actor"

    world_size: Annotated[int, Unit("ranks")] | None = Field(None, ge=1, **WORKERS)
    """Processes that train together, of actor, critic and reference alike; null: one for each GPU of trainer.nnodes x
    trainer.n_gpus_per_node, one on a CPU."""
    strategy: Annotated[Literal["replicate", "fsdp2"], also(fsdp2="fsdp")] = Field("replicate", **WORKERS)
    """What each of several ranks holds of actor and critic: all, or its share of weights, gradients and optimizer state
    (fsdp2, with layers gathered while they compute)."""
    reshard_after_forward: bool = True
    """With fsdp2: layers are given up after the forward pass and gathered again for the backward pass; false: kept
    until then, for fewer exchanges and more memory."""
    param_offload: bool = Field(False, **MEMORY)
    """Move the actor's weights away while another role of its process works: into main memory from a GPU, from there
    into a file of the run's folder."""
    optimizer_offload: bool = Field(False, **MEMORY)
    """The same with what only an optimizer step reads: AdamW's moments, and float32 weights beside those that compute
    in another dtype."""
    ppo_mini_batch_size: Prompts = Field(256, ge=1)
    """Prompts in one optimizer step (all ranks together); divides data.train_batch_size."""
    ppo_micro_batch_size_per_gpu: Responses | None = Field(None, ge=1)
    """Responses in one backward pass on one rank; null: dynamic batching by tokens."""
    use_dynamic_bsz: bool | None = None
    """Fill micro-batches up to ppo_max_token_len_per_gpu tokens instead of a fixed number of responses; null: true when
    no micro-batch size is given."""
    ppo_max_token_len_per_gpu: Tokens = Field(16384, ge=1)
    """Most tokens (prompt and response) in one micro-batch on one rank, dynamic batching."""
    gradient_accumulation: Annotated[int, Unit("micro-batches")] | None = Field(None, ge=1)
    """Micro-batches in one optimizer step on one rank; derived, and when given it must agree."""
    skip_zero_loss: bool = True
    """No backward pass for rows that teach nothing: all advantages 0 (a group with equal rewards), without entropy
    bonus and KL loss. Their metrics are computed all the same."""
    auto_micro_batch: bool = False
    """When memory runs out, halve the micro-batches of actor, critic and reference for the rest of the run and start
    the pass over; false: stop and say what did not fit."""
    ppo_epochs: Annotated[int, Unit("passes over a batch")] = field(1, "Passes over each batch of experience.", ge=1)
    shuffle: bool = field(False, "Draw mini-batches in a seeded random order instead of as generated.")
    optim: OptimConfig = part(OptimConfig)
    grad_clip: Number = field(1.0, "Largest gradient norm of one optimizer step.", gt=0)
    clip_ratio: Number = Field(0.2, gt=0, le=1)
    """Clip range of the probability ratio on both sides, unless low or high is given."""
    clip_ratio_low: Number | None = Field(None, gt=0, le=1)
    """Clip range below: the ratio's lower bound is 1 - this; null: clip_ratio."""
    clip_ratio_high: Number | None = Field(None, gt=0)
    """Clip range above: the ratio's upper bound is 1 + this; null: clip_ratio."""
    clip_ratio_c: Number = Field(3.0, gt=1)
    """Dual clip: bound of the loss at negative advantages, as a multiple of the advantage."""
    clip_ratio_schedule: ClipScheduleConfig = part(ClipScheduleConfig)
    tau_pos: Number = field(1.0, "sapo: temperature of the gate at positive advantages.", gt=0)
    tau_neg: Number = field(1.05, "sapo: temperature of the gate at other advantages.", gt=0)
    entropy_coeff: Number = field(0.0, "Weight of the entropy bonus in the loss.", ge=0)
    entropy_coeff_schedule: ScheduleConfig = part(ScheduleConfig)
    """How that weight moves; adaptive: target is actor/entropy, in nats."""
    use_kl_loss: bool = field(False, "Add a KL term against the reference model to the loss.")
    kl_loss_coef: Number = field(0.001, "Weight of that KL term.", ge=0)
    kl_loss_coef_schedule: ScheduleConfig = part(ScheduleConfig)
    """How that weight moves; adaptive: target is actor/kl_loss, in nats."""
    kl_loss_type: KlType = "low_var_kl"
    """Estimator of that KL term: kl|k1, abs, mse|k2, low_var_kl|k3, or full (over the vocabulary); a trailing + takes
    the value from this estimator and the gradient from k2 (straight-through)."""
    loss_agg_mode: LossAggMode = field("token-mean", "How token losses become one number.")
    loss_scale_factor: Annotated[float, Unit("tokens")] | None = Field(None, gt=0)
    """Fixed divisor of seq-mean-token-sum-norm, in tokens; null: data.max_response_length."""
    policy_loss: PolicyLossConfig = part(PolicyLossConfig)
    prefix_sharing: Annotated[Literal["auto", "on", "off"], also(on=True, off=False)] = "auto"
    """Compute a group's prompt once per micro-batch; auto: when it saves work."""
    recompute_old_log_probs: Literal["auto", "always", "never"] = Field("auto", **in_stage("process: old log-probs"))
    """Pass that recomputes old log-probs with the trainer; auto: only where the engine's are not exact."""

    @property
    def clip_low(self) -> float:
        return self.clip_ratio if self.clip_ratio_low is None else self.clip_ratio_low

    @property
    def clip_high(self) -> float:
        return self.clip_ratio if self.clip_ratio_high is None else self.clip_ratio_high

    @property
    def dynamic(self) -> bool:
        if self.use_dynamic_bsz is None:
            return self.ppo_micro_batch_size_per_gpu is None
        return self.use_dynamic_bsz


class RefConfig(Section):
    """The frozen reference model that KL terms compare with."""

    acts_in: ClassVar[str] = "process: log-probs of the reference"

    param_offload: bool = Field(False, **MEMORY)
    """Move its weights away while another role of its process works, as actor.param_offload."""
    log_prob_use_dynamic_bsz: bool | None = None
    """Fill forward passes up to log_prob_max_token_len_per_gpu tokens instead of a fixed number of responses; null: as
    whichever of the two is given, else as the actor."""
    log_prob_micro_batch_size_per_gpu: Responses | None = Field(None, ge=1)
    """Responses in one forward pass on one rank; null: the actor's."""
    log_prob_max_token_len_per_gpu: Tokens | None = Field(None, ge=1)
    """Most tokens in one forward pass on one rank; null: the actor's."""


class CriticModelConfig(Section):
    """Which model the critic starts from."""

    acts_in: ClassVar[str] = "start: loading the critic's model"

    path: str | None = field(None, "As model.path; null: the actor's model with a new value head.")
    trust_remote_code: bool = field(False, "Run Python code that comes with the model of critic.model.path.")


class CriticConfig(Section):
    """The value model of PPO (algorithm.adv_estimator=gae only)."""

    acts_in: ClassVar[str] = "update: the critic"

    optim: CriticOptimConfig = part(CriticOptimConfig)
    model: CriticModelConfig = part(CriticModelConfig)
    param_offload: bool = Field(False, **MEMORY)
    """Move its weights away while another role of its process works, as actor.param_offload."""
    optimizer_offload: bool = Field(False, **MEMORY)
    """The same with what only an optimizer step reads, as actor.optimizer_offload."""
    ppo_mini_batch_size: Prompts | None = Field(None, ge=1)
    """Prompts in one optimizer step of the critic; null: the actor's."""
    ppo_micro_batch_size_per_gpu: Responses | None = Field(None, ge=1)
    """Responses in one backward pass on one rank; null: the actor's."""
    use_dynamic_bsz: bool | None = None
    """As the actor's; null: false when the critic has a micro-batch size, else the actor's."""
    ppo_max_token_len_per_gpu: Tokens = Field(32768, ge=1)
    """Most tokens in one micro-batch on one rank, dynamic batching."""
    ppo_epochs: Annotated[int, Unit("passes over a batch")] | None = Field(None, ge=1)
    """Passes over each batch; null: the actor's."""
    cliprange_value: Number | None = Field(0.5, gt=0)
    """How far a value may move from its old one before clipping; null: no clipping."""
    huber_delta: Number | None = Field(None, gt=0)
    """Error above which the value loss grows linearly (Huber); null: squared everywhere."""
    grad_clip: Number = field(1.0, "Largest gradient norm of one optimizer step.", gt=0)
    loss_agg_mode: LossAggMode = field("token-mean", "How token losses become one number.")
