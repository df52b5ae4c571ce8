from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl import run_dir as run_dir_module
from verl.errors import VerlError
from verl.json_lines import append_line, clean_text, json_line, read_jsonl
from verl.run_dir import RunDir, write_atomic

# --- names


def test_files_are_named_as_the_design_lists_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "a" / "run").create()
    names = [run.config, run.metrics, run.samples(10), run.checkpoint(10), run.report, run.events]
    assert [str(path.relative_to(run.path)) for path in names] == [
        "config.yaml",
        "metrics.jsonl",
        "samples/step_000010.jsonl",
        "checkpoints/step_000010",
        "report.html",
        "events.log",
    ]
    assert run.samples_dir.is_dir() and run.checkpoints.is_dir()


def test_sample_steps_come_in_numeric_order(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    for step in (1_000_000, 9, 10, 999_999):
        run.samples(step).touch()
    (run.samples_dir / "step_x.jsonl").touch()
    assert run.sample_steps() == [9, 10, 999_999, 1_000_000]
    assert RunDir(tmp_path / "absent").sample_steps() == []


def test_create_keeps_what_is_there(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    run.metrics.write_text("{}\n")
    assert run.create().metrics.read_text() == "{}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoints", "metrics.jsonl", "samples"]


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    with pytest.raises(VerlError, match="cannot be written") as caught:
        RunDir(blocked / "run").create()
    assert "Not a directory" in str(caught.value) and "trainer.default_local_dir" in str(caught.value)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a file system that refuses even root")
def test_a_folder_that_refuses_even_root_is_a_clear_error() -> None:
    with pytest.raises(VerlError, match="cannot be written"):
        RunDir("/proc/self/verl-run").create()


# --- text and JSON


@given(st.text(st.characters(categories=None)))
def test_any_text_becomes_one_safe_line_and_comes_back(text: str) -> None:
    line = json_line({"text": text})
    line.encode()  # no lone surrogate left
    assert len(line.splitlines()) == 1
    assert not any(ord(c) < 32 or 0x7F <= ord(c) < 0xA0 for c in line)
    assert json.loads(line)["text"] == clean_text(text)


def test_lone_surrogates_are_replaced_and_pairs_joined() -> None:
    assert clean_text("x\ud835y") == "x\ufffdy"
    assert clean_text("\ud83d\ude00") == "\U0001f600"
    assert clean_text("plain ä 漢") == "plain ä 漢"


def test_numbers_that_are_not_finite_become_null() -> None:
    record = {"nan": math.nan, "inf": math.inf, "np": np.float32("nan"), "list": [1.5, -math.inf], "ok": True}
    assert json.loads(json_line(record)) == {"nan": None, "inf": None, "np": None, "list": [1.5, None], "ok": True}


def test_values_of_other_libraries_become_plain_ones() -> None:
    record = {"array": np.arange(3), "scalar": np.int64(7), "bool": np.bool_(True), "path": Path("/a"), 3: {"x"}}
    assert json.loads(json_line(record)) == {"array": [0, 1, 2], "scalar": 7, "bool": True, "path": "/a", "3": ["x"]}


def test_an_integer_too_long_to_print_is_kept_as_hex() -> None:
    assert json.loads(json_line(1 << 20_000)) == hex(1 << 20_000)


def test_read_jsonl_skips_and_counts_what_is_no_object(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n\n[1]\n\xff\xfe\n{"a": 2}\n' + b"[" * 100_000 + b'\n{"a": 3')
    assert read_jsonl(path) == ([{"a": 1}, {"a": 2}], 4)
    assert read_jsonl(tmp_path / "absent") == ([], 0)


# --- writing


def test_write_atomic_replaces_whole_files_and_leaves_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    write_atomic(path, "new \ud835")
    assert path.read_text(encoding="utf-8") == "new \ufffd"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_dir_module.os, "fsync", no_space)
    with pytest.raises(VerlError, match="No space left"):
        write_atomic(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_appending_after_a_torn_line_does_not_join_it(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b'{"a": 1}\n{"a": 2, "b')
    append_line(path, '{"a": 3}')
    assert read_jsonl(path) == ([{"a": 1}, {"a": 3}], 1)


# --- events


def test_events_come_back_in_order_and_foreign_lines_are_skipped(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    first = run.log_event("worker_died", "rollout 1", {"exit": -9}, step=3)
    with open(run.events, "a") as file:
        file.write('{"no": "event"}\ntorn {"ti')
    second = run.log_event("resumed", detail="x\ud835\x1b[2J")
    events = run.read_events()
    assert events[0] == first
    assert (events[1].kind, events[1].step, events[1].detail) == ("resumed", None, "x\ufffd\x1b[2J")
    assert events[1].time == second.time and len(events) == 2
    assert b"\x1b" not in run.events.read_bytes()


def test_an_event_that_cannot_be_written_stops_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    RunDir(tmp_path / "absent").log_event("worker_died", "rollout 1")
    assert "worker_died" in caplog.text


# --- resume


def line(step: int) -> str:
    return json.dumps({"step": step, "loss": step / 10})


def test_truncate_cuts_metrics_samples_and_temporary_files(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    run.metrics.write_text("\n".join(map(line, range(8))) + '\n{"step": 8, "lo')
    for step in range(9):
        run.samples(step).write_text("{}\n")
    (run.samples_dir / ".step_000008.jsonl.partial-01234567").touch()
    (run.path / ".report.html.partial-89abcdef").touch()
    run.dump(8).parent.mkdir()
    (run.dump(8).parent / f".{run.dump(8).name}.partial-0a1b2c3d").touch()
    run.log_event("worker_died", step=8)
    events = run.events.read_text()
    run.truncate_after(5)
    run.clean_temporary()
    assert run.metrics.read_text() == "\n".join(map(line, range(6))) + "\n"
    assert run.sample_steps() == [0, 1, 2, 3, 4, 5]
    assert not list(run.dump(8).parent.iterdir())
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["checkpoints", "dumps", "events.log", "metrics.jsonl", "samples"]
    assert len(list(run.samples_dir.iterdir())) == 6
    assert run.events.read_text() == events
    run.truncate_after(-1)
    assert run.metrics.read_text() == "" and run.sample_steps() == []


def test_truncate_of_an_empty_run_does_nothing(tmp_path: Path) -> None:
    RunDir(tmp_path / "absent").truncate_after(3)
    assert not (tmp_path / "absent").exists()


@given(st.data())
def test_killed_at_any_byte_and_resumed_leaves_every_step_once(data: st.DataObject) -> None:
    """The uninterrupted file comes back byte for byte, wherever the writer died after the checkpoint's step."""
    import tempfile

    total = data.draw(st.integers(1, 6))
    saved = data.draw(st.integers(-1, total))
    whole = "".join(line(step) + "\n" for step in range(total + 1)).encode()
    least = len("".join(line(step) + "\n" for step in range(saved + 1)))
    killed_at = data.draw(st.integers(least, len(whole)))
    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(folder)
        run.metrics.write_bytes(whole[:killed_at])
        run.truncate_after(saved)
        for step in range(saved + 1, total + 1):
            append_line(run.metrics, line(step))
        assert run.metrics.read_bytes() == whole


# --- the lock


def test_a_second_run_on_a_live_folder_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    with run.lock():
        with pytest.raises(VerlError, match="another run is writing this run folder") as caught:
            run.lock()
        assert f"process {os.getpid()}" in str(caught.value) and "experiment_name" in str(caught.value)
    with run.lock() as again:
        again.release()
        again.release()
        run.lock().release()


HOLDER = """
import sys, time
from verl.run_dir import RunDir
lock = RunDir(sys.argv[1]).lock()
print("held", flush=True)
time.sleep(60)
"""


def test_a_killed_run_releases_its_lock(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        with pytest.raises(VerlError, match=f"process {holder.pid} "):
            run.lock()
    finally:
        holder.kill()
        holder.communicate()
    run.lock().release()


def test_who_asks_whether_a_run_is_on_sees_it_and_disturbs_none(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    assert not run.is_locked() and not run.lock_file.exists()
    with run.lock():
        assert run.is_locked() and RunDir(tmp_path).is_locked()
    assert not run.is_locked()
    with open(run.lock_file) as asking:  # as is_locked holds it for a moment
        fcntl.flock(asking, fcntl.LOCK_SH)
        threading.Timer(0.03, fcntl.flock, (asking, fcntl.LOCK_UN)).start()
        run.lock().release()


def test_a_forked_child_does_not_keep_the_lock_alive(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    lock = run.lock()
    context = multiprocessing.get_context("fork")
    started, end = context.Event(), context.Event()
    child = context.Process(target=lambda: (started.set(), end.wait(60)))
    child.start()
    try:
        assert started.wait(60)
        with pytest.raises(VerlError):  # the child closed its copy: that did not unlock ours
            run.lock()
        lock.release()
        run.lock().release()
    finally:
        end.set()
        child.join()


def test_a_lock_in_an_absent_folder_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(VerlError, match="cannot be locked"):
        RunDir(tmp_path / "absent").lock()


def test_the_module_needs_only_the_standard_library() -> None:
    code = "import sys, verl.run_dir; print(sorted({'torch', 'ray', 'numpy', 'rich', 'yaml'} & set(sys.modules)))"
    found = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])},
    )
    assert found.stdout.strip() == "[]"
