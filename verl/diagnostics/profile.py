"""``verl profile``: what a run spends its time on, in words, and a trace of all its processes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl.errors import VerlError
from verl.json_lines import json_line
from verl.run_dir import RunDir, write_atomic
from verl.tracking.timeline import Usage, read_timeline, trace, usage, usual

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
    seconds: dict[str, float] = {}
    tables: dict[str, dict[str, tuple[int, float]]] = {}
    for file in (file for folder in folders for file in sorted(folder.glob("*.operators.json"))):
        body = json.loads(file.read_text())
        role = body["role"]
        seconds[role] = seconds.get(role, 0.0) + body["seconds"]
        table = tables.setdefault(role, {})
        for name, calls, own in body["operators"]:
            before = table.get(name, (0, 0.0))
            table[name] = (before[0] + calls, before[1] + own)
    return [
        Operators(role, seconds[role], sorted(((n, c, s) for n, (c, s) in table.items()), key=lambda row: -row[2]))
        for role, table in sorted(tables.items())
    ]


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
