"""The benchmarks run, at a size of no meaning; their figures are read by people."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["protocol.py", "--rows", "64", "--tokens", "16"], ["concat", "serialise", "chunk", "union"]),
        (["advantages.py", "--rows", "64", "--tokens", "32", "--repeat", "1"], ["gae, gaps", "grpo", "remax"]),
        (["rewards.py", "--seconds", "0.01"], ["gsm8k rule", "math rule", "a function of a file"]),
    ],
    ids=["protocol", "advantages", "rewards"],
)
def test_it_prints_its_table(arguments: list[str], rows: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / arguments[0], *arguments[1:]],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    for name in rows:
        line = next(line for line in lines if line.startswith(name))
        assert max(float(word) for word in line.split() if word.replace(".", "").isdigit()) > 0, line
