"""Thread counts and numerical modes of a worker process; they must be set before torch starts. Free of torch."""

from __future__ import annotations

import os

from verl.config import Config, SupervisedConfig


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def worker_threads(config: Config | SupervisedConfig) -> int:
    """Of one rank."""
    ranks = config.ranks if isinstance(config, Config) else 1
    return config.cluster.threads or max(1, available_cores() // (ranks or 1))


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of a worker process.

    Over-subscribed OpenMP threads cost more than any other setting here; waiting passively halves the loss where
    something else keeps the cores busy, and costs nothing where not. MKL's strict reproducible mode makes a row of a
    float32 matmul independent of the number of rows (parity law).
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: str(threads) for name in names} | {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        "MKL_CBWR": os.environ.get("MKL_CBWR", "AUTO,STRICT"),
        "TOKENIZERS_PARALLELISM": "false",
    }


def set_environment(threads: int) -> None:
    """Make this process a worker process; to be called before torch is imported."""
    os.environ.update(worker_environment(threads))
