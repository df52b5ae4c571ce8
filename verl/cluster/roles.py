"""The roles of a run as the controller sees them: plain calls, wherever the models are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric
from verl.cluster.early_scoring import for_scoring
from verl.cluster.profiling import Span
from verl.protocol import DataProto
from verl.rollout.protocol import EngineStats, Request, Result, Slot


class WorkerCalls(Protocol):
    """What a group of processes answers to, those of its roles: :class:`verl.cluster.worker.Worker`, or its stand-in
    over Ray."""

    def generate(self, requests: list[Request], prompts: DataProto | None) -> list[Result]: ...
    def publish(self, version: int) -> None: ...
    def engine_stats(self) -> EngineStats: ...
    def memory_gb(self) -> dict[str, float]: ...
    def profile(self, folder: str | None) -> None: ...
    def spans(self) -> dict[str, list[Span]]: ...
    def score(self, batch: DataProto) -> DataProto: ...
    def actor_log_probs(self, batch: DataProto) -> DataProto: ...
    def reference_log_probs(self, batch: DataProto) -> DataProto: ...
    def full_kl(self, batch: DataProto) -> DataProto: ...
    def values(self, batch: DataProto) -> DataProto: ...
    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]: ...
    def update_critic(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]: ...
    def save(self, folder: str, background: bool = False) -> None: ...
    def saved(self) -> bool: ...
    def load(self, folder: str) -> None: ...


def merged_memory(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of several processes: the largest peak, the rewards of whoever has them, the others by their own names."""
    largest = {name: max(part[name] for part in parts) for name in ("peak", "rewards")}
    return {name: value for part in parts for name, value in part.items()} | largest


@dataclass(frozen=True)
class Policy:
    """The actor."""

    worker: WorkerCalls

    def log_probs(self, batch: DataProto) -> DataProto:
        return self.worker.actor_log_probs(batch)

    def update(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        return self.worker.update_actor(mini_batch, denominators)


@dataclass(frozen=True)
class Reference:
    worker: WorkerCalls

    def log_probs(self, batch: DataProto) -> DataProto:
        return self.worker.reference_log_probs(batch)

    def full_kl(self, batch: DataProto) -> DataProto:
        """Of the actor's current weights from the reference, over the whole vocabulary."""
        return self.worker.full_kl(batch)


@dataclass(frozen=True)
class Critic:
    worker: WorkerCalls

    def values(self, batch: DataProto) -> DataProto:
        return self.worker.values(batch)

    def update(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        return self.worker.update_critic(mini_batch, denominators)


@dataclass(frozen=True)
class Scorer:
    worker: WorkerCalls

    def score(self, batch: DataProto) -> DataProto:
        return self.worker.score(batch)


class Rollout(Protocol):
    """Samples responses.

    Attributes:
        apart: it has processes of its own, which sample while the others compute.
    """

    apart: bool

    def generate(self, requests: list[Request], prompts: DataProto | None = None) -> list[Result]:
        """All of them, in their order; ``prompts``: whose they are, so that groups can be scored meanwhile."""
        ...

    def submit(self, requests: list[Request], prompts: DataProto) -> None:
        """To be answered by :meth:`finished`."""
        ...

    def cancel(self, slots: list[Slot]) -> None:
        """Give up submitted requests; :meth:`finished` no longer answers them."""
        ...

    def finished(self) -> list[Result]:
        """What has finished of the submitted requests, in any order; waits until there is something."""
        ...

    def publish(self, version: int) -> None:
        """Sample from the actor's present weights from now on."""
        ...

    def stats(self) -> EngineStats: ...

    def metrics(self) -> dict[str, float]:
        """Of workers of its own, since the last call: ``rollout/*``, and idle share and memory of each."""
        ...

    def profile(self, folder: str | None) -> None:
        """Workers of its own profile into this folder from now on; None: no longer."""
        ...

    def spans(self) -> dict[str, list[Span]]:
        """What each worker of its own has done since the last call."""
        ...


@dataclass(frozen=True)
class SharedRollout:
    """The engine in the actor's own processes: who calls it waits, and nothing else happens meanwhile."""

    worker: WorkerCalls
    apart = False
    _submitted: list[Request] = field(default_factory=list)

    def submit(self, requests: list[Request], prompts: DataProto) -> None:
        self._submitted.extend(requests)

    def cancel(self, slots: list[Slot]) -> None:
        self._submitted[:] = [request for request in self._submitted if request.slot not in slots]

    def finished(self) -> list[Result]:
        requests = list(self._submitted)
        self._submitted.clear()
        return self.generate(requests)

    def generate(self, requests: list[Request], prompts: DataProto | None = None) -> list[Result]:
        return self.worker.generate(requests, None if prompts is None else for_scoring(prompts))

    def metrics(self) -> dict[str, float]:
        return {}

    def profile(self, folder: str | None) -> None:
        pass

    def spans(self) -> dict[str, list[Span]]:
        return {}

    def publish(self, version: int) -> None:
        self.worker.publish(version)

    def stats(self) -> EngineStats:
        return self.worker.engine_stats()


@dataclass(frozen=True)
class Roles:
    """Who does what in a run; None where the algorithm needs no such role.

    Attributes:
        exact_rollout: the engine's log-probs are proven to be the trainer's, bit for bit.
    """

    policy: Policy
    rollout: Rollout
    scorer: Scorer
    reference: Reference | None
    critic: Critic | None
    exact_rollout: bool

    @classmethod
    def of(cls, workers: Mapping[str, WorkerCalls], rollout: Rollout, exact_rollout: bool) -> Roles:
        """Of the worker that each role of the run is in."""
        return cls(
            policy=Policy(workers["actor"]),
            rollout=rollout,
            scorer=Scorer(workers["reward"]),
            reference=Reference(workers["reference"]) if "reference" in workers else None,
            critic=Critic(workers["critic"]) if "critic" in workers else None,
            exact_rollout=exact_rollout,
        )

    def _workers(self) -> list[WorkerCalls]:
        """Each once."""
        holders = (self.policy, self.scorer, self.reference, self.critic)
        return list({id(holder.worker): holder.worker for holder in holders if holder is not None}.values())

    def memory_gb(self) -> dict[str, float]:
        """GiB by process; ``peak``: the most that one of the models' processes ever had."""
        return merged_memory([worker.memory_gb() for worker in self._workers()])

    def profile(self, folder: str | None) -> None:
        """Have all processes profile what they do into this folder from now on; None: no longer."""
        for worker in self._workers():
            worker.profile(folder)
        self.rollout.profile(folder)

    def spans(self) -> dict[str, list[Span]]:
        """What each process has done since the last call."""
        found = self.rollout.spans()
        for worker in self._workers():
            found |= worker.spans()
        return found

    def save(self, folder: str, background: bool = False) -> None:
        for worker in self._workers():
            worker.save(folder, background)

    def saved(self) -> bool:
        """Whether what was saved in the background is written by now."""
        return all(worker.saved() for worker in self._workers())

    def load(self, folder: str) -> None:
        for worker in self._workers():
            worker.load(folder)
