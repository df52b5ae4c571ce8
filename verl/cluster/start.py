"""Starting and stopping the workers of a run."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from verl.cluster.at_once import at_once
from verl.cluster.placement import Plan, crowded, make_plan, require
from verl.cluster.roles import Roles, Rollout, SharedRollout
from verl.cluster.threads import available_cores
from verl.config import Config
from verl.errors import ClusterError
from verl.rollout.parity import ParityReport

Report = Callable[[str], None]
EventLog = Callable[[str, str, str], None]
"""Of the run's events: kind, subject, detail."""


def no_log(kind: str, subject: str, detail: str) -> None:
    """Events of a run without a folder."""


@contextmanager
def start_workers(
    config: Config,
    report: Report,
    reward: Callable[..., Any] | None = None,
    log: EventLog = no_log,
    wish: Callable[[], int | None] = lambda: None,
) -> Iterator[Roles]:
    """The roles of a run; whatever was started is stopped at the end, also after an error.

    Args:
        report: gets a line about what is being started and found.
        reward: a reward function of this process, in place of the configuration's; only inline.
        log: of events: kind, subject, detail.
        wish: how many rollout workers the user wants now, None: as the load asks for.

    Raises:
        ClusterError: the machine or the Ray cluster lacks what is wanted, or cannot be reached.
    """
    require_machine(config)
    if config.cluster.backend == "inline":
        from verl.cluster.worker import Worker

        worker = Worker(config, reward)
        try:
            exact = _agreement(worker.setup(), config, report)
            yield Roles.of(dict.fromkeys(config.roles, worker), SharedRollout(worker), exact)
        finally:
            worker.close()
        return
    from verl.cluster.groups import started_groups
    from verl.cluster.ray_runtime import ray_running
    from verl.cluster.rollout_pool import started_pool

    plan, own = local_plan(config), config.cluster.address is None
    with ray_running(config, plan, report) as machines:
        if not own:
            cores, gpus = (int(max(machine.get(name, 0) for machine in machines)) for name in ("CPU", "GPU"))
            plan = make_plan(config, cores, gpus, reserved=True)
        require(plan, machines, "this machine" if own else "the Ray cluster", shared=own)
        _describe(plan, own, report)
        config = with_ranks(config, plan.group_of("actor").count)
        with started_groups(config, plan, report, log) as groups:
            parity = at_once([(group, group.setup) for group in groups])[0]
            workers = {role: groups[plan.groups.index(plan.group_of(role))] for role in config.roles}
            workers["actor"].tell(workers["reward"])
            rollout: Rollout = SharedRollout(workers["actor"])
            with ExitStack() as stack:
                if plan.rollout:
                    pool = started_pool(config, plan, workers["actor"], workers["reward"], log, wish)
                    rollout, parity = stack.enter_context(pool)
                yield Roles.of(workers, rollout, _agreement(parity, config, report))


def local_plan(config: Config) -> Plan:
    """On this machine alone."""
    return make_plan(config, available_cores(), torch.cuda.device_count() if torch.cuda.is_available() else 0)


def require_machine(config: Config) -> None:
    """Refuse what the machine (or this version) cannot give, before anything is loaded or started.

    What a running Ray cluster has (``cluster.address``) is asked of it when it is reached.

    Raises:
        ClusterError: GPUs, machines or cores that are not there.
    """
    if config.cluster.backend == "inline" or config.cluster.address is None:
        machine = {
            "CPU": float(available_cores()),
            "GPU": float(torch.cuda.device_count() if torch.cuda.is_available() else 0),
            "memory": float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")),
        }
        require(local_plan(config), [machine], "this machine", shared=True)
    if config.profiler.tool == "nsight" and config.cluster.address is None and shutil.which("nsys") is None:
        fix = "install Nsight Systems, or set profiler.tool=torch"
        raise ClusterError("profiler.tool=nsight, and this machine has no nsys", None, fix)


def _describe(plan: Plan, own: bool, report: Report) -> None:
    lines = plan.describe()
    for line in lines if len(lines) > 1 else ():
        report(line)
    if own and (busy := crowded(plan, available_cores())):
        report(
            f"note: {busy} threads compute at once on {available_cores()} cores: pools that share a process are faster"
        )


def with_ranks(config: Config, ranks: int) -> Config:
    """The configuration with the number of ranks that the machine decided.

    Raises:
        ConfigError: the batch sizes do not divide over them.
    """
    config = config.model_copy(update={"actor": config.actor.model_copy(update={"world_size": ranks})})
    config.actor_batch()
    if config.uses_critic:
        config.critic_batch()
    return config


def _agreement(parity: ParityReport | None, config: Config, report: Report) -> bool:
    """Whether the engine's log-probs are proven to be the trainer's; said in words."""
    assert parity is not None
    if parity.decoding:
        report(f"responses are decoded {parity.decoding}")
    if parity.exact:
        report(f"engine and trainer agree to the bit ({parity.tokens} log-probs of {config.model.dtype} compared)")
    elif not parity.differing:
        report(
            f"engine and trainer agree in the {parity.tokens} log-probs compared, but not by proof for every batch "
            "(an engine that claims none, a model with experts, or this machine's matmuls): old log-probs are "
            "computed by the trainer"
        )
    else:
        report(
            f"engine and trainer differ in {parity.differing} of {parity.tokens} log-probs on this machine "
            f"(at most {parity.largest:.2g} nats): old log-probs are computed by the trainer"
        )
    return parity.exact
