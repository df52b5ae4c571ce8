"""The report's curves: every metric over the steps, validation by source, seconds by stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from verl.tracking import names

MAX_POINTS = 1000


def curves(steps: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """``steps``, every metric's values aligned with them, and seconds by stage; and the steps folded into a point.

    A run of more than ``MAX_POINTS`` steps is folded: means of neighbouring steps, the extremes of ``…/min`` and
    ``…/max``.
    """
    bucket = max(1, -(-len(steps) // MAX_POINTS))
    groups = [steps[i : i + bucket] for i in range(0, len(steps), bucket)]
    lines = [group[0] if len(group) == 1 else _folded(group) for group in groups]
    metric_names = sorted({name for line in lines for name in line if name not in ("step", "time")})
    metrics = {name: [short(names.number(line, name)) for line in lines] for name in metric_names}
    stages = _columns([_with_rest(line) for line in lines])
    found = {
        "steps": [line["step"] for line in lines],
        "metrics": {name: values for name, values in metrics.items() if any(value is not None for value in values)},
        "validation": _columns([names.validation_by_source(line) for line in lines]),
        "stages": {stage: stages[stage] for stage in (*names.STAGES, "other") if stage in stages},
    }
    return found, bucket


def _folded(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"step": group[-1]["step"]}
    for name in {name for line in group for name in line if name != "step"}:
        values = [value for line in group if (value := names.number(line, name)) is not None]
        if not values:
            merged[name] = None
        elif name.endswith("/min"):
            merged[name] = min(values)
        elif name.endswith("/max"):
            merged[name] = max(values)
        else:
            merged[name] = sum(values) / len(values)
    return merged


def _with_rest(line: dict[str, Any]) -> dict[str, float]:
    """Seconds by stage plus what of ``timing_s/step`` none of them accounts for (validation may lie outside it)."""
    stages = names.stage_seconds(line)
    whole, timed = names.number(line, names.STEP_SECONDS), sum(stages.values())
    if not stages or whole is None:
        return stages
    if timed > whole:
        timed -= stages.get("validate", 0.0) + stages.get("save", 0.0)
    return stages | ({"other": whole - timed} if whole > timed else {})


def _columns(rows: Sequence[dict[str, float]]) -> dict[str, list[float | None]]:
    order = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [short(row.get(name)) for row in rows] for name in order}


def short(value: float | None) -> float | None:
    """Six digits: more are not seen and cost room."""
    return None if value is None else float(f"{value:.6g}")
