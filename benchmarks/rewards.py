"""Responses a second that the built-in rules score on one core, in batches, and that the pool of workers takes.

Run: python benchmarks/rewards.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from verl.config import RewardConfig
from verl.protocol import DataProto
from verl.rewards.scorer import RuleScorer

SOLUTION = "Let me think. 16 - 3 - 4 = 9 eggs a day, which sell for 9 * 2 = $18.\n" * 5
# Ground truths and answers with a number in them.
PAIRS = [
    (r"\frac{%d}{2}", "%d/2"), (r"\frac{%d}{2}", "%d/3"), ("%d.5", "%d.50"), ("%d", "-%d"), (r"%d\text{ cm}", "%d"),
    ("(0, %d]", "(0,%d]"), ("(0, %d]", "[0,%d]"), (r"%d\sqrt{8}", r"2\cdot %d\sqrt{2}"), (r"%d\sqrt{2}", r"%d\sqrt{3}"),
    ("x^2 + 2x + %d", "(x+1)^2 - 1 + %d"), ("x^2 + %d", "x^2 - %d"), (r"\frac{%d\pi}{2}", r"%d\pi/2"),
]  # fmt: skip
FUNCTION = "def compute_score(data_source, solution_str, ground_truth): return float(ground_truth in solution_str)\n"


def batch_of(texts: Sequence[str], truths: Sequence[str]) -> DataProto:
    rows = len(texts)
    columns = {"response_text": texts, "ground_truth": truths, "data_source": ["x"] * rows, "extra_info": [{}] * rows}
    return DataProto.from_dict({"response_mask": torch.ones(rows, 8, dtype=torch.bool)}, columns)


def speed(config: RewardConfig, make: Callable[[int], tuple[str, str]], rows: int, seconds: float) -> float:
    """Responses a second; ``make`` gives the response and ground truth of a number, and no number comes twice."""
    scorer, done = RuleScorer(config), 0
    scorer.score(batch_of(*zip(*map(make, range(12)), strict=True)))  # what is loaded once
    spent = 0.0
    while spent < seconds:
        batch = batch_of(*zip(*map(make, range(12 + done, 12 + done + rows)), strict=True))
        start = time.perf_counter()
        scorer.score(batch)
        spent += time.perf_counter() - start
        done += rows
    scorer.close()
    return done / spent


def sums(number: int) -> tuple[str, str]:
    return f"{SOLUTION}#### {number}", str(number)


def boxes(number: int) -> tuple[str, str]:
    """Eight responses to a prompt, each with another answer."""
    group = number // 8
    truth, answer = PAIRS[group % len(PAIRS)]
    return f"so \\boxed{{{answer % (group + 2 + number % 8)}}}", truth % (group + 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    print(f"gsm8k rule, one core: {speed(RewardConfig(rule='gsm8k'), sums, 1024, seconds):.0f} responses/s")
    alone = RewardConfig(rule="math", num_workers=0)
    print(f"math rule, one core: {speed(alone, boxes, 96, seconds):.0f} responses/s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text(FUNCTION)
        custom = RewardConfig(custom_reward_function={"path": str(path)})
        print(f"a function of a file, in workers: {speed(custom, sums, 1024, seconds):.0f} responses/s")


if __name__ == "__main__":
    main()
