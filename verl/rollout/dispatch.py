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
- Apart: one worker may be lost by accident. What a second one was lost with is suspected of having killed both, and
  goes on in halves, each with a worker that has nothing else, until one prompt is left. Only that is charged with the
  loss, and it is lost itself in the end.

A worker's speed is the tokens it finished over the time it needed, the latest responses counting most. A response in
hand together with others counts for its part of that time, so that a new worker is measured right from its first one.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import inf

from verl.errors import EngineError
from verl.rollout.hands import Entry, Waiting, WorkerHand
from verl.rollout.protocol import Request, Result, Resume, Slot

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


class Dispatcher:
    """The queue, what is in flight where, and the outcomes.

    Args:
        worker_attempts: a request is lost with the last of so many workers that were lost with its prompt alone.
        prompt_attempts: a request is lost when the engine has failed with it so often.
        seconds: a request is lost so long after it was submitted (see :meth:`expire`).
    """

    def __init__(self, worker_attempts: int = 3, prompt_attempts: int = 3, seconds: float = inf) -> None:
        self._worker_attempts, self._prompt_attempts, self._seconds = worker_attempts, prompt_attempts, seconds
        self._workers: dict[str, WorkerHand] = {}
        self._queue: deque[Waiting] = deque()
        self._suspects: deque[Waiting] = deque()  # of one or several prompts
        self._queued = self._queued_tokens = 0  # in all of these and in what waits for places with one worker
        self._unfinished: OrderedDict[Slot, Entry] = OrderedDict()  # oldest first
        self._outcomes: list[Outcome] = []
        self._counts: Counter[str] = Counter()
        self._before = 0, 0  # finished, and failing, when last nothing was in hand
        self._failing: set[str] = set()  # prompts that failed at their first attempt since anything succeeded

    def add_worker(self, worker: str, capacity: int, now: float) -> None:
        """A new worker that takes at most ``capacity`` requests at a time, those that its engine queues included."""
        if worker in self._workers or capacity < 1:
            raise ValueError(f"worker {worker!r} is there already, or has no places ({capacity})")
        self._workers[worker] = WorkerHand(worker, capacity, now, now)

    def in_hand(self, worker: str) -> int:
        """Requests that this worker has."""
        return len(self._workers[worker].hand)

    def drain_worker(self, worker: str, draining: bool = True) -> None:
        """It gets nothing new (until it is told otherwise), and finishes what it has or hands it back."""
        self._workers[worker].draining = draining
        self._return_rest(self._workers[worker])

    def remove_worker(self, worker: str, reason: str, now: float) -> bool:
        """It is gone (or unknown: nothing happens). What it had in hand is tried again, first or apart, or is lost.

        Returns:
            It had one prompt alone, which is charged with the loss.
        """
        gone = self._workers.pop(worker, None)
        if gone is None:
            return False
        self._return_rest(gone)
        alone, first, suspects = len(gone.prompts) == 1, list[Entry](), list[Entry]()
        for slot in list(gone.hand):
            entry = gone.release(slot, now)
            assert entry is not None
            entry.losses, entry.charged = entry.losses + 1, entry.charged + alone
            if entry.charged >= self._worker_attempts:
                self._lose(entry, f"{entry.charged} workers were lost with its prompt alone, the last one: {reason}")
            else:
                (suspects if entry.losses > 1 or alone else first).append(entry)
        self._retry(first, front=True)
        self._suspect(suspects)
        return alone

    def submit(self, requests: Sequence[Request], now: float, front: bool = False) -> None:
        """Queue these requests; ``front``: before all others.

        Raises:
            EngineError: a slot is submitted already and has no outcome yet. Nothing of the call is queued then.
        """
        times = Counter(request.slot for request in requests)
        for slot, n in times.items():
            if n > 1 or slot in self._unfinished:
                raise EngineError("a sample was asked for again before it was done", slot)
        entries = [Entry(request, now) for request in requests]
        if not self._unfinished:
            self._before = self._counts["finished"], len(self._failing)
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
        sent = self._examine(now)
        ready = self._share_out() if self._queued else []
        while ready and (group := self._claim(worker := self._next_worker(ready))) is not None:
            prompt, took = group[0].prompt, 0
            while group and worker.room and (not took or worker.tokens < worker.share):
                took += self._send(group, worker, now, sent)
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
            for waiting in (self._queue, self._suspects, rests)
        ]
        return DispatchStats(
            queued=self._queued,
            oldest_wait=now - min(next(submitted, now) for submitted in live),  # about in order of age
            in_flight={worker.name: len(worker.hand) for worker in workers},
            speed={worker.name: worker.speed for worker in workers},
            idle_share={w.name: w.idle / (now - w.joined) if now > w.joined else 0.0 for w in workers},
            counts=self._counts.copy(),
        )

    def _enqueue(self, entries: Iterable[Entry], front: bool = False) -> None:
        groups: dict[str, Waiting] = {}
        for entry in entries:
            self._queued, self._queued_tokens = self._queued + 1, self._queued_tokens + entry.tokens
            groups.setdefault(entry.request.slot.uid, deque()).append(entry)
        self._queued_tokens += sum(group[0].prompt for group in groups.values())
        if front:
            self._queue.extendleft(reversed(groups.values()))
        else:
            self._queue.extend(groups.values())

    def _retry(self, entries: Collection[Entry], front: bool = False) -> None:
        self._counts["retried"] += len(entries)
        self._enqueue(entries, front)

    def _suspect(self, entries: list[Entry]) -> None:
        """By halves of their prompts. These wait in turn, so that the innocent show in between that workers as such are
        well."""
        self._counts["retried"] += len(entries)
        prompts: dict[str, list[Entry]] = {}
        for entry in entries:
            prompts.setdefault(entry.request.slot.uid, []).append(entry)
        parts, middle = list(prompts.values()), len(prompts) // 2
        self._suspects += [deque(chain.from_iterable(half)) for half in (parts[:middle], parts[middle:]) if half]
        self._queued += len(entries)
        self._queued_tokens += sum(entry.tokens for entry in entries)

    def _examine(self, now: float) -> dict[str, list[Request]]:
        """Send suspects to those who have nothing in hand; else one worker gets nothing new until it has."""
        sent: dict[str, list[Request]] = {}
        workers = [worker for worker in self._workers.values() if not worker.draining]
        for worker in workers:
            worker.apart = worker.apart and bool(worker.hand)
            while self._suspects and not worker.hand:
                suspects = self._suspects[0]
                while suspects and worker.room:
                    worker.apart |= self._send(suspects, worker, now, sent)
                if not suspects:
                    self._suspects.popleft()
        if self._suspects and workers and not any(worker.apart for worker in workers):
            min(workers, key=lambda worker: worker.tokens / worker.rate).apart = True
        for worker in workers:
            if worker.apart:
                self._return_rest(worker)
        return sent

    def _send(self, group: Waiting, worker: WorkerHand, now: float, sent: dict[str, list[Request]]) -> bool:
        """The next one of a group; False: it has been withdrawn."""
        entry = group.popleft()
        if not entry.gone:
            self._queued, self._queued_tokens = self._queued - 1, self._queued_tokens - entry.tokens
            worker.accept(entry, now)
            sent.setdefault(worker.name, []).append(entry.request)
        return not entry.gone

    def _return_rest(self, worker: WorkerHand) -> None:
        if worker.rest is not None:
            self._queue.appendleft(worker.rest)
            worker.rest = None

    def _share_out(self) -> list[WorkerHand]:
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
            if worker.room and not worker.apart and worker.tokens < worker.share:
                ready.append(worker)
        return ready

    def _next_worker(self, ready: list[WorkerHand]) -> WorkerHand:
        """One that has room for the whole next group, and of these the one that would be done with it first."""
        group = self._queue[0] if self._queue else ()
        size, cost = len(group), sum(entry.tokens for entry in group)
        avoided = group[0].failed_with if group else None
        return min(ready, key=lambda w: (w.name == avoided, w.room < size, (w.tokens + cost) / w.rate))

    def _claim(self, worker: WorkerHand) -> Waiting | None:
        """The group that it goes on with: its own, the next one, or the one that waits for the busiest worker."""
        if worker.rest is None and self._queue:
            return self._queue.popleft()
        donor: WorkerHand | None = worker
        if worker.rest is None:
            others = (other for other in self._workers.values() if other.rest is not None)
            donor = max(others, key=lambda other: other.tokens / other.rate, default=None)
        if donor is None:
            return None
        group, donor.rest = donor.rest, None
        return group

    def _release(self, worker: str, slot: Slot, now: float, response: int | None = None) -> Entry | None:
        return self._workers[worker].release(slot, now, response) if worker in self._workers else None

    def _withdraw(self, entries: list[Entry], now: float) -> dict[str, list[Slot]]:
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

    def _lose(self, entry: Entry, reason: str) -> None:
        self._unfinished.pop(entry.request.slot, None)
        self._outcomes.append(Lost(entry.request.slot, reason))
        self._counts["lost"] += 1

    def _hopeless(self, sent: float) -> bool:
        """Whether no prompt succeeds: none sent up to then that is still in hand is left to hope for."""
        if len(self._failing) < HOPELESS_PROMPTS:
            finished, failing = self._before
            several = not finished or len(self._failing) > failing + 1  # one prompt alone may be at fault
            return several and not self._unfinished and self._counts["finished"] == finished
        in_hand = (entry for worker in self._workers.values() for entry in worker.hand.values())
        return all(entry.failures or entry.sent > sent for entry in in_hand)
