"""Ray's object store when it is full: whoever has something to store waits for room, and is told if none comes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayTaskError
from verl_process import GRPO, ROOT, train

from verl.cluster import object_store, ray_worker
from verl.cluster.ray_worker import RayWorkers, Watch
from verl.errors import ClusterError


class Clock:
    """Seconds pass when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FullStore:
    """Has room from that second on."""

    def __init__(self, clock: Clock, room_at: float) -> None:
        self._clock, self._room_at = clock, room_at

    def put(self, value: Any) -> Any:
        if self._clock.now < self._room_at:
            raise OutOfDiskError("Local disk is full")
        return value


@pytest.mark.parametrize("seconds", [0.0, 3.0])
def test_b156_storing_waits_for_room(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = Clock()
    monkeypatch.setattr(object_store, "time", clock)
    monkeypatch.setattr(object_store, "ray", FullStore(clock, seconds))
    assert object_store.stored("batch") == "batch" and clock.now == seconds


def test_b156_and_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(object_store, "time", clock)
    monkeypatch.setattr(object_store, "ray", FullStore(clock, 1e9))
    with pytest.raises(
        ClusterError, match=r"does not fit into Ray's object store, and the disk .* has no room"
    ) as error:
        object_store.stored("batch")
    assert clock.now < 15 and not error.value.bad_input and "free space" in str(error.value)


@pytest.mark.parametrize("kind", [OutOfDiskError, ObjectStoreFullError])
def test_b156_a_workers_answer_that_has_no_room(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    class Ray:
        @staticmethod
        def wait(references: list[Any], timeout: float, num_returns: int) -> tuple[list[Any], list[Any]]:
            return references, []

        @staticmethod
        def get(reference: RayTaskError) -> None:
            raise reference.as_instanceof_cause()  # as Ray does

    monkeypatch.setattr(ray_worker, "ray", Ray)
    workers = RayWorkers([None], "", Watch(60, print, print))
    with pytest.raises(ClusterError, match="does not fit into Ray's object store"):
        workers._answers("values", [RayTaskError("values", "a traceback", kind("Local disk is full"))])


# A store of 80 MB, a disk that is always full, and twice 60 MB in the hands of somebody else, who lets go of one.
DRILL = """
import os, sys, threading, time
import numpy as np
import ray
from verl.cluster import ray_runtime
from verl.cluster.object_store import stored

ray_runtime.OBJECT_STORE_BYTES = 80 * 2**20
def hold():
    held = []
    while not ray.is_initialized():
        time.sleep(0.05)
    held.append(stored(np.ones(60 * 2**20, np.uint8)))
    threading.Timer(1.0, held.clear).start()
    held.append(stored(np.ones(60 * 2**20, np.uint8)))
    print("HAD ROOM AFTER A WHILE", flush=True)
    time.sleep(1e6)
threading.Thread(target=hold, daemon=True).start()
from verl.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.drill
def test_b156_a_run_whose_batch_finds_no_room(tmp_path: Path) -> None:
    """Every prompt brings half a megabyte for its reward function."""
    rows = [{"prompt": f"{i}+1=", "answer": "1", "page": "x" * 2**19} for i in range(64)]
    file = tmp_path / "pages.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = train(
        GRPO,
        tmp_path / "run",
        "cluster.backend=ray",
        f"data.train_files={file}",
        "data.val_files=[]",
        "data.train_batch_size=64",
        "actor.ppo_mini_batch_size=64",
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_local_fs_capacity_threshold": "0.0001"}
    command = [sys.executable, "-c", DRILL, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert "HAD ROOM AFTER A WHILE" in done.stdout
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    assert "error: a batch does not fit into Ray's object store" in done.stderr
