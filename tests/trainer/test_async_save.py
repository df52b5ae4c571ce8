"""``trainer.async_save``: the same checkpoints, written while training goes on."""

from __future__ import annotations

import errno
import io
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from stage_cases import tiny_config
from verl_process import assert_same_run, metric_lines

from verl.checkpoint.store import CheckpointStore
from verl.cluster import worker
from verl.config import Config
from verl.errors import CheckpointError
from verl.trainer import saving
from verl.trainer.run import train

STEPS = 4
MAIN = threading.main_thread()


def config_in(folder: Path, model: Path, name: str, async_save: bool) -> Config:
    trainer = {
        "default_local_dir": str(folder / name),
        "total_training_steps": STEPS,
        "save_freq": 2,
        "async_save": async_save,
        "keep_last": None,
        "val_before_train": True,
    }
    data = {"val_files": str(folder / "train.jsonl"), "val_max_samples": 2}
    return tiny_config(folder, model, {"trainer": trainer, "data": data, "cluster": {"threads": 1}})


def go(config: Config) -> None:
    train(config, Console(file=io.StringIO()))


def test_the_same_bytes_written_beside_training(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first checkpoint's writer waits until the third step is written down: training does not wait for it."""
    go(config_in(tmp_path, tiny_model_dir, "sync", False))
    real, waited = worker.trained_writer, []

    def patient(*arguments: Any, **settings: Any) -> Any:
        write = real(*arguments, **settings)

        def later() -> None:
            if not waited:
                waited.append(threading.current_thread() is not MAIN)
                for _ in range(2000):
                    if any(line["step"] == 3 for line in metric_lines(tmp_path / "async")):
                        waited.append(True)
                        break
                    threading.Event().wait(0.01)
            write()

        return later

    monkeypatch.setattr(worker, "trained_writer", patient)
    go(config_in(tmp_path, tiny_model_dir, "async", True))
    assert waited == [True, True]
    assert_same_run(tmp_path / "sync", tmp_path / "async", STEPS)
    for step in (2, STEPS):
        for file in (tmp_path / "sync" / "checkpoints" / f"step_{step:06d}").rglob("*"):
            if file.is_file() and file.name != "manifest.json":
                assert file.read_bytes() == Path(str(file).replace("/sync/", "/async/")).read_bytes(), file
    assert any("timing_s/save_checkpoint" in line for line in metric_lines(tmp_path / "async"))


def test_errors_surface_and_the_earlier_checkpoint_stays(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = worker.trained_writer, []

    def failing(*arguments: Any, **settings: Any) -> Any:
        write = real(*arguments, **settings)
        calls.append(arguments[0])

        def full() -> None:
            raise OSError(errno.ENOSPC, "No space left on device", str(calls[-1]))

        return write if len(calls) == 1 else full

    with monkeypatch.context() as patch:
        patch.setattr(worker, "trained_writer", failing)
        with pytest.raises(CheckpointError, match="No space left on device") as caught:
            go(config_in(tmp_path, tiny_model_dir, "run", True))
    assert "free space" in str(caught.value.fix)
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    assert store.steps() == [2]
    assert [path.name for path in store.root.iterdir()] == ["step_000002"]
    events = [json.loads(line)["kind"] for line in (tmp_path / "run" / "events.log").read_text().splitlines()]
    assert events[-1] == "stopped"
    go(config_in(tmp_path, tiny_model_dir, "run", True))
    go(config_in(tmp_path, tiny_model_dir, "sync", False))
    assert_same_run(tmp_path / "sync", tmp_path / "run", STEPS)


def test_one_at_a_time(tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path, tiny_model_dir, "run", True)
    trainer = config.trainer.model_copy(update={"save_freq": 1})
    under_way: list[int] = []
    real_begin, real_put = CheckpointStore.begin, CheckpointStore._put_in_place

    def begin(store: CheckpointStore, step: int) -> Any:
        assert not under_way
        under_way.append(step)
        return real_begin(store, step)

    def put(store: CheckpointStore, pending: Any) -> Path:
        under_way.remove(pending.step)
        return real_put(store, pending)

    monkeypatch.setattr(CheckpointStore, "begin", begin)
    monkeypatch.setattr(CheckpointStore, "_put_in_place", put)
    monkeypatch.setattr(saving, "POLL_SECONDS", 0.001)
    go(config.model_copy(update={"trainer": trainer}))
    assert CheckpointStore(tmp_path / "run" / "checkpoints").steps() == list(range(1, STEPS + 1))
