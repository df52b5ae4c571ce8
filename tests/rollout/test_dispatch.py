"""Who is given which request, and that each gets one outcome."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from pool_cases import SimulatedPool, group, result, uid, with_workers

from verl.errors import EngineError
from verl.rollout.dispatch import HOPELESS_PROMPTS, Lost, Outcome
from verl.rollout.protocol import Request, Slot


def slots(requests: list[Request]) -> list[Slot]:
    return [request.slot for request in requests]


# Who gets what


def test_a_group_goes_to_one_worker_and_groups_are_spread() -> None:
    dispatcher = with_workers(8, 8)
    dispatcher.submit([r for draw in range(4) for r in group(draw, 4)], 0.0)
    sent = dispatcher.assign(0.0)
    assert {name: [slot.uid for slot in slots(requests)] for name, requests in sent.items()} == {
        "0": [uid(0)] * 4 + [uid(2)] * 4,
        "1": [uid(1)] * 4 + [uid(3)] * 4,
    }
    assert dispatcher.assign(0.0) == {}


def test_what_is_submitted_to_the_front_goes_before_all_that_waits() -> None:
    dispatcher = with_workers(2)
    dispatcher.submit([r for draw in range(3) for r in group(draw)], 0.0)
    dispatcher.submit([r for draw in (8, 9) for r in group(draw)], 0.0, front=True)
    assert [slot.uid for slot in slots(dispatcher.assign(0.0)["0"])] == [uid(8), uid(9)]


def test_a_group_waits_for_the_worker_that_has_its_first_half() -> None:
    dispatcher = with_workers(6, 4)
    groups = [group(draw, 4) for draw in range(4)]
    dispatcher.submit([r for requests in groups for r in requests], 0.0)
    sent = dispatcher.assign(0.0)
    assert slots(sent["0"]) == slots(groups[0] + groups[2][:2]) and slots(sent["1"]) == slots(groups[1])
    dispatcher.complete("1", [result(slot) for slot in slots(groups[1])], 1.0)
    assert slots(dispatcher.assign(1.0)["1"]) == slots(groups[3])  # not the second half of group 2
    dispatcher.complete("0", [result(groups[0][0].slot)], 1.0)
    assert slots(dispatcher.assign(1.0)["0"]) == [groups[2][2].slot]


def test_the_last_requests_of_a_group_do_not_wait_for_a_busy_worker_while_another_is_idle() -> None:
    dispatcher = with_workers(3, 4)
    requests = group(0, 4) + group(1, 4)
    dispatcher.submit(requests, 0.0)
    sent = dispatcher.assign(0.0)
    assert slots(sent["1"]) == slots(group(0, 4)) and slots(sent["0"]) == slots(group(1, 4)[:3])
    dispatcher.complete("1", [result(slot) for slot in slots(sent["1"])], 1.0)
    assert dispatcher.assign(1.0) == {"1": group(1, 4)[3:]}


def test_one_group_is_cut_when_workers_would_be_idle() -> None:
    dispatcher = with_workers(64, 64)
    dispatcher.submit(group(0, 8), 0.0)
    assert {name: len(requests) for name, requests in dispatcher.assign(0.0).items()} == {"0": 4, "1": 4}


def test_a_worker_gets_work_by_what_it_does() -> None:
    dispatcher = with_workers(32, 32)
    pool = SimulatedPool(dispatcher, {"0": 90.0, "1": 10.0}, lambda slot: 10)
    dispatcher.submit([r for draw in range(100) for r in group(draw, 1, new=10)], 0.0)
    pool.run()  # speeds are not known at first
    assert dispatcher.stats(pool.now).speed == pytest.approx({"0": 90.0, "1": 10.0})
    start, before = pool.now, len(pool.sent["1"])
    dispatcher.submit([r for draw in range(100) for r in group(draw, 1, new=10)], pool.now)
    assert len(pool.run()) == 100
    assert sum(map(len, pool.sent["1"][before:])) == pytest.approx(10, abs=1)
    assert pool.now - start <= 1.15 * 1000 / 100  # the ideal: 1,000 tokens at 100 a second


def test_the_speed_of_a_new_worker_is_right_from_its_first_response_and_follows_changes() -> None:
    dispatcher = with_workers(4)
    dispatcher.submit(group(0, 4), 0.0)
    dispatcher.assign(0.0)
    dispatcher.complete("0", [result(Slot(uid(0), 0), length=5)], 1.0)  # of 4 that run at 5 tokens a second each
    assert dispatcher.stats(1.0).speed == {"0": pytest.approx(20.0)}
    dispatcher.complete("0", [result(Slot(uid(0), index), length=5) for index in (1, 2, 3)], 1.0)
    now, worker = 50.0, dispatcher
    for draw in range(1, 101):  # idle for 49 seconds, which count as no time of work; then 2 tokens a second
        worker.submit(group(draw), now)
        worker.assign(now)
        now += 2.0
        worker.complete("0", [result(Slot(uid(draw), 0), length=4)], now)
    stats = dispatcher.stats(now)
    assert stats.speed["0"] == pytest.approx(2.0, rel=0.05)
    assert stats.idle_share["0"] == pytest.approx(49 / 250)


def test_shared_prompts_are_reckoned_once() -> None:
    dispatcher = with_workers(8, 8)
    dispatcher.submit(group(0, 4, prompt=100, new=10), 0.0)
    dispatcher.submit(group(1, 1, prompt=100, new=20), 0.0)
    dispatcher.submit(group(2, 1, prompt=10, new=1), 0.0)
    sent = dispatcher.assign(0.0)
    # Group 0 is 140 tokens (four times 110 if its prompt counted each time), group 1 120: the last one goes with it.
    assert slots(sent["1"]) == slots(group(1) + group(2))


# Each slot has one outcome


def test_late_and_double_answers_are_dropped() -> None:
    dispatcher = with_workers(4, 4)
    requests = group(0, 1)
    dispatcher.submit(requests, 0.0)
    assert dispatcher.assign(0.0) == {"0": requests}
    answer = result(requests[0].slot)
    dispatcher.complete("1", [answer], 1.0)
    dispatcher.complete("nobody", [answer], 1.0)
    assert dispatcher.take() == [] and dispatcher.stats(1.0).counts["late"] == 2
    dispatcher.complete("0", [answer, answer], 1.0)
    assert dispatcher.take() == [answer] and dispatcher.take() == []
    assert dispatcher.stats(1.0).counts == {"late": 3, "finished": 1}


def test_what_a_lost_worker_had_goes_first_in_order() -> None:
    dispatcher = with_workers(4)
    requests = [r for draw in range(4) for r in group(draw, 2)]
    dispatcher.submit(requests, 0.0)
    assert dispatcher.assign(0.0) == {"0": requests[:4]}
    dispatcher.remove_worker("0", "killed by signal 9", 1.0)
    dispatcher.remove_worker("0", "its heartbeat stopped", 1.0)  # the second to notice
    dispatcher.add_worker("1", 6, 2.0)
    assert dispatcher.assign(2.0) == {"1": requests[:6]}
    assert dispatcher.stats(2.0).counts == {"retried": 4}
    dispatcher.complete("0", [result(requests[0].slot)], 2.5)  # of the lost one
    assert dispatcher.take() == []


def test_what_two_workers_were_lost_with_goes_on_in_halves_apart_from_all_else() -> None:
    dispatcher = with_workers(8)
    requests = [r for draw in range(6) for r in group(draw, 2)]
    dispatcher.submit(requests, 0.0)
    dispatcher.assign(0.0)
    dispatcher.remove_worker("0", "killed", 1.0)
    dispatcher.add_worker("1", 6, 1.0)
    dispatcher.assign(1.0)
    dispatcher.add_worker("2", 6, 1.0)
    assert dispatcher.assign(1.0) == {"2": requests[6:]}
    dispatcher.remove_worker("1", "killed", 2.0)  # prompts 0 to 2 for the second time
    assert dispatcher.assign(2.0) == {}  # who has something in hand finishes it first
    dispatcher.complete("2", [result(slot) for slot in slots(requests[6:])], 3.0)
    assert dispatcher.assign(3.0) == {"2": requests[:2]}
    dispatcher.submit(group(9), 3.0)
    assert dispatcher.assign(3.0) == {}  # not beside suspects
    dispatcher.add_worker("3", 1, 4.0)
    assert dispatcher.assign(4.0) == {"3": requests[2:3]}  # of the other half what it has room for
    dispatcher.complete("2", [result(slot) for slot in slots(requests[:2])], 5.0)
    assert dispatcher.assign(5.0) == {"2": requests[3:6]}
    dispatcher.complete("2", [result(slot) for slot in slots(requests[3:6])], 6.0)
    assert dispatcher.assign(6.0) == {"2": group(9)}


def with_killers(killers: set[str], prompts: int, n: int, *places: int) -> tuple[list[Outcome], int, int]:
    """Workers die at once of what they are given of these prompts, else answer all; then others take their place.

    Returns:
        The outcomes, how many workers died, and the most of them in a row.
    """
    dispatcher = with_workers(*places)
    dispatcher.submit([r for draw in range(prompts) for r in group(draw, n)], 0.0)
    room, born, died, row, longest = {str(i): size for i, size in enumerate(places)}, len(places), 0, 0, 0
    outcomes: list[Outcome] = []
    while sent := dispatcher.assign(float(born)):
        for name, requests in sent.items():
            if any(request.slot.uid in killers for request in requests):
                dispatcher.remove_worker(name, "killed", float(born))
                room[str(born)] = room.pop(name)
                dispatcher.add_worker(str(born), room[str(born)], float(born))
                born, died, row = born + 1, died + 1, row + 1
                longest = max(longest, row)
            else:
                dispatcher.complete(name, [result(slot) for slot in slots(requests)], float(born))
                row = 0
        outcomes += dispatcher.take()
    return outcomes, died, longest


@pytest.mark.parametrize("place", [0, 7, 29, 31])
def test_a_prompt_that_kills_its_workers_is_lost_alone(place: int) -> None:
    outcomes, died, longest = with_killers({uid(place)}, 32, 2, 64)
    assert len(outcomes) == 64
    lost = {outcome.slot.uid: outcome.reason for outcome in outcomes if isinstance(outcome, Lost)}
    assert lost == {uid(place): "3 workers were lost with its prompt alone, the last one: killed"}
    assert died == 2 + 4 + 3 and longest <= 3  # with all, with 16, 8, 4, 2 prompts, alone


@given(st.sets(st.integers(0, 19)), st.integers(1, 3), st.lists(st.integers(1, 24), min_size=1, max_size=4))
@examples(max_examples=60, deadline=None)
def test_however_many_prompts_kill_the_others_are_answered(killers: set[int], n: int, places: list[int]) -> None:
    outcomes, died, _ = with_killers({uid(draw) for draw in killers}, 20, n, *places)
    lost = Counter(outcome.slot.uid for outcome in outcomes if isinstance(outcome, Lost))
    assert len({outcome.slot for outcome in outcomes}) == len(outcomes) == 20 * n
    assert lost == {uid(draw): n for draw in killers} and died >= len(killers)


def test_a_draining_worker_finishes_or_hands_back() -> None:
    dispatcher = with_workers(3)
    requests = group(0, 4)
    dispatcher.submit(requests, 0.0)
    dispatcher.assign(0.0)
    dispatcher.drain_worker("0")
    assert dispatcher.assign(0.0) == {}
    dispatcher.add_worker("1", 4, 0.0)
    assert dispatcher.assign(0.0) == {"1": requests[3:]}  # the one that had waited for a place
    part = result(requests[1].slot, [3, 3, 4], "abort")
    none = result(requests[2].slot, [], "abort")
    dispatcher.complete("0", [result(requests[0].slot)], 1.0)
    dispatcher.hand_back("0", [part, none], 1.0)
    first, second = dispatcher.assign(1.0)["1"]
    assert first.slot == requests[1].slot and second == requests[2]
    assert first.resume is not None and first.resume.versions.tolist() == [3, 3, 4]
    np.testing.assert_array_equal(first.resume.log_probs, part.log_probs)
    assert dispatcher.stats(1.0).counts == {"finished": 1}


def test_a_prompt_that_always_fails_is_lost_and_the_others_go_on() -> None:  # B101
    dispatcher = with_workers(2, prompt_attempts=3)
    bad, good = group(0)[0], [r for draw in range(1, 20) for r in group(draw)]
    dispatcher.submit([bad, *good], 0.0)
    attempts = 0
    while sent := dispatcher.assign(0.0):
        for request in sent["0"]:
            if request is bad:
                attempts += 1
                dispatcher.fail("0", [bad.slot], "no token of it is known", 0.0)
            else:
                dispatcher.complete("0", [result(request.slot)], 0.0)
    outcomes = dispatcher.take()
    assert attempts == 3 and len(outcomes) == 20
    assert outcomes[-1] == Lost(bad.slot, "the engine failed with it 3 times, the last time: no token of it is known")


def test_what_failed_goes_to_another_worker_where_one_has_a_place() -> None:
    dispatcher = with_workers(9, 9)
    dispatcher.submit(group(0), 0.0)
    assert list(dispatcher.assign(0.0)) == ["0"]
    dispatcher.fail("0", slots(group(0)), "broken", 0.0)
    assert dispatcher.assign(0.0) == {"1": group(0)}


def test_failures_and_lost_workers_have_budgets_of_their_own() -> None:
    dispatcher = with_workers(1, prompt_attempts=2, worker_attempts=2)
    dispatcher.submit(group(0) + group(1), 0.0)
    dispatcher.assign(0.0)
    dispatcher.fail("0", slots(group(0)), "broken", 0.0)
    assert dispatcher.assign(0.0) == {"0": group(1)}  # the failed one goes last
    dispatcher.complete("0", [result(group(1)[0].slot)], 0.0)
    assert dispatcher.assign(0.0) == {"0": group(0)}
    dispatcher.remove_worker("0", "killed", 0.0)
    dispatcher.add_worker("1", 1, 0.0)
    assert dispatcher.assign(0.0) == {"1": group(0)}


@pytest.mark.parametrize("prompts", [1, 3, HOPELESS_PROMPTS, 40])
def test_an_engine_that_fails_with_every_prompt_is_an_early_error(prompts: int) -> None:  # B101
    dispatcher = with_workers(4, 4)
    dispatcher.submit([r for draw in range(prompts) for r in group(draw, 2)], 0.0)
    with pytest.raises(EngineError, match="no such model: gpt-9"):
        for now in range(2 * 3 * prompts):
            for name, requests in dispatcher.assign(float(now)).items():
                for request in requests:
                    dispatcher.fail(name, [request.slot], "no such model: gpt-9", float(now))
    assert now < 20


def test_an_engine_that_fails_with_every_prompt_of_a_later_step_is_an_error_then() -> None:
    """While one bad prompt after good ones, or alone in its step, is lost and no more."""
    dispatcher = with_workers(8)

    def step(number: int, good: int, bad: int) -> list[bool]:
        """Whether each prompt's response was lost."""
        requests = [r for draw in range(10 * number, 10 * number + good + bad) for r in group(draw)]
        dispatcher.submit(requests, float(number))
        outcomes: list[Outcome] = []
        while len(outcomes) < len(requests):
            for request in dispatcher.assign(float(number))["0"]:
                if request in requests[:good]:
                    dispatcher.complete("0", [result(request.slot)], float(number))
                else:
                    dispatcher.fail("0", [request.slot], "refused", float(number))
            outcomes += dispatcher.take()
        return [isinstance(outcome, Lost) for outcome in outcomes]

    assert [step(0, 2, 0), step(1, 2, 1), step(2, 0, 1)] == [[False] * 2, [False] * 2 + [True], [True]]
    with pytest.raises(EngineError, match="refused"):
        step(3, 0, 2)


def test_many_bad_prompts_among_good_ones_that_take_their_time_are_no_reason_to_give_up() -> None:
    dispatcher = with_workers(200)
    requests = [r for draw in range(100) for r in group(draw)]
    dispatcher.submit(requests, 0.0)
    for now in range(3):
        bad = [slot for slot in slots(dispatcher.assign(float(now))["0"]) if int(slot.uid.split(":")[1]) < 50]
        dispatcher.fail("0", bad, "refused", float(now))
    dispatcher.complete("0", [result(slot) for slot in slots(requests[50:])], 9.0)
    assert [isinstance(outcome, Lost) for outcome in dispatcher.take()] == [True] * 50 + [False] * 50


def test_a_request_is_not_waited_for_for_ever() -> None:  # B097
    dispatcher = with_workers(3, seconds=60)
    requests = [r for draw in range(5) for r in group(draw)]
    dispatcher.submit(requests, 0.0)
    dispatcher.assign(1.0)
    dispatcher.submit(group(9), 30.0)
    dispatcher.complete("0", [result(requests[1].slot)], 59.0)
    assert dispatcher.expire(59.9) == {}
    assert dispatcher.expire(60.0) == {"0": [requests[0].slot, requests[2].slot]}
    outcomes = dispatcher.take()[1:]
    assert [outcome.slot for outcome in outcomes] == slots([requests[0], *requests[2:]])
    assert all(isinstance(outcome, Lost) for outcome in outcomes)
    assert "60 s, and was with a worker" in str(outcomes[0]) and "in the queue" in str(outcomes[3])
    dispatcher.complete("0", [result(requests[0].slot)], 61.0)
    assert dispatcher.take() == [] and dispatcher.stats(61.0).counts["late"] == 1
    assert dispatcher.assign(61.0) == {"0": group(9)}


def test_a_cancelled_slot_has_no_outcome_and_may_be_asked_for_again() -> None:
    dispatcher = with_workers(2)
    requests = [r for draw in range(4) for r in group(draw)]
    dispatcher.submit(requests, 0.0)
    dispatcher.assign(0.0)
    dispatcher.complete("0", [result(requests[0].slot)], 1.0)
    assert dispatcher.cancel(slots(requests[:3]), 1.0) == {"0": [requests[1].slot]}
    assert dispatcher.take() == [] and dispatcher.stats(1.0).queued == 1
    dispatcher.submit(requests[2:3], 2.0)
    assert dispatcher.assign(2.0) == {"0": [requests[3], requests[2]]}
    with pytest.raises(EngineError, match="before it was done"):
        dispatcher.submit(group(7) + requests[2:3], 3.0)
    assert dispatcher.stats(3.0).queued == 0


def test_stats_say_what_is_where() -> None:
    dispatcher = with_workers(2, 2)
    assert dispatcher.stats(5.0).oldest_wait == 0.0
    dispatcher.submit(group(0, 3), 10.0)
    dispatcher.submit(group(1, 3), 20.0)
    dispatcher.assign(20.0)
    stats = dispatcher.stats(25.0)
    assert (stats.queued, stats.in_flight, stats.oldest_wait) == (2, {"0": 2, "1": 2}, 15.0)
    assert stats.idle_share == {"0": 0.8, "1": 0.8} and stats.speed == {"0": None, "1": None}
