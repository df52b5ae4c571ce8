"""The folder ``checkpoints/`` of a run: complete checkpoints by step, one rename each.

    store = CheckpointStore(run / "checkpoints", keep_last=2)
    store.clean_partial()                            # once, by the run that owns the folder
    with store.begin(step=10) as pending:
        pending.write_state("trainer", {"step": 10, "rng": torch.get_rng_state()})
        worker.save(pending.file("actor/model.safetensors"))
        pending.commit({"consumed_samples": 1280})
    checkpoint = store.open(store.latest())
    state = checkpoint.read_state("trainer")

A checkpoint is written in a hidden directory beside its place, synced, given its manifest, and only
then renamed into place; older ones are removed after that, also by a rename first. So a kill at any
moment leaves every checkpoint complete or absent, and the previous one loadable.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from verl.atomic import PARTIAL, atomic_write, partial_name, sync
from verl.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    check_checksum,
    check_sizes,
    checkpoint_errors,
    read_manifest,
    safe_name,
    write_manifest,
)
from verl.config.names import did_you_mean
from verl.errors import CheckpointError
from verl.protocol import codec
from verl.protocol.codec import Tree
from verl.protocol.files import FileRecord, crc32_of, read_safetensors, write_safetensors

_STEP = re.compile(r"step_([0-9]+)")
_REPLACED = re.compile(r"\.(step_[0-9]+)\.replaced" + re.escape(PARTIAL) + r"[0-9a-f]+")
_PARTIAL_STEP = re.compile(r"\.step_[0-9]+" + re.escape(PARTIAL) + r"[0-9a-f]+")
_METRICS = "metrics"
_log = logging.getLogger(__name__)


def step_name(step: int) -> str:
    """Directory name of a step."""
    return f"step_{step:06d}"


class Checkpoint:
    """A complete checkpoint: its sizes were checked, and its files' checksums as they are asked for."""

    def __init__(self, path: Path, checksums: bool = True) -> None:
        """Raises CheckpointError naming the file that is missing, cut, damaged or foreign."""
        self.path = Path(path)
        self._manifest = read_manifest(self.path)
        self._unchecked = set(self._manifest.files) if checksums else set()
        check_sizes(self.path, self._manifest)

    @property
    def step(self) -> int:
        return self._manifest.step

    @property
    def meta(self) -> dict[str, Any]:
        return self._manifest.meta

    @property
    def files(self) -> dict[str, FileRecord]:
        """Every file by its name inside the checkpoint."""
        return dict(self._manifest.files)

    def __contains__(self, name: str) -> bool:
        return name in self._manifest.files

    def file(self, name: str) -> Path:
        """Path of a file, its checksum verified once. Raises CheckpointError when missing or damaged."""
        name = safe_name(name)
        if name not in self._manifest.files:
            raise CheckpointError(f"the checkpoint has no file '{name}'", str(self.path), "choose another checkpoint")
        if name in self._unchecked:
            check_checksum(self.path, self._manifest, name)
            self._unchecked.discard(name)
        return self.path / name

    def read_state(self, name: str) -> Tree:
        """A tree written by ``PendingCheckpoint.write_state``. Raises CheckpointError."""
        path = self.file(f"{name}.json")
        tensors: dict[str, torch.Tensor] = {}
        with checkpoint_errors("read a state of the checkpoint", path):
            if f"{name}.safetensors" in self._manifest.files:
                tensors, _ = read_safetensors(self.file(f"{name}.safetensors"))
            try:
                value = codec.from_json_bytes(path.read_bytes())
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"a state of the checkpoint is not JSON: {error}", str(path)) from error
            return codec.decode(value, tensors)

    def verify(self) -> None:
        """Check the checksum of every file. Raises CheckpointError naming the first damaged one."""
        for name in self._manifest.files:
            check_checksum(self.path, self._manifest, name)


class PendingCheckpoint:
    """A checkpoint being written. Leaving the ``with`` block without ``commit`` removes it."""

    def __init__(self, store: CheckpointStore, step: int, path: Path) -> None:
        self.store, self.step, self.path = store, step, path
        self._records: dict[str, FileRecord] = {}
        self._open = True

    def file(self, name: str) -> Path:
        """Where to write a file of one's own; its directory is there. Other processes may use the path."""
        name = safe_name(name)
        if name == MANIFEST:
            raise CheckpointError(f"'{MANIFEST}' is written by commit", name, "choose another name")
        self._require_open()
        path = self.path / name
        with self._abort_on_error(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def write_state(self, name: str, tree: Tree) -> None:
        """Write a tree as ``<name>.json``, and ``<name>.safetensors`` when it holds tensors or arrays. Raises
        CheckpointError: something in it cannot be saved, or the disk failed; the pending checkpoint is then removed."""
        path = self.file(f"{name}.json")
        with self._abort_on_error(path):
            value, tensors = codec.encode(tree)
            if tensors:
                weights = path.with_name(path.name.removesuffix(".json") + ".safetensors")
                self._records[safe_name(f"{name}.safetensors")] = write_safetensors(weights, tensors, {"format": "pt"})
            with atomic_write(path) as file:
                file.write(codec.to_json_bytes(value, indent=1))

    def commit(self, meta: dict[str, Any] | None = None, metrics: Mapping[str, float] | None = None) -> Checkpoint:
        """Make it complete: sync every file, write the manifest, rename into place, prune older ones. ``metrics``: of
        the step; the one that the best checkpoint is told by is noted. Raises CheckpointError: it could not be made
        complete; it is removed and the earlier ones are as before."""
        self._require_open()
        with self._abort_on_error(self.path):
            files = self._collect()
            noted = self.store._noted(self.step, metrics or {})
            write_manifest(self.path, Manifest(self.step, (meta or {}) | noted, files))
            for folder, _, _ in os.walk(self.path, topdown=False):
                sync(Path(folder))
            final = self.store._put_in_place(self)
        self._open = False
        self.store._prune(keep=final)
        return Checkpoint(final, checksums=False)

    def abort(self) -> None:
        """Remove what was written; harmless after commit or a first abort."""
        if self._open:
            self._open = False
            shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> PendingCheckpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()
        if isinstance(error, OSError):
            with checkpoint_errors("write the checkpoint", self.path):
                raise error

    def _collect(self) -> dict[str, FileRecord]:
        """Sync and measure every file, those of other writers included."""
        files: dict[str, FileRecord] = {}
        for folder, folders, names in os.walk(self.path):
            folders.sort()
            for name in sorted(names):
                path = Path(folder) / name
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise CheckpointError("a checkpoint may hold regular files only", str(path), "write a real file")
                if PARTIAL in name:
                    raise CheckpointError("a file of the checkpoint is still being written", str(path))
                sync(path)
                relative = path.relative_to(self.path).as_posix()
                known = self._records.get(relative)
                is_known = known is not None and known.size == status.st_size
                files[relative] = known if known and is_known else FileRecord(status.st_size, crc32_of(path))
        return files

    def _require_open(self) -> None:
        if not self._open:
            raise CheckpointError("this checkpoint was already committed or aborted", str(self.path), "begin a new one")

    @contextlib.contextmanager
    def _abort_on_error(self, path: Path) -> Iterator[None]:
        try:
            with checkpoint_errors("write the checkpoint", path):
                yield
        except BaseException:
            self.abort()
            raise


class CheckpointStore:
    """All checkpoints of a run. One process writes; any number may read.

    Args:
        root: the folder; made when the first checkpoint begins.
        keep_last: how many of the newest to keep, at least 1; None keeps all. The one that was just saved is always
            kept. Directories that are not complete checkpoints are never removed.
        best_by: metric by which one more is kept, the best ("max" or "min": ``best_is``); None: none is.
    """

    def __init__(
        self, root: str | Path, keep_last: int | None = None, best_by: str | None = None, best_is: str = "max"
    ) -> None:
        if keep_last is not None and keep_last < 1:
            raise CheckpointError("keep_last must be at least 1, or None to keep all", keep_last)
        self.root, self.keep_last = Path(root), keep_last
        self._best_by, self._choose = best_by, {"max": max, "min": min}[best_is]
        self._missed = False

    def begin(self, step: int) -> PendingCheckpoint:
        """Start the checkpoint of a step. Raises CheckpointError when the folder cannot be written."""
        if step < 0:
            raise CheckpointError("the step of a checkpoint must be at least 0", step)
        partial = partial_name(self.root / step_name(step))
        with checkpoint_errors("begin a checkpoint", self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            partial.mkdir()
        return PendingCheckpoint(self, step, partial)

    def steps(self) -> list[int]:
        """Steps of all complete checkpoints, in numeric order."""
        return sorted(self._complete())

    def latest(self) -> Path | None:
        """The complete checkpoint with the highest step, or None.

        Partial ones, and ones with a missing manifest or a missing or cut file, are passed over.
        """
        complete = self._complete()
        return complete[max(complete)] if complete else None

    def best(self) -> Path | None:
        """The complete checkpoint whose step had the best value of ``best_by``, the earliest of equals; or None."""
        values: dict[Path, float] = {}
        for _, path in sorted(self._complete().items()):
            value = (Checkpoint(path, checksums=False).meta.get(_METRICS) or {}).get(self._best_by)
            if isinstance(value, int | float):
                values[path] = value
        return self._choose(values, key=values.__getitem__) if values else None

    def open(self, which: int | str | Path, checksums: bool = True) -> Checkpoint:
        """A checkpoint by step or path; sizes are verified now, checksums as files are asked for. Raises
        CheckpointError: there is none, or it is not complete; the file at fault is named."""
        if isinstance(which, int):
            complete = self._complete()
            if which not in complete:
                path = self.root / step_name(which)
                if path.exists():
                    return Checkpoint(path, checksums)  # says what is wrong with it
                raise CheckpointError(f"no checkpoint of step {which}", str(self.root), f"steps: {sorted(complete)}")
            which = complete[which]
        return Checkpoint(Path(which), checksums)

    def clean_partial(self) -> list[Path]:
        """Remove what killed saves left; returns what was removed. Only for the run that owns the folder."""
        removed = []
        with checkpoint_errors("clean the checkpoint folder", self.root):
            for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
                replaced = _REPLACED.fullmatch(path.name)
                if replaced and not (self.root / replaced[1]).exists():
                    path.rename(self.root / replaced[1])  # killed between the two renames of _put_in_place
                elif replaced or _PARTIAL_STEP.fullmatch(path.name):
                    shutil.rmtree(path)
                    removed.append(path)
        return removed

    def drop_newer_than(self, step: int) -> list[Path]:
        """Remove complete checkpoints of later steps, when a run goes on from an earlier one."""
        dropped = [path for number, path in sorted(self._complete().items()) if number > step]
        with checkpoint_errors("remove a checkpoint", self.root):
            for path in dropped:
                self._remove(path)
        return dropped

    def _complete(self) -> dict[int, Path]:
        found: dict[int, Path] = {}
        with checkpoint_errors("list the checkpoints", self.root):
            paths = sorted(self.root.iterdir()) if self.root.is_dir() else []
        for path in paths:
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                with contextlib.suppress(CheckpointError):
                    step = int(match[1])
                    if Checkpoint(path, checksums=False).step == step and found.get(step) != self.root / step_name(
                        step
                    ):
                        found[step] = path
        return found

    def _noted(self, step: int, metrics: Mapping[str, float]) -> dict[str, Any]:
        """For the manifest: the metric that the best is told by. Where the step should have it and has not, that is
        told once."""
        name = self._best_by
        if name is None or math.isfinite(metrics.get(name, math.nan)):
            return {} if name is None else {_METRICS: {name: float(metrics[name])}}
        validated = any(other.startswith("val") for other in metrics)
        if name not in metrics and (validated or not name.startswith("val")) and not self._missed:
            self._missed = True
            near = did_you_mean(name, list(metrics))
            _log.warning("trainer.keep_best: step %d has no metric %s. %s(told once)", step, name, near)
        return {}

    def _put_in_place(self, pending: PendingCheckpoint) -> Path:
        """The commit point: one rename, synced. Raises OSError."""
        final = self.root / step_name(pending.step)
        replaced = None
        if final.exists():  # this step was saved before: a resumed run passes it again, or it was damaged
            replaced = partial_name(final).with_name(f".{final.name}.replaced{partial_name(final).suffix}")
            final.rename(replaced)
        try:
            pending.path.rename(final)
        except OSError:
            if replaced:
                replaced.rename(final)
            raise
        sync(self.root)
        if replaced:
            shutil.rmtree(replaced, ignore_errors=True)
        return final

    def _prune(self, keep: Path) -> None:
        if self.keep_last is None:
            return
        try:
            complete, best = self._complete(), self.best()
            for step in sorted(complete)[: -self.keep_last]:
                if complete[step] not in (keep, best):
                    self._remove(complete[step])
        except (OSError, CheckpointError) as error:  # the new one is safe: not a reason to stop the run
            _log.warning("cannot remove old checkpoints in %s: %s", self.root, error)

    def _remove(self, path: Path) -> None:
        doomed = partial_name(path)
        path.rename(doomed)  # first, so that a kill midway leaves no half checkpoint under a good name
        shutil.rmtree(doomed)
