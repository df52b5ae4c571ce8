"""Supervised training from configuration to report: ``verl sft`` and ``verl reward-model train``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from rich.console import Console
from transformers import PreTrainedModel

from verl.algorithms.metric import Metric, merge_all, reduce_metrics, spread_metrics
from verl.algorithms.schedules import learning_rate
from verl.checkpoint.export import opened, pinned
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.cluster.threads import process_threads
from verl.cluster.worker import choose_device
from verl.config import RewardModelTrainingConfig, SupervisedConfig
from verl.data.examples import ExampleDataset, load_conversations, load_pairs
from verl.data.loader import PromptLoader, iterate_once
from verl.data.samplers import EpochSampler
from verl.diagnostics.checks_health import skipped_updates
from verl.errors import ConfigError, VerlError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import (
    load_causal_lm,
    load_classifier,
    load_config,
    load_tokenizer,
    resolve_model,
    save_hf_files,
    stop_ids,
)
from verl.models.policy import PolicyModel, ValueModel, enable_checkpointing
from verl.protocol import DataProto
from verl.run_dir import RunDir
from verl.tracking.names import read_metrics, summarize
from verl.tracking.report import write_report
from verl.tracking.trackers import Tracker, TrackerContext, build_tracker, check_loggers
from verl.trainer.inputs import write_skipped
from verl.trainer.loop import due, own_memory
from verl.trainer.resume import held, store_of, take_up
from verl.trainer.run import stop_noted
from verl.trainer.state import STATE_NAME, learnt_nothing
from verl.trainer.timer import StepTimer
from verl.training.micro_batches import Limits
from verl.training.optimizer import MasterWeights, Optimizer
from verl.training.supervised import SupervisedModel

FOLDER = "actor"  # of the trained model in a checkpoint, where every command looks for it
VALIDATION_EXAMPLES = 256  # examples of one piece of a validation


@dataclass
class SupervisedLoop:
    """A run that is ready to go; :meth:`fit` goes on from ``step``. ``held``: how many steps learnt nothing."""

    config: SupervisedConfig
    start_model: str  # what the configuration calls the model that training started from
    total_steps: int
    hf_model: PreTrainedModel
    model: SupervisedModel
    loader: PromptLoader
    validation: ExampleDataset | None
    run_dir: RunDir
    store: CheckpointStore
    tracker: Tracker
    timer: StepTimer
    step: int = 0
    held: int = 0

    def fit(self) -> None:
        """Train to ``total_steps``; validation before the first step, every ``test_freq`` steps and at the end."""
        trainer, timer = self.config.trainer, self.timer
        if self.step == 0 and trainer.val_before_train and self.validation is not None:
            self.tracker.log(0, self.evaluate() | timer.flush())
        while self.step < self.total_steps:
            with held(trainer.save_on_interrupt) as interrupted:
                numbers = self._train_step()
                if interrupted() and self.step not in self.store.steps():
                    self.save(numbers)

    def _train_step(self) -> dict[str, float]:
        """The next step with all that is due behind it; its metrics."""
        trainer, timer = self.config.trainer, self.timer
        with timer("step"):
            batch = self.loader.next_batch()
            rate = learning_rate(self.step - self.held, self.total_steps, self.config.optim)
            with timer("update"):
                metrics = self.model.update(batch, rate)
        self.step += 1
        last = self.step == self.total_steps
        measured = {}
        if self.validation is not None and (last or due(self.step, trainer.test_freq)):
            measured = self.evaluate()
        timings = timer.flush()
        numbers = reduce_metrics(metrics | _sizes(batch)) | _speed(batch, timings)
        self.held += learnt_nothing(numbers, "train")
        progress = {"training/global_step": self.step, "training/epoch": self.loader.epoch}
        numbers |= timings | progress | measured
        self.tracker.log(self.step, numbers)
        # After the step is written down, as in RL training: no step loses its line.
        if trainer.save_freq > 0 and (last or due(self.step, trainer.save_freq)):
            with timer("save_checkpoint"):
                self.save(numbers)
        if measured:
            self.tracker.attempt("report", lambda: write_report(self.run_dir), self.step)
        return numbers

    def evaluate(self) -> dict[str, float]:
        """Metrics over every held-out example."""
        assert self.validation is not None
        found: list[dict[str, Metric]] = []
        with self.timer("testing"):
            for batch in iterate_once(self.validation, VALIDATION_EXAMPLES):  # type: ignore[arg-type]
                found.append(self.model.evaluate(batch))
        return reduce_metrics(merge_all(found))

    def save(self, metrics: Mapping[str, float]) -> None:
        """Write ``checkpoints/step_…``: complete, or not there at all."""
        config = self.config
        with self.store.begin(self.step) as pending:
            self.model.save(pending.path / FOLDER)
            save_hf_files(resolve_model(config.model.path), pending.path / FOLDER / "hf")
            if config.model.tokenizer_path:
                load_tokenizer(*config.tokenizer).save_pretrained(pending.path / FOLDER / "hf")
            if isinstance(config, RewardModelTrainingConfig):
                self.hf_model.config.save_pretrained(pending.path / FOLDER / "hf")
            state = {"step": self.step, "held": self.held, "loader": self.loader.state_dict()}
            pending.write_state(STATE_NAME, state)
            pending.commit({"model": self.start_model}, metrics)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on where the checkpoint was."""
        checkpoint.verify()
        self.model.load(checkpoint.path / FOLDER)
        tree = cast(dict[str, Any], checkpoint.read_state(STATE_NAME))
        self.loader.load_state_dict(tree["loader"])
        self.step, self.held = tree["step"], tree.get("held", 0)


def _sizes(batch: DataProto) -> dict[str, Metric]:
    tensors = batch.tensors
    width = tensors["prompts"].shape[1]
    return {
        **spread_metrics("response_length", tensors["attention_mask"][:, width:].sum(1).double()),
        **spread_metrics("prompt_length", tensors["attention_mask"][:, :width].sum(1).double()),
    }


def _speed(batch: DataProto, timings: dict[str, float]) -> dict[str, float]:
    tokens, seconds = float(batch.tensors["attention_mask"].sum()), timings["timing_s/step"]
    speed = {"perf/total_num_tokens": tokens, "perf/time_per_step": seconds, "perf/throughput": tokens / seconds}
    return speed | {f"perf/memory_gb/{name}": value for name, value in own_memory().items()}


def train_supervised(config: SupervisedConfig, console: Console) -> None:
    """Run supervised training to its end, going on from its last checkpoint if it has one. Raises VerlError: what,
    value and fix; everything that can be wrong with the inputs is found before the first step."""
    check_loggers(config.trainer.logger)
    torch.set_num_threads(process_threads(config))
    config = pinned(config, partial(console.print, soft_wrap=True, markup=False))
    with opened(config) as placed:
        _train(config, placed, console)
    console.print(closing_words(RunDir(config.run_dir)), soft_wrap=True, markup=False)


def _train(config: SupervisedConfig, placed: SupervisedConfig, console: Console) -> None:
    """``placed``: with folders in place of checkpoints, for whoever loads a model."""
    training, validation = _load_data(placed)
    batch_size = config.data.train_batch_size
    sampler = EpochSampler(len(training), config.trainer.seed, config.data.shuffle)
    loader = PromptLoader(training, batch_size, sampler)  # type: ignore[arg-type]
    total_steps = config.trainer.total_training_steps or loader.steps_per_epoch * config.trainer.total_epochs
    run_dir = RunDir(config.run_dir)
    with run_dir.create().lock():
        store = store_of(config, run_dir)
        finished, checkpoint = take_up(config, run_dir, store, total_steps, console)
        if finished:
            return
        write_skipped(run_dir, {"train": training, "val": validation})
        _describe(console, config, training, validation, total_steps)
        timer = StepTimer()
        hf_model, model = load_model(placed)
        tracked = TrackerContext(run_dir, total_steps, checkpoint.step if checkpoint else None, console, timer, 0)
        tracker = build_tracker(config.trainer.logger, tracked)
        loop = SupervisedLoop(
            placed, config.model.path, total_steps, hf_model, model, loader, validation, run_dir, store, tracker, timer
        )
        with stop_noted(run_dir, loop), tracker:
            if checkpoint is not None:
                loop.restore(checkpoint)
                console.print(f"going on from {checkpoint.path}", soft_wrap=True)
            try:
                loop.fit()
            except VerlError as error:
                error.bad_input = False  # every input had been found good
                raise
        run_dir.log_event("finished", "run", f"step {total_steps}", total_steps)
        write_report(run_dir)


def _load_data(config: SupervisedConfig) -> tuple[ExampleDataset, ExampleDataset | None]:
    pairs = isinstance(config, RewardModelTrainingConfig)
    model = load_config(config.model.path, config.model.trust_remote_code, classifier=pairs).get_text_config()
    data: Any = config.data
    limit = getattr(model, "max_position_embeddings", None)
    if limit is not None and data.max_length > limit:
        raise ConfigError(
            f"data.max_length is more than the {limit} positions of {config.model.path}",
            f"{data.max_length} tokens",
            f"set data.max_length to at most {limit}",
        )
    tokenizer = load_tokenizer(*config.tokenizer)
    ends = stop_ids(config.model.path, tokenizer)
    load = load_pairs if pairs else load_conversations
    training = load(data.train_files, data, tokenizer, ends)
    validation = load(data.val_files, data, tokenizer, ends, "data.val_files") if data.val_files else None
    return training, validation


def load_model(config: SupervisedConfig) -> tuple[PreTrainedModel, SupervisedModel]:
    """The model with its loss, and the same as transformers knows it."""
    settings, device = config.model, choose_device(config)
    pairs = isinstance(config, RewardModelTrainingConfig)
    given = (settings.path, torch.float32, settings.trust_remote_code, ATTENTION_NAME)
    hf_model = (load_classifier(*given, new_head=True) if pairs else load_causal_lm(*given)).to(device)
    if settings.enable_gradient_checkpointing:
        enable_checkpointing(hf_model)
    in_float32 = "score." if pairs else "-"  # the score head, whatever the rest computes in
    weights = MasterWeights(
        hf_model, getattr(torch, settings.dtype), lambda name: not name.startswith(in_float32), settings.fp16
    )
    optimizer = Optimizer("train", weights, config.optim, config.optim.grad_clip)
    tokens = config.data.max_token_len_per_gpu
    # Of a pair, two tokens more are counted than are computed: the places of its scores.
    limits = Limits(None, tokens + 2 * pairs, share_prompts=pairs)
    if pairs:
        # What a folder of a sequence-classification model says of itself, and what transformers needs to read it.
        hf_model.config.architectures = [type(hf_model).__name__]
        hf_model.config.pad_token_id = load_tokenizer(*config.tokenizer).pad_token_id
    return hf_model, SupervisedModel(
        ValueModel(hf_model) if pairs else PolicyModel(hf_model), limits, weights, optimizer
    )


def _describe(
    console: Console,
    config: SupervisedConfig,
    training: ExampleDataset,
    validation: ExampleDataset | None,
    total_steps: int,
) -> None:
    what = "reward model from" if isinstance(config, RewardModelTrainingConfig) else "sft of"
    noun = "pairs" if training.per_example == 2 else "examples"
    notes = [
        f", {count} {words}"
        for count, words in (
            (training.dropped, "too long and left out"),
            (training.truncated, "cut to data.max_length"),
            (len(training.skipped), "that cannot be used and are listed in skipped.jsonl"),
        )
        if count
    ]
    held_out = f", {len(validation)} held-out" if validation is not None else ""
    console.print(
        f"{what} {config.model.path}: {len(training)} {noun}{''.join(notes)}{held_out}; "
        f"{total_steps} step{'s'[: total_steps > 1]} of {config.data.train_batch_size} {noun}; "
        f"run folder {config.run_dir}",
        soft_wrap=True,
    )


def closing_words(run_dir: RunDir) -> str:
    """How the run went, in a few lines."""
    steps = read_metrics(run_dir)[0]
    s, lines = summarize(steps), []
    if s.loss_first is not None:
        first, last = (f"first {s.window} steps", f"last {s.window}") if s.window > 1 else ("first step", "last")
        lines.append(f"loss: {s.loss_first:.4f} ({first}) -> {s.loss_last:.4f} ({last})")
    if s.val_first is not None and s.val_last_step != s.val_first_step:
        ends = f"(step {s.val_first_step}) -> {s.val_last:.4f} (step {s.val_last_step})"
        lines.append(f"held-out: {s.val_first:.4f} {ends}")
    return "\n".join([*lines, *skipped_updates(steps), f"report: {run_dir.report}"])
