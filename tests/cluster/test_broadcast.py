"""Weights by broadcast among threads of this process: the sender's bits, and nobody waits for ever for who is gone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import HashStore

from verl.cluster import weight_sync
from verl.cluster.weight_sync import Broadcast, Meeting, Participant

STORES: dict[str, HashStore] = defaultdict(HashStore)


def participant() -> Participant:
    return Participant(lambda name, seconds: STORES[name])


MEETING = Meeting("", ("a", "b"), 30.0, nccl=False, local=True)


def tensors(seed: int, size: int = 1000) -> dict[str, Tensor]:
    torch.manual_seed(seed)
    return {"w": torch.randn(size, 3), "v": torch.randn(7, dtype=torch.bfloat16), "s": torch.randn(())}


def exchanged(
    present: dict[int, Participant], sent: dict[str, Tensor], meeting: Meeting
) -> dict[int, tuple[dict[str, Tensor], str]]:
    """By rank what each has in the end, and what went wrong."""
    with ThreadPoolExecutor(len(present)) as threads:
        own = {rank: sent if rank == 0 else {n: torch.zeros_like(t) for n, t in sent.items()} for rank in present}
        answers = {rank: threads.submit(p.exchange, own[rank], rank, meeting) for rank, p in present.items()}
        return {rank: answer.result() for rank, answer in answers.items()}


def same(got: dict[str, Tensor], sent: dict[str, Tensor]) -> bool:
    return all(torch.equal(got[name], tensor) for name, tensor in sent.items())


def test_all_get_the_senders_bits_and_a_death_among_them_is_noticed_by_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 64)  # each tensor goes by itself
    meeting = replace(MEETING, name="one", seconds=600.0)
    present = {rank: participant() for rank in range(3)}
    for seed in range(2):
        got = exchanged(present, tensors(seed), meeting)
        assert [trouble for _, trouble in got.values()] == [""] * 3
        assert all(same(weights, tensors(seed)) for weights, _ in got.values())
    present.pop(2)._group = None  # what the end of a process is to its connections
    got = exchanged(present, tensors(2), meeting)
    assert "waited for the others with part 1 of 3, 600 s (rollout.worker_timeout) at most: " in got[0][1]
    assert got[1][1] or same(got[1][0], tensors(2))
    got = exchanged(present, tensors(3), replace(meeting, name="two", workers=("a",)))
    assert [trouble for _, trouble in got.values()] == ["", ""] and same(got[1][0], tensors(3))


def test_who_hangs_in_a_broadcast_is_waited_for_no_longer_than_the_limit() -> None:
    meeting = replace(MEETING, name="hang", seconds=1.5)
    present = {rank: participant() for rank in range(3)}
    assert all(not trouble for _, trouble in exchanged(present, tensors(1), meeting).values())
    large = tensors(2, size=4_000_000)  # more than the connection to who does not read it holds
    hanging = present.pop(2)
    got = exchanged(present, large, meeting)
    assert "with part 1 of 1, 1.5 s (rollout.worker_timeout) at most" in got[0][1]
    assert same(got[0][0], large)  # for those who missed it
    assert hanging._group is not None


def test_who_does_not_come_to_meet_is_not_waited_for_for_ever() -> None:
    meeting = replace(MEETING, name="absent", seconds=0.5)
    for _, trouble in exchanged({0: participant(), 1: participant()}, tensors(1), meeting).values():
        assert "waited for the others to meet, 0.5 s at most" in trouble


def test_who_was_not_reached_gets_what_was_sent_and_the_next_ones_meet_anew() -> None:
    answers = {"a": "", "b": ""}
    sent: list[Meeting] = []
    events: list[tuple[str, ...]] = []

    def workers(method: str, *arguments: Any) -> Callable[[], dict[str, Any]]:
        return lambda: dict(answers)

    def send(meeting: Meeting) -> str:
        sent.append(meeting)
        return ""

    exports = iter(["first", "second"])
    meeting = partial(Meeting, seconds=1.0, nccl=False, local=True)
    forgotten: list[str] = []
    sync = Broadcast(send, lambda: next(exports), meeting, forgotten.append, lambda *event: events.append(event))
    sync.publish(1, workers)
    sync.publish(2, workers)
    assert sent[0] == sent[1] and sent[0].workers == ("a", "b")
    assert [sync.reference(name) for name in "ab"] == [None, None] and events == []
    assert sync.reference("late") == sync.reference("later") == "first"
    answers["b"] = "waited in vain"
    sync.publish(3, workers)
    assert [sync.reference(name) for name in "ab"] == [None, "second"]
    assert events == [("missed", "weights 3", "b: waited in vain. Who lives gets them from the object store")]
    answers["b"] = ""
    sync.publish(4, workers)
    del answers["a"]
    sync.publish(5, workers)
    assert [meeting.workers for meeting in sent] == [("a", "b")] * 4 + [("b",)]
    assert sent[2] == sent[1] and len({meeting.name for meeting in sent[2:]}) == 3
    assert forgotten == [sent[0].name, sent[3].name, sent[4].name]


def test_who_answers_first_makes_no_new_meeting() -> None:
    meetings: list[Meeting] = []
    order = ["a", "b"]

    def workers(method: str, *arguments: object) -> Callable[[], dict[str, str]]:
        return lambda: dict.fromkeys(order, "")

    def send(meeting: Meeting) -> str:
        meetings.append(meeting)
        return ""

    anew = partial(Meeting, seconds=1.0, nccl=False, local=True)
    sync = Broadcast(send, dict, anew, lambda name: None, lambda *event: None)
    for version in (1, 2):
        sync.publish(version, workers)
        order.reverse()
    assert meetings[0] is meetings[1] and meetings[0].workers == ("a", "b")
