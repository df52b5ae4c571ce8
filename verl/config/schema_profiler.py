"""Section ``profiler``."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from verl.config.base import Section, Steps, also

Role = Literal["actor", "critic", "reference", "reward", "rollout"]


class ProfilerConfig(Section):
    """Which work of which steps to look into, operator by operator. ``verl profile RUN`` tells what was found."""

    acts_in: ClassVar[str] = "the workers, in the steps that are profiled"

    tool: Annotated[Literal["none", "torch", "nsight"], also(none=None, nsight="nsys")] = "none"
    """torch: PyTorch's profiler, a trace for each call; nsight: Nsight Systems, on GPUs over Ray."""
    roles: list[Role] = Field(default_factory=list, description="Whose work is profiled; none named: all of it.")
    steps: list[Annotated[Steps, Field(ge=1)]] = Field(default_factory=lambda: [2])
    """Training steps that are profiled; the first one also warms up."""
    memory: bool = False
    """On a GPU also a page with all allocations of each profiled call (tool torch)."""

    @field_validator("steps", mode="before")
    @classmethod
    def _no_steps(cls, value: Any) -> Any:
        return [] if value is None else value

    def wants(self, role: str) -> bool:
        return self.tool != "none" and (not self.roles or role in self.roles)
