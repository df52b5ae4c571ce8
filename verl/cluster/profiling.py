"""What a worker process did when; and, of chosen roles in chosen steps, profiles of it.

The times of calls are always kept: two looks at the clock a call. Nothing of a profiler is imported or called before a
step that is to be profiled.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from verl.config.schema_cluster import ProfilerConfig

Span = tuple[str, float, float]
"""What ran, its beginning and its end: seconds since 1970, which mean the same in all processes of a machine."""

TOP_OPERATORS = 20  # of a profile, by their own time
MEMORY_EVENTS = 100_000  # allocations of a CUDA memory snapshot, the last ones

_START = time.time() - time.perf_counter()

P = ParamSpec("P")
T = TypeVar("T")


def now() -> float:
    """Seconds since 1970, by the clock as it stood when this process began: setting the clock moves no span."""
    return _START + time.perf_counter()


class Recorder:
    """The calls of one process.

    Args:
        whole: the role of a process whose calls are short and many: a profile is of all of them together; None: each
            call is profiled apart.
    """

    def __init__(self, config: ProfilerConfig, process: str, whole: str | None = None) -> None:
        self._config, self._process, self._whole = config, process, whole
        self._folder: Path | None = None
        self._numbers: Counter[str] = Counter()
        self._spans: list[Span] = []
        self._open = ExitStack()

    @contextmanager
    def call(self, role: str, name: str) -> Iterator[None]:
        """Around a call of this process that computes for a role."""
        began = now()
        try:
            with ExitStack() as stack:
                if self._folder is not None and self._config.wants(role):
                    if self._config.tool == "nsight":
                        stack.enter_context(_named_range(f"{role}: {name}"))
                    elif self._whole is None:
                        stack.enter_context(self._traced(role, name))
                yield
        finally:
            self._spans.append((name, began, now()))

    def take(self) -> list[Span]:
        """What has ended since the last call; calls without a pause between them are one."""
        spans, self._spans = self._spans, []
        return joined(spans)

    def profile(self, folder: str | None) -> None:
        """Profile into this folder from now on; None: no longer."""
        self._open.close()
        self._folder = None if folder is None else Path(folder)
        if folder is None:
            return
        self._numbers.clear()
        if self._config.tool == "nsight":
            self._open.enter_context(_cuda_capture())
        elif self._whole is not None and self._config.wants(self._whole):
            self._open.enter_context(self._traced(self._whole, "step"))

    @contextmanager
    def _traced(self, role: str, name: str) -> Iterator[None]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        assert self._folder is not None
        self._folder.mkdir(parents=True, exist_ok=True)
        self._numbers[role] += 1
        stem = self._folder / f"{role}.{self._process}.{self._numbers[role]}.{name}"
        cuda = torch.cuda.is_available()
        kinds = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * cuda]
        snapshot = _memory_history(Path(f"{stem}.memory.html")) if cuda and self._config.memory else ExitStack()
        with snapshot, profile(activities=kinds) as found:
            yield
        found.export_chrome_trace(f"{stem}.json.gz")
        events = sorted(found.key_averages(), key=_own_time, reverse=True)
        body = {
            "role": role,
            "seconds": sum(map(_own_time, events)) / 1e6,
            "operators": [[event.key, event.count, _own_time(event) / 1e6] for event in events[:TOP_OPERATORS]],
        }
        Path(f"{stem}.operators.json").write_text(json.dumps(body) + "\n")


def _own_time(event: Any) -> float:
    """Microseconds, of the GPU where it computes there."""
    return float(event.self_device_time_total or event.self_cpu_time_total)


@contextmanager
def _named_range(name: str) -> Iterator[None]:
    import torch

    with torch.cuda.nvtx.range(name):
        yield


@contextmanager
def _cuda_capture() -> Iterator[None]:
    """What ``nsys profile --capture-range=cudaProfilerApi`` records."""
    import torch

    torch.cuda.profiler.start()
    try:
        yield
    finally:
        torch.cuda.profiler.stop()


@contextmanager
def _memory_history(page: Path) -> Iterator[None]:
    """A page that draws all allocations of CUDA memory meanwhile, with the stacks of those who made them."""
    import torch
    from torch.cuda._memory_viz import trace_plot

    torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
    try:
        yield
        page.write_text(trace_plot(torch.cuda.memory._snapshot()))
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class HasRecorder(Protocol):
    recorder: Recorder


def recorded(role: str) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Of a worker's method that computes for this role: each call is noted, and profiled where that is wanted."""

    def around(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @wraps(method)
        def call(self: HasRecorder, *arguments: P.args, **named: P.kwargs) -> T:
            with self.recorder.call(role, method.__name__):
                return method(self, *arguments, **named)

        return call

    return around


def joined(spans: list[Span], gap: float = 0.01) -> list[Span]:
    """Neighbours of one name with less than ``gap`` seconds between them as one."""
    found: list[Span] = []
    for name, began, ended in spans:
        if found and found[-1][0] == name and began - found[-1][2] < gap:
            found[-1] = (name, found[-1][1], ended)
        else:
            found.append((name, began, ended))
    return found


def nsight_options(config: ProfilerConfig, roles: frozenset[str], folder: Path, pool: str) -> dict[str, str]:
    """Of ``nsys profile``, under which Ray starts the processes of these roles; empty: they start as ever."""
    if config.tool != "nsight" or not any(map(config.wants, roles)):
        return {}
    return {
        "t": "cuda,cudnn,cublas,nvtx",
        "o": str(folder.resolve() / f"nsight_{pool}_%p"),
        "capture-range": "cudaProfilerApi",
        "capture-range-end": f"repeat-shutdown:{len(config.steps)}",
        "stop-on-exit": "true",
    }
