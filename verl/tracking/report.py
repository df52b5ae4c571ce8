"""``report.html``: one self-contained page about a run, made from what the run left in its folder.

The page holds its styles, scripts and data and asks for nothing else; a content policy forbids the rest by hash. Model
output reaches it only as JSON inside data blocks (every ``<`` escaped) and is shown through text nodes, characters that
hide or reorder text by their names.

What keeps it small and quick: at most ``MAX_POINTS`` points a curve (see :mod:`verl.tracking.report_curves`), evenly
chosen samples (:mod:`verl.tracking.report_samples`), the last ``MAX_EVENTS`` events. The page says what was left out.
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
from verl.errors import VerlError
from verl.run_dir import RunDir, write_atomic
from verl.tracking import names, report_health
from verl.tracking.report_config import get, read_config, settings
from verl.tracking.report_curves import curves
from verl.tracking.report_samples import ShownSamples, data_block, shown_samples
from verl.tracking.summary import RunSummary, read_metrics, summarize

MAX_EVENTS = 500

_PAGE = resources.files("verl.tracking") / "page"
_SCRIPTS = ("base.js", "charts.js", "curves.js", "samples.js", "config.js", "main.js")
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
    write_atomic(run_dir.report, render(*report_data(run_dir)))
    return run_dir.report


def report_data(run_dir: RunDir) -> tuple[dict[str, Any], list[str]]:
    """Everything the page shows, as its scripts read it: the data block, and the samples' groups as JSON texts."""
    steps, torn = read_metrics(run_dir)
    events = run_dir.read_events()
    summary = summarize(steps)
    config_text, tree = read_config(run_dir)
    samples = shown_samples(run_dir, {line["step"] for line in steps if names.validation_score(line) is not None})
    found, bucket = curves(steps)
    data = {
        "title": str(get(tree, "trainer.experiment_name") or run_dir.path.resolve().name),
        "written": time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "facts": _facts(tree, summary, steps, report_health.planned_steps(events)),
        "status": report_health.status(events, summary.steps),
        "summary": asdict(summary),
        "warnings": [finding.text for finding in doctor.warnings(run_dir, steps, events)],
        "notes": _notes(torn, bucket, samples, len(events)),
        "curves": found,
        "marks": report_health.marks(events),
        "samples": {name: value for name, value in vars(samples).items() if name != "groups"},
        "settings": settings(tree) if tree is not None else [],
        "config_text": "" if tree is not None else config_text,
        "events": [asdict(event) for event in events[-MAX_EVENTS:]],
    }
    return data, samples.groups


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
    """What the page leaves out."""
    notes = []
    if torn:
        notes.append(f"{torn} unreadable {'line' if torn == 1 else 'lines'} in metrics.jsonl skipped")
    if samples.torn:
        notes.append(f"{samples.torn} unreadable {'line' if samples.torn == 1 else 'lines'} in samples/ skipped")
    if bucket > 1:
        notes.append(f"curves show means of {bucket} neighbouring steps")
    if events > MAX_EVENTS:
        notes.append(f"the last {MAX_EVENTS} of {events} events are listed")
    return notes


def render(data: dict[str, Any], sample_groups: Sequence[str]) -> str:
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
        "DATA": data_block(data),
        "SAMPLES": ",\n".join(sample_groups),
        "SCRIPTS": scripts,
    }
    page = (_PAGE / "report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{([A-Z]+)\}\}", lambda match: parts[match[1]], page)


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
