"""The table of metrics is what runs log: no name that it lacks, and no row that nothing logs."""

from __future__ import annotations

import io
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from stage_cases import WORDS, merged, tiny_config, write_rows

from verl import Trainer
from verl.algorithms.metric import mean_metric, reduce_metrics
from verl.cli import main
from verl.cluster.rollout_pool import RolloutPool
from verl.config import RewardModelTrainingConfig, SftConfig, load_supervised
from verl.rollout.buffer import COUNTS
from verl.tracking.metric_table import PAGE, PARTS_OF, TABLE, names, pattern_of, row_of
from verl.trainer.supervised import train_supervised

ROOT = Path(__file__).parents[2]
BOTH = {"trainer": {"total_training_steps": 2, "save_freq": 1}}
LINEAR = {"type": "linear", "end": 0.1}

# Runs that between them switch on whatever logs something.
RUNS: dict[str, dict[str, Any]] = {
    "ppo": {
        "model": {"dtype": "float16"},
        "algorithm": {"adv_estimator": "gae", "use_kl_in_reward": True},
        "actor": {
            "ppo_mini_batch_size": 2, "clip_ratio_schedule": LINEAR, "policy_loss": {"loss_mode": "decoupled"},
            "optimizer_offload": True,
        },
        "trainer": {"val_before_train": True, "test_freq": 1},
        "rollout": {"val_kwargs": {"n": 2, "temperature": 1.0}},
    },
    "grpo": {
        "actor": {"use_kl_loss": True, "kl_loss_coef_schedule": LINEAR, "entropy_coeff": 0.01,
                  "entropy_coeff_schedule": LINEAR},
        "rollout": {"response_length": {"mode": "adaptive"}},
        "reward": {"length_normalization": {"alpha": 0.5}, "length_penalty": 0.1, "scaling": "batch", "clip": 5.0},
        "algorithm": {
            "rollout_correction": {"rollout_is": "token", "rollout_rs": "token_k1", "rollout_rs_threshold": 2.0}
        },
    },
    "dapo": {
        "algorithm": {"filter_groups": {"enable": True, "metric": "score", "max_num_gen_batches": 9}},
        "reward": {
            "overlong_buffer": {"enable": True, "len": 2}, "custom_reward_function": {"path": None},
            "functions": {"letters": {"path": "reward.py"}, "more": {"path": "reward.py", "weight": 0.5}},
        },
    },
    "one_step_off": {
        "trainer": {"mode": "one_step_off"},
        "algorithm": {"rollout_correction": {"rollout_is": "sequence", "rollout_is_threshold": [0.5, 2.0]}},
    },
    "remax": {
        "algorithm": {"adv_estimator": "remax"},
        "actor": {"policy_loss": {"loss_mode": "clip_cov"}},
    },
}  # fmt: skip

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": len(set(solution_str)), "acc": float("a" in solution_str), "pred": solution_str[:1]}
"""


def logged(folder: Path) -> set[str]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {name for line in lines for name in line} - {"step", "time"}


def pool_metrics() -> set[str]:
    """What a pool of rollout workers says, without the processes."""
    pool, worker = object.__new__(RolloutPool), "rollout worker 1"
    stats = SimpleNamespace(oldest_wait=0.0, counts=Counter(), in_flight={worker: 0}, idle_share={worker: 0.5})
    pool._dispatcher = SimpleNamespace(stats=lambda now: stats)
    pool._changed = threading.Condition()
    pool._crew = SimpleNamespace(members={worker: SimpleNamespace(memory=1)})
    pool._waited, pool._counted = 0.0, Counter()
    return set(pool.metrics())


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[dict[str, set[str]]]:
    """Names by run."""
    found = {}
    monkeypatch = pytest.MonkeyPatch()
    for name, settings in RUNS.items():
        folder = tmp_path_factory.mktemp(name)
        held_out = {"data": {"val_files": str(write_rows(folder / "val.jsonl", 2))}} if name == "ppo" else {}
        config = tiny_config(folder, tiny_model_dir, merged(BOTH, settings), held_out)
        (folder / "reward.py").write_text(REWARD)
        monkeypatch.chdir(folder)
        Trainer(config, display="quiet").fit()
        found[name] = logged(folder / "run")
        if name == "grpo":  # what a run keeps of its tokens, by the weights of the first update
            rows = [json.loads(line) for line in (folder / "run/samples/step_000002.jsonl").read_text().splitlines()]
            assert all(row["versions"] == [1, 1] for row in rows)
            kept = [row["tokens"] for row in rows if "tokens" in row]
            assert len(kept) == 2 and all(one["version"] == 1 and one["change_from"] == "the reference" for one in kept)
    for kind, schema in (("sft", SftConfig), ("reward_model", RewardModelTrainingConfig)):
        folder = tmp_path_factory.mktemp(kind)
        rows = [{"question": word, "answer": "ok", "prompt": word, "chosen": "aa", "rejected": "b"} for word in WORDS]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = dict.fromkeys(("data.train_files", "data.val_files"), str(folder / "rows.jsonl"))
        more = {
            "data.train_batch_size": 4,
            "data.max_length": 32,
            "model.path": str(tiny_model_dir),
            "model.dtype": "float16",
        }
        trainer = {"trainer.default_local_dir": str(folder / "run"), "trainer.device": "cpu", "trainer.save_freq": 1}
        config = load_supervised(schema, None, files | more | trainer)[0]
        train_supervised(config, Console(file=io.StringIO()))
        found[kind] = logged(folder / "run")
    found["rollout workers"] = set(COUNTS) | pool_metrics()
    found["not finite"] = set(reduce_metrics({"actor/entropy": mean_metric(torch.tensor([1.0, torch.nan]))}))
    monkeypatch.undo()
    yield found


def test_every_logged_name_is_in_the_table(found: dict[str, set[str]]) -> None:
    unknown = {run: sorted(name for name in names if row_of(name) is None) for run, names in found.items()}
    assert {run: names for run, names in unknown.items() if names} == {}


def test_every_row_is_logged_by_some_run(found: dict[str, set[str]]) -> None:
    """And each choice of ``{a,b}`` with some choice of the others."""
    everything = set().union(*found.values())
    silent = []
    for row in (row for rows in TABLE.values() for row in rows):
        for choices in [part for part in PARTS_OF.split(row.name) if part.startswith("{")] or [""]:
            for choice in choices[1:-1].split(","):
                narrowed = row.name.replace(choices, choice, 1) if choices else row.name
                if not any(pattern_of(narrowed).fullmatch(name) for name in everything):
                    silent.append(narrowed)
    assert silent == []


def test_no_name_has_two_rows() -> None:
    plain = [name for name in names() if "<" not in name]
    rows = [row for group in TABLE.values() for row in group if row.name != "<metric>/skipped"]
    assert {name: [row.name for row in rows if pattern_of(row.name).fullmatch(name)] for name in plain} == {
        name: [row_of(name).name]
        for name in plain  # type: ignore[union-attr]
    }


def test_rows_are_whole() -> None:
    for row in (row for group in TABLE.values() for row in group):
        assert row.meaning and row.formula and row.unit and row.healthy, row
        assert row.healthy == "any" or row.otherwise, row.name


def test_the_page_is_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8") == page, "make docs"
    assert page.count("\n| `") == sum(map(len, TABLE.values())) > 90
    assert main(["metrics", "reference", "--out", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "page.md").read_text(encoding="utf-8") == page
    assert main(["metrics", "explain", "val-core/openai/gsm8k/acc/mean@4", "actor/grad_norm"]) == 0
    said = capsys.readouterr().out
    assert "Held-out score" in said and "Gradient before clipping" in said and "otherwise:" in said
    assert main(["metrics", "explain", "actor/gradnorm"]) == 2
    assert "did you mean actor/grad_norm?" in capsys.readouterr().err


def test_what_the_report_draws_in_one_chart_has_one_unit() -> None:
    script = (ROOT / "verl" / "tracking" / "page" / "curves.js").read_text()
    drawn = [re.findall(r'one\("([^"]+)"', chart) for chart in re.split(r"\n  add\(", script)[1:]]
    assert ["actor/kl_loss", "actor/reward_kl_penalty", "actor/ppo_kl"] in drawn and len(drawn) > 15
    for chart in drawn:
        assert len({row.unit for name in chart if (row := row_of(name)) is not None}) <= 1, chart
