"""Small results that the configuration works out for its readers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BatchPlan:
    """How one trained role goes through a batch.

    Attributes:
        mini_batch_prompts: prompts in one optimizer step, all ranks together.
        rows_per_mini_batch: responses in one optimizer step, all ranks together (prompts x rollout.n).
        micro_batch_rows: responses in one backward pass on one rank; None with dynamic batching.
        max_tokens: most tokens in one backward pass on one rank; None without dynamic batching.
        accumulation: backward passes in one optimizer step on one rank; None with dynamic batching.
        epochs: passes over the batch.
    """

    mini_batch_prompts: int
    rows_per_mini_batch: int
    micro_batch_rows: int | None
    max_tokens: int | None
    accumulation: int | None
    epochs: int


@dataclass(frozen=True)
class SamplingPlan:
    """What the engine is asked for: temperature 0 is greedy, top_k -1 keeps every token.

    Attributes:
        temperature: 0 for greedy, else the divisor of the logits.
        top_p: probability mass kept, 1 for all.
        top_k: number of tokens kept, -1 for all.
        n: responses for each prompt.
        greedy_baseline: one greedy response more for each prompt, with index -1, which is not trained on.
        min_p, repetition_penalty, presence_penalty, frequency_penalty, logit_bias, min_new_tokens: see
            :class:`verl.rollout.protocol.SamplingParams`.
    """

    temperature: float
    top_p: float
    top_k: int
    n: int
    greedy_baseline: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0
