"""``report.html``: one self-contained page about a run, made from what the run left in its folder.

The page holds its styles, scripts and data and asks for nothing else; a content policy forbids the rest by hash. Model
output reaches it only as JSON inside a data block (every ``<`` escaped) and is shown through ``textContent``.

What keeps it small: at most ``MAX_POINTS`` points a curve (averages of neighbouring steps beyond), at most
``MAX_SAMPLE_STEPS`` steps with samples, whole groups spread evenly within ``SAMPLE_BUDGET`` characters, texts cut to
``MAX_TEXT``. The page says what was left out.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
import time
from collections.abc import Sequence
from dataclasses import asdict
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from verl.errors import VerlError
from verl.run_dir import RunDir, json_line, json_value, write_atomic
from verl.tracking import names
from verl.tracking.samples import SampleRow, pick_groups, read_samples, spread
from verl.tracking.summary import RunSummary, read_metrics, summarize

MAX_POINTS = 1000
MAX_SAMPLE_STEPS = 60
MAX_ROWS = 32  # a step and split, before the budget
SAMPLE_BUDGET = 2_500_000  # characters of all samples together
MAX_TEXT = 6000  # characters of one prompt or response
MAX_EVENTS = 500

_PAGE = resources.files("verl.tracking") / "page"
_SCRIPTS = ("charts.js", "samples.js", "main.js")
_ALGORITHMS = {"gae": "PPO", "grpo": "GRPO"}


def write_report(run: RunDir | Path | str) -> Path:
    """Writes the run's ``report.html`` from its other files and returns its path; works on a running run.

    Raises:
        VerlError: the folder is not a run's, or the page cannot be written.
    """
    run_dir = run if isinstance(run, RunDir) else RunDir(run)
    if not run_dir.metrics.is_file() and not run_dir.config.is_file():
        raise VerlError(
            "not a run folder (neither metrics.jsonl nor config.yaml in it)",
            str(run_dir.path),
            "name the folder of a run, such as runs/NAME",
        )
    data = report_data(run_dir)
    write_atomic(run_dir.report, render(data))
    return run_dir.report


def report_data(run_dir: RunDir) -> dict[str, Any]:
    """Everything the page shows, as JSON values; its scripts read exactly this."""
    steps, torn = read_metrics(run_dir)
    summary = summarize(steps)
    config_text, config = _read_config(run_dir)
    notes = [f"{torn} unreadable lines in metrics.jsonl were skipped"] if torn else []
    curves, bucket = _curves(steps)
    if bucket > 1:
        notes.append(f"curves show averages of {bucket} neighbouring steps")
    samples = _samples(run_dir, steps, notes)
    events = run_dir.read_events()
    if len(events) > MAX_EVENTS:
        notes.append(f"the last {MAX_EVENTS} of {len(events)} events are shown")
    data = {
        "title": str(_get(config, "trainer.experiment_name") or run_dir.path.resolve().name),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "facts": _facts(config, summary),
        "summary": asdict(summary),
        "curves": curves,
        "samples": samples,
        "config": config_text,
        "events": [asdict(event) for event in events[-MAX_EVENTS:]],
        "notes": notes,
    }
    cleaned: dict[str, Any] = json_value(data)
    return cleaned


# --- parts of the data ------------------------------------------------------------------------------------------------


def _read_config(run_dir: RunDir) -> tuple[str, Any]:
    try:
        text = run_dir.config.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", None
    try:
        return text, yaml.safe_load(text)
    except yaml.YAMLError:
        return text, None


def _get(config: Any, key: str) -> Any:
    for part in key.split("."):
        if not isinstance(config, dict):
            return None
        config = config.get(part)
    return config


def _facts(config: Any, summary: RunSummary) -> dict[str, Any]:
    """Names for the page's head; absent ones are None."""
    estimator = _get(config, "algorithm.adv_estimator")
    planned = _get(config, "trainer.total_training_steps")
    return {
        "model": _get(config, "model.path"),
        "algorithm": _ALGORITHMS.get(str(estimator), str(estimator).upper()) if estimator else None,
        "planned_steps": planned if isinstance(planned, int) and planned >= summary.steps else None,
    }


def _curves(steps: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """``steps``, every metric's values aligned with them, and seconds by stage; and the steps averaged to a point."""
    bucket = max(1, -(-len(steps) // MAX_POINTS))
    groups = [steps[i : i + bucket] for i in range(0, len(steps), bucket)]
    lines = [group[0] if len(group) == 1 else _average(group) for group in groups]
    metric_names = sorted({name for line in lines for name in line if name not in ("step", "time")})
    metrics = {name: [_short(names.number(line, name)) for line in lines] for name in metric_names}
    validation = [names.validation_by_source(line) for line in lines]
    stage_columns = _columns([_with_rest(line) for line in lines])
    curves = {
        "steps": [line["step"] for line in lines],
        "metrics": {name: values for name, values in metrics.items() if any(value is not None for value in values)},
        "validation": _columns(validation),
        "stages": {stage: stage_columns[stage] for stage in (*names.STAGES, "other") if stage in stage_columns},
    }
    return curves, bucket


def _average(group: Sequence[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"step": group[-1]["step"]}
    for name in {name for line in group for name in line if name != "step"}:
        values = [value for line in group if (value := names.number(line, name)) is not None]
        merged[name] = sum(values) / len(values) if values else None
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
    return {name: [_short(row.get(name)) for row in rows] for name in order}


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")


# --- samples ----------------------------------------------------------------------------------------------------------


def _samples(run_dir: RunDir, steps: Sequence[dict[str, Any]], notes: list[str]) -> list[dict[str, Any]]:
    """Rows for the samples browser, by step; appends to ``notes`` what was left out."""
    available = run_dir.sample_steps()
    validated = {line["step"] for line in steps if names.validation_score(line) is not None}
    chosen = _choose_steps(available, validated)
    if len(chosen) < len(available):
        notes.append(f"samples of {len(chosen)} of {len(available)} steps are shown (all are in samples/)")
    by_file: list[tuple[int, list[SampleRow]]] = []
    torn = total = 0
    for step in chosen:
        rows, skipped = read_samples(run_dir.samples(step))
        torn, total = torn + skipped, total + len(rows)
        by_file.append((step, [row for split in ("train", "val") for row in _of_split(rows, split, MAX_ROWS)]))
    if torn:
        notes.append(f"{torn} unreadable lines in samples/ were skipped")
    shown = _within_budget(by_file)
    if len(shown) < total:
        notes.append(f"{len(shown)} of the {total} samples of these steps are shown (all are in samples/)")
    return shown


def _choose_steps(available: Sequence[int], validated: set[int]) -> list[int]:
    """At most ``MAX_SAMPLE_STEPS``: half of them validated ones, the rest evenly spread; first and last among them."""
    if len(available) <= MAX_SAMPLE_STEPS:
        return list(available)
    with_validation = [step for step in available if step in validated]
    chosen = {with_validation[i] for i in spread(len(with_validation), MAX_SAMPLE_STEPS // 2)}
    chosen |= {available[i] for i in spread(len(available), MAX_SAMPLE_STEPS - len(chosen))}
    return sorted(chosen)


def _of_split(rows: Sequence[SampleRow], split: str, limit: int) -> list[SampleRow]:
    return pick_groups([row for row in rows if row.split == split], limit)


def _within_budget(by_file: Sequence[tuple[int, list[SampleRow]]]) -> list[dict[str, Any]]:
    """As many rows a step and split as keep all of them within ``SAMPLE_BUDGET`` characters."""
    limit = MAX_ROWS
    while True:
        shown = [
            _shown_row(step, row)
            for step, rows in by_file
            for split in ("train", "val")
            for row in _of_split(rows, split, limit)
        ]
        if limit == 1 or sum(len(json_line(row)) for row in shown) <= SAMPLE_BUDGET:
            return shown
        limit //= 2


def _shown_row(step: int, row: SampleRow) -> dict[str, Any]:
    shown = {"step": step} | asdict(row)
    for name in ("prompt", "response"):
        shown[name] = _cut(shown[name], MAX_TEXT)
    truth = shown["ground_truth"]
    shown["ground_truth"] = None if truth is None else _cut(truth if isinstance(truth, str) else json_line(truth), 500)
    shown["extras"] = {
        str(name): value if isinstance(value, bool | int | float) else _cut(str(value), 300)
        for name, value in list(row.extras.items())[:20]
        if value is not None
    }
    return {name: value for name, value in shown.items() if value not in (None, "", {})} | {
        "response": shown["response"]
    }


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit * 3 // 4]}\n[… {len(text) - limit} characters left out …]\n{text[-(limit // 4) :]}"


# --- the page -------------------------------------------------------------------------------------------------------


def render(data: dict[str, Any]) -> str:
    """The page for what :func:`report_data` returned."""
    style = (_PAGE / "style.css").read_text(encoding="utf-8")
    scripts = "\n".join((_PAGE / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(scripts)}; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(data["title"]),
        "STYLE": style,
        # In a data block only "<" could end it or begin a comment; the JSON escape means the same to JSON.parse.
        "DATA": json_line(data).replace("<", "\\u003c"),
        "SCRIPTS": scripts,
    }
    page = (_PAGE / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], page)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
