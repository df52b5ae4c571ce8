"""The folder of one run: every file by name, its lock, its events, and cutting it back for a resume.

Several processes may read a run's folder at any time (the report, a watcher); one run at a time writes it, guarded by
:meth:`RunDir.lock`. Whole files appear atomically (:func:`write_atomic`); line files (``metrics.jsonl``,
``events.log``) grow by one complete line a write, and their readers skip a torn line.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import re
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verl.atomic import PARTIAL, atomic_write, partial_name
from verl.errors import VerlError
from verl.json_lines import append_line, clean_text, json_line, parse_line, read_jsonl

logger = logging.getLogger(__name__)

_STEP_NAME = re.compile(r"step_(\d+)")
_TEMPORARY = re.compile(r"\..+" + re.escape(PARTIAL) + "[0-9a-f]+")


# --- writing --------------------------------------------------------------------------------------------------------


def write_atomic(path: Path | str, text: str) -> None:
    """Writes ``text`` (UTF-8) so that readers see the old file or the whole new one, also after a kill or power loss.

    Raises:
        VerlError: the file cannot be written (the old one, if any, is untouched).
    """
    _write_bytes_atomic(Path(path), clean_text(text).encode())


def _write_bytes_atomic(path: Path, content: bytes) -> None:
    try:
        with atomic_write(path) as file:
            file.write(content)
    except OSError as error:
        raise VerlError(
            f"cannot write {path.name}", f"{path} ({error.strerror})", "free space there, or choose another folder"
        ) from error


# --- the folder -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EventRecord:
    """One line of ``events.log``: something that happened to the run, apart from its metrics."""

    time: float  # seconds since 1970
    step: int | None  # the training step under way, None outside the loop
    kind: str  # what happened: "resumed", "worker_died", "tracker_failed", ...
    subject: str = ""  # whom it happened to: a worker, a file, a metric
    detail: Any = ""  # a sentence or JSON values


class RunDir:
    """Every file of a run by name.

    ::

        config.yaml  metrics.jsonl  timeline.jsonl  samples/step_000010.jsonl  checkpoints/step_000010/  report.html
        events.log  tensorboard/, dumps/, profile/ (if asked for)  .lock
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __repr__(self) -> str:
        return f"RunDir({str(self.path)!r})"

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def timeline(self) -> Path:
        """Which part of each step ran when, and what each worker did: one line a step, seconds from its beginning."""
        return self.path / "timeline.jsonl"

    @property
    def profile_dir(self) -> Path:
        """Traces of profiled steps, and the timeline of all processes that ``verl profile`` writes."""
        return self.path / "profile"

    def profile(self, step: int) -> Path:
        return self.profile_dir / f"step_{step:06d}"

    @property
    def samples_dir(self) -> Path:
        return self.path / "samples"

    def samples(self, step: int) -> Path:
        return self.samples_dir / f"step_{step:06d}.jsonl"

    def dump(self, step: int) -> Path:
        """The whole batch of responses that a step trains on (``trainer.dump_steps``)."""
        return self.path / "dumps" / f"step_{step:06d}.dataproto"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step:06d}"

    @property
    def weights(self) -> Path:
        """Published weights, or where they meet who sends and receives them, while a run goes on that does so."""
        return self.path / "weights"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def events(self) -> Path:
        return self.path / "events.log"

    @property
    def skipped(self) -> Path:
        """Rows of the data that could not be used: file, row, reason."""
        return self.path / "skipped.jsonl"

    @property
    def wishes(self) -> Path:
        """What its user asks of a run that is under way (``verl scale``): a JSON object."""
        return self.path / "wishes.json"

    def wished_workers(self) -> int | None:
        """Rollout workers that the user asks for; None: nobody has."""
        try:
            wish = json.loads(self.wishes.read_bytes())["rollout_workers"]
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return wish if isinstance(wish, int) and wish > 0 else None

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def lock_file(self) -> Path:
        return self.path / ".lock"

    def sample_steps(self) -> list[int]:
        """Steps that have a sample file, in numeric order."""
        if not self.samples_dir.is_dir():
            return []
        matches = (_STEP_NAME.fullmatch(path.stem) for path in self.samples_dir.glob("step_*.jsonl"))
        return sorted(int(match.group(1)) for match in matches if match)

    def create(self) -> RunDir:
        """Makes the folder (also when it exists) and proves that it can be written.

        Raises:
            VerlError: it cannot be made or written.
        """
        probe = partial_name(self.path / "probe")
        try:
            self.samples_dir.mkdir(parents=True, exist_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            probe.write_bytes(b"probe")
        except OSError as error:
            raise VerlError(
                "the run folder cannot be written",
                f"{self.path.absolute()} ({error.strerror})",
                "choose another with trainer.default_local_dir=FOLDER, or change its permissions",
            ) from error
        finally:
            with contextlib.suppress(OSError):
                probe.unlink()
        return self

    def lock(self) -> RunLock:
        """Takes the folder for this process; see :class:`RunLock`. Raises VerlError while another run holds it."""
        return RunLock(self)

    def is_locked(self) -> bool:
        """Whether a run holds the folder at this moment, as far as this machine can see."""
        try:
            descriptor = os.open(self.lock_file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two who ask do not see each other
            return False
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)

    def lock_holder(self) -> dict[str, Any]:
        """``pid, host, since`` of the last run that held the folder; empty where nobody ever did."""
        return next(iter(read_jsonl(self.lock_file)[0]), {})

    # --- events

    def log_event(self, kind: str, subject: str = "", detail: Any = "", step: int | None = None) -> EventRecord:
        """Appends one event. A log that cannot be written is reported through ``logging``, it stops nothing."""
        record = EventRecord(round(time.time(), 3), step, kind, subject, detail)
        try:
            append_line(self.events, json_line(asdict(record)))
        except OSError as error:
            logger.warning("cannot write %s (%s); event: %s", self.events, error.strerror, record)
        return record

    def read_events(self) -> list[EventRecord]:
        """All events in the order written; torn and foreign lines are skipped."""
        events = []
        for line in read_jsonl(self.events)[0]:
            when, step = line.get("time"), line.get("step")
            if not isinstance(when, int | float) or not isinstance(line.get("kind"), str):
                continue
            step = step if isinstance(step, int) else None
            events.append(EventRecord(when, step, line["kind"], str(line.get("subject", "")), line.get("detail", "")))
        return events

    # --- resume

    def truncate_after(self, step: int) -> None:
        """Cuts metrics and samples back to ``step`` (included), as if the run had been stopped right after it.

        Torn lines go too; ``-1`` clears both. Events stay: they tell what happened, also to the steps that are done
        again. Call it with the lock held.
        """
        for file in (self.metrics, self.timeline):
            self._truncate_lines(file, step)
        for path in self.samples_dir.glob("step_*.jsonl"):
            match = _STEP_NAME.fullmatch(path.stem)
            if match and int(match.group(1)) > step:
                path.unlink()

    def clean_temporary(self) -> None:
        """Removes the temporary files of a killed writer. Call it with the lock held."""
        for folder in (self.path, self.samples_dir, self.path / "dumps"):
            for path in folder.glob(".*"):
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)

    def _truncate_lines(self, file: Path, step: int) -> None:
        if not file.exists():
            return
        content = file.read_bytes()
        kept = b"".join(line + b"\n" for line in content.split(b"\n") if _is_step_up_to(parse_line(line), step))
        if kept != content:
            _write_bytes_atomic(file, kept)


def _is_step_up_to(record: dict[str, Any] | None, step: int) -> bool:
    found = None if record is None else record.get("step")
    return isinstance(found, int) and not isinstance(found, bool) and found <= step


# --- the lock -------------------------------------------------------------------------------------------------------

_held_locks: set[RunLock] = set()


class RunLock:
    """The exclusive right to write a run's folder: ``with run_dir.lock(): ...``, or :meth:`release`.

    A kernel lock (flock) on ``.lock``: gone with the process, however it dies. The file names the holder for the
    message that a second run gets; it stays behind, unlocked.

    Raises:
        VerlError: another run holds the folder, or it cannot be locked.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._descriptor = -1
        try:
            descriptor = os.open(run_dir.lock_file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            raise _lock_error(run_dir, error) from error
        try:
            _take_lock(descriptor)
            holder = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json_line(holder).encode() + b"\n", 0)
        except OSError as error:
            holder_text = os.pread(descriptor, 1000, 0)
            os.close(descriptor)
            if isinstance(error, BlockingIOError):
                raise _in_use_error(run_dir, parse_line(holder_text)) from None
            raise _lock_error(run_dir, error) from error
        self._descriptor = descriptor
        _held_locks.add(self)

    def release(self) -> None:
        """Gives the folder back; harmless when done twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            _held_locks.discard(self)

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _take_lock(descriptor: int) -> None:
    """Raises BlockingIOError where another run holds it; somebody who only asks lets go at once."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.1)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _close_in_child() -> None:
    # A forked child would keep the lock alive after its parent's death; closing its copy does not unlock the parent's.
    for lock in list(_held_locks):
        lock.release()


os.register_at_fork(after_in_child=_close_in_child)


def _lock_error(run_dir: RunDir, error: OSError) -> VerlError:
    return VerlError(
        "the run folder cannot be locked",
        f"{run_dir.lock_file.absolute()} ({error.strerror})",
        "choose a writable folder on a local disk with trainer.default_local_dir=FOLDER",
    )


def _in_use_error(run_dir: RunDir, holder: dict[str, Any] | None) -> VerlError:
    who = f"process {holder.get('pid')} on {holder.get('host')} since {holder.get('since')}" if holder else "unknown"
    return VerlError(
        "another run is writing this run folder",
        f"{run_dir.path.absolute()} ({who})",
        "wait for it or stop it, or choose another trainer.experiment_name or trainer.default_local_dir",
    )
