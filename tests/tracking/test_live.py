"""What the live display shows, by hand: a fake clock, terminals of several sizes, hostile samples."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from verl.tracking.console import sparkline
from verl.tracking.live import LiveTracker, best_and_worst, shares
from verl.tracking.samples import SampleRow
from verl.trainer.timer import StepTimer

STEP = {
    "critic/score/mean": 0.25,
    "response_length/mean": 12.34,
    "actor/kl_loss": 0.02,
    "actor/entropy": 1.5,
    "timing_s/gen": 6.0,
    "timing_s/update_actor": 4.0,
    "timing_s/step": 10.0,
    "perf/throughput": 1234.5,
}
PROMPT = "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Parts:
    """What a StepTimer tells, set by hand."""

    def __init__(self) -> None:
        self.running: tuple[str, float] | None = None
        self.ended: dict[str, float] = {}

    def so_far(self) -> dict[str, float]:
        return self.ended


def display(encoding: str = "utf-8", **settings: Any) -> tuple[LiveTracker, Clock, Parts]:
    clock, parts = Clock(), Parts()
    console = Console(file=io.TextIOWrapper(io.BytesIO(), encoding=encoding), width=80)
    return LiveTracker("my-run", 40, console, parts, clock=clock, **settings), clock, parts


def shown(tracker: LiveTracker, columns: int = 80, rows: int = 40) -> list[str]:
    return [line.plain.rstrip() for line in tracker.lines(columns, rows)]


def row(score: float | None, response: str = "2", **more: Any) -> SampleRow:
    return SampleRow("train", "u", 0, PROMPT, response, score=score, **more)


def test_before_the_first_step() -> None:
    tracker, clock, parts = display()
    clock.now += 3.5
    parts.running = ("start", 101.0)
    head, now = shown(tracker)
    assert head.startswith("my-run  step 0/40 ──────") and head.endswith(" 0%  3.5s")
    assert now == "now      start 2.5s …"


def test_progress_time_left_curves_and_stages_by_hand() -> None:
    tracker, clock, parts = display()
    for step in range(1, 11):
        clock.now += 10
        more = {"val-core/sums/acc/mean@1": step / 20} if step % 5 == 0 else {}
        tracker.log(step, STEP | more | {"critic/score/mean": step / 10})
    clock.now += 4
    parts.running, parts.ended = ("update_actor", 202.0), {"gen": 1.25, "adv": 0.5}
    head, now, reward, held_out, kl, entropy, length, last = shown(tracker)
    # 30 steps left at 10 s, 4 s of it gone; a quarter of the bar is full
    assert head.endswith(" 25%  1m44s, 4m56s left")
    bar = head.removeprefix("my-run  step 10/40 ").partition(" ")[0]
    assert set(bar) == {"━", "─"} and bar.count("━") == len(bar) // 4
    assert now == "now      gen 1.2s, adv 0.50s, update_actor 2.0s …"
    assert reward.split() == ["reward", "1.000", "▁▂▃▃▄▅▆▆▇█", "0.1000", "to", "1.000"]
    assert held_out.split() == ["held-out", "0.5000", "▁█", "0.2500", "to", "0.5000"]
    assert kl.split()[:4] == ["KL", "ref", "0.0200", "▁▁▁▁▁▁▁▁▁▁"]
    assert [line.split()[0] for line in (entropy, length)] == ["entropy", "length"]
    assert last == "last     10.0s: gen 60%, update 40%, 1,234 tokens/s"
    clock.now += 1000
    assert shown(tracker)[0].endswith(", 0.00s left")


def test_the_part_that_runs_now_comes_from_the_timer() -> None:
    timer = StepTimer()
    with timer("step"):
        with timer("gen"):
            assert timer.running is not None and timer.running[0] == "gen"
        assert timer.running[0] == "step" and list(timer.so_far()) == ["gen"]
        with pytest.raises(ZeroDivisionError), timer("adv"):
            raise ZeroDivisionError
        assert timer.running[0] == "step"
    assert timer.running is None and list(timer.so_far()) == ["gen", "adv", "step"]
    assert list(timer.flush()) == ["timing_s/gen", "timing_s/adv", "timing_s/step"] and timer.so_far() == {}


def test_a_resumed_run_shows_what_it_already_has() -> None:
    history = [{"step": step, "critic/score/mean": step / 10, "actor/ppo_kl": 0.0} for step in (1, 2, 3)]
    tracker, _, _ = display(history=history)
    assert "step 3/40" in shown(tracker)[0]
    tracker.log(4, {"critic/score/mean": 0.4})
    assert "▁▃▆█" in shown(tracker)[2] and shown(tracker)[3].startswith("KL old")
    assert tracker.summary()[0].plain == "my-run: stopped after step 4 of 40, 0.00s"


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
@pytest.mark.parametrize("rows", [2, 5, 10, 50])
def test_any_terminal_holds_it(columns: int, rows: int) -> None:
    tracker, _, parts = display()
    parts.running = ("old_log_prob", 0.0)
    parts.ended = dict.fromkeys(["gen", "reward", "ref", "values"], 3.0)
    tracker.samples(1, "val", [row(1.0, "word " * 100), row(0.0, "漢字" * 200)])
    tracker.log(39, STEP | {"val-core/a/acc/mean@1": 0.5})
    lines = shown(tracker, columns, rows)
    assert len(lines) == {2: 1, 5: 4, 10: 8, 50: 16}[rows]  # samples whole or not at all
    assert "39/40" in lines[0] and "97%" in lines[0] and len(lines[0]) <= columns - 3
    if rows > 10:
        responses = [line for line in tracker.lines(columns, rows) if line.plain[:2] in ("→ ", "  ")]
        assert len(responses) == 6 and all(line.cell_len <= columns - 3 for line in responses)
        assert "39 left" not in lines[0] and lines[2].startswith("reward     0.2500 ▁")


def test_a_good_and_a_bad_sample_stay_until_they_can_be_read() -> None:
    tracker, clock, _ = display()
    hostile = "\x1b[2J[bold]" + "answer " * 40 + "\x1b]0;title\x07 \u202e"
    tracker.samples(3, "train", [row(0.5, "middling"), row(1.0, hostile), row(None, "unscored"), row(-1.0, "")])
    tracker.samples(4, "train", [row(0.25, "too soon")])
    head, prompt, response, second, bad, _, empty = shown(tracker)[2:]
    assert head == "── reward 1 · step 3"
    assert prompt == "  system You help. user What is 1 + 1? assistant"
    assert response.startswith("→ [bold]answer answer") and second.endswith("…")
    assert bad == "── reward -1 · step 3" and empty == "→ (empty)"
    assert not set("".join(shown(tracker))) & set("\x1b\x07\u202e")
    clock.now += 5
    tracker.samples(5, "val", [row(0.25, "now")])
    assert shown(tracker)[2:] == ["── reward 0.25 · held-out, step 5", prompt, "→ now"]
    for limit in (0, 1):
        limited, _, _ = display(samples=limit)
        limited.samples(3, "train", [row(0.0), row(1.0)])
        assert sum(line.startswith("──") for line in shown(limited)) == limit


def test_of_a_long_prompt_the_end_is_shown() -> None:
    tracker, _, _ = display()
    tracker.samples(1, "train", [SampleRow("train", "u", 0, "system " * 999 + "1 + 1 = ?", "2", score=1.0)])
    prompt = shown(tracker, columns=30)[3]
    assert prompt.startswith("  …") and prompt.endswith("system 1 + 1 = ?") and len(prompt) == 26


def test_best_and_worst() -> None:
    rows = [row(0.5), row(None), row(0.0, "first"), row(1.0, "first"), row(1.0), row(0.0, "last")]
    best, worst = best_and_worst(rows)
    assert (best.score, best.response) == (1.0, "first") and worst.score == 0.0
    assert best_and_worst([row(1.0, "a"), row(1.0, "b")]) == [row(1.0, "a")]
    assert best_and_worst([row(None)]) == [row(None)] and best_and_worst([]) == []


def test_the_summary_that_stays() -> None:
    tracker, clock, _ = display()
    tracker.log(39, STEP)
    tracker.log(40, STEP | {"critic/score/mean": 0.75})
    clock.now += 95
    head, reward, *_, times = [line.plain for line in tracker.summary()]
    assert head == "my-run: 40 steps, 1m35s"
    assert reward.split()[:3] == ["reward", "0.7500", "▁█"]
    assert times == "time     gen 60%, update 40%"


def test_a_terminal_without_unicode_gets_none() -> None:
    tracker, _, _ = display(encoding="ascii")
    tracker.log(20, STEP)
    tracker.log(21, STEP | {"critic/score/mean": 1.0})
    text = "".join(line.plain for line in [*tracker.lines(80, 30), *tracker.summary()])
    assert text.isascii() and "_#" in text and "####" in text


# --- figures


@pytest.mark.parametrize(
    ("values", "width", "curve"),
    [
        ([], 10, ""),
        ([5.0], 10, "▁"),
        ([1.0, 1.0, 1.0], 10, "▁▁▁"),
        ([0.0, 7.0, 3.0], 10, "▁█▄"),
        ([-1.0, 0.0], 10, "▁█"),
        ([0.0, 2.0, 6.0, 8.0], 2, "▁█"),  # means 1 and 7
        ([0.0, 0.0, 3.0, 7.0, 7.0], 2, "▁█"),  # two values, then three
        ([0.0, 1.0], 0, ""),
        ([0.0, 1e308, -1e308], 3, "▁▁▁"),  # further apart than a float can say
    ],
)
def test_sparkline(values: list[float], width: int, curve: str) -> None:
    assert sparkline(values, width) == curve


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=200), st.integers(0, 90))
def test_any_curve_fits_and_reaches_both_ends(values: list[float], width: int) -> None:
    curve = sparkline(values, width)
    assert len(curve) == min(len(values), width)
    if len(set(curve)) > 1:
        assert {"▁", "█"} <= set(curve)


@given(
    st.dictionaries(st.sampled_from(sorted(STEP)), st.floats() | st.none() | st.text(max_size=3)),
    st.integers(1, 250),
    st.integers(0, 60),
)
def test_no_metric_breaks_it(metrics: dict[str, Any], columns: int, rows: int) -> None:
    tracker, _, _ = display()
    tracker.log(1, metrics)
    tracker.samples(1, "train", [row(0.5)])
    assert 1 <= len(tracker.lines(columns, rows)) <= max(1, rows - 1)
    assert tracker.summary()


def test_shares() -> None:
    assert shares({"update": 1.0, "gen": 3.0}) == "gen 75%, update 25%"
    assert shares({}) == shares({"gen": 0.0}) == ""
