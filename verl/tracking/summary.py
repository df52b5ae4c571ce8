"""The few figures that tell how a run went, from its ``metrics.jsonl``: for the end of a run and its report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.json_lines import read_jsonl
from verl.run_dir import RunDir
from verl.tracking import names


@dataclass(frozen=True)
class RunSummary:
    """How a run went; None where it has no such figure."""

    steps: int  # the last step logged
    trained_steps: int  # lines with a reward, or the loss of supervised training
    reward_first: float | None  # mean reward of the first `window` steps
    reward_last: float | None  # ... and of the last ones
    window: int  # steps averaged at each end: 5, fewer in a short run
    val_first: float | None
    val_first_step: int | None
    val_last: float | None
    val_last_step: int | None
    loss_first: float | None  # of supervised training: as the rewards
    loss_last: float | None
    seconds: float | None  # steps, validation and saving; the time a run lay stopped is not counted


def read_metrics(run_dir: RunDir) -> tuple[list[dict[str, Any]], int]:
    """The steps of a run in order, and how many lines were torn or no step.

    Lines of one step are merged, later values first.
    """
    records, torn = read_jsonl(run_dir.metrics)
    steps, skipped = merged_steps(records)
    return steps, torn + skipped


def torn_note(lines: int, where: str) -> str:
    return f"{lines} unreadable line{'s'[: lines > 1]} in {where} skipped"


def merged_steps(records: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """One record a step, in order, and how many records were of no step."""
    skipped = 0
    by_step: dict[int, dict[str, Any]] = {}
    for record in records:
        step = record.get("step")
        if not isinstance(step, int) or isinstance(step, bool):
            skipped += 1
            continue
        by_step.setdefault(step, {}).update(record)
    return [by_step[step] for step in sorted(by_step)], skipped


def summarize(steps: Sequence[dict[str, Any]]) -> RunSummary:
    """Sums up what :func:`read_metrics` returned."""
    losses = [value for line in steps if (value := names.number(line, names.LOSS)) is not None]
    rewards = [value for line in steps if (value := names.number(line, names.REWARD)) is not None]
    validation = [(line["step"], value) for line in steps if (value := names.validation_score(line)) is not None]
    window = max(1, min(5, max(len(rewards), len(losses)) // 2))
    return RunSummary(
        steps=steps[-1]["step"] if steps else 0,
        trained_steps=max(len(rewards), len(losses)),
        reward_first=sum(rewards[:window]) / window if rewards else None,
        reward_last=sum(rewards[-window:]) / window if rewards else None,
        window=window,
        val_first=validation[0][1] if validation else None,
        val_first_step=validation[0][0] if validation else None,
        val_last=validation[-1][1] if validation else None,
        val_last_step=validation[-1][0] if validation else None,
        loss_first=sum(losses[:window]) / window if losses else None,
        loss_last=sum(losses[-window:]) / window if losses else None,
        seconds=_seconds(steps),
    )


def _seconds(steps: Sequence[dict[str, Any]]) -> float | None:
    """Time between lines, but no more than the step says it took where the run lay stopped in between."""
    total, known, last = 0.0, False, None
    for line in steps:
        when, own = names.number(line, "time"), names.number(line, names.STEP_SECONDS)
        staged = sum(names.stage_seconds(line).values())
        busy = max(own or 0.0, staged)
        gap = when - last if when is not None and last is not None else None
        # A clock that jumped, or a stop of over a minute beyond the step's own time: trust the step.
        if busy and (gap is None or gap < 0 or gap > busy + 60):
            total, known = total + busy, True
        elif gap is not None and gap >= 0:
            total, known = total + gap, True
        last = when if when is not None else last
    return total if known else None
