"""``verl watch``: what it shows of running, finished, copied and damaged runs, and how it ends."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from rich.console import Console

from verl.run_dir import RunDir
from verl.tracking.runs import overview
from verl.tracking.watch import LineFile, Watcher, time_left, watch

ROOT = Path(__file__).parents[2]


def shown(run: RunDir, columns: int = 100, rows: int = 1000) -> list[str]:
    return [line.plain for line in Watcher(run).lines(columns, rows)]


def line_with(lines: list[str], start: str) -> str:
    return next(line for line in lines if line.startswith(start))


def test_a_run_that_runs_is_shown_with_its_curves_workers_and_time_left(synthetic_run: RunDir) -> None:
    lines = [json.loads(line) for line in synthetic_run.metrics.read_text().splitlines()][:21]
    now = time.time()
    for step, line in enumerate(lines):
        line["time"] = now - 10 * (20 - step)
        line |= {"perf/idle/trainer": 0.25, "perf/memory_gb/controller": 1.5, "reward/failed": float(step == 3)}
    synthetic_run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    synthetic_run.log_event("started", "run", "step 0 of 40", 0)
    with synthetic_run.lock():
        found = shown(synthetic_run)
    assert found[0].startswith("run  running  step 20/40 ━━━━━━━━━━────────── 50%, 3m20s left, last step 0.")
    assert line_with(found, "reward").rstrip().endswith("to 0.4149") or "▁" in line_with(found, "reward")
    assert {"held-out", "KL ref", "entropy", "length"} <= {line[:9].strip() for line in found}
    assert line_with(found, "time").startswith("time     gen ") and "tokens/s" in line_with(found, "time")
    assert line_with(found, "workers") == "workers  trainer idle 25%, controller 1.500 GiB"
    assert "raised an error: 1 (step 3) → verl reward test" in line_with(found, "warning")
    assert "worker_died rollout 1" in line_with(found, "event")
    assert any(line.startswith("── ") and "train, step 40" in line for line in found)


def test_a_small_terminal_gets_the_most_important_and_no_more(synthetic_run: RunDir) -> None:
    assert len(shown(synthetic_run, 40, 6)) == 5
    assert shown(synthetic_run, 40, 2)[0].startswith("run  ")


def test_lines_that_come_are_read_and_a_resume_starts_over(synthetic_run: RunDir) -> None:
    watcher = Watcher(synthetic_run)
    assert "step 40" in watcher.lines(100, 99)[0].plain
    with open(synthetic_run.metrics, "a") as file:
        file.write('{"step": 41, "critic/score/mean": 0.5}\n{"step": 42, "critic/sc')
    assert "step 41" in watcher.lines(100, 99)[0].plain  # the torn one waits for its end
    synthetic_run.truncate_after(7)
    assert "step 7" in watcher.lines(100, 99)[0].plain


def test_only_new_lines_are_read(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    file = LineFile(path)
    assert not file.read()
    path.write_text('{"a": 1}\n{"a": ')
    assert file.read() and file.records == [{"a": 1}]
    assert not file.read()
    with open(path, "a") as more:
        more.write("2}\n")
    assert file.read() and file.records == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(("metrics", "said"), [("", "empty"), ("torn", "unknown"), ('{"step": 1}\n', "unknown")])
def test_poor_runs_are_shown_as_far_as_they_go(tmp_path: Path, metrics: str, said: str) -> None:
    run = RunDir(tmp_path / "run").create()
    run.metrics.write_text(metrics)
    assert said in shown(run)[0] or (metrics == "torn" and "empty" in shown(run)[0])


def test_a_copy_says_whose_it_is_and_is_not_called_crashed(synthetic_run: RunDir) -> None:
    synthetic_run.log_event("started", "run", "step 0 of 40", 0)
    assert overview(synthetic_run).status == "crashed"
    synthetic_run.lock_file.write_text('{"pid": 1, "host": "elsewhere"}\n')
    assert overview(synthetic_run).status == "unknown"
    assert "a copy of a run on elsewhere" in shown(synthetic_run)[1]


def test_time_left_is_the_median_pace_of_the_last_steps() -> None:
    steps = [{"step": k, "time": 10.0 * k + (500 if k > 2 else 0)} for k in range(1, 6)]  # it lay stopped once
    assert time_left(steps, 8) == 30.0
    assert time_left(steps, 5) == 0.0
    assert time_left(steps, None) is None and time_left(steps[:1], 8) is None


def test_where_there_is_no_terminal_it_prints_one_picture(synthetic_run: RunDir, hostile: str) -> None:
    out = io.StringIO()
    watch(synthetic_run, Console(file=out, width=100))
    assert "step 40" in out.getvalue() and "reward" in out.getvalue() and "\x1b" not in out.getvalue()


@pytest.mark.parametrize("key", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_on_a_terminal_it_goes_on_until_it_is_told_to_end(synthetic_run: RunDir, key: bytes) -> None:
    leader, follower = pty.openpty()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "100", "LINES": "40"}
    environment.pop("CI", None)
    command = [sys.executable, "-m", "verl.cli", "watch", str(synthetic_run.path)]
    process = subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=follower, stdout=follower, stderr=follower, env=environment
    )
    os.close(follower)
    said = b""

    def read_until(text: bytes, seconds: float = 60.0) -> None:
        nonlocal said
        deadline = time.monotonic() + seconds
        while text not in said:
            assert time.monotonic() < deadline, said
            if select.select([leader], [], [], 0.1)[0]:
                said += os.read(leader, 65536)

    try:
        read_until(b"step 40")
        with open(synthetic_run.metrics, "a") as file:
            file.write('{"step": 41, "critic/score/mean": 0.5}\n')
        read_until(b"step 41")
        os.write(leader, key)
        with suppress(OSError):  # nobody holds the other end any more
            read_until(b"never said", 20.0)  # whoever writes to a full terminal waits
        assert process.wait(20) == 0
    finally:
        process.kill()
        os.close(leader)
    assert b"Traceback" not in said
