"""Runs on disk: finding one by its name, how far it came, and what there is to say about it."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl.config.names import did_you_mean
from verl.config.schema_supervised import RewardModelTrainingConfig, SftConfig, schema_of
from verl.diagnostics.evidence import few
from verl.errors import VerlError
from verl.run_dir import EventRecord, RunDir
from verl.tracking import facts, names
from verl.tracking.facts import get, read_config
from verl.tracking.live import best_and_worst
from verl.tracking.names import RunSummary, read_metrics, summarize, torn_note
from verl.tracking.samples import SampleRow, read_samples

RUNS = Path("runs")
STYLES = {"running": "bold cyan", "finished": "green", "stopped": "yellow", "crashed": "bold red"}
SHOWN_NAMES = 8
SHOWN_EVENTS = 10


def is_run(path: Path) -> bool:
    """Whether a folder holds anything that only a run leaves; what it holds may be damaged."""
    run = RunDir(path)
    files = (run.metrics, run.events, run.lock_file, run.config)
    return run.checkpoints.is_dir() or any(file.is_file() for file in files)


def find_run(name: str, root: Path = RUNS) -> RunDir:
    """The run of a name under ``root``, or the one at a path; a path inside a run's folder means that run. Raises
    VerlError: there is none; the nearest name is given."""
    path = Path(name)
    for place in (path, root / path):
        for folder in (place, *place.parents[:2]):
            if place.exists() and is_run(folder):
                return RunDir(folder)
    beside = path.parent if path.parent != Path() else root
    known = [run.path.name for run in runs_under(beside)] if beside.is_dir() else []
    there = f"{did_you_mean(path.name, known)}runs in {beside}: {few(known, SHOWN_NAMES)}"
    fix = there if known else f"there are no runs in {beside}"
    if path.exists():
        raise VerlError("not a run folder (none of a run's files is in it)", name, fix)
    raise VerlError("no such run folder", name, f"{fix} (see verl run list)")


def runs_under(root: Path) -> list[RunDir]:
    """The runs in a folder and in the folders right below it; the folder itself where it is a run. Raises VerlError:
    there is no such folder, or it cannot be read."""
    if is_run(root):
        return [RunDir(root)]
    try:
        folders = sorted(path for path in root.iterdir() if path.is_dir())
        nested = [below for path in folders if not is_run(path) for below in sorted(path.iterdir()) if below.is_dir()]
    except OSError as error:
        fix = "name the folder that holds your runs"
        raise VerlError("no folder of runs there", f"{root} ({error.strerror})", fix) from None
    return [RunDir(path) for path in [*folders, *nested] if is_run(path)]


@dataclass(frozen=True)
class RunOverview:
    """A run in one line; None where it has no such figure."""

    name: str
    path: str
    status: str  # running | finished | stopped (by hand) | crashed | empty | unknown
    reason: str  # why it stopped or crashed
    steps: int  # the last step logged
    planned_steps: int | None
    reward_last: float | None  # mean of the last steps, see RunSummary
    val_first: float | None
    val_last: float | None
    started: float | None  # seconds since 1970
    seconds: float | None  # of work, without the time that the run lay stopped


def overview(run_dir: RunDir) -> RunOverview:
    """Reads the run's metrics, events and lock."""
    steps, _ = read_metrics(run_dir)
    return overview_of(run_dir, steps, summarize(steps), run_dir.read_events())


def overview_of(
    run_dir: RunDir, steps: Sequence[dict[str, Any]], summary: RunSummary, events: Sequence[EventRecord]
) -> RunOverview:
    """The same of what was read already."""
    status, reason = _status(run_dir, events, bool(steps))
    times = [event.time for event in events[:1]] + [when for line in steps[:1] if (when := names.number(line, "time"))]
    times += [run_dir.config.stat().st_mtime] if run_dir.config.is_file() else []
    return RunOverview(
        name=run_dir.path.resolve().name,
        path=str(run_dir.path),
        status=status,
        reason=reason,
        steps=summary.steps,
        planned_steps=facts.planned_steps(events),
        reward_last=summary.reward_last,
        val_first=summary.val_first,
        val_last=summary.val_last,
        started=times[0] if times else None,
        seconds=summary.seconds,
    )


def _status(run_dir: RunDir, events: Sequence[EventRecord], has_metrics: bool) -> tuple[str, str]:
    if run_dir.is_locked():
        return "running", ""
    last = facts.last_of_life(events)
    if last is None:
        return ("unknown", "events.log says nothing about its end") if has_metrics else ("empty", "nothing was trained")
    if last.kind == "finished":
        return "finished", ""
    if last.kind == "stopped":
        by_hand = str(last.detail) in facts.BY_HAND
        return "stopped" if by_hand else "crashed", facts.why_stopped(last)
    host = run_dir.lock_holder().get("host")
    if host not in (None, socket.gethostname()):
        return "unknown", f"a copy of a run on {host}, which may go on there"
    return "crashed", "it ended without a word: killed, or the machine went down"


@dataclass(frozen=True)
class RunDescription:
    """What ``verl run show`` tells; absent facts are None or empty."""

    overview: RunOverview
    facts: dict[str, Any]  # model, algorithm, data
    summary: RunSummary
    curves: dict[str, list[float]]  # by name, of the steps that have the figure
    stages: dict[str, float]  # seconds of all steps
    checkpoints: list[int]  # steps of the complete ones
    warnings: list[str]
    events: list[EventRecord]  # the last ones
    samples_step: int | None
    samples: list[SampleRow]  # of the newest step with samples: the best and the worst
    files: dict[str, str]  # what there is, by name


def describe(run_dir: RunDir) -> RunDescription:
    """Reads the whole folder, as far as it can be read; what cannot is among the warnings."""
    from verl.checkpoint.store import CheckpointStore  # loads torch, which a mere list does without
    from verl.diagnostics import doctor

    steps, torn = read_metrics(run_dir)
    events = run_dir.read_events()
    summary = summarize(steps)
    text, tree = read_config(run_dir)
    damage = [torn_note(torn, "metrics.jsonl")] if torn else []
    if tree is None:
        damage.append("config.yaml cannot be read" if text else "there is no config.yaml")
    complete = CheckpointStore(run_dir.checkpoints).steps()
    parts = {run_dir.checkpoint(step).name for step in complete}
    folders = sorted(run_dir.checkpoints.iterdir()) if run_dir.checkpoints.is_dir() else []
    damage += [f"{path.name} is no complete checkpoint" for path in folders if path.name not in parts]
    sampled = run_dir.sample_steps()
    rows, torn_rows = read_samples(run_dir.samples(sampled[-1])) if sampled else ([], 0)
    if torn_rows:
        damage.append(torn_note(torn_rows, "the newest samples"))
    seconds: Counter[str] = Counter()
    for line in steps:
        seconds.update(names.stage_seconds(line))
    places = {"config": run_dir.config, "metrics": run_dir.metrics, "events": run_dir.events}
    places |= {"samples": run_dir.samples_dir, "tensorboard": run_dir.tensorboard, "report": run_dir.report}
    places |= {"checkpoint": run_dir.checkpoint(complete[-1])} if complete else {}
    return RunDescription(
        overview=overview_of(run_dir, steps, summary, events),
        facts=_facts(tree),
        summary=summary,
        curves=names.curves([names.figures(line) for line in steps], names.kl_label(steps)),
        stages=dict(seconds),
        checkpoints=complete,
        warnings=[*damage, *(finding.text for finding in doctor.warnings(run_dir, steps, events))],
        events=events[-SHOWN_EVENTS:],
        samples_step=sampled[-1] if sampled else None,
        samples=best_and_worst(rows),
        files={name: str(path) for name, path in places.items() if path.exists()},
    )


def _facts(tree: dict[str, Any] | None) -> dict[str, Any]:
    schema, what = schema_of(tree or {}), {}
    if schema is not None:
        names = {SftConfig: "sft", RewardModelTrainingConfig: "reward model"}
        what = {"algorithm": names[schema], "examples_a_step": get(tree, "data.train_batch_size")}
    keys = {
        "model": "model.path",
        "dtype": "model.dtype",
        "algorithm": "algorithm.adv_estimator",
        "train_files": "data.train_files",
        "val_files": "data.val_files",
        "prompts_a_step": "data.train_batch_size",
        "responses_a_prompt": "rollout.n",
        "seed": "trainer.seed",
    }
    return {name: value for name, key in keys.items() if (value := get(tree, key)) not in (None, [])} | what
