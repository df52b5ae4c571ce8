"""After the death of a worker: the last state that is anywhere, on disk or in memory, and nothing left behind."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
from rich.console import Console
from stage_cases import tiny_config
from verl_process import checkpoint_bytes, computed

import verl.cluster.reaper
from verl.checkpoint.store import CheckpointStore
from verl.errors import WorkerDiedError
from verl.protocol import DataProto
from verl.run_dir import RunDir
from verl.trainer import loop
from verl.trainer.resume import MEMORY, kept_in_memory
from verl.trainer.run import train


def test_one_step_is_done_again_where_the_last_state_is_in_memory(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in step 4, with a checkpoint of step 2, or none, on disk."""
    update, trained = loop.update, list[int]()

    @contextmanager
    def memory(config: Any) -> Iterator[CheckpointStore]:  # inline, where nobody dies alone, keeps nothing
        yield CheckpointStore(tmp_path / "memory" / config.trainer.experiment_name, keep_last=1)

    def run(name: str, save_freq: int, dies_in: int | None = None) -> Path:
        def dying(batch: DataProto, roles: Any, config: Any, rates: Any, step: int, *rest: Any) -> Any:
            trained.append(step)
            if trained.count(step) == 1 and step + 1 == dies_in:
                update(batch, roles, config, rates, step, *rest)  # whose weights are lost with the step
                RunDir(tmp_path / name).wishes.write_text('{"rollout_workers": 3}')
                raise WorkerDiedError("the worker died", "signal 9", "start again")
            return update(batch, roles, config, rates, step, *rest)

        trained.clear()
        monkeypatch.setattr(loop, "update", dying)
        own = {"total_training_steps": 5, "save_freq": save_freq, "experiment_name": name, "memory_save_freq": 1}
        settings = {"trainer": own | {"default_local_dir": str(tmp_path / name)}, "cluster": {"threads": 1}}
        train(tiny_config(tmp_path, tiny_model_dir, settings), Console(quiet=True))
        return tmp_path / name

    monkeypatch.setattr("verl.trainer.run.kept_in_memory", memory)
    whole = run("whole", 5)
    for name, save_freq in (("saved", 2), ("unsaved", -1)):
        found = run(name, save_freq, dies_in=4)
        assert trained == [0, 1, 2, 3, 3, 4]
        assert RunDir(found).wished_workers() == 3  # what the user asked for in this command still holds
        lines = [{**line, "training/restarts": 0} for line in computed(found)]
        assert lines == computed(whole) and computed(found)[-1]["training/restarts"] == 1
        assert CheckpointStore(tmp_path / "memory" / name).steps() == [4]
        (event,) = [event for event in RunDir(found).read_events() if event.kind == "restarted"]
        assert event.step is None and "restart 1 of 1" in event.detail
    assert checkpoint_bytes(whole, 5) == checkpoint_bytes(tmp_path / "saved", 5)


def test_what_is_kept_in_memory_goes_with_the_run(tmp_path: Path) -> None:
    own = {"trainer": {"memory_save_freq": 1}, "cluster": {"backend": "ray"}}
    config = tiny_config(tmp_path, "none", own)
    with pytest.raises(KeyboardInterrupt), kept_in_memory(config) as store:
        assert store is not None and store.root.parent == Path(MEMORY) and store.root.stat().st_mode & 0o777 == 0o700
        (store.root / "file").touch()
        raise KeyboardInterrupt
    assert not store.root.exists()
    for off in ({"trainer": {"memory_save_freq": -1}}, {"cluster": {"backend": "inline"}}):
        with kept_in_memory(tiny_config(tmp_path, "none", own, off)) as store:
            assert store is None


def test_what_a_killed_run_kept_in_memory_is_removed_by_its_reaper() -> None:
    """The reaper's parent is this process, whose end it takes the end of its input for."""
    folder = Path(mkdtemp(prefix=f"verl-restart-{os.getpid()}-", dir=MEMORY))
    (folder / "file").touch()
    for last_words, left in ((b".", True), (b"", False)):
        command = [sys.executable, "-I", verl.cluster.reaper.__file__]
        subprocess.run(command, input=last_words, timeout=60, check=True)
        assert folder.exists() == left
