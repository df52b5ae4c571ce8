"""The training loop: rollout, process, update, and what is written down about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from verl.algorithms.metric import merge_all, reduce_metrics
from verl.algorithms.schedules import moving_values
from verl.checkpoint.store import CheckpointStore
from verl.cluster.roles import Roles
from verl.config import Config
from verl.data.dataset import PromptDataset
from verl.data.loader import iterate_once
from verl.diagnostics.doctor import Alarms
from verl.json_lines import append_line, json_line
from verl.models.memory import held_memory
from verl.protocol import DataProto
from verl.run_dir import RunDir
from verl.tracking.report import write_report
from verl.tracking.samples import Split, rows_from_batch, write_samples
from verl.tracking.trackers import Tracker
from verl.trainer.advantages import Metrics
from verl.trainer.group_metrics import batch_metrics, cost_metrics, graded_rows, staleness_metrics, validation_metrics
from verl.trainer.resume import held
from verl.trainer.sampling import Sampler, join
from verl.trainer.saving import Saver
from verl.trainer.sources import Source
from verl.trainer.stages import process, update
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer


@dataclass
class TrainingLoop:
    """A run that is ready to go."""

    config: Config
    total_steps: int  # training steps of the whole run
    roles: Roles
    state: TrainerState  # where the run is; :meth:`fit` goes on from there
    source: Source  # gives each step its batch
    val_sampler: Sampler  # how responses are sampled in validation
    validation: PromptDataset | None  # held-out prompts; None: no validation
    run_dir: RunDir
    store: CheckpointStore
    tracker: Tracker
    timer: StepTimer
    restarts: int = 0  # after the death of a worker, within this command
    memory: CheckpointStore | None = None  # where the last state is kept for another one, if anywhere

    def __post_init__(self) -> None:
        trainer, parts = self.config.trainer, (self.roles, self.state, self.source)
        self._saver = Saver(self.config, self.store, *parts, background=trainer.async_save)
        self._memory = None if self.memory is None else Saver(self.config, self.memory, *parts)

    def fit(self) -> None:
        """Train to ``total_steps``; validation before the first step, every ``test_freq`` steps and at the end."""
        try:
            self._fit()
        finally:
            self._saver.abandon()

    def _fit(self) -> None:
        config, state, roles, timer = self.config, self.state, self.roles, self.timer
        alarms = Alarms(config, self.run_dir)
        self.roles.rollout.publish(state.step)
        if state.step == 0 and config.trainer.val_before_train and self.validation is not None:
            with timer("testing"):
                metrics = self.evaluate()
            self.tracker.log(0, metrics | timer.flush())
        self._engines = roles.rollout.stats()
        while state.step < self.total_steps:
            with held(config.trainer.save_on_interrupt) as interrupted:
                numbers = self._train_step(alarms)
                if interrupted():
                    self._save_whole(numbers)

    def _train_step(self, alarms: Alarms) -> dict[str, float]:
        """The next step with all that is due behind it; its metrics."""
        config, state, roles, timer = self.config, self.state, self.roles, self.timer
        with timer("step"), self.profiled():
            now = state.scheduled(config, self.total_steps)
            kl_coef = state.kl_coef.value(state.step, self.total_steps)
            rates = state.learning_rates(config, self.total_steps)
            parts: list[DataProto] = []
            measures: list[Metrics] = []
            for part in self.source.parts():
                self.dump([*parts, part])
                part, found = process(part, roles, now, kl_coef, timer, state.shaper)
                trained = update(part, roles, now, rates, state.step, timer, sum(map(len, parts)))
                parts.append(part)
                measures += [found, trained]
            batch, measured = self.joined(parts), merge_all(measures)
            self.source.settle()
            with timer("update_weights"):
                roles.rollout.publish(state.step + 1)
            self.source.published()
        measured |= staleness_metrics(batch, state.step)
        numbers = reduce_metrics(batch_metrics(batch, config.data.max_prompt_length) | measured)
        state.observe(numbers, len(batch))
        numbers |= state.cap.advance()
        self.write_samples("train", [batch])
        state.step += 1
        last = state.step == self.total_steps
        if self._saver.busy:
            with timer("save_checkpoint"):
                self._saver.advance()
        validated: dict[str, float] = {}
        if self.validation is not None and (last or due(state.step, config.trainer.test_freq)):
            with timer("testing"):
                validated = self.evaluate()
        timeline = json_line(timer.timeline(state.step, roles.spans()))
        self.tracker.attempt("timeline", partial(append_line, self.run_dir.timeline, timeline), state.step)
        timings = timer.flush()
        progress = {"training/global_step": state.step, "training/epoch": state.loader.epoch}
        progress["training/restarts"] = self.restarts
        numbers |= moving_values(now.actor)
        costs = cost_metrics(batch, timings, roles.memory_gb() | own_memory(), roles.rollout.apart)
        before, self._engines = self._engines, roles.rollout.stats()
        sampling = roles.rollout.metrics() | self._engines.metrics(before)
        numbers |= costs | timings | sampling | progress | validated
        self.tracker.log(state.step, numbers)
        # After the step is written down: a run killed in between does it again, and no step loses its line. The
        # seconds are logged with the next step.
        if config.trainer.save_freq > 0 and (last or due(state.step, config.trainer.save_freq)):
            with timer("save_checkpoint"):
                self._saver.save(numbers)
        if self._memory is not None and not last and due(state.step, config.trainer.memory_save_freq):
            with timer("save_checkpoint"):
                self._memory.save(numbers)
        if last:
            self._saver.finish()
        if validated:
            self.tracker.attempt("report", lambda: write_report(self.run_dir), state.step)
        if not last:
            alarms.heed(state.step, numbers, partial(self._save_whole, numbers))
        return numbers

    def _save_whole(self, metrics: Mapping[str, float]) -> None:
        self._saver.save(metrics)
        self._saver.finish()

    def joined(self, parts: list[DataProto]) -> DataProto:
        return parts[0] if len(parts) == 1 else join(parts, self.val_sampler.tokenizer.pad_token_id)

    def dump(self, parts: list[DataProto]) -> None:
        """Keep the batch of the step to come, as far as it is sampled, where ``trainer.dump_steps`` wants it."""
        step, wanted = self.state.step + 1, self.config.trainer.dump_steps
        if step in wanted if isinstance(wanted, list) else due(step, wanted):
            path = self.run_dir.dump(step)
            path.parent.mkdir(exist_ok=True)
            sampled = [part.select(list(parts[-1].tensors)) for part in parts]
            self.tracker.attempt("dump", lambda: self.joined(sampled).save_to_disk(path), step)

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Around the step to come, where ``profiler`` wants it."""
        step, profiler = self.state.step + 1, self.config.profiler
        if profiler.tool == "none" or step not in profiler.steps:
            yield
            return
        self.roles.profile(str(self.run_dir.profile(step).resolve()))
        yield
        self.roles.profile(None)

    def evaluate(self) -> dict[str, float]:
        """Validation metrics; samples are written and shown to the trackers."""
        assert self.validation is not None
        size = self.config.data.val_batch_size
        metrics, batches = evaluate(self.validation, size, self.roles, self.val_sampler, self.state.step)
        self.write_samples("val", batches)
        return metrics

    def write_samples(self, split: Split, batches: list[DataProto]) -> None:
        """Sample rows of a stage into the step's file: of the training step just done, or of a validation."""
        tokenizer = self.val_sampler.tokenizer
        rows = [row for batch in batches for row in rows_from_batch(batch, split, tokenizer.decode)]
        step = self.state.step + (split == "train")
        self.tracker.attempt("samples", lambda: write_samples(self.run_dir, step, split, rows), step)
        self.tracker.samples(step, split, rows)


def evaluate(
    dataset: PromptDataset, batch_size: int | None, roles: Roles, sampler: Sampler, pass_number: int
) -> tuple[dict[str, float], list[DataProto]]:
    """Every held-out prompt once, with validation's sampling: metrics, and the scored batches."""
    batches = []
    for prompts in iterate_once(dataset, batch_size, "val", pass_number):
        batch = sampler.assemble(prompts, roles.rollout.generate(sampler.requests(prompts), prompts))
        batches.append(batch.union(roles.scorer.score(batch)))
    return validation_metrics([row for batch in batches for row in graded_rows(batch)], sampler.plan.n), batches


def own_memory() -> dict[str, float]:
    """GiB that the controller holds; where it is also the only worker, what that holds."""
    return {"controller": held_memory() / 2**30}


def due(step: int, frequency: int) -> bool:
    return frequency > 0 and step % frequency == 0
