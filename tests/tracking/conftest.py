"""A run folder made up for the tests: its numbers come from a formula, no model was trained."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from verl.run_dir import RunDir, write_atomic
from verl.tracking.samples import SampleRow, write_samples

HOSTILE = '</script><script>document.title="ran"</script><img src=x onerror=document.title="ran"><!-- <script '

CONFIG = """\
model:
  path: synthetic/made-up-model
algorithm:
  adv_estimator: grpo
trainer:
  experiment_name: synthetic
  total_training_steps: 40
"""


def made_up_metrics(step: int, total: int, rng: random.Random) -> dict[str, float]:
    progress = 1 / (1 + math.exp(-8 * (step / total - 0.4)))
    gen, process, update = 4 + rng.random(), 1.2 + 0.3 * rng.random(), 7 + rng.random()
    return {
        "critic/score/mean": 0.06 + 0.6 * progress + rng.uniform(-0.06, 0.06),
        "response_length/mean": 14 - 6 * progress + rng.random(),
        "response_length/clip_ratio": 0.3 * (1 - progress),
        "actor/ppo_kl": 1e-4 * rng.random(),
        "actor/kl_loss": 0.02 * progress + 0.002 * rng.random(),
        "actor/entropy": 1.6 - 1.1 * progress + 0.05 * rng.random(),
        "actor/grad_norm": 1.2 + rng.random(),
        "actor/pg_clipfrac": 0.02 * rng.random(),
        "actor/lr": 1e-5,
        "timing_s/gen": gen,
        "timing_s/reward": 0.1,
        "timing_s/old_log_prob": process,
        "timing_s/update_actor": update,
        "timing_s/step": gen + process + update + 0.4,
        "perf/throughput": 1500 + 100 * rng.random(),
        "perf/total_num_tokens": 20_000.0 + step,
    }


def made_up_rows(step: int, split: str, prompts: int, n: int, rng: random.Random) -> list[SampleRow]:
    rows = []
    for k in range(prompts):
        a, b = rng.randint(1, 99), rng.randint(1, 99)
        for index in range(n):
            right = (step + k + index) % 3 == 0
            rows.append(
                SampleRow(
                    split=split,
                    uid=f"{split}:{step * prompts + k}:sums:{k}",
                    index=index,
                    prompt=f"<|im_start|>user\nWhat is {a} + {b}?<|im_end|>\n<|im_start|>assistant\n",
                    response=f"The answer is {a + b if right else a + b + 1}.",
                    ground_truth=str(a + b),
                    score=float(right),
                    advantage=0.97 if right else -0.97,
                    data_source="reasoning_gym/chain_sum",
                    finish_reason="stop",
                    response_length=9,
                    versions=[step - 1, step - 1],
                    extras={"format": 1.0},
                )
            )
    return rows


def write_made_up_run(folder: Path, total: int = 40, validate_every: int = 10) -> RunDir:
    rng = random.Random(0)
    run = RunDir(folder).create()
    write_atomic(run.config, CONFIG)
    lines = [{"step": 0, "time": 1_700_000_000.0, "val-core/reasoning_gym/chain_sum/acc/mean@1": 0.08}]
    for step in range(1, total + 1):
        line = {"step": step, "time": 1_700_000_000.0 + 14 * step} | made_up_metrics(step, total, rng)
        write_samples(run, step, "train", made_up_rows(step, "train", 4, 8, rng))
        if validate_every and step % validate_every == 0:
            line["val-core/reasoning_gym/chain_sum/acc/mean@1"] = 0.08 + 0.5 * step / total
            write_samples(run, step, "val", made_up_rows(step, "val", 8, 1, rng))
        lines.append(line)
    hostile = SampleRow(
        "train",
        f"train:x:{HOSTILE}",
        0,
        f"Say it: {HOSTILE}",
        f"needle {HOSTILE}",
        HOSTILE,
        0.25,
        extras={"why": HOSTILE},
    )
    write_samples(run, total, "train", [hostile, *made_up_rows(total, "train", 4, 8, rng)])
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run.log_event("resumed", "checkpoints/step_000020", "from step 20", step=20)
    run.log_event("worker_died", f"rollout 1 {HOSTILE}", {"exit": -9, "retried": 4}, step=31)
    return run


@pytest.fixture(scope="session")
def make_run() -> Callable[..., RunDir]:
    """``make_run(folder, total=40, validate_every=10)``"""
    return write_made_up_run


@pytest.fixture
def hostile() -> str:
    """Text that would run a script if it were ever taken for markup."""
    return HOSTILE


@pytest.fixture
def synthetic_run(tmp_path: Path) -> RunDir:
    return write_made_up_run(tmp_path / "run")
