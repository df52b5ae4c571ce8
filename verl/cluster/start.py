"""Starting and stopping the workers of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from verl.cluster.roles import Roles
from verl.cluster.threads import available_cores, worker_threads
from verl.config import Config
from verl.errors import ClusterError
from verl.rollout.parity import ParityReport

Report = Callable[[str], None]


@contextmanager
def start_workers(config: Config, report: Report, reward: Callable[..., Any] | None = None) -> Iterator[Roles]:
    """The roles of a run; whatever was started is stopped at the end, also after an error.

    Args:
        report: gets a line about what is being started and found.
        reward: a reward function of this process, in place of the configuration's; only inline.
    """
    require_machine(config)
    if config.cluster.backend == "inline":
        from verl.cluster.worker import Worker

        worker = Worker(config, reward)
        try:
            yield _roles(worker, config, worker.setup(), report)
        finally:
            worker.close()
        return
    from verl.cluster.ray_worker import started_workers

    if config.ranks is None:  # as many as there are GPUs
        config = with_ranks(config, torch.cuda.device_count() if torch.cuda.is_available() else 1)
    with started_workers(config, report) as remote:
        yield _roles(remote, config, remote.setup(), report)


def require_machine(config: Config) -> None:
    """Refuse what the machine (or this version) cannot give, before anything is loaded or started.

    What a running Ray cluster has (``cluster.address``) is asked of it when it is reached.

    Raises:
        ClusterError: GPUs, machines or cores that are not there.
    """
    trainer = config.trainer
    if config.cluster.backend == "inline" or config.cluster.address is None:
        _require_local_gpus(config)
        _require_local_cores(config)
    if trainer.nnodes > 1:
        raise ClusterError(
            "more than one machine was asked for, and this version trains on one",
            f"trainer.nnodes={trainer.nnodes}",
            "set trainer.nnodes=1; actor.world_size or trainer.n_gpus_per_node is the number of ranks there",
        )


def _require_local_gpus(config: Config) -> None:
    """GPUs that were asked for by number, or by ``trainer.device=cuda``; never replaced by a CPU in silence."""
    trainer = config.trainer
    if trainer.device == "cpu":
        return
    asked = trainer.n_gpus_per_node
    wanted = trainer.nnodes * (asked if isinstance(asked, int) else int(trainer.device == "cuda"))
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted > there:
        fewer = "trainer.nnodes=1 and trainer.n_gpus_per_node=1, or " if there else ""
        raise ClusterError(
            "more GPUs were asked for than this machine has",
            f"wanted {wanted} GPU, available {there} (trainer.nnodes={trainer.nnodes}, "
            f"trainer.n_gpus_per_node={asked}, trainer.device={trainer.device})",
            f"set {fewer}trainer.device=cpu",
        )


def _require_local_cores(config: Config) -> None:
    """More threads than cores are refused: they would fight for the cores, and a local Ray would believe the number."""
    ranks = config.ranks or 1
    wanted, there = worker_threads(config) * ranks, available_cores()
    if wanted > there:
        keys = "cluster.threads is" if ranks == 1 else "actor.world_size times cluster.threads is"
        fewer = f"cluster.threads={there} or less, or leave it out to use all cores"
        raise ClusterError(
            f"{keys} more than the cores that this process may use",
            f"wanted {wanted} CPU" + (f" ({ranks} ranks)" if ranks > 1 else "") + f", available {there}",
            "set " + (fewer if ranks == 1 else f"actor.world_size={there} or less, and leave cluster.threads out"),
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


def _roles(worker, config: Config, parity: ParityReport, report: Report) -> Roles:  # type: ignore[no-untyped-def]
    if parity.exact:
        report(f"engine and trainer agree to the bit ({parity.tokens} log-probs of {config.model.dtype} compared)")
    elif not parity.differing:
        report(
            f"engine and trainer agree in the {parity.tokens} log-probs compared, but not by proof for every batch "
            "(a model with experts, or this machine's matmuls): old log-probs are computed by the trainer"
        )
    else:
        report(
            f"engine and trainer differ in {parity.differing} of {parity.tokens} log-probs on this machine "
            f"(at most {parity.largest:.2g} nats): old log-probs are computed by the trainer"
        )
    return Roles.in_one_worker(
        worker, reference=config.uses_reference, critic=config.uses_critic, exact_rollout=parity.exact
    )
