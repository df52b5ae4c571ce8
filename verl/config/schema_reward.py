"""What turns a response into a score, and what happens to the score before advantages are formed."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from verl.config.base import FieldProblem, Section, Unit, check_entries, field, in_stage, part
from verl.config.units import FreeDict, Number, Seconds, Share, StringList, Tokens, must

RESERVED_NAMES = ("score", "acc", "pred", "answer")  # keys of a reward function's result that mean something
SHAPING = "process: reward shaping"
MiB = Annotated[int, Unit("MiB")]


class CustomRewardConfig(Section):
    """A reward function in the user's own Python file, instead of a built-in rule."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    path: str | None = field(None, "Python file that holds the function; null: use reward.rule.")
    name: str = field("compute_score", "Name of the function in that file.", min_length=1)


class RewardFunctionConfig(Section):
    """One of several reward functions, an entry of ``reward.functions``: a built-in rule, or a function of a file."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    rule: str | None = field(None, "Name of a built-in rule, or auto.", min_length=1)
    path: str | None = field(None, "Python file that holds the function.")
    name: str = field("compute_score", "Name of the function in that file.", min_length=1)
    kwargs: FreeDict = field({}, "Extra keyword arguments of every call.")
    weight: Number = field(1.0, "Factor of its score in the sum; 0: only logged.")
    data_sources: StringList = field([], "Data sources that it is for, a trailing * for any ending; empty: all.")

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
    weight: Number = field(1.0, "Factor of its score in the sum with the other rewards.")
    trust_remote_code: bool = field(False, "Run Python code that comes with this model and its tokenizer.")
    max_length: Tokens | None = Field(None, ge=2)
    """Most tokens of prompt and response that it reads; null: what it has positions for."""
    truncation: Literal["left", "right"] = field("left", "Side on which longer ones lose tokens; left: responses stay.")
    max_token_len_per_gpu: Tokens = Field(16384, ge=2)
    """Most tokens of one of its forward passes; memory and speed only."""
    param_offload: bool = False
    """Move its weights away while another role of its process works, as actor.param_offload."""


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


_ASKS = must(lambda text: "{response}" in text, "does not hold {response}", "write it where the answer is to stand")
_WEB_ADDRESS = must(
    lambda text: text.startswith(("http://", "https://")), "is no web address", "begin it with http:// or https://"
)


class JudgeConfig(Section):
    """A language model behind an OpenAI-compatible endpoint that judges responses, beside the others or instead."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    base_url: Annotated[str | None, _WEB_ADDRESS] = Field(None, min_length=1)
    """Address of the endpoint, such as http://localhost:8000/v1; null: no judge."""
    model: str = field("default", "Name of the model at the endpoint.", min_length=1)
    prompt: Annotated[str, _ASKS] = Field(JUDGE_PROMPT, min_length=1)
    """What it is asked; {prompt}, {response} and {ground_truth} stand for those."""
    pattern: str = Field(r"Score:\s*(-?\d+(?:\.\d+)?)", min_length=1)
    """Regular expression whose group is the score; the last place that fits counts."""
    weight: Number = field(1.0, "Factor of its score in the sum with the other rewards.")
    api_key_env: str | None = field(None, "Environment variable that holds the key; null: no key is sent.")
    max_concurrency: Annotated[int, Unit("requests")] = field(8, "Requests under way at once.", ge=1)
    requests_per_minute: Number | None = field(None, "Most requests begun in a minute, evenly spaced; null: any.", gt=0)
    timeout: Seconds = field(60.0, "Seconds for one answer.", gt=0)
    retries: Annotated[int, Unit("requests")] = Field(3, ge=0)
    """Further tries where the endpoint does not answer, is busy or has failed."""
    max_tokens: Tokens = field(512, "Most tokens of its answer.", ge=1)

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


class SandboxConfig(Section):
    """Limits of the sandbox in which the rule ``code`` runs model-written programs."""

    acts_in: ClassVar[str] = "rollout: the rule code"

    time_limit: Seconds = Field(10.0, gt=0, le=3600)
    """Wall-clock time of each test; what runs longer is killed, and has failed."""
    total_time_limit: Seconds = Field(60.0, gt=0, le=36000)
    """Time of all tests of one program; those not started by then have failed."""
    memory_limit: MiB = field(1024, "Address space of each of a program's processes.", ge=64)
    file_limit: MiB = field(16, "Size of its temporary directory, which is in memory.", ge=1)
    output_limit: MiB = field(4, "What a test may print; at more it is killed.", ge=1, le=1024)
    processes: Annotated[int, Unit("processes and threads")] = Field(8, ge=1, le=1024)
    """How many a program may have at once, itself included."""
    workers: Annotated[int, Unit("programs")] | None = Field(None, ge=1, le=64)
    """Programs that a scorer runs at once; null: as many as it has cores."""
    allow_weaker: bool = False
    """Run programs also where the machine cannot isolate them fully, with what it can do."""


class LengthNormalizationConfig(Section):
    """Score divided by a power of the response's length in tokens (0 counts as 1)."""

    acts_in: ClassVar[str] = SHAPING

    alpha: Number = field(0.0, "The power: score / length^alpha; 0: off, 1: score per token.", ge=0)
    positive_only: bool = False
    """Divide scores above 0 only; false favours long wrong answers where those score below 0."""


class OverlongBufferConfig(Section):
    """DAPO's soft penalty for responses near the length limit."""

    acts_in: ClassVar[str] = SHAPING

    enable: bool = field(False, "Whether to penalise.")
    len: Tokens | None = Field(None, ge=0)
    """The penalty grows over the last so many tokens before max_resp_len, from 0 on; null: a fifth of max_resp_len."""
    penalty_factor: Number = field(1.0, "The full penalty, at max_resp_len tokens and beyond.", ge=0)
    max_resp_len: Tokens | None = field(None, "Where it is full; null: data.max_response_length.", ge=1)

    def place(self, max_response_length: int) -> tuple[int, int]:
        """Where the penalty is full, and over how many tokens before it grows."""
        limit = self.max_resp_len or max_response_length
        return limit, max(limit // 5, 1) if self.len is None else self.len


class RewardConfig(Section):
    """What turns a response into a score."""

    acts_in: ClassVar[str] = "rollout: the scorer"

    rule: str = field("auto", "Name of a built-in rule; auto: chosen by the row's data source.", min_length=1)
    custom_reward_function: CustomRewardConfig = part(CustomRewardConfig)
    reward_kwargs: FreeDict = field({}, "Extra keyword arguments of every call of the reward function.")
    functions: FreeDict = Field(default_factory=dict)
    """Several reward functions at once by name, their scores added: {name: {rule or path, name, kwargs, weight,
    data_sources}}; in place of the three above."""
    model: RewardModelConfig = part(RewardModelConfig)
    judge: JudgeConfig = part(JudgeConfig)
    on_error: Literal["skip", "retry", "stop"] = "skip"
    """A response that could not be scored is left out, asked about twice more first, or stops the run."""
    sandbox: SandboxConfig = part(SandboxConfig)
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
    length_normalization: LengthNormalizationConfig = part(LengthNormalizationConfig)
    length_penalty: Number = Field(0.0, ge=0, **in_stage(SHAPING))
    """Taken off the score of a response of data.max_response_length tokens; shorter in proportion."""
    overlong_buffer: OverlongBufferConfig = part(OverlongBufferConfig)
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
            fix = "make what stands there an entry of reward.functions"
            raise FieldProblem("has functions, and rule, custom_reward_function.path or reward_kwargs beside them", fix)
        judged = self.model.path is not None or self.judge.base_url is not None
        if self.functions and not judged and all(part.weight == 0 for part in self.parts.values()):
            fix = "give one of them a weight"
            raise FieldProblem("has functions, and the weight of each is 0: nothing would be trained", fix)
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
