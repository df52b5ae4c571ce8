"""Ray itself: a local one that lives and dies with the run, or a running cluster by its address."""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import ray

from verl.cluster.object_store import STORE_FULL, store_full
from verl.cluster.placement import Machine, Plan
from verl.config import Config
from verl.errors import ClusterError
from verl.models.resolve import resolve_model

LISTENER_SECONDS = 10.0
REAPER_SECONDS = 5.0
OBJECT_STORE_BYTES = 2 * 2**30
_warned: set[str | None] = set()  # addresses of clusters that ask for no token


@contextmanager
def ray_running(config: Config, plan: Plan, report: Callable[[str], None]) -> Iterator[list[Machine]]:
    """What each of Ray's machines has; Ray is left, and a local one ended, whatever happens inside.

    Args:
        plan: that a local Ray makes room for; processes that compute at different times may have the same cores.

    Raises:
        ClusterError: Ray cannot be started or reached.
    """
    reaper: subprocess.Popen[bytes] | None = None
    try:
        if config.cluster.address is None:
            reaper = _start_reaper()
        with _own_sigterm():
            dashboard = _start_ray(config, plan.cpus(), _object_store(config, plan))
        address = config.cluster.address
        if address not in (None, *_warned) and _answers_anybody(ray.get_runtime_context().gcs_address):
            _warned.add(address)  # a run that restarts joins it again
            report(
                f"warning: the Ray cluster at {address} asks for no token: whoever reaches it can run "
                "code in this run and read its data; start it with RAY_AUTH_MODE=token and a token of yours"
            )
        if config.cluster.dashboard:
            report(f"Ray's dashboard: http://{dashboard}" if dashboard else "the Ray cluster runs no dashboard")
        yield [node["Resources"] for node in ray.nodes() if node["Alive"]]
    except STORE_FULL as error:
        raise store_full() from error
    finally:
        ray.shutdown()
        if reaper is not None:
            with suppress(subprocess.TimeoutExpired):
                reaper.communicate(b".", timeout=REAPER_SECONDS)


def _answers_anybody(address: str) -> bool:
    """Whether Ray at this address serves a client without a token."""
    bare = {key: value for key, value in os.environ.items() if not key.startswith("RAY_AUTH_")}
    return _knock(address, bare | {"RAY_AUTH_MODE": "disabled"}) == "served"


def _knock(address: str, environment: Mapping[str, str]) -> Literal["served", "refused", "unknown"]:
    """What becomes of a client with this environment.

    A process of its own asks: in this one, Ray keeps the token that it was started with.
    """
    ask = "import sys, ray._raylet as r; r.GcsClient(address=sys.argv[1]).internal_kv_keys(b'', None, timeout=5)"
    command = [sys.executable, "-c", ask, address]
    with suppress(subprocess.TimeoutExpired):
        done = subprocess.run(command, env=environment, capture_output=True, timeout=30)
        if done.returncode == 0:
            return "served"
        if b"AuthenticationError" in done.stderr:
            return "refused"
    return "unknown"


def _object_store(config: Config, plan: Plan) -> int:
    """Bytes: batches, and for rollout workers the weights of the version in use, of the next, and one to spare."""
    if not plan.rollout:
        return OBJECT_STORE_BYTES
    files = resolve_model(config.model.path).glob("*.safetensors")
    wider = 2 if config.model.dtype == "float32" else 1  # than the file may be
    return OBJECT_STORE_BYTES + 3 * wider * sum(file.stat().st_size for file in files)


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


def _start_ray(config: Config, cpus: int, object_store: int) -> str:
    """The address of its dashboard; empty: it has none."""
    address = config.cluster.address
    options: dict[str, Any] = {"logging_level": "ERROR", "log_to_driver": True}
    # Of a worker that was given up nobody asks for the other answers; what it failed with is in events.log.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    if address is None:
        # Ray listens on all interfaces whatever its node address: nobody without this token gets an answer. It is
        # handed down in the environment, which other users cannot read, and never touches a file. Ray turns token
        # mode on by itself (it reads its environment when it is imported, so that setting the mode here is too late),
        # and keeps the first token that it saw in a process.
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        options |= {"num_cpus": cpus, "include_dashboard": config.cluster.dashboard, "dashboard_host": "127.0.0.1"}
        options["object_store_memory"] = object_store
        if config.cluster.dashboard:
            _require_dashboard()
        else:  # only the dashboard shows Ray's history of calls, which fills its server's memory, 3.5 KiB a call
            os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    else:
        _require_listener(address)
    try:
        context = ray.init(address=address or "local", **options)
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
    return context.dashboard_url or ""


def _require_dashboard() -> None:
    missing = [
        name
        for name in ("aiohttp", "aiohttp_cors", "opencensus", "prometheus_client", "colorful", "smart_open")
        if importlib.util.find_spec(name) is None
    ]
    if missing:
        raise ClusterError(
            "cluster.dashboard=true, and Ray is installed without its dashboard",
            f"missing: {', '.join(missing)}",
            "pip install 'ray[default]', or leave cluster.dashboard out",
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
    if _knock(address, os.environ) == "refused":  # Ray itself would try for twenty seconds
        raise ClusterError(
            "the Ray cluster at cluster.address asks for a token, and this run has none or another",
            address,
            "export RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN with the cluster's token",
        )
