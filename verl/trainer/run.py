"""Wiring of a run: configuration to data, workers and loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.cluster.roles import Roles
from verl.cluster.start import EventLog, require_machine, start_workers
from verl.config import Config, SupervisedConfig, dump_yaml
from verl.config.names import nearest_path
from verl.data.rendering import untemplated
from verl.diagnostics.doctor import AlarmRaised
from verl.errors import CheckpointError, ConfigError, RewardError, VerlError, WorkerDiedError, meant
from verl.run_dir import RunDir, write_atomic
from verl.tracking.names import read_metrics, summarize
from verl.tracking.report import write_report
from verl.tracking.trackers import TrackerContext, build_tracker
from verl.trainer.changes import note_user_code, say_changed_settings
from verl.trainer.inputs import Inputs, write_skipped
from verl.trainer.loop import TrainingLoop
from verl.trainer.restarts import kept_in_memory, newest, require_restart
from verl.trainer.run_models import check_same_start, opened, pinned
from verl.trainer.sampling import Sampler
from verl.trainer.sources import Ahead, AsCompleted, Feed, Now, Source
from verl.trainer.state import TrainerState
from verl.trainer.streaming import Stream
from verl.trainer.timer import StepTimer

if TYPE_CHECKING:
    pass


SOURCES: dict[str, Callable[[Feed], Source]] = {"sync": Now, "one_step_off": Ahead, "async": Stream}


def source_of(feed: Feed) -> Source:
    trainer = feed.config.trainer
    return AsCompleted(feed) if trainer.stream_minibatches else SOURCES[trainer.mode](feed)


class HasStep(Protocol):
    step: int


def train(config: Config, console: Console, reward: Callable[..., Any] | None = None) -> None:
    """Run a training job to its end, going on from its last checkpoint if it has one.

    Everything that can be wrong with the inputs is found before a worker starts.

    Args:
        reward: a reward function of this process, in place of the configuration's; only inline.

    Raises:
        VerlError: what, value and fix.
    """
    require_machine(config)
    config = pinned(config, partial(console.print, soft_wrap=True, markup=False))
    with opened(config) as placed:
        _train(config, placed, console, reward)


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

    What lies in the folder beyond that checkpoint is removed.

    Args:
        again: within the same command, from its own last state, which is here, whatever ``trainer.resume_mode`` says.
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
    run_dir.wishes.unlink(missing_ok=True)
    write_atomic(run_dir.config, dump_yaml(config))
    run_dir.log_event("resumed" if checkpoint else "started", "run", f"step {start} of {total_steps}", start)
    return False, checkpoint


def _train(config: Config, placed: Config, console: Console, reward: Callable[..., Any] | None) -> None:
    """``placed``: with folders in place of checkpoints, for whoever loads a model."""
    inputs = Inputs.load(placed, reward)
    config.total_training_steps(inputs.loader.sampler.size)  # or the data are too few: before there is a folder
    run_dir = RunDir(config.run_dir)
    with run_dir.create().lock(), kept_in_memory(config) as memory:
        store = store_of(config, run_dir)
        restarts = 0
        while True:
            try:
                _attempt(config, placed, inputs, run_dir, store, memory, console, reward, restarts)
                return
            except WorkerDiedError as error:
                last = newest(store, memory)
                require_restart(error, config, last, restarts)
                restarts += 1
                run_dir.log_event(
                    "restarted", "run", f"{error.what}; restart {restarts} of {config.trainer.max_restarts}"
                )
                where = f"the last {'checkpoint' if last is store else 'state in memory'}, step {last.steps()[-1]}"
                console.print(f"{error.what}; starting again from {where}", soft_wrap=True, markup=False)
            inputs = Inputs.load(placed, reward)


def _attempt(
    config: Config,
    placed: Config,
    inputs: Inputs,
    run_dir: RunDir,
    store: CheckpointStore,
    memory: CheckpointStore | None,
    console: Console,
    reward: Callable[..., Any] | None,
    restarts: int,
) -> None:
    """From the last checkpoint (``memory``: where another may be after a restart), or the start, to the end."""
    total_steps = config.total_training_steps(inputs.loader.sampler.size)
    again = newest(store, memory) if restarts else None
    finished, checkpoint = take_up(config, run_dir, store, total_steps, console, again)
    if finished:
        return
    state = TrainerState.fresh(config, inputs.loader)
    write_skipped(run_dir, {"train": inputs.loader.dataset, "val": inputs.validation})
    note_user_code(run_dir, checkpoint.step if checkpoint else 0, console)
    if not restarts:
        _describe(console, config, inputs, total_steps)
    timer = StepTimer()
    resumed_from = checkpoint.step if checkpoint else None
    tracked = TrackerContext(run_dir, total_steps, resumed_from, console, timer, config.trainer.log_val_generations)

    def log(kind: str, subject: str, detail: str) -> None:
        run_dir.log_event(kind, subject, detail, state.step)

    with (
        stop_noted(run_dir, state),
        build_tracker(config.trainer.logger, tracked) as tracker,
        _started(placed, console, reward, timer, log, run_dir.wished_workers) as roles,
    ):
        sampler = Sampler(config.training_sampling, config, inputs.tokenizer)
        source = source_of(Feed(config, roles, state, sampler, timer, total_steps))
        loop = TrainingLoop(
            config=config,
            total_steps=total_steps,
            roles=roles,
            state=state,
            source=source,
            val_sampler=Sampler(config.validation_sampling, config, inputs.tokenizer),
            validation=inputs.validation,
            run_dir=run_dir,
            store=store,
            tracker=tracker,
            timer=timer,
            restarts=restarts,
            memory=memory,
        )
        if checkpoint is not None:
            source.load_state_dict(state.restore(checkpoint, roles, config.trainer.mode))
            console.print(f"going on from {checkpoint.path}", soft_wrap=True)
        with _while_training():
            loop.fit()
    run_dir.log_event("finished", "run", f"step {total_steps}", total_steps)
    write_report(run_dir)


@contextmanager
def _while_training() -> Iterator[None]:
    try:
        yield
    except VerlError as error:
        # Every input had been found good. Only the user's reward function shows its faults this late.
        error.bad_input = isinstance(error, RewardError) and error.bad_input
        if isinstance(error, WorkerDiedError):
            error.while_training = True
        raise


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


@contextmanager
def stop_noted(run_dir: RunDir, state: HasStep) -> Iterator[None]:
    """Whatever ends the run early is written into its events."""
    try:
        yield
    except BaseException as error:
        # Rich makes an exit of a pipe that nobody reads any more (verl train ... | head).
        unread = isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError)
        reason = BrokenPipeError if unread else type(meant(error))
        run_dir.log_event("stopped", "run", reason.__name__, state.step)
        if isinstance(error, AlarmRaised):
            with suppress(VerlError):
                write_report(run_dir)  # the next thing to look at
        raise


@contextmanager
def _started(
    config: Config,
    console: Console,
    reward: Callable[..., Any] | None,
    timer: StepTimer,
    log: EventLog,
    wish: Callable[[], int | None],
) -> Iterator[Roles]:
    """The workers; a display sees their start as a part of its own, which belongs to no step."""
    with ExitStack() as stack:
        with timer("start"):
            report = partial(console.print, soft_wrap=True)
            roles = stack.enter_context(start_workers(config, report, reward, log, wish))
        timer.flush()
        yield roles


def find_checkpoint(config: Config | SupervisedConfig, store: CheckpointStore, run_dir: RunDir) -> Checkpoint | None:
    """Where ``trainer.resume_mode`` says to go on from; None for a fresh start.

    A run that was killed before its first checkpoint starts anew.

    Raises:
        ConfigError: a fresh start would overwrite another run.
        CheckpointError: the named checkpoint cannot be used.
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
    if latest is None and mode == "auto" and config.trainer.save_freq <= 0 and _trained_steps(run_dir):
        raise CheckpointError(
            "the run folder holds a run without a checkpoint to go on from (trainer.save_freq was -1)",
            str(run_dir.path),
            "choose another trainer.experiment_name, or remove the folder to start anew",
        )
    return store.open(latest) if latest is not None else None


def _trained_steps(run_dir: RunDir) -> int:
    return summarize(read_metrics(run_dir)[0]).trained_steps if run_dir.metrics.exists() else 0


def _describe(console: Console, config: Config, inputs: Inputs, total_steps: int) -> None:
    rows = config.data.train_batch_size * config.rollout.n
    training = inputs.loader.dataset
    dropped = f", {training.dropped} too long and left out" if training.dropped else ""
    if training.skipped:
        dropped += f", {len(training.skipped)} that cannot be used and are listed in skipped.jsonl"
    plain = " of plain text, without the model's chat template" * untemplated(training.exemplars, inputs.tokenizer)
    held_out = f", {len(inputs.validation)} held-out" if inputs.validation is not None else ""
    console.print(
        f"{config.algorithm.estimator} on {config.model.path}: {len(training)} prompts{plain}{dropped}{held_out}; "
        f"{total_steps} step{'s'[: total_steps > 1]} of {config.data.train_batch_size} prompts x {config.rollout.n} = "
        f"{rows} responses; "
        f"run folder {config.run_dir}",
        soft_wrap=True,
    )
