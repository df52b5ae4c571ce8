"""What a rollout engine takes, gives and promises. Free of torch: requests and results cross processes as they are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from verl.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

FinishReason = Literal["stop", "length", "abort", "refused"]

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

    Attributes:
        max_new_tokens: at most this many tokens are sampled.
        temperature: divides the logits; 0 is greedy.
        top_p: nucleus mass in (0, 1]; 1 is off.
        top_k: tokens kept; -1, 0 and None are off.
        seed: of this sample's own random stream; draw k belongs to response position k.
        stop: strings that end the response; the token that completes one is kept.
        stop_token_ids: tokens that end the response besides the model's own end tokens.
        ignore_eos: the model's own end tokens do not end the response.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = -1
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def truncated(self) -> bool:
        """Whether tokens outside a kept set can never be sampled (greedy apart)."""
        return not self.greedy and (self.top_p < 1.0 or (self.top_k or -1) > 0)


@dataclass(frozen=True)
class Resume:
    """The part of a response that was sampled before a pause, as its :class:`Result` had it."""

    response_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    versions: NDArray[np.int32]
    kept_log_mass: NDArray[np.float32] | None = None


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
        finish_reason: ``stop``, ``length`` (cut at the limit, nothing put in place of an end), ``abort``, or
            ``refused`` (the prompt leaves no room for a single token).
        timings: seconds, by name.
        kept_log_mass: (R,) log of the probability mass that top-p and top-k kept; None where they are off.
    """

    slot: Slot
    response_ids: NDArray[np.int32]
    log_probs: NDArray[np.float32]
    loss_mask: NDArray[np.bool_]
    versions: NDArray[np.int32]
    finish_reason: FinishReason
    timings: dict[str, float] = field(default_factory=dict)
    kept_log_mass: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was made, and what it holds now."""

    waiting: int
    active: int
    version: int
    prefill_tokens: int
    decode_tokens: int
    finished: int


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


def generate(engine: RolloutEngine, requests: list[Request]) -> list[Result]:
    """All requests to their end; results in the order of the requests.

    Raises:
        EngineError: the engine has other requests, whose results would be lost here.
    """
    stats = engine.stats()
    if stats.waiting or stats.active:
        raise EngineError(
            "the engine still has other requests", stats.waiting + stats.active, "finish them or abort them first"
        )
    engine.submit(requests)
    results: dict[Slot, Result] = {}
    while len(results) < len(requests):
        results.update((result.slot, result) for result in engine.step())
    return [results[request.slot] for request in requests]
