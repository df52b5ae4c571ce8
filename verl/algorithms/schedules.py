"""Schedules of the learning rate and of the coefficients of losses and rewards.

Most are pure functions of the step, so that resuming needs nothing but the step. Adaptive ones carry their current
value, which is checkpointed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from verl.config.schema_roles import ActorConfig, OptimConfig, ScheduleConfig
from verl.config.schema_run import KlControlConfig
from verl.errors import ConfigError


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """The learning rate of update ``step``.

    Warm-up over w updates rises linearly and reaches the full rate with its last update: with w = 4, 1/4, 1/2, 3/4,
    1. No update is wasted at rate 0, neither the first nor the last. After it the rate is
    ``lr * (floor + (1 - floor) * shape(progress))``, ``floor`` being ``min_lr_ratio`` and
    ``progress = (step - w) / (total_steps - w)``. For wsd (warm-up, stable, decay; Hu et al. 2024, arXiv:2404.06395)
    progress is 0 until the last ``lr_wsd_decay_steps`` updates, the share of those that is done in them, and the
    shape is linear. Beyond ``total_steps`` (and for w >= total_steps beyond the warm-up) progress is 1.

    ``step``: updates done before this one, in the unit of ``total_steps`` (optimizer steps, or training steps). Raises
    ValueError: a negative step, or an unknown schedule.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    kind = config.lr_scheduler_type
    if kind not in (*SHAPES, "wsd"):
        raise ValueError(f"lr_scheduler_type {kind!r}, expected one of {', '.join(SHAPES)}, wsd")
    warmup = warmup_steps(total_steps, config)
    if step < warmup:
        return config.lr * ((step + 1) / warmup)
    start = warmup
    if kind == "wsd":
        decay = config.lr_wsd_decay_steps or math.ceil(total_steps / 10)
        kind, start = "linear", max(warmup, total_steps - decay)
    progress = (step - start) / (total_steps - start) if total_steps > start else 1.0
    shape = SHAPES[kind](min(max(progress, 0.0), 1.0))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def warmup_steps(total_steps: int, config: OptimConfig) -> int:
    """``lr_warmup_steps`` if it is given (not negative), else the whole part of its ratio of ``total_steps``."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps + 1e-9)  # 0.29 * 100 is 28.999999999999996


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda progress: 1.0,
    "linear": lambda progress: 1.0 - progress,
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


class Schedule:
    """A coefficient over the run; this one never moves by itself, and remembers nothing."""

    metric: str | None = None  # the step's metric that it is told after each step; None: it needs none

    def value(self, step: int, total_steps: int) -> float:
        """Of one training step."""
        raise NotImplementedError

    def update(self, measured: float, samples: int) -> None:
        """Told the metric after a training step, and the number of its responses."""

    def state_dict(self) -> dict[str, float]:
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Take over such a state."""


@dataclass(frozen=True)
class Course(Schedule):
    """From ``start`` to ``end`` along a shape of ``step / total_steps``; ``constant`` stays at the start.

    Nothing is remembered: a user who changed the configured numbers and resumed meant it.
    """

    start: float
    end: float = 0.0
    shape: str = "constant"

    def value(self, step: int, total_steps: int) -> float:
        return self.end + (self.start - self.end) * SHAPES[self.shape](min(step / total_steps, 1.0))


class Moving(Schedule):
    """A coefficient that is steered, and checkpointed."""

    coef: float

    def value(self, step: int, total_steps: int) -> float:
        return self.coef

    def state_dict(self) -> dict[str, float]:
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.coef = float(state.get("coef", self.coef))  # none: the checkpoint's schedule was a fixed course


class Adaptive(Moving):
    """Steers a metric towards a target: ``coef *= 1 + sign * rate * clip(measured / target - 1, -1, 1)`` after each
    training step, held within [low, high]. ``sign``: 1 where a larger coefficient lowers the metric, -1 where it raises
    it."""

    def __init__(self, start: float, config: ScheduleConfig, metric: str, sign: int) -> None:
        assert config.target is not None
        self.coef, self.metric, self._target = start, metric, config.target
        self._step = sign * config.rate
        self._low, self._high = config.bounds(start)

    def update(self, measured: float, samples: int) -> None:
        """Tell the step's value of the metric. One that is not finite moves nothing."""
        if math.isfinite(measured):
            error = min(max(measured / self._target - 1.0, -1.0), 1.0)
            self.coef = min(max(self.coef * (1.0 + self._step * error), self._low), self._high)


class AdaptiveKLController(Moving):
    """Moves the coefficient towards a target KL (Ziegler et al. 2019, arXiv:1909.08593, section 2.2).

    ``coef *= 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon`` after each step. Raises ConfigError: one of
    them is not above 0.

    Args, all above 0:
        coef: start (0 would stay 0).
        target: the KL to hold, nats per token.
        horizon: samples over which the coefficient can move by a fifth.
    """

    metric = "actor/reward_kl_penalty"

    def __init__(self, coef: float, target: float, horizon: float) -> None:
        for name, value in (("kl_coef", coef), ("target_kl", target), ("horizon", horizon)):
            if not value > 0:
                raise ConfigError(f"algorithm.kl_ctrl.{name} must be above 0 for the adaptive controller", value)
        self.coef, self.target, self.horizon = coef, target, horizon

    def update(self, measured: float, samples: int) -> None:
        """Tell the step's mean KL and its number of responses. A KL that is not finite moves nothing."""
        if math.isfinite(measured):
            error = min(max(measured / self.target - 1.0, -0.2), 0.2)
            # The floor matters above 4.5 horizons a step only, where the factor would go to 0 and below.
            self.coef *= max(1.0 + error * samples / self.horizon, 0.1)


def kl_schedule(config: KlControlConfig) -> Schedule:
    """Of the coefficient of the KL penalty in the reward."""
    if config.type == "adaptive":
        return AdaptiveKLController(config.kl_coef, config.target_kl, config.horizon)
    shape = "constant" if config.type == "fixed" else config.type
    return Course(config.kl_coef, config.kl_coef_end, shape)


def coefficient_schedule(start: float, config: ScheduleConfig, metric: str, sign: int) -> Schedule:
    """Of a coefficient of the loss; the last two as in `Adaptive`."""
    if config.type == "adaptive":
        return Adaptive(start, config, metric, sign)
    return Course(start, start if config.end is None else config.end, config.type)


def actor_schedules(config: ActorConfig) -> dict[str, Schedule]:
    """Of the actor's coefficients, by the name of the field that they set."""
    clip = config.clip_ratio_schedule
    # A wider clip lets the KL grow, and clips fewer tokens. More entropy bonus raises the entropy.
    sign = {"ppo_kl": -1, "pg_clipfrac": 1}[clip.target_metric]
    return {
        "clip_ratio_high": coefficient_schedule(config.clip_high, clip, f"actor/{clip.target_metric}", sign),
        "entropy_coeff": coefficient_schedule(config.entropy_coeff, config.entropy_coeff_schedule, "actor/entropy", -1),
        "kl_loss_coef": coefficient_schedule(config.kl_loss_coef, config.kl_loss_coef_schedule, "actor/kl_loss", 1),
    }


def scheduled_actor(config: ActorConfig, schedules: dict[str, Schedule], step: int, total_steps: int) -> ActorConfig:
    """The configuration with this step's values; ``clip_ratio_low`` moves with ``clip_ratio_high``, at most to 1."""
    values = {name: schedule.value(step, total_steps) for name, schedule in schedules.items()}
    values["clip_ratio_low"] = min(config.clip_low * (values["clip_ratio_high"] / config.clip_high), 1.0)
    return config.model_copy(update=values)


def scheduled_values(config: ActorConfig) -> dict[str, float]:
    """What a schedule may have set, by the field's name."""
    return {
        "clip_ratio_low": config.clip_low,
        "clip_ratio_high": config.clip_high,
        "entropy_coeff": config.entropy_coeff,
        "kl_loss_coef": config.kl_loss_coef,
    }


def moving_values(config: ActorConfig) -> dict[str, float]:
    """This step's values of the coefficients that have a schedule, as metrics ``actor/<field>``."""
    fields = {
        ("clip_ratio_low", "clip_ratio_high"): config.clip_ratio_schedule,
        ("entropy_coeff",): config.entropy_coeff_schedule,
        ("kl_loss_coef",): config.kl_loss_coef_schedule,
    }
    moving = [name for names, schedule in fields.items() if schedule.type != "constant" for name in names]
    return {f"actor/{name}": getattr(config, name) for name in moving}
