"""Which requests run, which wait, and when a response is finished. Knows nothing of models or tensors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from verl.errors import EngineError
from verl.rollout.protocol import FinishReason, Request, Result, Slot
from verl.rollout.text import UNFINISHED

# Tokens that are decoded again to look for a stop string that spans token borders, beyond the string's own bytes
# (a token may be a single byte of a character): the first ones of a window may decode to nothing by themselves.
STOP_WINDOW = 8


@dataclass
class Sequence:
    """A request and what has been sampled for it."""

    request: Request
    max_new_tokens: int
    end_tokens: frozenset[int]
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_log_mass: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Prompt and response tokens so far."""
        return len(self.request.prompt_ids) + len(self.ids)

    @property
    def full_length(self) -> int:
        return len(self.request.prompt_ids) + self.max_new_tokens

    @property
    def tokens(self) -> list[int]:
        return [*self.request.prompt_ids, *self.ids]

    def append(self, token: int, log_prob: float, version: int, kept_log_mass: float) -> None:
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.versions.append(version)
        self.kept_log_mass.append(kept_log_mass)

    def finish_reason(self, decode: Callable[[list[int]], str]) -> FinishReason | None:
        """Why the response ends with its last token, or None. A stop wins over the length limit."""
        if self.ids[-1] in self.end_tokens:
            return "stop"
        stops, least = self.request.sampling.stop, self.request.sampling.min_new_tokens
        if stops and len(self.ids) > least:
            longest = max(len(stop.encode("utf-8", "surrogatepass")) for stop in stops)
            start = max(len(self.ids) - longest - STOP_WINDOW, 0)
            tail = decode(self.ids[start:])
            # What was complete within the forced length is text like any other.
            old = len(decode(self.ids[start:least]).rstrip(UNFINISHED)) if least > start else 0
            if any(stop in tail[max(old - len(stop) + 1, 0) :] for stop in stops):
                return "stop"
        return "length" if len(self.ids) >= self.max_new_tokens else None

    def result(self, reason: FinishReason) -> Result:
        now = time.monotonic()
        started = self.started if self.started is not None else now
        return Result(
            slot=self.request.slot,
            response_ids=np.asarray(self.ids, dtype=np.int32),
            log_probs=np.asarray(self.log_probs, dtype=np.float32),
            loss_mask=np.ones(len(self.ids), dtype=np.bool_),
            versions=np.asarray(self.versions, dtype=np.int32),
            finish_reason=reason,
            timings={"queued": started - self.submitted, "running": now - started},
            kept_log_mass=(
                np.asarray(self.kept_log_mass, dtype=np.float32) if self.request.sampling.truncated else None
            ),
        )


class Scheduler:
    """First come, first served; a row that a finished response leaves is filled again at the next step.

    Args:
        max_rows: responses that run at once.
        max_tokens: prompt tokens of one prefill; a longer prompt is prefilled alone.
        max_model_len: positions that the model has.
        eos_token_ids: the model's own end tokens.
    """

    def __init__(self, max_rows: int, max_tokens: int, max_model_len: int, eos_token_ids: Iterable[int]) -> None:
        self.max_rows, self.max_tokens, self.max_model_len = max_rows, max_tokens, max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []  # row i of the cache belongs to active[i]
        self._slots: set[Slot] = set()

    def submit(self, requests: Iterable[Request]) -> list[Result]:
        """Queue requests; results of those that cannot ever run (finish reason ``refused``) or have ended already.

        Raises:
            EngineError: a slot that is here already, or an empty prompt; then none of the requests is queued.
        """
        requests = list(requests)
        slots = set(self._slots)
        for request in requests:
            if request.slot in slots:
                raise EngineError("a slot was submitted twice", request.slot, "wait for its result or abort it first")
            if not request.prompt_ids:
                raise EngineError("a request has an empty prompt", request.slot, "give every prompt at least one token")
            slots.add(request.slot)
        refused = []
        for request in requests:
            sampling = request.sampling
            ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else self.eos_token_ids)
            room = self.max_model_len - len(request.prompt_ids)
            sequence = Sequence(request, min(sampling.max_new_tokens, room), ends)
            if request.resume is not None:
                sequence.ids = request.resume.response_ids.tolist()
                sequence.log_probs = request.resume.log_probs.tolist()
                sequence.versions = request.resume.versions.tolist()
                mass = request.resume.kept_log_mass
                sequence.kept_log_mass = [0.0] * len(sequence.ids) if mass is None else mass.tolist()
            if sequence.ids and sequence.ids[-1] in ends:
                refused.append(sequence.result("stop"))
                continue
            if len(sequence.ids) >= sequence.max_new_tokens:
                refused.append(sequence.result("refused" if room <= 0 else "length"))
                continue
            self._slots.add(request.slot)
            self.waiting.append(sequence)
        return refused

    def admit(self) -> list[Sequence]:
        """Move waiting requests into free rows, as many as fit one prefill; they become the last active rows.

        A prompt shared by several admitted requests counts once.
        """
        admitted: list[Sequence] = []
        prompts: set[tuple[int, ...]] = set()
        tokens = 0
        while self.waiting and len(self.active) < self.max_rows:
            sequence = self.waiting[0]
            key = tuple(sequence.tokens)
            cost = 0 if key in prompts else len(key)
            if admitted and tokens + cost > self.max_tokens:
                break
            prompts.add(key)
            tokens += cost
            self.waiting.popleft()
            sequence.started = sequence.started or time.monotonic()
            admitted.append(sequence)
            self.active.append(sequence)
        return admitted

    def remove(self, rows: list[int]) -> tuple[list[int], list[int]]:
        """Take these rows out; the last rows move into the gaps. Returns (sources, targets) of the moves."""
        for row in rows:
            self._slots.discard(self.active[row].request.slot)
        gone = set(rows)
        kept = len(self.active) - len(gone)
        sources = [row for row in range(kept, len(self.active)) if row not in gone]
        targets = [row for row in sorted(gone) if row < kept]
        for source, target in zip(sources, targets, strict=True):
            self.active[target] = self.active[source]
        del self.active[kept:]
        return sources, targets

    def abort(self, slots: set[Slot] | None) -> tuple[list[Result], list[int], list[int]]:
        """End these requests; their results so far, and the moves of :meth:`remove`."""
        chosen = lambda sequence: slots is None or sequence.request.slot in slots  # noqa: E731
        dropped = [sequence for sequence in self.waiting if chosen(sequence)]
        self.waiting = deque(sequence for sequence in self.waiting if not chosen(sequence))
        self._slots.difference_update(sequence.request.slot for sequence in dropped)
        rows = [row for row, sequence in enumerate(self.active) if chosen(sequence)]
        dropped += [self.active[row] for row in rows]
        return [sequence.result("abort") for sequence in dropped], *self.remove(rows)

    def requeue_active(self) -> None:
        """Put running responses back in front of the queue; their cache is computed again from their tokens."""
        self.waiting.extendleft(reversed(self.active))
        self.active.clear()
