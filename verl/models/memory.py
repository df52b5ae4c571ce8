"""How much memory is left on this machine. Free of torch."""

from __future__ import annotations

import os
from pathlib import Path


def total_memory() -> int:
    """Bytes of main memory that the machine has."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


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
