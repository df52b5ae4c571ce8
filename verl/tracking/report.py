"""``report.html``: one self-contained page about a run, made from what the run left in its folder.

The page holds its styles, scripts and data and asks for nothing else; a content policy forbids the rest by hash. Model
output reaches it only as JSON inside data blocks (every ``<`` escaped) and is shown through text nodes, characters that
hide or reorder text by their names.

What keeps it small and quick: at most ``MAX_POINTS`` points a curve, evenly chosen samples, the last ``MAX_EVENTS``
events. The page says what was left out.
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

from verl.diagnostics import doctor
from verl.diagnostics.evidence import mean
from verl.errors import VerlError
from verl.run_dir import RunDir, write_atomic
from verl.tracking import facts, names
from verl.tracking.facts import get, read_config, settings
from verl.tracking.metric_table import row_of
from verl.tracking.names import RunSummary, read_metrics, summarize, torn_note
from verl.tracking.report_samples import ShownSamples, data_block, short, shown_samples
from verl.tracking.timeline import picture, read_timeline

MAX_EVENTS = 500

_PAGE = resources.files("verl.tracking") / "page"
_SCRIPTS = ("base", "charts", "curves", "timeline", "samples", "tokens", "config", "compare", "main")
_ALGORITHMS = {"gae": "PPO", "grpo": "GRPO"}


def write_report(run: RunDir | Path | str, path: Path | None = None) -> Path:
    """Writes the run's ``report.html`` (or ``path``) from its other files and returns it; works on a running run.
    Raises VerlError: the folder is not a run's, or the page cannot be written."""
    run_dir = require_run(run if isinstance(run, RunDir) else RunDir(run))
    path = path or run_dir.report
    write_atomic(path, render(*report_data(run_dir)))
    return path


def require_run(run_dir: RunDir) -> RunDir:
    """Raises VerlError where the folder is not a run's."""
    if not run_dir.metrics.is_file() and not run_dir.config.is_file():
        what = "not a run folder (neither metrics.jsonl nor config.yaml in it)"
        raise VerlError(what, str(run_dir.path), "name the folder of a run, such as runs/NAME")
    return run_dir


def report_data(run_dir: RunDir, samples: bool = True) -> tuple[dict[str, Any], list[str]]:
    """Everything the page shows, as its scripts read it: the data block, and the samples' groups as JSON texts.
    ``samples``: look for any."""
    steps, torn = read_metrics(run_dir)
    events = run_dir.read_events()
    summary = summarize(steps)
    config_text, tree = read_config(run_dir)
    validated = {line["step"] for line in steps if names.validation_score(line) is not None}
    shown = shown_samples(run_dir, validated) if samples else ShownSamples([], 0, 0, 0, 0, 0)
    found, bucket = curves(steps)
    data = {
        "title": str(get(tree, "trainer.experiment_name") or run_dir.path.resolve().name),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "facts": _facts(tree, summary, steps, facts.planned_steps(events)),
        "status": facts.status(events, summary.steps),
        "summary": asdict(summary),
        "warnings": [finding.advice for finding in doctor.warnings(run_dir, steps, events)],
        "notes": _notes(torn, bucket, shown, len(events)),
        "curves": found,
        "about": {name: row.meaning for name in found["metrics"] if (row := row_of(name)) is not None},
        "timeline": picture(read_timeline(run_dir)),
        "marks": facts.marks(events),
        "samples": {name: value for name, value in vars(shown).items() if name != "groups"},
        "settings": settings(tree) if tree is not None else [],
        "config_text": "" if tree is not None else config_text,
        "events": [asdict(event) for event in events[-MAX_EVENTS:]],
    }
    return data, shown.groups


def write_comparison(runs: Sequence[RunDir], path: Path) -> Path:
    """Writes a page that lays several runs over each other: curves, figures, and where their configurations differ.
    Raises VerlError: a folder is not a run's, or the page cannot be written."""
    write_atomic(path, render(comparison_data(runs), []))
    return path


def comparison_data(runs: Sequence[RunDir]) -> dict[str, Any]:
    """What the page of several runs shows; curves of all runs over the steps of any of them."""
    parts = [report_data(require_run(run), samples=False)[0] for run in runs]
    folders = [run.path.resolve().name for run in runs]
    # As verl run list names them: by their folders, by the path where two are the same.
    labels = [own if folders.count(own) == 1 else str(run.path) for own, run in zip(folders, runs, strict=True)]
    every = sorted({step for part in parts for step in part["curves"]["steps"]})
    values: dict[str, dict[str, list[float | None]]] = {}
    for label, part in zip(labels, parts, strict=True):
        own = part["curves"]
        held_out = {f"val-core/{source} (best figure)": column for source, column in own["validation"].items()}
        for name, column in (own["metrics"] | held_out).items():
            by_step = dict(zip(own["steps"], column, strict=True))
            values.setdefault(name, {})[label] = [by_step.get(step) for step in every]
    keys = {entry["key"]: entry["meaning"] for part in parts for entry in part["settings"]}
    chosen = [{entry["key"]: entry["value"] for entry in part["settings"]} for part in parts]
    absent = "(not there)"
    rows = [{"key": key, "meaning": keys[key], "values": [own.get(key, absent) for own in chosen]} for key in keys]
    return {
        "title": " / ".join(labels),
        "written": parts[0]["written"],
        "about": {name: text for part in parts for name, text in part["about"].items()},
        "runs": [
            {"label": label, **{name: part[name] for name in ("facts", "status", "summary", "warnings", "notes")}}
            for label, part in zip(labels, parts, strict=True)
        ],
        "curves": {"steps": every, "metrics": values},
        "differences": [row for row in rows if any(value != row["values"][0] for value in row["values"])],
    }


def _facts(
    tree: dict[str, Any] | None, summary: RunSummary, steps: Sequence[dict[str, Any]], planned: int | None
) -> dict[str, Any]:
    """Names and figures for the page's head; absent ones are None."""
    estimator = get(tree, "algorithm.adv_estimator")
    planned = get(tree, "trainer.total_training_steps") or planned
    costs = [(names.number(line, "perf/total_num_tokens"), names.number(line, names.STEP_SECONDS)) for line in steps]
    known = [(tokens, seconds) for tokens, seconds in costs if tokens is not None and seconds]
    rate = sum(tokens for tokens, _ in known) / sum(seconds for _, seconds in known) if known else None
    model = get(tree, "model.path")
    return {
        "model": None if model is None else str(model),
        "algorithm": _ALGORITHMS.get(str(estimator), str(estimator).upper()) if estimator else None,
        "planned_steps": planned if isinstance(planned, int) and planned >= summary.steps else None,
        "tokens_per_second": rate,
    }


def _notes(torn: int, bucket: int, samples: ShownSamples, events: int) -> list[str]:
    notes = [torn_note(lines, where) for lines, where in ((torn, "metrics.jsonl"), (samples.torn, "samples/")) if lines]
    notes += [f"curves show means of {bucket} neighbouring steps"] if bucket > 1 else []
    return notes + ([f"the last {MAX_EVENTS} of {events} events are listed"] if events > MAX_EVENTS else [])


def render(data: dict[str, Any], sample_groups: Sequence[str]) -> str:
    """The page for what :func:`report_data` returned."""
    style = (_PAGE / "style.css").read_text(encoding="utf-8")
    live = "live" in data  # served: it asks its server, and only that
    names = (*_SCRIPTS, "live") if live else _SCRIPTS
    scripts = "\n".join((_PAGE / f"{name}.js").read_text(encoding="utf-8") for name in names)
    policy = f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(scripts)}; base-uri 'none'"
    policy += "; form-action 'none'" + ("; connect-src 'self'" if live else "")
    parts = {"POLICY": policy, "TITLE": html.escape(data["title"]), "STYLE": style, "SCRIPTS": scripts}
    parts |= {"DATA": data_block(data), "SAMPLES": ",\n".join(sample_groups)}
    page = (_PAGE / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], page)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


MAX_POINTS = 1000


def curves(steps: Sequence[dict[str, Any]]) -> tuple[dict[str, Any], int]:
    """``steps``, every metric's values aligned with them, and seconds by stage; and the steps folded into a point. A
    run of more than ``MAX_POINTS`` steps is folded: means of neighbouring steps, the extremes of ``…/min`` and
    ``…/max``."""
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
        fold = min if name.endswith("/min") else max if name.endswith("/max") else mean
        merged[name] = fold(values) if values else None
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
