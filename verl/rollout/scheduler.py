"""Which requests run, which wait, and when a response is finished. Knows nothing of models or tensors.

Each step feeds every running sequence the tokens whose keys and values are not in the pool yet: the one sampled last,
or the next chunk of a prompt. A sequence whose last token is fed has its next one sampled.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from verl.errors import EngineError
from verl.rollout.blocks import BlockManager, blocks_for, prompt_keys
from verl.rollout.protocol import FinishReason, Request, Result, Slot
from verl.rollout.text import UNFINISHED

# Tokens that are decoded again to look for a stop string that spans token borders, beyond the string's own bytes
# (a token may be a single byte of a character): the first ones of a window may decode to nothing by themselves.
STOP_WINDOW = 8
# Prompt tokens that a step feeds even where the running responses alone use up its budget.
SMALLEST_CHUNK = 8


@dataclass
class Sequence:
    """A request, what has been sampled for it, and where its keys and values are.

    Attributes:
        keys: of the prompt's blocks.
        blocks: of the pool, in the order of the tokens that they hold.
        computed: tokens whose keys and values are in the pool.
    """

    request: Request
    max_new_tokens: int
    end_tokens: frozenset[int]
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    kept_log_mass: list[float] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    computed: int = 0

    @classmethod
    def of(cls, request: Request, eos_token_ids: frozenset[int], max_model_len: int) -> Sequence:
        """As far as the request has come; the model has its own end tokens and so many positions."""
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else eos_token_ids)
        room = max_model_len - len(request.prompt_ids)
        sequence = cls(request, min(sampling.max_new_tokens, room), ends)
        if request.resume is not None:
            sequence.ids = request.resume.response_ids.tolist()
            sequence.log_probs = request.resume.log_probs.tolist()
            sequence.versions = request.resume.versions.tolist()
            mass = request.resume.kept_log_mass
            sequence.kept_log_mass = [0.0] * len(sequence.ids) if mass is None else mass.tolist()
        return sequence

    @property
    def length(self) -> int:
        """Prompt and response tokens so far."""
        return len(self.request.prompt_ids) + len(self.ids)

    @property
    def full_length(self) -> int:
        return len(self.request.prompt_ids) + self.max_new_tokens

    def tokens(self, start: int, end: int) -> list[int]:
        """Tokens ``start .. end - 1`` of prompt and response."""
        prompt = self.request.prompt_ids
        if start >= len(prompt):
            return self.ids[start - len(prompt) : end - len(prompt)]
        return [*prompt[start:end], *self.ids[: max(end - len(prompt), 0)]]

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


@dataclass(frozen=True)
class Work:
    """Tokens ``start .. end - 1`` of a sequence, to be fed in this step."""

    sequence: Sequence
    start: int
    end: int

    @property
    def samples(self) -> bool:
        """Whether the sequence's next token is sampled behind them."""
        return self.end == self.sequence.length


@dataclass(frozen=True)
class Plan:
    """What one step does: first the copies (source block, target block), then one forward over all the work.

    Single tokens come before longer work.
    """

    work: list[Work] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)


class Scheduler:
    """First come, first served; a place that a finished response leaves is taken again in the next step.

    Running sequences come before waiting ones, the oldest first. Where the pool is full, the youngest running one
    gives its blocks back and waits in front of the others; the oldest always goes on, so that all of them end.

    Args:
        max_rows: responses that run at once.
        max_tokens: tokens that one step feeds; longer prompts are fed in chunks.
        max_model_len: positions that the model has.
        eos_token_ids: the model's own end tokens.
        blocks: of the key-value pool.
        block_size: tokens in a block.
        prefix_cache: blocks of prompts stay known when no request uses or waits for them.
    """

    def __init__(
        self,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        blocks: BlockManager,
        block_size: int,
        prefix_cache: bool = False,
    ) -> None:
        self.max_rows, self.max_tokens, self.max_model_len = max_rows, max_tokens, max_model_len
        self.eos_token_ids = frozenset(eos_token_ids)
        self.blocks, self.block_size, self.prefix_cache = blocks, block_size, prefix_cache
        self.waiting: deque[Sequence] = deque()
        self.active: list[Sequence] = []
        self.preemptions = self.reused_tokens = 0
        self._slots: set[Slot] = set()
        self._waiting_for: Counter[bytes] = Counter()  # waiting sequences by the key of their whole prompt

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
        keys: dict[int, list[bytes]] = {}  # of prompt lists that several requests hold
        for request in requests:
            sequence = Sequence.of(request, self.eos_token_ids, self.max_model_len)
            # The last token's keys and values are never asked for.
            fits = blocks_for(sequence.full_length - 1, self.block_size) <= self.blocks.count
            if sequence.ids and sequence.ids[-1] in sequence.end_tokens:
                refused.append(sequence.result("stop"))
                continue
            if not fits or len(sequence.ids) >= sequence.max_new_tokens:
                refused.append(sequence.result("length" if fits and sequence.max_new_tokens > 0 else "refused"))
                continue
            if id(request.prompt_ids) not in keys:
                keys[id(request.prompt_ids)] = prompt_keys(request.prompt_ids, self.block_size)
            sequence.keys = keys[id(request.prompt_ids)]
            self._slots.add(request.slot)
            self._count_waiting(sequence, 1)
            self.waiting.append(sequence)
        return refused

    def _count_waiting(self, sequence: Sequence, change: int) -> None:
        key = sequence.keys[-1]
        self._waiting_for[key] += change
        if not self._waiting_for[key]:
            del self._waiting_for[key]

    # one step -----------------------------------------------------------------------------------------------------

    def schedule(self) -> Plan:
        """Choose the work of a step; :meth:`complete` must follow once its keys and values are in the pool."""
        plan, preemptions = Plan(), self.preemptions
        decoding = sum(sequence.computed == sequence.length - 1 for sequence in self.active)
        budget = max(self.max_tokens - decoding, SMALLEST_CHUNK)
        place = 0
        while place < len(self.active):  # preemption takes sequences from the end
            sequence = self.active[place]
            missing = sequence.length - sequence.computed
            count = missing if missing == 1 else min(missing, budget)
            if count and self._grow(sequence, sequence.computed + count):
                plan.work.append(Work(sequence, sequence.computed, sequence.computed + count))
                budget -= count if missing > 1 else 0
            place += 1
        if self.preemptions == preemptions:
            self._admit(plan, budget)
        plan.work.sort(key=lambda work: work.end - work.start > 1)
        return plan

    def _grow(self, sequence: Sequence, tokens: int) -> bool:
        """Blocks for this many tokens, if need be those of younger sequences; False: it had to give up its own."""
        missing = blocks_for(tokens, self.block_size) - len(sequence.blocks)
        while missing > 0:
            taken = self.blocks.take(missing)
            if taken is not None:
                sequence.blocks += taken
                break
            victim = self.active[-1]
            self._preempt(victim)
            self.preemptions += 1
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self.active.remove(sequence)
        self._count_waiting(sequence, 1)
        self._release(sequence)
        self.waiting.appendleft(sequence)

    def _admit(self, plan: Plan, budget: int) -> None:
        """Waiting sequences take free places; one whose prompt is being computed waits for it, others may pass."""
        in_progress = {s.keys[-1] for s in self.active if s.computed < len(s.request.prompt_ids)}
        passed: list[Sequence] = []
        while self.waiting and len(self.active) < self.max_rows and budget > 0:
            sequence = self.waiting.popleft()
            if sequence.keys[-1] in in_progress:
                passed.append(sequence)
                continue
            work = self._start(sequence, budget, plan)
            if work is None:  # no memory; the running ones will give some back
                self.waiting.appendleft(sequence)
                break
            sequence.started = sequence.started or time.monotonic()
            self._count_waiting(sequence, -1)
            if sequence.computed < len(sequence.request.prompt_ids) - 1:
                in_progress.add(sequence.keys[-1])
            self.active.append(sequence)
            plan.work.append(work)
            budget -= work.end - work.start
        self.waiting.extendleft(reversed(passed))

    def _start(self, sequence: Sequence, budget: int, plan: Plan) -> Work | None:
        """Give a waiting sequence the known blocks of its prompt and new ones behind; None: there are too few."""
        size, prompt = self.block_size, len(sequence.request.prompt_ids)
        known = self.blocks.find(sequence.keys)
        computed = min(len(known) * size, prompt, sequence.length - 1)
        partial = known[prompt // size] if prompt % size and len(known) > prompt // size else None
        shared = known[: prompt // size]
        self.blocks.share(shared)
        end = min(computed + budget, sequence.length)
        # Beside others it must have room to go on for a while, or it would soon be sent back.
        wanted = blocks_for(sequence.length + size, size) - len(shared)
        short = bool(self.active) and self.blocks.available < wanted
        taken = None if short else self.blocks.take(blocks_for(end, size) - len(shared))
        if taken is None:
            self.blocks.release(shared, keep_known=True)
            return None
        if partial is not None:
            plan.copies.append((partial, taken[0]))
        sequence.blocks, sequence.computed = shared + taken, computed
        self.reused_tokens += computed
        return Work(sequence, computed, end)

    def complete(self, plan: Plan) -> None:
        """The plan's keys and values are in the pool: others may use those of prompts."""
        for work in plan.work:
            sequence, prompt = work.sequence, len(work.sequence.request.prompt_ids)
            sequence.computed = work.end
            if work.start < prompt:
                done = len(sequence.keys) if work.end >= prompt else work.end // self.block_size
                for block, key in zip(sequence.blocks[:done], sequence.keys, strict=False):
                    self.blocks.publish(block, key)

    # the end ------------------------------------------------------------------------------------------------------

    def remove(self, ended: Iterable[Sequence]) -> None:
        """Take running sequences out."""
        gone = {id(sequence) for sequence in ended}
        for sequence in self.active:
            if id(sequence) in gone:
                self._slots.discard(sequence.request.slot)
                self._release(sequence)
        self.active = [sequence for sequence in self.active if id(sequence) not in gone]

    def _release(self, sequence: Sequence) -> None:
        keep = self.prefix_cache or sequence.keys[-1] in self._waiting_for
        self.blocks.release(sequence.blocks, keep)
        sequence.blocks, sequence.computed = [], 0

    def abort(self, slots: set[Slot] | None) -> list[Result]:
        """End these requests (None: all); their results so far."""
        chosen = lambda sequence: slots is None or sequence.request.slot in slots  # noqa: E731
        dropped = [sequence for sequence in self.waiting if chosen(sequence)]
        self.waiting = deque(sequence for sequence in self.waiting if not chosen(sequence))
        for sequence in dropped:
            self._slots.discard(sequence.request.slot)
            self._count_waiting(sequence, -1)
        running = [sequence for sequence in self.active if chosen(sequence)]
        self.remove(running)
        return [sequence.result("abort") for sequence in dropped + running]

    def requeue_active(self) -> None:
        """Put running responses back in front of the queue and forget every block: weights have changed."""
        for sequence in reversed(self.active):
            self._preempt(sequence)
        self.blocks.clear()
