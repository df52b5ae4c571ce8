"""A pool of reward worker processes: bounded, each call timed and killed where it does not stop, the lost replaced.

While there are calls a thread gives them to the workers and takes their answers, whatever this process does meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from verl.data.typed_json import pack, unpack
from verl.errors import RewardError
from verl.models.memory import free_memory
from verl.rewards.nursery import END_SECONDS, MESSAGE_BYTES
from verl.rewards.pool_worker import IN_PROCESS, SEND_SECONDS, Channel, Target, heard
from verl.rewards.results import Call, Score, too_slow
from verl.rewards.rules import IN_POOL
from verl.user_code import IMPORT_SECONDS

GROW_SECONDS = 0.1  # calls that wait so long get more workers, twice as many
IDLE_SECONDS = 60.0  # a worker that had nothing to do for so long ends
START_SECONDS = IMPORT_SECONDS + 30.0  # for a worker to start and import the user's file
PAUSE_SECONDS = 5.0  # within an answer that has begun to arrive
GRACE_SECONDS = 1.0  # async calls are cut off in the worker at their limit, if its event loop still turns
CHUNK = 64  # most calls given to a worker at once
LOST_AT_MOST = 3  # workers that may end before they come to a call
LEAST_MEMORY = 4 * 2**30  # bytes of a worker, where nobody says how many
CACHED = 65536  # calls whose scores are remembered
_START = "import json, sys; a = json.loads(sys.argv[1]); sys.path[:] = a.pop('path'); "
_START += "from verl.rewards.nursery import main; main(**a)"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@dataclass(eq=False)
class Job:
    """One call on its way."""

    target: Target
    call: Call
    together: bool  # may share a worker's time with others (async functions)
    key: bytes
    alone: bool = False  # it was one of several in a worker that did not stop: now there is nobody else to blame
    lost: int = 0  # workers that ended before they came to it
    scores: list[Score] | None = None  # what came of it, or the error; both None: nothing yet
    error: RewardError | None = None

    @property
    def done(self) -> bool:
        return self.scores is not None or self.error is not None


@dataclass(eq=False)
class _Worker:
    number: int
    channel: Channel
    jobs: dict[int, Job] = field(default_factory=dict)  # unanswered, by their number in the message
    begun: bool = False
    since: float = 0.0  # when it was last heard of


class Pool:
    """Processes are started with the first call and end with this object, or with the process that holds it.

    Args:
        most, least: workers; above ``least`` they come and go with the number of waiting calls.
        limit: seconds for each call of its own time.
        cached: equal calls of one function for one response are made once, and remembered.
        memory: bytes of each worker; None: its share of half of what is free, but at least ``LEAST_MEMORY`` of it.
    """

    def __init__(self, most: int, least: int, limit: float, cached: bool, memory: int | None = None) -> None:
        self._most, self._least, self._limit, self._cached = most, least, limit, cached
        half = free_memory() // 2
        self._memory = memory or max(half // max(most, 1), min(half, LEAST_MEMORY))
        self._waiting: deque[Job] = deque()
        self._open: dict[bytes, Job] = {}  # by key, until they are gathered
        self._scores: OrderedDict[bytes, list[Score]] = OrderedDict()
        self._workers: list[_Worker] = []
        self._control: socket.socket | None = None
        self._end: weakref.finalize | None = None
        self._started, self._grown = 0, 0.0
        self._changed = threading.Condition()  # for all of the above
        self._thread: threading.Thread | None = None
        self._woken, self._wakes = socket.socketpair()
        self._wakes.setblocking(False)
        self._ending = False

    def submit(self, target: Target, calls: Sequence[Call], together: bool = False) -> list[Job]:
        """One job a call, in order; equal calls may be one job. Returns at once."""
        with self._changed:
            jobs = [self._job(target, call, together) for call in calls]
            if self._thread is not None:
                self._wake()
            elif self._waiting:
                self._thread = threading.Thread(target=self._run, name="reward-pool", daemon=True)
                self._thread.start()
        return jobs

    def gather(self, jobs: Sequence[Job]) -> list[list[Score]]:
        """Wait for these; one list of scores a job. Raises RewardError: a function cannot be loaded, its arguments
        cannot be sent, or it returned what is no list of scores for a batch."""
        with self._changed:
            self._changed.wait_for(lambda: all(job.done for job in jobs))
            self._open = {key: job for key, job in self._open.items() if not job.done}
        for job in jobs:
            if job.error is not None:
                raise job.error
        return [job.scores or [] for job in jobs]

    def close(self) -> None:
        """End all processes; calls under way fail."""
        with self._changed:
            self._ending, thread = True, self._thread
            self._wake()
        if thread is not None:
            thread.join()
        if self._end is not None:
            self._end()
        for worker in self._workers:
            worker.channel.close()
        self._workers, self._control, self._end, self._ending = [], None, None, False

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # full of such words, which it has yet to read, for which it needs the lock
            self._wakes.send(b"!")

    # the pool's own thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        with self._changed:
            error = RewardError("The reward workers were ended.", fix="score before the run ends")
            try:
                while not self._ending and (self._waiting or any(worker.jobs for worker in self._workers)):
                    self._advance()
            except RewardError as raised:
                error = raised
            except Exception as raised:
                error = RewardError("The pool of reward workers failed.", repr(raised), IN_PROCESS)
                error.__cause__ = raised
            for job in [*self._waiting, *(job for worker in self._workers for job in worker.jobs.values())]:
                job.error = error  # whoever gathers it gets this
            self._waiting.clear()
            for worker in self._workers:
                worker.jobs.clear()
            self._thread = None
            self._changed.notify_all()

    def _advance(self) -> None:
        """Give calls to workers and take what they say next; others may use the pool while nobody says anything."""
        self._assign()
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for worker in self._workers:
                selector.register(worker.channel, selectors.EVENT_READ, worker)
            timeout = self._until_due()
            self._changed.release()
            try:
                selector.select(timeout)
            finally:
                self._changed.acquire()
            # Looked at again: this process may have been kept from looking for long, which is no call's time. For the
            # same reason what was not heard by then is judged by a time before the look.
            now = time.monotonic()
            for key, _ in selector.select(0):
                if key.data is None:
                    self._woken.recv(4096)
                else:
                    self._hear(key.data)
        for worker in list(self._workers):
            if worker.jobs and now > self._due(worker):
                self._lost(worker, too_slow(self._limit))
        self._changed.notify_all()

    # jobs ----------------------------------------------------------------------------------------------------------

    def _job(self, target: Target, call: Call, together: bool) -> Job:
        key = _key(target, call) if self._cached and call.count is None else b""
        if key in self._open:
            return self._open[key]
        job = Job(target, call, together, key)
        if key in self._scores:
            self._scores.move_to_end(key)
            job.scores = self._scores[key]
            return job
        if key:
            self._open[key] = job
        self._waiting.append(job)
        return job

    def _finish(self, job: Job, scores: list[Score]) -> None:
        job.scores = scores
        if job.key and all(score.outcome in ("scored", "none") for score in scores):
            self._scores[job.key] = scores
            if len(self._scores) > CACHED:
                self._scores.popitem(last=False)

    def _take(self) -> list[Job]:
        """What the next free worker is to do; the fewer calls wait, the smaller, so that workers end together."""
        first = next((job for job in self._waiting if job.alone or not self._is_shared(job)), None)
        if first is None:
            return []
        chunk = [first]
        if not first.alone and first.call.count is None:
            size = len(self._waiting) if first.together else min(CHUNK, len(self._waiting) // (4 * self._most))
            alike = (job for job in self._waiting if job.target == first.target and not job.alone and job is not first)
            chunk += [job for job, _ in zip(alike, range(size - 1), strict=False)]
        taken = set(map(id, chunk))
        self._waiting = deque(job for job in self._waiting if id(job) not in taken)
        return chunk

    def _is_shared(self, job: Job) -> bool:
        """Calls of an async function are in flight together in one worker, no more of them than its limit."""
        others = (other for worker in self._workers for other in worker.jobs.values())
        return job.together and any(one.together and not one.alone and one.target == job.target for one in others)

    # workers -------------------------------------------------------------------------------------------------------

    def _assign(self) -> None:
        while self._waiting:
            free = next((worker for worker in self._workers if not worker.jobs), None)
            if free is None:
                if not self._grow():
                    return
            elif chunk := self._take():
                self._give(free, chunk)
            else:
                return

    def _give(self, worker: _Worker, chunk: list[Job]) -> None:
        worker.jobs, worker.begun, worker.since = dict(enumerate(chunk)), False, time.monotonic()
        try:
            calls = [[pack(job.call.arguments), job.call.count] for job in chunk]
            worker.channel.send([chunk[0].target, self._limit, calls])
        except OSError:
            self._lost(worker, _ENDED)
        except Exception as error:
            worker.jobs = {}
            for job in chunk:
                job.error = RewardError("What a row holds cannot be sent to a reward worker.", repr(error), IN_PROCESS)

    def _grow(self) -> bool:
        """More workers, if calls have waited and there may be more."""
        room, now = self._most - len(self._workers), time.monotonic()
        if room <= 0 or (self._workers and now - self._grown < GROW_SECONDS):
            return False
        for _ in range(min(room, max(1, len(self._workers)), len(self._waiting))):
            self._spawn()
        self._grown = now
        return True

    def _spawn(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            idle = None if len(self._workers) < self._least else IDLE_SECONDS
            self._tell_nursery("spawn", self._started, idle, [theirs.fileno()])
        self._workers.append(_Worker(self._started, Channel(ours)))
        self._started += 1

    def _tell_nursery(self, word: str, number: int, idle: float | None = None, descriptors: Sequence[int] = ()) -> None:
        message = json.dumps([word, number, idle]).encode().ljust(MESSAGE_BYTES)
        for _ in range(2):
            if self._control is None:
                if self._end is not None and not self._end.alive:  # this process is ending
                    break
                if word == "kill":  # the nursery is gone, and its workers with it
                    return
                self._control, self._end = self._start_nursery()
            try:
                socket.send_fds(self._control, [message], descriptors)
                return
            except OSError:
                self._control = None
        raise RewardError("Reward workers cannot be started.", "their parent ended at once", IN_PROCESS)

    def _start_nursery(self) -> tuple[socket.socket, weakref.finalize]:
        ours, theirs = socket.socketpair()
        with theirs:
            # Imported once, before the workers are forked.
            modules = {IN_POOL.get(job.target.name) for job in self._waiting if job.target.path is None} - {None}
            arguments = {"descriptor": theirs.fileno(), "parent": os.getpid(), "modules": list(modules)}
            arguments |= {"memory": self._memory, "path": sys.path}
            nursery = subprocess.Popen(
                [sys.executable, "-c", _START, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=os.environ | dict.fromkeys(_THREADS, "1"),
                start_new_session=True,  # Ctrl-C is for the run
            )
        return ours, weakref.finalize(self, _end_nursery, ours, nursery)

    def _hear(self, worker: _Worker) -> None:
        try:
            for answer in worker.channel.receive():
                self._take_answer(worker, answer)
                worker.since = time.monotonic()
        except (EOFError, OSError):
            self._lost(worker, _ENDED)
        except Exception:  # of the many ways to say what is no answer
            self._lost(worker, _NO_ANSWER)

    def _take_answer(self, worker: _Worker, answer: Any) -> None:
        """Raises ValueError and others: this is no answer to what was asked."""
        word, *rest = answer
        if word == "begun" and worker.jobs and not worker.begun:
            worker.begun = True
        elif word == "refused" and worker.jobs:
            what, value, fix = rest
            for job in worker.jobs.values():
                job.error = RewardError(str(what), unpack(value), None if fix is None else str(fix))
            worker.jobs = {}
        elif type(word) is int and worker.begun:
            (told,) = rest
            scores = heard(told, worker.jobs[word].call.count or 1)
            self._finish(worker.jobs.pop(word), scores)
        else:
            raise ValueError("no answer")

    def _lost(self, worker: _Worker, why: Score) -> None:
        """A worker is gone, or will be: the call that it was at has failed, the others are given to another."""
        self._tell_nursery("kill", worker.number)
        worker.channel.close()
        self._workers.remove(worker)
        jobs = list(worker.jobs.values())
        if worker.begun and len(jobs) > 1 and jobs[0].together:
            for job in jobs:
                job.alone = True
        elif worker.begun and jobs:
            first = jobs.pop(0)
            self._finish(first, [why] * (first.call.count or 1))
        else:
            for job in jobs:
                job.lost += 1
                if job.lost == LOST_AT_MOST:
                    self._finish(job, [_NEVER_BEGAN] * (job.call.count or 1))
        self._waiting.extendleft(job for job in reversed(jobs) if not job.done)

    def _due(self, worker: _Worker) -> float:
        """When a worker that says nothing more is given up."""
        if not worker.begun:
            return worker.since + START_SECONDS
        grace = GRACE_SECONDS * any(job.together for job in worker.jobs.values())
        due = worker.since + self._limit + grace
        if not worker.channel.partial:
            return due
        # It is done, and its answer takes time to get here, or it only began to say one.
        return min(due + SEND_SECONDS, max(due, worker.channel.heard + PAUSE_SECONDS))

    def _until_due(self) -> float:
        now = time.monotonic()
        dues = [self._due(worker) - now for worker in self._workers if worker.jobs]
        if self._waiting and len(self._workers) < self._most:
            dues.append(GROW_SECONDS)
        return max(0.0, min(dues)) + 0.001 if dues else 0.0


def _key(target: Target, call: Call) -> bytes:
    """The same for equal arguments; empty where they are nothing that JSON tells apart."""
    try:
        told = json.dumps([target, pack(call.arguments)], sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return b""
    return hashlib.blake2b(told.encode(), digest_size=16).digest()


_ENDED = Score(None, "failed", reason="its reward worker ended in the middle of it (killed, out of memory, os._exit)")
_NO_ANSWER = Score(None, "failed", reason="its reward worker sent what is no answer; something else writes to it")
_NEVER_BEGAN = Score(None, "failed", reason=f"{LOST_AT_MOST} reward workers ended before they could begin with it")


def _end_nursery(control: socket.socket, nursery: subprocess.Popen[bytes]) -> None:
    control.close()
    try:
        nursery.wait(END_SECONDS + GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        nursery.kill()
        nursery.wait()
