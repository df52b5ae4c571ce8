"""Where prompts come from, which model is trained, and what scores its answers."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator

from verl.config.base import FieldProblem, Section, Unit, also, field, in_stage, part
from verl.config.units import Files, FreeDict, Number, Prompts, RowLimit, Seed, Share, StringList, Tokens

READING = in_stage("start: reading the data files")
RENDERING = in_stage("start: rendering the prompts")

Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    also(
        float32=("fp32", "float", "torch.float32"),
        bfloat16=("bf16", "torch.bfloat16"),
        float16=("fp16", "half", "torch.float16"),
    ),
]


class SamplerConfig(Section):
    """In which order, and how often, training prompts are drawn."""

    acts_in: ClassVar[str] = "rollout: the loader of prompts"

    kind: Literal["auto", "random", "sequential", "weighted", "curriculum"] = "auto"
    """random or sequential: every row once an epoch; weighted: by weights; curriculum: most often the rows that are
    solved about half the time; auto: weighted where weights are given, else by data.shuffle."""
    weights: list[Annotated[float, Unit("weight")]] = Field(default_factory=list)
    """Weighted: one weight for each entry of data.train_files."""
    source_weights: FreeDict = field({}, "Weighted: one weight for each data source, e.g. {math: 3, code: 1}.")
    weights_by: Literal["set", "row"] = "set"
    """What weights and source_weights are of: set: the share of draws of an entry or source, whatever its size; row:
    each row in it."""
    weight_column: str | None = Field(None, min_length=1)
    """Weighted: column with a weight of each row's own, instead of the others."""
    class_path: str | None = field(None, "Python file that holds your own sampler class.")
    class_name: str | None = field(None, "Name of the sampler class in that file.")

    @field_validator("weights", "source_weights")
    @classmethod
    def _some_weight(cls, value: Any) -> Any:
        weights = list(value.values()) if isinstance(value, dict) else value
        if any(isinstance(w, bool) or not isinstance(w, int | float) or w < 0 for w in weights):
            raise FieldProblem("has a weight that is not a number of at least 0", "use numbers of 0 or more")
        if weights and not sum(weights):
            raise FieldProblem("has no weight above 0", "give at least one a weight above 0")
        return value


class CustomDatasetConfig(Section):
    """A dataset class in the user's own Python file, in place of the readers of files."""

    acts_in: ClassVar[str] = "start: reading the data files"

    path: str | None = field(None, "Python file that holds the class; null: the files are read by VeRL.")
    name: str | None = field(None, "Name of the class in that file.")


class DataConfig(Section):
    """Training and validation prompts, and how the loader draws them."""

    acts_in: ClassVar[str] = "rollout: the loader of prompts"

    train_files: Files = Field(**READING)
    """Training files (parquet, jsonl, json, csv, arrow), patterns or folders: one or a list, read in this order."""
    val_files: StringList = field([], "Validation files, as train_files; empty: no validation takes place.", **READING)
    train_batch_size: Prompts = field(1024, "Prompts drawn for one training step.", ge=1)
    val_batch_size: Prompts | None = Field(None, ge=1, **in_stage("validation: the loader of prompts"))
    """Prompts generated at once in validation; null: the whole validation set."""
    max_prompt_length: Tokens = field(512, "Longest prompt in tokens; longer ones: truncation.", ge=1, **READING)
    max_response_length: Tokens = Field(512, ge=1, **in_stage("rollout: the engine"))
    """Most tokens that the engine samples for one response."""
    truncation: Literal["error", "left", "right", "middle"] = Field("error", **READING)
    """A prompt longer than max_prompt_length stops the run (error), or loses tokens on that side."""
    filter_overlong_prompts: bool = Field(False, **READING)
    """Leave out prompts longer than max_prompt_length when the files are read, and count them."""
    prompt_key: str = field("prompt", "Column that holds the prompt (messages or text).", min_length=1, **READING)
    answer_key: str | None = Field(None, **READING)
    """Column that holds the ground truth; null: reward_model.ground_truth of the row."""
    reward_fn_key: str = Field("data_source", min_length=1, **in_stage("rollout: the scorer"))
    """Column by whose value the reward rule is chosen."""
    shuffle: bool = field(True, "Draw training prompts in a seeded random order, new in every epoch.")
    seed: Seed | None = field(None, "Seed of the order of training prompts; null: trainer.seed.", ge=0, lt=2**63)
    train_max_samples: RowLimit = Field(-1, **READING)
    """Use only so many training rows, counted after filtering; -1: all."""
    val_max_samples: RowLimit = Field(-1, **READING)
    """Use only so many validation rows, counted after filtering; -1: all."""
    drop_last: bool = field(True, "Leave out the last batch of an epoch when it is not full.")
    trust_remote_code: bool = Field(False, **in_stage("start: loading the tokenizer"))
    """Run Python code that comes with the tokenizer."""
    chat_template_kwargs: FreeDict = Field(default_factory=dict, **RENDERING)
    """Passed on to the tokenizer's chat template, e.g. {enable_thinking: false}."""
    on_bad_row: Literal["skip", "error"] = Field("skip", **READING)
    """A row that cannot be used is left out and listed in the run's skipped.jsonl, or stops the run."""
    max_skipped_fraction: Share = Field(0.01, ge=0, le=1, **READING)
    """Share of the rows read that may be left out as unusable before the run stops."""
    num_workers: Annotated[int, Unit("processes")] | None = Field(None, ge=0, **RENDERING)
    """Most processes that render and filter prompts, one for every 20000 rows; 0: none but this one; null: as many as
    there are cores, 8 at most."""
    custom_cls: CustomDatasetConfig = part(CustomDatasetConfig)
    sampler: SamplerConfig = part(SamplerConfig)


class Fp16Config(Section):
    """The loss scale of float16 training, which keeps small gradients from vanishing; for ``model.dtype=float16``."""

    acts_in: ClassVar[str] = "update: backward passes of actor and critic"

    loss_scale: Number = field(0.0, "A fixed scale; 0: dynamic, from 2^initial_scale_power.", ge=0)
    initial_scale_power: Annotated[int, Unit("power of two")] = Field(16, ge=0, le=64)
    """Where a dynamic scale starts; halved (down to 1) when a gradient overflows."""
    loss_scale_window: Annotated[int, Unit("optimizer steps")] = Field(1000, ge=1)
    """Steps without an overflow after which a dynamic scale is doubled."""


class ModelConfig(Section):
    """The language model that the actor trains; critic and reference start from it too."""

    acts_in: ClassVar[str] = "start: loading the model, for every role"

    path: str = Field(min_length=1)
    """Model alias (smollm2-135m), Hugging Face folder, GGUF file, or hub id."""
    tokenizer_path: str | None = field(None, "Folder or hub id of the tokenizer; null: the model's own.")
    dtype: Dtype = Field("bfloat16", **in_stage("wherever a model computes: trainer and engine"))
    """Compute type of trainer and engine alike; master weights are always float32."""
    fp16: Fp16Config = part(Fp16Config)
    trust_remote_code: bool = False
    """Run Python code that comes with the model; for its tokenizer and other models see their own trust_remote_code."""
    enable_gradient_checkpointing: bool = Field(False, **in_stage("update: backward passes of actor and critic"))
    """Recompute activations in the backward pass: less memory, about a third more time."""
