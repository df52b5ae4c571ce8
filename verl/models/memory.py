"""How much memory is left on this machine, and its cores. Free of torch."""

from __future__ import annotations

import os
from pathlib import Path


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def total_memory() -> int:
    """Bytes of main memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_memory(process: int | str = "self") -> int:
    """Bytes of main memory that a process holds now; 0 where it has ended."""
    try:
        return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0


def descendants(process: int) -> list[int]:
    """Ids of the processes that a process started, theirs included, as far as they live."""
    try:
        children = [
            int(pid)
            for task in Path(f"/proc/{process}/task").iterdir()
            for pid in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [*children, *(pid for child in children for pid in descendants(child))]


def free_memory() -> int:
    """Bytes of main memory that this process may still take, by what the system and its control group say."""
    limits = [total_memory()]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limits.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))  # "max" where there is no limit
    except (OSError, ValueError):
        pass
    return min(limits)
