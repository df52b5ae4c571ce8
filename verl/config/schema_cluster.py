"""Where the roles of a run live: pools of processes, and which role is in which; and whose work is profiled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from verl.config.base import FieldProblem, Section, Unit, also, check_entries, field, in_stage, part
from verl.config.names import did_you_mean
from verl.config.problems import Problem
from verl.config.units import FreeDict, Number, Seconds, Steps, StringList, must

MAIN = "main"
TRAINED = ("actor", "critic", "reference", "reward")
"""Roles whose processes answer to calls; rollout workers are a pool of their own kind."""


_SHARE = "a process has a share of one GPU (0.5), or whole ones"
_WHOLE = must(lambda gpus: gpus <= 1 or gpus == int(gpus), "is not whole", _SHARE)


class PoolConfig(Section):
    """One entry of ``cluster.pools``: a number of processes, and what each of them has."""

    acts_in: ClassVar[str] = "start: the workers"

    processes: Annotated[int, Unit("processes")] | None = Field(None, ge=1)
    nodes: Annotated[int, Unit("machines")] | None = Field(None, ge=1)
    threads: Annotated[int, Unit("threads")] | None = Field(None, ge=1)
    gpus: Annotated[float, Unit("GPUs"), _WHOLE] | None = Field(None, ge=0)
    memory_gb: Annotated[float, Unit("GiB")] | None = Field(None, gt=0)
    resources: dict[str, Number] = Field(default_factory=dict)
    device: Literal["auto", "cpu", "cuda"] | None = None
    env: dict[str, str] = Field(default_factory=dict)
    kv_cache_gb: Annotated[float, Unit("GiB")] | None = Field(None, gt=0)

    @model_validator(mode="after")
    def _device_and_gpus(self) -> PoolConfig:
        if self.gpus is not None and self.device in ("cpu", "cuda") and (self.gpus == 0) == (self.device == "cuda"):
            raise FieldProblem(f"has device: {self.device} and gpus: {self.gpus:g}", "leave one of them out")
        return self

    @field_validator("resources")
    @classmethod
    def _positive(cls, value: dict[str, float]) -> dict[str, float]:
        for name, amount in value.items():
            if name in ("CPU", "GPU", "memory", "object_store_memory") or amount <= 0:
                fix = "name resources of your own, with amounts above 0; CPUs are threads"
                raise FieldProblem(f"has {name}: {amount:g}", fix)
        return value


class PlacementConfig(Section):
    """Which pool each role is in. Roles in one pool share its processes; those in different pools work at once."""

    acts_in: ClassVar[str] = "start: the workers"

    actor: str = field(MAIN, "The actor's pool; main is there without being named in pools.", min_length=1)
    critic: str | None = field(None, "The critic's pool; null: the actor's.", min_length=1)
    reference: str | None = field(None, "The reference's pool; null: the actor's.", min_length=1)
    reward: str | None = field(None, "The pool of reward model and reward functions; null: the actor's.", min_length=1)
    rollout: StringList = field([], "Pools of rollout workers; none: the actor's processes sample.")

    def pool_of(self, role: str) -> str:
        return getattr(self, role) or self.actor

    @property
    def rollout_alone(self) -> bool:
        return bool(self.rollout) and self.rollout != [self.actor]


class ClusterConfig(Section):
    """Where the roles run."""

    acts_in: ClassVar[str] = "start: the workers"

    backend: Literal["ray", "inline"] = "ray"
    """ray: workers as Ray actors; inline: the same workers in this process, without Ray."""
    address: str | None = None
    """Address of a running Ray cluster; null: a local one, started and stopped by the run."""
    threads: Annotated[int, Unit("threads")] | None = Field(None, ge=1)
    """CPU threads of each process whose pool does not say it; null: the cores, shared by those that work at once."""
    pools: FreeDict = Field(default_factory=dict)
    """Processes by the name of their pool: {name: {processes, nodes, threads, gpus, memory_gb, resources, device,
    env, kv_cache_gb}}; docs/cluster.md says what each does."""
    placement: PlacementConfig = part(PlacementConfig)
    start_timeout: Seconds = field(120.0, "Seconds to wait until all workers have started.", gt=0)
    collective_timeout: Seconds = Field(1800.0, gt=0, **in_stage("update and process: sums over ranks"))
    """Seconds that a training rank waits for the others, whose work may take longer than its own."""
    stall_seconds: Seconds = Field(600.0, gt=0, **in_stage("every call to a worker"))
    """Seconds without an answer of a worker after which, and after as many again, it is said and written to events.log
    who waits for whom, with the stack of the silent process."""
    dashboard: bool = field(False, "Start Ray's dashboard on the loopback interface.")

    @field_validator("pools")
    @classmethod
    def _pool_entries(cls, value: dict[str, Any]) -> dict[str, Any]:
        check_entries(value, PoolConfig)
        return value

    def pool(self, name: str) -> PoolConfig:
        """An entry of ``pools``, with defaults where it is not named there."""
        return PoolConfig.model_validate(self.pools.get(name) or {})

    def processes_of(self, role: str) -> int | None:
        """What the pool of a role says of its processes; a pool without the actor has one if it says nothing."""
        name = self.placement.pool_of(role)
        return self.pool(name).processes or (None if name == self.placement.actor else 1)

    def problems(self) -> Iterator[Problem]:
        placement = self.placement
        known = dict.fromkeys([MAIN, *self.pools])
        named = {f"cluster.placement.{role}": placement.pool_of(role) for role in TRAINED}
        trained = set(named.values())
        for key, name in [*named.items(), *(("cluster.placement.rollout", name) for name in placement.rollout)]:
            if name not in known and (key == "cluster.placement.actor" or name != placement.actor):
                fix = f"{did_you_mean(name, known)}cluster.pools has {', '.join(known)}"
                yield Problem(f"{key} names no pool", name, fix)
        if len(set(placement.rollout)) < len(placement.rollout):
            fix = "set its processes instead"
            yield Problem("cluster.placement.rollout names a pool twice", placement.rollout, fix)
        for name in placement.rollout if placement.rollout_alone else ():
            if name in trained:
                yield Problem(
                    "cluster.placement.rollout: rollout workers share no pool with other roles, except that the "
                    "actor's processes can sample",
                    name,
                    f"give the workers a pool of their own, or set cluster.placement.rollout={placement.actor}",
                )
            elif (nodes := self.pool(name).nodes) is not None:
                what = f"cluster.pools.{name} is of rollout workers, any machine's"
                yield Problem(what, f"nodes: {nodes}", "remove it")
        yield from self._unequal_processes()

    def _unequal_processes(self) -> Iterator[Problem]:
        reward = self.placement.pool_of("reward")
        others = {self.placement.pool_of(role) for role in TRAINED if role != "reward"}
        many = self.pool(reward).processes or 1
        if many > 1 and reward not in others:
            what = f"cluster.pools.{reward} has the reward role alone, which one process does"
            fix = f"set cluster.pools.{reward}.processes=1 (reward.num_workers is the number of those that it starts)"
            yield Problem(what, f"{many} processes", fix)


Role = Literal["actor", "critic", "reference", "reward", "rollout"]


class ProfilerConfig(Section):
    """Which work of which steps to look into, operator by operator. ``verl profile RUN`` tells what was found."""

    acts_in: ClassVar[str] = "the workers, in the steps that are profiled"

    tool: Annotated[Literal["none", "torch", "nsight"], also(none=None, nsight="nsys")] = "none"
    """torch: PyTorch's profiler, a trace for each call; nsight: Nsight Systems, on GPUs over Ray."""
    roles: list[Role] = field([], "Whose work is profiled; none named: all of it.")
    steps: list[Annotated[Steps, Field(ge=1)]] = Field(default_factory=lambda: [2])
    """Training steps that are profiled; the first one also warms up."""
    memory: bool = field(False, "On a GPU also a page with all allocations of each profiled call (tool torch).")

    @field_validator("steps", mode="before")
    @classmethod
    def _no_steps(cls, value: Any) -> Any:
        return [] if value is None else value

    def wants(self, role: str) -> bool:
        return self.tool != "none" and (not self.roles or role in self.roles)
