"""Rules about the form of a response: each with what is right, wrong and tricky."""

from __future__ import annotations

import time

import pytest

from verl.errors import RewardError
from verl.rewards.rules import RULES


def score(rule: str, response: str, truth: object = "", **options) -> float:
    return RULES[rule](response_text=response, ground_truth=truth, **options)["score"]


@pytest.mark.parametrize(
    ("response", "truth", "value"),
    [
        ("B", "B", 1), ("b", "B", 1), ("(B)", "B", 1), ("B.", "B", 1), ("B) Paris", "B", 1), ("**B**", "(B)", 1),
        ("The answer is B.", "B", 1), ("Answer: (C)", "C", 1), ("I choose option D", "D", 1),
        ("the answer is a surprise", "A", 0), ("A good one", "A", 0), ("the answer is b.", "B", 1),
        ("the answer is **A**", "A", 1),
        ("The answer is A. No, the answer is B.", "B", 1), ("The answer is A. No, the answer is B.", "A", 0),
        (r"not A, so \boxed{B}", "B", 1), (r"\boxed{\text{(C)}}", "C", 1), ("<answer>D</answer>", "D. Paris", 1),
        ("B or C may be right", "C", 0), ("Paris", "B", 0), ("", "B", 0), ("Both A and B", "B", 0),
        ("answer: Z", "Z", 0),
        (r"the answer is A \boxed{", "A", 1), ("Answer: maybe", "M", 0), ("Because", "B", 0),
    ],
)  # fmt: skip
def test_multiple_choice(response, truth, value):
    assert score("multiple_choice", response, truth) == value


def test_multiple_choice_needs_a_letter_as_truth():
    with pytest.raises(RewardError, match="no letter"):
        score("multiple_choice", "A", "Paris")


@pytest.mark.parametrize(
    ("response", "truth", "pattern", "value"),
    [
        ("it is 42.", r"\d+", None, 1), ("none", r"\d+", None, 0), ("x = 1; x = 2", "2", r"x = (\d+)", 1),
        ("x = 1; x = 2", "1", r"x = (\d+)", 0), ("x = ?", "1", r"x = (\d+)", 0), ("done.", "", r"\.$", 1),
    ],
)  # fmt: skip
def test_regex(response, truth, pattern, value):
    assert score("regex", response, truth, pattern=pattern) == value
    with pytest.raises(RewardError, match="cannot be read"):
        score("regex", response, truth, pattern="(")


SCHEMA = {"type": "object", "required": ["n"], "properties": {"n": {"type": "integer"}}, "additionalProperties": False}


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ('{"n": 1}', 1), (' {"n": 1}\n', 1), ('{"n": 1.5}', 0), ("{}", 0), ('{"n": 1, "m": 2}', 0), ("n: 1", 0),
        ("", 0),
        ('Here:\n```json\n{"n": 1}\n```\nDone.', 1), ('```\n{"n": "x"}\n```\n```\n{"n": 2}\n```', 1),
        ('<think>{"n": "x"}</think><answer>{"n": 3}</answer>', 1), ("[" * 100_000, 0), ('{"n": NaN}', 0),
    ],
)  # fmt: skip
def test_json_schema(response, value):
    assert score("json_schema", response, schema=SCHEMA) == value
    assert score("json_schema", response, SCHEMA) == value


def test_json_schema_says_what_is_wrong():
    said = RULES["json_schema"](response_text='{"n": "x"}', ground_truth=SCHEMA)["error"]
    assert said == "$.n: 'x' is not of type 'integer'"
    with pytest.raises(RewardError, match="no JSON Schema"):
        score("json_schema", "{}", {"type": "nonsense"})


def test_json_schema_fetches_nothing(monkeypatch):
    fetched = []
    monkeypatch.setattr("urllib.request.urlopen", lambda *args, **_: fetched.append(args))
    own = {"$defs": {"n": {"type": "integer"}}, "$ref": "#/$defs/n"}
    assert (score("json_schema", "1", own), score("json_schema", '"x"', own)) == (1.0, 0.0)
    assert score("json_schema", "{}", {"$ref": "https://json-schema.org/draft/2020-12/schema"}) == 1.0
    with pytest.raises(RewardError, match=r"(?s)refers to.*http://127.0.0.1:9/n"):
        score("json_schema", "1", {"$ref": "http://127.0.0.1:9/n"})
    assert not fetched


@pytest.mark.parametrize(
    ("response", "value"),
    [
        ("<think>a</think><answer>b</answer>", 1), ("\n<think>a\nb</think>\n\n<answer>b</answer> ", 1),
        ("<think>a</think>", 0), ("<answer>b</answer>", 0), ("<answer>b</answer><think>a</think>", 0),
        ("so <think>a</think><answer>b</answer>", 0), ("<think>a</think> so <answer>b</answer>", 0),
        ("<think>a</think><answer>b</answer> end", 0), ("<think>a</think><think>a</think><answer>b</answer>", 0),
        ("<think>a<answer>b</answer></think>", 0), ("<think></think><answer>b</answer>", 0), ("", 0),
        ("<think>a</think><answer> </answer>", 0), ("</think>a<think><answer>b</answer>", 0),
    ],
)  # fmt: skip
def test_format_tags(response, value):
    assert score("format_tags", response) == value


def test_format_tags_of_ones_own():
    assert score("format_tags", "<plan>a</plan><code>b</code><out>c</out>", tags=["plan", "code", "out"]) == 1.0


@pytest.mark.parametrize(
    ("words", "options", "value"),
    [
        (5, {"most": 5}, 1), (6, {"most": 5}, 0), (6, {"most": 5, "slack": 3}, 0.75), (9, {"most": 5, "slack": 3}, 0),
        (1, {"least": 2}, 0), (0, {}, 1), (1, {"least": 2, "most": 5, "slack": 1}, 0.5),
    ],
)  # fmt: skip
def test_length(words, options, value):
    assert score("length", "word " * words, **options) == value


@pytest.mark.parametrize(
    ("response", "value"),
    [("a b c d", 0), ("a b", 0), ("", 0), ("a a a a", -0.5), ("a b c a b c", -0.25), ("A b c a B c", -0.25)],
)
def test_repetition(response, value):
    assert score("repetition", response) == value


@pytest.mark.parametrize(
    "rule", ["multiple_choice", "json_schema", "format_tags", "length", "repetition", "exact_match"]
)
@pytest.mark.parametrize("text", ["<answer>" * 50_000, "answer is " * 40_000, "```\n" * 50_000, "\\boxed{" * 40_000])
def test_long_responses_take_time_in_proportion(rule, text):
    start = time.perf_counter()
    score(rule, text, {} if rule == "json_schema" else "A")
    assert time.perf_counter() - start < 2.0
