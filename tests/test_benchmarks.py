"""The benchmarks run, at a size of no meaning; their figures are read by people."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).parents[1]


def run(script: str, *arguments: str | Path) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize(
    ("arguments", "rows"),
    [
        (["protocol.py", "--rows", "64", "--tokens", "16"], ["concat", "serialise", "chunk", "union"]),
        (["advantages.py", "--rows", "64", "--tokens", "32", "--repeat", "1"], ["gae, gaps", "grpo", "remax"]),
        (["rewards.py", "--seconds", "0.01"], ["gsm8k rule", "math rule", "a function of a file"]),
        (["overlap.py", "--quick"], ["fixed       sync", "long_tailed one_step_off", "long_tailed async"]),
    ],
    ids=["protocol", "advantages", "rewards", "overlap"],
)
def test_it_prints_its_table(arguments: list[str], rows: list[str]) -> None:
    lines = run(*arguments).splitlines()
    for name in rows:
        line = next(line for line in lines if line.startswith(name))
        assert max(float(word) for word in line.split() if word.replace(".", "").isdigit()) > 0, line


def test_the_step_is_measured_beside_the_textbook(tmp_path: Path) -> None:
    arguments = ["--quick", "--repeat", "1", "--json", tmp_path / "found.json", "--only", "verl", "naive", "ablation"]
    said = run("step.py", *arguments)
    found = json.loads((tmp_path / "found.json").read_text())
    ratios = found["ratios"]
    assert list(ratios) == [
        "vs_trl_step",
        "vs_naive_step",
        "vs_naive_ppo_step",
        "vs_trl_memory",
        "update_flops_share_bf16",
        "update_flops_share_fp32",
    ]
    assert ratios["vs_naive_step"] == found["naive"]["seconds"] / found["verl"]["seconds"] > 0
    assert ratios["vs_trl_step"] is None, "not asked for"
    assert found["verl"]["memory_gb"] > 0.1
    parts = found["verl"]["parts"]
    assert 0 < sum(parts.values()) <= found["verl"]["seconds"]
    assert found["ablation"].keys() >= {"nothing", "prefix sharing", "packing, prefix sharing"}
    assert "without prefix sharing" in said


def test_what_is_learned_is_drawn(tmp_path: Path) -> None:
    arguments = ["--quick", "--runs", tmp_path, "--recipes", "grpo", "--seeds", "1", "--steps", "1"]
    said = run("learning.py", *arguments)
    assert re.search(r"^\| GRPO \| 1 \| 0\.\d{3} \| 0\.\d{3} \| 0\.\d{3} \|$", said, re.MULTILINE), said
    drawing = ElementTree.parse(tmp_path / "learning.svg").getroot()
    lines = drawing.findall("{http://www.w3.org/2000/svg}polyline[@stroke]")
    thick = next(line for line in lines if line.get("stroke-width") == "2.5")
    assert len((thick.get("points") or "").split()) == 2, "before and after"
