"""The rule ``code``: a program in the response, run in a sandbox against the tests of its row."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from verl.config.schema_reward import SandboxConfig
from verl.rewards.code_tests import Test, read_tests
from verl.rewards.sandbox import Sandbox, SandboxError

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
    """1 if the program of the response passes all tests, else 0.

    Args:
        ground_truth: see :func:`verl.rewards.code_tests.read_tests`.
        partial: the share of tests passed instead; otherwise nothing runs after the first failure.

    Returns:
        ``score, acc``; ``passed`` and ``total`` tests; ``reason``: why the first one failed, None if all passed.

    Raises:
        RewardError: the ground truth has no tests, or the sandbox cannot start or was lost: never the program's fault.
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
