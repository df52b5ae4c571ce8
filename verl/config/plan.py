"""Small results that the configuration works out for its readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchPlan:
    """How one trained role goes through a batch. With dynamic batching only the tokens of a backward pass are known."""

    mini_batch_prompts: int  # in one optimizer step, all ranks together
    rows_per_mini_batch: int  # responses in it: prompts x rollout.n
    micro_batch_rows: int | None  # responses in one backward pass on one rank; None with dynamic batching
    max_tokens: int | None  # most tokens in one backward pass on one rank; None without dynamic batching
    accumulation: int | None  # backward passes in one optimizer step on one rank; None with dynamic batching
    epochs: int  # passes over the batch


@dataclass(frozen=True)
class SamplingPlan:
    """What the engine is asked for; the fields behind ``greedy_baseline`` are as in
    :class:`verl.rollout.protocol.SamplingParams`."""

    temperature: float  # the divisor of the logits; 0: greedy
    top_p: float  # probability mass kept, 1 for all
    top_k: int  # number of tokens kept, -1 for all
    n: int  # responses for each prompt
    greedy_baseline: bool = False  # one greedy response more for each prompt, with index -1, which is not trained on
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
