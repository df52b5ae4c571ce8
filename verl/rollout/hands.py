"""What a worker has in hand, and how fast it is. A part of :mod:`verl.rollout.dispatch`."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from verl.rollout.protocol import Request, Slot

SPEED_MEMORY = 0.95  # weight of all earlier responses in a worker's speed when one more is finished


@dataclass(eq=False, slots=True)
class Entry:
    request: Request
    submitted: float
    worker: str | None = None  # that has it in hand
    sent: float = 0.0
    served: float = 0.0  # the worker's ``served`` when it was sent
    losses: int = 0  # workers that were lost with it, and of these those that had its prompt alone
    charged: int = 0
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


Waiting = deque[Entry]  # requests of one prompt that wait together


@dataclass(eq=False, slots=True)
class WorkerHand:
    name: str
    room: int  # places free
    joined: float
    seen: float  # up to when ``served`` and ``idle`` are counted
    draining: bool = False
    apart: bool = False  # it has suspects, or is to have them once its hand is empty, and nothing else meanwhile
    hand: dict[Slot, Entry] = field(default_factory=dict)
    prompts: Counter[str] = field(default_factory=Counter)  # requests in hand by prompt
    tokens: int = 0  # that may still be sampled for what is in hand, and its prompts, each once
    rest: Waiting | None = None  # waits for places here
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

    def accept(self, entry: Entry, now: float) -> None:
        self.clock(now)
        slot = entry.request.slot
        entry.worker, entry.sent, entry.served = self.name, now, self.served
        self.tokens += entry.tokens + (0 if self.prompts[slot.uid] else entry.prompt)
        self.prompts[slot.uid] += 1
        self.hand[slot] = entry
        self.room -= 1

    def release(self, slot: Slot, now: float, response: int | None = None) -> Entry | None:
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
