"""Wiring of a run: configuration to data, workers and loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from rich.console import Console

from verl.checkpoint.export import opened, pinned
from verl.checkpoint.store import CheckpointStore
from verl.cluster.start import require_machine, start_workers
from verl.config import Config
from verl.data.rendering import untemplated
from verl.diagnostics.doctor import AlarmRaised
from verl.errors import RewardError, VerlError, WorkerDiedError, meant
from verl.run_dir import RunDir
from verl.tracking.report import write_report
from verl.tracking.trackers import TrackerContext, build_tracker
from verl.trainer.inputs import Inputs, write_skipped
from verl.trainer.loop import TrainingLoop
from verl.trainer.resume import kept_in_memory, newest, note_user_code, require_restart, store_of, take_up
from verl.trainer.sampling import Sampler
from verl.trainer.sources import Ahead, AsCompleted, Feed, Now, Source, Stream
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer

SOURCES: dict[str, Callable[[Feed], Source]] = {"sync": Now, "one_step_off": Ahead, "async": Stream}


def source_of(feed: Feed) -> Source:
    trainer = feed.config.trainer
    return AsCompleted(feed) if trainer.stream_minibatches else SOURCES[trainer.mode](feed)


class HasStep(Protocol):
    step: int


def train(config: Config, console: Console, reward: Callable[..., Any] | None = None) -> None:
    """Run a training job to its end, going on from its last checkpoint if it has one.

    Everything that can be wrong with the inputs is found before a worker starts. ``reward``: a reward function of this
    process, in place of the configuration's; only inline. Raises VerlError: what, value and fix.
    """
    require_machine(config)
    config = pinned(config, partial(console.print, soft_wrap=True, markup=False))
    with opened(config) as placed:
        _train(config, placed, console, reward)


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

    with stop_noted(run_dir, state), build_tracker(config.trainer.logger, tracked) as tracker, ExitStack() as workers:
        with timer("start"):  # for a display; it belongs to no step
            report = partial(console.print, soft_wrap=True)
            roles = workers.enter_context(start_workers(placed, report, reward, log, run_dir.wished_workers))
        timer.flush()
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
