"""Built-in reward rules.

Each is ``rule(response_text, ground_truth, **options) -> {"score": float, "pred": str | None}``, with ``extra_info``
among the options where it takes it: what it scores, and the answer that it read, in one spelling for equal answers
(majorities are counted by it). An answer that cannot be found scores 0: the model did not give one. Raising is for what
is no fault of the model (a ground truth that is not a number, a row without the columns that the rule needs); the
scorer counts that and leaves the row unscored.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache
from typing import Any

from verl.config.names import did_you_mean, matches
from verl.errors import RewardError
from verl.rewards.code import code
from verl.rewards.maths import LONGEST, clean, same
from verl.rewards.maths import number as number_of
from verl.rewards.text_rules import (
    ANSWER_TAG,
    BOX,
    format_tags,
    json_schema,
    last_boxed,
    length,
    multiple_choice,
    regex,
    repetition,
)
from verl.rewards.written_numbers import last_number, leading_number, whole_number

Rule = Callable[..., dict[str, Any]]

LONGEST_ANSWER = 200  # characters; what is longer is scored as it is, and is a text rather than an answer


def gsm8k(response_text: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0) -> dict[str, Any]:
    """1 if the answer equals the ground truth as a number, else 0.

    The answer is what follows the last ``####``: a number, with an optional ``$``, thousands separators, unit after a
    space, ``%`` or closing punctuation ("#### 72,", "#### $1,234.00", "#### -5 degrees"). An unfinished sum
    ("#### 3 + 4"), a range ("3-5"), a time ("5:30") or digits with letters attached ("5k") are not numbers.

    Args:
        method: ``strict``; ``flexible`` takes the last number of the text where there is no number after ``####``.
        format_score: score of a number that is not the right one.
    """
    truth = _truth_number(str(ground_truth))
    _, marker, tail = response_text.rpartition("####")
    answer = leading_number(tail) if marker else None
    if method == "flexible":
        answer = last_number(response_text) if answer is None else answer
    elif method != "strict":
        raise RewardError("The gsm8k rule has no such method.", method, "strict or flexible")
    if answer is None:
        return _graded(0.0, None)
    return _graded(1.0 if answer == truth else format_score, answer)


def number(response_text: str, ground_truth: Any) -> dict[str, Any]:
    """1 if the last number of the response equals the ground truth, else 0 ("9 + 9 is 18." answers 18)."""
    answer = last_number(response_text)
    return _graded(answer == _truth_number(str(ground_truth)), answer)


def _graded(score: float, answer: Any) -> dict[str, Any]:
    text = "" if answer is None else str(answer)
    return {"score": float(score), "pred": text if 0 < len(text) <= LONGEST_ANSWER else None}


@lru_cache(maxsize=4096)
def _truth_number(ground_truth: str) -> Fraction:
    truth = whole_number(ground_truth.rpartition("####")[2])
    if truth is None:
        raise RewardError("The ground truth is not a number.", ground_truth, "correct the row, or choose another rule")
    return truth


def normalise(text: str) -> str:
    """Compatibility forms unified, case folded, runs of white space made one space, ends trimmed."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def exact_match(response_text: str, ground_truth: Any) -> dict[str, Any]:
    """1 if the whole response is the ground truth (or one of a list of them) after :func:`normalise`, else 0."""
    truths = ground_truth if isinstance(ground_truth, list | tuple) else [ground_truth]
    answer = normalise(response_text)
    return _graded(answer in {normalise(str(truth)) for truth in truths}, answer)


def boxed(response_text: str, ground_truth: Any) -> dict[str, Any]:
    r"""1 if the content of the last ``\boxed{...}`` equals the ground truth, else 0; no box, no answer.

    Equal means: the same number ("0.5", "1/2", "\frac{1}{2}" and "\frac12" are), or the same text without white space.
    No algebra is done.
    """
    answer = last_boxed(response_text)
    if answer is None:
        return _graded(0.0, None)
    left, right = _plain_math(answer), _plain_math(_truth_text(ground_truth))
    value = whole_number(left)
    equal = left == right or (value is not None and value == whole_number(right))
    return _graded(equal, left if value is None else value)


def _truth_text(ground_truth: Any) -> str:
    whole = str(ground_truth)
    truth = last_boxed(whole) if BOX.search(whole) else whole
    if truth is None:
        raise RewardError("The ground truth has an unclosed box.", ground_truth, "correct the row")
    return truth


def math(response_text: str, ground_truth: Any, method: str = "strict") -> dict[str, Any]:
    r"""1 if the last ``\boxed{...}`` says what the ground truth says, else 0: :mod:`verl.rewards.maths`.

    Args:
        method: ``strict``: no box, no answer; ``flexible``: the content of the last ``<answer>``, else the last number.
    """
    if method not in ("strict", "flexible"):
        raise RewardError("The math rule has no such method.", method, "strict or flexible")
    truth, answer = _truth_text(ground_truth), last_boxed(response_text)
    if answer is None and method == "flexible" and not BOX.search(response_text):
        tagged = ANSWER_TAG.findall(response_text)
        found = last_number(response_text)
        answer = tagged[-1] if tagged else None if found is None else str(found)
    if answer is None:
        return _graded(0.0, None)
    shown = clean(answer) if len(answer) <= LONGEST else answer
    value = number_of(shown) if len(answer) <= LONGEST else None
    return _graded(same(truth, answer), shown if value is None else value)


def _plain_math(text: str) -> str:
    text = "".join(text.replace("\\left", "").replace("\\right", "").split()).strip("$").rstrip(".")
    match = re.fullmatch(r"(-?)\\[dt]?frac(?:\{(-?\d+)\}\{(\d+)\}|(\d)(\d))", text)
    if match:
        sign, long_top, long_bottom, top, bottom = match.groups()
        text = f"{sign}{long_top or top}/{long_bottom or bottom}"
        text = text.removeprefix("--")
    return text


def reasoning_gym(response_text: str, ground_truth: Any, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
    """Score of reasoning-gym's own scorer for the row's task; partial credit where the task gives it.

    The answer is the content of the last ``<answer>...</answer>``, else the whole response; white space at its ends is
    dropped and nothing else is.
    """
    from verl.data.typed_json import load_typed

    extra = extra_info or {}
    if "task" not in extra or "metadata" not in extra:
        raise RewardError(
            "The row does not say which reasoning-gym problem it is.",
            f"extra_info has {', '.join(extra) or 'nothing'}",
            "make the file with: verl data reasoning-gym",
        )
    tagged = ANSWER_TAG.findall(response_text)
    answer = (tagged[-1] if tagged else response_text).strip()
    entry = {
        "question": extra.get("question"),
        "answer": extra.get("answer"),
        "metadata": load_typed(extra["metadata"]),
    }
    score = _reasoning_scorer(extra["task"], extra.get("options") or "{}")(answer, entry)
    return _graded(score, answer)


@lru_cache(maxsize=256)
def _reasoning_scorer(task: str, options: str) -> Callable[[str, dict[str, Any]], float]:
    from verl.data.generate import reasoning_gym_dataset
    from verl.data.typed_json import load_typed

    # Some scorers read the task's configuration (tolerances), so they get the one that the problem was made with.
    return reasoning_gym_dataset(task, load_typed(options), size=1, seed=0).score_answer


_ALL: tuple[Rule, ...] = (
    gsm8k, number, math, boxed, exact_match, multiple_choice, regex, json_schema, format_tags, length, repetition,
    reasoning_gym, code,
)  # fmt: skip
RULES: dict[str, Rule] = {rule.__name__: rule for rule in _ALL}

# No size of their input bounds the time of these, so they are called where they can be killed. With each a module that
# takes long to import, if there is one.
IN_POOL: dict[str, str | None] = {
    "math": "math_verify",
    "regex": None,
    "json_schema": "jsonschema",
    "reasoning_gym": "reasoning_gym",
}

# A trailing * stands for any ending.
SOURCES: dict[str, tuple[str, ...]] = {
    "gsm8k": ("openai/gsm8k", "gsm8k"),
    "reasoning_gym": ("reasoning_gym/*",),
    "code": ("apps", "taco", "codecontests", "codeforces"),
    "math": (
        "lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500", "math", "math_dapo", "aime*",
    ),
}  # fmt: skip


def rule_named(name: str) -> Rule:
    """The rule of that name. Raises RewardError: there is none, with the nearest name."""
    if name not in RULES:
        fix = f"{did_you_mean(name, RULES)}rules: auto, {', '.join(RULES)}"
        raise RewardError("reward.rule names no built-in rule.", name, fix)
    return RULES[name]


def by_source(data_source: str) -> Rule:
    """The rule that fits rows of this source (``reward.rule=auto``). Raises RewardError: no rule fits."""
    for name, patterns in SOURCES.items():
        if any(matches(pattern, data_source) for pattern in patterns):
            return RULES[name]
    raise RewardError(
        "No built-in reward rule belongs to this data source.",
        data_source,
        f"set reward.rule to one of {', '.join(RULES)}, or reward.custom_reward_function.path to a file of your own",
    )
