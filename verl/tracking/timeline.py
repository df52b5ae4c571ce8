"""Where the time of a run went, from its ``timeline.jsonl``: shares of the stages, who was busy, a trace of it all; and
``verl profile``, which says it in words, with the operators of profiled steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, TypeVar

from verl.cluster.profiling import joined
from verl.errors import VerlError
from verl.json_lines import json_line, read_jsonl
from verl.run_dir import RunDir, write_atomic

Spans = Sequence[tuple[str, float, float]]

# What a part of a step (of the controller) and a call of a worker belong to. Of parts that overlap the first stage here
# counts: what runs behind another one costs nothing.
STAGES = {
    "update": ("update_actor", "update_critic"),
    "process": ("old_log_prob", "ref", "values", "reward", "adv", "actor_log_probs", "reference_log_probs", "full_kl",
                "score"),
    "transfer": ("update_weights", "publish", "exported_weights", "write_weights", "load_weights"),
    "rollout": ("gen", "wait_rollout", "generate", "advance"),
    "validation": ("testing",),
    "saving": ("save_checkpoint",),
}  # fmt: skip
STAGE_OF = {name: stage for stage, names in STAGES.items() for name in names}
OWN = ("adv", "wait_rollout", "save_checkpoint")  # parts in which the controller need not wait for a worker
IDLE = "idle"


@dataclass(frozen=True)
class Usage:
    """How the time of some steps was spent. Of the shares ``transfer``: weights, batches and answers are on their way,
    so that a stage has begun and no worker computes; ``idle``: no stage has."""

    steps: list[int]
    seconds: float  # of all steps
    shares: dict[str, float]  # of the time, by stage
    busy: dict[str, float]  # share of the time in which each worker computes


def read_timeline(run_dir: RunDir) -> list[dict[str, Any]]:
    """The lines of whole steps, in order; of a step that was done again the later one."""
    lines = [line for line in read_jsonl(run_dir.timeline)[0] if line.get("parts") and "step" in line]
    return [line for _, line in sorted({line["step"]: line for line in lines}.items())]


def usual(lines: Sequence[dict[str, Any]], profiled: Sequence[int]) -> list[dict[str, Any]]:
    """Without the first step, which warms up, and those that a profiler slowed down, if others are left. Rollout
    workers may still write what they have recorded of a step while the next one waits for them."""
    odd = {*[line["step"] for line in lines[:1]], *profiled, *[step + 1 for step in profiled]}
    return [line for line in lines if line["step"] not in odd] or list(lines)


def usage(lines: Sequence[dict[str, Any]]) -> Usage:
    """How the time of these steps was spent."""
    total, spent = 0.0, dict.fromkeys([*STAGES, IDLE], 0.0)
    busy: dict[str, float] = {}
    for line in lines:
        zero, last = window(line)
        total += last - zero
        workers: dict[str, Spans] = line.get("workers", {})
        for name, spans in workers.items():
            busy[name] = busy.get(name, 0.0) + sum(end - began for began, end in _covered(spans, zero, last))
        computing = _covered([span for spans in workers.values() for span in spans], zero, last) or [(zero, last)]
        parts = [part for part in line["parts"] if part[2] > zero]
        edges = {zero, last, *(t for _, *ends in parts for t in ends), *chain.from_iterable(computing)}
        for began, end in pairwise(sorted(edge for edge in edges if edge >= zero)):
            middle = (began + end) / 2
            open_ = {name for name, start, stop in parts if start <= middle < stop}
            stage = next((stage for stage, names in STAGES.items() if not open_.isdisjoint(names)), IDLE)
            if stage != IDLE and open_.isdisjoint(OWN) and not any(a <= middle < b for a, b in computing):
                stage = "transfer"
            spent[stage] += end - began
    return Usage(
        steps=[line["step"] for line in lines],
        seconds=total,
        shares={stage: seconds / total for stage, seconds in spent.items()},
        busy={name: seconds / total for name, seconds in sorted(busy.items())},
    )


def window(line: dict[str, Any]) -> tuple[float, float]:
    """Beginning and end of a step; what its line has of earlier was sampled ahead, behind the step before."""
    parts = line["parts"]
    own = [began for name, began, _ in parts if name in ("step", "save_checkpoint")]
    return min(own or [began for _, began, _ in parts]), max(end for _, _, end in parts)


def _covered(spans: Spans, zero: float, last: float) -> list[tuple[float, float]]:
    """When at least one of them runs, within these limits."""
    found: list[tuple[float, float]] = []
    for began, end in sorted((max(began, zero), min(end, last)) for _, began, end in spans):
        if found and began <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        elif end > began:
            found.append((began, end))
    return found


def trace(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All steps, stages and calls of all processes in Chrome's trace format, which Perfetto and chrome://tracing read.
    A process of the trace for the controller and for each worker; parts that overlap are in rows of their own."""
    spans: dict[str, list[tuple[str, float, float, int]]] = {"controller": []}
    zero = min((line.get("began", 0.0) for line in lines), default=0.0)
    for line in lines:
        offset, step = line.get("began", 0.0) - zero, line["step"]
        for name, own in sorted({"controller": line["parts"], **line.get("workers", {})}.items()):
            spans.setdefault(name, []).extend((part, offset + a, offset + b, step) for part, a, b in own)
    events: list[dict[str, Any]] = []
    for pid, name in enumerate(spans):
        events.append({"ph": "M", "name": "process_name", "ts": 0, "pid": pid, "tid": 0, "args": {"name": name}})
        for row, (part, began, end, step) in rows_of(spans[name]):
            what = f"step {step}" if part == "step" else part
            times = {"ts": round(began * 1e6), "dur": round(end * 1e6) - round(began * 1e6)}
            stage = {"cat": STAGE_OF.get(part, "step"), "args": {"step": step}}
            events.append({"ph": "X", "name": what, "pid": pid, "tid": row, **times, **stage})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


SHOWN_STEPS, MARKS = 4, 1000  # of the report's picture: the last steps, and its width in marks
LONG_PAUSE = 3600.0  # seconds between two steps: it lay stopped, or the clock was set; the picture begins behind


def picture(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The last steps for the report: who did what when, in seconds from the first of them; {} where nothing is known.

    ``lanes``: of the controller and of each worker a name, how many rows it has, the share of the time in which it
    computes (of a worker), and its spans as ``[stage, what, row, beginning, end]``. Neighbours too close to be told
    apart are one span.
    """
    lines = lines[-SHOWN_STEPS:]
    if not lines:
        return {}
    windows = [(line.get("began", 0.0) + a, line.get("began", 0.0) + b) for line in lines for a, b in [window(line)]]
    breaks = [i for i in range(1, len(lines)) if not -1 < windows[i][0] - windows[i - 1][1] < LONG_PAUSE]
    lines, windows = lines[max(breaks, default=0) :], windows[max(breaks, default=0) :]
    zero, last = windows[0][0], windows[-1][1]
    held: dict[str, list[tuple[str, float, float]]] = {"controller": []}
    for line in lines:
        offset = line.get("began", 0.0) - zero
        for name, spans in {"controller": line["parts"], **line.get("workers", {})}.items():
            kept = [(what, max(offset + a, 0.0), offset + b) for what, a, b in spans if what in STAGE_OF]
            held.setdefault(name, []).extend(span for span in kept if span[2] > span[1])
    lanes = []
    for name, spans in sorted(held.items(), key=lambda lane: (lane[0] != "controller", lane[0])):
        rows = rows_of(joined(sorted(spans, key=lambda span: span[1]), (last - zero) / MARKS))
        seconds = sum(end - began for began, end in _covered(spans, 0.0, last - zero))
        busy = None if name == "controller" else seconds / (last - zero)
        shown = [[STAGE_OF[what], what, row, round(a, 3), round(b, 3)] for row, (what, a, b) in rows]
        lanes.append({"name": name, "rows": 1 + max((row for row, _ in rows), default=0), "busy": busy, "spans": shown})
    steps = [
        [line["step"], round(a - zero, 3), round(b - zero, 3)] for line, (a, b) in zip(lines, windows, strict=True)
    ]
    return {"seconds": last - zero, "steps": steps, "lanes": lanes}


Placed = TypeVar("Placed", bound=tuple[Any, ...])


def rows_of(spans: Iterable[Placed]) -> list[tuple[int, Placed]]:
    """Spans (what, beginning, end, ...) by beginning, each with the first row in which nothing else runs meanwhile."""
    ends: list[float] = []
    found = []
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        row = next((row for row, until in enumerate(ends) if until <= span[1]), len(ends))
        ends[row : row + 1] = [span[2]]
        found.append((row, span))
    return found


SHOWN_OPERATORS = 5
ADVICE = {
    "rollout": "raise rollout.max_num_seqs, look at response_length/max (a step waits for its longest response), or "
    "overlap sampling with training: verl plan CONFIG --simulate RUN says what that would give",
    "update": "raise actor.ppo_max_token_len_per_gpu, or give training more ranks or threads",
    "process": "timing_s/* says which part; raise reward.num_workers, or give reference and critic pools of their own",
    "transfer": "rollout workers on the trainer's machine map its weights without a copy; fewer, larger mini-batches",
    "validation": "raise trainer.test_freq, or lower data.val_max_samples",
    "saving": "raise trainer.save_freq",
    "idle": "the controller itself is at work between the stages: the data, tracking services, sample files",
}


@dataclass(frozen=True)
class Operators:
    """The operators of one role in the profiled steps: name, calls, seconds of its own, the longest first."""

    role: str
    seconds: float
    top: list[tuple[str, int, float]]


@dataclass(frozen=True)
class Profile:
    """What is known of where a run's time goes."""

    usage: Usage
    operators: list[Operators]
    timeline: str  # the file
    traces: list[str]  # folders


def profile_run(run_dir: RunDir) -> Profile:
    """Reads the run's timeline and profiles, and writes the trace of all processes; works on a running run. Raises
    VerlError: the run has no timeline yet."""
    lines = read_timeline(run_dir)
    if not lines:
        raise VerlError("no step of this run has a timeline", str(run_dir.timeline), "let it train a step first")
    folders = sorted(run_dir.profile_dir.glob("step_*"))
    profiled = [int(folder.name.removeprefix("step_")) for folder in folders]
    file = run_dir.profile_dir / "timeline.json"
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, json_line(trace(lines)) + "\n")
    return Profile(usage(usual(lines, profiled)), _operators(folders), str(file), [str(folder) for folder in folders])


def _operators(folders: list[Path]) -> list[Operators]:
    bodies = [json.loads(file.read_text()) for folder in folders for file in sorted(folder.glob("*.operators.json"))]
    found = []
    for role in sorted({body["role"] for body in bodies}):
        own = [body for body in bodies if body["role"] == role]
        table: dict[str, tuple[int, float]] = {}
        for name, calls, seconds in (row for body in own for row in body["operators"]):
            before = table.get(name, (0, 0.0))
            table[name] = (before[0] + calls, before[1] + seconds)
        top = sorted(((n, calls, seconds) for n, (calls, seconds) in table.items()), key=lambda row: -row[2])
        found.append(Operators(role, sum(body["seconds"] for body in own), top))
    return found


def words(profile: Profile) -> Iterator[str]:
    found = profile.usage
    count = len(found.steps)
    span = f"steps {found.steps[0]} to {found.steps[-1]}" if count > 1 else f"step {found.steps[0]}"
    yield f"{span}: {found.seconds / count:.3g} s each"
    shares = sorted(found.shares.items(), key=lambda pair: -pair[1])
    for stage, share in shares:
        if share >= 0.001:
            yield f"  {stage:<11}{share:6.1%}  {share * found.seconds / count:.3g} s"
    if found.busy:
        yield "busy: " + ", ".join(f"{name} {share:.0%}" for name, share in found.busy.items())
    stage, share = shares[0]
    yield f"most of the time is {stage} ({share:.0%}): {ADVICE[stage]}"
    for role in profile.operators:
        top = [f"{name} {own / role.seconds:.0%} ({calls} calls)" for name, calls, own in role.top[:SHOWN_OPERATORS]]
        if role.seconds:
            yield f"operators of {role.role}, {role.seconds:.3g} s in all: {', '.join(top)}"
    yield f"timeline of all processes: {profile.timeline} (open it in https://ui.perfetto.dev)"
    if profile.traces:
        yield f"traces by operator: {', '.join(profile.traces)}"
    else:
        yield "traces by operator: none; train with profiler.tool=torch profiler.steps=[2]"
