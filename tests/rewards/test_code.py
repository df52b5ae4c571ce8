"""The rule ``code``: what is run, what passes, and that nothing passes unearned (B135)."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time

import pytest
from test_scorer import batch_of

from verl.config import RewardConfig, SandboxConfig
from verl.errors import RewardError
from verl.rewards import code as module
from verl.rewards.code import code, extract_code, read_tests, same_output
from verl.rewards.code_asserts import assert_tests
from verl.rewards.sandbox import Other, Sandbox, SandboxError, decode, hashable
from verl.rewards.scorer import RuleScorer

LIMITS = SandboxConfig(time_limit=5, memory_limit=256)
SUMS = {"inputs": ["1 2\n", "3 4\n", "5 6\n"], "outputs": ["3\n", "7", "11\n"]}


def score(program: str, truth, partial: bool = True, config: SandboxConfig = LIMITS):
    return code(program, truth, partial=partial, sandbox=config)


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("x = 1", "x = 1"),
        ("Here:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```python\nx = 1\n```\n```python\nx = 2\n```\n```text\n3\n```", "x = 2\n"),
        ("```\nx = 1\n```\n```\nx = 2\n```", "x = 2\n"),
        ("```Python3 title\nx = 1\n```", "x = 1\n"),
        ("```py\nx = 1\n", "x = 1\n"),
        ("  ```python\n  x = 1\n  ```", "  x = 1\n"),
        ("```python\ns = '```'\n```", "s = '```'\n"),
        ("", ""),
    ],
)
def test_which_code_is_run(text, program):
    assert extract_code(text) == program


@pytest.mark.parametrize(
    ("printed", "expected", "same"),
    [
        ("3\n", "3", True), ("3", "3\n\n", True), (" 1  2 \n", "1 2", True), ("1\n2\n", "1 2", False),
        ("1\n\n2", "1\n2", True), ("12", "1 2", False), ("", "", True), ("", "0", False), ("YES", "Yes", False),
        ("0.3333333", "0.33333333333", True), ("0.34", "0.33", False), ("3", "3.0", True), ("3.0", "3", False),
        ("1e-7", "0.0", True), ("nan", "0.5", False), ("inf", "1.0", False), ("1000000.5", "1000000.0", True),
        ("1_0.0", "10.0", False), ("3.0 4", "3.0 5", False), ("2.50 x", "2.5 x", True),
    ],
)  # fmt: skip
def test_outputs(printed, expected, same):
    assert same_output(printed, expected) is same


def test_inputs_and_outputs():
    right = "```python\na, b = map(int, input().split())\nprint(a + b)\n```"
    assert score(right, SUMS) == {"score": 1.0, "acc": 1.0, "passed": 3, "total": 3, "reason": None}
    assert score(right, json.dumps(SUMS), partial=False)["score"] == 1.0
    assert score("print(7)", SUMS) == {"score": 1 / 3, "acc": 0.0, "passed": 1, "total": 3, "reason": "wrong answer"}
    assert score("print(7)", SUMS, partial=False)["score"] == 0.0
    lines = {"inputs": [["2", "a", "b"]], "outputs": [["a", "b"]]}
    assert score("for _ in range(int(input())): print(input())", lines)["score"] == 1.0
    assert score("", SUMS)["reason"] == "no code" and score("``` \n```", SUMS)["score"] == 0.0
    assert score("print(int(input()))", SUMS)["reason"].startswith("error: ValueError: invalid literal")
    assert score("print(3)\nraise SystemExit(1)", SUMS)["reason"] == "ended with exit 1"


def test_calls_of_a_function():
    truth = {"inputs": [[[3, 1, 2]], [[]]], "outputs": [[1, 2, 3], [[]]], "fn_name": "order"}
    assert score("def order(x): return sorted(x)", truth)["score"] == 1.0
    leetcode = "class Solution:\n    def order(self, x: List[int]) -> List[int]:\n        return tuple(sorted(x))"
    assert score(leetcode, truth)["score"] == 1.0
    assert score("def order(x): return x", truth)["passed"] == 1
    assert score("def other(x): return x", truth)["reason"] == "error: NameError: name 'order' is not defined"
    lines = {"inputs": ['[1, 2]\n"ab"'], "outputs": ['{"1": 0.5, "k": ["ab"]}'], "fn_name": "f"}
    assert score("def f(x, s): return {1: 0.50000001, 'k': (s,)}", lines)["score"] == 1.0
    used = "def f(x, s): return {1: 1 / len(Counter(x)), 'k': list(heapq.nsmallest(1, [s]))}"
    used += "\nif __name__ == '__main__': 1/0"
    assert score(used, lines)["score"] == 1.0


CHECK = """
METADATA = {"author": "x"}

def check(candidate):
    assert candidate([1, 2]) == 3, "message"
    for n in range(3):
        assert candidate([n]) == n
    expected = [10 ** 9 + 7][0:1]
    want = 1000000007
    got = candidate([10 ** 9, 7])
    assert got == want
    assert abs(candidate([0.1, 0.2]) - 0.3) < 1e-9 and candidate([]) == 0

check(total)
"""
STACK = """
from solution import Stack
s = Stack()
s.push(1); s.push(2)
assert s.pop() == 2
assert s.pop() == 1

def test_empty():
    try:
        Stack().pop()
        assert False
    except IndexError:
        pass

def test_twice():
    s = Stack()
    s.push([1])
    assert isinstance(s, Stack) and s.pop() == [1]
"""


def test_asserts():
    assert score("def total(x): return sum(x)", CHECK) == {
        "score": 1.0, "acc": 1.0, "passed": 4, "total": 4, "reason": None,
    }  # fmt: skip
    assert score("def total(x): return sum(x) or None", CHECK)["passed"] == 2
    stack = "class Stack:\n    def __init__(self): self.a = []\n    def push(self, x): self.a.append(x)\n"
    assert score(stack + "    def pop(self): return self.a.pop()", STACK)["score"] == 1.0
    wrong = score(stack + "    def pop(self): return self.a.pop(0)", STACK)
    assert (wrong["passed"], wrong["total"], wrong["reason"]) == (2, 4, "wrong answer")
    each = ["assert f(2) == 4", "assert f(3) == 9", "assert f(1) == 0"]
    assert score("def f(x): return x * x", each) == {
        "score": 2 / 3, "acc": 0.0, "passed": 2, "total": 3, "reason": "wrong answer",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("test", "right", "wrong"),
    [
        ("assert f(1) == (1, [2], {3}, {'a': None}, 2.5, b'x', 1j, True, 2 ** 70, 'ü')",
         "(1, [2], {3}, {'a': None}, 2.5, b'x', 1j, True, 2 ** 70, 'ü')",
         "(1, [2], {3}, {'a': 0}, 2.5, b'x', 1j, True, 2 ** 70, 'ü')"),
        ("assert f(1) == 1", "True", "'1'"), ("assert [1] == f(1)", "[1]", "(1,)"), ("assert f(1)", "'x'", "''"),
        ("assert not f(1)", "[]", "[0]"), ("assert f(1) is None", "None", "0"), ("assert f(1) != 2", "3", "2"),
        ("assert f(1) in (1, 2)", "2", "3"), ("assert 3 in f(1)", "[3]", "[4]"), ("assert 0 < f(1) < 2", "1", "2"),
        ("assert set(f(1)) == set([1, 2])", "[2, 1, 1]", "[1]"), ("assert sorted(f(1)) == [1, 2]", "{2, 1}", "[2]"),
        ("assert len(f(1)) == 2", "'ab'", "'a'"), ("assert round(f(1), 2) == 0.33", "1 / 3", "0.32"),
        ("assert math.isclose(f(1), 0.1, rel_tol=1e-3)", "0.10001", "0.2"), ("assert f(1) + 1 == 3", "2", "3"),
        ("assert f(1) == Counter('aab')", "{'a': 2, 'b': 1}", "{'a': 2}"),
        ("assert f(1) == float('inf')", "1e999", "1"),
        ("assert (f(1), f(2)) == (1, 1)", "1", "2"), ("assert f(1) == list(range(3))", "[0, 1, 2]", "range(3)"),
        ("from fractions import Fraction\nassert f(1) == Fraction(1, 2)", "0.5", "0.25"),
        ("assert all(f(i) == 3 for i in range(3))", "3", "4"), ("assert f(1) == 1 or f(1) == 2", "2", "3"),
        ("x = [2, 1]\nx.sort()\nassert f(1) == x", "[1, 2]", "[2, 1]"),
        ("assert f(1)['a'][0] == 1", "{'a': [1]}", "{}"),
        ("assert isinstance(f(1), (int, str))", "1", "[]"),
        ("assert sorted(f(1), key=len) == ['a', 'bb']", "['bb', 'a']", "1"),
        ("assert type(f(1)) == int", "1", "True"), ("assert str(f(1)) == '1'", "1", "'2'"),
    ],
)  # fmt: skip
def test_conditions(test, right, wrong):
    for value, passes in ((right, 1.0), (wrong, 0.0)):
        assert score(f"def f(x): return {value}", "import math\n" + test)["score"] == passes, value


def test_a_function_with_a_builtins_name():
    assert score("def sum(x): return 5", "assert sum([1, 2]) == 5")["score"] == 1.0


UNEARNED = {
    "exits": "import os; os._exit(0)",
    "exits by exception": "import sys; sys.exit(0)",
    "prints success": "import os\nprint('OK PASSED')\nos.write(3, b'true\\n' * 9)\nos._exit(0)",
    "equal to everything": """
class E:
    def __eq__(self, other): return True
    def __lt__(self, other): return True
    def __sub__(self, other): return 0
    def __bool__(self): return True
    def __hash__(self): return 0
def f(*a): return E()
""",
    "patches": """
import builtins, json, sys
builtins.abs = builtins.len = builtins.sorted = lambda *a, **k: 4
builtins.AssertionError = type('A', (BaseException,), {})
sys.modules['sandbox_child'].encode = lambda *a: 'true'
def f(*a): raise AssertionError
""",
    "looks": """
import ctypes, gc, hashlib, os, sys
def f(*a):
    texts = {str(o) for o in gc.get_objects() if isinstance(o, (dict, list, tuple, set, str, int))}
    frame = sys._getframe()
    while frame:
        texts.update(map(str, frame.f_locals.values()))
        texts.update(map(str, frame.f_code.co_consts))
        frame = frame.f_back
    for o in gc.get_objects():
        if hasattr(o, '__code__'): texts.update(map(str, o.__code__.co_consts))
    for text in list(texts):
        for word in text.replace("'", ' ').replace('=', ' ').split():
            if hashlib.sha256(word.encode()).hexdigest() == DIGEST: return word
""",
    "no such thing": "def f(*a): return [[[None]]]",
}
WORD = "right-8731"


@pytest.mark.parametrize("name", UNEARNED)
def test_nothing_is_won_unearned(name):
    program = f"DIGEST = {hashlib.sha256(WORD.encode()).hexdigest()!r}\n{UNEARNED[name]}"
    function = f"def check(g):\n    want = {WORD!r}\n    assert g(2) == want\ncheck(f)\n"
    later = f"def test_f():\n    assert f(1) in [{WORD!r}]\n    assert {WORD!r} == f(2)\nassert f(2) == {WORD!r}"
    numbers = ["assert f(2) == 4", "assert abs(f(1.5) - 3) < 1e-6", "assert [4] == f(3)"]
    called = {"inputs": [[1]], "outputs": [WORD], "fn_name": "f"}
    for truth in (function, later, numbers, called, SUMS):
        assert score(program, truth)["score"] == 0.0, truth


def test_what_can_be_forged_is_told_by_the_docs():
    """A loop over asserts runs beside the program: docs/rewards.md says so. When this fails, correct the docs."""
    always = UNEARNED["equal to everything"]
    assert score(always, "for i in range(3):\n    assert f(i) == i")["score"] == 1.0


def test_limits_of_time():
    started = time.monotonic()
    slow = score("import time\ntime.sleep(60)", SUMS, config=LIMITS.model_copy(update={"time_limit": 0.2}))
    assert (slow["reason"], slow["passed"], slow["total"]) == ("time-out", 0, 3)
    both = LIMITS.model_copy(update={"time_limit": 0.2, "total_time_limit": 0.1})
    assert score("import time\ntime.sleep(60)", SUMS, config=both)["passed"] == 0
    assert time.monotonic() - started < 10


@pytest.mark.parametrize(
    ("truth", "said"),
    [
        ("", "no assert"), ("no Python here", "no Python"), ("x = 1", "no assert"), (5, "no assert"), ([], "no tests"),
        ("import numpy as np\nassert f(np.zeros(1)) == 0", "imports a package"), ({"inputs": [1]}, "equal length"),
        ("import unittest\nclass T(unittest.TestCase):\n    def test(self): assert f() == 1", "unittest"),
        ({"inputs": [], "outputs": []}, "with something in them"),
        ({"inputs": ["{"], "outputs": ["1"], "fn_name": "f"}, "not JSON"),
        ({"inputs": [[1]], "outputs": [1], "fn_name": "os.system"}, "no name of a function"),
    ],
)  # fmt: skip
def test_bad_ground_truths_are_no_zeros(truth, said):
    with pytest.raises(RewardError, match=said):
        score("x = 1", truth)


def test_hostile_values_cost_little():
    started = time.monotonic()
    for text in (b"[" * 10**6, b"1" * 10**6, b'{"int":"zz"}', b'{"set":[[1]]}', b'{"tuple":3}', b'{"x":1}', b"", b"{}"):
        with pytest.raises(ValueError):
            decode(text)
    same = ",".join(str(k * (2**61 - 1)) for k in range(20000))
    for text in (f'{{"set":[{same}]}}', '{"dict":[' + ",".join(f"[{k},1]" for k in same.split(",")) + "]}"):
        with pytest.raises(ValueError, match="too many"):
            decode(text.encode())
    with pytest.raises(ValueError):
        hashable([(2**61 - 1) * k for k in range(6000)])
    assert time.monotonic() - started < 5
    other = decode(b'{"other":"E","true":true}')
    assert isinstance(other, Other) and other and other != other.kind


def test_expected_values_stay_here():
    for source, _ in [*assert_tests(CHECK), *assert_tests(STACK)]:
        assert "1000000007" not in source and "message" not in source.split("for n in")[0]
    assert all("3\n" not in test.payload for test in read_tests(SUMS))


def test_batch_through_the_scorer():
    config = RewardConfig(rule="code", sandbox={"time_limit": 5, "workers": 4}, reward_kwargs={"partial": True})
    scorer = RuleScorer(config)
    truths = [json.dumps(SUMS)] * 3 + ["not Python ("]
    answers = ["a, b = map(int, input().split()); print(a + b)", "print(7)", "import os; os._exit(0)", "print(1)"]
    out = scorer.score(batch_of(answers, truths))
    assert out.non_tensor_batch["score"].tolist() == [1.0, 1 / 3, 0.0, None]
    assert out.non_tensor_batch["reward_extra/reason"].tolist()[:3] == [None, "wrong answer", "wrong answer"]
    assert "no Python" in out.non_tensor_batch["reward_reason"][3]
    assert out.meta_info["metrics"]["reward/failed"] == 1


def test_a_lost_sandbox_is_a_failure_and_no_zero(monkeypatch):
    """B102."""

    class Lost(Sandbox):
        def run(self, *arguments):
            if len(lost) < 1:
                lost.append(1)
                os.kill(self._process.pid, signal.SIGKILL)
            return super().run(*arguments)

    lost: list[int] = []
    monkeypatch.setattr(module, "Sandbox", Lost)
    out = RuleScorer(RewardConfig(rule="code")).score(batch_of(["print(1)"] * 4, [json.dumps(SUMS)] * 4))
    assert sorted(map(str, out.non_tensor_batch["score"])) == ["0.0", "0.0", "0.0", "None"]
    assert out.meta_info["metrics"]["reward/failed"] == 1 and out.meta_info["metrics"]["reward/scored"] == 3


def test_checked_before_a_run(monkeypatch):
    def refuse(*_):
        raise SandboxError("This machine cannot isolate model-written code.")

    class Row:
        data_source, extra_info, columns = "taco", {}, {}

    RuleScorer(RewardConfig()).check_rows([Row()])
    monkeypatch.setattr(module, "Sandbox", refuse)
    with pytest.raises(SandboxError, match="cannot isolate"):
        RuleScorer(RewardConfig()).check_rows([Row()])
    with pytest.raises(RewardError, match="does not take"):
        RuleScorer(RewardConfig(rule="code", reward_kwargs={"method": "strict"}))
