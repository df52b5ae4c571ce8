"""How many rollout workers there are, over simulated time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from verl.rollout.scaling import GROW_SECONDS, GROW_WAIT, SHRINK_SECONDS, Load, ScalingPolicy

PLACES, START_SECONDS = 10, 5


def simulate(
    policy: ScalingPolicy,
    demand: Callable[[int], int],
    seconds: int,
    workers: int = 1,
    wishes: dict[int, int] | None = None,
) -> list[int]:
    """Workers at each second. ``demand``: requests there are; those without a place wait. Starting takes 5 seconds."""
    history, moving, waited = [], [], 0
    for now in range(seconds):
        if now in (wishes or {}):
            policy.wish = (wishes or {})[now]
        if moving and moving[0][0] <= now:
            workers += max(moving.pop(0)[1], 0)
        in_flight = min(demand(now), PLACES * workers)
        queued = demand(now) - in_flight
        waited = waited + 1 if queued else 0
        change = policy.decide(float(now), Load(workers, len(moving), PLACES, queued, float(waited), in_flight))
        assert not (change and moving), "one change at a time"
        if change:
            moving.append((now + START_SECONDS, change))
            workers += min(change, 0)  # a draining worker is given no more
        history.append(workers)
        assert policy.min_workers <= workers <= policy.max_workers
    return history


def test_it_grows_one_by_one_while_requests_wait_and_no_further_than_the_bound() -> None:
    history = simulate(ScalingPolicy(1, 3), lambda now: 100, 200)
    first = history.index(2)
    assert first == pytest.approx(GROW_WAIT + GROW_SECONDS + START_SECONDS, abs=2)
    assert history.index(3) - first == pytest.approx(GROW_SECONDS + START_SECONDS, abs=2)
    assert history[-1] == 3


def test_it_stops_growing_when_all_have_a_place() -> None:
    assert simulate(ScalingPolicy(1, 8), lambda now: 35, 300)[-1] == 4


def test_it_shrinks_slowly_down_to_the_least() -> None:
    history = simulate(ScalingPolicy(2, 4), lambda now: 3, 500, workers=4)
    assert history.index(3) == pytest.approx(SHRINK_SECONDS, abs=2)
    assert history.index(2) == pytest.approx(2 * SHRINK_SECONDS + START_SECONDS, abs=4)
    assert history[-1] == 2


def test_pauses_between_batches_are_no_reason_to_shrink_nor_short_waits_to_grow() -> None:
    """A synchronous run: 60 seconds of rollout that fill the pool, 50 of training with nothing to do."""
    assert set(simulate(ScalingPolicy(1, 4), lambda now: 20 if now % 110 < 60 else 0, 2000, workers=2)) == {2}
    assert set(simulate(ScalingPolicy(1, 4), lambda now: 25 if now % 60 < 10 else 20, 2000, workers=2)) == {2}


def test_a_steady_load_ends_in_one_number_of_workers() -> None:
    for demand in range(1, 60):
        history = simulate(ScalingPolicy(1, 6), lambda now, demand=demand: demand, 2000, workers=3)
        assert len(set(history[1500:])) == 1, demand


def test_a_wish_is_followed_at_once_within_the_bounds_and_holds() -> None:
    wishes = {10: 3, 100: 1, 200: 99, 300: 0}
    history = simulate(ScalingPolicy(1, 4), lambda now: 15, 400, workers=1, wishes=wishes)
    assert history[9] == 1 and history[10 + 2 * START_SECONDS + 1] == 3 and history[99] == 3
    assert history[199] == 1  # though requests wait
    assert history[299] == 4 and history[399] == 1


def test_it_replaces_what_was_lost_below_the_least_at_once() -> None:
    policy = ScalingPolicy(3, 5)
    assert policy.decide(0.0, Load(workers=2, moving=0, places=4, queued=0, oldest_wait=0.0, in_flight=0)) == 1
    assert policy.decide(1.0, Load(workers=2, moving=1, places=4, queued=0, oldest_wait=0.0, in_flight=0)) == 0


@pytest.mark.parametrize("bounds", [(0, 3), (3, 2)])
def test_impossible_bounds(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="no number of workers"):
        ScalingPolicy(*bounds)
