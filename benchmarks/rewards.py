"""Responses a second that the built-in rules score on one core, in batches, and that the pool of workers takes.

Run: python benchmarks/rewards.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from verl.config import RewardConfig
from verl.protocol import DataProto
from verl.rewards.scorer import RuleScorer

SOLUTION = "Let me think. 16 - 3 - 4 = 9 eggs a day, which sell for 9 * 2 = $18.\n" * 5
ANSWERS = [r"\frac{1}{2}", "0.5", r"x^2 + 2x + 1", r"(x+1)^2", r"2\sqrt{2}", r"\sqrt{8}", "(0, 1]", r"12\text{ cm}"]
FUNCTION = "def compute_score(data_source, solution_str, ground_truth): return float(ground_truth in solution_str)\n"


def batch_of(texts: Sequence[str], truths: Sequence[str]) -> DataProto:
    rows = len(texts)
    columns = {"response_text": texts, "ground_truth": truths, "data_source": ["x"] * rows, "extra_info": [{}] * rows}
    return DataProto.from_dict({"response_mask": torch.ones(rows, 8, dtype=torch.bool)}, columns)


def speed(config: RewardConfig, texts: Sequence[str], truths: Sequence[str], seconds: float) -> float:
    """Responses a second; every response is another, so that none is remembered."""
    scorer, done, number = RuleScorer(config), 0, 0
    scorer.score(batch_of(texts[:8], truths[:8]))  # what is loaded once
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        number += 1
        scorer.score(batch_of([f"{number} {text}" for text in texts], truths))
        done += len(texts)
    rate = done / (time.perf_counter() - start)
    scorer.close()
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="for each figure")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    sums = [f"{SOLUTION}#### {i}" for i in range(1024)]
    numbers = [str(i) for i in range(1024)]
    print(f"gsm8k rule, one core: {speed(RewardConfig(rule='gsm8k'), sums, numbers, seconds):.0f} responses/s")
    boxes = [f"{i} so \\boxed{{{answer}}}" for i in range(32) for answer in ANSWERS]
    truths = [ANSWERS[(i + i // 8) % 8] for i in range(len(boxes))]  # every answer with every truth
    alone = RewardConfig(rule="math", num_workers=0)
    print(f"math rule, one core: {speed(alone, boxes, truths, seconds):.0f} responses/s")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "reward.py"
        path.write_text(FUNCTION)
        custom = RewardConfig(custom_reward_function={"path": str(path)})
        print(f"a function of a file, in workers: {speed(custom, sums, numbers, seconds):.0f} responses/s")


if __name__ == "__main__":
    main()
