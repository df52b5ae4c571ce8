"""Is the machine fit for it?"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from verl.diagnostics.evidence import Evidence, Finding, finding

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """Of this moment; bytes unless said otherwise."""

    cores: int
    load: float  # programs that wanted to run in the last minute
    memory: int
    swap_used: int
    disk_free: int
    shared_free: int
    threads: str = ""  # OMP_NUM_THREADS
    wrong_versions: list[str] = field(default_factory=list)  # what is not as VeRL asks for, in words

    @classmethod
    def here(cls, folder: Path) -> Machine:
        """This machine; ``folder`` lies (or will lie) on the disk that is asked about."""
        from verl.cluster.threads import available_cores

        place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
        memory = _meminfo()
        shared = Path("/dev/shm")
        swap = memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)
        free = shutil.disk_usage(shared).free if shared.is_dir() else 0
        threads, versions = os.environ.get("OMP_NUM_THREADS", ""), list(_wrong_versions())
        cores, load, disk = available_cores(), os.getloadavg()[0], shutil.disk_usage(place).free
        return cls(cores, load, memory.get("MemTotal", 0), swap, disk, free, threads, versions)


def _meminfo() -> dict[str, int]:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    parts = (line.replace(":", "").split() for line in lines)
    return {words[0]: int(words[1]) * 1024 for words in parts if len(words) == 3}


def _wrong_versions() -> Iterator[str]:
    from packaging.requirements import Requirement

    try:
        wanted = importlib.metadata.requires("verl") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree
        return
    for requirement in map(Requirement, wanted):
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        try:
            there = importlib.metadata.version(requirement.name)
        except importlib.metadata.PackageNotFoundError:
            yield f"{requirement.name} is not installed"
            continue
        if not requirement.specifier.contains(there, prereleases=True):
            yield f"{requirement.name} {there}, wanted {requirement.specifier}"


def threads(evidence: Evidence) -> Iterator[Finding]:
    machine, config = evidence.machine, evidence.config
    if machine is None:
        return
    given, ranks = (config.cluster.threads, config.ranks or 1) if config is not None else (None, 1)
    asked = (given or (int(machine.threads) if machine.threads.isdigit() else 0)) * ranks
    if asked > machine.cores:
        figures = f"{asked} threads ({ranks} ranks), {machine.cores} cores"
        yield finding("threads_over_subscribed", figures, most=max(1, machine.cores // ranks))
    if machine.load > 1.5 * machine.cores:
        yield finding("machine_busy", f"load {machine.load:.1f}, {machine.cores} cores")


def memory(evidence: Evidence) -> Iterator[Finding]:
    machine, config = evidence.machine, evidence.config
    if machine is None:
        return
    if machine.swap_used > 0.1 * machine.memory:
        figures = f"{machine.swap_used / GIB:.1f} GiB in swap, {machine.memory / GIB:.1f} GiB of memory"
        yield finding("swapping", figures)
    if machine.disk_free < 5 * GIB:
        figures = f"{machine.disk_free / GIB:.1f} GiB free"
        yield finding("disk_full", figures, severity="error" if machine.disk_free < GIB / 2 else "warning")
    if config is not None and config.cluster.backend == "ray" and machine.shared_free < GIB:
        yield finding("shared_memory_small", f"{machine.shared_free / GIB:.2f} GiB free in /dev/shm")


def versions(evidence: Evidence) -> Iterator[Finding]:
    if evidence.machine is not None and evidence.machine.wrong_versions:
        yield finding("versions", "; ".join(evidence.machine.wrong_versions))
