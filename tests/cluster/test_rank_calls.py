"""Calls to several ranks, without Ray's processes: who samples what, and which of several failures is the cause."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.exceptions import RayActorError, RayTaskError

from verl.cluster import ray_worker
from verl.cluster.ray_worker import RayWorkers, Watch, share_requests
from verl.errors import CheckpointError, RanksLostError, WorkerDiedError
from verl.rollout.protocol import Request, SamplingParams, Slot


@given(sizes=st.lists(st.integers(1, 6), max_size=8), ranks=st.integers(1, 4))
def test_requests_are_shared_out_by_prompts(sizes: list[int], ranks: int) -> None:
    requests = [
        Request(Slot(f"p{prompt}", index), [1] * (3 + prompt), SamplingParams(16))
        for prompt, size in enumerate(sizes)
        for index in range(size)
    ]
    shares = share_requests(requests, ranks)
    assert len(shares) == ranks and sorted(i for share in shares for i in share) == list(range(len(requests)))
    owners = {requests[i].slot.uid: set() for i in range(len(requests))}
    for rank, share in enumerate(shares):
        for i in share:
            owners[requests[i].slot.uid].add(rank)
    if len(sizes) >= ranks:
        assert all(len(ranks_) == 1 for ranks_ in owners.values())  # a prompt is prefilled once
    else:
        assert max(map(len, shares)) - min(map(len, shares)) <= 1  # a few prompts: no rank is left idle


class FakeRay:
    """References are the answers themselves; exceptions are raised when they are fetched."""

    def __init__(self, never: tuple[Any, ...] = ()) -> None:
        self.never = never

    def wait(self, references: list[Any], timeout: float = 0, num_returns: int = 1) -> tuple[list[Any], list[Any]]:
        ready = [reference for reference in references if reference not in self.never]
        return ready[:1], []

    def get(self, reference: Any) -> Any:
        if isinstance(reference, Exception):
            raise reference
        return reference


def task_error(cause: Exception) -> RayTaskError:
    return RayTaskError("update_actor", "a traceback", cause)


def failing(
    monkeypatch: pytest.MonkeyPatch, answers: list[Any], never: tuple[Any, ...] = (), kills: int = 0, roles: str = ""
) -> None:
    counts = iter([0, kills])
    monkeypatch.setattr(ray_worker, "memory_kills", lambda: next(counts))
    monkeypatch.setattr(ray_worker, "ray", FakeRay(never))
    workers = RayWorkers([None] * len(answers), roles, Watch(60, print, print))
    workers._answers("update_actor", answers)


def test_a_death_is_the_cause_whatever_came_first(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = task_error(RanksLostError("training rank 0 waited in vain", None, None))
    with pytest.raises(WorkerDiedError, match="training rank 1 died during update_actor") as caught:
        failing(monkeypatch, [lost, RayActorError()])
    assert not isinstance(caught.value, RanksLostError) and not caught.value.bad_input
    with pytest.raises(WorkerDiedError, match=r"rank 1 was killed by the kernel .* ran out of memory \(SIGKILL\)"):
        failing(monkeypatch, [lost, RayActorError()], kills=1)
    with pytest.raises(WorkerDiedError, match="^rank 1 of critic died during update_actor"):
        failing(monkeypatch, [lost, RayActorError()], roles="critic")


def test_a_defect_is_told_with_its_place_and_the_remote_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="training rank 1 failed during update_actor: KeyError: 'x'") as caught:
        failing(monkeypatch, ["fine", task_error(KeyError("x"))])
    assert "a traceback" in str(caught.value.__cause__)


def test_a_faults_own_words_come_before_what_follows_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = task_error(RanksLostError("training rank 0 waited in vain", None, None))
    with pytest.raises(CheckpointError, match="damaged"):
        failing(monkeypatch, [lost, task_error(CheckpointError("damaged"))])
    with pytest.raises(CheckpointError, match="damaged"):  # nobody waits long for a rank that hangs because of it
        failing(monkeypatch, ["hangs", task_error(CheckpointError("damaged"))], never=("hangs",))
    with pytest.raises(RanksLostError):
        failing(monkeypatch, [lost, "fine"])


class FakeActor:
    """Notes its calls: actor, method, concurrency group, arguments."""

    def __init__(self, name: str, calls: list[Any], method: str = "", group: str = "") -> None:
        self.name, self.calls, self.method, self.group = name, calls, method, group

    def __getattr__(self, method: str) -> FakeActor:
        return FakeActor(self.name, self.calls, method)

    def options(self, concurrency_group: str) -> FakeActor:
        return FakeActor(self.name, self.calls, self.method, concurrency_group)

    def remote(self, *arguments: Any) -> Any:
        self.calls.append((self.name, self.method, self.group, arguments))
        return self.generated(*arguments) if self.method == "generate" else self.method

    def generated(self, requests: list[Request], prompts: Any, listener: Any) -> tuple[Slot, ...]:
        if listener is not None:
            listener.hear([request.slot for request in requests])
            listener.hear([])
        return tuple(request.slot for request in requests)


def test_the_scorer_hears_of_every_ranks_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_worker, "ray", FakeRay())
    monkeypatch.setattr(ray_worker, "stored", lambda value: value)
    requests = [Request(Slot(uid, i), [1], SamplingParams(4)) for uid in ("a", "b") for i in range(2)]
    slots = [request.slot for request in requests]
    calls: list[Any] = []
    actors = [FakeActor(name, calls) for name in ("rank 0", "rank 1", "reward")]
    watch = Watch(60, print, print)

    def told(workers: RayWorkers, scorer: RayWorkers, prompts: Any = "prompts") -> list[Any]:
        workers.tell(scorer)
        calls.clear()
        assert workers.generate(requests, prompts) == slots
        return list(calls)

    both = RayWorkers(actors[:2], "", watch)
    for scorer, name in ((both, "rank 0"), (RayWorkers(actors[2:], "", watch), "reward")):
        expected, *others = told(both, scorer)
        assert expected == (name, "expect", "listening", (requests, "prompts"))
        heard = [call for call in others if call[1] == "hear"]
        assert [call[:3] for call in heard] == [(name, "hear", "listening")] * 2
        assert sorted(slot for call in heard for slot in call[3][0]) == slots
        assert not any(call[1] == "expect" or "prompts" in call[3] for call in others)
        assert all(call[1] == "generate" and call[3][1:] == (None, None) for call in told(both, scorer, None))
    alone = RayWorkers(actors[:1], "", watch)
    assert told(alone, alone) == [("rank 0", "generate", "", (requests, "prompts", None))]  # it does both


def test_the_kernels_count_of_kills_is_readable() -> None:
    assert ray_worker.memory_kills() >= 0
