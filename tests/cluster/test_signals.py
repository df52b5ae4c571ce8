"""Stopped by a person, by a scheduler or by the kernel: what it says, what it leaves, and that it can go on."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest
from verl_process import GRPO, Command, Done, listening, metric_lines, reached, steps, train, verl, verl_started

from verl.checkpoint.store import CheckpointStore

ENDLESS = ("trainer.total_training_steps=100000", "trainer.save_freq=2", "data.val_files=[]", "trainer.test_freq=-1")
HINT = "start the same command again to go on from the last checkpoint"


def assert_valid_checkpoint(folder: Path) -> int:
    store = CheckpointStore(folder / "checkpoints")
    latest = store.latest()
    assert latest is not None
    checkpoint = store.open(latest)
    checkpoint.verify()
    assert [path for path in folder.rglob("*.safetensors") if path.stat().st_size == 0] == []
    return checkpoint.step


def stop(command: Command, folder: Path, number: int, *, beyond: int, group: bool = False, twice: float = 0) -> Done:
    """Let it train ``beyond`` its start, signal it, and see that nothing is left within 30 seconds."""
    command.wait_until(reached(folder, beyond))
    command.signal(number, group)
    if twice:
        time.sleep(twice)
        if command.process.poll() is None:
            command.signal(number, group)
    done = command.wait(30)
    command.wait_for_nothing_left(30)
    assert "Traceback" not in done.err, done.err
    assert_valid_checkpoint(folder)
    return done


def resumes_and_ends(folder: Path, *overrides: str) -> None:
    """One more step from the last checkpoint, each step written down once."""
    last = assert_valid_checkpoint(folder) + 1
    arguments = train(GRPO, folder, *ENDLESS, f"trainer.total_training_steps={last}", *overrides)
    done = verl(*arguments, log=folder.parent / "resume")
    assert done.code == 0 and "going on from" in done.out, done.err
    assert steps(folder) == list(range(1, last + 1))


def test_inline(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = train(GRPO, folder, *ENDLESS)
    with verl_started(*arguments, log=tmp_path / "interrupt") as command:
        command.wait_until(reached(folder, 3))
        assert listening(command.running()) == {}  # B160: in one process nothing listens
        second = verl(*arguments, log=tmp_path / "second")  # while the first one is alive
        assert second.code == 2 and "another run is writing this run folder" in second.err
        assert f"process {command.pid}" in second.err
        done = stop(command, folder, signal.SIGINT, beyond=steps(folder)[-1], group=True)
    assert done.code == 130 and f"interrupted; {HINT}" in done.err

    start = assert_valid_checkpoint(folder)
    with verl_started(*arguments, log=tmp_path / "terminate") as command:
        done = stop(command, folder, signal.SIGTERM, beyond=start + 3)
    assert done.code == 143 and f"terminated; {HINT}" in done.err
    assert f"checkpoints/step_{start:06d}" in done.out
    resumes_and_ends(folder)


def test_over_ray(tmp_path: Path) -> None:
    """Ctrl-C in a terminal, then a scheduler's SIGTERM."""
    folder = tmp_path / "run"
    pools = ("cluster.pools.scores.threads=1", "cluster.placement.reward=scores")
    arguments = train(GRPO, folder, *ENDLESS, "cluster.backend=ray", *pools)
    with verl_started(*arguments, log=tmp_path / "interrupt") as command:
        running = wait_for_ray(command, folder)
        assert {"raylet", "gcs_server"} <= set(running.values())
        # B160: whatever is not on loopback is Ray's, which listens on all interfaces and asks for the run's token
        # (its workers, which are named ray::, write over where theirs could be read).
        wide = [pid for pid, addresses in listening(running).items() if addresses - {"127.0.0.1", "::1"}]
        for pid in (pid for pid in wide if pid != command.pid and not running[pid].startswith("ray::")):
            environment = Path(f"/proc/{pid}/environ").read_bytes()
            assert b"RAY_AUTH_MODE=token" in environment and b"RAY_AUTH_TOKEN=" in environment, running[pid]
        done = stop(command, folder, signal.SIGINT, beyond=3, group=True)
    assert done.code == 130 and f"interrupted; {HINT}" in done.err

    start = assert_valid_checkpoint(folder)
    with verl_started(*arguments, log=tmp_path / "terminate") as command:
        done = stop(command, folder, signal.SIGTERM, beyond=start + 3)
    assert done.code == 143 and f"terminated; {HINT}" in done.err

    resumes_and_ends(folder)  # inline: the backend is no part of a run's identity


def wait_for_ray(command: Command, folder: Path) -> dict[int, str]:
    command.wait_until(reached(folder, 1))
    return command.running()


def test_b154_b157_two_runs_at_once_and_the_worker_of_one_is_killed(tmp_path: Path) -> None:
    """Both proceed; the kernel takes the worker of one, which says so and ends, and the other never notices."""
    folders = [tmp_path / "a", tmp_path / "b"]
    once = ("cluster.backend=ray", "trainer.max_restarts=0")
    arguments = [train(GRPO, folder, *ENDLESS, *once) for folder in folders]
    with (
        verl_started(*arguments[0], "trainer.total_training_steps=60", log=tmp_path / "log_a") as one,
        verl_started(*arguments[1], log=tmp_path / "log_b") as other,
    ):
        one.wait_until(reached(folders[0], 3))
        other.wait_until(reached(folders[1], 3))
        (worker,) = [pid for pid, name in other.running().items() if name.startswith("ray::Worker")]
        os.kill(worker, signal.SIGKILL)
        killed = other.wait(30)
        other.wait_for_nothing_left(30)
        done = one.wait(120)
        one.wait_for_nothing_left(30)
    assert killed.code == 1  # failed; the input was right
    assert re.search(r"^error: the worker process died during [a-z_]+$", killed.err, re.MULTILINE), killed.err
    assert "go on from the last checkpoint" in killed.err and "Traceback" not in killed.err
    assert_valid_checkpoint(folders[1])
    assert done.code == 0, done.err
    both = [[line["critic/score/mean"] for line in metric_lines(folder)] for folder in folders]
    assert len(both[0]) == 60 and both[0][: len(both[1])] == both[1][:60]


@pytest.mark.drill
@pytest.mark.parametrize("pause", [0.05, 0.5, 1.5])
def test_b153_ctrl_c_twice_over_ray(tmp_path: Path, pause: float) -> None:
    folder = tmp_path / "run"
    with verl_started(*train(GRPO, folder, *ENDLESS, "cluster.backend=ray"), log=tmp_path / "log") as command:
        done = stop(command, folder, signal.SIGINT, beyond=3, group=True, twice=pause)
    assert done.code != 0
    resumes_and_ends(folder)


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("seconds", [4.0, 7.0, 8.0, 9.0, 10.0])
def test_b153_stopped_while_starting(tmp_path: Path, number: int, seconds: float) -> None:
    """Wherever it is by then: importing, starting Ray, loading the model."""
    folder = tmp_path / "run"
    with verl_started(*train(GRPO, folder, *ENDLESS, "cluster.backend=ray"), log=tmp_path / "log") as command:
        time.sleep(seconds)
        command.signal(number)
        done = command.wait(30)
        command.wait_for_nothing_left(30)
    assert done.code != 0


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_b153_stopped_while_saving(tmp_path: Path, number: int) -> None:
    """A save every step: over a dozen stops, some fall into a save."""
    folder = tmp_path / "run"
    arguments = train(GRPO, folder, *ENDLESS, "trainer.save_freq=1")
    start = 0
    for attempt in range(12):
        with verl_started(*arguments, log=tmp_path / "log") as command:
            command.wait_until(reached(folder, start + 2))
            time.sleep(0.02 * attempt)
            command.signal(number)
            assert command.wait(30).code in (130, 143)
        start = assert_valid_checkpoint(folder)
    resumes_and_ends(folder)
