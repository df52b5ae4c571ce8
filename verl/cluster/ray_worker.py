"""One colocated worker over Ray: a local Ray that lives and dies with the run, or a running cluster by its address."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric
from verl.cluster.threads import worker_environment, worker_threads
from verl.config import Config
from verl.errors import ClusterError, VerlError, WorkerDiedError
from verl.protocol import DataProto
from verl.rollout.parity import ParityReport
from verl.rollout.protocol import EngineStats, Request, Result

NOTICE_SECONDS = 600.0  # a call that takes longer is named, with what is waited for
LISTENER_SECONDS = 10.0
REAPER_SECONDS = 5.0
OBJECT_STORE_BYTES = 2 * 2**30


class RayWorker:
    """Stand-in for :class:`verl.cluster.worker.Worker` in another process; every call waits for its answer."""

    def __init__(self, actor: Any, report: Callable[[str], None]) -> None:
        self._actor, self._report = actor, report

    def setup(self) -> ParityReport:
        return self._answer("setup", self._actor.setup.remote())

    def generate(self, requests: list[Request]) -> list[Result]:
        return self._answer("generate", self._actor.generate.remote(requests))

    def publish(self, version: int) -> None:
        self._answer("publish", self._actor.publish.remote(version))

    def engine_stats(self) -> EngineStats:
        return self._answer("engine_stats", self._actor.engine_stats.remote())

    def peak_memory_gb(self) -> float:
        return self._answer("peak_memory_gb", self._actor.peak_memory_gb.remote())

    def score(self, batch: DataProto) -> DataProto:
        return self._answer("score", self._actor.score.remote(batch))

    def actor_log_probs(self, batch: DataProto) -> DataProto:
        return self._answer("actor_log_probs", self._actor.actor_log_probs.remote(batch))

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        return self._answer("reference_log_probs", self._actor.reference_log_probs.remote(batch))

    def full_kl(self, batch: DataProto) -> DataProto:
        return self._answer("full_kl", self._actor.full_kl.remote(batch))

    def values(self, batch: DataProto) -> DataProto:
        return self._answer("values", self._actor.values.remote(batch))

    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        return self._answer("update_actor", self._actor.update_actor.remote(mini_batch, denominators))

    def update_critic(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        return self._answer("update_critic", self._actor.update_critic.remote(mini_batch, denominators))

    def save(self, folder: str) -> None:
        self._answer("save", self._actor.save.remote(folder))

    def load(self, folder: str) -> None:
        self._answer("load", self._actor.load.remote(folder))

    def _answer(self, call: str, reference: Any) -> Any:
        """Wait for an answer; user-facing errors come out as they were raised, others with the remote traceback."""
        started = time.monotonic()
        while True:
            try:
                return ray.get(reference, timeout=NOTICE_SECONDS)
            except GetTimeoutError:
                self._report(f"still waiting for the worker's {call}, for {time.monotonic() - started:.0f} s")
            except RayTaskError as error:
                if isinstance(error.cause, VerlError):
                    raise error.cause from error
                raise
            except RayActorError as error:
                raise WorkerDiedError(
                    f"the worker process died during {call}",
                    str(error).strip().splitlines()[-1],
                    "if memory ran out, lower rollout.max_num_seqs or actor.ppo_max_token_len_per_gpu; "
                    "start the same command again to go on from the last checkpoint",
                ) from error


@contextmanager
def started_worker(config: Config, report: Callable[[str], None]) -> Iterator[RayWorker]:
    """A worker process with all cores of its share.

    Raises:
        ClusterError: Ray cannot be started or reached, or lacks the resources; within ``cluster.start_timeout``.
    """
    from verl.cluster.worker import Worker

    threads = worker_threads(config)
    reaper: subprocess.Popen[bytes] | None = None
    try:
        if config.cluster.address is None:
            reaper = _start_reaper()
        with _own_sigterm():
            _start_ray(config, threads)
        _require_resources(config, threads)
        actor = (
            ray.remote(Worker)
            .options(
                num_cpus=threads,
                num_gpus=_gpus(config),
                max_restarts=0,
                runtime_env={"env_vars": worker_environment(threads)},
            )
            .remote(config)
        )
        _await_process(actor, config.cluster.start_timeout)
        try:
            yield RayWorker(actor, report)
        finally:
            ray.kill(actor)
    finally:
        ray.shutdown()
        if reaper is not None:
            with suppress(subprocess.TimeoutExpired):
                reaper.communicate(b".", timeout=REAPER_SECONDS)


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
    """GPUs of the worker: one where it is to compute on one."""
    device, wanted = config.trainer.device, config.trainer.n_gpus_per_node != 0
    return int(device == "cuda" or (device == "auto" and wanted and ray.cluster_resources().get("GPU", 0) >= 1))


def _require_resources(config: Config, threads: int) -> None:
    """What the cluster does not have at all is refused at once; waiting would not bring it."""
    there = ray.cluster_resources()
    cores, gpus = there.get("CPU", 0), there.get("GPU", 0)
    if cores < threads:
        raise ClusterError(
            "the Ray cluster has fewer CPUs than the worker needs",
            f"wanted {threads} CPU, available {cores:g}",
            f"set cluster.threads={int(cores)} or less",
        )
    if _gpus(config) > gpus:
        raise ClusterError(
            "trainer.device asks for a GPU and the Ray cluster has none",
            f"wanted {_gpus(config)} GPU, available {gpus:g}",
            "set trainer.device=cpu",
        )


def _await_process(actor: Any, seconds: float) -> None:
    try:
        ray.get(actor.__ray_ready__.remote(), timeout=seconds)
    except GetTimeoutError as error:
        free = ray.available_resources()
        raise ClusterError(
            f"no worker process within cluster.start_timeout ({seconds:g} s)",
            f"free in the cluster: {free.get('CPU', 0):g} CPU, {free.get('GPU', 0):g} GPU",
            "free resources, lower cluster.threads, or raise cluster.start_timeout",
        ) from error
