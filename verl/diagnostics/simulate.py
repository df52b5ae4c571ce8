"""What each schedule makes of measured lengths and speeds: the run's own dispatcher and buffer, on paper.

A discrete-event simulation. Workers have places, and a token takes as long in each of them however many are taken; an
update takes as long in every step. Weights are published in no time, and responses go on under them.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from verl.errors import VerlError
from verl.rollout.buffer import GroupBuffer
from verl.rollout.dispatch import Dispatcher, Lost
from verl.rollout.protocol import Request, Result, SamplingParams, Slot
from verl.run_dir import RunDir
from verl.tracking import names
from verl.tracking.names import read_metrics
from verl.tracking.samples import read_samples

if TYPE_CHECKING:
    from verl.config import Config

Mode = Literal["sync", "streamed", "one_step_off", "async"]  # streamed: sync with trainer.stream_minibatches
Length = Callable[[Slot], int]
TAIL = 0.8  # sigma of a log-normal length
EVENTS = 20_000  # responses that are simulated for one figure, about
PROMPT = [1]


class Sampling:
    """Rollout workers with so many places each, that sample by a clock which is told to them. ``token``: seconds of one
    token of a response. ``sampled``: tokens, also of responses that were cancelled. ``answers``: not taken yet."""

    def __init__(self, workers: int, places: int, token: float, length: Length) -> None:
        self.token, self.length, self.sampled = token, length, 0
        self.dispatcher = Dispatcher()
        for number in range(workers):
            self.dispatcher.add_worker(str(number), places, 0.0)
        self._ends: list[tuple[float, int, str, Slot, float]] = []  # when, number, by whom, what, begun when
        self._begun: dict[Slot, int] = {}  # the number of the attempt under way
        self.published: list[float] = []
        self.answers: list[Result] = []

    def next_event(self) -> float:
        return self._ends[0][0] if self._ends else inf

    def run(self, until: float) -> None:
        """All that happens up to then."""
        while self._ends and self._ends[0][0] <= until:
            now, number, worker, slot, start = heapq.heappop(self._ends)
            if self._begun.get(slot) == number:
                self.dispatcher.complete(worker, [self._result(slot, start)], now)
                self._assign(now)
        for outcome in self.dispatcher.take():
            assert not isinstance(outcome, Lost)
            self.answers.append(outcome)

    def submit(self, requests: list[Request], now: float) -> None:
        self.run(now)
        self.dispatcher.submit(requests, now)
        self._assign(now)

    def cancel(self, slots: list[Slot], now: float) -> None:
        self.dispatcher.cancel(slots, now)
        for slot in slots:
            self._begun.pop(slot, None)
        gone = set(slots)
        self.answers = [answer for answer in self.answers if answer.slot not in gone]

    def publish(self, now: float) -> None:
        self.run(now)
        self.published.append(now)

    def finish(self) -> float:
        """When everything that was submitted is done."""
        now = max((end for end, *_ in self._ends), default=0.0)
        while self._ends:
            now = max(now, self._ends[0][0])
            self.run(now)
        self.answers.clear()
        return now

    def _assign(self, now: float) -> None:
        for worker, requests in self.dispatcher.assign(now).items():
            for request in requests:
                length = self.length(request.slot)
                self.sampled += length
                self._begun[request.slot] = self.sampled
                heapq.heappush(self._ends, (now + length * self.token, self.sampled, worker, request.slot, now))

    def _result(self, slot: Slot, start: float) -> Result:
        length = self.length(slot)
        versions = np.searchsorted(self.published, start + np.arange(length) * self.token, "right") - 1
        ids, log_probs = np.ones(length, np.int32), np.full(length, -1.0, np.float32)
        return Result(slot, ids, log_probs, np.ones(length, np.bool_), versions.astype(np.int32), "stop")


@dataclass(frozen=True)
class Setting:
    """A run on paper."""

    prompts: int
    n: int
    workers: int  # rollout workers, with so many ``places`` each
    places: int
    token: float  # seconds of one token of a response
    training: float  # seconds of a step beside sampling
    length: Length  # tokens of a response
    longest: int  # most of them
    updates: int = 1  # optimizer steps of a step

    def sampling(self) -> Sampling:
        return Sampling(self.workers, self.places, self.token, self.length)

    def requests(self, draws: Sequence[int]) -> list[Request]:
        params = SamplingParams(self.longest)
        return [Request(Slot(f"train:{k}:simulated:{k}", i), PROMPT, params) for k in draws for i in range(self.n)]

    def batch(self, step: int) -> list[Request]:
        return self.requests(range(step * self.prompts, (step + 1) * self.prompts))


@dataclass(frozen=True)
class Predicted:
    """Seconds of a step, from the end of the first one on, and the share of the sampled tokens that is not trained."""

    seconds: float
    waste: float


def predict(setting: Setting, mode: Mode, steps: int, staleness: int = 1, unit: Any = "sample") -> Predicted:
    """What ``trainer.mode`` makes of a setting in so many steps (two at least)."""
    sampling = setting.sampling()
    sampling.publish(0.0)
    if mode == "async":
        ends, trained = _stream(setting, sampling, steps, staleness, unit)
    elif mode == "streamed":
        ends, trained = _mini_batches(setting, sampling, steps), sampling.sampled
    else:
        ends, trained = _batches(setting, sampling, steps, ahead=mode == "one_step_off"), sampling.sampled
    return Predicted((ends[-1] - ends[0]) / (steps - 1), 1 - trained / sampling.sampled)


def _batches(setting: Setting, sampling: Sampling, steps: int, ahead: bool) -> list[float]:
    """Whole batches, one after the other or each behind the training of the one before."""
    ends: list[float] = []
    sampling.submit(setting.batch(0), 0.0)
    now = sampling.finish()
    for step in range(1, steps + 1):
        ends.append(now + setting.training)
        start = now if ahead else ends[-1]
        if step < steps:
            sampling.submit(setting.batch(step), start)
            now = max(ends[-1], sampling.finish())
    return ends


def _mini_batches(setting: Setting, sampling: Sampling, steps: int) -> list[float]:
    """Each mini-batch is trained as soon as so many groups are complete and the one before is trained."""
    ends: list[float] = []
    now, size = 0.0, setting.prompts // setting.updates
    for step in range(steps):
        sampling.submit(setting.batch(step), now)
        done: Counter[str] = Counter()
        complete: list[float] = []  # when each group was
        while len(complete) < setting.prompts:
            at = sampling.next_event()
            sampling.run(at)
            done.update(answer.slot.uid for answer in sampling.answers)
            finished = {answer.slot.uid for answer in sampling.answers}
            complete += [at] * sum(done[uid] == setting.n for uid in finished)
            sampling.answers.clear()
        for ready in complete[size - 1 :: size]:
            now = max(now, ready) + setting.training / setting.updates
        ends.append(now)
    return ends


def _stream(setting: Setting, sampling: Sampling, steps: int, staleness: int, unit: Any) -> tuple[list[float], int]:
    """As :class:`verl.trainer.sources.Stream`: prompts up to the budget, batches of complete fresh groups."""
    buffer = GroupBuffer(setting.prompts, staleness, steps, unit)
    drawn, trained, now = 0, 0, 0.0
    ends: list[float] = []

    def submit(draws: Sequence[int]) -> None:
        requests = setting.requests(draws)
        buffer.submit(request.slot for request in requests)
        sampling.submit(requests, now)

    def fill(version: int) -> None:
        nonlocal drawn
        room = buffer.budget(version)
        submit(range(drawn, drawn + room))
        drawn += room

    for version in range(steps):
        while True:
            taken = buffer.take(version)
            if stale := [*taken.again, *taken.dropped]:
                sampling.cancel([Slot(uid, index) for uid in stale for index in range(setting.n)], now)
                submit([int(uid.split(":")[1]) for uid in taken.again])
            fill(version)
            if taken.groups:
                break
            if not sampling.answers:
                now = max(now, sampling.next_event())
                sampling.run(now)
            for answer in sampling.answers:
                buffer.add(answer)
            sampling.answers.clear()
        trained += sum(int(result.loss_mask.sum()) for group in taken.groups for result in group.results)
        now += setting.training
        ends.append(now)
        sampling.publish(now)
        if staleness:
            fill(version + 1)
    return ends, trained


def drawn_from(lengths: Sequence[int]) -> Length:
    """Each slot one of these, by its name."""
    return cache(lambda slot: lengths[random.Random(str(slot)).randrange(len(lengths))])


def long_tailed(mean: float, longest: int) -> list[int]:
    """Log-normal lengths of this mean, cut at the longest."""
    draw = random.Random(0)
    scale = mean / np.exp(TAIL**2 / 2)
    return [min(max(round(scale * draw.lognormvariate(0.0, TAIL)), 1), longest) for _ in range(4096)]


@dataclass(frozen=True)
class Measured:
    """Of a run: lengths of responses; seconds of a token in its place, and of a step beside sampling; steps."""

    lengths: list[int]
    token: float
    training: float
    steps: int


def measure(run_dir: RunDir, config: Config) -> Measured:
    """From samples and timings of a run, the first step left out where there are others. A token's seconds are those
    with which the simulation of a step's lengths on the run's workers takes as long as its rollout did. ``config``: of
    that run. Raises VerlError: the run has no steps with samples and their times (``async`` has none)."""
    lines = {line["step"]: line for line in read_metrics(run_dir)[0]}
    lengths: dict[int, list[int]] = {}
    for step in run_dir.sample_steps():
        rows = [row for row in read_samples(run_dir.samples(step))[0] if row.split == "train"]
        known = [row.response_length for row in rows if row.response_length]
        if known and names.number(lines.get(step, {}), "timing_s/gen"):
            lengths[step] = known
    if not lengths:
        fix = "name a run in mode sync or one_step_off that has trained a step"
        raise VerlError("the run has no step with samples and timing_s/gen", str(run_dir.path), fix)
    n, places = config.rollout.n, config.rollout.max_num_seqs
    usual = [step for step in lengths if step != min(lengths)] or list(lengths)
    tokens, training = [], []
    for step in usual:
        own, line = lengths[step], lines[step]
        workers = int(names.number(line, "rollout/workers") or config.actor.world_size or 1)
        paper = Setting(-(-len(own) // n), n, workers, places, 1.0, 0.0, _in_turn(own, n), max(own))
        sampling = paper.sampling()
        sampling.submit(paper.batch(0)[: len(own)], 0.0)
        tokens.append(line["timing_s/gen"] / sampling.finish())
        stages = names.stage_seconds(line)
        training.append(stages.get("process", 0.0) + stages.get("update", 0.0))
    every = [length for step in usual for length in lengths[step]]
    return Measured(every, median(tokens), median(training), len(usual))


def _in_turn(lengths: Sequence[int], n: int) -> Length:
    return lambda slot: lengths[int(slot.uid.split(":")[1]) * n + slot.index]


SCHEDULES: tuple[tuple[str, Mode, int], ...] = (
    ("sync", "sync", 0),
    ("sync, stream_minibatches", "streamed", 0),
    ("one_step_off", "one_step_off", 1),
    *((f"async, max_staleness {staleness}", "async", staleness) for staleness in (1, 2, 4)),
)


def schedules(setting: Setting, workers: Sequence[int]) -> dict[str, list[Predicted]]:
    """Every schedule with each of these numbers of workers."""
    steps = max(6, min(30, EVENTS // (setting.prompts * setting.n)))
    found: dict[str, list[Predicted]] = {}
    for label, mode, staleness in SCHEDULES:
        if mode == "streamed" and setting.updates == 1:
            continue
        found[label] = [predict(replace(setting, workers=count), mode, steps, staleness) for count in workers]
    return found
