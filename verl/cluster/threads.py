"""Threads, numerical modes, memory and folder of a worker process: all but the last before torch starts. No torch."""

from __future__ import annotations

import ctypes
import os

from verl.config import Config, SupervisedConfig
from verl.models.memory import available_cores

# How threads wait for work; the count, of looks before they sleep, is GNU's alone.
WAITING = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "3000"}
# glibc hands freed tensors back to the system, which has to clear every page of the next one: a second and more of a
# training step. As its environment variables and as its function mallopt knows them: nothing is mapped by itself, the
# heap does not shrink, and there is one for all threads: what one has freed, as those that exchange gradients, another
# can take.
MALLOC = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_ARENA_MAX": "1"}
MALLOPT = {-4: 0, -1: -1, -8: 1}


FOLDER = "VERL_STARTED_IN"  # environment: the folder of the run's command


def process_threads(config: Config | SupervisedConfig) -> int:
    """Of a process that trains alone."""
    return config.cluster.threads or available_cores()


def worker_environment(threads: int) -> dict[str, str]:
    """Environment of a worker process.

    Over-subscribed OpenMP threads cost more than any other setting here, and one that waits actively keeps others from
    the core that would end its wait. But one that sleeps at once may be woken on the core of the thread it worked for,
    where they take turns: generation then gains nothing from a second core. So a thread looks for some tenths of a
    millisecond, which most gaps between two operators are shorter than, and then sleeps. MKL's strict reproducible mode
    makes a row of a float32 matmul independent of the number of rows (parity law).
    """
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    waiting, malloc = (
        {name: os.environ[name] for name in ours if name in os.environ} or ours for ours in (WAITING, MALLOC)
    )
    return {name: str(threads) for name in names} | {
        **waiting,
        **malloc,
        "MKL_CBWR": os.environ.get("MKL_CBWR", "AUTO,STRICT"),
        "TOKENIZERS_PARALLELISM": "false",
        "KINETO_LOG_LEVEL": os.environ.get("KINETO_LOG_LEVEL", "99"),  # a profiler's start and stop are no error output
    }


def set_environment(threads: int) -> None:
    """Make this process a worker process; to be called before torch is imported."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in MALLOC):  # of a process that runs already
        for parameter, value in MALLOPT.items():
            mallopt(parameter, value)
    os.environ.update(worker_environment(threads))


def stand_where_the_run_was_started() -> None:
    """Relative paths of the configuration are meant from there; a process of a cluster stands where Ray was started."""
    folder = os.environ.get(FOLDER)
    if folder is not None and os.path.isdir(folder):
        os.chdir(folder)
