"""Which worker answers which request. Bookkeeping alone: no engine, no threads, and the time (seconds) is told to it.

A request waits in the queue, or is in the hands of one worker, or has an outcome: its result, or a loss with a reason.
Workers are given work as follows.

- By speed: all work that is not done, in tokens that may still be sampled, would take the workers together a certain
  time; no worker is given more than it does in that time. So the last requests of a batch do not end up on a slow
  worker because it had a place free, and with a long queue only the places limit.
- Together: the requests of one prompt go to one worker, which then computes the prompt once. What its places do not
  hold waits for it, and others take that only when the queue is empty. A worker's share may cut a group as well.
- In order: what a lost worker had goes back to the front, what an engine failed with to the end. Validation, which
  somebody waits for, is submitted to the front.

A worker's speed is the tokens it finished over the time it needed, the latest responses counting most. A response in
hand together with others counts for its part of that time, so that a new worker is measured right from its first one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from verl.errors import EngineError
from verl.rollout.protocol import Request, Result, Resume, Slot

SPEED_MEMORY = 0.95  # weight of all earlier responses in a worker's speed when one more is finished
# Prompts in a row that fail at the first attempt, while none succeeds and no older one is left to hope for: all do.
HOPELESS_PROMPTS = 8


@dataclass(frozen=True)
class Lost:
    """A slot without a response, and why. It is never a response of reward zero."""

    slot: Slot
    reason: str


Outcome = Result | Lost


@dataclass(frozen=True)
class DispatchStats:
    """What is where now, and counters since the start.

    Attributes:
        queued: requests that wait for a worker; ``oldest_wait``: seconds since the oldest of them was submitted.
        in_flight, speed, idle_share: by worker. Tokens a second (None: not known yet); share of the time since it
            joined that it had nothing in hand.
        counts: ``finished``, ``lost``, ``retried`` (attempts repeated after a lost worker or a failed prompt), ``late``
            (results of slots that were no longer in that worker's hands, dropped).
    """

    queued: int
    oldest_wait: float
    in_flight: dict[str, int]
    speed: dict[str, float | None]
    idle_share: dict[str, float]
    counts: Counter[str]


@dataclass(eq=False, slots=True)
class _Entry:
    request: Request
    submitted: float
    worker: str | None = None  # that has it in hand
    sent: float = 0.0
    served: float = 0.0  # the worker's ``served`` when it was sent
    losses: int = 0  # workers that were lost with it
    failures: int = 0
    failed_with: str | None = None  # the last worker whose engine failed with it
    gone: bool = False  # withdrawn while it was in the queue, and to be passed over there

    @property
    def sampled(self) -> int:
        return len(self.request.resume.response_ids) if self.request.resume else 0

    @property
    def tokens(self) -> int:
        """That may still be sampled."""
        return max(self.request.sampling.max_new_tokens - self.sampled, 1)

    @property
    def prompt(self) -> int:
        return len(self.request.prompt_ids)


_Group = deque[_Entry]  # requests of one prompt that wait together


@dataclass(eq=False, slots=True)
class _Worker:
    name: str
    room: int  # places free
    joined: float
    seen: float  # up to when ``served`` and ``idle`` are counted
    draining: bool = False
    hand: dict[Slot, _Entry] = field(default_factory=dict)
    prompts: Counter[str] = field(default_factory=Counter)  # requests in hand by prompt
    tokens: int = 0  # that may still be sampled for what is in hand, and its prompts, each once
    rest: _Group | None = None  # waits for places here
    served: float = 0.0  # seconds of its time that a response would have got, had it been in hand from the start
    idle: float = 0.0
    made: float = 0.0  # tokens of the latest responses, and the seconds that they took
    spent: float = 0.0
    speed: float | None = None  # tokens a second
    rate: float = 1.0  # its speed, or a guess
    share: float = 0.0  # of all outstanding tokens

    def clock(self, now: float) -> None:
        elapsed = max(now - self.seen, 0.0)
        if self.hand:
            self.served += elapsed / len(self.hand)
        else:
            self.idle += elapsed
        self.seen = max(now, self.seen)

    def accept(self, entry: _Entry, now: float) -> None:
        self.clock(now)
        slot = entry.request.slot
        entry.worker, entry.sent, entry.served = self.name, now, self.served
        self.tokens += entry.tokens + (0 if self.prompts[slot.uid] else entry.prompt)
        self.prompts[slot.uid] += 1
        self.hand[slot] = entry
        self.room -= 1

    def release(self, slot: Slot, now: float, response: int | None = None) -> _Entry | None:
        """Take this slot out of hand, if it is there; ``response``: tokens of the response, to measure the speed."""
        if slot not in self.hand:
            return None
        self.clock(now)
        entry = self.hand.pop(slot)
        entry.worker = None
        self.room += 1
        self.tokens -= entry.tokens
        self.prompts[slot.uid] -= 1
        if not self.prompts[slot.uid]:
            del self.prompts[slot.uid]
            self.tokens -= entry.prompt
        if response is not None:
            self.made = SPEED_MEMORY * self.made + response - entry.sampled
            self.spent = SPEED_MEMORY * self.spent + self.served - entry.served
            self.speed = self.made / self.spent if self.made and self.spent else None
        return entry


class Dispatcher:
    """The queue, what is in flight where, and the outcomes.

    Args:
        worker_attempts: a request is lost with the last of so many workers that were lost with it.
        prompt_attempts: a request is lost when the engine has failed with it so often.
        seconds: a request is lost so long after it was submitted (see :meth:`expire`).
    """

    def __init__(self, worker_attempts: int = 3, prompt_attempts: int = 3, seconds: float = inf) -> None:
        self._worker_attempts, self._prompt_attempts, self._seconds = worker_attempts, prompt_attempts, seconds
        self._workers: dict[str, _Worker] = {}
        self._queue: deque[_Group] = deque()
        self._queued = self._queued_tokens = 0  # in the queue and in what waits for places with one worker
        self._unfinished: OrderedDict[Slot, _Entry] = OrderedDict()  # oldest first
        self._outcomes: list[Outcome] = []
        self._counts: Counter[str] = Counter()
        self._failing: set[str] = set()  # prompts that failed at their first attempt since anything succeeded

    def add_worker(self, worker: str, capacity: int, now: float) -> None:
        """A new worker that takes at most ``capacity`` requests at a time, those that its engine queues included."""
        if worker in self._workers or capacity < 1:
            raise ValueError(f"worker {worker!r} is there already, or has no places ({capacity})")
        self._workers[worker] = _Worker(worker, capacity, now, now)

    def in_hand(self, worker: str) -> int:
        """Requests that this worker has."""
        return len(self._workers[worker].hand)

    def drain_worker(self, worker: str, draining: bool = True) -> None:
        """It gets nothing new (until it is told otherwise), and finishes what it has or hands it back."""
        self._workers[worker].draining = draining
        self._return_rest(self._workers[worker])

    def remove_worker(self, worker: str, reason: str, now: float) -> None:
        """It is gone (or unknown: nothing happens). What it had in hand goes to the front of the queue or is lost."""
        gone = self._workers.pop(worker, None)
        if gone is None:
            return
        self._return_rest(gone)
        back = [entry for slot in list(gone.hand) if (entry := gone.release(slot, now)) is not None]
        for entry in back:
            entry.losses += 1
            if entry.losses >= self._worker_attempts:
                self._lose(entry, f"{entry.losses} workers were lost with it, the last one: {reason}")
        self._retry([entry for entry in back if entry.losses < self._worker_attempts], front=True)

    def submit(self, requests: Sequence[Request], now: float, front: bool = False) -> None:
        """Queue these requests; ``front``: before all others.

        Raises:
            EngineError: a slot is submitted already and has no outcome yet. Nothing of the call is queued then.
        """
        times = Counter(request.slot for request in requests)
        for slot, n in times.items():
            if n > 1 or slot in self._unfinished:
                raise EngineError("a sample was asked for again before it was done", slot)
        entries = [_Entry(request, now) for request in requests]
        self._unfinished.update((entry.request.slot, entry) for entry in entries)
        self._enqueue(entries, front)

    def cancel(self, slots: Iterable[Slot], now: float) -> dict[str, list[Slot]]:
        """Forget these slots: they get no outcome. Returns those that are to be aborted, by worker."""
        forgotten = dict.fromkeys(slots)
        self._outcomes = [outcome for outcome in self._outcomes if outcome.slot not in forgotten]
        return self._withdraw([self._unfinished[slot] for slot in forgotten if slot in self._unfinished], now)

    def expire(self, now: float) -> dict[str, list[Slot]]:
        """Lose what was submitted too long ago. Returns what is to be aborted, by worker."""
        overdue = []
        for entry in self._unfinished.values():
            if now - entry.submitted < self._seconds:
                break
            overdue.append(entry)
        aborts = self._withdraw(overdue, now)
        for entry in overdue:
            where = "in the queue" if entry.gone else "with a worker"
            self._lose(entry, f"it had no response after {now - entry.submitted:.0f} s, and was {where} then")
        return aborts

    def assign(self, now: float) -> dict[str, list[Request]]:
        """What to send to which worker now; it is in their hands from here on."""
        sent: dict[str, list[Request]] = {}
        ready = self._share_out() if self._queued else []
        while ready and (group := self._claim(worker := self._next_worker(ready))) is not None:
            prompt, took = group[0].prompt, 0
            while group and worker.room and (not took or worker.tokens < worker.share):
                entry = group.popleft()
                if not entry.gone:
                    self._queued, self._queued_tokens = self._queued - 1, self._queued_tokens - entry.tokens
                    worker.accept(entry, now)
                    sent.setdefault(worker.name, []).append(entry.request)
                    took += 1
            if not group:
                self._queued_tokens -= prompt
            elif worker.room:
                self._queue.appendleft(group)
            else:
                worker.rest = group
            if not worker.room or worker.tokens >= worker.share:
                ready.remove(worker)
        return sent

    def complete(self, worker: str, results: Iterable[Result], now: float) -> None:
        """Results of this worker. One whose slot it no longer has is late, and dropped."""
        aborted = []
        for result in results:
            if result.finish_reason == "abort":
                aborted.append(result)
            elif self._release(worker, result.slot, now, len(result.response_ids)) is None:
                self._counts["late"] += 1
            else:
                del self._unfinished[result.slot]
                self._outcomes.append(result)
                self._counts["finished"] += 1
                self._failing.clear()
        self.hand_back(worker, aborted, now)

    def hand_back(self, worker: str, results: Iterable[Result], now: float) -> None:
        """Aborted responses of a worker that drains or pauses: others go on where they ended. No attempt is counted."""
        back = []
        for result in results:
            entry = self._release(worker, result.slot, now, len(result.response_ids))
            if entry is not None:
                if len(result.response_ids):
                    entry.request = replace(entry.request, resume=Resume.of(result))
                back.append(entry)
        self._enqueue(back, front=True)

    def fail(self, worker: str, slots: Iterable[Slot], reason: str, now: float) -> None:
        """The engine failed with these. They are tried again after all others, by another worker that has a place if
        there is one, or lost.

        Raises:
            EngineError: it fails with all prompts.
        """
        failed = [entry for slot in slots if (entry := self._release(worker, slot, now)) is not None]
        for entry in failed:
            entry.failures, entry.failed_with = entry.failures + 1, worker
            if entry.failures == 1:
                self._failing.add(entry.request.slot.uid)
            if entry.failures >= self._prompt_attempts:
                self._lose(entry, f"the engine failed with it {entry.failures} times, the last time: {reason}")
        self._retry([entry for entry in failed if entry.failures < self._prompt_attempts])
        if failed and self._hopeless(failed[0].sent):
            raise EngineError("the engine fails with every prompt", reason, "see what it says, and its log")

    def take(self) -> list[Outcome]:
        """The outcomes since the last call, each slot's once."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def stats(self, now: float) -> DispatchStats:
        workers = self._workers.values()
        for worker in workers:
            worker.clock(now)
        rests = [worker.rest for worker in workers if worker.rest is not None]
        live = [
            (entry.submitted for group in waiting for entry in group if not entry.gone)
            for waiting in (self._queue, rests)
        ]
        return DispatchStats(
            queued=self._queued,
            oldest_wait=now - min(next(submitted, now) for submitted in live),  # about in order of age
            in_flight={worker.name: len(worker.hand) for worker in workers},
            speed={worker.name: worker.speed for worker in workers},
            idle_share={w.name: w.idle / (now - w.joined) if now > w.joined else 0.0 for w in workers},
            counts=self._counts.copy(),
        )

    def _enqueue(self, entries: Iterable[_Entry], front: bool = False) -> None:
        groups: dict[str, _Group] = {}
        for entry in entries:
            self._queued, self._queued_tokens = self._queued + 1, self._queued_tokens + entry.tokens
            groups.setdefault(entry.request.slot.uid, deque()).append(entry)
        self._queued_tokens += sum(group[0].prompt for group in groups.values())
        if front:
            self._queue.extendleft(reversed(groups.values()))
        else:
            self._queue.extend(groups.values())

    def _retry(self, entries: Collection[_Entry], front: bool = False) -> None:
        self._counts["retried"] += len(entries)
        self._enqueue(entries, front)

    def _return_rest(self, worker: _Worker) -> None:
        if worker.rest is not None:
            self._queue.appendleft(worker.rest)
            worker.rest = None

    def _share_out(self) -> list[_Worker]:
        """Set every worker's share of all work; those that have a place and are below their share."""
        workers = [worker for worker in self._workers.values() if not worker.draining]
        known = [worker.speed for worker in workers if worker.speed is not None]
        guess = sum(known) / len(known) if known else 1.0
        rate = sum(known) + guess * (len(workers) - len(known))
        work = self._queued_tokens + sum([worker.tokens for worker in workers])
        ready = []
        for worker in workers:
            worker.rate = worker.speed or guess
            worker.share = worker.rate * work / rate
            if worker.room and worker.tokens < worker.share:
                ready.append(worker)
        return ready

    def _next_worker(self, ready: list[_Worker]) -> _Worker:
        """One that has room for the whole next group, and of these the one that would be done with it first."""
        group = self._queue[0] if self._queue else ()
        size, cost = len(group), sum(entry.tokens for entry in group)
        avoided = group[0].failed_with if group else None
        return min(ready, key=lambda w: (w.name == avoided, w.room < size, (w.tokens + cost) / w.rate))

    def _claim(self, worker: _Worker) -> _Group | None:
        """The group that it goes on with: its own, the next one, or the one that waits for the busiest worker."""
        if worker.rest is None and self._queue:
            return self._queue.popleft()
        donor: _Worker | None = worker
        if worker.rest is None:
            others = (other for other in self._workers.values() if other.rest is not None)
            donor = max(others, key=lambda other: other.tokens / other.rate, default=None)
        if donor is None:
            return None
        group, donor.rest = donor.rest, None
        return group

    def _release(self, worker: str, slot: Slot, now: float, response: int | None = None) -> _Entry | None:
        return self._workers[worker].release(slot, now, response) if worker in self._workers else None

    def _withdraw(self, entries: list[_Entry], now: float) -> dict[str, list[Slot]]:
        aborts: dict[str, list[Slot]] = {}
        for entry in entries:
            slot = entry.request.slot
            del self._unfinished[slot]
            if entry.worker is None:
                entry.gone = True
                self._queued, self._queued_tokens = self._queued - 1, self._queued_tokens - entry.tokens
            else:
                aborts.setdefault(entry.worker, []).append(slot)
                self._workers[entry.worker].release(slot, now)
        return aborts

    def _lose(self, entry: _Entry, reason: str) -> None:
        self._unfinished.pop(entry.request.slot, None)
        self._outcomes.append(Lost(entry.request.slot, reason))
        self._counts["lost"] += 1

    def _hopeless(self, sent: float) -> bool:
        """Whether no prompt succeeds: none sent up to then that is still in hand is left to hope for."""
        if len(self._failing) < HOPELESS_PROMPTS:
            return not self._unfinished and not self._counts["finished"]
        in_hand = (entry for worker in self._workers.values() for entry in worker.hand.values())
        return all(entry.failures or entry.sent > sent for entry in in_hand)
