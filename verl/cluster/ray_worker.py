"""Workers over Ray: a local Ray that lives and dies with the run, or a running cluster by its address."""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric, merge_all
from verl.cluster.threads import worker_environment, worker_threads
from verl.config import Config
from verl.data.balancing import karmarkar_karp
from verl.errors import ClusterError, RanksLostError, VerlError, WorkerDiedError
from verl.protocol import DataProto
from verl.rollout.parity import ParityReport
from verl.rollout.protocol import EngineStats, Request, Result

NOTICE_SECONDS = 600.0  # a call that takes longer is named, with what is waited for
GRACE_SECONDS = 5.0  # after a failure, for the other ranks
LISTENER_SECONDS = 10.0
REAPER_SECONDS = 5.0
OBJECT_STORE_BYTES = 2 * 2**30


class RayWorkers:
    """Stand-in for :class:`verl.cluster.worker.Worker` in other processes, one or several training ranks.

    Every call waits for the answers of all. Ranks get whole batches, which lie in the object store once, and find
    their own rows; requests are shared out here.
    """

    def __init__(self, actors: list[Any], report: Callable[[str], None]) -> None:
        self._actors, self._report = actors, report
        self._kills = memory_kills()

    def setup(self) -> ParityReport:
        return ParityReport.total(self._answers("setup", [actor.setup.remote() for actor in self._actors]))

    def generate(self, requests: list[Request], prompts: DataProto | None) -> list[Result]:
        shares = share_requests(requests, len(self._actors))
        calls = [
            actor.generate.remote([requests[i] for i in share], prompts if rank == 0 else None)  # it has the scorer
            for rank, (actor, share) in enumerate(zip(self._actors, shares, strict=True))
        ]
        found: dict[int, Result] = {}
        for share, results in zip(shares, self._answers("generate", calls), strict=True):
            found.update(zip(share, results, strict=True))
        return [found[i] for i in range(len(requests))]

    def publish(self, version: int) -> None:
        self._answers("publish", [actor.publish.remote(version) for actor in self._actors])

    def engine_stats(self) -> EngineStats:
        stats = self._answers("engine_stats", [actor.engine_stats.remote() for actor in self._actors])
        return EngineStats.total(stats, stats[0].version)

    def exported_weights(self) -> Any:
        """A reference to the actor's weights, which lie in the object store then; see :class:`RolloutPool`."""
        references = [actor.exported_weights.remote() for actor in self._actors]
        ray.wait(references, num_returns=len(references), fetch_local=False)
        return references[0]

    def parity_probe(self) -> list[Request]:
        return self._answers("parity_probe", [self._actors[0].parity_probe.remote()])[0]

    def compare(self, requests: list[Request], results: list[Result]) -> ParityReport:
        return self._answers("compare", [actor.compare.remote(requests, results) for actor in self._actors])[0]

    def peak_memory_gb(self) -> float:
        """Of the rank that had the most."""
        return max(self._answers("peak_memory_gb", [actor.peak_memory_gb.remote() for actor in self._actors]))

    def score(self, batch: DataProto) -> DataProto:
        """On the first rank: a reward function may look at a batch as a whole."""
        return self._answers("score", [self._actors[0].score.remote(batch)])[0]

    def actor_log_probs(self, batch: DataProto) -> DataProto:
        shared = ray.put(batch)
        return self._answers("actor_log_probs", [actor.actor_log_probs.remote(shared) for actor in self._actors])[0]

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        shared = ray.put(batch)
        calls = [actor.reference_log_probs.remote(shared) for actor in self._actors]
        return self._answers("reference_log_probs", calls)[0]

    def full_kl(self, batch: DataProto) -> DataProto:
        shared = ray.put(batch)
        return self._answers("full_kl", [actor.full_kl.remote(shared) for actor in self._actors])[0]

    def values(self, batch: DataProto) -> DataProto:
        shared = ray.put(batch)
        return self._answers("values", [actor.values.remote(shared) for actor in self._actors])[0]

    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        shared = ray.put(mini_batch)
        calls = [actor.update_actor.remote(shared, denominators) for actor in self._actors]
        return merge_all(self._answers("update_actor", calls))

    def update_critic(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        shared = ray.put(mini_batch)
        calls = [actor.update_critic.remote(shared, denominators) for actor in self._actors]
        return merge_all(self._answers("update_critic", calls))

    def save(self, folder: str) -> None:
        self._answers("save", [actor.save.remote(folder) for actor in self._actors])

    def load(self, folder: str) -> None:
        self._answers("load", [actor.load.remote(folder) for actor in self._actors])

    def _answers(self, call: str, references: list[Any]) -> list[Any]:
        """Wait for all; user-facing errors come out as they were raised, others with the remote traceback.

        The others of a rank that fails hang in an exchange with it, or fail because of it, perhaps before it is known:
        they get a moment, and the cause is raised, whichever came first.
        """
        ranks = {reference: rank for rank, reference in enumerate(references)}
        found: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        started = time.monotonic()
        while ranks:
            wait = GRACE_SECONDS if failures else NOTICE_SECONDS
            done, _ = ray.wait(list(ranks), timeout=wait, num_returns=1)
            if not done:
                if failures:
                    break
                self._report(f"still waiting for the worker's {call}, for {time.monotonic() - started:.0f} s")
            for reference in done:
                rank = ranks.pop(reference)
                try:
                    found[rank] = ray.get(reference)
                except (RayTaskError, RayActorError) as error:
                    failures[rank] = error
        if failures:
            rank = min(failures, key=lambda rank: (_distance(failures[rank]), rank))
            self._raise(call, rank, failures[rank])
        return [found[rank] for rank in range(len(references))]

    def _raise(self, call: str, rank: int, error: Exception) -> NoReturn:
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, VerlError):
                raise error.cause from error
            raise error
        name = "the worker process" if len(self._actors) == 1 else f"training rank {rank}"
        fix = (
            "if memory ran out, lower rollout.max_num_seqs or actor.ppo_max_token_len_per_gpu; "
            "start the same command again to go on from the last checkpoint"
        )
        if memory_kills() > self._kills:
            what = f"{name} was killed by the kernel during {call}: the machine ran out of memory (SIGKILL)"
        else:
            what = f"{name} died during {call}"
        raise WorkerDiedError(what, str(error).strip().splitlines()[-1], fix) from error


def _distance(error: Exception) -> int:
    """How far an error is from the cause: a death, a fault of a rank's own, what follows from another rank's."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if isinstance(error, RayTaskError) and isinstance(error.cause, RanksLostError) else 1


def memory_kills() -> int:
    """Processes that the kernel has killed on this machine (or in this control group) for want of memory."""
    killed = 0
    for file in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        with suppress(OSError, ValueError, IndexError):
            killed += sum(
                int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill ")
            )
    return killed


def share_requests(requests: list[Request], ranks: int) -> list[list[int]]:
    """Places of the requests of each rank: those of a prompt together, as it is prefilled once, and about as many."""
    prompts: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        prompts.setdefault(request.slot.uid, []).append(place)
    units = list(prompts.values())
    if len(units) < ranks:
        units = [[place] for place in range(len(requests))]
    room = [
        sum(len(requests[i].prompt_ids) / len(unit) + requests[i].sampling.max_new_tokens for i in unit)
        for unit in units
    ]
    return [sorted(place for unit in bin_ for place in units[unit]) for bin_ in karmarkar_karp(room, ranks)]


@contextmanager
def started_workers(config: Config, report: Callable[[str], None]) -> Iterator[RayWorkers]:
    """A worker process for each training rank, with its share of the cores, on one machine.

    Raises:
        ClusterError: Ray cannot be started or reached, or lacks the resources; within ``cluster.start_timeout``.
    """
    from verl.cluster.worker import Worker

    threads, ranks = worker_threads(config), config.ranks or 1
    meeting = Path(tempfile.gettempdir()) / f"verl-ranks-{secrets.token_hex(16)}"
    reaper: subprocess.Popen[bytes] | None = None
    try:
        if config.cluster.address is None:
            reaper = _start_reaper()
        with _own_sigterm():
            _start_ray(config, threads * ranks)
        _require_resources(config, threads * ranks)
        options: dict[str, Any] = {"num_cpus": threads, "num_gpus": int(_gpus(config) > 0), "max_restarts": 0}
        options["runtime_env"] = {"env_vars": worker_environment(threads)}
        if ranks > 1:
            options["scheduling_strategy"] = _on_one_machine(options, ranks, config.cluster.start_timeout)
        remote = ray.remote(Worker).options(**options)
        actors = [remote.remote(config, None, rank, str(meeting / "ranks")) for rank in range(ranks)]
        _await_processes(actors, config.cluster.start_timeout)
        try:
            yield RayWorkers(actors, report)
        finally:
            for actor in actors:
                ray.kill(actor)
    finally:
        ray.shutdown()
        shutil.rmtree(meeting, ignore_errors=True)
        if reaper is not None:
            with suppress(subprocess.TimeoutExpired):
                reaper.communicate(b".", timeout=REAPER_SECONDS)


def _on_one_machine(options: dict[str, Any], ranks: int, seconds: float) -> PlacementGroupSchedulingStrategy:
    """Ranks meet over a file and the loopback interface."""
    bundle = {"CPU": options["num_cpus"], "GPU": options["num_gpus"]}
    group = placement_group([{k: v for k, v in bundle.items() if v}] * ranks, strategy="STRICT_PACK")
    if not group.wait(seconds):
        raise ClusterError(
            "no machine of the Ray cluster has room for all training ranks within cluster.start_timeout",
            f"{ranks} ranks x {bundle['CPU']} CPU" + (", 1 GPU each" if bundle["GPU"] else ""),
            "lower actor.world_size or cluster.threads",
        )
    return PlacementGroupSchedulingStrategy(group)


def _start_reaper() -> subprocess.Popen[bytes]:
    """Watches over the local Ray: see :mod:`verl.cluster.reaper`. It ends with this process, however that ends."""
    return subprocess.Popen(
        [sys.executable, "-I", str(Path(__file__).with_name("reaper.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the process's own reaction to SIGTERM: Ray sets its own, which skips our clean-up and says nothing."""
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:  # what Ray makes of a SIGTERM while it starts
        if callable(handler):
            handler(signal.SIGTERM, None)
        raise
    finally:
        if threading.current_thread() is threading.main_thread() and handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _start_ray(config: Config, threads: int) -> None:
    address = config.cluster.address
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
    if address is None:
        # Ray listens on all interfaces whatever its node address: nobody without this token gets an answer. It is
        # handed down in the environment, which other users cannot read, and never touches a file. Ray turns token
        # mode on by itself (it reads its environment when it is imported, so that setting the mode here is too late),
        # and keeps the first token that it saw in a process.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": threads, "include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    else:
        _require_listener(address)
    try:
        ray.init(address=address or "local", **options)
    except Exception as error:
        raise ClusterError(
            f"Ray could not be {'reached' if address else 'started'}: {error}",
            address,
            "check cluster.address" if address else "run with cluster.backend=inline to do without Ray",
        ) from error
    if address is None and os.environ.get("RAY_AUTH_MODE", "").lower() != "token":
        raise ClusterError(
            "the local Ray does not ask for a token, so anybody who reaches this machine could run code in it",
            f"RAY_AUTH_MODE={os.environ.get('RAY_AUTH_MODE')}",
            "unset RAY_AUTH_MODE, or run with cluster.backend=inline",
        )


def _require_listener(address: str) -> None:
    """Ask whether anybody answers at ``host:port``; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if address == "auto":
        return
    if not host or not port.isdigit() or "://" in address:
        raise ClusterError(
            "cluster.address is not the address of a Ray cluster", address, "give host:port, as `ray start` prints it"
        )
    try:
        socket.create_connection((host, int(port)), timeout=LISTENER_SECONDS).close()
    except OSError as error:
        raise ClusterError(
            f"nobody answers at cluster.address: {error}",
            address,
            "start a cluster there (ray start --head), or leave cluster.address out for a local Ray",
        ) from error


def _gpus(config: Config) -> int:
    """GPUs of all workers: one each where they are to compute on them."""
    device, wanted = config.trainer.device, config.trainer.n_gpus_per_node != 0
    used = device == "cuda" or (device == "auto" and wanted and ray.cluster_resources().get("GPU", 0) >= 1)
    return (config.ranks or 1) * used


def _require_resources(config: Config, threads: int) -> None:
    """What the cluster does not have at all is refused at once; waiting would not bring it."""
    there = ray.cluster_resources()
    cores, gpus = there.get("CPU", 0), there.get("GPU", 0)
    if cores < threads:
        raise ClusterError(
            "the Ray cluster has fewer CPUs than the workers need",
            f"wanted {threads} CPU, available {cores:g}",
            f"set cluster.threads={int(cores) // (config.ranks or 1)} or less",
        )
    if _gpus(config) > gpus:
        raise ClusterError(
            "more GPUs were asked for than the Ray cluster has",
            f"wanted {_gpus(config)} GPU, available {gpus:g}",
            "set trainer.device=cpu",
        )


def _await_processes(actors: list[Any], seconds: float) -> None:
    try:
        ray.get([actor.__ray_ready__.remote() for actor in actors], timeout=seconds)
    except GetTimeoutError as error:
        free = ray.available_resources()
        raise ClusterError(
            f"no worker process within cluster.start_timeout ({seconds:g} s)",
            f"free in the cluster: {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU",
            "free resources, lower cluster.threads, or raise cluster.start_timeout",
        ) from error
