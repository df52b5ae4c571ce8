"""Built-in reward rules.

Each is ``rule(response_text, ground_truth, **options) -> {"score": float, "pred": str | None}``, with ``extra_info``
among the options where it takes it: what it scores, and the answer that it read, in one spelling for equal answers
(majorities are counted by it). An answer that cannot be found scores 0: the model did not give one. Raising is for what
is no fault of the model (a ground truth that is not a number, a row without the columns that the rule needs); the
scorer counts that and leaves the row unscored.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

from verl.config.names import did_you_mean, matches
from verl.data.typed_json import load_typed
from verl.errors import RewardError
from verl.rewards.code import code
from verl.rewards.maths import LONGEST, clean, same
from verl.rewards.maths import number as number_of
from verl.rewards.written_numbers import last_number, leading_number, whole_number

BOX = re.compile(r"\\f?boxed\s*|\\fbox\s*")
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_LETTER = re.compile(r"[\s(\[*]*([A-Za-z])\s*(?:[)\].:,*]|$)")
_SAID = re.compile(  # a small letter may be a word: "the answer is a surprise"
    r"(?i:answer|option|choice)\s*(?:(?i:is|would be)\b|:|=)?[\s:*(\[$]*+([A-Z](?![\w'])|[a-z](?=\s*+(?:[).:*\]]|$)))"
)


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, ``\fbox{...}`` or ``\boxed x``, nested braces kept; None if unclosed."""
    box = None
    for match in BOX.finditer(text):
        box = match
    if box is None:
        return None
    start = box.end()
    if text[start : start + 1] != "{":
        bare = re.match(r"[^\s$]+", text[start:]) if box.group().endswith((" ", "\t", "\n")) else None
        return bare.group() if bare else None
    depth, escaped = 0, False
    for at in range(start, len(text)):
        char = text[at]
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at].strip()
    return None


def multiple_choice(response_text: str, ground_truth: Any, choices: int = 10) -> dict[str, Any]:
    r"""1 if the letter that the response chooses is the ground truth's, else 0; case does not count.

    The choice is the letter in the last ``\boxed{}``, else in the last ``<answer>``, else behind the last "answer is",
    "Answer:", "option" or "choice", else the one that the response consists of or starts with ("B", "(B) Paris", "B.").
    A letter that is only mentioned is no choice.

    Args:
        choices: how many there are, from A.
    """
    truth = _LETTER.match(str(ground_truth))
    if truth is None:
        raise RewardError("The ground truth is no letter.", ground_truth, "correct the row, or choose another rule")
    places = [last_boxed(response_text), *(text for text in ANSWER_TAG.findall(response_text)[-1:])]
    boxed = next((text for text in places if text is not None), None)
    if boxed is not None:
        found = _LETTER.match(re.sub(r"\\text[a-z]*\{([^{}]*)\}", r"\1", boxed))
    else:
        found = next(iter(deque(_SAID.finditer(response_text), maxlen=1)), None) or _LETTER.match(response_text)
    letter = found[1].upper() if found else None
    if letter is not None and ord(letter) - ord("A") >= choices:
        letter = None
    return {"score": float(letter == truth[1].upper()), "pred": letter}


def regex(response_text: str, ground_truth: Any, pattern: str | None = None) -> dict[str, Any]:
    """1 if ``pattern`` is found in the response, else 0; with a group: if the last match's group is the ground truth.
    ``pattern``: of Python's ``re``; None: the ground truth is the pattern."""
    compiled = _compiled(str(ground_truth) if pattern is None else pattern)
    last = next(iter(deque(compiled.finditer(response_text), maxlen=1)), None)
    if last is None:
        return {"score": 0.0, "pred": None}
    if pattern is None or not compiled.groups:
        return {"score": 1.0, "pred": last[0]}
    found = (last[1] or "").strip()
    return {"score": float(found == str(ground_truth).strip()), "pred": found}


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise RewardError(f"The regular expression cannot be read: {error}", pattern, "correct it") from error


def json_schema(response_text: str, ground_truth: Any, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """1 if the response is JSON that the schema allows, else 0, with the first ``error``.

    The JSON is the content of the last ``<answer>``, else of the last fenced block, else the whole response.

    Args:
        schema: a JSON Schema; None: the ground truth is one (a mapping, or its JSON). ``$ref`` may name what is in it
            and the specification's own schemas.
    """
    text = next((found[-1] for part in (ANSWER_TAG, _FENCE) if (found := part.findall(response_text))), response_text)
    wanted = schema if schema is not None else ground_truth
    validator = _validator(wanted if isinstance(wanted, str) else json.dumps(wanted))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {"score": 0.0, "error": f"not JSON: {error}"}
    from referencing.exceptions import Unresolvable

    try:
        fault = next(iter(validator.iter_errors(value)), None)
    except Unresolvable as error:
        fix = "write what it refers to under $defs; nothing is fetched"
        raise RewardError("The JSON Schema refers to what it does not hold.", error.ref, fix) from error
    if fault is None:
        return {"score": 1.0, "error": None}
    return {"score": 0.0, "error": f"{fault.json_path}: {fault.message[:200]}"}


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    import jsonschema
    import jsonschema_specifications

    try:
        parsed = json.loads(schema)
        kind = jsonschema.validators.validator_for(parsed, jsonschema.Draft202012Validator)
        kind.check_schema(parsed)
    except (ValueError, jsonschema.SchemaError) as error:
        raise RewardError("The ground truth is no JSON Schema.", str(error).splitlines()[0], "correct it") from error
    return kind(parsed, registry=jsonschema_specifications.REGISTRY)  # its default fetches what a $ref names


def format_tags(response_text: str, ground_truth: Any, tags: Sequence[str] = ("think", "answer")) -> dict[str, Any]:
    """1 if the response is ``<think>...</think><answer>...</answer>`` and nothing else, each tag once, else 0."""
    at, text = 0, response_text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not text[at:].lstrip().startswith(opening):
            return {"score": 0.0}
        at = text.index(closing) + len(closing)
        if not text[text.index(opening) + len(opening) : at - len(closing)].strip():
            return {"score": 0.0}
    return {"score": float(not text[at:].strip())}


def length(
    response_text: str, ground_truth: Any, least: int = 0, most: int | None = None, slack: int = 0
) -> dict[str, Any]:
    """1 for ``least`` to ``most`` words, else 0; with ``slack`` the score falls to 0 over so many words beyond."""
    words = len(response_text.split())
    outside = max(least - words, words - most if most is not None else 0, 0)
    return {"score": 1.0 if not outside else max(0.0, 1 - outside / (slack + 1)), "words": words}


def repetition(response_text: str, ground_truth: Any, n: int = 3) -> dict[str, Any]:
    """Minus the share of the response's ``n``-word sequences that occurred before in it: 0 (none) to almost -1."""
    words = response_text.casefold().split()
    total = len(words) - n + 1
    if n < 1 or total < 1:
        return {"score": 0.0}
    return {"score": len({tuple(words[i : i + n]) for i in range(total)}) / total - 1}


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
    r"""1 if the last ``\boxed{...}`` says what the ground truth says, else 0: :mod:`verl.rewards.maths`. ``method``:
    ``strict``: no box, no answer; ``flexible``: the content of the last ``<answer>``, else the last number."""
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
