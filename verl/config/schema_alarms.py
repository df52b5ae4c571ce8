"""Section ``trainer.alarms``."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from verl.config.base import Number, Section, Share, Unit


class AlarmsConfig(Section):
    """What to look out for while a run trains. A signal is told once; null turns it off."""

    acts_in: ClassVar[str] = "the training loop, and verl doctor"

    action: Literal["warn", "pause", "stop"] = "warn"
    """warn: note it in events.log and go on; pause: save a checkpoint and end the run, which goes on with the same
    command; stop: end it without."""
    kl: Annotated[float, Unit("nats a token")] | None = Field(1.0, gt=0)
    """Most KL to the reference, or else to the policy before the update."""
    entropy: Annotated[float, Unit("nats a token")] | None = Field(0.02, gt=0)
    """Least entropy of the policy."""
    length: Number | None = Field(4.0, gt=1)
    """Most factor by which responses may grow or shrink against the first steps."""
    grad_norm: Number | None = Field(30.0, gt=1)
    """Most gradient norm of the actor, as a multiple of the median of the steps before."""
    reward: Share | None = Field(0.5, gt=0, le=1)
    """Share of the best reward so far, above the lowest score, that may be lost again."""
