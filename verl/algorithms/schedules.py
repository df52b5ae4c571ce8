"""Schedules: pure functions of the step, so that resuming needs nothing but the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.config.schema_roles import OptimConfig


def learning_rate(step: int, total_steps: int, config: OptimConfig) -> float:
    """The learning rate of update ``step``.

    Warm-up over w updates rises linearly and reaches the full rate with its last update: with w = 4, 1/4, 1/2, 3/4,
    1. No update is wasted at rate 0, neither the first nor the last. After it, with
    ``progress = (step - w) / (total_steps - w)`` the rate is ``lr * (floor + (1 - floor) * shape(progress))``,
    ``floor`` being ``min_lr_ratio``. Beyond ``total_steps`` (and for w >= total_steps beyond the warm-up) progress
    is 1.

    Args:
        step: updates done before this one (0 for the first).
        total_steps: updates of the whole run, in the same unit (optimizer steps, or training steps).
        config: ``lr``, ``lr_scheduler_type``, ``lr_warmup_steps`` (-1: the ratio counts), ``lr_warmup_steps_ratio``,
            ``min_lr_ratio``.

    Raises:
        ValueError: a negative step, or an unknown schedule.
    """
    if step < 0:
        raise ValueError(f"step {step} is negative")
    if config.lr_scheduler_type not in LR_SHAPES:
        raise ValueError(f"lr_scheduler_type {config.lr_scheduler_type!r}, expected one of {', '.join(LR_SHAPES)}")
    warmup = warmup_steps(total_steps, config)
    if step < warmup:
        return config.lr * ((step + 1) / warmup)
    progress = min((step - warmup) / (total_steps - warmup), 1.0) if total_steps > warmup else 1.0
    shape = LR_SHAPES[config.lr_scheduler_type](progress)
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)


def warmup_steps(total_steps: int, config: OptimConfig) -> int:
    """``lr_warmup_steps`` if it is given (not negative), else the whole part of its ratio of ``total_steps``."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps + 1e-9)  # 0.29 * 100 is 28.999999999999996


def _constant(progress: float) -> float:
    return 1.0


def _linear(progress: float) -> float:
    return 1.0 - progress


def _cosine(progress: float) -> float:
    return 0.5 * (1.0 + math.cos(math.pi * progress))


LR_SHAPES: dict[str, Callable[[float], float]] = {"constant": _constant, "linear": _linear, "cosine": _cosine}
