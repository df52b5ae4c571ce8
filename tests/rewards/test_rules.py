"""Built-in rules on right, wrong and tricky answers (B128-B132), and on all of GSM8K where it is at hand."""

from __future__ import annotations

import json
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards import rules
from verl.rewards.rules import RULES, by_source, last_boxed, rule_named
from verl.rewards.written_numbers import last_number, leading_number, whole_number


def scores_of(rule):
    return lambda *arguments, **options: rule(*arguments, **options)["score"]


gsm8k, number, exact_match, boxed, reasoning_gym = (
    scores_of(getattr(rules, name)) for name in ("gsm8k", "number", "exact_match", "boxed", "reasoning_gym")
)
GSM8K_TEST = Path(__file__).parents[2] / ".." / "shared" / "data" / "gsm8k" / "test.jsonl"


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("#### 72", "72", 1), ("#### 72,", "72", 1), ("#### 72.", "72", 1), ("#### 72!", "72", 1),
        ("####72", "72", 1), ("####   72  \n", "72", 1), ("thus\n#### 72\nDone.", "72", 1),
        ("#### 1,234", "1234", 1), ("#### 1,234", "1,234", 1), ("#### 1234", "1,234", 1),
        ("#### $120,000.", "120000", 1), ("#### $1,234.00", "1234", 1), ("#### 18.0", "18", 1),
        ("#### 0.5", ".5", 1), ("#### 1/2", "0.5", 1), ("#### 12 cm", "12", 1), ("#### 25%", "25", 1),
        ("#### -5", "-5", 1), ("#### 5", "-5", 0), ("#### +5", "5", 1), ("#### -5", "5", 0),
        ("#### \u22125", "-5", 1), ("#### -$5", "-5", 1), ("#### $-5", "-5", 1),
        ("#### 71\n#### 72", "72", 1), ("#### 72\n#### 71", "72", 0), ("#### 72 (and 3 more)", "72", 1),
        ("#### ,", "72", 0), ("####", "72", 0), ("#### seventy-two", "72", 0), ("72", "72", 0), ("", "72", 0),
        ("#### x72", "72", 0), ("#### 720", "72", 0), ("#### 7 2", "72", 0), ("#### 72.5", "72", 0),
        ("#### 5k", "5", 0), ("#### 5:30", "5", 0), ("#### 3-5", "3", 0), ("#### 3 + 4 = 7", "3", 0),
        ("#### 1/3", "1", 0), ("#### 1/0", "1", 0), ("#### 2^3", "2", 0), ("#### 1,23", "1", 0),
        ("#### 1.2.3", "1.2", 0), ("#### 10*2", "10", 0), ("#### 7, 8", "7", 1), ("#### **72**", "72", 0),
    ],
)  # fmt: skip
def test_b131_b132_gsm8k_strict(response, truth, score):
    assert gsm8k(response, truth) == score


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so we count 72 of them, in all.", "72", 1), ("#### 72,", "72", 1), ("#### ,", "72", 0),
        ("#### 72\nThat took 3 steps.", "72", 1), ("The cost is $120,000.", "120000", 1),
        ("3-5", "-5", 0), ("3-5", "5", 1), ("it is -5", "-5", 1), ("it is 5", "-5", 0), ("(-5)", "-5", 1),
        ("from 3 - 5", "-5", 0), ("no number", "72", 0), ("x72", "72", 0), ("= 1/2", "2", 0), ("1, 2, 72", "72", 1),
        ("v1.72", "72", 0), ("it lost $-5", "-5", 1), ("a loss of -$5.", "-5", 1), ("72.", "72", 1),
    ],
)  # fmt: skip
def test_b131_b132_gsm8k_flexible(response, truth, score):
    assert gsm8k(response, truth, method="flexible") == score


def test_gsm8k_format_score_and_refusals():
    assert gsm8k("#### 3", "4", format_score=0.1) == 0.1
    assert gsm8k("no answer", "4", format_score=0.1) == 0.0
    assert gsm8k("#### 4", 4) == 1.0 and gsm8k("#### 4", "6 - 2 = 4\n#### 4") == 1.0
    with pytest.raises(RewardError, match="not a number"):
        gsm8k("#### 4", "four")
    with pytest.raises(RewardError, match="no such method"):
        gsm8k("#### 4", "4", method="loose")


@pytest.mark.skipif(not GSM8K_TEST.exists(), reason="GSM8K is not at hand")
def test_every_gsm8k_solution_scores_on_its_own_truth_only():
    answers = [json.loads(line)["answer"] for line in GSM8K_TEST.read_text(encoding="utf-8").split("\n") if line]
    # An oracle of its own: GSM8K's own comma removal, and text equality.
    truths = [answer.split("#### ")[1].replace(",", "") for answer in answers]
    assert len(answers) == 1319
    for i, answer in enumerate(answers):
        assert gsm8k(answer, truths[i]) == 1.0, answer
        assert gsm8k(answer, truths[i], method="flexible") == 1.0
        other = truths[(i + 1) % len(truths)]
        if other != truths[i]:
            assert gsm8k(answer, other) == 0.0


@settings(max_examples=300, deadline=None)
@given(value=st.integers(-(10**12), 10**12), places=st.integers(0, 3), grouped=st.booleans())
def test_any_written_number_is_read_exactly(value, places, grouped):
    number = Fraction(value, 10**places)
    sign, magnitude = ("-" if number < 0 else ""), abs(number)
    whole, rest = divmod(int(magnitude * 10**places), 10**places)
    text = sign + (f"{whole:,}" if grouped else str(whole)) + (f".{rest:0{places}d}" if places else "")
    assert leading_number(f" {text} apples") == whole_number(text) == last_number(f"it is {text}.") == number


def test_false_equality_of_tiny_values():
    assert whole_number(f"1/{2**99}") != whole_number(f"1/{2**98}")


@pytest.mark.parametrize(
    "digits", ["9" * 1_000_000, "1," * 500_000, "9" * 1_000_000 + "x", "-" * 1_000_000, "1/" * 500_000]
)
def test_endless_digits_are_bounded_in_time(digits):
    start = time.perf_counter()
    assert gsm8k(f"#### {digits}", "9") == 0.0
    gsm8k(digits, "9", method="flexible")
    assert time.perf_counter() - start < 2.0


def test_throughput_of_gsm8k():
    text = "Let me think. 16 - 3 - 4 = 9 eggs, which sell for 9 * 2 = $18.\n" * 5 + "#### 18"
    start = time.perf_counter()
    for _ in range(5000):
        gsm8k(text, "18")
    assert 5000 / (time.perf_counter() - start) > 5000  # about ten times that on a quiet core


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("Paris", "paris", 1), (" Paris \n", "Paris", 1), ("New\u00a0York", "new  york", 1), ("\uff11\uff12", "12", 1),
        ("Paris, France", "Paris", 0), ("", "Paris", 0), ("B", ["A", "b"], 1), ("C", ["A", "b"], 0), ("4", 4, 1),
        ("x\ud835y", "x\ud835y", 1), ("x\ud835y", "xy", 0),
    ],
)  # fmt: skip
def test_exact_match(response, truth, score):
    assert exact_match(response, truth) == score


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed 3$ and \boxed{\frac{1}{2}}", r"\frac{1}{2}"), (r"\boxed{1} then \boxed{2}", "2"),
        (r"\boxed{\text{a}_{1}}", r"\text{a}_{1}"), (r"\boxed{4", None), (r"\boxed{1} then \boxed{4", None),
        (r"\fbox{42}", "42"), (r"\boxed {42}", "42"), (r"\boxed { 42 }", "42"), (r"so $\boxed 3$.", "3"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"), (r"\boxed", None), (r"\boxedness", None), ("no box", None),
        (r"\boxed{}", ""),
    ],
)  # fmt: skip
def test_last_box(text, content):
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("maybe 41 or 42", "42", 0), (r"\boxed{42}", "42", 1), (r"\boxed{42.0}", "42", 1),
        (r"\boxed{1,234}", "1234", 1), (r"\boxed{\frac{1}{2}}", "0.5", 1), (r"\boxed{\frac12}", "1/2", 1),
        (r"\boxed{\dfrac{1}{2}}", r"\frac{1}{2}", 1), (r"\boxed{-\frac{1}{2}}", "-0.5", 1),
        (r"\boxed{\frac{-1}{2}}", "-0.5", 1),
        (r"\boxed{0.333}", r"\frac{1}{3}", 0), (r"\boxed{x = 3}", "x=3", 1), (r"\boxed{(0,1)}", "(0, 1)", 1),
        (r"\boxed{(0,1)}", "(0,1.5)", 0),
        (r"\boxed{1} \boxed{2}", "1", 0), (r"\boxed{4", "4", 0), (r"\boxed{2,3,4}", "1,2,3", 0),
        (r"\boxed{\pm2021}", "2021", 0), (r"\boxed{42}", r"\boxed{42}", 1),
    ],
)  # fmt: skip
def test_boxed(response, truth, score):
    assert boxed(response, truth) == score


ENTRY = {"task": "chain_sum", "question": "4 - 1 =", "answer": "3", "metadata": "{}", "options": "{}"}


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("3", 1), ("\n 3 \n", 1), ("<answer> 3 </answer>", 1), ("2 < 3 so <answer>3</answer>.", 1),
        ("<answer>4</answer> no, <answer>3</answer>", 1), ("<answer>3</answer> no, <answer>4</answer>", 0),
        ("7", 0), ("", 0), ("<answer></answer>", 0),
        ("13", 0.5),  # the library's own partial credit: the answer's share of the text
    ],
)  # fmt: skip
def test_reasoning_gym(response, score):
    assert reasoning_gym(response, "3", ENTRY) == score


def test_reasoning_gym_rows_without_their_problem():
    with pytest.raises(RewardError, match="which reasoning-gym problem"):
        reasoning_gym("3", "3", {"split": "train"})


def test_the_rule_of_a_source():
    assert by_source("openai/gsm8k") is rules.gsm8k and by_source("reasoning_gym/chain_sum") is rules.reasoning_gym
    with pytest.raises(RewardError) as caught:
        by_source("my/data")
    text = str(caught.value)
    assert "my/data" in text and "custom_reward_function" in text and all(name in text for name in RULES)


def test_a_misspelled_rule():
    assert rule_named("boxed") is rules.boxed
    with pytest.raises(RewardError, match=re.escape("did you mean exact_match?")):
        rule_named("exact_matches")


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("The answer is 18.", "18", 1), ("9 + 9 = 18", "18", 1), ("18 or 17", "18", 0), ("eighteen", "18", 0),
        ("-18", "18", 0), ("6 - 7 = -1", "-1", 1), ("118", "18", 0), ("18.0", "18", 1), ("", "18", 0),
    ],
)  # fmt: skip
def test_number_is_the_last_one(response: str, truth: str, score: int) -> None:
    assert number(response, truth) == score


def test_number_needs_a_number_as_truth() -> None:
    with pytest.raises(RewardError, match="not a number"):
        number("18", "eighteen")


@pytest.mark.parametrize(
    ("rule", "response", "answer"),
    [
        (rules.gsm8k, "#### $1,234.00", "1234"), (rules.gsm8k, "#### 0.5", "1/2"), (rules.gsm8k, "1234", None),
        (rules.number, "so 12 or 13.", "13"), (rules.number, "none", None),
        (rules.boxed, r"\boxed{\dfrac{1}{2}}", "1/2"), (rules.boxed, r"\boxed{0.50}", "1/2"),
        (rules.boxed, r"\boxed{x = 3}", "x=3"), (rules.boxed, "3", None),
        (rules.exact_match, " New\u00a0 York", "new york"), (rules.exact_match, " ", None),
        (rules.exact_match, "x" * 200, "x" * 200), (rules.exact_match, "x" * 201, None),
        (rules.boxed, r"\boxed{}", None),
    ],
)  # fmt: skip
def test_the_answer_that_was_read_has_one_spelling(rule, response, answer):
    assert rule(response, "7")["pred"] == answer


def test_the_answer_to_a_reasoning_gym_problem():
    assert rules.reasoning_gym("so <answer> 4 </answer>", "3", ENTRY) == {"score": 0.0, "pred": "4"}
    assert rules.reasoning_gym("", "3", ENTRY)["pred"] is None
