from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from verl.config import Config, dump_yaml
from verl.diagnostics.checks_health import skipped_updates
from verl.diagnostics.doctor import examine
from verl.diagnostics.evidence import Evidence
from verl.errors import VerlError
from verl.run_dir import EventRecord, RunDir
from verl.tracking import facts, report_samples
from verl.tracking.facts import settings
from verl.tracking.names import read_metrics, summarize
from verl.tracking.report import MAX_POINTS, curves, report_data, write_report
from verl.tracking.report_samples import shown_samples
from verl.tracking.samples import TOKENS, SampleRow, write_samples


def embedded(page: str, name: str = "data") -> Any:
    blocks = re.findall(rf'<script type="application/json" id="{name}">(.*?)</script>', page, re.DOTALL)
    assert len(blocks) == 1
    return json.loads(blocks[0])


def responses(page: str) -> list[str]:
    return [row["response"] for group in embedded(page, "sample-data") for row in group["rows"]]


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
    assert not re.search(r"@import|url\(|@font-face", page)
    assert "default-src 'none'" in page and "unsafe-inline" not in page
    assert "{{" not in page.replace("${{", "")


def test_hostile_text_cannot_leave_the_data_blocks(synthetic_run: RunDir, hostile: str) -> None:
    page = write_report(synthetic_run).read_text(encoding="utf-8")
    assert page.count("<script") == 3 and page.count("</script>") == 3
    assert "<img" not in page and "<!--" not in page
    assert [text for text in responses(page) if text.startswith("needle")] == [f"needle {hostile}"]


def test_a_hostile_run_name_is_escaped(tmp_path: Path, hostile: str) -> None:
    run = RunDir(tmp_path).create()
    run.config.write_text(f"trainer: {{experiment_name: {json.dumps(hostile)}}}\n")
    page = write_report(run).read_text(encoding="utf-8")
    assert page.count("<script") == 3 and "&lt;/script&gt;" in page


def test_data_has_facts_curves_stages_and_marks(synthetic_run: RunDir) -> None:
    data, groups = report_data(synthetic_run)
    rate = data["facts"].pop("tokens_per_second")
    assert data["facts"] == {"model": "synthetic/made-up-model", "algorithm": "GRPO", "planned_steps": 40}
    seconds = [line["timing_s/step"] for line in read_metrics(synthetic_run)[0] if "timing_s/step" in line]
    assert rate == pytest.approx(sum(20_000 + step for step in range(1, 41)) / sum(seconds))
    assert data["title"] == "synthetic" and data["status"] == "unfinished"
    found = data["curves"]
    assert found["steps"] == list(range(41))
    assert {len(values) for values in found["metrics"].values()} == {41}
    assert found["metrics"]["actor/lr"][:2] == [None, 1e-5]
    assert list(found["stages"]) == ["gen", "process", "update", "other"]
    first = {name: values[1] for name, values in found["stages"].items()}
    assert sum(first.values()) == pytest.approx(found["metrics"]["timing_s/step"][1], rel=1e-4)
    validation = found["validation"]["reasoning_gym/chain_sum"]
    assert [i for i, value in enumerate(validation) if value is not None] == [0, 10, 20, 30, 40]
    assert [(mark["step"], mark["kind"]) for mark in data["marks"]] == [(20, "resumed"), (31, "trouble")]
    assert [event["kind"] for event in data["events"]] == ["resumed", "worker_died"]
    assert {json.loads(group)["split"] for group in groups} == {"train", "val"}


@pytest.mark.parametrize(
    ("metrics", "config"),
    [
        ("", "a: 1\n"),
        ('{"step": 1, "time": 5, "critic/score/mean": 0.0}\n', ""),
        ('{"step": 1, "critic/score/mean": null}\ntorn', ": not [ yaml"),
        ('{"step": 0, "time": "x", "val-core/a/acc/mean@1": 0.5}\n', "- a list\n"),
        ('{"step": 1, "reward/failed": "many", "timing_s/step": null}\n', "model: text\ntrainer: 3\nx: 2024-13-45\n"),
    ],
)
def test_small_and_broken_runs_still_give_a_page(tmp_path: Path, metrics: str, config: str) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text(metrics)
    run.config.write_text(config)
    page = write_report(str(tmp_path)).read_text(encoding="utf-8")
    data = embedded(page)
    assert embedded(page, "sample-data") == []
    assert data["settings"] or data["config_text"] == config


def test_a_folder_that_is_no_run_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match="not a run folder"):
        write_report(tmp_path)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_text_has_contrast_on_every_ground(synthetic_run: RunDir, theme: int) -> None:
    """WCAG 2.1: 4.5 for text, 3 for lines and borders of controls."""
    found = re.findall(r"--([\w-]+): light-dark\(#(\w{6}), #(\w{6})\)", write_report(synthetic_run).read_text("utf-8"))
    colours = {name: pair[theme] for name, *pair in found}
    grounds = [colours["paper"], colours["card"]]
    pairs = [(name, ground, 4.5) for name in ("ink", "soft", "accent", "good", "bad") for ground in grounds]
    pairs += [(name, colours[f"{name}-bg"], 4.5) for name in ("good", "bad", "warn")]
    pairs += [(name, ground, 3.0) for name in ("edge", "c0", "c1", "c2", "c3", "c4", "c5") for ground in grounds]
    assert len(colours) == 20
    assert [(name, ground) for name, ground, least in pairs if contrast(colours[name], ground) < least] == []


def contrast(one: str, other: str) -> float:
    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


# --- curves


def test_a_long_run_is_folded_to_means_and_extremes() -> None:
    count = 2 * MAX_POINTS + 1
    names = ("critic/score/mean", "critic/score/max", "critic/score/min")
    found, bucket = curves([{"step": k} | dict.fromkeys(names, float(k)) for k in range(1, count + 1)])
    assert bucket == 3 and len(found["steps"]) == 667
    assert found["steps"][:2] == [3, 6]
    assert [found["metrics"][name][0] for name in names] == [2.0, 3.0, 1.0]  # of steps 1, 2, 3


def test_a_number_that_is_not_finite_leaves_a_gap_not_a_value() -> None:
    lines: list[dict[str, Any]] = [
        {"step": 1, "a": 1.0},
        {"step": 2, "a": None},
        {"step": 3, "a": float("nan"), "b": None},
    ]
    assert curves(lines)[0]["metrics"] == {"a": [1.0, None, None]}


# --- warnings


def event(kind: str, step: int | None = None, subject: str = "", detail: Any = "") -> EventRecord:
    return EventRecord(0.0, step, kind, subject, detail)


START = event("started", 0, "run", "step 0 of 40")


@pytest.mark.parametrize(
    ("events", "status"),
    [
        ([], ""),
        ([START], "unfinished"),
        ([START, event("stopped", 7, "run", "AlarmRaised")], "stopped (an alarm, see trainer.alarms)"),
        ([START, event("stopped", 7), event("resumed", 4, "run", "step 4 of 50"), event("odd")], "unfinished"),
        ([START, event("finished", 40)], "finished"),
    ],
)
def test_status_is_that_of_the_last_life(events: list[EventRecord], status: str) -> None:
    assert facts.status(events, 40) == status


def test_planned_steps_are_those_of_the_last_start() -> None:
    assert facts.planned_steps([START, event("resumed", 4, "run", "step 4 of 50"), event("odd", 1, "", "of 9")]) == 50
    assert facts.planned_steps([event("started", 0, "run", "x")]) is None


def test_warnings_name_counts_steps_and_subjects() -> None:
    lines: list[dict[str, Any]] = [{"step": k, "reward/failed": 0.0, "actor/kl_loss": 0.1} for k in range(1, 31)]
    for k in (3, 4, 5, 9):
        lines[k - 1] |= {"reward/failed": 2.0, "actor/kl_loss": None, "actor/grad_norm": None}
    lines[11]["actor/skipped_steps"] = 1.0
    events = [
        START,
        event("metric_not_finite", 3, "actor/kl_loss", "logged as nan"),
        event("worker_died", 7, "rollout 1", "exit -9"),
        event("worker_died", 9, "rollout 2", "exit -9"),
        event("tracker_failed", None, "tensorboard", {"error": "disk"}),
        event("stopped", 12, "run", "VerlError"),
    ]
    assert [finding.text for finding in examine(Evidence(steps=lines, events=events))] == [
        "The run stopped after step 12: VerlError",
        "Responses not scored, the reward function raised an error: 8 (steps 3 to 5, 9)",
        "Optimizer steps of the actor skipped, the gradient was not finite: 1 (step 12)",
        "Not a finite number: actor/kl_loss, actor/grad_norm (steps 3 to 5, 9)",
        "Worker died 2 times (steps 7, 9): rollout 1, rollout 2",
        'Tracker failed: tensorboard, {"error": "disk"}',
    ]
    assert skipped_updates(lines) == ["Optimizer steps of the actor skipped, the gradient was not finite: 1 (step 12)"]
    assert skipped_updates([{"step": 1, "train/skipped_steps": 1.0}])
    marks = {(mark["step"], mark["kind"]): mark["text"] for mark in facts.marks(events)}
    assert marks[7, "trouble"] == "worker died: rollout 1" and (12, "trouble") in marks
    assert examine(Evidence(steps=[{"step": 1, "reward/failed": 0.0}], events=[START, event("finished", 1)])) == []


# --- configuration


def test_settings_stand_beside_their_defaults() -> None:
    tree = {
        "data": {"train_files": ["a.jsonl"], "train_batch_size": 8, "chat_template_kwargs": {"enable": True}},
        "actor": {"optim": {"lr": 1e-6, "betas": [0.9, 0.999]}},
        "trainer": {"of_the_future": {"x": 1}},
    }
    found = {entry["key"]: entry for entry in settings(tree)}
    assert set(found) == {
        "data.train_files",
        "data.train_batch_size",
        "data.chat_template_kwargs",
        "actor.optim.lr",
        "actor.optim.betas",
        "trainer.of_the_future.x",
    }
    assert found["data.train_batch_size"]["default"] == 1024 and found["data.train_batch_size"]["set"]
    assert "Prompts" in found["data.train_batch_size"]["meaning"]
    assert "default" not in found["data.train_files"] and found["data.train_files"]["set"]
    assert found["data.chat_template_kwargs"]["value"] == {"enable": True} and found["data.chat_template_kwargs"]["set"]
    assert not found["actor.optim.lr"]["set"] and not found["actor.optim.betas"]["set"]
    assert found["trainer.of_the_future.x"]["unknown"]


def test_only_what_was_set_differs_in_a_run_s_own_config(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    config = Config.model_validate({"data": {"train_files": "a.jsonl"}, "model": {"path": "m"}, "rollout": {"n": 8}})
    run.config.write_text(dump_yaml(config))
    entries = report_data(run)[0]["settings"]
    assert {entry["key"] for entry in entries if entry["set"]} == {"data.train_files", "model.path", "rollout.n"}
    assert len(entries) > 90


# --- samples


def row(uid: str, index: int, response: str = "r", split: str = "train", **more: Any) -> SampleRow:
    return SampleRow(split, uid, index, f"prompt of {uid}", response, "t", **more)


def test_a_small_run_shows_every_sample(synthetic_run: RunDir) -> None:
    found = shown_samples(synthetic_run, set())
    assert (found.rows, found.steps, found.torn) == (found.of_rows, found.of_steps, 0) == (40 * 32 + 4 * 8 + 1, 40, 0)
    groups = [json.loads(group) for group in found.groups]
    assert sum(len(group["rows"]) for group in groups) == found.rows
    group = next(group for group in groups if group["step"] == 7 and group["split"] == "train")
    assert group["of"] == len(group["rows"]) == 8 and [r["index"] for r in group["rows"]] == list(range(8))
    assert group["rows"][0] == {
        "index": 0,
        "response": group["rows"][0]["response"],
        "score": 0.0,
        "advantage": -0.97,
        "response_length": 9,
        "finish_reason": "stop",
        "versions": [6, 6],
        "extras": {"format": 1.0},
    }


def test_a_large_run_keeps_whole_groups_of_evenly_spread_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_samples, "SAMPLE_BUDGET", 200_000)
    run = RunDir(tmp_path).create()
    for k in range(1, 121):
        rows = [row(f"u{g}", i, "r" * 300) for g in range(8) for i in range(4)]
        write_samples(run, k, "train", rows)
    found = shown_samples(run, {50, 99})
    groups = [json.loads(group) for group in found.groups]
    steps = sorted({group["step"] for group in groups})
    assert {1, 50, 99, 120} <= set(steps) and found.steps == len(steps) and 45 <= len(steps) <= 50
    assert max(b - a for a, b in pairwise(steps)) <= 4
    assert all(len(group["rows"]) == group["of"] == 4 for group in groups)  # none torn apart
    assert found.rows == 4 * len(groups) and found.of_rows == 32 * len(steps) and found.of_steps == 120
    assert sum(len(group) for group in found.groups) <= 200_000


def test_large_files_are_read_of_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunDir(tmp_path).create()
    for k in range(1, 61):
        write_samples(run, k, "train", [row("u", 0, "r" * 1000)])
    assert shown_samples(run, set()).steps == 60
    monkeypatch.setattr(report_samples, "READ_BUDGET", 30_000)
    assert shown_samples(run, set()).steps == 25


def test_text_that_grows_when_escaped_stays_within_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_samples, "SAMPLE_BUDGET", 100_000)
    run = RunDir(tmp_path).create()
    for k in range(1, 31):
        write_samples(run, k, "train", [row("u", i, "<\x9f汉" * 2500) for i in range(4)])
    found = shown_samples(run, set())
    assert sum(len(group.encode()) for group in found.groups) <= 100_000
    assert found.rows > 0 and all("<" not in group for group in found.groups)
    first = json.loads(found.groups[0])
    assert first["of"] == 4 and len(first["rows"]) == 1
    assert "characters left out" in first["rows"][0]["response"]


def test_torn_and_odd_sample_lines_are_counted_and_odd_values_survive(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    odd = row("u", 0, "x\ud835y", score=None, extras={"why": "\ud800<", "none": None, "big": 10**400})
    write_samples(run, 3, "val", [odd])
    with open(run.samples(3), "a") as file:
        file.write('{"split": "val", "uid": "u", "index": 1, "prompt": "", "response": "", "score": NaN}\n{"torn')
    run.metrics.write_text("")
    page = write_report(run).read_text(encoding="utf-8")
    groups = embedded(page, "sample-data")
    assert [r["response"] for group in groups for r in group["rows"]] == ["x\ufffdy", ""]
    assert groups[0]["rows"][0]["extras"]["why"] == "\ufffd<"
    assert embedded(page)["notes"] == ["1 unreadable line in samples/ skipped"]


def many_tokens(seed: int) -> dict[str, Any]:
    figures = random.Random(seed)
    values = {
        name: [round(figures.gauss(0, 1), 2) for _ in range(TOKENS)] for name in ("advantage", "log_prob", "change")
    }
    return {"text": [" token"] * TOKENS, "version": seed, "change_from": "the engine"} | values


def test_200_steps_of_128_samples_stay_under_5_mb(tmp_path: Path, make_run: Callable[..., RunDir]) -> None:
    run = make_run(tmp_path / "run", total=200, validate_every=0)
    for k in range(1, 201):
        rows = [row(f"u{g}", i, f"<b>{k * i}</b> " * 60) for g in range(16) for i in range(8)]
        rows[:2] = [replace(one, tokens=many_tokens(k)) for one in rows[:2]]  # as many as a run keeps of them
        write_samples(run, k, "train", rows)
    page = write_report(run)
    assert page.stat().st_size < 5_000_000
    samples = embedded(page.read_text(encoding="utf-8"))["samples"]
    groups = embedded(page.read_text(encoding="utf-8"), "sample-data")
    kept = {group["step"] for group in groups for one in group["rows"] if "tokens" in one}
    assert len(kept) >= 15 and {1, 200} <= kept
    assert samples["rows"] >= 1000 and samples["of_rows"] == 128 * samples["steps"] and samples["of_steps"] == 200
