"""Rollout on worker processes of its own: kept busy, watched, replaced, added and taken away while a run goes on."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from verl.cluster.early_scoring import for_scoring
from verl.cluster.groups import ray_options
from verl.cluster.object_store import STORE_FULL, store_full, stored
from verl.cluster.placement import WorkerSpec
from verl.cluster.profiling import Span, joined
from verl.cluster.ray_worker import RayWorkers, memory_kills
from verl.cluster.rollout_worker import Progress, RolloutWorker
from verl.cluster.start import EventLog
from verl.cluster.weight_sync import Disk, SharedMemory, WeightSync
from verl.config import Config
from verl.errors import ClusterError, VerlError
from verl.protocol import DataProto
from verl.rollout.dispatch import Dispatcher, Lost, Outcome
from verl.rollout.parity import ParityReport
from verl.rollout.protocol import EngineStats, Request, Result, Slot, lost_result
from verl.rollout.scaling import Load, ScalingPolicy
from verl.run_dir import RunDir

ADVANCE_SECONDS = 0.25  # an answer is a sign of life
CALLS_AHEAD = 2  # a worker has its next call while its last answer travels
TICK_SECONDS = 0.05
WISH_SECONDS = 1.0
ROOM_SECONDS = 20.0  # a worker that is not ready by then may have no room
SPARE_REQUESTS = 8  # in a worker's hands beyond what it decodes at once: a finished row's place is refilled at once
WORKER_ATTEMPTS = 6  # a response is lost with the last of so many workers
MAX_LOSSES = 3  # workers lost in a row, beyond one each, without a sign of work by any, before the pool gives up


@dataclass
class _Member:
    """A worker process.

    Attributes:
        calls: references of calls under way, oldest first, with what was called.
        heard: when it last answered, or had its first call after a pause.
        ready: it is set up, and may be given requests.
        told: it has been logged that this takes long.
        leaving: it has been asked to hand back what it has, and ends then.
        weights: version and reference that it has yet to take; ``loading``: the version that it is taking.
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
    weights: tuple[int, Any] | None = None
    loading: int | None = None
    stats: EngineStats | None = None
    memory: int = 0
    spans: list[Span] = field(default_factory=list)

    def call(self, method: str, *arguments: Any) -> None:
        if not self.calls:
            self.heard = time.monotonic()
        self.calls[getattr(self.actor, method).remote(*arguments)] = method


class RolloutPool:
    """A :class:`verl.cluster.roles.Rollout` over worker processes.

    A thread of its own talks to the workers: it sends what the dispatcher assigns, takes what they answer, ends those
    that are silent for ``rollout.worker_timeout``, and starts others in place of the lost. Who samples a response, and
    how often it was begun, never changes it.

    Args:
        specs: of the workers to start with.
        sync: brings the actor's weights to the workers.
        log: of events.
        scorer: scores groups as they finish; None: when their batch is complete.
        wish: asked every second: how many workers the user wants, None: as many as the load asks for.

    Raises:
        ClusterError: from every call, once workers cannot be started any more.
        EngineError: likewise, when the model's numbers are broken, or every request fails.
    """

    apart = True

    def __init__(
        self,
        config: Config,
        specs: Sequence[WorkerSpec],
        sync: WeightSync,
        log: EventLog,
        scorer: RayWorkers | None = None,
        wish: Callable[[], int | None] = lambda: None,
    ) -> None:
        self._config, self._sync, self._log = config, sync, log
        self._dispatcher = Dispatcher(WORKER_ATTEMPTS, seconds=config.rollout.response_timeout or inf)
        self._members: dict[str, _Member] = {}
        self._boxes: dict[Slot, list[Result]] = {}  # of those who wait in generate()
        self._finished: list[Result] = []
        self._weights: tuple[int, Any] | None = None
        self._failure: VerlError | None = None
        self._changed = threading.Condition()
        self._born = self._losses = 0
        self._kills = memory_kills()
        self._specs = [spec for spec in specs for _ in range(spec.count)]
        settings, given = config.rollout, len(self._specs)
        self._most = settings.max_workers or max(given, settings.min_workers or given)
        self._least = min(settings.min_workers or given, self._most)
        self._target = min(max(given, self._least), self._most)
        self._policy = ScalingPolicy(self._least, self._most)
        self._scorer, self._wish, self._wish_asked = scorer, wish, 0.0
        self._listener = None if scorer is None else scorer.listener
        self._places = settings.max_num_seqs + SPARE_REQUESTS
        self._waited, self._counted = 0.0, Counter[str]()
        self._thread = threading.Thread(target=self._pump, name="rollout-pool", daemon=True)

    # what the trainer asks -------------------------------------------------------------------------------------------

    def start(self, probe: list[Request]) -> list[list[Result]]:
        """Start the workers and wait for them; what each of them samples for ``probe``.

        Raises:
            ClusterError: one cannot be started within ``cluster.start_timeout``.
        """
        timeout = self._config.cluster.start_timeout
        with self._changed:
            for place in range(self._target):
                self._start_worker(self._specs[place % len(self._specs)])
        members = list(self._members.values())
        references = [next(iter(member.calls)) for member in members]
        _, missing = ray.wait(references, num_returns=len(references), timeout=timeout)
        if missing:
            raise ClusterError(
                f"{len(missing)} of {len(references)} rollout workers did not start within cluster.start_timeout",
                f"{timeout:g} s",
                "free resources, ask for less in cluster.pools, or raise cluster.start_timeout",
            )
        for member, reference in zip(members, references, strict=True):
            del member.calls[reference]
            self._call_now(reference, "setup", member)
        samples = [member.actor.sample.remote(probe) for member in members]  # side by side
        sampled = [self._call_now(ref, "sample", member) for ref, member in zip(samples, members, strict=True)]
        with self._changed:
            for member in members:
                self._join(member)
        self._thread.start()
        return sampled

    def _call_now(self, reference: Any, what: str, member: _Member) -> Any:
        timeout = self._config.cluster.start_timeout
        try:
            return ray.get(reference, timeout=timeout)
        except GetTimeoutError as error:
            fix = "raise cluster.start_timeout, or give the workers more threads"
            raise ClusterError(f"{member.name} gave no answer to {what} in time", f"{timeout:g} s", fix) from error
        except RayTaskError as error:
            if isinstance(error.cause, VerlError):
                raise error.cause from error
            raise
        except RayActorError as error:
            raise ClusterError(f"a rollout worker died during {what}", member.spec.pool) from error

    def generate(self, requests: list[Request], prompts: DataProto | None = None) -> list[Result]:
        box: list[Result] = []
        with self._changed:
            self._boxes.update((request.slot, box) for request in requests)
            self._submit(requests, prompts, front=True)  # a validation does not wait for what trains later
            self._wait_until(lambda: len(box) == len(requests))
        found = {result.slot: result for result in box}
        return [found[request.slot] for request in requests]

    def submit(self, requests: list[Request], prompts: DataProto | None = None) -> None:
        with self._changed:
            self._submit(requests, prompts)

    def cancel(self, slots: list[Slot]) -> None:
        with self._changed:
            self._abort(self._dispatcher.cancel(slots, time.monotonic()))

    def _abort(self, given_up: dict[str, list[Slot]]) -> None:
        for name, slots in given_up.items():
            self._members[name].call("abort", slots)

    def finished(self) -> list[Result]:
        with self._changed:
            self._wait_until(lambda: bool(self._finished))
            results, self._finished = self._finished, []
            return results

    def publish(self, version: int) -> None:
        """Every worker takes the weights before what is submitted from now on."""
        reference = self._sync.publish(version)
        with self._changed:
            self._weights = version, reference
            for member in self._members.values():
                member.weights = self._weights
            self._retire()
            self._changed.notify_all()

    def _retire(self) -> None:
        """Let go of versions that no worker takes any more."""
        assert self._weights is not None
        loading = {member.loading for member in self._members.values() if member.loading is not None}
        self._sync.retire(loading | {self._weights[0]})

    def stats(self) -> EngineStats:
        """Sums over the workers; the version is the last one published."""
        with self._changed:
            known = [member.stats for member in self._members.values() if member.stats is not None]
            version = self._weights[0] if self._weights else 0
        return EngineStats.total(known, version)

    def metrics(self) -> dict[str, float]:
        """Workers at work, their idle share of the time, the longest wait in the queue (seconds).

        And since the last call attempts that were repeated, answers that came too late, responses that were lost.
        """
        with self._changed:
            stats = self._dispatcher.stats(time.monotonic())
            waited, self._waited = max(self._waited, stats.oldest_wait), 0.0
            new, self._counted = stats.counts - self._counted, stats.counts
            held = {name: member.memory / 2**30 for name, member in self._members.items()}
        return {
            "rollout/workers": float(len(stats.in_flight)),
            "rollout/idle_share": sum(stats.idle_share.values()) / max(len(stats.idle_share), 1),
            "rollout/queue_wait": waited,
            **{f"perf/idle/{name.replace(' ', '_')}": share for name, share in stats.idle_share.items()},
            **{f"perf/memory_gb/{name.replace(' ', '_')}": gib for name, gib in held.items()},
            **{f"rollout/{name}": float(new[name]) for name in ("retried", "late", "lost")},
        }

    def profile(self, folder: str | None) -> None:
        with self._changed:
            for member in (member for member in self._members.values() if member.ready and not member.leaving):
                member.call("profile", folder)

    def spans(self) -> dict[str, list[Span]]:
        with self._changed:
            found = {member.name.replace(" ", "_"): joined(member.spans) for member in self._members.values()}
            for member in self._members.values():
                member.spans = []
        return found

    def close(self) -> None:
        """End all workers, and the wait of whoever still waits for them."""
        with self._changed:
            self._fail(ClusterError("the run has ended its rollout workers"))
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        for member in self._members.values():
            ray.kill(member.actor)
        self._sync.close()

    def _submit(self, requests: list[Request], prompts: DataProto | None, front: bool = False) -> None:
        if self._scorer is not None and prompts is not None:
            self._scorer.expect(requests, stored(for_scoring(prompts)))
        self._dispatcher.submit(requests, time.monotonic(), front)
        self._changed.notify_all()

    def _wait_until(self, done: Callable[[], bool]) -> None:
        while not done():
            if self._failure is not None:
                raise self._failure
            self._changed.wait()

    # the pool's own thread -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        try:
            while self._pump_once():
                pass
        except Exception as error:
            with self._changed:
                self._fail(error)

    def _pump_once(self) -> bool:
        with self._changed:
            if self._failure is not None:
                return False
            self._rescale()
            self._feed()
            calls = {call: member for member in self._members.values() for call in member.calls}
            if not calls:
                self._changed.wait(TICK_SECONDS)
                return True
        ray.wait(list(calls), num_returns=1, timeout=TICK_SECONDS)
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        with self._changed:
            for call in done:
                self._answer(calls[call], call)
            self._end_silent()
            self._abort(self._dispatcher.expire(time.monotonic()))
            self._deliver(self._dispatcher.take())
            self._changed.notify_all()
        return True

    def _rescale(self) -> None:
        now = time.monotonic()
        if now - self._wish_asked >= WISH_SECONDS:
            wish, settings = self._wish(), self._config.rollout
            self._policy.wish, self._wish_asked = wish, now
            if wish is not None:  # bounds that nobody gave do not bind a user's wish
                self._policy.min_workers = self._least if settings.min_workers else min(self._least, wish)
                self._policy.max_workers = self._most if settings.max_workers else max(self._most, wish)
        stats = self._dispatcher.stats(now)
        self._waited = max(self._waited, stats.oldest_wait)
        staying = [member for member in self._members.values() if not member.leaving]
        ready = sum(member.ready for member in staying)
        if self._policy.wish is not None:  # what still starts is given up at once: there may be no room for it, ever
            self._target = min(self._target, max(self._policy.wish, self._policy.min_workers, ready))
        moving = len(self._members) - ready
        held = sum(stats.in_flight.values())
        load = Load(len(staying) - moving, moving, self._places, stats.queued, stats.oldest_wait, held)
        self._target += self._policy.decide(now, load)
        for place in range(len(staying), self._target):
            self._start_worker(self._specs[place % len(self._specs)])
        for member in staying[self._target :]:
            if not member.ready:
                self._end(member, "left", "before it was ready")
                continue
            member.leaving = True
            self._dispatcher.drain_worker(member.name)
            member.call("abort")

    def _feed(self) -> None:
        """Send weights first, then what there is to do."""
        for member in self._members.values():
            if member.weights is None or not member.ready or member.leaving:
                continue
            busy = self._dispatcher.in_hand(member.name) > 0
            if busy and not self._config.rollout.partial:
                self._dispatcher.drain_worker(member.name)  # until it has finished what the old weights began
                continue
            member.loading, reference = member.weights
            member.call("load_weights", member.loading, reference)
            member.weights = None
            self._dispatcher.drain_worker(member.name, False)
        assigned = self._dispatcher.assign(time.monotonic())
        for member in (m for m in self._members.values() if m.ready and not m.leaving):
            requests = assigned.get(member.name, [])
            advancing = sum(method == "advance" for method in member.calls.values())
            if requests or (advancing < CALLS_AHEAD and self._dispatcher.in_hand(member.name)):
                member.call("advance", requests, ADVANCE_SECONDS)

    def _answer(self, member: _Member, call: Any) -> None:
        method = member.calls.pop(call, None)
        if method is None:  # of a worker that was ended
            return
        member.heard = now = time.monotonic()
        try:
            answer = ray.get(call)
        except STORE_FULL as error:  # also of the weights that it was to take
            raise store_full() from error
        except RayTaskError as error:
            if isinstance(error.cause, VerlError):
                raise error.cause from error
            self._lose(member, f"{type(error.cause).__name__} during {method}: {error.cause}")
            return
        except RayActorError:
            starved = memory_kills() > self._kills
            self._kills = memory_kills()
            self._lose(
                member, f"died during {method}" + (": the machine ran out of memory (SIGKILL)" if starved else "")
            )
            return
        if method == "setup":
            self._join(member)
        elif method == "load_weights":
            member.loading = None
            self._retire()
        elif method == "abort":
            self._dispatcher.hand_back(member.name, answer, now)
            if member.leaving:
                self._end(member, "left", "its requests went on elsewhere")
        elif isinstance(answer, Progress):
            member.stats, self._losses = answer.stats, 0
            member.memory = answer.memory
            member.spans += answer.spans
            self._dispatcher.complete(member.name, answer.results, now)

    def _end_silent(self) -> None:
        timeout, now = self._config.rollout.worker_timeout, time.monotonic()
        for member in list(self._members.values()):
            limit = timeout if member.ready else max(timeout, self._config.cluster.start_timeout)
            if not (member.ready or member.told) and now - member.heard > ROOM_SECONDS:
                member.told, free = True, ray.available_resources()
                wants = [
                    f"{amount:g} {key} (free: {free.get(key, 0):g})" for key, amount in member.spec.needs().items()
                ]
                self._log("waiting", member.name, f"not ready after {ROOM_SECONDS:g} s; it wants {', '.join(wants)}")
            if member.calls and now - member.heard > limit:
                method = next(iter(member.calls.values()))
                self._lose(member, f"no answer to {method} for {now - member.heard:.0f} s (rollout.worker_timeout)")

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        results = [outcome if isinstance(outcome, Result) else self._lost(outcome) for outcome in outcomes]
        if self._listener is not None:
            self._listener.hear(results)
        for result in results:
            self._boxes.pop(result.slot, self._finished).append(result)

    def _lost(self, lost: Lost) -> Result:
        self._log("lost", f"response {lost.slot.index} of {lost.slot.uid}", lost.reason)
        return lost_result(lost.slot)

    # who there is ----------------------------------------------------------------------------------------------------

    def _start_worker(self, spec: WorkerSpec) -> None:
        self._born += 1
        name = f"rollout worker {self._born}"
        remote = ray.remote(RolloutWorker).options(**ray_options(spec, self._config, frozenset({"rollout"})))
        member = _Member(
            name, spec, remote.remote(self._config, spec, name), heard=time.monotonic(), weights=self._weights
        )
        member.call("setup")
        self._members[name] = member
        self._log("started", name, f"pool {spec.pool}, {spec.threads} threads")

    def _join(self, member: _Member) -> None:
        member.ready = True
        self._dispatcher.add_worker(member.name, self._places, time.monotonic())
        self._log("joined", member.name, "")

    def _lose(self, member: _Member, reason: str) -> None:
        """A worker that died, hangs or failed: its requests go back, and another takes its place."""
        self._end(member, "died", reason)
        self._losses += 1
        if self._losses >= MAX_LOSSES + len(self._members):
            raise ClusterError(f"{self._losses} rollout workers were lost one after the other", reason)
        if not member.leaving and len(self._members) < self._target:
            self._start_worker(member.spec)

    def _end(self, member: _Member, kind: str, reason: str) -> None:
        del self._members[member.name]
        member.calls.clear()
        self._dispatcher.remove_worker(member.name, reason, time.monotonic())
        with suppress(Exception):
            ray.kill(member.actor)
        self._log(kind, member.name, reason)

    def _fail(self, error: Exception) -> None:
        """Whoever waits, now or later, gets this."""
        if not isinstance(error, VerlError):
            wrapped = ClusterError(f"the rollout pool failed: {type(error).__name__}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._failure = self._failure or error
        self._changed.notify_all()


@contextmanager
def started_pool(
    config: Config,
    specs: Sequence[WorkerSpec],
    trainer: RayWorkers,
    scorer: RayWorkers,
    log: EventLog,
    wish: Callable[[], int | None],
) -> Iterator[tuple[RolloutPool, ParityReport]]:
    """Workers that sample for this trainer, and whether their log-probs are its own, bit for bit."""
    disk = config.rollout.weight_sync == "disk"
    sync = (
        Disk(trainer.write_weights, RunDir(config.run_dir).weights) if disk else SharedMemory(trainer.exported_weights)
    )
    pool = RolloutPool(config, specs, sync, log, scorer, wish)
    try:
        probe = trainer.parity_probe()
        yield pool, ParityReport.total([trainer.compare(probe, results) for results in pool.start(probe)])
    finally:
        pool.close()
