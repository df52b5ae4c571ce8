"""A saver killed with SIGKILL at random moments: what is left is always a complete checkpoint."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from verl.checkpoint.store import CheckpointStore

ROOT = Path(__file__).parents[2]

# A fork per kill: one interpreter with torch loaded serves all drills.
SAVER = """
import os, signal, sys
import torch
from pathlib import Path
from verl.checkpoint.store import CheckpointStore

torch.set_num_threads(1)
root = Path(sys.argv[1])

def save_for_ever():
    store = CheckpointStore(root, keep_last=2)
    store.clean_partial()
    step = max(store.steps(), default=0)
    while True:
        step += 1
        with store.begin(step) as pending:
            pending.write_state("trainer", {"step": step, "w": torch.full((200_000,), float(step)), "log": ["x"] * 999})
            pending.commit({"step": step})

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        try:
            save_for_ever()
        finally:
            os._exit(1)
    print(child, flush=True)
    os.waitpid(child, 0)
    print("ended", flush=True)
"""


def check(root: Path) -> int:
    """The newest step, after reading it whole."""
    store = CheckpointStore(root)
    latest = store.latest()
    if latest is None:
        return 0
    checkpoint = store.open(latest)
    checkpoint.verify()
    state = checkpoint.read_state("trainer")
    assert state["step"] == checkpoint.step == checkpoint.meta["step"]
    assert state["w"].shape == (200_000,) and bool((state["w"] == float(checkpoint.step)).all())
    return checkpoint.step


def drill(root: Path, kills: int, seed: int) -> list[int]:
    random_ = random.Random(seed)
    newest = [0]
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )
    assert saver.stdin and saver.stdout
    try:
        for kill in range(kills):
            saver.stdin.write("go\n")
            saver.stdin.flush()
            child = int(saver.stdout.readline())
            deadline = time.monotonic() + 60  # a slow machine gets one whole save before the first kill
            while not kill and not CheckpointStore(root).steps() and time.monotonic() < deadline:
                time.sleep(0.02)
            time.sleep(random_.uniform(0.0, 0.25))
            os.kill(child, signal.SIGKILL)
            assert saver.stdout.readline() == "ended\n"
            newest.append(check(root))
            assert newest[-1] >= newest[-2]
    finally:
        saver.kill()
        saver.wait()
        saver.stdin.close()
        saver.stdout.close()
    return newest


def finish(root: Path, newest: list[int]) -> None:
    assert newest[-1] > 0
    store = CheckpointStore(root, keep_last=2)
    store.clean_partial()
    assert {path.name for path in root.iterdir()} == {f"step_{step:06d}" for step in store.steps()}
    assert newest[-1] in store.steps() and len(store.steps()) <= 3


def test_b137_killed_while_saving(tmp_path: Path) -> None:
    finish(tmp_path, drill(tmp_path, kills=8, seed=1))


@pytest.mark.drill
def test_killed_while_saving_many_times(tmp_path: Path) -> None:
    finish(tmp_path, drill(tmp_path, kills=300, seed=torch.seed() % 1000))
