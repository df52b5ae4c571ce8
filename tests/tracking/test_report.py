from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.errors import VerlError
from verl.run_dir import RunDir
from verl.tracking import report as report_module
from verl.tracking.report import MAX_POINTS, MAX_SAMPLE_STEPS, report_data, write_report
from verl.tracking.samples import SampleRow, SampleWriter
from verl.tracking.summary import read_metrics, summarize


def embedded(page: str) -> dict[str, object]:
    blocks = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert len(blocks) == 1
    data: dict[str, object] = json.loads(blocks[0])
    return data


# --- the summary


def test_summary_averages_both_ends_and_finds_validation_before_and_after() -> None:
    steps = [{"step": 0, "time": 0.0, "val-core/a/acc/mean@1": 0.1}]
    steps += [{"step": k, "time": 10.0 * k, "critic/score/mean": k / 10, "timing_s/step": 9.0} for k in range(1, 13)]
    steps[-1] |= {"val-core/a/acc/mean@1": 0.6}
    summary = summarize(steps)
    assert (summary.steps, summary.trained_steps, summary.window) == (12, 12, 5)
    assert summary.reward_first == pytest.approx(0.3) and summary.reward_last == pytest.approx(1.0)
    assert (summary.val_first, summary.val_first_step, summary.val_last, summary.val_last_step) == (0.1, 0, 0.6, 12)
    assert summary.seconds == pytest.approx(120)


def test_time_between_a_kill_and_the_resume_is_not_counted() -> None:
    steps = [{"step": k, "time": 10.0 * k + (5000 if k > 2 else 0), "timing_s/step": 9.0} for k in range(1, 5)]
    assert summarize(steps).seconds == pytest.approx(9 + 10 + 9 + 10)
    assert summarize([{"step": 1}]).seconds is None
    assert summarize([]).steps == 0


def test_metrics_of_one_step_are_merged_and_steps_sorted(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 2, "a": 1}\n{"step": 1}\n{"step": 2, "b": 2}\n{"no": 1}\n{"step": 3')
    assert read_metrics(run) == ([{"step": 1}, {"step": 2, "a": 1, "b": 2}], 2)


# --- the page


def test_the_page_is_whole_and_asks_for_nothing(synthetic_run: RunDir) -> None:
    path = write_report(synthetic_run)
    assert path == synthetic_run.report
    page = path.read_text(encoding="utf-8")
    markup = re.sub(r"<script.*?</script>|<style>.*?</style>", "", page, flags=re.DOTALL)
    assert not re.search(r"\b(?:src|href|action)\s*=\s*(?![\"']?#)", markup)
    scripts = "".join(re.findall(r"<script>(.*?)</script>", page, re.DOTALL))
    assert not re.search(r"fetch\(|XMLHttp|import\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", scripts)
    assert re.findall(r"https?://\S+?(?=[\"';)])", page.replace("http://www.w3.org/2000/svg", "")) == []
    assert "default-src 'none'" in page and "unsafe-inline" not in page
    assert "{{" not in page.replace("${{", "")


def test_hostile_text_cannot_leave_the_data_block(synthetic_run: RunDir, hostile: str) -> None:
    page = write_report(synthetic_run).read_text(encoding="utf-8")
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert "<img" not in page and "<!--" not in page
    samples = embedded(page)["samples"]
    assert isinstance(samples, list)
    assert [s["response"] for s in samples if s["response"].startswith("needle")] == [f"needle {hostile}"]


def test_a_hostile_run_name_is_escaped(tmp_path: Path, hostile: str) -> None:
    run = RunDir(tmp_path).create()
    run.config.write_text(f"trainer: {{experiment_name: {json.dumps(hostile)}}}\n")
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<script") == 2 and "&lt;/script&gt;" in page


def test_data_has_facts_curves_and_stages(synthetic_run: RunDir) -> None:
    data = report_data(synthetic_run)
    assert data["facts"] == {"model": "synthetic/made-up-model", "algorithm": "GRPO", "planned_steps": 40}
    assert data["title"] == "synthetic"
    curves = data["curves"]
    assert curves["steps"] == list(range(41))
    assert {len(values) for values in curves["metrics"].values()} == {41}
    assert curves["metrics"]["actor/lr"][:2] == [None, 1e-5]
    assert list(curves["stages"]) == ["gen", "process", "update", "other"]
    first = {name: values[1] for name, values in curves["stages"].items()}
    assert sum(first.values()) == pytest.approx(curves["metrics"]["timing_s/step"][1], rel=1e-4)
    validation = curves["validation"]["reasoning_gym/chain_sum"]
    assert [i for i, value in enumerate(validation) if value is not None] == [0, 10, 20, 30, 40]
    assert [event["kind"] for event in data["events"]] == ["resumed", "worker_died"]
    assert {s["split"] for s in data["samples"]} == {"train", "val"}


@pytest.mark.parametrize(
    ("metrics", "config"),
    [
        ("", "a: 1\n"),
        ('{"step": 1, "time": 5, "critic/score/mean": 0.0}\n', ""),
        ('{"step": 1, "critic/score/mean": null}\ntorn', ": not [ yaml"),
        ('{"step": 0, "time": "x", "val-core/a/acc/mean@1": 0.5}\n', "- a list\n"),
    ],
)
def test_small_and_broken_runs_still_give_a_page(tmp_path: Path, metrics: str, config: str) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text(metrics)
    run.config.write_text(config)
    data = embedded(write_report(str(tmp_path)).read_text(encoding="utf-8"))
    assert data["samples"] == [] and data["config"] == config


def test_a_folder_that_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match="not a run folder"):
        write_report(tmp_path)


def test_a_long_run_stays_small_and_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_module, "SAMPLE_BUDGET", 300_000)
    run = RunDir(tmp_path).create()
    count = 2 * MAX_POINTS + 1
    lines = [{"step": k, "critic/score/mean": float(k)} for k in range(1, count + 1)]
    lines[98]["val-core/a/acc/mean@1"] = 0.5
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    writer = SampleWriter(run)
    for k in range(1, 151):
        rows = [SampleRow("train", f"u{g}", i, "p" * 100, "r" * 50_000, "t") for g in range(2) for i in range(2)]
        writer.write(k, "train", rows)
    data = report_data(run)
    assert len(data["curves"]["steps"]) <= MAX_POINTS
    assert data["curves"]["metrics"]["critic/score/mean"][0] == 2.0  # the mean of steps 1, 2, 3
    shown_steps = {s["step"] for s in data["samples"]}
    assert len(shown_steps) <= MAX_SAMPLE_STEPS and {1, 99, 150} <= shown_steps
    assert len(data["samples"]) == len(shown_steps)  # the budget left one row a step
    assert all("characters left out" in s["response"] for s in data["samples"])
    notes = " ".join(data["notes"])
    assert "averages of 3" in notes and "of 150 steps" in notes and "samples of these steps" in notes


def test_200_steps_with_samples_stay_under_5_mb(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    path = write_report(make_run(tmp_path / "run", total=200))
    assert path.stat().st_size < 5_000_000
