"""Rollout and reward workers that are killed, stopped and slowed while a run trains: the same run, to the bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from verl_process import GRPO, Command, assert_same_run, train, verl_started

from verl.run_dir import RunDir

STEPS = 6
SETTINGS = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "data.max_response_length=96",
    "rollout.ignore_eos=true",
    "rollout.max_num_seqs=4",
    "rollout.worker_timeout=8",
    "data.val_max_samples=2",
    "trainer.test_freq=-1",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "cluster.backend=ray",
    "cluster.pools.rollout.threads=1",
    "cluster.placement.rollout=rollout",
)


DEEDS = ("kill", "slow", "kill", "hang", "kill reward")


class Killer:
    """Does ``DEEDS`` to workers that are at work, chosen from a seed."""

    def __init__(self, command: Command, seed: int) -> None:
        self._command, self._random = command, random.Random(seed)
        self.did: list[str] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _go(self) -> None:
        for deed in DEEDS:
            while not self._over.wait(self._random.uniform(0.2, 0.6)):
                busy = self._at_work("verl.rewards.nursery" if deed == "kill reward" else "ray::RolloutWorker.advance")
                if busy:
                    with suppress(ProcessLookupError):
                        self._do(deed, self._random.choice(busy))
                    self.did.append(deed)
                    break

    def _at_work(self, words: str) -> list[int]:
        found = []
        for pid in sorted(self._command.running()):
            with suppress(OSError):
                if words in Path(f"/proc/{pid}/cmdline").read_text():
                    found.append(pid)
        return found

    def _do(self, deed: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL if deed.startswith("kill") else signal.SIGSTOP)
        if deed == "slow":
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)


def settings(folder: Path, workers: int) -> tuple[str, ...]:
    return train(GRPO, folder, *SETTINGS, f"cluster.pools.rollout.processes={workers}")


def assert_equal_runs(calm: Path, other: Path) -> None:
    assert_same_run(calm, other, STEPS)
    samples = [[file.read_text() for file in sorted(RunDir(run).samples_dir.iterdir())] for run in (calm, other)]
    assert samples[0] == samples[1]


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The undisturbed run, with two workers."""
    folder = tmp_path_factory.mktemp("calm")
    with verl_started(*settings(folder / "run", 2), log=folder / "log") as command:
        done = command.wait(150)
    assert done.code == 0, done.err
    return folder / "run"


def test_a_disturbed_run_is_the_undisturbed_one(calm: Path, tmp_path: Path) -> None:
    with verl_started(*settings(tmp_path / "run", 3), log=tmp_path / "log") as command:
        with Killer(command, seed=1) as killer:
            done = command.wait(240)
        assert tuple(killer.did) == DEEDS
        assert done.code == 0, done.err
        command.wait_for_nothing_left()
    assert_equal_runs(calm, tmp_path / "run")
    kinds = Counter(event.kind for event in RunDir(tmp_path / "run").read_events())
    assert kinds["died"] == 3 and not kinds["lost"]
