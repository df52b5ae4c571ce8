"""The rule ``code``: a program in the response, run in a sandbox against the tests of its row."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

from verl.config.schema_reward import SandboxConfig
from verl.errors import RewardError
from verl.rewards.code_asserts import assert_tests
from verl.rewards.sandbox import Kind, Raised, Run, Sandbox, SandboxError, decode

FORMS = (
    'a JSON object with "inputs" and "outputs" (and "fn_name" where a function is called), a list of assert '
    "statements, or the text of a test"
)

Check = Callable[[Any], bool]  # of what came back; raises whatever on values that do not fit


@dataclass(frozen=True)
class Test:
    """What runs in one process, and the checks of what comes back. ``payload, stdin``: what the sandbox is given.
    ``checks``: each is of a text (kind ``stdin``: what was printed) or of a value of the program's."""

    __test__ = False  # pytest: not a test

    kind: Kind
    payload: str
    checks: tuple[Check, ...]
    stdin: str = ""

    def verdicts(self, run: Run) -> list[str | None]:
        """For each check: None if the program passes, else why not."""
        if self.kind == "stdin":
            found: list[Any] = [] if run.trouble else [run.stdout.decode("utf-8", "replace")]
        else:
            found = run.values.split(b"\n")[:-1]
        verdicts: list[str | None] = [run.trouble or "ended early"] * len(self.checks)
        for number, (check, value) in enumerate(zip(self.checks, found, strict=False)):
            verdicts[number] = self._verdict(check, value)
        return verdicts

    def _verdict(self, check: Check, value: Any) -> str | None:
        try:
            if self.kind != "stdin":
                value = decode(value)
                if isinstance(value, Raised):
                    return value.reason
            return None if check(value) else "wrong answer"
        except Exception:  # a value of a kind that the test does not expect: no fault of ours
            return "wrong answer"


def read_tests(ground_truth: Any) -> list[Test]:
    """The tests of a ground truth, in any of ``FORMS``. Raises RewardError: it is none of them."""
    truth = ground_truth
    if isinstance(truth, str) and truth.lstrip()[:1] in ("{", "["):
        try:
            truth = json.loads(truth)
        except ValueError:
            truth = ground_truth
    if isinstance(truth, dict):
        return _inputs_and_outputs(truth)
    texts = [truth] if isinstance(truth, str) else truth
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise RewardError("The ground truth has no tests.", type(truth).__name__, f"it must be {FORMS}")
    return [Test("values", source, checks) for text in texts for source, checks in assert_tests(text)]


# --- inputs and outputs ---------------------------------------------------------------------------------------------


def _inputs_and_outputs(truth: dict[str, Any]) -> list[Test]:
    inputs, outputs, function = truth.get("inputs"), truth.get("outputs"), truth.get("fn_name")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise RewardError(
            'The ground truth\'s "inputs" and "outputs" are not two lists of equal length, with something in them.',
            f"keys: {', '.join(map(str, truth)) or 'none'}",
            f"it must be {FORMS}",
        )
    pairs = zip(inputs, outputs, strict=True)
    if function:
        return [_call_test(str(function), given, expected) for given, expected in pairs]
    return [Test("stdin", "", (partial(same_output, expected=_text(out)),), _text(given)) for given, out in pairs]


def _text(lines: Any) -> str:
    return "\n".join(map(str, lines)) if isinstance(lines, list) else str(lines)


_DECIMAL = re.compile(r"[-+]?(\d{1,50}\.\d{0,50}|\.\d{1,50}|\d{1,50}(?=[eE]))([eE][-+]?\d{1,3})?")
_NUMBER = re.compile(rf"{_DECIMAL.pattern}|[-+]?\d{{1,50}}")


def same_output(printed: str, expected: str) -> bool:
    """Whether two outputs have the same words on the same lines; blank lines and runs of spaces do not count.

    Where a word of ``expected`` has a decimal point or an exponent, a number within 1e-6 of it (relative or absolute)
    is the same.
    """
    if printed.split() == expected.split() and printed.strip().count("\n") == expected.strip().count("\n"):
        return True
    left, right = ([line.split() for line in text.splitlines() if line.strip()] for text in (printed, expected))
    return [*map(len, left)] == [*map(len, right)] and all(
        a == b or (_DECIMAL.fullmatch(b) and _NUMBER.fullmatch(a) and math.isclose(float(a), float(b), rel_tol=1e-6,
                                                                                  abs_tol=1e-6))
        for one, other in zip(left, right, strict=True)
        for a, b in zip(one, other, strict=True)
    )  # fmt: skip


def _call_test(function: str, given: Any, expected: Any) -> Test:
    """A list of arguments and the result; or (both as text) one JSON argument a line, and the result as JSON."""
    if not function.isidentifier():
        raise RewardError('The ground truth\'s "fn_name" is no name of a function.', function)
    try:
        arguments = (
            [json.loads(line) for line in given.splitlines() if line.strip()] if isinstance(given, str) else given
        )
        results = [json.loads(expected)] if isinstance(given, str) and isinstance(expected, str) else [expected]
    except ValueError as error:
        raise RewardError("An argument or result in the ground truth is not JSON.", error) from None
    if not isinstance(arguments, list):
        arguments = [arguments]
    if isinstance(expected, list) and len(expected) == 1:
        results.append(expected[0])  # some data sets wrap every result in a list
    wanted = [_json_form(result) for result in results]
    check = lambda value: any(_close(_json_form(value), one) for one in wanted)  # noqa: E731
    return Test("call", f"{function}\n{json.dumps(arguments)}", (check,))


def _json_form(value: Any) -> Any:
    """As JSON would give it back: tuples are lists, keys are text."""
    if isinstance(value, list | tuple):
        return [_json_form(item) for item in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else json.dumps(key): _json_form(item) for key, item in value.items()}
    return value


def _close(value: Any, expected: Any) -> bool:
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(_close, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(_close(value[key], expected[key]) for key in expected)
    if isinstance(expected, float) and isinstance(value, int | float):
        return math.isclose(value, expected, rel_tol=1e-6, abs_tol=1e-6)
    return bool(value == expected)


_FENCE = re.compile(r"^[ \t]*```[ \t]*([\w+-]*)[^\n]*\n(.*?)(?:^[ \t]*```[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_PYTHON = {"python", "python3", "py"}


def extract_code(response_text: str) -> str:
    """The last fenced block marked as Python; else the last fenced block; else the whole text."""
    blocks = [(match[1].lower(), match[2]) for match in _FENCE.finditer(response_text)]
    python = [text for language, text in blocks if language in _PYTHON]
    if python:
        return python[-1]
    return blocks[-1][1] if blocks else response_text


def code(
    response_text: str, ground_truth: Any, partial: bool = False, sandbox: SandboxConfig | None = None
) -> dict[str, Any]:
    """1 if the program of the response passes all tests, else 0. Returns ``score, acc``; ``passed`` and ``total``
    tests; ``reason``: why the first one failed, None if all passed. Raises RewardError: the ground truth has no tests,
    or the sandbox cannot start or was lost: never the program's fault.

    Args:
        ground_truth: see :func:`verl.rewards.code.read_tests`.
        partial: the share of tests passed instead; otherwise nothing runs after the first failure.
    """
    tests = _tests(ground_truth if isinstance(ground_truth, str) else json.dumps(ground_truth))
    program = extract_code(response_text)
    total = sum(len(test.checks) for test in tests)
    verdicts = _verdicts(program, tests, sandbox or SandboxConfig(), stop=not partial) if program.strip() else []
    passed = verdicts.count(None)
    right = float(passed == total)
    reason = next(filter(None, verdicts), None if verdicts else "no code")
    return {"score": passed / total if partial else right, "acc": right, "passed": passed, "total": total,
            "reason": reason}  # fmt: skip


def check_sandbox(config: SandboxConfig) -> None:
    """Try the sandbox before a run depends on it. Raises SandboxError."""
    with Sandbox("print(6 * 7)", config) as sandbox:
        run = sandbox.run("stdin")
    if run.stdout != b"42\n":
        raise SandboxError("The sandbox does not run a simple program.", run.trouble or run.stdout[:80])


_tests = lru_cache(maxsize=256)(read_tests)


def _verdicts(program: str, tests: Sequence[Test], config: SandboxConfig, stop: bool) -> list[str | None]:
    verdicts: list[str | None] = []
    end = time.monotonic() + config.total_time_limit
    with Sandbox(program, config, calls=any(test.kind == "call" for test in tests)) as sandbox:
        for test in tests:
            if time.monotonic() >= end:
                verdicts += ["time-out of all tests together"] * len(test.checks)
            else:
                verdicts += test.verdicts(sandbox.run(test.kind, test.payload, test.stdin))
            if stop and any(verdicts):
                break
    return verdicts
