"""What a run's metrics say: which of them the console and the report read, folded into few figures, and summed up.

Names follow the field. Everything here reads a plain ``{name: value}`` of one step and takes a missing or null metric
as absent, so that any part of a run may log less.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl.json_lines import read_jsonl
from verl.run_dir import RunDir

REWARD = "critic/score/mean"  # mean score of the step's responses, before any KL penalty
RESPONSE_LENGTH = "response_length/mean"  # tokens
ENTROPY = "actor/entropy"  # nats a token
GRAD_NORM = "actor/grad_norm"  # before clipping
STEP_SECONDS = "timing_s/step"

# Supervised training.
LOSS, ACCURACY = "train/loss", "train/accuracy"
VAL_LOSS, VAL_ACCURACY = "val/loss", "val/accuracy"

# KL to the reference where it is computed, else to the policy at the start of the update (0 with one on-policy update).
KL_NAMES = {"actor/kl_loss": "KL ref", "actor/reward_kl_penalty": "KL ref", "actor/ppo_kl": "KL old"}

# Parts of each stage under timing_s/; where a run logs none of the parts, the stage's own total is taken.
STAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "gen": (("gen",), "wait_rollout"),
    "process": (("reward", "old_log_prob", "ref", "values", "adv"), "process"),
    "update": (("update_critic", "update_actor", "update_weights"), "update"),
    "validate": (("testing",), "evaluate"),
    "save": (("save_checkpoint",), "save"),
}

_VALIDATION = re.compile(r"val-core/(?P<source>.+)/(?P<kind>acc|reward)/mean@(?P<n>\d+)")


def number(metrics: Mapping[str, object], name: str) -> float | None:
    """The finite value of a metric, or None."""
    value = metrics.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    return None


def kl(metrics: Mapping[str, object]) -> tuple[str, float] | None:
    """The KL that matters most among those logged, with its label."""
    for name, label in KL_NAMES.items():
        value = number(metrics, name)
        if value is not None:
            return label, value
    return None


def kl_label(steps: Sequence[Mapping[str, object]]) -> str:
    """Which KL the last of the steps has that has one."""
    return next((found[0] for line in reversed(steps) if (found := kl(line))), "KL")


def figures(metrics: Mapping[str, object]) -> dict[str, float | None]:
    """The few figures of a step that a person follows, by short name; which KL it is: :func:`kl`."""
    found = kl(metrics)
    return {
        "reward": number(metrics, REWARD),
        "loss": number(metrics, LOSS),
        "accuracy": number(metrics, ACCURACY),
        "val": validation_score(metrics),
        "KL": None if found is None else found[1],
        "entropy": number(metrics, ENTROPY),
        "length": number(metrics, RESPONSE_LENGTH),
        "grad": _first(metrics, GRAD_NORM, "train/grad_norm"),
    }


def curves(steps: Sequence[Mapping[str, float | None]], label: str) -> dict[str, list[float]]:
    """Values by what a person calls them, of the :func:`figures` of some steps that have any; ``label`` of their KL."""
    shown = {"val": "held-out", "KL": label, "grad": "grad norm"}
    columns = {name: [value for step in steps if (value := step[name]) is not None] for name in figures({})}
    return {shown.get(name, name): values for name, values in columns.items() if values}


def stage_seconds(metrics: Mapping[str, object]) -> dict[str, float]:
    """Seconds by stage (see ``STAGES``), for the stages that were timed."""
    seconds = {}
    for stage, (parts, total) in STAGES.items():
        for names in (parts, (total,)):
            found = [value for name in names if (value := number(metrics, f"timing_s/{name}")) is not None]
            if found:
                seconds[stage] = sum(found)
                break
    return seconds


def validation_by_source(metrics: Mapping[str, object]) -> dict[str, float]:
    """Validation score of each data source: its accuracy, else its mean reward, over the most samples a prompt."""
    best: dict[str, tuple[tuple[bool, int], float]] = {}
    for name in metrics:
        match = _VALIDATION.fullmatch(name)
        value = number(metrics, name)
        if match is None or value is None:
            continue
        rank = (match["kind"] == "acc", int(match["n"]))
        if match["source"] not in best or rank > best[match["source"]][0]:
            best[match["source"]] = (rank, value)
    return {source: value for source, (_, value) in sorted(best.items())}


def validation_score(metrics: Mapping[str, object]) -> float | None:
    """One validation figure: the plain mean over data sources, None where the step was not validated. Of supervised
    training the accuracy on pairs, else the loss."""
    by_source = validation_by_source(metrics)
    return sum(by_source.values()) / len(by_source) if by_source else _first(metrics, VAL_ACCURACY, VAL_LOSS)


def _first(metrics: Mapping[str, object], *names: str) -> float | None:
    return next((value for name in names if (value := number(metrics, name)) is not None), None)


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
    """The steps of a run in order, and how many lines were torn or no step. Lines of one step are merged, later values
    first."""
    records, torn = read_jsonl(run_dir.metrics)
    steps, skipped = merged_steps(records)
    return steps, torn + skipped


def torn_note(lines: int, where: str) -> str:
    return f"{lines} unreadable line{'s'[: lines > 1]} in {where} skipped"


def merged_steps(records: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """One record a step, in order, and how many records were of no step."""
    known = [record for record in records if type(record.get("step")) is int]
    by_step: dict[int, dict[str, Any]] = {}
    for record in known:
        by_step.setdefault(record["step"], {}).update(record)
    return [by_step[step] for step in sorted(by_step)], len(records) - len(known)


def summarize(steps: Sequence[dict[str, Any]]) -> RunSummary:
    losses = [value for line in steps if (value := number(line, LOSS)) is not None]
    rewards = [value for line in steps if (value := number(line, REWARD)) is not None]
    validation = [(line["step"], value) for line in steps if (value := validation_score(line)) is not None]
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
        when, own = number(line, "time"), number(line, STEP_SECONDS)
        busy = max(own or 0.0, sum(stage_seconds(line).values()))
        gap = when - last if when is not None and last is not None else None
        # A clock that jumped, or a stop of over a minute beyond the step's own time: trust the step.
        if busy and (gap is None or gap < 0 or gap > busy + 60):
            total, known = total + busy, True
        elif gap is not None and gap >= 0:
            total, known = total + gap, True
        last = when if when is not None else last
    return total if known else None
