"""Rollout on worker processes of its own, kept busy while a run goes on; who they are is the crew's concern."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from verl.cluster.compression import Compressed, decompressed
from verl.cluster.early_scoring import for_scoring
from verl.cluster.network import forget_meeting
from verl.cluster.object_store import STORE_FULL, store_full, stored
from verl.cluster.placement import Plan, WorkerSpec
from verl.cluster.profiling import Span, joined
from verl.cluster.ray_worker import RayWorkers
from verl.cluster.rollout_crew import Crew, Member
from verl.cluster.rollout_worker import Progress
from verl.cluster.start import EventLog
from verl.cluster.weight_sync import WEIGHTS, Broadcast, Disk, Meeting, SharedMemory, WeightSync
from verl.config import Config
from verl.errors import ClusterError, VerlError
from verl.protocol import DataProto
from verl.rollout.dispatch import Dispatcher, Lost, Outcome
from verl.rollout.parity import ParityReport
from verl.rollout.protocol import EngineStats, Request, Result, Slot, lost_result
from verl.run_dir import RunDir

ADVANCE_SECONDS = 0.25  # an answer is a sign of life
CALLS_AHEAD = 2  # a worker has its next call while its last answer travels
TICK_SECONDS = 0.05
WORKER_ATTEMPTS = 6  # a response is lost with the last of so many workers that had its prompt alone


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
        self._boxes: dict[Slot, list[Result]] = {}  # of those who wait in generate()
        self._finished: list[Result] = []
        self._failure: VerlError | None = None
        self._changed = threading.Condition()
        self._crew = Crew(config, specs, self._dispatcher, log, wish)
        self._scorer = scorer
        self._listener = None if scorer is None else scorer.listener
        self._waited, self._counted = 0.0, Counter[str]()
        self._publishing = False
        self._answers: dict[str, Any] = {}  # to what is asked beside all else
        self._thread = threading.Thread(target=self._pump, name="rollout-pool", daemon=True)

    # what the trainer asks -------------------------------------------------------------------------------------------

    def start(self, probe: list[Request]) -> list[list[Result]]:
        """Start the workers and wait for them; what each of them samples for ``probe``.

        Raises:
            ClusterError: one cannot be started within ``cluster.start_timeout``.
        """
        timeout = self._config.cluster.start_timeout
        with self._changed:
            self._crew.fill()
        members = list(self._crew.members.values())
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
                self._crew.join(member)
        self._thread.start()
        return sampled

    def _call_now(self, reference: Any, what: str, member: Member) -> Any:
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
            pool, limit = f"cluster.pools.{member.spec.pool}", member.spec.memory_gb
            fix = f"its limit is {limit:g} GiB: raise {pool}.memory_gb" if limit else "look at what it said before"
            raise ClusterError(f"a rollout worker died during {what}", pool, fix) from error

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
            self._crew.members[name].call("abort", slots)

    def finished(self) -> list[Result]:
        with self._changed:
            self._wait_until(lambda: bool(self._finished))
            results, self._finished = self._finished, []
            return results

    def publish(self, version: int) -> None:
        """Every worker takes the weights before what is submitted from now on."""
        with self._changed:
            self._publishing = True
        self._sync.publish(version, self._beside)
        with self._changed:
            self._publishing = False
            self._crew.weights = version
            for member in self._crew.members.values():
                member.weights = self._crew.weights
            self._retire()
            self._changed.notify_all()

    def _beside(self, method: str, *arguments: Any) -> Callable[[], dict[str, Any]]:
        """A :data:`verl.cluster.weight_sync.Workers`."""
        with self._changed:
            members = self._crew.working
            self._answers = {}
            for member in members:
                member.call(method, *arguments, group=WEIGHTS)
            self._changed.notify_all()

        def answers() -> dict[str, Any]:
            with self._changed:
                self._wait_until(lambda: not any(method in member.calls.values() for member in members))
                return self._answers

        return answers

    def _retire(self) -> None:
        """Let go of versions that no worker takes any more."""
        assert self._crew.weights is not None
        loading = {member.loading for member in self._crew.members.values() if member.loading is not None}
        self._sync.retire(loading | {self._crew.weights})

    def stats(self) -> EngineStats:
        """Sums over the workers; the version is the last one published."""
        with self._changed:
            known = [member.stats for member in self._crew.members.values() if member.stats is not None]
            version = self._crew.weights or 0
        return EngineStats.total(known, version)

    def metrics(self) -> dict[str, float]:
        """Workers at work, their idle share of the time, the longest wait in the queue (seconds).

        And since the last call attempts that were repeated, answers that came too late, responses that were lost.
        """
        with self._changed:
            stats = self._dispatcher.stats(time.monotonic())
            waited, self._waited = max(self._waited, stats.oldest_wait), 0.0
            new, self._counted = stats.counts - self._counted, stats.counts
            held = {name: member.memory / 2**30 for name, member in self._crew.members.items()}
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
            for member in self._crew.working:
                member.call("profile", folder)

    def spans(self) -> dict[str, list[Span]]:
        with self._changed:
            found = {member.name.replace(" ", "_"): joined(member.spans) for member in self._crew.members.values()}
            for member in self._crew.members.values():
                member.spans = []
        return found

    def close(self) -> None:
        """End all workers, and the wait of whoever still waits for them."""
        with self._changed:
            self._fail(ClusterError("the run has ended its rollout workers"))
        if self._thread.is_alive():
            self._thread.join(timeout=10)
        for member in self._crew.members.values():
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
            now = time.monotonic()
            stats = self._dispatcher.stats(now)
            self._waited = max(self._waited, stats.oldest_wait)
            self._crew.rescale(stats, now)
            self._feed()
            calls = {call: member for member in self._crew.members.values() for call in member.calls}
            if not calls:
                self._changed.wait(TICK_SECONDS)
                return True
        ray.wait(list(calls), num_returns=1, timeout=TICK_SECONDS)
        done, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        with self._changed:
            for call in done:
                self._answer(calls[call], call)
            self._crew.end_silent()
            self._abort(self._dispatcher.expire(time.monotonic()))
            self._deliver(self._dispatcher.take())
            self._changed.notify_all()
        return True

    def _feed(self) -> None:
        """Send weights first, then what there is to do."""
        for member in (member for member in self._crew.working if member.weights is not None):
            busy = self._dispatcher.in_hand(member.name) > 0
            # Until it has finished what the old weights began; or until there are newer ones, which are on their way.
            if (busy and not self._config.rollout.partial) or self._publishing:
                self._dispatcher.drain_worker(member.name)
                continue
            member.loading, member.weights = member.weights, None
            member.call("load_weights", member.loading, self._sync.reference(member.name))
            self._dispatcher.drain_worker(member.name, False)
        assigned = self._dispatcher.assign(time.monotonic())
        for member in self._crew.working:
            requests = assigned.get(member.name, [])
            advancing = sum(method == "advance" for method in member.calls.values())
            if requests or (advancing < CALLS_AHEAD and self._dispatcher.in_hand(member.name)):
                member.call("advance", requests, ADVANCE_SECONDS)

    def _answer(self, member: Member, call: Any) -> None:
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
            self._crew.lose(member, f"{type(error.cause).__name__} during {method}: {error.cause}")
            return
        except RayActorError:
            self._crew.died(member, method)
            return
        if method == "setup":
            self._crew.join(member)
        elif method == "load_weights":
            member.loading = None
            self._retire()
        elif method == "abort":
            self._dispatcher.hand_back(member.name, answer, now)
            if member.leaving:
                self._crew.leave(member)
        elif method in ("ready", "receive"):
            self._answers[member.name] = answer
        elif isinstance(answer, Progress):
            self._crew.works()
            member.stats, member.memory = answer.stats, answer.memory
            member.spans += answer.spans
            results = decompressed(answer.results) if isinstance(answer.results, Compressed) else answer.results
            self._dispatcher.complete(member.name, results, now)
            for slot, reason in answer.failed.items():
                self._log("failed", f"response {slot.index} of {slot.uid}", f"{member.name}: {reason}")
                self._dispatcher.fail(member.name, [slot], reason, now)

    def _deliver(self, outcomes: Sequence[Outcome]) -> None:
        results = [outcome if isinstance(outcome, Result) else self._lost(outcome) for outcome in outcomes]
        if self._listener is not None:
            self._listener.hear(results)
        for result in results:
            self._boxes.pop(result.slot, self._finished).append(result)

    def _lost(self, lost: Lost) -> Result:
        self._log("lost", f"response {lost.slot.index} of {lost.slot.uid}", lost.reason)
        return lost_result(lost.slot)

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
    plan: Plan,
    trainer: RayWorkers,
    scorer: RayWorkers,
    log: EventLog,
    wish: Callable[[], int | None],
) -> Iterator[tuple[RolloutPool, ParityReport]]:
    """Workers that sample for this trainer, and whether their log-probs are its own, bit for bit."""
    sync = _weight_sync(config, plan, trainer, log)
    pool = RolloutPool(config, plan.rollout, sync, log, scorer, wish)
    try:
        probe = trainer.parity_probe()
        yield pool, ParityReport.total([trainer.compare(probe, results) for results in pool.start(probe)])
    finally:
        pool.close()


def _weight_sync(config: Config, plan: Plan, trainer: RayWorkers, log: EventLog) -> WeightSync:
    if config.rollout.weight_sync == "disk":
        return Disk(trainer.write_weights, RunDir(config.run_dir).weights)
    if config.rollout.weight_sync == "shared_memory":
        return SharedMemory(trainer.exported_weights)
    meeting = partial(
        Meeting,
        seconds=config.rollout.worker_timeout,
        nccl=all(processes.device == "cuda" for processes in (plan.group_of("actor"), *plan.rollout)),
        local=config.cluster.address is None,
    )
    return Broadcast(trainer.broadcast_weights, trainer.sent_weights, meeting, forget_meeting, log)
