"""A worker group as the controller sees it: explicit calls to its processes over Ray, and what their ends mean."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric, merge_all
from verl.cluster.early_scoring import LISTENING, Listener
from verl.cluster.network import network_interface
from verl.cluster.object_store import STORE_FULL, store_full, stored
from verl.cluster.profiling import Span
from verl.cluster.roles import merged_memory
from verl.cluster.start import EventLog
from verl.cluster.weight_sync import WEIGHTS, Meeting
from verl.data.packing import karmarkar_karp
from verl.errors import ClusterError, RanksLostError, VerlError, WorkerDiedError
from verl.protocol import DataProto
from verl.rollout.parity import ParityReport
from verl.rollout.protocol import EngineStats, Request, Result

GRACE_SECONDS = 5.0  # after a failure, for the other ranks
DUMP_SECONDS = 0.5
MOST_OF_A_DUMP = 8000  # characters


@dataclass(frozen=True)
class Watch:
    """What becomes of long waits: after ``stall_seconds`` they are told and logged."""

    stall_seconds: float
    report: Callable[[str], None]
    log: EventLog


class RayWorkers:
    """Stand-in for :class:`verl.cluster.worker.Worker` in other processes, one or several ranks of a group.

    Every call waits for the answers of all. Ranks get whole batches, which lie in the object store once, and find
    their own rows; requests are shared out here. Calls from several threads take turns.

    Args:
        roles: of the group, in words; empty where it is the only one.
    """

    def __init__(self, actors: list[Any], roles: str, watch: Watch) -> None:
        self._actors, self._roles, self._watch = actors, roles, watch
        self._stacks: list[tuple[str, int, int]] = []
        self._kills = memory_kills()
        self._turn = threading.Lock()
        self._scorer: RayWorkers | None = None

    def await_processes(self, seconds: float, first: Callable[[object], tuple[str, int, int]]) -> None:
        """Until all have started, and called ``first``: :func:`dumpable` or :func:`use_network`.

        Raises:
            ClusterError: not within that time.
        """
        try:
            self._stacks = ray.get([a.__ray_call__.remote(first) for a in self._actors], timeout=max(0.0, seconds))
        except GetTimeoutError as error:
            raise ClusterError(
                f"{self._who(0)} did not start within cluster.start_timeout",
                None,
                "raise cluster.start_timeout, or look into Ray's logs (/tmp/ray/session_latest/logs)",
            ) from error

    def end(self) -> None:
        """Kill the processes, and let calls under way in other threads end with them."""
        for actor in self._actors:
            ray.kill(actor)
        if self._turn.acquire(timeout=GRACE_SECONDS):
            self._turn.release()

    def setup(self) -> ParityReport | None:
        reports = self._answers("setup", [actor.setup.remote() for actor in self._actors])
        return None if reports[0] is None else ParityReport.total(reports)

    def generate(self, requests: list[Request], prompts: DataProto | None) -> list[Result]:
        shares = share_requests(requests, len(self._actors))
        told, listener = None if prompts is None else stored(prompts), None
        if self._scorer is not None and told is not None:
            ray.wait([self._scorer.expect(requests, told)])  # before any rank tells of them
            told, listener = None, self._scorer.listener
        calls = [
            actor.generate.remote([requests[i] for i in share], told, listener)
            for actor, share in zip(self._actors, shares, strict=True)
        ]
        found: dict[int, Result] = {}
        for share, results in zip(shares, self._answers("generate", calls), strict=True):
            found.update(zip(share, results, strict=True))
        return [found[i] for i in range(len(requests))]

    def publish(self, version: int) -> None:
        self._answers("publish", [actor.publish.remote(version) for actor in self._actors])

    def engine_stats(self) -> EngineStats:
        stats = self._answers("engine_stats", [actor.engine_stats.remote() for actor in self._actors])
        return EngineStats.total(stats, stats[0].version)

    def exported_weights(self) -> Any:
        """A reference to the actor's weights, which lie in the object store then; :mod:`verl.cluster.weight_sync`."""
        references = [actor.exported_weights.remote() for actor in self._actors]
        ray.wait(references, num_returns=len(references), fetch_local=False)
        return references[0]

    def broadcast_weights(self, meeting: Meeting) -> str:
        return self._answers("broadcast_weights", [actor.broadcast_weights.remote(meeting) for actor in self._actors])[
            0
        ]

    def sent_weights(self) -> Any:
        """As :meth:`exported_weights`, of what was broadcast last, whatever the actor does meanwhile."""
        reference = self._actors[0].sent_weights.options(concurrency_group=WEIGHTS).remote()
        ray.wait([reference], fetch_local=False, timeout=self._watch.stall_seconds)
        return reference

    def write_weights(self, file: str) -> None:
        self._answers("write_weights", [actor.write_weights.remote(file) for actor in self._actors])

    def parity_probe(self) -> list[Request]:
        return self._answers("parity_probe", [self._actors[0].parity_probe.remote()])[0]

    def compare(self, requests: list[Request], results: list[Result]) -> ParityReport:
        return self._answers("compare", [actor.compare.remote(requests, results) for actor in self._actors])[0]

    def memory_gb(self) -> dict[str, float]:
        return merged_memory(self._answers("memory_gb", [actor.memory_gb.remote() for actor in self._actors]))

    def profile(self, folder: str | None) -> None:
        self._answers("profile", [actor.profile.remote(folder) for actor in self._actors])

    def spans(self) -> dict[str, list[Span]]:
        answers = self._answers("spans", [actor.spans.remote() for actor in self._actors])
        return {name: spans for answer in answers for name, spans in answer.items()}

    def score(self, batch: DataProto) -> DataProto:
        """On the first rank: a reward function may look at a batch as a whole."""
        return self._answers("score", [self._actors[0].score.remote(stored(batch))])[0]

    def tell(self, scorer: RayWorkers) -> None:
        """Of groups as they finish, from now on, where sampling and scoring are not one process."""
        if scorer is not self or len(self._actors) > 1:
            self._scorer = scorer

    @property
    def listener(self) -> Listener:
        """Of the process that scores."""
        return Listener(self._actors[0])

    def expect(self, requests: list[Request], prompts: Any) -> Any:
        """A reference to the answer; what goes wrong shows when the batch is scored.

        Args:
            prompts: what :func:`stored` gave for them.
        """
        return self._actors[0].expect.options(concurrency_group=LISTENING).remote(requests, prompts)

    def actor_log_probs(self, batch: DataProto) -> DataProto:
        shared = stored(batch)
        return self._answers("actor_log_probs", [actor.actor_log_probs.remote(shared) for actor in self._actors])[0]

    def reference_log_probs(self, batch: DataProto) -> DataProto:
        shared = stored(batch)
        calls = [actor.reference_log_probs.remote(shared) for actor in self._actors]
        return self._answers("reference_log_probs", calls)[0]

    def full_kl(self, batch: DataProto) -> DataProto:
        shared = stored(batch)
        return self._answers("full_kl", [actor.full_kl.remote(shared) for actor in self._actors])[0]

    def values(self, batch: DataProto) -> DataProto:
        shared = stored(batch)
        return self._answers("values", [actor.values.remote(shared) for actor in self._actors])[0]

    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        shared = stored(mini_batch)
        calls = [actor.update_actor.remote(shared, denominators) for actor in self._actors]
        return merge_all(self._answers("update_actor", calls))

    def update_critic(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        shared = stored(mini_batch)
        calls = [actor.update_critic.remote(shared, denominators) for actor in self._actors]
        return merge_all(self._answers("update_critic", calls))

    def save(self, folder: str, background: bool = False) -> None:
        self._answers("save", [actor.save.remote(folder, background) for actor in self._actors])

    def saved(self) -> bool:
        return all(self._answers("saved", [actor.saved.remote() for actor in self._actors]))

    def load(self, folder: str) -> None:
        self._answers("load", [actor.load.remote(folder) for actor in self._actors])

    def _answers(self, call: str, references: list[Any]) -> list[Any]:
        """Wait for all; user-facing errors come out as they were raised, others with the remote traceback.

        The others of a rank that fails hang in an exchange with it, or fail because of it, perhaps before it is known:
        they get a moment, and the cause is raised, whichever came first.
        """
        ranks = {reference: rank for rank, reference in enumerate(references)}
        found: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        started = time.monotonic()
        with self._turn:
            while ranks:
                wait = GRACE_SECONDS if failures else self._watch.stall_seconds
                done, _ = ray.wait(list(ranks), timeout=wait, num_returns=1)
                if not done:
                    if failures:
                        break
                    self._tell_stall(call, list(ranks.values()), time.monotonic() - started)
                for reference in done:
                    rank = ranks.pop(reference)
                    try:
                        found[rank] = ray.get(reference)
                    except (RayTaskError, RayActorError) as error:
                        failures[rank] = error
        if failures:
            rank = min(failures, key=lambda rank: (_distance(failures[rank]), rank))
            self._raise(call, rank, failures[rank])
        return [found[rank] for rank in range(len(references))]

    def _who(self, rank: int) -> str:
        if self._roles:
            return f"rank {rank} of {self._roles}" if len(self._actors) > 1 else f"the process of {self._roles}"
        return "the worker process" if len(self._actors) == 1 else f"training rank {rank}"

    def _tell_stall(self, call: str, silent: list[int], seconds: float) -> None:
        for rank in silent:
            waiting = f"no answer to {call} for {seconds:.0f} s"
            self._watch.report(f"still waiting for {self._who(rank)}: {waiting}; its stack is in events.log")
            stack = stack_of(*self._stacks[rank]) if self._stacks else ""
            self._watch.log("stalled", self._who(rank), f"{waiting}\n{stack}".rstrip())

    def _raise(self, call: str, rank: int, error: Exception) -> NoReturn:
        who = self._who(rank)
        if isinstance(error, STORE_FULL):
            raise store_full() from error
        if isinstance(error, RayTaskError):
            error.add_note(f"in {who}, during {call}")
            if isinstance(error.cause, VerlError):
                raise error.cause from error
            raise RuntimeError(f"{who} failed during {call}: {type(error.cause).__name__}: {error.cause}") from error
        fix = (
            "if memory ran out, lower rollout.max_num_seqs or actor.ppo_max_token_len_per_gpu; "
            "start the same command again to go on from the last checkpoint"
        )
        if memory_kills() > self._kills:
            what = f"{who} was killed by the kernel during {call}: the machine ran out of memory (SIGKILL)"
        else:
            what = f"{who} died during {call}"
        raise WorkerDiedError(what, str(error).strip().splitlines()[-1], fix) from error


def dumpable(worker: object) -> tuple[str, int, int]:
    """Run in a worker process: have SIGUSR1 write the stacks of its threads into a file without a name.

    Returns:
        Ray's node, process id, and the file's descriptor there, for :func:`stack_of`.
    """
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process lives
    worker.stacks = file  # type: ignore[attr-defined]
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    return ray.get_runtime_context().get_node_id(), os.getpid(), file.fileno()


def use_network(worker: object) -> tuple[str, int, int]:
    """As :func:`dumpable`; and ranks on other machines are met over the interface that Ray uses, or the user's own."""
    if name := network_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    return dumpable(worker)


def stack_of(node: str, process: int, descriptor: int) -> str:
    """What a process of this machine is doing: the Python stacks of its threads, now."""
    if node != ray.get_runtime_context().get_node_id():
        return "(on another machine: no stack)"
    path = Path(f"/proc/{process}/fd/{descriptor}")
    try:
        before = path.stat().st_size
        os.kill(process, signal.SIGUSR1)
        time.sleep(DUMP_SECONDS)
        return path.read_bytes()[before:].decode(errors="replace")[:MOST_OF_A_DUMP]
    except OSError as error:
        return f"(no stack: {error})"


def _distance(error: Exception) -> int:
    """How far an error is from the cause: a death, a fault of a rank's own, what follows from another rank's."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if isinstance(error, RayTaskError) and isinstance(error.cause, RanksLostError) else 1


def memory_kills() -> int:
    """Processes that the kernel has killed on this machine (or in this control group) for want of memory."""
    killed = 0
    for file in (Path("/sys/fs/cgroup/memory.events"), Path("/proc/vmstat")):
        with suppress(OSError, ValueError, IndexError):
            killed += sum(
                int(line.split()[1]) for line in file.read_text().splitlines() if line.startswith("oom_kill ")
            )
    return killed


def share_requests(requests: list[Request], ranks: int) -> list[list[int]]:
    """Places of the requests of each rank: those of a prompt together, as it is prefilled once, and about as many."""
    prompts: dict[str, list[int]] = {}
    for place, request in enumerate(requests):
        prompts.setdefault(request.slot.uid, []).append(place)
    units = list(prompts.values())
    if len(units) < ranks:
        units = [[place] for place in range(len(requests))]
    room = [
        sum(len(requests[i].prompt_ids) / len(unit) + requests[i].sampling.max_new_tokens for i in unit)
        for unit in units
    ]
    return [sorted(place for unit in bin_ for place in units[unit]) for bin_ in karmarkar_karp(room, ranks)]
