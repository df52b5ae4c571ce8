"""The checkpoint store: complete or absent, the newest by number, the old kept until the new is safe."""

from __future__ import annotations

import builtins
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file

import verl
from verl import atomic
from verl.atomic import PARTIAL
from verl.checkpoint import store as store_module
from verl.checkpoint.manifest import MANIFEST
from verl.checkpoint.store import Checkpoint, CheckpointStore, PendingCheckpoint
from verl.errors import CheckpointError
from verl.protocol import files
from verl.protocol.columns import same
from verl.protocol.files import write_safetensors

STATE = {
    "step": 10,
    "optimizer": {"state": {0: {"exp_avg": torch.arange(300.0), "step": torch.tensor(3.0)}}, "betas": (0.9, 0.999)},
    "rng": torch.get_rng_state(),
    "loss": float("inf"),
}


def save(store: CheckpointStore, step: int, scale: float = 1.0) -> Checkpoint:
    with store.begin(step) as pending:
        pending.write_state("trainer", {**STATE, "step": step})
        write_safetensors(pending.file("actor/model.safetensors"), {"w": torch.full((50,), scale * step)})
        return pending.commit({"consumed_samples": 128 * step})


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_state_meta_and_files_come_back(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "runs" / "checkpoints")
    assert store.latest() is None and store.steps() == [] and store.clean_partial() == []
    committed = save(store, 10)
    assert committed.path == tmp_path / "runs" / "checkpoints" / "step_000010" == store.latest()
    checkpoint = store.open(10)
    assert (checkpoint.step, checkpoint.meta) == (10, {"consumed_samples": 1280})
    assert same(checkpoint.read_state("trainer"), STATE)
    assert load_file(checkpoint.file("actor/model.safetensors"))["w"][0] == 10
    assert set(checkpoint.files) == {"actor/model.safetensors", "trainer.json", "trainer.safetensors"}
    assert "trainer.json" in checkpoint and "critic.json" not in checkpoint
    checkpoint.verify()
    assert names(store.root) == {"step_000010"}
    manifest = json.loads((checkpoint.path / MANIFEST).read_text())
    assert manifest["step"] == 10 and manifest["verl"] == verl.__version__
    assert manifest["files"]["trainer.json"]["size"] == (checkpoint.path / "trainer.json").stat().st_size


def test_b139_order_is_numeric_and_strangers_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (9, 10, 100):
        save(store, step).path.rename(tmp_path / f"step_{step}")
    for stranger in ("step_best", "step_abc", "step_7"):
        (tmp_path / stranger).mkdir()
    (tmp_path / "step_8").write_text("a file")
    assert store.steps() == [9, 10, 100] and store.latest() == tmp_path / "step_100"
    assert store.open(9).step == 9
    keeping = CheckpointStore(tmp_path, keep_last=2)
    save(keeping, 101).path.rename(tmp_path / "step_101")
    assert keeping.steps() == [100, 101]
    assert names(tmp_path) == {"step_100", "step_101", "step_best", "step_abc", "step_7", "step_8"}


def test_pruning_keeps_what_was_just_saved(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 20)
    save(store, 5)  # resumed from an earlier one
    assert store.steps() == [5, 20]
    assert store.drop_newer_than(5) == [tmp_path / "step_000020"]
    assert store.steps() == [5] and names(tmp_path) == {"step_000005"}
    for wrong in (0, -1):
        with pytest.raises(CheckpointError, match="keep_last"):
            CheckpointStore(tmp_path, keep_last=wrong)
    everything = CheckpointStore(tmp_path, keep_last=None)
    for step in range(6, 10):
        save(everything, step)
    assert everything.steps() == [5, 6, 7, 8, 9]


@pytest.mark.parametrize("damage", ["no manifest", "empty manifest", "cut file", "missing file", "other step"])
def test_b137_incomplete_ones_are_passed_over(tmp_path: Path, damage: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 9)
    newest = save(store, 10).path
    if damage == "no manifest":
        (newest / MANIFEST).unlink()
    elif damage == "empty manifest":
        (newest / MANIFEST).write_bytes(b"")
    elif damage == "cut file":
        os.truncate(newest / "actor/model.safetensors", 100)
    elif damage == "missing file":
        (newest / "trainer.safetensors").unlink()
    else:
        newest.rename(tmp_path / "step_000011")
    assert store.latest() == tmp_path / "step_000009" and store.steps() == [9]
    if damage != "other step":
        with pytest.raises(CheckpointError) as caught:
            store.open(10)
        assert str(newest) in str(caught.value)
    saved = save(store, 10, scale=2.0)  # the resumed run passes the step again
    assert load_file(saved.file("actor/model.safetensors"))["w"][0] == 20
    assert store.steps() == [9, 10]


def test_checksums_find_a_changed_byte(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    path = save(store, 1).path / "trainer.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    checkpoint = store.open(1)
    checkpoint.file("actor/model.safetensors")
    for read in (lambda: checkpoint.read_state("trainer"), checkpoint.verify):
        with pytest.raises(CheckpointError, match=r"trainer\.safetensors") as caught:
            read()
        assert "checksum" in str(caught.value)
    store.open(1, checksums=False).read_state("trainer")
    manifest = path.parent / MANIFEST
    manifest.write_bytes(manifest.read_bytes().replace(b'"step": 1', b'"step": 2'))
    with pytest.raises(CheckpointError, match="checksum"):
        Checkpoint(path.parent)


def test_missing_things_are_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    with pytest.raises(CheckpointError, match="no checkpoint of step 2"):
        store.open(2)
    with pytest.raises(CheckpointError, match="nowhere"):
        store.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"critic\.json"):
        store.open(1).read_state("critic")


def test_leaving_without_commit_removes_it(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with store.begin(1) as pending:
        pending.write_state("trainer", STATE)
    assert names(tmp_path) == set()
    with pytest.raises(KeyboardInterrupt), store.begin(1) as pending:
        raise KeyboardInterrupt
    assert names(tmp_path) == set()
    with pytest.raises(CheckpointError, match="committed or aborted"):
        pending.write_state("trainer", STATE)
    pending.abort()


def test_names_stay_inside(tmp_path: Path) -> None:
    pending = CheckpointStore(tmp_path / "c").begin(1)
    for name in ("../x", "/etc/x", "", ".", "a/../../x", MANIFEST):
        with pytest.raises(CheckpointError):
            pending.file(name)
    (pending.path / "link").symlink_to("/etc/hosts")
    with pytest.raises(CheckpointError, match="regular files"):
        pending.commit()
    assert names(tmp_path / "c") == set()


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    with pytest.raises(CheckpointError, match="'sampler/fn'"), store.begin(1) as pending:
        pending.write_state("trainer", {"sampler": {"fn": print}})
    with pytest.raises(CheckpointError, match="tensors"), store.begin(1) as pending:
        pending.commit({"w": torch.ones(1)})
    assert names(tmp_path) == set()


def test_clean_partial(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    store.begin(2).write_state("trainer", STATE)
    for foreign in (".hidden", "step_3.partial-x", ".step_x.partial-12"):
        (tmp_path / foreign).mkdir()
    assert store.steps() == [1]
    assert len(store.clean_partial()) == 1
    assert names(tmp_path) == {"step_000001", ".hidden", "step_3.partial-x", ".step_x.partial-12"}


def test_a_kill_while_replacing_a_step_restores_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)
    pending = store.begin(1)
    pending.write_state("trainer", {"second": True})

    class Killed(BaseException):
        pass

    def killed(path: Path, target: Path) -> Path:
        if path == pending.path:
            raise Killed
        os.rename(path, target)
        return target

    monkeypatch.setattr(Path, "rename", killed)
    monkeypatch.setattr(pending, "abort", lambda: None)
    with pytest.raises(Killed):
        pending.commit()
    monkeypatch.undo()
    assert store.steps() == []
    store.clean_partial()
    assert same(store.open(1).read_state("trainer"), {**STATE, "step": 1}) and names(tmp_path) == {"step_000001"}
    assert save(store, 1, scale=3.0).step == 1 and names(tmp_path) == {"step_000001"}


class FullDisk:
    """Makes writing fail with ENOSPC after a number of bytes, counted over all files."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def open(self, path: Path, mode: str = "r", **options: int) -> io.FileIO | BinaryIO:
        if "x" not in mode:
            return builtins.open(path, "rb", **options)
        disk = self

        class Limited(io.FileIO):
            def write(self, data: Any, /) -> int:
                if len(data) > disk.left:
                    super().write(data[: disk.left])
                    disk.left = 0
                    raise OSError(28, "No space left on device")
                disk.left -= len(data)
                return super().write(data)

        return Limited(path, mode)


def test_b138_b145_disk_full_at_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)
    probe = FullDisk(10**9)
    monkeypatch.setattr(atomic, "open", probe.open, raising=False)
    save(CheckpointStore(tmp_path / "probe"), 2)
    total = 10**9 - probe.left
    shutil.rmtree(tmp_path / "probe")
    assert total > 6000
    for limit in {0, 1, total - 1, *range(0, total, 499)}:
        monkeypatch.setattr(atomic, "open", FullDisk(limit).open, raising=False)
        with pytest.raises(CheckpointError, match="No space left") as caught:
            save(store, 2)
        assert str(tmp_path) in str(caught.value) and "free space" in str(caught.value)
        assert names(tmp_path) == {"step_000001"}
    monkeypatch.undo()
    assert same(store.open(1).read_state("trainer"), {**STATE, "step": 1})
    save(store, 2)
    assert store.steps() == [2]


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_failing_system_calls_leave_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "rename")), fail)
    for step in (1, 2):
        with pytest.raises(CheckpointError, match="Read-only file system") as caught:
            save(store, step)
        assert "make the folder writable" in str(caught.value)
    monkeypatch.undo()
    assert store.steps() == [1] and names(tmp_path) == {"step_000001"}


def test_a_failed_replacement_puts_the_old_one_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path)
    save(store, 1)

    def rename(path: Path, target: Path) -> None:
        if PARTIAL in path.name and "replaced" not in path.name:
            raise OSError(5, "Input/output error")
        os.rename(path, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(CheckpointError, match="Input/output error"):
        save(store, 1, scale=2.0)
    monkeypatch.undo()
    assert load_file(store.open(1).file("actor/model.safetensors"))["w"][0] == 1
    assert names(tmp_path) == {"step_000001"}


def test_a_folder_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="cannot begin a checkpoint") as caught:
        CheckpointStore(tmp_path / "file").begin(1)
    assert str(tmp_path / "file") in str(caught.value)
    read_only = tmp_path / "read_only"
    read_only.mkdir(mode=0o500)
    if os.geteuid() == 0:  # root may write everywhere

        def refuse(path: Path, *_: object, **__: object) -> None:
            raise PermissionError(13, "Permission denied", str(path))

        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(CheckpointError, match="Permission denied"):
        CheckpointStore(read_only).begin(1)


def test_an_old_one_that_cannot_be_removed_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def fail(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(store_module.shutil, "rmtree", fail)
    assert save(store, 2).step == 2
    assert store.latest() == tmp_path / "step_000002" and "busy" in caplog.text


class Marker:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable, tuple]:
        return (os.mkdir, (str(self.path),))


@pytest.mark.parametrize("name", ["trainer.json", "trainer.safetensors", MANIFEST])
def test_b158_a_pickle_in_place_of_a_file_runs_nothing(tmp_path: Path, name: str) -> None:
    marker, store = tmp_path / "marker", CheckpointStore(tmp_path / "c")
    path = save(store, 1).path
    manifest = json.loads((path / MANIFEST).read_text())
    content = pickle.dumps(Marker(marker))
    for made in (content, None):
        if made is None:
            torch.save(Marker(marker), path / name)
        else:
            (path / name).write_bytes(made)
        if name != MANIFEST:  # an attacker would make the manifest agree
            entry = {"size": (path / name).stat().st_size, "crc32": f"{files.crc32_of(path / name):08x}"}
            from verl.checkpoint.manifest import _crc

            body = {key: value for key, value in manifest.items() if key != "crc32"}
            body["files"] = {**body["files"], name: entry}
            (path / MANIFEST).write_text(json.dumps({**body, "crc32": _crc(body)}))
        with pytest.raises(CheckpointError) as caught:
            Checkpoint(path).read_state("trainer")
        assert name in str(caught.value)
    assert not marker.exists()
    pickle.loads(content)
    assert marker.exists()  # the marker would have shown


def test_a_manifest_cannot_point_outside(tmp_path: Path) -> None:
    from verl.checkpoint.manifest import _crc

    path = save(CheckpointStore(tmp_path), 1).path
    body = json.loads((path / MANIFEST).read_text())
    del body["crc32"]
    body["files"]["../../outside"] = {"size": 0, "crc32": "00000000"}
    (path / MANIFEST).write_text(json.dumps({**body, "crc32": _crc(body)}))
    with pytest.raises(CheckpointError, match="outside"):
        Checkpoint(path)


def test_pending_is_usable_by_others(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    pending: PendingCheckpoint = store.begin(3)
    (pending.file("actor/hf/config.json")).write_text("{}")
    checkpoint = pending.commit()
    assert checkpoint.file("actor/hf/config.json").read_text() == "{}" and checkpoint.meta == {}
    half = store.begin(4)
    (half.path / ".w.partial-00").write_bytes(b"")
    with pytest.raises(CheckpointError, match="still being written"):
        half.commit()
