"""Several rewards at once: weights, routing by source, None, failures, and what is tried again (B015, B125, B126)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_scorer import batch_of, rows_of

from verl.algorithms.metric import reduce_metrics
from verl.config import RewardConfig, load_config
from verl.errors import ConfigError, RewardError
from verl.rewards.results import Score
from verl.rewards.scorer import RuleScorer, combined
from verl.trainer.group_metrics import batch_metrics, graded_rows, validation_metrics

EVAL = "def compute_score(data_source, solution_str, ground_truth): return eval(solution_str)\n"
LENGTH = "def compute_score(data_source, solution_str, ground_truth): return {'score': len(solution_str), 'acc': 0.5}\n"


@pytest.fixture
def scorer_of(tmp_path: Path):
    def make(functions: dict, **fields) -> RuleScorer:
        for name, entry in functions.items():
            if "path" in entry:
                (tmp_path / f"{name}.py").write_text(entry["path"])
                entry["path"] = str(tmp_path / f"{name}.py")
        return RuleScorer(RewardConfig(functions=functions, num_workers=0, **fields))

    return make


def extra(out, name: str) -> list:
    return out.non_tensor_batch["reward_extra/" + name].tolist()


def test_scores_are_added_by_weight_and_each_is_kept(scorer_of):
    scorer = scorer_of({"right": {"rule": "gsm8k"}, "length": {"path": LENGTH, "weight": -0.25}})
    out = scorer.score(batch_of(["#### 1", "#### 22"]))
    assert out.non_tensor_batch["score"].tolist() == [1 - 0.25 * 6, -0.25 * 7]
    assert extra(out, "right") == [1.0, 0.0] and extra(out, "length") == [6.0, 7.0]
    assert extra(out, "right/pred") == extra(out, "pred") == ["1", "22"]
    assert extra(out, "acc") == [0.5, 0.5]
    assert out.batch["token_level_scores"].sum(1).tolist() == [-0.5, -1.75]


def test_b015_none_does_not_count_and_a_failure_leaves_the_sum_unknown():
    weights = {"f1": 1.0, "f2": 2.0}
    none, failed = Score(None, "none"), Score(None, "failed", reason="no")
    f1, f2 = [1.0, 0.0, 1.0, 0.0], [Score(0.2, "scored"), none, Score(0.4, "scored"), failed]
    sums = [combined({"f1": Score(a, "scored"), "f2": b}, weights) for a, b in zip(f1, f2, strict=True)]
    assert [score.value for score in sums] == [1.4, 0.0, 1.8, None]
    assert (sums[3].outcome, sums[3].reason) == ("failed", "f2: no") and sums[3].extras["f1"] == 0.0
    assert combined({"f1": none, "f2": none}, weights).outcome == "none"
    logged_only = {"f1": 1.0, "f2": 0.0}
    assert combined({"f1": Score(1.0, "scored"), "f2": failed}, logged_only).value == 1.0
    assert combined({"f1": none, "f2": Score(1.0, "scored")}, logged_only).outcome == "none"
    huge = {"f1": Score(3e38, "scored"), "f2": Score(3e38, "scored")}
    assert combined(huge, weights).outcome == "invalid"


def test_rewards_are_for_their_sources_only(scorer_of):
    functions = {
        "exact": {"rule": "exact_match", "data_sources": ["my/*"]},
        "number": {"rule": "number", "data_sources": "gsm8k"},
        "length": {"path": LENGTH, "weight": 0},
    }
    scorer = scorer_of(functions)
    batch = batch_of(["1", "it is 1"])
    batch.non_tensor_batch["data_source"][:] = ["my/data", "gsm8k"]
    out = scorer.score(batch)
    assert out.non_tensor_batch["score"].tolist() == [1.0, 1.0]
    assert extra(out, "exact") == [1.0, None] and extra(out, "number") == [None, 1.0]
    assert out.meta_info["metrics"]["reward/exact/scored"] == 1
    assert out.meta_info["metrics"]["reward/length/scored"] == 2
    del functions["length"]
    scorer = scorer_of(functions)
    scorer.check_rows(rows_of("my/data", "gsm8k"))
    with pytest.raises(RewardError, match=r"(?s)is for this data source.*value: other.*exact: my/\*"):
        scorer.check_rows(rows_of("my/data", "other"))


def test_each_is_logged_apart_over_the_rows_that_it_scored(scorer_of):
    scorer = scorer_of({"right": {"rule": "gsm8k"}, "mine": {"path": EVAL}})
    batch = batch_of(["None", "1", "1"])
    batch = batch.union(scorer.score(batch))
    rows, width = batch.batch["response_mask"].shape
    for name in ("token_level_rewards", "advantages", "returns"):
        batch.batch[name] = torch.zeros(rows, width)
    batch.batch["prompts"] = torch.zeros(rows, 2, dtype=torch.int64)
    batch.batch["attention_mask"] = torch.ones(rows, 2 + width, dtype=torch.int64)
    batch.non_tensor_batch["finish_reason"] = batch.non_tensor_batch["data_source"]
    numbers = reduce_metrics(batch_metrics(batch, 8))
    assert numbers["critic/reward/mine/mean"] == 1.0 and numbers["critic/reward/right/max"] == 0.0
    assert sum(name.startswith("critic/reward/") for name in numbers) == 6
    assert numbers["reward/mine/none"] == 1 and numbers["reward/mine/scored"] == 2


def test_several_rewards_are_logged_apart_in_validation():
    functions = {"right": {"rule": "gsm8k", "data_sources": "a"}, "long": {"rule": "length", "kwargs": {"least": 2}}}
    scorer = RuleScorer(RewardConfig(functions=functions, num_workers=0))
    batch = batch_of(["#### 1", "2", "#### 2"])
    batch.non_tensor_batch["data_source"][:] = ["a", "a", "b"]
    for name in ("uid", "finish_reason"):
        batch.non_tensor_batch[name] = batch.non_tensor_batch["data_source"]
    batch.batch["attention_mask"] = batch.batch["response_mask"].long()
    assert validation_metrics(graded_rows(batch.union(scorer.score(batch))), 1) == {
        "val-core/a/reward/mean@1": 1.0,
        "val-aux/a/right/mean@1": 0.5,
        "val-aux/a/long/mean@1": 0.5,
        "val-core/b/reward/mean@1": 1.0,
        "val-aux/b/long/mean@1": 1.0,
    }


COUNTED = """
seen = {}
def compute_score(data_source, solution_str, ground_truth):
    seen[solution_str] = seen.get(solution_str, 0) + 1
    if seen[solution_str] < int(solution_str):
        raise ConnectionError("judge is away")
    return float(seen[solution_str])
"""


def test_on_error_retry_asks_twice_more_and_stop_stops_at_the_first(tmp_path):
    (tmp_path / "r.py").write_text(COUNTED)
    custom = {"path": str(tmp_path / "r.py")}
    scorer = RuleScorer(RewardConfig(custom_reward_function=custom, num_workers=0, on_error="retry"))
    out = scorer.score(batch_of(["1", "2", "3", "4"]))
    assert out.non_tensor_batch["score"].tolist() == [1.0, 2.0, 3.0, None]
    assert out.meta_info["metrics"]["reward/failed"] == 1
    scorer = RuleScorer(
        RewardConfig(custom_reward_function=custom, num_workers=0, on_error="stop", max_failed_fraction=1.0)
    )
    with pytest.raises(RewardError, match=r"(?s)1 of 40 responses \(reward.on_error=stop\).*judge is away"):
        scorer.score(batch_of(["1"] * 39 + ["9"]))


@pytest.mark.parametrize(
    ("functions", "said"),
    [
        ("{a: {rule: gsm8k, wieght: 2}}", "a.wieght is no key"),
        ("{a: {rule: gsm8k, wieght: 2}}", "did you mean weight?"),
        ("{a: {}}", "a must say what it is, once"),
        ("{a: {rule: gsm8k, path: x.py}}", "a must say what it is, once"),
        ("{a: {rule: gsm8k, weight: much}}", "a.weight"),
        ("{a: gsm8k}", "a: Input should be"),
        ("{acc: {rule: gsm8k}}", "cannot be the name"),
        ("{a/b: {rule: gsm8k}}", "cannot be the name"),
    ],
)
def test_entries_are_checked_with_the_configuration(functions, said):
    base = ["data.train_files=[t.parquet]", "model.path=m"]
    with pytest.raises(ConfigError, match="reward.functions") as caught:
        load_config(None, [*base, f"reward.functions={functions}"])
    assert said in str(caught.value)
    with pytest.raises(ConfigError, match="beside them"):
        load_config(None, [*base, "reward.functions={a: {rule: gsm8k}}", "reward.rule=boxed"])
    unweighted = [*base, "reward.functions={a: {rule: gsm8k, weight: 0}}"]
    with pytest.raises(ConfigError, match="the weight of each is 0"):
        load_config(None, unweighted)
    load_config(None, [*unweighted, "reward.model.path=judge"])  # that one's score is the reward


def test_one_setting_of_one_entry_from_the_command_line():
    base = ["data.train_files=[t.parquet]", "model.path=m", "reward.functions.a.rule=gsm8k"]
    parts = load_config(None, [*base, "reward.functions.a.weight=0.5"]).config.reward.parts
    assert parts["a"].rule == "gsm8k" and parts["a"].weight == 0.5
