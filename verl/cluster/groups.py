"""Worker groups over Ray: processes of the plan in placement groups, and a stand-in for each group."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.cluster.early_scoring import LISTENING
from verl.cluster.placement import Group, Plan, ProcessSpec
from verl.cluster.profiling import nsight_options
from verl.cluster.ray_worker import RayWorkers, Watch, dumpable, use_network
from verl.cluster.start import EventLog
from verl.cluster.threads import FOLDER, worker_environment
from verl.cluster.weight_sync import WEIGHTS
from verl.config import Config
from verl.errors import ClusterError
from verl.run_dir import RunDir


@contextmanager
def started_groups(
    config: Config, plan: Plan, report: Callable[[str], None], log: EventLog
) -> Iterator[list[RayWorkers]]:
    """The processes of the plan's groups, each with its share of the cores, on the group's number of machines.

    Raises:
        ClusterError: there is no room for them within ``cluster.start_timeout``.
    """
    from verl.cluster.worker import Worker

    apart = any(group.nodes > 1 for group in plan.groups)
    # Ranks meet over a file that all of them reach.
    folder = RunDir(config.run_dir).path.absolute() if apart else Path(tempfile.gettempdir())
    for left in folder.glob("verl-ranks-*") if apart else ():  # by a run that was killed
        shutil.rmtree(left, ignore_errors=True)
    meeting = folder / f"verl-ranks-{secrets.token_hex(16)}"
    deadline = time.monotonic() + config.cluster.start_timeout
    watch = Watch(config.cluster.stall_seconds, report, log)
    places: list[Any] = []
    workers: list[RayWorkers] = []
    try:
        places += map(_reserved, plan.groups)
        _await_room(places, plan.groups, config.cluster.start_timeout, report)
        for place, group in zip(places, plan.groups, strict=True):
            file = str(meeting.with_name(f"{meeting.name}-{len(workers)}") / "ranks")
            options = ray_options(group, config, group.roles)
            beside = []  # what the first process does beside whatever else it does
            if "reward" in group.roles and (group.count > 1 or "rollout" not in group.roles):
                beside.append(LISTENING)  # it hears of what others sample
            if "actor" in group.roles and config.rollout.weight_sync == "broadcast":
                beside.append(WEIGHTS)
            first = ray.remote(concurrency_groups=dict.fromkeys(beside, 1)) if beside else ray.remote
            actors = [
                (first if rank == 0 else ray.remote)(Worker)
                .options(**options, scheduling_strategy=_place_of(rank, group, place))
                .remote(config, None, group, rank, file)
                for rank in range(group.count)
            ]
            workers.append(RayWorkers(actors, group.named_roles if len(plan.groups) > 1 else "", watch))
        for worker, group in zip(workers, plan.groups, strict=True):
            worker.await_processes(deadline - time.monotonic(), use_network if group.nodes > 1 else dumpable)
        yield workers
    finally:
        for worker in workers:
            worker.end()
        for place in places:
            remove_placement_group(place)
        for folder in meeting.parent.glob(meeting.name + "-*"):
            shutil.rmtree(folder, ignore_errors=True)


def _reserved(group: Group) -> Any:
    """A placement group: a part for each process on one machine, or for each machine one with all its processes."""
    if group.nodes == 1:
        return placement_group([group.needs()] * group.count, strategy="STRICT_PACK")
    needs = {name: amount * group.on_one for name, amount in group.needs().items()}
    return placement_group([needs] * group.nodes, strategy="STRICT_SPREAD")


def _place_of(rank: int, group: Group, place: Any) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(place, -1 if group.nodes == 1 else rank // group.on_one)


def ray_options(process: ProcessSpec, config: Config, roles: frozenset[str]) -> dict[str, Any]:
    """Of the Ray actor that one of these processes is, which has these roles.

    In a Ray of our own, which has room for the workers of the start, rollout workers reserve no CPUs: a user may wish
    for more of them.
    """
    needs = process.needs()
    cpus = needs.pop("CPU")
    nsight = nsight_options(config.profiler, roles, RunDir(config.run_dir).profile_dir, process.pool)
    return {
        "num_cpus": 0 if config.cluster.address is None and roles == {"rollout"} else cpus,
        "num_gpus": needs.pop("GPU", 0),
        "memory": int(needs.pop("memory", 0)) or None,
        "resources": needs or None,
        "max_restarts": 0,
        "runtime_env": {"env_vars": worker_environment(process.threads) | {FOLDER: os.getcwd()} | dict(process.env)}
        | ({"nsight": nsight} if nsight else {}),
    }


def _await_room(places: Sequence[Any], groups: Sequence[Group], seconds: float, report: Callable[[str], None]) -> None:
    """Wait until Ray has reserved what the groups need, which others may have at the moment."""
    waiting = {place.ready(): group for place, group in zip(places, groups, strict=True)}
    _, missing = ray.wait(list(waiting), num_returns=len(waiting), timeout=min(seconds, 2.0))
    if missing and seconds > 2.0:
        report(f"waiting for room for {', '.join(waiting[place].pool for place in missing)} in the Ray cluster")
        _, missing = ray.wait(list(waiting), num_returns=len(waiting), timeout=seconds - 2.0)
    if missing:
        free = ray.available_resources()
        short = [waiting[place] for place in missing]
        raise ClusterError(
            f"the Ray cluster had no room for {', '.join(group.pool for group in short)} within cluster.start_timeout",
            "; ".join(
                f"{group.pool}: {group.count} x "
                + ", ".join(f"{amount:g} {name}" for name, amount in group.needs().items())
                for group in short
            )
            + f"; free: {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU",
            "free resources, ask for less in cluster.pools, or raise cluster.start_timeout",
        )
