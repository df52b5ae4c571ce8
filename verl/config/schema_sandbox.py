"""What model-written code may use while it is tested."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from verl.config.base import Seconds, Section, Unit

MiB = Annotated[int, Unit("MiB")]


class SandboxConfig(Section):
    """Limits of the sandbox in which the rule ``code`` runs model-written programs."""

    acts_in: ClassVar[str] = "rollout: the rule code"

    time_limit: Seconds = Field(10.0, gt=0, le=3600)
    """Wall-clock time of each test; what runs longer is killed, and has failed."""
    total_time_limit: Seconds = Field(60.0, gt=0, le=36000)
    """Time of all tests of one program; those not started by then have failed."""
    memory_limit: MiB = Field(1024, ge=64, description="Address space of each of a program's processes.")
    file_limit: MiB = Field(16, ge=1, description="Size of its temporary directory, which is in memory.")
    output_limit: MiB = Field(4, ge=1, le=1024, description="What a test may print; at more it is killed.")
    processes: Annotated[int, Unit("processes and threads")] = Field(8, ge=1, le=1024)
    """How many a program may have at once, itself included."""
    workers: Annotated[int, Unit("programs")] | None = Field(None, ge=1, le=64)
    """Programs that a scorer runs at once; null: as many as it has cores."""
    allow_weaker: bool = False
    """Run programs also where the machine cannot isolate them fully, with what it can do."""
