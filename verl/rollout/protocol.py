"""What a rollout engine takes, gives and promises. Free of torch: requests and results cross processes as they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from verl.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "refused", "lost"]

BIT_PARITY = "bit_parity"  # log-probs equal the trainer's bit for bit on CPU
SHARED_WEIGHTS = "shared_weights"  # the engine reads the trainer's own tensors; load_weights copies nothing

BASELINE_INDEX = -1  # index in the group of the greedy response that an estimator compares with


@dataclass(frozen=True, order=True)
class Slot:
    """Identity of a sample: the drawn prompt and the index in its group. Attempts are not part of it.

    Index -1 is the greedy baseline of an estimator that needs one.
    """

    uid: str
    index: int


@dataclass(frozen=True)
class SamplingParams:
    """How one response is sampled.

    The model's logits z become the distribution that is sampled in this order: bias, repetition penalty, presence and
    frequency penalty, forced length, temperature; then top-k, top-p (of what top-k left) and min-p cut it off.

    Attributes:
        max_new_tokens: at most this many tokens are sampled.
        temperature: divides the logits; 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: tokens kept; -1, 0 and None are off.
        seed: of this sample's own random stream; draw k belongs to response position k.
        stop: strings that end the response; the token that completes one is kept.
        stop_token_ids: tokens that end the response besides the model's own end tokens.
        ignore_eos: the model's own end tokens do not end the response.
        min_p: only tokens at least this share as likely as the likeliest are kept, 0 (off) to 1 (Nguyen et al., 2024).
        repetition_penalty: divides positive and multiplies negative z of tokens that prompt or response have; 1 is off
            (Keskar et al., 2019: CTRL).
        presence_penalty: taken from z of tokens that the response has, -2 to 2; 0 is off.
        frequency_penalty: taken from z as often as the response has the token, -2 to 2; 0 is off.
        logit_bias: added to z, by token id.
        min_new_tokens: before so many tokens neither an end token is sampled nor a stop string heeded.

    Raises:
        EngineError: a value outside its range.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = -1
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        for name, good, rule in (
            ("max_new_tokens", self.max_new_tokens >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < inf, "at least 0 and finite"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("top_k", self.top_k is None or self.top_k >= -1, "-1 (off) or at least 1"),
            ("seed", 0 <= self.seed < 2**64, "from 0 to 2**64 - 1"),
            ("stop", not isinstance(self.stop, str) and "" not in self.stop, "texts, none of them empty"),
            ("stop_token_ids", all(i >= 0 for i in self.stop_token_ids), "ids of at least 0"),
            ("min_p", 0 <= self.min_p <= 1, "from 0 to 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < inf, "above 0 and finite (1 is off)"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "from -2 to 2 (0 is off)"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "from -2 to 2 (0 is off)"),
            ("logit_bias", all(map(isfinite, self.logit_bias.values())), "finite numbers, by token id"),
            ("logit_bias", all(i >= 0 for i in self.logit_bias), "by ids of at least 0"),
            ("min_new_tokens", 0 <= self.min_new_tokens <= self.max_new_tokens, f"from 0 to {self.max_new_tokens}"),
        ):
            if not good:
                what = f"the sampling parameter {name} is out of range"
                raise EngineError(what, getattr(self, name), f"it must be {rule}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def truncated(self) -> bool:
        """Whether tokens outside a kept set can never be sampled (greedy apart)."""
        return not self.greedy and (self.top_p < 1.0 or (self.top_k or -1) > 0 or self.min_p > 0.0)

    @property
    def counts_tokens(self) -> bool:
        """Whether a penalty asks which tokens there are already."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def adjusted(self) -> bool:
        """Whether it is not the model's own distribution that is sampled, truncation apart."""
        return self.counts_tokens or bool(self.logit_bias) or self.min_new_tokens > 0

    def check_ids(self, vocabulary: int) -> None:
        """Raise EngineError for a token id that a model with so many tokens does not have."""
        for name, ids in (("stop_token_ids", self.stop_token_ids), ("logit_bias", self.logit_bias)):
            if ids and max(ids) >= vocabulary:
                what = f"the sampling parameter {name} has an id that is no token of the model"
                raise EngineError(what, max(ids), f"its ids are 0 to {vocabulary - 1}")


@dataclass(frozen=True)
class Resume:
    """The part of a response that was sampled before a pause, as its :class:`Result` had it."""

    response_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    kept_log_mass: NDArray[np.float32] | None = None

    @classmethod
    def of(cls, part: Result, tokens: int | None = None) -> Resume:
        """Of a result's first tokens; None: all."""
        mass = part.kept_log_mass
        columns = (part.response_ids[:tokens], part.log_probs[:tokens], part.versions[:tokens])
        return cls(*columns, None if mass is None else mass[:tokens])


@dataclass(frozen=True)
class Request:
    """One response to sample."""

    slot: Slot
    prompt_ids: list[int]
    sampling: SamplingParams
    resume: Resume | None = None


@dataclass(frozen=True)
class Result:
    """One response as it was sampled, R tokens.

    Attributes:
        response_ids: (R,) the sampled ids, the stop token included.
        log_probs: (R,) under the tempered distribution over the whole vocabulary.
        loss_mask: (R,) False for tokens that the policy did not sample.
        versions: (R,) weight version that sampled each token.
        finish_reason: ``stop``, ``length`` (cut at the limit, nothing put in place of an end), ``abort``,
            ``refused`` (the prompt leaves no room for a single token, or the engine's memory none for the whole), or
            ``lost`` (no worker could finish it; nothing was sampled).
        timings: seconds, by name.
        kept_log_mass: (R,) log of the probability mass that top-k, top-p and min-p kept (of the distribution that the
            penalties left); None where they are off.
    """

    slot: Slot
    response_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    timings: dict[str, float] = field(default_factory=dict)
    kept_log_mass: NDArray[np.float32] | None = None


def lost_result(slot: Slot) -> Result:
    """In the place of a response that no worker could finish: nothing was sampled, and nothing is trained."""
    empty = np.zeros(0, np.int32)
    return Result(slot, empty, np.zeros(0, np.float32), np.zeros(0, np.bool_), empty, "lost")


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and what it holds now.

    Attributes:
        prefill_tokens, decode_tokens: fed to the model, in chunks and one at a time.
        reused_tokens: of prompts, whose keys and values were there already.
        preemptions: how often a response had to give its blocks back and be computed again.
        blocks, blocks_used: of the key-value pool.
    """

    waiting: int
    active: int
    version: int
    prefill_tokens: int
    decode_tokens: int
    finished: int
    reused_tokens: int = 0
    preemptions: int = 0
    blocks: int = 0
    blocks_used: int = 0
    paused: bool = False

    @classmethod
    def total(cls, parts: Sequence[EngineStats], version: int) -> EngineStats:
        """Of several engines, whose weights are of this version."""
        sums = {name: sum(getattr(part, name) for part in parts) for name in cls.__dataclass_fields__}
        return cls(**sums | {"version": version, "paused": any(part.paused for part in parts)})

    def metrics(self, before: EngineStats) -> dict[str, float]:
        """What shared memory cost and saved since ``before`` (0 where engines have left), and what is held now.

        ``rollout/preemptions``, and ``rollout/prefix_reuse``: of the tokens of prompts, those that were there already,
        from 0 to 1. ``rollout/{waiting,active}``: requests. ``rollout/kv_blocks_used``: a share.
        """
        preemptions, reused, prefilled = (
            max(getattr(self, name) - getattr(before, name), 0)
            for name in ("preemptions", "reused_tokens", "prefill_tokens")
        )
        share = reused / (reused + prefilled) if reused else 0.0
        return {
            "rollout/waiting": float(self.waiting),
            "rollout/active": float(self.active),
            "rollout/kv_blocks_used": self.blocks_used / self.blocks if self.blocks else 0.0,
            "rollout/preemptions": float(preemptions),
            "rollout/prefix_reuse": share,
        }


class RolloutEngine(Protocol):
    """Results come in the order in which they finish; which requests run together never changes a result."""

    capabilities: frozenset[str]

    def submit(self, requests: list[Request]) -> None: ...

    def step(self) -> list[Result]:
        """Advance by one forward; the responses that it finished."""
        ...

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        """End these requests (all: None) now; what they have sampled so far, finish reason ``abort``."""
        ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]] = ()) -> None: ...

    def stats(self) -> EngineStats: ...


def generate(
    engine: RolloutEngine, requests: list[Request], finished: Callable[[list[Result]], None] = lambda _: None
) -> list[Result]:
    """All requests to their end; results in the order of the requests.

    Args:
        finished: is told after each step what has ended in it, if anything.

    Raises:
        EngineError: the engine is paused, or has other requests, whose results would be lost here.
    """
    stats = engine.stats()
    if stats.paused:
        raise EngineError("the engine is paused and would never answer", fix="resume it first")
    if stats.waiting or stats.active:
        raise EngineError(
            "the engine still has other requests", stats.waiting + stats.active, "finish them or abort them first"
        )
    engine.submit(requests)
    results: dict[Slot, Result] = {}
    while len(results) < len(requests):
        ended = engine.step()
        results.update((result.slot, result) for result in ended)
        finished(ended)
    return [results[request.slot] for request in requests]
