"""Which policy loss, how its coefficients move, and how rollout and trainer are reconciled."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from verl.config.base import FieldProblem, Section, Takes, field
from verl.config.names import did_you_mean
from verl.config.units import Number, Share


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
    kl_cov_ratio: Share = Field(2e-3, ge=0, le=1)
    """kl_cov: share of tokens, by covariance from the top, that is held back."""
    ppo_kl_coef: Number = field(1.0, "kl_cov: weight of their penalty, the absolute log-ratio.", ge=0)

    @property
    def needs_draws(self) -> bool:
        """Whether the loss is given random numbers."""
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
    """With bypass_mode: the policy loss as configured, or the policy gradient -A log pi times the importance
    weights."""

    @property
    def active(self) -> bool:
        """Whether any token's loss is weighted."""
        return self.rollout_is is not None or self.rollout_rs is not None

    @property
    def reinforce(self) -> bool:
        """Whether the policy gradient takes the place of the policy loss."""
        return self.bypass_mode and self.loss_type == "reinforce"
