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
    "rollout.worker_timeout=20",
    "trainer.val_before_train=false",
    "data.val_files=[]",
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={STEPS}",
    "cluster.backend=ray",
    "cluster.pools.rollout.processes=3",
    "cluster.pools.rollout.threads=1",
    "cluster.placement.rollout=rollout",
)


class Killer:
    """Ends, hangs and slows random workers of a run, from a seed, until it is told to stop."""

    def __init__(self, command: Command, seed: int) -> None:
        self._command, self._random = command, random.Random(seed)
        self.did: Counter[str] = Counter()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._go, daemon=True)

    def __enter__(self) -> Killer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _go(self) -> None:
        while not self._over.wait(self._random.uniform(1.0, 3.0)):
            workers = sorted(pid for pid, name in self._command.running().items() if name.startswith("ray::Rollout"))
            if workers:
                deed = self._random.choice(["kill", "kill", "slow", "hang"])
                with suppress(ProcessLookupError):
                    self._do(deed, self._random.choice(workers))
                self.did[deed] += 1

    def _do(self, deed: str, pid: int) -> None:
        if deed == "kill":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
        if deed == "slow":
            time.sleep(1.0)
            os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("mode", ["sync"])
def test_a_disturbed_run_is_the_undisturbed_one(tmp_path: Path, mode: str) -> None:
    runs = {}
    for name in ("calm", "disturbed"):
        runs[name] = tmp_path / name
        arguments = train(GRPO, runs[name], *SETTINGS, f"trainer.mode={mode}")
        with verl_started(*arguments, log=tmp_path / f"{name}.log") as command:
            if name == "calm":
                done = command.wait(120)
            else:
                with Killer(command, seed=1) as killer:
                    done = command.wait(200)
                assert killer.did["kill"] >= 2, killer.did
            assert done.code == 0, done.err
            command.wait_for_nothing_left()
    assert_same_run(runs["calm"], runs["disturbed"], STEPS)
    samples = [[p.read_text() for p in sorted(RunDir(run).samples_dir.iterdir())] for run in runs.values()]
    assert samples[0] == samples[1]
    kinds = Counter(event.kind for event in RunDir(runs["disturbed"]).read_events())
    assert kinds["died"] >= 2 and not kinds["lost"]
