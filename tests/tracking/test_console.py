from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from verl.tracking import names
from verl.tracking.console import ConsoleTracker, duration, print_samples, printable
from verl.tracking.samples import SampleRow

METRICS = {
    "critic/score/mean": 0.125,
    "response_length/mean": 12.34,
    "actor/ppo_kl": 0.00012,
    "actor/entropy": 1.234,
    "actor/grad_norm": 0.5,
    "timing_s/gen": 4.0,
    "timing_s/reward": 0.5,
    "timing_s/old_log_prob": 1.0,
    "timing_s/update_actor": 8.0,
    "timing_s/step": 14.0,
}


def console(terminal: bool = False) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=100, color_system="standard" if terminal else None), out


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_step_is_one_aligned_line_with_what_matters() -> None:
    screen, out = console()
    clock = Clock()
    tracker = ConsoleTracker(100, screen, clock=clock)
    tracker.log(0, {"val-core/sums/acc/mean@1": 0.03})
    clock.now = 20
    tracker.log(1, METRICS)
    clock.now = 30
    tracker.log(2, METRICS | {"val-core/sums/acc/mean@1": 0.5, "actor/entropy": float("nan")})
    head, zero, one, two = out.getvalue().splitlines()
    assert head.split() == ["step", "reward", "val", "length", "KL", "entropy", "grad", *names_of_stages(), "ETA"]
    assert zero.split() == ["0/100", "-", "0.0300", *["-"] * 8]
    # 99 steps left at 20 s; then 98 left at the mean of 20 and 10
    assert one.split() == ["1/100", "0.1250", "-", "12.3", "1.2e-04", "1.234", "0.5000", *seconds(), "33m00s"]
    assert two.split() == ["2/100", "0.1250", "0.5000", "12.3", "1.2e-04", "-", "0.5000", *seconds(), "24m30s"]
    assert len({len(line) for line in (zero, head, one, two)}) == 1 and len(one) <= 100


def names_of_stages() -> list[str]:
    return ["gen", "process", "update"]


def seconds() -> list[str]:
    return ["4.0s", "1.5s", "8.0s"]


def test_a_narrow_terminal_gets_fewer_figures_and_no_broken_line() -> None:
    out = io.StringIO()
    tracker = ConsoleTracker(1000, Console(file=out, force_terminal=True, color_system=None, width=40))
    tracker.log(1, METRICS)
    head, line = out.getvalue().splitlines()
    assert head.split() == ["step", "reward", "val", "ETA"] and len(head) == len(line) <= 40
    piped, out = console()
    piped.width = 40
    ConsoleTracker(1000, piped).log(1, METRICS)
    assert "entropy" in out.getvalue()


def test_samples_of_a_validation_are_shown_and_those_of_training_are_not() -> None:
    screen, out = console()
    rows = [SampleRow("val", f"u{i}", 0, f"prompt {i}", "", i, float(i)) for i in range(9)]
    ConsoleTracker(9, screen, samples=2).samples(3, "train", rows)
    assert not out.getvalue()
    ConsoleTracker(9, screen, samples=2).samples(3, "val", rows)
    assert [i for i in range(9) if f"prompt {i}" in out.getvalue()] == [0, 8] and "→ (empty)" in out.getvalue()


def test_the_header_comes_again() -> None:
    screen, out = console()
    tracker = ConsoleTracker(9, screen, header_every=3)
    for step in range(1, 8):
        tracker.log(step, METRICS)
    heads = [i for i, line in enumerate(out.getvalue().splitlines()) if "reward" in line]
    assert heads == [0, 4, 8]


def test_the_header_says_which_kl_and_comes_at_once_when_that_changes() -> None:
    screen, out = console()
    tracker = ConsoleTracker(9, screen, header_every=2)
    for step, more in enumerate(({}, {}, {}, {"actor/kl_loss": 0.1}), start=1):
        tracker.log(step, METRICS | more)
    heads = [line for line in out.getvalue().splitlines() if "reward" in line]
    assert ["KL old" in line for line in heads] == [True, True, False]
    assert "KL ref" in heads[2]


def test_lines_stay_within_100_columns_at_any_size_of_figures() -> None:
    screen, out = console()
    tracker = ConsoleTracker(9999, screen, clock=Clock())
    big = {name: -123456789.123 if "timing" not in name else 86400 * 9.0 for name in METRICS}
    tracker.log(9999, big | {"val-core/a/acc/mean@1": -1.2e-9, "actor/kl_loss": -1e-100})
    assert max(map(len, out.getvalue().splitlines())) <= 100


def test_colours_on_a_terminal_and_none_in_a_log() -> None:
    for terminal in (True, False):
        screen, out = console(terminal)
        ConsoleTracker(3, screen).log(1, METRICS)
        assert ("\x1b[" in out.getvalue()) is terminal


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.00s"),
        (0.084, "0.08s"),
        (0.996, "1.0s"),
        (8.34, "8.3s"),
        (59.96, "1m00s"),
        (245, "4m05s"),
        (7620, "2h07m"),
        (3599.7, "1h00m"),
        (273600, "3d04h"),
    ],
)
def test_durations_are_for_people(value: float, text: str) -> None:
    assert duration(value) == text


# --- which metrics


def test_kl_to_the_reference_goes_before_kl_to_the_old_policy() -> None:
    assert names.kl({"actor/ppo_kl": 0.0, "actor/kl_loss": 0.02}) == ("KL ref", 0.02)
    assert names.kl({"actor/ppo_kl": 0.1, "actor/reward_kl_penalty": 0.3}) == ("KL ref", 0.3)
    assert names.kl({"actor/ppo_kl": 0.1, "actor/kl_loss": float("nan")}) == ("KL old", 0.1)
    assert names.kl({}) is None


def test_validation_prefers_accuracy_and_averages_sources() -> None:
    metrics = {
        "val-core/openai/gsm8k/acc/mean@1": 0.2,
        "val-core/openai/gsm8k/acc/mean@4": 0.3,
        "val-core/openai/gsm8k/reward/mean@8": 9.0,
        "val-core/openai/gsm8k/acc/best@4": 0.9,
        "val-core/sums/reward/mean@1": 0.5,
        "val-core/odd/acc/mean@1": None,
    }
    assert names.validation_by_source(metrics) == {"openai/gsm8k": 0.3, "sums": 0.5}
    assert names.validation_score(metrics) == pytest.approx(0.4)
    assert names.validation_score({}) is None


def test_stage_seconds_take_parts_before_totals() -> None:
    assert names.stage_seconds(METRICS) == {"gen": 4.0, "process": 1.5, "update": 8.0}
    totals = {"timing_s/wait_rollout": 1.0, "timing_s/process": 2.0, "timing_s/update": 3.0, "timing_s/testing": 4.0}
    assert names.stage_seconds(totals) == {"gen": 1.0, "process": 2.0, "update": 3.0, "validate": 4.0}


# --- untrusted text


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x9b2Jx", "x"),
        ("\x1bcreset", "reset"),
        ("open \x1b]0;never closed", "open 0;never closed"),
        ("bell\x07 back\x08 null\x00 del\x7f", "bell back null del"),
        ("line\r\nnext\ttab\rover", "line\nnext\ttabover"),
        ("x\u202ereversed", "xreversed"),
        ("lone \ud835", "lone \ufffd"),
        ("漢字 😀 [bold]", "漢字 😀 [bold]"),
    ],
)
def test_printable(raw: str, clean: str) -> None:
    assert printable(raw) == clean


@given(st.text(st.characters(categories=None)) | st.text("\x1b[]0;m\x07\x9b\x9d\\Pa"))
def test_nothing_a_terminal_obeys_survives(text: str) -> None:
    shown = printable(text)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", shown)
    shown.encode()
    assert printable(shown) == shown


def test_long_text_is_cut_in_its_middle_with_the_count() -> None:
    text = printable("a" * 600 + "b" * 600, limit=400)
    assert text.startswith("a" * 300) and text.endswith("b" * 100) and "800 characters" in text


def test_samples_are_printed_safe_with_their_rewards() -> None:
    rows = [SampleRow("val", f"u{i}", 0, f"prompt {i}", f"answer {i}", i, float(i)) for i in range(9)]
    rows[4] = SampleRow("val", "u4", 0, "prompt 4 [red]", "\x1b[2J[bold]hi[/bold]\ud835", "t\x1b[0m", None)
    screen, out = console()
    print_samples(screen, rows, 3)
    shown = out.getvalue()
    assert [i for i in range(9) if f"prompt {i}" in shown] == [0, 4, 8]
    assert "reward 8" in shown and "not scored" in shown
    assert "[bold]hi[/bold]\ufffd" in shown and "prompt 4 [red]" in shown and "\x1b" not in shown
    print_samples(screen, [], 3)
    print_samples(screen, rows[:1], 3)
    print_samples(screen, rows, 0)
