"""A clock that is set, by days and in both directions: a run takes no notice."""

from __future__ import annotations

import io
import itertools
import time
from pathlib import Path

import pytest
from rich.console import Console
from stage_cases import tiny_config
from verl_process import assert_same_run

from verl.checkpoint.store import CheckpointStore
from verl.run_dir import RunDir
from verl.tracking.runs import overview
from verl.tracking.timeline import picture, read_timeline
from verl.trainer.run import train

DAY = 86400.0


def test_a_clock_that_is_set_all_the_time(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a resume; at every look the clock is days off, another way than at the last."""
    began, real, calls = time.monotonic(), time.time, itertools.count()

    def run_to(step: int, name: str) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        trainer = {"save_freq": 1, "keep_last": 2, "total_training_steps": step}
        train(tiny_config(tmp_path / name, tiny_model_dir, {"trainer": trainer}), Console(file=io.StringIO()))

    run_to(4, "calm")
    with monkeypatch.context() as patched:
        patched.setattr(time, "time", lambda: real() + DAY * (0, 3, -5, 2, -40)[next(calls) % 5])
        run_to(2, "set")
        run_to(4, "set")
    assert next(calls) > 8
    run = RunDir(tmp_path / "set" / "run")
    monkeypatch.setattr("verl_process.steps", lambda folder: list(range(5)))  # no validation, so no step 0
    assert_same_run(tmp_path / "calm" / "run", run.path, 4)
    assert CheckpointStore(run.checkpoints).steps() == [3, 4]
    elapsed = time.monotonic() - began
    assert 0 < overview(run).seconds < elapsed and overview(run).status == "finished"
    lines = read_timeline(run)
    assert 0 < picture(lines)["seconds"] < elapsed
    for line in lines:
        for name, spans in line["workers"].items():
            assert all(0 <= end - start < elapsed for _, start, end in spans), (name, spans)


@pytest.mark.parametrize("days", [-2, 2])
def test_the_picture_begins_behind_a_jump(days: int) -> None:
    """Between the processes of a run that was resumed after the clock was set."""
    lines = [
        {"step": step, "began": began, "parts": [("step", 0.0, 9.0), ("gen", 0.0, 4.0)]}
        for step, began in ((1, 100.0), (2, 110.0), (3, 100.0 + days * DAY), (4, 111.0 + days * DAY))
    ]
    shown = picture(lines)
    assert shown["seconds"] == 20.0 and [step for step, *_ in shown["steps"]] == [3, 4]
