"""Rollout and reward workers that come, go, and are killed while a run trains: the same run, to the bit."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import verl_process
from verl_process import GRPO, Command, checkpoint_bytes, computed, reached, steps, train, verl_started

import verl.cli
from verl.checkpoint.store import CheckpointStore
from verl.run_dir import RunDir

RUN = (
    "data.train_batch_size=8",
    "actor.ppo_mini_batch_size=8",
    "data.max_response_length=96",
    "rollout.ignore_eos=true",
    "data.val_files=[]",
    "trainer.test_freq=-1",
)
POOL = (
    "trainer.total_training_steps=100000",
    "trainer.save_freq=1",
    "rollout.max_num_seqs=4",
    "rollout.worker_timeout=8",
    "rollout.weight_sync=broadcast",
    "rollout.compress_results=true",
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


def test_a_run_whose_workers_come_go_and_die_is_the_undisturbed_one(tmp_path: Path) -> None:
    """From one rollout worker to three, which are killed, stopped and slowed, and back to one; then all is compared
    with a run in one process."""
    run, calm = tmp_path / "run", tmp_path / "calm"

    def happened(**times: int) -> Callable[[], bool]:
        def counted() -> bool:
            kinds = Counter(event.kind for event in RunDir(run).read_events())
            return all(kinds[kind] >= number for kind, number in times.items())

        return counted

    def scale(workers: int) -> None:
        assert verl.cli.main(["scale", str(run), "--rollout-workers", str(workers)]) == 0

    with verl_started(*train(GRPO, run, *RUN, *POOL), log=tmp_path / "log") as command:
        command.wait_until(happened(joined=1))
        scale(3)
        command.wait_until(happened(joined=3))
        with Killer(command, seed=1) as killer:
            command.wait_until(lambda: len(killer.did) == len(DEEDS))
            command.wait_until(happened(died=3, started=6, joined=4))
        scale(1)
        command.wait_until(happened(left=2))
        command.wait_until(reached(run, steps(run)[-1] + 1))
        command.signal(signal.SIGTERM)
        assert command.wait(60).code == 143
        command.wait_for_nothing_left()
    last = CheckpointStore(run / "checkpoints").steps()[-1]
    once = (f"trainer.total_training_steps={last}", f"trainer.save_freq={last}")
    done = verl_process.verl(*train(GRPO, calm, *RUN, *once), log=tmp_path / "calm_log")
    assert done.code == 0, done.err
    assert checkpoint_bytes(run, last) == checkpoint_bytes(calm, last)
    assert computed(run)[:last] == computed(calm)
    samples = [[RunDir(folder).samples(step).read_text() for step in range(1, last + 1)] for folder in (run, calm)]
    assert samples[0] == samples[1]
    kinds = Counter(event.kind for event in RunDir(run).read_events())
    assert kinds["died"] == 3 and kinds["left"] == 2 and not kinds["lost"]
