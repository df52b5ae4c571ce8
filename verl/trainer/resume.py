"""Going on: from a run's last checkpoint, within one command after a worker has died, and behind a step's Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from rich.console import Console

from verl import user_code
from verl.checkpoint.export import check_same_start
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.config import Config, SupervisedConfig, dump_yaml, load_config, load_supervised
from verl.config.explain import difference
from verl.config.keys import one_line, using
from verl.config.names import nearest_path
from verl.errors import CheckpointError, ConfigError, VerlError, WorkerDiedError
from verl.run_dir import RunDir, write_atomic
from verl.tracking.names import read_metrics, summarize
from verl.tracking.report import write_report

SHOWN = 6  # settings
WIDEST = 40  # characters of a value
MEMORY = "/dev/shm"  # files here lie in main memory, and outlive the processes that wrote them


def store_of(config: Config | SupervisedConfig, run_dir: RunDir) -> CheckpointStore:
    trainer = config.trainer
    return CheckpointStore(run_dir.checkpoints, trainer.keep_last, trainer.keep_best.metric, trainer.keep_best.mode)


def take_up(
    config: Config | SupervisedConfig,
    run_dir: RunDir,
    store: CheckpointStore,
    total_steps: int,
    console: Console,
    again: CheckpointStore | None = None,
) -> tuple[bool, Checkpoint | None]:
    """Whether the run is finished already, which is said, and the checkpoint that it goes on from.

    What lies in the folder beyond that checkpoint is removed. ``again``: within the same command, from its own last
    state, which is here, whatever ``trainer.resume_mode`` says.
    """
    run_dir.clean_temporary()
    store.clean_partial()  # which may bring back a checkpoint
    latest = again.latest() if again is not None else None
    checkpoint = store.open(latest) if latest is not None else find_checkpoint(config, store, run_dir)
    if checkpoint is not None and again is None:
        say_changed_settings(config, run_dir, console)
    if checkpoint is not None and checkpoint.step >= total_steps:
        say_finished(console, run_dir, checkpoint.step, total_steps)
        return True, checkpoint
    if checkpoint is not None:
        check_same_start(checkpoint, config)
    start = checkpoint.step if checkpoint else 0
    run_dir.truncate_after(start if checkpoint else -1)
    store.drop_newer_than(start)
    if again is None:
        run_dir.wishes.unlink(missing_ok=True)  # of an earlier command
    write_atomic(run_dir.config, dump_yaml(config))
    run_dir.log_event("resumed" if checkpoint else "started", "run", f"step {start} of {total_steps}", start)
    return False, checkpoint


def find_checkpoint(config: Config | SupervisedConfig, store: CheckpointStore, run_dir: RunDir) -> Checkpoint | None:
    """Where ``trainer.resume_mode`` says to go on from; None for a fresh start.

    A run that was killed before its first checkpoint starts anew. Raises ConfigError: a fresh start would overwrite
    another run; CheckpointError: the named checkpoint cannot be used.
    """
    mode = config.trainer.resume_mode
    if mode == "resume_path":
        path = config.trainer.resume_from_path
        assert path is not None
        if not Path(path).expanduser().is_dir():
            near = nearest_path(Path(path).expanduser())
            fix = f"did you mean {near}?" if near else "give a folder such as runs/NAME/checkpoints/step_000010"
            raise ConfigError("trainer.resume_from_path names no folder", path, fix)
        return store.open(path)
    latest = store.latest()
    if mode == "disable" and (latest is not None or run_dir.metrics.exists()):
        raise ConfigError(
            "trainer.resume_mode=disable, and the run folder already holds a run",
            str(run_dir.path),
            "choose another trainer.experiment_name, set trainer.resume_mode=auto to go on, or remove the folder",
        )
    trained = mode == "auto" and run_dir.metrics.exists() and summarize(read_metrics(run_dir)[0]).trained_steps
    if latest is None and trained and config.trainer.save_freq <= 0:
        raise CheckpointError(
            "the run folder holds a run without a checkpoint to go on from (trainer.save_freq was -1)",
            str(run_dir.path),
            "choose another trainer.experiment_name, or remove the folder to start anew",
        )
    return store.open(latest) if latest is not None else None


def say_finished(console: Console, run_dir: RunDir, step: int, total_steps: int) -> None:
    console.print(
        f"This run is finished: step {step} of {total_steps}. To train further raise "
        f"trainer.total_training_steps; to train anew choose another trainer.experiment_name "
        f"or remove {run_dir.path}",
        soft_wrap=True,
    )
    # It may have been killed between its last checkpoint and its report.
    if [event.kind for event in run_dir.read_events()[-1:]] != ["finished"]:
        run_dir.log_event("finished", "run", f"step {step}", step)
    write_report(run_dir)


# --- what is another than when the run last started: it is said, never refused ---------------------------------------


def say_changed_settings(config: Config | SupervisedConfig, run_dir: RunDir, console: Console) -> None:
    """Against the configuration in the folder; nothing where there is none, or one that this version cannot read."""
    try:
        if isinstance(config, Config):
            before: Config | SupervisedConfig = load_config(run_dir.config).config
        else:
            before = load_supervised(type(config), run_dir.config)[0]
    except VerlError:
        return
    with using(type(config)):
        found = difference(before, config)
    if found:
        texts = [f"{key} {_short(then)} -> {_short(now)}" for key, (then, now) in found.items()]
        more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        text = f"note: since this run last started: {', '.join(texts[:SHOWN])}{more}"
        console.print(text, soft_wrap=True, markup=False)


def note_user_code(run_dir: RunDir, step: int, console: Console) -> None:
    """Write the files that were loaded into the events, and say which have changed."""
    before = {event.subject: event.detail for event in run_dir.read_events() if event.kind == "user_code"}
    for file, digest in user_code.LOADED.items():
        if before.get(file, f"sha256 {digest}") != f"sha256 {digest}":
            console.print(f"note: since this run last started {file} has changed", soft_wrap=True, markup=False)
        run_dir.log_event("user_code", file, f"sha256 {digest}", step)
    user_code.LOADED.clear()  # a later run of this process may have others


def _short(value: object) -> str:
    text = one_line(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


# --- after the death of a worker of actor, critic, reference or reward ------------------------------------------------


@contextmanager
def kept_in_memory(config: Config) -> Iterator[CheckpointStore | None]:
    """Where ``trainer.memory_save_freq`` keeps the run's last state; None: nowhere. It is gone when the run ends.

    A run that is killed leaves it to its reaper (:mod:`verl.cluster.reaper`), which knows the folder by its name.
    """
    trainer = config.trainer
    if trainer.memory_save_freq <= 0 or not trainer.max_restarts or config.cluster.backend == "inline":
        yield None
        return
    with TemporaryDirectory(prefix=f"verl-restart-{os.getpid()}-", dir=MEMORY, ignore_cleanup_errors=True) as folder:
        yield CheckpointStore(folder, keep_last=1)


def newest(disk: CheckpointStore, memory: CheckpointStore | None) -> CheckpointStore:
    """Of the two the one with the later step."""
    return max(filter(None, (disk, memory)), key=lambda store: store.steps()[-1:])


def require_restart(error: WorkerDiedError, config: Config, store: CheckpointStore, restarts: int) -> None:
    """Raises the error where starting again cannot help, or is not wanted any more."""
    if not error.while_training:
        raise error
    if store.latest() is None:
        keys = "trainer.save_freq or trainer.memory_save_freq"
        error.fix = f"there is no checkpoint to go on from: set {keys}, then a run restarts by itself"
        raise error
    if restarts >= config.trainer.max_restarts:
        if restarts:
            error.fix = f"{error.fix}; {restarts} restart{'s'[: restarts > 1]} did not help (trainer.max_restarts)"
        raise error


# --- Ctrl-C and SIGTERM that wait until a step is whole (trainer.save_on_interrupt) -----------------------------------

TOLD = b"\nfinishing this step, to save a checkpoint; once more: stop at once, without\n"


@contextmanager
def held(wanted: bool) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C or SIGTERM within the block acts behind it; a second one at once, as if it were the first.
    Yields whether one is waiting, for whoever asks at the end of the block."""
    arrived: list[int] = []
    if not wanted or threading.current_thread() is not threading.main_thread():  # no other one can set handlers
        yield lambda: False
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Who started the process may have it ignore one (a shell does so with Ctrl-C of what runs in the background).
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def wait(number: int, frame: FrameType | None) -> None:
        arrived.append(number)
        restore()
        os.write(2, TOLD)  # a print may be under way already

    for number in before:
        signal.signal(number, wait)
    try:
        yield lambda: bool(arrived)
    finally:
        restore()
        if arrived:
            signal.raise_signal(arrived[0])
