"""Where prompts come from, which model is trained, and what scores its answers."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from verl.config.base import (
    FieldProblem,
    FreeDict,
    Number,
    Prompts,
    RowLimit,
    Seconds,
    Section,
    Seed,
    Share,
    StringList,
    Tokens,
    Unit,
    also,
    check_entries,
    in_stage,
)
from verl.config.schema_sandbox import SandboxConfig
from verl.config.schema_shaping import SHAPING, LengthNormalizationConfig, OverlongBufferConfig

RESERVED_NAMES = ("score", "acc", "pred", "answer")  # keys of a reward function's result that mean something

Dtype = Annotated[
    Literal["float32", "bfloat16", "float16"],
    also(
        float32=("fp32", "float", "torch.float32"),
        bfloat16=("bf16", "torch.bfloat16"),
        float16=("fp16", "half", "torch.float16"),
    ),
]


def check_some_files(value: list[str]) -> list[str]:
    """At least one file."""
    if not value:
        raise FieldProblem("names no file", "give at least one parquet or jsonl file")
    return value


class SamplerConfig(Section):
    """In which order, and how often, training prompts are drawn."""

    acts_in: ClassVar[str] = "rollout: the loader of prompts"

    kind: Literal["auto", "random", "sequential", "weighted", "curriculum"] = "auto"
    """random or sequential: every row once an epoch; weighted: by weights; curriculum: most often the rows that are
    solved about half the time; auto: weighted where weights are given, else by data.shuffle."""
    weights: list[Annotated[float, Unit("weight")]] = Field(default_factory=list)
    """Weighted: one weight for each entry of data.train_files."""
    source_weights: FreeDict = Field(default_factory=dict)
    """Weighted: one weight for each data source, e.g. {math: 3, code: 1}."""
    weights_by: Literal["set", "row"] = "set"
    """What weights and source_weights are of: set: the share of draws of an entry or source, whatever its size; row:
    each row in it."""
    weight_column: str | None = Field(None, min_length=1)
    """Weighted: column with a weight of each row's own, instead of the others."""
    class_path: str | None = Field(None, description="Python file that holds your own sampler class.")
    class_name: str | None = Field(None, description="Name of the sampler class in that file.")

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

    path: str | None = Field(None, description="Python file that holds the class; null: the files are read by VeRL.")
    name: str | None = Field(None, description="Name of the class in that file.")


class DataConfig(Section):
    """Training and validation prompts, and how the loader draws them."""

    acts_in: ClassVar[str] = "rollout: the loader of prompts"

    train_files: StringList = Field(**in_stage("start: reading the data files"))
    """Training files (parquet, jsonl, json, csv, arrow), patterns or folders: one or a list, read in the order
    given."""
    val_files: StringList = Field(default_factory=list, **in_stage("start: reading the data files"))
    """Validation files, as train_files; empty: no validation takes place."""
    train_batch_size: Prompts = Field(1024, ge=1, description="Prompts drawn for one training step.")
    val_batch_size: Prompts | None = Field(None, ge=1, **in_stage("validation: the loader of prompts"))
    """Prompts generated at once in validation; null: the whole validation set."""
    max_prompt_length: Tokens = Field(512, ge=1, **in_stage("start: reading the data files"))
    """Longest prompt in tokens; what happens to longer ones: truncation."""
    max_response_length: Tokens = Field(512, ge=1, **in_stage("rollout: the engine"))
    """Most tokens that the engine samples for one response."""
    truncation: Literal["error", "left", "right", "middle"] = Field(
        "error", **in_stage("start: reading the data files")
    )
    """A prompt longer than max_prompt_length stops the run (error), or loses tokens on that side."""
    filter_overlong_prompts: bool = Field(False, **in_stage("start: reading the data files"))
    """Leave out prompts longer than max_prompt_length when the files are read, and count them."""
    prompt_key: str = Field("prompt", min_length=1, **in_stage("start: reading the data files"))
    """Column that holds the prompt (messages or text)."""
    answer_key: str | None = Field(None, **in_stage("start: reading the data files"))
    """Column that holds the ground truth; null: reward_model.ground_truth of the row."""
    reward_fn_key: str = Field("data_source", min_length=1, **in_stage("rollout: the scorer"))
    """Column by whose value the reward rule is chosen."""
    shuffle: bool = Field(True, description="Draw training prompts in a seeded random order, new in every epoch.")
    seed: Seed | None = Field(None, ge=0, lt=2**63)
    """Seed of the order of training prompts; null: trainer.seed."""
    train_max_samples: RowLimit = Field(-1, **in_stage("start: reading the data files"))
    """Use only so many training rows, counted after filtering; -1: all."""
    val_max_samples: RowLimit = Field(-1, **in_stage("start: reading the data files"))
    """Use only so many validation rows, counted after filtering; -1: all."""
    drop_last: bool = Field(True, description="Leave out the last batch of an epoch when it is not full.")
    trust_remote_code: bool = Field(False, **in_stage("start: loading the tokenizer"))
    """Run Python code that comes with the tokenizer."""
    chat_template_kwargs: FreeDict = Field(default_factory=dict, **in_stage("start: rendering the prompts"))
    """Passed on to the tokenizer's chat template, e.g. {enable_thinking: false}."""
    on_bad_row: Literal["skip", "error"] = Field("skip", **in_stage("start: reading the data files"))
    """A row that cannot be used is left out and listed in the run's skipped.jsonl, or stops the run."""
    max_skipped_fraction: Share = Field(0.01, ge=0, le=1, **in_stage("start: reading the data files"))
    """Share of the rows read that may be left out as unusable before the run stops."""
    num_workers: Annotated[int, Unit("processes")] | None = Field(
        None, ge=0, **in_stage("start: rendering the prompts")
    )
    """Most processes that render and filter prompts, one for every 20000 rows; 0: none but this one; null: as many as
    there are cores, 8 at most."""
    custom_cls: CustomDatasetConfig = Field(default_factory=CustomDatasetConfig)
    """Your own dataset class in place of files."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig, description="The order of training prompts.")

    _some_files = field_validator("train_files")(check_some_files)


class Fp16Config(Section):
    """The loss scale of float16 training, which keeps small gradients from vanishing; for ``model.dtype=float16``."""

    acts_in: ClassVar[str] = "update: backward passes of actor and critic"

    loss_scale: Number = Field(0.0, ge=0, description="A fixed scale; 0: dynamic, from 2^initial_scale_power.")
    initial_scale_power: Annotated[int, Unit("power of two")] = Field(16, ge=0, le=64)
    """Where a dynamic scale starts; halved (down to 1) when a gradient overflows."""
    loss_scale_window: Annotated[int, Unit("optimizer steps")] = Field(1000, ge=1)
    """Steps without an overflow after which a dynamic scale is doubled."""


class ModelConfig(Section):
    """The language model that the actor trains; critic and reference start from it too."""

    acts_in: ClassVar[str] = "start: loading the model, for every role"

    path: str = Field(min_length=1)
    """Model alias (smollm2-135m), Hugging Face folder, GGUF file, or hub id."""
    tokenizer_path: str | None = Field(None, description="Folder or hub id of the tokenizer; null: the model's own.")
    dtype: Dtype = Field("bfloat16", **in_stage("wherever a model computes: trainer and engine"))
    """Compute type of trainer and engine alike; master weights are always float32."""
    fp16: Fp16Config = Field(default_factory=Fp16Config, description="Loss scale of float16.")
    trust_remote_code: bool = False
    """Run Python code that comes with the model; its tokenizer's (data.trust_remote_code) and that of other models is
    asked for apart."""
    enable_gradient_checkpointing: bool = Field(False, **in_stage("update: backward passes of actor and critic"))
    """Recompute activations in the backward pass: less memory, about a third more time."""


class CustomRewardConfig(Section):
    """A reward function in the user's own Python file."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    path: str | None = Field(None, description="Python file that holds the function; null: use reward.rule.")
    name: str = Field("compute_score", min_length=1, description="Name of the function in that file.")


class RewardFunctionConfig(Section):
    """One of several reward functions, an entry of ``reward.functions``: a built-in rule, or a function of a file."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    rule: str | None = Field(None, min_length=1, description="Name of a built-in rule, or auto.")
    path: str | None = Field(None, description="Python file that holds the function.")
    name: str = Field("compute_score", min_length=1, description="Name of the function in that file.")
    kwargs: FreeDict = Field(default_factory=dict, description="Extra keyword arguments of every call.")
    weight: Number = Field(1.0, description="Factor of its score in the sum; 0: only logged.")
    data_sources: StringList = Field(default_factory=list)
    """Data sources that it is for, a trailing * for any ending; empty: all."""

    @model_validator(mode="after")
    def _one_kind(self) -> RewardFunctionConfig:
        kinds = ("rule", "path")
        if sum(getattr(self, kind) is not None for kind in kinds) != 1:
            raise FieldProblem("must say what it is, once", f"give one of {', '.join(kinds)}")
        return self


class RewardModelConfig(Section):
    """A sequence-classification model that scores responses, beside the rules and functions or instead of them."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    path: str | None = Field(None, min_length=1)
    """Hugging Face folder or hub id of the model, or a run of verl reward-model train; null: none."""
    weight: Number = Field(1.0, description="Factor of its score in the sum with the other rewards.")
    trust_remote_code: bool = Field(False, description="Run Python code that comes with this model and its tokenizer.")
    max_length: Tokens | None = Field(None, ge=2)
    """Most tokens of prompt and response that it reads; null: what it has positions for."""
    truncation: Literal["left", "right"] = "left"
    """Side on which longer ones lose tokens; left keeps the response."""
    max_token_len_per_gpu: Tokens = Field(16384, ge=2)
    """Most tokens of one of its forward passes; memory and speed only."""


JUDGE_PROMPT = """\
Judge an answer to a question.

[Question]
{prompt}

[Answer]
{response}

[Right answer]
{ground_truth}

Say in a sentence or two how good the answer is. Then end with one line of the form
Score: N
where N is a number from 0 (worthless) to 10 (perfect)."""


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible endpoint that judges responses, beside the others or instead."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    base_url: str | None = Field(None, min_length=1)
    """Address of the endpoint, such as http://localhost:8000/v1; null: no judge."""
    model: str = Field("default", min_length=1, description="Name of the model at the endpoint.")
    prompt: str = Field(JUDGE_PROMPT, min_length=1)
    """What it is asked; {prompt}, {response} and {ground_truth} stand for those."""
    pattern: str = Field(r"Score:\s*(-?\d+(?:\.\d+)?)", min_length=1)
    """Regular expression whose group is the score; the last place that fits counts."""
    weight: Number = Field(1.0, description="Factor of its score in the sum with the other rewards.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the key; null: no key is sent.")
    max_concurrency: Annotated[int, Unit("requests")] = Field(8, ge=1, description="Requests under way at once.")
    requests_per_minute: Number | None = Field(None, gt=0)
    """Most requests begun in a minute, evenly spaced; null: any number."""
    timeout: Seconds = Field(60.0, gt=0, description="Seconds for one answer.")
    retries: Annotated[int, Unit("requests")] = Field(3, ge=0)
    """Further tries where the endpoint does not answer, is busy or has failed."""
    max_tokens: Tokens = Field(512, ge=1, description="Most tokens of its answer.")

    @field_validator("pattern")
    @classmethod
    def _one_group(cls, value: str) -> str:
        try:
            groups = re.compile(value).groups
        except re.error as error:
            raise FieldProblem(f"is no regular expression: {error}", "correct it") from error
        if groups != 1:
            raise FieldProblem(f"has {groups} groups, and one is the score", "put the number, and only it, in (...)")
        return value

    @field_validator("prompt")
    @classmethod
    def _asks_about_the_response(cls, value: str) -> str:
        if "{response}" not in value:
            raise FieldProblem("does not hold {response}", "write {response} where the answer is to stand")
        return value

    @field_validator("base_url")
    @classmethod
    def _web_address(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise FieldProblem("is no web address", "begin it with http:// or https://")
        return value


class RewardConfig(Section):
    """What turns a response into a score."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    rule: str = Field("auto", min_length=1)
    """Name of a built-in rule; auto: chosen by the row's data source."""
    custom_reward_function: CustomRewardConfig = Field(default_factory=CustomRewardConfig)
    """Your own function instead of a built-in rule."""
    reward_kwargs: FreeDict = Field(default_factory=dict)
    """Extra keyword arguments of every call of the reward function."""
    functions: FreeDict = Field(default_factory=dict)
    """Several reward functions at once by name, their scores added: {name: {rule or path, name, kwargs, weight,
    data_sources}}; in place of the three above."""
    model: RewardModelConfig = Field(default_factory=RewardModelConfig)
    """A reward model: its score alone, or added to the others."""
    judge: JudgeConfig = Field(default_factory=JudgeConfig)
    """A generative judge: its score alone, or added to the others."""
    on_error: Literal["skip", "retry", "stop"] = "skip"
    """A response that could not be scored is left out, asked about twice more first, or stops the run."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where model-written programs are run (rule code)."""
    num_workers: Annotated[int, Unit("processes")] | None = Field(None, ge=0)
    """Most processes that call your functions and rules without a bound of their own; 0: none but the run's own,
    without time limit; null: as many as there are cores."""
    min_workers: Annotated[int, Unit("processes")] = Field(1, ge=0)
    """Of these, so many stay when there is nothing to score; the others come and go."""
    timeout: Seconds = Field(60.0, gt=0)
    """Time of one call, its own alone; what does not stop then is killed and counted as failed."""
    worker_memory_gb: Annotated[float, Unit("GiB")] | None = Field(None, gt=0)
    """Most memory of one of them; null: its share of half of what is free, but at least 4."""
    cache: bool = True
    """Equal responses to one prompt are asked about once; false for functions that draw at random."""
    length_normalization: LengthNormalizationConfig = Field(default_factory=LengthNormalizationConfig)
    """Scores divided by a power of the length."""
    length_penalty: Number = Field(0.0, ge=0, **in_stage(SHAPING))
    """Taken off the score of a response of data.max_response_length tokens; shorter in proportion."""
    overlong_buffer: OverlongBufferConfig = Field(default_factory=OverlongBufferConfig)
    """DAPO's penalty near the length limit."""
    scaling: Literal["none", "batch", "running"] = Field("none", **in_stage(SHAPING))
    """Divide scores by their deviation, of the batch or of the whole run so far."""
    clip: Number | None = Field(None, gt=0, **in_stage(SHAPING))
    """Largest size of a score, after all the others; null: any."""
    max_failed_fraction: Share = Field(0.5, ge=0, le=1)
    """Share of a batch's responses that may go unscored (an exception, a timeout) before the run stops."""

    @field_validator("functions")
    @classmethod
    def _function_entries(cls, value: dict[str, Any]) -> dict[str, Any]:
        for name in value:
            if not name.replace("-", "_").replace(".", "_").isidentifier() or name in RESERVED_NAMES:
                raise FieldProblem(f"{name!r} cannot be the name of a reward", "use letters, digits, - and _")
        check_entries(value, RewardFunctionConfig)
        return value

    @model_validator(mode="after")
    def _either_one_or_several(self) -> RewardConfig:
        if self.functions and (self.rule != "auto" or self.custom_reward_function.path or self.reward_kwargs):
            raise FieldProblem(
                "has functions, and rule, custom_reward_function.path or reward_kwargs beside them",
                "make what stands there an entry of reward.functions",
            )
        judged = self.model.path is not None or self.judge.base_url is not None
        if self.functions and not judged and all(part.weight == 0 for part in self.parts.values()):
            raise FieldProblem(
                "has functions, and the weight of each is 0: nothing would be trained", "give one of them a weight"
            )
        return self

    @property
    def parts(self) -> dict[str, RewardFunctionConfig]:
        """The entries of ``functions``; where there are none the one reward, under the name ""."""
        custom = self.custom_reward_function
        own = {"path": custom.path, "name": custom.name} if custom.path is not None else {"rule": self.rule}
        entries = self.functions or {"": {**own, "kwargs": self.reward_kwargs}}
        return {name: RewardFunctionConfig.model_validate(entry) for name, entry in entries.items()}

    @property
    def names_rewards(self) -> bool:
        """Whether a rule or function is asked for by name."""
        return bool(self.functions) or self.custom_reward_function.path is not None or self.rule != "auto"

    @property
    def shapes(self) -> bool:
        """Whether scores are changed before advantages are formed."""
        return bool(
            self.length_normalization.alpha
            or self.length_penalty
            or self.overlong_buffer.enable
            or self.scaling != "none"
            or self.clip is not None
        )
