"""Schedules on paper: against sums by hand, and against the real loops under a virtual clock."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import overlap
from verl.config import build_config
from verl.diagnostics.simulate import Mode, Setting, drawn_from, long_tailed, measure, predict, schedules
from verl.errors import VerlError
from verl.rollout.protocol import Slot
from verl.run_dir import RunDir
from verl.tracking.samples import SampleRow, write_samples


def setting(length: int | dict[int, int], **changes: float) -> Setting:
    """2 prompts x 2 responses, one worker with a place for each, a second a token; lengths by draw of the prompt."""

    def tokens(slot: Slot) -> int:
        return length if isinstance(length, int) else length.get(int(slot.uid.split(":")[1]), 10)

    given = {"prompts": 2, "n": 2, "workers": 1, "places": 4, "token": 1.0, "training": 10.0} | changes
    return Setting(**given, length=tokens, longest=100)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "staleness", "seconds"),
    [("sync", 0, 20.0), ("one_step_off", 1, 10.0), ("async", 0, 20.0), ("async", 1, 10.0)],
)
def test_equal_halves(mode: Mode, staleness: int, seconds: float) -> None:
    found = predict(setting(10), mode, 5, staleness)
    assert (found.seconds, found.waste) == (seconds, 0.0)


def test_the_larger_half_decides_an_overlap() -> None:
    assert predict(setting(10, training=4.0), "sync", 5).seconds == 14.0
    assert predict(setting(10, training=4.0), "one_step_off", 5).seconds == 10.0
    assert predict(setting(10, training=25.0), "one_step_off", 5).seconds == 25.0


def test_half_the_places_take_two_rounds_and_a_second_worker_one() -> None:
    assert predict(setting(10, places=2), "sync", 4).seconds == 30.0
    assert predict(setting(10, places=2, workers=2), "sync", 4).seconds == 20.0


def test_a_batch_is_as_late_as_its_longest_response_unless_others_train_meanwhile() -> None:
    """Prompt 3 (of step 2) takes 30 s. By hand, steps end in sync at 20, 60, 80, 100; in one_step_off the look-ahead of
    step 2 takes 30 s from 10 on, so steps end at 20, 50, 60, 70."""
    slow = setting({3: 30})
    assert predict(slow, "sync", 4).seconds == pytest.approx(80 / 3)
    assert predict(slow, "one_step_off", 4).seconds == pytest.approx(50 / 3)
    assert predict(slow, "async", 4, staleness=3).seconds < 50 / 3


@pytest.mark.parametrize(("mode", "staleness", "unit"), [*overlap.RUNS])
def test_it_says_what_the_real_loops_do_under_a_virtual_clock(mode: Mode, staleness: int, unit: str) -> None:
    def length(slot: Slot) -> int:
        return overlap.long_tailed(Slot(slot.uid.split(":")[1], slot.index))

    paper = Setting(
        overlap.PROMPTS, overlap.N, overlap.WORKERS, overlap.PLACES, overlap.TOKEN, overlap.TRAINING, length,
        overlap.LONGEST, updates=4,
    )  # fmt: skip
    real = overlap.simulate(mode, staleness, unit, length, 6, overlap.VirtualClock())
    found = predict(paper, mode, 6, staleness, unit or "sample")
    assert (found.seconds, found.waste) == pytest.approx(real)


def test_lengths_of_a_given_mean() -> None:
    lengths = long_tailed(100, 10_000)
    assert sum(lengths) / len(lengths) == pytest.approx(100, rel=0.05) and max(lengths) > 400
    assert max(long_tailed(100, 200)) == 200
    drawn = drawn_from([1, 2, 3])
    assert {drawn(Slot(str(i), 0)) for i in range(50)} == {1, 2, 3} and drawn(Slot("a", 0)) == drawn(Slot("a", 0))


def test_more_workers_and_more_overlap_never_cost() -> None:
    draw = random.Random(1)
    base = setting({k: draw.randint(1, 60) for k in range(500)}, prompts=4, places=4)
    found = schedules(base, [1, 2, 4])
    for row in found.values():
        assert [p.seconds for p in row] == sorted((p.seconds for p in row), reverse=True)
    assert found["one_step_off"][0].seconds <= found["sync"][0].seconds


def test_speeds_and_lengths_of_a_run(tmp_path: Path) -> None:
    """Step 2 samples 10, 20, 10, 20 tokens in two places: two rounds of 8 s; 3 s are training."""
    run = RunDir(tmp_path / "run").create()
    config = build_config(
        {"data": {"train_files": "x"}, "model": {"path": "x"}, "rollout": {"n": 2, "max_num_seqs": 2}}
        | {"algorithm": {"adv_estimator": "grpo"}}
    )
    with pytest.raises(VerlError, match="no step with samples"):
        measure(run, config)
    for step, lengths in ((1, [1, 1, 1, 1]), (2, [10, 20, 10, 20])):
        rows = [
            SampleRow("train", f"train:{i // 2}:x:{i}", i % 2, "p", "r", "t", 1.0, response_length=length)
            for i, length in enumerate(lengths)
        ]
        write_samples(run, step, "train", rows)
    times = {"timing_s/gen": 8.0, "timing_s/update_actor": 2.0, "timing_s/ref": 0.5, "timing_s/update_weights": 0.5}
    run.metrics.write_text("".join(json.dumps({"step": step, **times}) + "\n" for step in (1, 2)))
    found = measure(run, config)
    assert (found.lengths, found.training, found.steps) == ([10, 20, 10, 20], 3.0, 1)
    assert found.token == pytest.approx(8.0 / 40)
