from __future__ import annotations

import io
import json
import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from verl.errors import ConfigError
from verl.run_dir import RunDir
from verl.tracking.console import ConsoleTracker
from verl.tracking.live import LiveTracker
from verl.tracking.samples import SampleRow
from verl.tracking.trackers import (
    JsonlTracker,
    MetricTracker,
    Tracker,
    TrackerContext,
    build_tracker,
    check_loggers,
)
from verl.trainer.timer import StepTimer


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


class Recorder(MetricTracker):
    def __init__(self, fail_at: frozenset[int] = frozenset()) -> None:
        self.steps: list[int] = []
        self.fail_at = fail_at
        self.closed = False

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if step in self.fail_at:
            raise ConnectionError(f"no answer at step {step}")
        metrics["mine"] = 1.0  # what one tracker does to its metrics never reaches the next
        self.steps.append(step)

    def close(self) -> None:
        self.closed = True
        raise ConnectionError("no answer")


def test_jsonl_has_one_line_a_step_at_once(run: RunDir) -> None:
    tracker = JsonlTracker(run)
    tracker.log(1, {"critic/score/mean": 0.5, "count": 3})
    assert len(run.metrics.read_text().splitlines()) == 1  # readable before the next step, without close
    tracker.log(2, {"step": 99.0, "actor/lr": 1e-6})
    first, second = map(json.loads, run.metrics.read_text().splitlines())
    assert list(first) == ["step", "time", "critic/score/mean", "count"]
    assert (first["step"], first["critic/score/mean"], first["count"]) == (1, 0.5, 3)
    assert (second["step"], second["actor/lr"]) == (2, 1e-6)
    assert abs(first["time"] - run.metrics.stat().st_mtime) < 60


def test_jsonl_goes_on_after_a_resume_without_double_or_torn_lines(run: RunDir) -> None:
    first = JsonlTracker(run)
    for step in range(1, 6):
        first.log(step, {"x": step})
    with open(run.metrics, "a") as file:
        file.write('{"step": 6, "ti')
    run.truncate_after(3)
    second = JsonlTracker(run)
    for step in range(4, 7):
        second.log(step, {"x": step})
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    assert [(line["step"], line["x"]) for line in lines] == [(k, k) for k in range(1, 7)]


def test_values_keep_their_bits(run: RunDir) -> None:
    value = math.pi / 3e5
    JsonlTracker(run).log(1, {"x": value})
    assert json.loads(run.metrics.read_text())["x"] == value


def test_values_that_are_not_finite_are_null_and_noted_once(run: RunDir, caplog: pytest.LogCaptureFixture) -> None:
    tracker = build_tracker([], TrackerContext(run, 3))
    for step in (1, 2):
        tracker.log(step, {"actor/grad_norm": math.inf, "actor/entropy": 1.0, "text": "no number"})
    lines = [json.loads(line, parse_constant=pytest.fail) for line in run.metrics.read_text().splitlines()]
    assert [line["actor/grad_norm"] for line in lines] == [None, None]
    events = [(event.kind, event.subject, event.step) for event in run.read_events()]
    assert events == [("metric_not_finite", "actor/grad_norm", 1), ("metric_not_finite", "text", 1)]
    assert "inf" in run.read_events()[0].detail


def test_numbers_of_other_libraries_are_taken(run: RunDir) -> None:
    build_tracker([], TrackerContext(run, 1)).log(1, {"np": np.float32(0.5), "torch": torch.tensor(2.0), "int": 7})
    record = json.loads(run.metrics.read_text())
    assert (record["np"], record["torch"], record["int"]) == (0.5, 2.0, 7)


def test_a_failing_tracker_is_reported_once_tried_again_and_stops_nothing(
    run: RunDir, caplog: pytest.LogCaptureFixture
) -> None:
    flaky, sound = Recorder(frozenset({2, 3})), Recorder()
    tracker = Tracker(run, {"flaky": flaky, "sound": sound})
    with caplog.at_level(logging.WARNING):
        for step in range(1, 5):
            tracker.log(step, {"x": 1.0})
        tracker.close()
    assert flaky.steps == [1, 4] and sound.steps == [1, 2, 3, 4]
    assert flaky.closed and sound.closed
    events = [(event.kind, event.subject, event.step) for event in run.read_events()]
    assert events == [("tracker_failed", "flaky", 2), ("tracker_failed", "sound", None)]
    assert caplog.text.count("flaky") == 1 and "no answer at step 2" in caplog.text


def test_a_tracker_cannot_change_the_metrics_of_the_next(run: RunDir) -> None:
    tracker = Tracker(run, {"greedy": Recorder(), "jsonl": JsonlTracker(run)})
    metrics = {"x": 1.0}
    tracker.log(1, metrics)
    assert "mine" not in json.loads(run.metrics.read_text()) and metrics == {"x": 1.0}


def test_attempt_returns_the_result_or_none(run: RunDir) -> None:
    tracker = Tracker(run, {})
    assert tracker.attempt("report", lambda: 7) == 7
    assert tracker.attempt("report", lambda: 1 // 0, step=4) is None
    assert run.read_events()[0].detail.startswith("ZeroDivisionError")


def test_a_full_disk_does_not_stop_training(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    run.metrics.mkdir()  # cannot be appended to
    tracker = build_tracker([], TrackerContext(run, 2))
    tracker.log(1, {"x": 1.0})
    tracker.log(2, {"x": 1.0})
    assert [event.subject for event in run.read_events()] == ["jsonl"]


@pytest.mark.parametrize(("name", "nearest"), [("tensorbord", "tensorboard"), ("consol", "console")])
def test_an_unknown_logger_is_named_with_its_nearest(run: RunDir, name: str, nearest: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean {nearest}\\?"):
        build_tracker([name], TrackerContext(run, 1))


def test_a_logger_like_none_of_ours_lists_what_there_is() -> None:
    with pytest.raises(ConfigError) as caught:
        check_loggers(["console", "qqqq"])
    assert "qqqq" in str(
        caught.value
    ) and "available: console, jsonl, mlflow, swanlab, tensorboard, trackio, wandb" in str(caught.value)


def test_tensorboard_gets_the_same_names_and_a_resume_purges_later_steps(run: RunDir) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run.config.write_text("model:\n  path: </pre>tiny\n")
    with build_tracker(["tensorboard"], TrackerContext(run, 4)) as tracker:
        for step in (1, 2, 3):
            tracker.log(step, {"critic/score/mean": step / 10, "val-core/openai/gsm8k/acc/mean@1": 0.5})
    with build_tracker(["tensorboard"], TrackerContext(run, 4, resumed_from=1)) as tracker:
        tracker.log(2, {"critic/score/mean": 0.9})
    events = accumulator.EventAccumulator(str(run.tensorboard), {"tensors": 0}).Reload()
    assert events.Tags()["scalars"] == ["critic/score/mean", "val-core/openai/gsm8k/acc/mean@1"]
    values = {event.step: round(event.value, 4) for event in events.Scalars("critic/score/mean")}
    assert values == {1: 0.1, 2: 0.9}
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    assert text == "    model:\n      path: </pre>tiny\n"


def test_tensorboard_samples_are_text_that_nothing_in_it_can_end(run: RunDir) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    row = SampleRow("val", "u", 0, "What is 1 + 1?", "```\n# 2", score=0.5)
    with build_tracker(["tensorboard"], TrackerContext(run, 4)) as tracker:
        tracker.samples(2, "train", [row])
        tracker.samples(3, "val", [row, row])
    events = accumulator.EventAccumulator(str(run.tensorboard), {"tensors": 0}).Reload()
    (shown,) = events.Tensors("samples/1/text_summary")
    assert shown.step == 3
    lines = shown.tensor_proto.string_val[0].decode().splitlines()
    assert lines == ["    What is 1 + 1?", "    ", "    ```", "    # 2", "    ", "    reward 0.5"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_console_is_live_on_a_terminal_and_plain_elsewhere(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    for console, parts, kind in (
        (Console(file=out, force_terminal=True), StepTimer(), LiveTracker),
        (Console(file=out, force_terminal=True), None, ConsoleTracker),
        (Console(file=out, force_terminal=True, force_interactive=False), StepTimer(), ConsoleTracker),
        (Console(file=io.StringIO()), StepTimer(), ConsoleTracker),
    ):
        built = build_tracker(["console"], TrackerContext(run, 9, None, console, parts))
        assert type(built._trackers["console"]) is kind
    assert list(build_tracker([], TrackerContext(run, 9, None, console, parts))._trackers) == ["jsonl"]


def test_a_live_display_lives_as_long_as_the_training(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    JsonlTracker(run).log(1, {"critic/score/mean": 0.125})  # of before a resume
    out = Terminal()
    console = Console(file=out, force_terminal=True, width=80)
    context = TrackerContext(run, 9, 1, console, StepTimer(), samples=1)
    with pytest.raises(ZeroDivisionError), build_tracker(["console"], context) as tracker:
        tracker.samples(2, "train", [SampleRow("train", "u", 0, "p", "r", score=1.0)])
        tracker.log(2, {"critic/score/mean": 0.25})
        console.print("a notice")
        assert "── " in out.getvalue() and "reward" in out.getvalue()
        raise ZeroDivisionError
    console.print("after")
    left = out.getvalue().partition("stopped after step 2 of 9")[2]
    assert "▁█" in left and left.endswith("after\n") and "\x1b[A" not in left


def test_a_tracker_of_ones_own_is_named_by_its_file(run: RunDir, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from verl.tracking.trackers import MetricTracker\n"
        "class Mine(MetricTracker):\n"
        "    def __init__(self, context): self.file = context.run_dir.path / 'mine'\n"
        "    def log(self, step, metrics): self.file.write_text(f'{step} {metrics}')\n"
        "class Odd: pass\n"
    )
    with build_tracker([f"{file}:Mine"], TrackerContext(run, 1)) as tracker:
        tracker.log(3, {"x": 1.0})
        tracker.samples(3, "val", [])
    assert (run.path / "mine").read_text() == "3 {'x': 1.0}" and run.read_events() == []
    for name, complaint in {
        f"{file}:Min": r"no such class(.|\n)*did you mean Mine\? classes in the file: Mine, Odd \(trainer.logger\)",
        f"{tmp_path}/min.py:Mine": "The file of trainer.logger does not exist",
        f"{file}": r"no such class(.|\n)*classes in the file: Mine, Odd",
        f"{file}:Odd": r"cannot be made(.|\n)*takes no arguments",
    }.items():
        with pytest.raises(ConfigError, match=complaint):
            build_tracker([name], TrackerContext(run, 1))
