"""Where prompts come from, which model is trained, and what scores its answers."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from verl.config.base import FieldProblem, FreeDict, NeverOrPositive, Section, StringList

_DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "float": "float32",
    "torch.float32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "torch.bfloat16": "bfloat16",
}


class DataConfig(Section):
    """Training and validation prompts, and how the loader draws them."""

    train_files: StringList = Field(
        description="Training files, parquet or jsonl (one path or a list), read in the order given."
    )
    val_files: StringList = Field(
        default_factory=list, description="Validation files, as train_files; empty: no validation takes place."
    )
    train_batch_size: int = Field(1024, ge=1, description="Prompts drawn for one training step.")
    val_batch_size: int | None = Field(
        None, ge=1, description="Prompts generated at once in validation; null: the whole validation set."
    )
    max_prompt_length: int = Field(
        512, ge=1, description="Longest prompt in tokens; what happens to longer ones: truncation."
    )
    max_response_length: int = Field(512, ge=1, description="Most tokens that the engine samples for one response.")
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error",
        description="A prompt longer than max_prompt_length stops the run (error), or loses tokens on that side.",
    )
    filter_overlong_prompts: bool = Field(
        False, description="Leave out prompts longer than max_prompt_length when the files are read, and count them."
    )
    prompt_key: str = Field("prompt", min_length=1, description="Column that holds the prompt (messages or text).")
    answer_key: str | None = Field(
        None, description="Column that holds the ground truth; null: reward_model.ground_truth of the row."
    )
    reward_fn_key: str = Field(
        "data_source", min_length=1, description="Column by whose value the reward rule is chosen."
    )
    shuffle: bool = Field(True, description="Draw training prompts in a seeded random order, new in every epoch.")
    seed: int | None = Field(
        None, ge=0, lt=2**63, description="Seed of the order of training prompts; null: trainer.seed."
    )
    train_max_samples: NeverOrPositive = Field(
        -1, description="Use only so many training rows, counted after filtering; -1: all."
    )
    val_max_samples: NeverOrPositive = Field(
        -1, description="Use only so many validation rows, counted after filtering; -1: all."
    )
    drop_last: bool = Field(True, description="Leave out the last batch of an epoch when it is not full.")
    chat_template_kwargs: FreeDict = Field(
        default_factory=dict, description="Passed on to the tokenizer's chat template, e.g. {enable_thinking: false}."
    )

    @field_validator("train_files")
    @classmethod
    def _some_files(cls, value: list[str]) -> list[str]:
        if not value:
            raise FieldProblem("names no file", "give at least one parquet or jsonl file")
        return value


class ModelConfig(Section):
    """The language model that the actor trains; critic and reference start from it too."""

    path: str = Field(
        min_length=1, description="Model alias (smollm2-135m), Hugging Face folder, GGUF file, or hub id."
    )
    tokenizer_path: str | None = Field(None, description="Folder or hub id of the tokenizer; null: the model's own.")
    dtype: Literal["float32", "bfloat16"] = Field(
        "bfloat16", description="Compute type of trainer and engine alike; master weights are always float32."
    )
    trust_remote_code: bool = Field(False, description="Run Python code that comes with the model or tokenizer.")
    enable_gradient_checkpointing: bool = Field(
        False, description="Recompute activations in the backward pass: less memory, about a third more time."
    )

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_names(cls, value: Any) -> Any:
        if value in ("float16", "fp16", "half", "torch.float16"):
            raise FieldProblem("float16 is not supported yet", "use bfloat16 or float32")
        return _DTYPES.get(value, value) if isinstance(value, str) else value


class CustomRewardConfig(Section):
    """A reward function in the user's own Python file."""

    path: str | None = Field(None, description="Python file that holds the function; null: use reward.rule.")
    name: str = Field("compute_score", min_length=1, description="Name of the function in that file.")


class RewardConfig(Section):
    """What turns a response into a score."""

    rule: str = Field(
        "auto", min_length=1, description="Name of a built-in rule; auto: chosen by the row's data source."
    )
    custom_reward_function: CustomRewardConfig = Field(
        default_factory=CustomRewardConfig, description="Your own function instead of a built-in rule."
    )
    reward_kwargs: FreeDict = Field(
        default_factory=dict, description="Extra keyword arguments of every call of the reward function."
    )
    max_failed_fraction: float = Field(
        0.5,
        ge=0,
        le=1,
        description="Share of a batch's responses that may go unscored (an exception, a timeout) before the run stops.",
    )
