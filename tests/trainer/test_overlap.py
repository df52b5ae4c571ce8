"""What the schedules gain, by the benchmark's simulated engine and trainer under its virtual clock."""

from __future__ import annotations

import pytest

from benchmarks.overlap import IDEAL, VirtualClock, fixed, long_tailed, simulate


@pytest.mark.parametrize(
    ("mode", "staleness", "seconds"),
    [("sync", 0, 20.0), ("one_step_off", 1, 10.0), ("async", 0, 20.0), ("async", 1, 10.0)],
)
def test_rollout_and_training_of_ten_seconds_each(mode: str, staleness: int, seconds: float) -> None:
    assert simulate(mode, staleness, "sample", fixed, 6, VirtualClock()) == (seconds, 0.0)


def test_async_does_not_wait_for_the_longest_responses() -> None:
    """A synchronous step waits 40 s for the longest one of a batch, and so does a look-ahead."""
    assert simulate("sync", 0, "", long_tailed, 8, VirtualClock())[0] > 4 * IDEAL
    assert simulate("one_step_off", 1, "", long_tailed, 8, VirtualClock())[0] > 3 * IDEAL
    seconds, waste = simulate("async", 8, "sample", long_tailed, 20, VirtualClock())
    assert seconds <= IDEAL / 0.9 and waste == 0.0


def test_streamed_minibatches_train_while_the_longest_responses_are_sampled() -> None:
    """Three of the four mini-batches; nothing is gained where all responses take the same time."""
    seconds, waste = simulate("streamed", 0, "", long_tailed, 8, VirtualClock())
    sync = simulate("sync", 0, "", long_tailed, 8, VirtualClock())[0]
    assert sync - 7.5 == pytest.approx(seconds) and waste == 0.0
    assert simulate("streamed", 0, "", fixed, 6, VirtualClock())[0] == pytest.approx(20.0)


def test_what_is_too_old_is_not_trained() -> None:
    """A response of 40 s spans five versions; with two allowed some are dropped, or lose their first tokens."""
    assert simulate("async", 2, "sample", long_tailed, 8, VirtualClock())[1] > 0.05
    assert simulate("async", 2, "token", long_tailed, 8, VirtualClock())[1] > 0.05
