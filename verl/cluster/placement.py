"""Which processes a run has, what each of them gets, and whether the machines have it. Pure: no Ray, no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.config import Config
from verl.config.schema_cluster import TRAINED, PoolConfig
from verl.errors import ClusterError

GIB = 2**30
Machine = Mapping[str, float]
"""What a machine has, by Ray's names: CPU, GPU, memory (bytes), and resources of the user's own."""


@dataclass(frozen=True)
class ProcessSpec:
    """Processes of one pool, all alike.

    Attributes:
        count: processes.
        threads: of each; so many CPUs are reserved for it.
        gpus: of each.
        memory_gb: of each, reserved and its limit; None: neither.
        resources: of each, by names of the user's own.
        device: cpu or cuda.
        env: environment of each, on top of what it has anyway.
    """

    pool: str
    count: int
    threads: int
    gpus: float
    memory_gb: float | None
    resources: Mapping[str, float]
    device: str
    env: Mapping[str, str]

    def needs(self) -> dict[str, float]:
        """Of one process, by Ray's names."""
        own = {"CPU": float(self.threads), "GPU": self.gpus, "memory": (self.memory_gb or 0) * GIB, **self.resources}
        return {name: amount for name, amount in own.items() if amount}

    @property
    def on_one(self) -> int:
        """Processes that must be on one machine together."""
        return 1


@dataclass(frozen=True)
class Group(ProcessSpec):
    """Processes that work in step on the same roles.

    Attributes:
        roles: actor, critic, reference, reward; rollout where the actor's processes sample.
        nodes: machines, each with as many of the processes.
    """

    roles: frozenset[str]
    nodes: int = 1

    @property
    def on_one(self) -> int:
        return self.count // self.nodes

    @property
    def named_roles(self) -> str:
        """In words."""
        return ", ".join(role for role in (*TRAINED, "rollout") if role in self.roles)


@dataclass(frozen=True)
class WorkerSpec(ProcessSpec):
    """Rollout workers, each on its own, on any machine; ``count`` of them at the start."""

    kv_cache_gb: float | None


@dataclass(frozen=True)
class Plan:
    """All processes of a run but the controller, which computes nothing.

    Attributes:
        groups: the actor's first.
        rollout: pools of rollout workers; none: the actor's group samples.
        overlap: rollout goes on while the groups train.
        most_workers: rollout workers that there may be at a time.
    """

    groups: tuple[Group, ...]
    rollout: tuple[WorkerSpec, ...]
    overlap: bool
    most_workers: int

    def group_of(self, role: str) -> Group:
        """The group that has a role; the run must have it."""
        return next(group for group in self.groups if role in group.roles)

    def phases(self) -> list[list[ProcessSpec]]:
        """Who computes at the same time; each list at another time than the others."""
        alone = [group for group in self.groups if group.roles == {"reward"}]
        training = [group for group in self.groups if group not in alone]
        sampling: list[ProcessSpec] = [*self.rollout, *alone]
        return [[*training, *sampling]] if self.overlap else [list(training), sampling]

    def describe(self) -> list[str]:
        """A line for each pool."""
        return [f"{group.pool}: {group.named_roles}: {_words(group)}" for group in self.groups] + [
            f"{spec.pool}: rollout: {_words(spec)}" for spec in self.rollout
        ]

    def cpus(self) -> int:
        """That are reserved for all processes, also for rollout workers that may come later."""
        workers = [spec.threads for spec in self.rollout for _ in range(spec.count)]
        workers += [max(workers, default=0)] * (self.most_workers - len(workers))
        return sum(group.count * group.threads for group in self.groups) + sum(workers)


def make_plan(config: Config, cores: int, gpus: int, reserved: bool = False) -> Plan:
    """The processes of a run.

    Threads that nobody chose are the cores, shared equally by the processes that compute at the same time: roles in
    one pool take turns, roles in different pools work at once, and rollout workers and training take turns with
    ``trainer.mode=sync``. A process has one thread at least. Other modes have rollout workers whether they are asked
    for or not.

    Args:
        cores, gpus: that the run may use; those of one machine.
        reserved: cores are reserved for every process, as if all computed at the same time: a cluster of others.
    """
    place, inline = config.cluster.placement, config.cluster.backend == "inline"
    pools: dict[str, set[str]] = {place.actor: set()}
    for role in config.roles:
        pools.setdefault(place.actor if inline else place.pool_of(role), set()).add(role)
    overlap = config.overlaps and not inline
    workers = list(place.rollout) if place.rollout_alone and not inline else ["rollout"] * overlap
    if not workers:
        pools[place.actor].add("rollout")
    rollout = tuple(
        WorkerSpec(kv_cache_gb=config.cluster.pool(name).kv_cache_gb, **_process(config, name, gpus))
        for name in workers
    )
    groups: list[Group] = []
    for name, roles in reversed(pools.items()):  # the actor's last: the number of its ranks may be what GPUs are left
        taken = sum(other.count * other.gpus for other in (*groups, *rollout))
        groups.insert(0, _group(config, name, frozenset(roles), gpus, taken))
    first = sum(spec.count for spec in rollout)
    most = max(first, config.rollout.max_workers or 0) if rollout else 0
    return _with_threads(Plan(tuple(groups), rollout, overlap or reserved, most), cores, most - first)


def _process(config: Config, name: str, gpus: int, modelless: bool = False) -> dict[str, Any]:
    """What the configuration says of a pool's processes; 0 threads: nothing."""
    inline = config.cluster.backend == "inline"
    pool = PoolConfig() if inline else config.cluster.pool(name)
    device, share = pool.device or config.trainer.device, pool.gpus
    asked = config.trainer.n_gpus_per_node if name == config.cluster.placement.actor else "auto"
    if device == "cpu" or (device == "auto" and (asked == 0 or (asked == "auto" and not gpus))):
        share = 0.0 if device == "cpu" else share or 0.0
    elif share is None:
        share = float(not modelless)
    return {
        "pool": name,
        "count": pool.processes or 1,
        "threads": pool.threads or config.cluster.threads or 0,
        "gpus": share,
        "memory_gb": pool.memory_gb,
        "resources": pool.resources,
        "device": "cuda" if share else "cpu",
        "env": pool.env,
    }


def _group(config: Config, name: str, roles: frozenset[str], gpus: int, taken: float) -> Group:
    """``taken``: GPUs of each machine that others have."""
    alone = roles == {"reward"}
    process = _process(config, name, gpus, alone and config.reward.model.path is None)
    if alone or config.cluster.backend == "inline":
        return Group(**process | {"count": 1}, roles=roles)
    count, nodes = config.ranks_of(min(roles & set(TRAINED))), config.nodes_of(name)
    if count is None:
        count = max(1, int(gpus - taken)) * nodes
    return Group(**process | {"count": count}, roles=roles, nodes=nodes)


def _with_threads(plan: Plan, cores: int, later: int) -> Plan:
    """With the threads that nobody chose: the cores of a machine, shared by those of it that compute at once.

    Args:
        later: rollout workers that may come.
    """
    threads: dict[str, int] = {}
    for phase in plan.phases():
        here = {p.pool: p.count // (p.nodes if isinstance(p, Group) else 1) for p in phase}
        open_ = [p for p in phase if not p.threads]
        left = cores - sum(here[p.pool] * p.threads for p in phase)
        sharing = sum(here[p.pool] for p in open_) + later * any(isinstance(p, WorkerSpec) for p in open_)
        threads |= {p.pool: max(1, left // sharing) for p in open_}

    def settled(process: Any) -> Any:
        return replace(process, threads=process.threads or threads[process.pool])

    return replace(plan, groups=tuple(map(settled, plan.groups)), rollout=tuple(map(settled, plan.rollout)))


def whole_run(config: Config, cores: int) -> Group:
    """All roles in one process, as inline."""
    inline = config.cluster.model_copy(update={"backend": "inline"})
    return make_plan(config.model_copy(update={"cluster": inline}), cores, 0).groups[0]


def crowded(plan: Plan, cores: int) -> int:
    """Threads that compute at once where they are more than the cores; else 0."""
    most = max(sum(process.count * process.threads for process in phase) for phase in plan.phases())
    return most if most > cores else 0


def require(plan: Plan, machines: Sequence[Machine], where: str, shared: bool) -> None:
    """Refuse what no machine has, or all of them together do not have; waiting would not bring it.

    Args:
        where: what the machines are, in words.
        shared: processes that compute at different times may have the same cores, and processes of one thread may be
            more than the cores, as long as those of one group, which wait for each other, are not: a Ray of our own.

    Raises:
        ClusterError: wanted against available, of every resource that is short.
    """
    processes: list[ProcessSpec] = [*plan.groups, *plan.rollout]
    wanted: dict[str, float] = {}
    for process in processes:
        for name, amount in process.needs().items():
            wanted[name] = wanted.get(name, 0.0) + process.count * amount
    if max(group.nodes for group in plan.groups) > len(machines):
        del wanted["CPU"]  # each of them has its own
    elif shared:
        wanted["CPU"] = max(_cores_wanted(phase) for phase in plan.phases())
    there = {name: sum(machine.get(name, 0.0) for machine in machines) for name in wanted}
    short = {name: (amount, there[name]) for name, amount in wanted.items() if amount > there[name]}
    if short:
        raise ClusterError(f"more was asked for than {where} has", _against(short), _fix(plan, short, shared))
    for process in processes:
        unit, nodes = process.on_one, process.nodes if isinstance(process, Group) else 1
        if nodes > len(machines):
            raise ClusterError(
                f"more machines were asked for than {where} has: {len(machines)}",
                f"trainer.nnodes={nodes}"
                if process is plan.groups[0]
                else f"cluster.pools.{process.pool}.nodes={nodes}",
                "join a Ray cluster that has them (cluster.address), or set trainer.nnodes=1 (actor.world_size or "
                "trainer.n_gpus_per_node is the number of ranks there)",
            )
        needs = {name: unit * amount for name, amount in process.needs().items()}
        having = [all(machine.get(name, 0.0) >= amount for name, amount in needs.items()) for machine in machines]
        if sum(having) < nodes:
            poor = [machine for machine, has in zip(machines, having, strict=True) if not has]
            best = max(poor, key=lambda m: sum(min(m.get(k, 0.0) / v, 1.0) for k, v in needs.items()))
            few = f"only {sum(having)} of {nodes} machines" if any(having) else "no machine"
            raise ClusterError(
                f"{few} of {where} has room for the {unit} process(es) of cluster.pools.{process.pool}, "
                "which must be on one",
                _against({name: (amount, best.get(name, 0.0)) for name, amount in needs.items()}),
                f"lower what cluster.pools.{process.pool} asks for",
            )


def _cores_wanted(phase: Sequence[ProcessSpec]) -> float:
    """What must be there for processes that compute at once: what could not be less needs no core of its own."""
    if any(process.threads > 1 for process in phase):
        return sum(process.count * process.threads for process in phase)
    return max((process.count for process in phase if isinstance(process, Group)), default=0)


def _against(short: Mapping[str, tuple[float, float]]) -> str:
    def words(name: str, amount: float) -> str:
        return f"{round(amount / GIB, 1):.10g} GiB memory" if name == "memory" else f"{amount:g} {name}"

    return "; ".join(
        f"wanted {words(name, amount)}, available {words(name, there).partition(' ')[0]}"
        for name, (amount, there) in short.items()
    )


def _fix(plan: Plan, short: Mapping[str, tuple[float, float]], shared: bool) -> str:
    fixes = []
    if "CPU" in short:
        many = max(plan.groups, key=lambda group: group.count)
        if many.count > short["CPU"][1]:
            fixes.append(
                f"set actor.world_size (or cluster.pools.{many.pool}.processes) to {int(short['CPU'][1])} or less"
            )
        fixes.append("lower cluster.threads, and threads in cluster.pools, or leave them out to share the cores")
    if "GPU" in short:
        fewer = (
            f"trainer.nnodes=1 and trainer.n_gpus_per_node={int(short['GPU'][1])}, or " if short["GPU"][1] >= 1 else ""
        )
        pools = "" if len(plan.groups) + len(plan.rollout) == 1 else ", or device, gpus and processes of cluster.pools"
        fixes.append(f"set {fewer}trainer.device=cpu{pools}")
    if short.keys() - {"CPU", "GPU"}:
        fixes.append("lower what cluster.pools asks for" + ("" if not shared else ", or join a cluster that has it"))
    return "; ".join(fixes)


def _words(process: ProcessSpec) -> str:
    parts = [f"{process.threads} thread{'s'[: process.threads > 1]}"]
    if process.gpus:
        parts.append(f"{process.gpus:g} GPU")
    if process.memory_gb:
        parts.append(f"{process.memory_gb:g} GiB")
    return f"{process.count} process{'es'[: 2 * (process.count > 1)]} of " + ", ".join(parts)
