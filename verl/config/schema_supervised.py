"""Configurations of supervised training: ``verl sft`` and ``verl reward-model train``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from verl.config.base import Section, Unit, field, in_stage, part
from verl.config.problems import Problem, raise_problems
from verl.config.schema_data import ModelConfig
from verl.config.schema_roles import OptimConfig
from verl.config.schema_run import TrainerConfig
from verl.config.units import Files, FreeDict, Number, Share, StringList, Tokens

LOADER = in_stage("the loader of examples")

Examples = Annotated[int, Unit("examples")]
_READING = "start: reading the data files"


class SupervisedDataConfig(Section):
    """Examples, and how they are batched."""

    acts_in: ClassVar[str] = _READING

    train_files: Files
    """Training files (parquet, jsonl, json, csv, arrow), patterns or folders: one or a list."""
    val_files: StringList = field([], "Held-out files, as train_files; empty: no validation takes place.")
    train_batch_size: Examples = field(256, "Examples in one optimizer step.", ge=1, **LOADER)
    max_length: Tokens = field(1024, "Longest example, prompt and response together; longer ones: truncation.", ge=1)
    truncation: Literal["error", "left", "right", "drop"] = "error"
    """A longer example stops the run (error), loses tokens on that side, or is left out and counted (drop)."""
    max_token_len_per_gpu: Tokens = Field(16384, ge=1, **in_stage("update: packing"))
    """Most tokens of one micro-batch; decides memory and speed, never the result."""
    shuffle: bool = field(True, "Draw examples in a seeded random order, new in every epoch.", **LOADER)
    trust_remote_code: bool = Field(False, **in_stage("start: loading the tokenizer"))
    """Run Python code that comes with the tokenizer."""
    chat_template_kwargs: FreeDict = field({}, "Passed on to the tokenizer's chat template.")
    max_samples: Examples | None = field(None, "Use only so many training rows, the first ones; null: all.", ge=1)
    max_skipped_fraction: Share = Field(0.01, ge=0, le=1)
    """Share of the rows that may be left out as unusable (listed in skipped.jsonl) before the run stops."""


class SftDataConfig(SupervisedDataConfig):
    """Conversations to imitate: a column of messages, or a prompt and its response."""

    messages_key: str | None = None
    """Column with whole conversations (lists of messages); the assistant's turns are trained. null: messages or
    conversation, where the files have it."""
    prompt_key: str | None = None
    """Column with the prompt (text or messages). null: the first of prompt, question, instruction, input, query,
    problem that the files have."""
    response_key: str | None = None
    """Column with the response (text, or messages). null: the first of response, completion, answer, output, solution
    that the files have."""


class PairDataConfig(SupervisedDataConfig):
    """Preference pairs: the better and the worse answer to one prompt."""

    chosen_key: str = field("chosen", "Column with the better answer: text, or a list of messages.", min_length=1)
    rejected_key: str = field("rejected", "Column with the worse answer, as chosen_key.", min_length=1)
    prompt_key: str | None = None
    """Column with the prompt (text or messages) that both answer. null: prompt or question, where the files have it;
    else chosen and rejected are whole conversations."""
    margin_key: str | None = None
    """Column with the least difference of the two scores, a number; null: 0 for every pair."""


class SupervisedOptimConfig(OptimConfig):
    """AdamW, its learning-rate schedule (in optimizer steps) and gradient clipping."""

    lr: Number = field(1e-5, "Peak learning rate.", ge=0)
    grad_clip: Number = field(1.0, "Largest gradient norm of one optimizer step.", gt=0)


class LocalProcessConfig(Section):
    """Supervised training runs in the process that was started."""

    acts_in: ClassVar[str] = "start: the process"

    threads: Annotated[int, Unit("threads")] | None = field(None, "CPU threads; null: all cores.", ge=1)


class SupervisedConfig(Section):
    """One run of supervised training."""

    acts_in: ClassVar[str] = "everywhere"

    data: SupervisedDataConfig
    model: ModelConfig
    optim: SupervisedOptimConfig = part(SupervisedOptimConfig)
    trainer: TrainerConfig = part(TrainerConfig)
    cluster: LocalProcessConfig = part(LocalProcessConfig)

    @model_validator(mode="after")
    def _rules_between_fields(self) -> Self:
        raise_problems(list(self._problems()))
        return self

    def _problems(self) -> Iterator[Problem]:
        data = self.data
        if data.max_token_len_per_gpu < data.max_length:
            what = "data.max_token_len_per_gpu is smaller than the longest example, data.max_length; both count tokens"
            fix = f"set data.max_token_len_per_gpu to at least {data.max_length}"
            yield Problem(what, f"{data.max_token_len_per_gpu} tokens < {data.max_length} tokens", fix)
        yield from self.trainer.problems()
        trainer = self.trainer
        usual = TrainerConfig()
        for name in ("critic_warmup", "log_val_generations", "max_restarts", "memory_save_freq", "async_save"):
            if getattr(trainer, name) != getattr(usual, name):
                yield Problem(f"trainer.{name} has no meaning here", getattr(trainer, name), "remove it")
        if trainer.nnodes > 1 or trainer.n_gpus_per_node not in ("auto", 0, 1):
            value = f"trainer.nnodes={trainer.nnodes}, trainer.n_gpus_per_node={trainer.n_gpus_per_node}"
            fix = "set trainer.nnodes=1 and trainer.n_gpus_per_node=1 (or 0)"
            yield Problem("supervised training runs in one process", value, fix)

    @property
    def run_dir(self) -> Path:
        return self.trainer.folder

    @property
    def tokenizer(self) -> tuple[str, bool]:
        """Its folder or hub id, and whether Python code that comes with it may run."""
        return self.model.tokenizer_path or self.model.path, self.data.trust_remote_code

    def notices(self) -> list[str]:
        """One sentence for every setting that is accepted but has no effect."""
        found = list(self.trainer.checkpoint_notices(bool(self.data.val_files)))
        if self.trainer.test_freq > 0 and not self.data.val_files:
            found.append(f"trainer.test_freq={self.trainer.test_freq} has no effect: data.val_files is empty")
        return found


class SftConfig(SupervisedConfig):
    """A language model learns to give the responses of a dataset."""

    data: SftDataConfig


class RewardModelTrainingConfig(SupervisedConfig):
    """A sequence-classification model learns which of two answers is the better one."""

    data: PairDataConfig

    def _problems(self) -> Iterator[Problem]:
        yield from super()._problems()
        if self.data.max_length <= self.data.max_token_len_per_gpu < 2 * self.data.max_length:
            yield Problem(
                "data.max_token_len_per_gpu is smaller than the longest pair, twice data.max_length; both count tokens",
                f"{self.data.max_token_len_per_gpu} tokens < 2 x {self.data.max_length} tokens",
                f"set data.max_token_len_per_gpu to at least {2 * self.data.max_length}",
            )


COMMANDS: dict[str, type[SupervisedConfig]] = {
    "verl sft": SftConfig,
    "verl reward-model train": RewardModelTrainingConfig,
}


def schema_of(tree: dict[str, Any]) -> type[SupervisedConfig] | None:
    """The schema of a run's ``config.yaml`` by what is in it; None where it is that of RL training."""
    if "optim" not in tree:
        return None
    data = tree.get("data")
    return RewardModelTrainingConfig if isinstance(data, dict) and "chosen_key" in data else SftConfig
