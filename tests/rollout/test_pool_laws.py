"""Dispatcher and buffer together, whatever happens to them in whatever order: the laws hold and nothing gets stuck."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from hypothesis import settings as examples
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from pool_cases import group, result

from verl.errors import EngineError
from verl.rollout.buffer import Group, GroupBuffer, Taken
from verl.rollout.dispatch import Dispatcher
from verl.rollout.protocol import Request, Result, Slot

MEMBERS, PROMPTS, STEPS = 2, 2, 6
WORKER_ATTEMPTS, PROMPT_ATTEMPTS, SECONDS = 2, 3, 100.0


class Pool(RuleBasedStateMachine):
    """A run of ``STEPS`` steps with ``PROMPTS`` prompts each; ``pending``: asked for and without an outcome."""

    @initialize(staleness=st.integers(0, 1), unit=st.sampled_from(["sample", "token"]), slow=st.integers(0, 3))
    def start(self, staleness: int, unit: Any, slow: int) -> None:
        self.slow = slow
        self.staleness, self.unit, self.names = staleness, unit, 0
        self.version, self.draws, self.now = 0, 0, 0.0
        self.further = self.extra = 0  # groups that the step wants beside its batch now, and that all steps got
        self.trained: set[str] = set()
        self.requeued: set[str] = set()
        self.checkpoint: dict[str, Any] = {}
        self.resumes = 0
        self.anew()
        self.save()
        self.add(5)
        self.draw(9)

    def anew(self) -> None:
        self.dispatcher = Dispatcher(WORKER_ATTEMPTS, PROMPT_ATTEMPTS, SECONDS)
        self.buffer = GroupBuffer(PROMPTS, self.staleness, STEPS, self.unit)
        self.hands: dict[str, dict[Slot, tuple[int, Request]]] = {}  # version when it was sent
        self.capacity: dict[str, int] = {}
        self.draining: set[str] = set()
        self.pending: set[Slot] = set()
        self.charged: Counter[Slot] = Counter()  # since it was submitted: workers lost with its prompt alone
        self.losses: Counter[Slot] = Counter()
        self.suspects: dict[Slot, str] = {}  # the worker that they were lost with, where they are to go on apart
        self.failures: Counter[Slot] = Counter()

    # What the loop does

    def ask(self, requests: list[Request]) -> None:
        self.dispatcher.submit(requests, self.now)
        self.buffer.submit([request.slot for request in requests])
        assert self.pending.isdisjoint(request.slot for request in requests)
        self.pending.update(request.slot for request in requests)
        for request in requests:
            self.charged[request.slot] = self.losses[request.slot] = self.failures[request.slot] = 0
            self.suspects.pop(request.slot, None)

    @rule()
    def collect(self) -> None:
        for outcome in self.dispatcher.take():
            self.pending.remove(outcome.slot)  # law 5: once, and only what was asked for
            self.buffer.add(outcome)
        stats = self.dispatcher.stats(self.now)
        assert stats.queued + sum(stats.in_flight.values()) == len(self.pending)

    def abort(self, slots: dict[str, list[Slot]]) -> None:
        for name, gone in slots.items():
            for slot in gone:
                del self.hands[name][slot]

    @rule(most=st.integers(1, 9))
    def draw(self, most: int) -> None:
        prompts = min(self.buffer.budget(self.version), most)
        self.ask([r for draw in range(self.draws, self.draws + prompts) for r in group(draw, MEMBERS)])
        self.draws += prompts

    @rule(further=st.integers(0, 2))
    def train(self, further: int = 0) -> None:
        """A batch and, beside it, ``further`` groups: in place of as many as it does not train."""
        while True:
            taken = self.buffer.take(self.version, self.further or None)
            self.withdraw(taken)
            if not taken.groups:
                return
            assert len(taken.groups) == (self.further or PROMPTS)
            for trained in taken.groups:
                self.check(trained)
            self.extra += self.further
            self.further = 0 if self.further else further
            if not self.further:
                self.version += 1
                return

    def withdraw(self, taken: Taken) -> None:
        assert self.requeued.isdisjoint(taken.again) and self.requeued.issuperset(taken.dropped)
        self.requeued.update(taken.again)
        again = [request for uid in taken.again for request in group(int(uid.split(":")[1]), MEMBERS)]
        slots = [Slot(uid, index) for uid in taken.again + taken.dropped for index in range(MEMBERS)]
        self.abort(self.dispatcher.cancel(slots, self.now))
        self.pending.difference_update(slots)
        self.ask(again)

    def check(self, trained: Group) -> None:
        assert trained.uid not in self.trained
        self.trained.add(trained.uid)
        members = [*trained.results, *trained.lost]
        assert trained.results and {member.slot.index for member in members} == set(range(MEMBERS))
        for member in trained.results:  # law 7
            assert (self.version - member.versions[member.loss_mask] <= self.staleness).all()
            assert self.unit == "token" or member.loss_mask.all()
            assert member.response_ids.tolist() == list(range(len(member.versions)))

    @precondition(lambda self: not self.further)
    @rule()
    def save(self) -> None:
        state = {"buffer": self.buffer.state_dict(), "draws": self.draws, "version": self.version}
        self.checkpoint = json.loads(json.dumps(state))
        self.checkpoint["seen"] = (set(self.trained), set(self.requeued), self.extra)

    @precondition(lambda self: self.resumes < 2)
    @rule()
    def resume(self) -> None:
        self.resumes += 1
        self.anew()
        self.version, self.draws = self.checkpoint["version"], self.checkpoint["draws"]
        trained, requeued, self.extra = self.checkpoint["seen"]
        self.trained, self.requeued, self.further = set(trained), set(requeued), 0
        self.buffer.load_state_dict(self.checkpoint["buffer"])
        self.ask([r for uid in self.buffer.outstanding for r in group(int(uid.split(":")[1]), MEMBERS)])

    # What happens to workers

    @rule(capacity=st.integers(1, 5))
    def add(self, capacity: int) -> None:
        self.names += 1
        name = str(self.names)
        self.dispatcher.add_worker(name, capacity, self.now)
        self.hands[name], self.capacity[name] = {}, capacity

    @rule()
    def assign(self) -> None:
        for name, requests in self.dispatcher.assign(self.now).items():
            assert name not in self.draining
            for request in requests:
                assert not any(request.slot in hand for hand in self.hands.values())
                self.hands[name][request.slot] = (self.version, request)
                assert self.charged[request.slot] < WORKER_ATTEMPTS and self.failures[request.slot] < PROMPT_ATTEMPTS
            assert len(self.hands[name]) <= self.capacity[name]
            assert len({self.suspects.get(slot) for slot in self.hands[name]}) == 1

    def some(self, data: st.DataObject) -> tuple[str, list[Slot]]:
        """A worker, and some of what it has in hand."""
        name = data.draw(st.sampled_from(sorted(self.hands)))
        hand = sorted(self.hands[name], key=lambda slot: (-slot.index, slot.uid))
        return name, hand[: data.draw(st.integers(min(1, len(hand)), len(hand)))]

    def response(self, name: str, slot: Slot, reason: Any = "stop", tokens: int = 1) -> Result:
        """What it had before, tokens of the version under which it was sent, one of now."""
        sent, request = self.hands[name].pop(slot)
        before = request.resume.versions.tolist() if request.resume else []
        return result(slot, before + ([sent] * tokens + [self.version] if tokens else []), reason)

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name, slots = self.some(data)
        answers = [self.response(name, slot) for slot in slots]
        self.dispatcher.complete(name, answers + answers[:1], self.now)  # one of them twice

    @rule(members=st.integers(0, MEMBERS), late=st.booleans())
    def step(self, members: int, late: bool) -> None:
        """The usual: all is asked for, sampled and trained, but of every third prompt only some members."""
        self.draw(9)
        self.assign()
        for name, hand in self.hands.items():
            slots = [slot for slot in hand if slot.index < members or int(slot.uid.split(":")[1]) % 3 != self.slow]
            self.dispatcher.complete(name, [self.response(name, slot) for slot in slots], self.now)
        if late:
            self.train()
        self.collect()
        self.train()

    @precondition(lambda self: self.hands)
    @rule(data=st.data(), tokens=st.integers(0, 2))
    def pause(self, data: st.DataObject, tokens: int) -> None:
        name, slots = self.some(data)
        self.dispatcher.hand_back(name, [self.response(name, slot, "abort", tokens) for slot in slots], self.now)
        for slot in slots:
            self.suspects.pop(slot, None)

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        name, slots = self.some(data)
        self.failures.update(slots)
        for slot in slots:
            del self.hands[name][slot]
            self.suspects.pop(slot, None)
        try:
            self.dispatcher.fail(name, slots, "broken", self.now)
        except EngineError:
            assert slots

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def answer_late(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from([*sorted(self.hands), "gone"]))
        draw = data.draw(st.integers(0, max(self.draws - 1, 0)))
        self.collect()
        late = [result(r.slot) for r in group(draw, MEMBERS) if r.slot not in self.hands.get(name, {})]
        self.dispatcher.complete(name, late, self.now)
        self.dispatcher.fail(name, [answer.slot for answer in late], "late", self.now)
        assert self.dispatcher.take() == []

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.hands)))
        self.dispatcher.drain_worker(name)
        self.draining.add(name)

    @precondition(lambda self: self.hands)
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.hands)))
        self.kill(name)

    def kill(self, name: str) -> None:
        self.dispatcher.remove_worker(name, "killed", self.now)
        slots = self.hands.pop(name).keys()
        alone = len({slot.uid for slot in slots}) == 1
        for slot in slots:
            self.charged[slot] += alone
            self.losses[slot] += 1
            if alone or self.losses[slot] > 1:
                self.suspects[slot] = name

    @rule(seconds=st.sampled_from([1.0, 30.0, 60.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.abort(self.dispatcher.expire(self.now))

    # What always holds

    @invariant()
    def nothing_is_forgotten(self) -> None:
        stats = self.dispatcher.stats(self.now)
        assert stats.in_flight == {name: len(hand) for name, hand in self.hands.items()}
        assert stats.queued + sum(stats.in_flight.values()) <= len(self.pending)
        assert stats.queued == 0 or stats.oldest_wait <= SECONDS
        assert {slot.uid for slot in self.pending} <= set(self.buffer.outstanding)

    @invariant()
    def the_budget_is_kept_and_always_allows_a_batch(self) -> None:
        outstanding, budget = len(self.buffer.outstanding), self.buffer.budget(self.version)
        ahead = min(self.staleness + 1, STEPS - self.version) - (self.further > 0)  # this step's batch has been taken
        assert outstanding + budget == ahead * PROMPTS + self.further

    def teardown(self) -> None:
        """With one good worker the run comes to its end, whatever went before."""
        if not hasattr(self, "hands"):
            return
        for name in list(self.hands):
            self.kill(name)
        self.collect()
        self.add(1)
        rounds = 0
        while not self.buffer.done or self.further:
            self.draw(9)
            while self.pending:
                self.assign()
                name = str(self.names)
                assert self.hands[name]
                self.dispatcher.complete(name, [self.response(name, slot) for slot in list(self.hands[name])], self.now)
                self.collect()
                self.nothing_is_forgotten()
            self.train()
            rounds += 1
            assert rounds <= 4 * STEPS
        assert self.version == STEPS and len(self.trained) == STEPS * PROMPTS + self.extra


TestPool = Pool.TestCase
TestPool.settings = examples(max_examples=150, stateful_step_count=40)
