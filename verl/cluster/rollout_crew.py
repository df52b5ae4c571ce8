"""The processes of a rollout pool: started, watched, replaced, added and taken away while a run goes on."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import ray

from verl.cluster.groups import ray_options
from verl.cluster.placement import WorkerSpec
from verl.cluster.profiling import Span
from verl.cluster.ray_worker import memory_kills
from verl.cluster.rollout_worker import RolloutWorker
from verl.cluster.start import EventLog
from verl.cluster.weight_sync import WEIGHTS
from verl.config import Config
from verl.errors import ClusterError
from verl.rollout.dispatch import Dispatcher, DispatchStats
from verl.rollout.protocol import EngineStats
from verl.rollout.scaling import Load, ScalingPolicy

WISH_SECONDS = 1.0
ROOM_SECONDS = 20.0  # a worker that is not ready by then may have no room
SPARE_REQUESTS = 8  # in a worker's hands beyond what it decodes at once: a finished row's place is refilled at once
MAX_LOSSES = 6  # workers lost in a row, beyond one each, without a sign of work or a prompt to blame: the pool gives up


@dataclass
class Member:
    """A worker process.

    Attributes:
        calls: references of calls under way, oldest first, with what was called.
        heard: when it last answered, or had its first call after a pause.
        ready: it is set up, and may be given requests.
        told: it has been logged that this takes long.
        leaving: it has been asked to hand back what it has, and ends then.
        weights: version that it has yet to take; ``loading``: the one that it is taking.
        stats: of its engine, at its last answer.
        memory: bytes that it held at its last answer.
        spans: what it has done that nobody has asked for yet.
    """

    name: str
    spec: WorkerSpec
    actor: Any
    calls: dict[Any, str] = field(default_factory=dict)
    heard: float = 0.0
    ready: bool = False
    told: bool = False
    leaving: bool = False
    weights: int | None = None
    loading: int | None = None
    stats: EngineStats | None = None
    memory: int = 0
    spans: list[Span] = field(default_factory=list)

    @property
    def working(self) -> bool:
        return self.ready and not self.leaving

    def call(self, method: str, *arguments: Any, group: str | None = None) -> None:
        """Args: group: Ray's concurrency group; None: after all calls before it."""
        if not self.calls:
            self.heard = time.monotonic()
        self.calls[getattr(self.actor, method).options(concurrency_group=group).remote(*arguments)] = method


class Crew:
    """Who there is, and how many there should be. Whoever calls it has the pool's lock.

    Args:
        specs: of the workers to start with.
        wish: asked every second: how many workers the user wants, None: as many as the load asks for.
    """

    def __init__(
        self,
        config: Config,
        specs: Sequence[WorkerSpec],
        dispatcher: Dispatcher,
        log: EventLog,
        wish: Callable[[], int | None],
    ) -> None:
        self._config, self._dispatcher, self._log = config, dispatcher, log
        self.members: dict[str, Member] = {}
        self.weights: int | None = None  # that who comes takes first
        self._born = self._losses = 0
        self._kills = memory_kills()
        self._specs = [spec for spec in specs for _ in range(spec.count)]
        settings, given = config.rollout, len(self._specs)
        self._most = settings.max_workers or max(given, settings.min_workers or given)
        self._least = min(settings.min_workers or given, self._most)
        self._target = min(max(given, self._least), self._most)
        self._policy = ScalingPolicy(self._least, self._most)
        self._wish, self._wish_asked = wish, 0.0
        self._places = settings.max_num_seqs + SPARE_REQUESTS

    @property
    def working(self) -> list[Member]:
        return [member for member in self.members.values() if member.working]

    def fill(self) -> None:
        """Start as many as there should be."""
        for place in range(sum(not member.leaving for member in self.members.values()), self._target):
            self._start(self._specs[place % len(self._specs)])

    def rescale(self, stats: DispatchStats, now: float) -> None:
        """Have workers come and go, one at a time."""
        if now - self._wish_asked >= WISH_SECONDS:
            wish, settings = self._wish(), self._config.rollout
            self._policy.wish, self._wish_asked = wish, now
            if wish is not None:  # bounds that nobody gave do not bind a user's wish
                self._policy.min_workers = self._least if settings.min_workers else min(self._least, wish)
                self._policy.max_workers = self._most if settings.max_workers else max(self._most, wish)
        staying = [member for member in self.members.values() if not member.leaving]
        ready = len(self.working)
        if self._policy.wish is not None:  # what still starts is given up at once: there may be no room for it, ever
            self._target = min(self._target, max(self._policy.wish, self._policy.min_workers, ready))
        moving = len(self.members) - ready
        held = sum(stats.in_flight.values())
        load = Load(len(staying) - moving, moving, self._places, stats.queued, stats.oldest_wait, held)
        self._target += self._policy.decide(now, load)
        self.fill()
        for member in staying[self._target :]:
            if not member.ready:
                self._end(member, "left", "before it was ready")
                continue
            member.leaving = True
            self._dispatcher.drain_worker(member.name)
            member.call("abort")

    def join(self, member: Member) -> None:
        """It is set up."""
        member.ready = True
        self._dispatcher.add_worker(member.name, self._places, time.monotonic())
        self._log("joined", member.name, "")

    def works(self) -> None:
        """One has answered: not all that are started are lost."""
        self._losses = 0

    def leave(self, member: Member) -> None:
        """It has handed back what it had."""
        self._end(member, "left", "its requests went on elsewhere")

    def died(self, member: Member, method: str) -> None:
        starved = memory_kills() > self._kills
        self._kills = memory_kills()
        self.lose(member, f"died during {method}" + ": the machine ran out of memory (SIGKILL)" * starved)

    def lose(self, member: Member, reason: str) -> None:
        """A worker that died, hangs or failed: its requests go back, and another takes its place.

        Raises:
            ClusterError: so it was with all before it.
        """
        self._losses += not self._end(member, "died", reason)
        if self._losses >= MAX_LOSSES + len(self.members):
            raise ClusterError(f"{self._losses} rollout workers were lost one after the other", reason)
        if not member.leaving and len(self.members) < self._target:
            self._start(member.spec)

    def end_silent(self) -> None:
        timeout, now = self._config.rollout.worker_timeout, time.monotonic()
        for member in list(self.members.values()):
            limit = timeout if member.ready else max(timeout, self._config.cluster.start_timeout)
            if "receive" in member.calls.values():  # which itself waits for others as long as that, and then answers
                limit *= 1.5
            if not (member.ready or member.told) and now - member.heard > ROOM_SECONDS:
                member.told, free = True, ray.available_resources()
                wants = [
                    f"{amount:g} {key} (free: {free.get(key, 0):g})" for key, amount in member.spec.needs().items()
                ]
                self._log("waiting", member.name, f"not ready after {ROOM_SECONDS:g} s; it wants {', '.join(wants)}")
            if member.calls and now - member.heard > limit:
                method = next(iter(member.calls.values()))
                self.lose(member, f"no answer to {method} for {now - member.heard:.0f} s (rollout.worker_timeout)")

    def _start(self, spec: WorkerSpec) -> None:
        self._born += 1
        name = f"rollout worker {self._born}"
        receives = self._config.rollout.weight_sync == "broadcast"
        make = ray.remote(concurrency_groups={WEIGHTS: 1}) if receives else ray.remote
        remote = make(RolloutWorker).options(**ray_options(spec, self._config, frozenset({"rollout"})))
        actor = remote.remote(self._config, spec, name)
        self.members[name] = member = Member(name, spec, actor, heard=time.monotonic(), weights=self.weights)
        member.call("setup")
        self._log("started", name, f"pool {spec.pool}, {spec.threads} threads")

    def _end(self, member: Member, kind: str, reason: str) -> bool:
        """Whether one prompt is to blame."""
        del self.members[member.name]
        member.calls.clear()
        blamed = self._dispatcher.remove_worker(member.name, reason, time.monotonic())
        with suppress(Exception):
            ray.kill(member.actor)
        self._log(kind, member.name, reason)
        return blamed
