"""A request that an engine cannot compute is found, and costs the others nothing."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pool_cases import group, result

from verl.errors import EngineError
from verl.rollout.isolation import PROBE, Isolation
from verl.rollout.protocol import EngineStats, Request, Result, Slot


class Fake:
    """Samples one token of every response a step, number 0, 1, ...; a response of index i in its group has i + 2.

    Args:
        faults: raised when a response's token of this number is sampled.
    """

    capabilities = frozenset[str]()

    def __init__(self, faults: dict[tuple[Slot, int], Exception]) -> None:
        self.faults, self.dead = faults, False
        self.lengths: dict[Slot, int] = {}
        self.sampled = 0

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            assert request.slot not in self.lengths
            self.lengths[request.slot] = len(request.resume.response_ids) if request.resume else 0

    def step(self) -> list[Result]:
        for slot, length in self.lengths.items():
            if self.dead or (slot, length) in self.faults:
                raise RuntimeError("device lost") if self.dead else self.faults[slot, length]
            self.lengths[slot] += 1  # as an engine that fails in the midst of its step
            self.sampled += 1
        return self._taken([slot for slot, length in self.lengths.items() if length >= slot.index + 2], "stop")

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        return self._taken([slot for slot in self.lengths if slots is None or slot in slots], "abort")

    def _taken(self, slots: list[Slot], reason: str) -> list[Result]:
        return [result(slot, 0, reason, self.lengths.pop(slot)) for slot in slots]  # type: ignore[arg-type]

    def stats(self) -> EngineStats:
        return EngineStats(0, len(self.lengths), 0, 0, 0, 0)


def run(isolation: Isolation, steps: int = 10_000) -> tuple[dict[Slot, int], dict[Slot, str]]:
    """Lengths of what finished, and what failed; each slot once."""
    finished: dict[Slot, int] = {}
    failures: dict[Slot, str] = {}
    while isolation.busy and steps:
        results, failed = isolation.step()
        for ended in results:
            assert ended.slot not in finished
            finished[ended.slot] = len(ended.response_ids)
        failures |= failed
        steps -= 1
    assert finished.keys().isdisjoint(failures)
    return finished, failures


REQUESTS = group(0, 20)


@settings(max_examples=200, deadline=None)
@given(
    bad=st.dictionaries(st.integers(0, 19), st.integers(0, 21), max_size=5),
    later=st.integers(0, 20),
    steps=st.integers(0, 30),
)
def test_b101_only_the_bad_ones_fail(bad: dict[int, int], later: int, steps: int) -> None:
    """Also where some come later."""
    faults = {(REQUESTS[i].slot, token): ValueError(f"no {token}") for i, token in bad.items() if token < i + 2}
    isolation = Isolation(Fake(faults))  # type: ignore[arg-type]
    isolation.submit(REQUESTS[later:])
    first = run(isolation, steps)
    isolation.submit(REQUESTS[:later])
    second = run(isolation)
    finished, failed = first[0] | second[0], first[1] | second[1]
    assert failed.keys() == {slot for slot, _ in faults}
    assert all("ValueError: no " in reason and "test_isolation.py" in reason for reason in failed.values())
    assert finished == {r.slot: r.slot.index + 2 for r in REQUESTS if r.slot not in failed}


def test_what_was_sampled_before_is_kept() -> None:
    """A fault at the last token of one of 16 costs the others a token a division."""
    requests = [request for draw in range(16) for request in group(draw, 31)[30:]]
    engine = Fake({(requests[5].slot, 31): ValueError()})
    isolation = Isolation(engine)  # type: ignore[arg-type]
    isolation.submit(requests)
    finished, failed = run(isolation)
    assert len(finished) == 15 and list(failed) == [requests[5].slot]
    assert engine.sampled < 16 * 32 + 16 * 4 * 2


def test_an_engine_that_answers_nothing_any_more_is_no_fault_of_a_request() -> None:
    engine = Fake({})
    isolation = Isolation(engine)  # type: ignore[arg-type]
    isolation.submit(REQUESTS)
    engine.dead = True
    with pytest.raises(RuntimeError, match="device lost"):
        run(isolation)


def test_an_error_that_is_told_to_the_user_is_no_fault_of_a_request_either() -> None:
    isolation = Isolation(Fake({(REQUESTS[3].slot, 1): EngineError("the weights are broken")}))  # type: ignore[arg-type]
    isolation.submit(REQUESTS)
    with pytest.raises(EngineError, match="the weights are broken"):
        run(isolation)


@pytest.mark.parametrize("steps", [0, 3, 8])
def test_what_is_given_back_is_all_that_is_there(steps: int) -> None:
    """Also what waits for its half's turn, and what has not begun."""
    isolation = Isolation(Fake({(REQUESTS[7].slot, 2): ValueError()}))  # type: ignore[arg-type]
    isolation.submit(REQUESTS[:16])
    finished, failed = run(isolation, steps)
    isolation.submit(REQUESTS[16:])
    one = isolation.abort([REQUESTS[15].slot])
    rest = isolation.abort()
    assert not isolation.busy and [part.slot for part in one] == [REQUESTS[15].slot]
    given = [part.slot for part in one + rest]
    assert sorted([*finished, *failed, *given]) == [request.slot for request in REQUESTS]
    assert all(part.finish_reason == "abort" for part in one + rest) and PROBE.slot not in given
