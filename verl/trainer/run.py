"""Wiring of a run: configuration to data, workers and loop."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.cluster.start import start_workers
from verl.config import Config, dump_yaml
from verl.data.loader import PromptDataset, PromptLoader
from verl.errors import CheckpointError, ConfigError
from verl.models.loading import load_config, load_tokenizer
from verl.rewards.scorer import RuleScorer
from verl.run_dir import RunDir, write_atomic
from verl.tracking.report import write_report
from verl.tracking.summary import RunSummary, read_metrics, summarize
from verl.tracking.trackers import build_tracker, check_loggers
from verl.trainer.loop import Trainer
from verl.trainer.sampling import Sampler
from verl.trainer.state import TrainerState

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Inputs:
    """What a run is made of, read and checked before any worker starts."""

    tokenizer: PreTrainedTokenizerBase
    loader: PromptLoader
    validation: PromptDataset | None

    @classmethod
    def load(cls, config: Config) -> Inputs:
        """Raises VerlError for whatever is wrong with logger names, model, data files or reward function."""
        check_loggers(config.trainer.logger)
        data = config.data
        check_positions(config)
        tokenizer = load_tokenizer(config.model.tokenizer_path or config.model.path, config.model.trust_remote_code)
        training = PromptDataset.load(data.train_files, data, tokenizer, data.train_max_samples)
        validation = None
        if data.val_files:
            validation = PromptDataset.load(data.val_files, data, tokenizer, data.val_max_samples, "data.val_files")
        scorer = RuleScorer(config.reward)
        scorer.check_sources(row.data_source for dataset in (training, validation) if dataset for row in dataset.rows)
        loader = PromptLoader(training, data.train_batch_size, data.shuffle, config.data_seed, data.drop_last)
        return cls(tokenizer, loader, validation)


def train(config: Config, console: Console) -> RunSummary:
    """Run a training job to its end, going on from its last checkpoint if it has one.

    Everything that can be wrong with the inputs is found before a worker starts.

    Raises:
        VerlError: what, value and fix.
    """
    inputs = Inputs.load(config)
    total_steps = config.total_training_steps(len(inputs.loader.dataset))
    run_dir = RunDir(config.run_dir)
    with run_dir.create().lock():
        store = CheckpointStore(run_dir.checkpoints, config.trainer.keep_last)
        checkpoint = find_checkpoint(config, store, run_dir)
        if checkpoint is not None and checkpoint.step >= total_steps:
            console.print(
                f"This run is finished: step {checkpoint.step} of {total_steps}. To train further raise "
                f"trainer.total_training_steps; to train anew choose another trainer.experiment_name "
                f"or remove {run_dir.path}",
                soft_wrap=True,
            )
            if not run_dir.report.exists():  # the run was killed between its last checkpoint and its report
                write_report(run_dir)
            return summarize(read_metrics(run_dir)[0])
        start = checkpoint.step if checkpoint else 0
        run_dir.truncate_after(start if checkpoint else -1)
        store.clean_partial()
        store.drop_newer_than(start)
        write_atomic(run_dir.config, dump_yaml(config))
        run_dir.log_event("resumed" if checkpoint else "started", "run", f"step {start} of {total_steps}", start)
        _describe(console, config, inputs, total_steps)
        with (
            start_workers(config, lambda line: console.print(line, soft_wrap=True)) as roles,
            build_tracker(config.trainer.logger, run_dir, total_steps, start if checkpoint else None) as tracker,
        ):
            trainer = Trainer(
                config=config,
                total_steps=total_steps,
                roles=roles,
                state=TrainerState.fresh(config, inputs.loader),
                train_sampler=Sampler(config.training_sampling, config, inputs.tokenizer),
                val_sampler=Sampler(config.validation_sampling, config, inputs.tokenizer),
                validation=inputs.validation,
                run_dir=run_dir,
                store=store,
                tracker=tracker,
                console=console,
            )
            if checkpoint is not None:
                trainer.state.restore(checkpoint, roles)
                console.print(f"going on from {checkpoint.path}", soft_wrap=True)
            try:
                trainer.fit()
            except BaseException as error:
                run_dir.log_event("stopped", "run", type(error).__name__, trainer.state.step)
                raise
        run_dir.log_event("finished", "run", f"step {total_steps}", total_steps)
        write_report(run_dir)
        return summarize(read_metrics(run_dir)[0])


def check_positions(config: Config) -> None:
    """Refuse sequences that are longer than the model (or the critic's model) has positions.

    Raises:
        ConfigError: they are.
        ModelError: no such model.
    """
    longest = config.data.max_prompt_length + config.data.max_response_length
    for path in dict.fromkeys([config.model.path] + [config.critic_model_path] * config.uses_critic):
        model = load_config(path, config.model.trust_remote_code).get_text_config()
        limit = getattr(model, "max_position_embeddings", None)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"data.max_prompt_length + data.max_response_length is more than the {limit} positions of {path}",
                f"{longest} tokens",
                f"lower one of them until their sum is at most {limit}",
            )


def find_checkpoint(config: Config, store: CheckpointStore, run_dir: RunDir) -> Checkpoint | None:
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
    held_out = f", {len(inputs.validation)} held-out" if inputs.validation is not None else ""
    console.print(
        f"{config.algorithm.adv_estimator} on {config.model.path}: {len(training)} prompts{dropped}{held_out}; "
        f"{total_steps} steps of {config.data.train_batch_size} prompts x {config.rollout.n} = {rows} responses; "
        f"run folder {config.run_dir}",
        soft_wrap=True,
    )
