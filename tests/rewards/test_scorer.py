"""Scores on batches: where they land, what counts, what a failure is (B007, B008, B057, B064, B102, B126)."""

from __future__ import annotations

import asyncio
import math
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.config import RewardConfig
from verl.data.rows import PromptRow
from verl.errors import DataError, RewardError
from verl.protocol import DataProto
from verl.rewards.results import check_result
from verl.rewards.scorer import RuleScorer, place_scores


def batch_of(texts, truths=None, lengths=None, width=5, source="openai/gsm8k", extras=None) -> DataProto:
    rows = len(texts)
    lengths = lengths or [3] * rows
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    return DataProto.from_dict(
        tensors={"responses": torch.zeros(rows, width, dtype=torch.int64), "response_mask": mask},
        non_tensors={
            "response_text": list(texts),
            "data_source": [source] * rows,
            "ground_truth": list(truths or ["1"] * rows),
            "extra_info": list(extras or [{} for _ in range(rows)]),
        },
        meta_info={},
    )


@pytest.fixture
def scorer_of(tmp_path: Path):
    def make(body: str, **fields) -> RuleScorer:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(body))
        return RuleScorer(RewardConfig(custom_reward_function={"path": str(path)}, num_workers=0, **fields))

    return make


def by_text(results: str) -> str:
    """A reward file whose function evaluates the response."""
    return f"""
    import numpy as np, torch
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        {results}
    """


EVAL = by_text("return eval(solution_str)")


def test_scores_land_on_the_last_token():
    batch = batch_of(["#### 1", "#### 1", "#### 2"], lengths=[3, 5, 1])
    out = RuleScorer(RewardConfig()).score(batch)
    expected = torch.zeros(3, 5)
    expected[0, 2] = expected[1, 4] = 1
    assert torch.equal(out.batch["token_level_scores"], expected)
    assert out.batch["token_level_scores"].dtype == torch.float32
    assert out.batch["scored"].tolist() == [True, True, True]
    assert out.non_tensor_batch["score"].tolist() == [1.0, 1.0, 0.0]


def test_an_empty_response_is_unscored_and_nothing_is_written_into_padding():
    out = RuleScorer(RewardConfig()).score(batch_of(["#### 1", "#### 1"], lengths=[0, 2], width=3))
    assert out.batch["token_level_scores"].tolist() == [[0, 0, 0], [0, 1, 0]]
    assert out.batch["scored"].tolist() == [False, True]
    assert out.meta_info["metrics"] == {
        "reward/scored": 1, "reward/none": 0, "reward/invalid": 0, "reward/failed": 0, "reward/empty": 1,
    }  # fmt: skip


def test_a_mask_with_holes_ends_at_its_last_trained_token():
    mask = torch.tensor([[True, False, True, False]])
    assert place_scores([2.5], mask).tolist() == [[0, 0, 2.5, 0]]
    with pytest.raises(ValueError, match="no response token"):
        place_scores([1.0], torch.zeros(1, 4, dtype=torch.bool))


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 6), st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=8))
def test_the_sum_over_a_row_is_its_score(rows):
    mask = torch.arange(6)[None, :] < torch.tensor([length for length, _ in rows])[:, None]
    values = [value if length else None for length, value in rows]
    placed = place_scores(values, mask)
    assert placed.sum(1).tolist() == [value or 0.0 for value in values]
    assert not placed[~mask].any()


def test_a_zero_reward_is_a_score():
    out = RuleScorer(RewardConfig()).score(batch_of(["no answer"]))
    assert out.batch["scored"].tolist() == [True] and out.non_tensor_batch["score"][0] == 0.0


@pytest.mark.parametrize(
    ("result", "value", "outcome"),
    [
        (1, 1.0, "scored"), (True, 1.0, "scored"), (False, 0.0, "scored"), (np.float32(0.5), 0.5, "scored"),
        (np.int64(-2), -2.0, "scored"), (np.bool_(True), 1.0, "scored"), (torch.tensor(0.25), 0.25, "scored"),
        (np.array(3.0), 3.0, "scored"), ({"score": 1, "acc": 0}, 1.0, "scored"),
        (None, None, "none"), ({"score": None}, None, "none"),
        (math.nan, None, "invalid"), (math.inf, None, "invalid"), (-math.inf, None, "invalid"), ("1", None, "invalid"),
        ([1.0], None, "invalid"), (np.array([1.0]), None, "invalid"), ({"acc": 1}, None, "invalid"),
        ({"score": "1"}, None, "invalid"), ({"score": math.nan}, None, "invalid"), (1j, None, "invalid"),
        (10**400, None, "invalid"), (1e39, None, "invalid"), (b"1", None, "invalid"),
    ],
)  # fmt: skip
def test_what_counts_as_a_score(result, value, outcome):
    score = check_result(result)
    assert (score.value, score.outcome) == (value, outcome)
    assert (score.reason is not None) == (outcome == "invalid")


def test_unscored_rows_are_counted_and_never_zero(scorer_of):
    texts = ["1", "True", "np.float32(.5)", "None", "float('nan')", "'1'", "float('inf')"]
    out = scorer_of(EVAL).score(batch_of(texts))
    assert out.batch["scored"].tolist() == [True, True, True, False, False, False, False]
    assert out.non_tensor_batch["score"].tolist() == [1.0, 1.0, 0.5, None, None, None, None]
    metrics = out.meta_info["metrics"]
    assert (metrics["reward/scored"], metrics["reward/none"], metrics["reward/invalid"]) == (3, 1, 3)
    assert torch.isfinite(out.batch["token_level_scores"]).all()


def test_an_exception_is_a_counted_failure_not_a_zero(scorer_of):
    out = scorer_of(EVAL).score(batch_of(["1", "1/0", "0", "exit()"]))
    assert out.batch["scored"].tolist() == [True, False, True, False]
    assert out.meta_info["metrics"]["reward/failed"] == 2
    right, first, wrong, second = out.non_tensor_batch["reward_reason"]
    assert right is None and wrong is None
    assert first.startswith("ZeroDivisionError: division by zero (reward.py:") and second.startswith("SystemExit")


def test_too_many_failures_stop_the_run_and_quote_the_first(scorer_of):
    with pytest.raises(RewardError, match=r"(?s)3 of 4 responses.*max_failed_fraction=0\.5.*ZeroDivisionError"):
        scorer_of(EVAL).score(batch_of(["1/0", "float('nan')", "'x'", "1"]))
    with pytest.raises(RewardError, match="1 of 4"):
        scorer_of(EVAL, max_failed_fraction=0.0).score(batch_of(["1", "1", "1", "1/0"]))
    out = scorer_of(EVAL, max_failed_fraction=1.0).score(batch_of(["1/0", "1/0"]))
    assert out.batch["scored"].tolist() == [False, False]


def test_rows_that_were_not_asked_do_not_dilute_the_failing_share(scorer_of):
    with pytest.raises(RewardError, match="2 of 2 responses"):
        scorer_of(EVAL).score(batch_of(["1/0", "1/0", "1", "1", "1"], lengths=[1, 1, 0, 0, 0]))


def test_none_for_every_row_is_no_failure(scorer_of):
    out = scorer_of(EVAL, max_failed_fraction=0.0).score(batch_of(["None", "None"]))
    assert not out.batch["scored"].any()


@pytest.mark.parametrize("reverse", [False, True])
def test_extras_are_the_union_of_all_keys_in_any_order(scorer_of, reverse):
    texts = ["{'score': 1, 'acc': 1, 'pred': '4'}", "{'score': 0, 'acc': np.int64(0)}", "0.5"]
    pred, acc = ["4", None, None], [1, 0, None]
    if reverse:
        texts, pred, acc = texts[::-1], pred[::-1], acc[::-1]
    out = scorer_of(EVAL).score(batch_of(texts))
    columns = out.non_tensor_batch
    assert sorted(name for name in columns if name.startswith("reward_extra/")) == [
        "reward_extra/acc",
        "reward_extra/pred",
    ]
    assert columns["reward_extra/pred"].tolist() == pred and columns["reward_extra/acc"].tolist() == acc
    assert not any(isinstance(value, np.generic) for value in columns["reward_extra/acc"])


def test_extras_that_are_lists_of_equal_length_stay_entries(scorer_of):
    out = scorer_of(EVAL).score(batch_of(["{'score': 1, 'steps': [1, 2]}"] * 2))
    assert out.non_tensor_batch["reward_extra/steps"].shape == (2,)


def test_arguments_arrive_by_keyword_with_kwargs(scorer_of):
    body = """
    def compute_score(extra_info, ground_truth, solution_str, data_source, weight):
        return {"score": weight, "seen": [data_source, solution_str, ground_truth, extra_info]}
    """
    out = scorer_of(body, reward_kwargs={"weight": 0.5}).score(batch_of(["text"], ["truth"], extras=[{"a": 1}]))
    assert out.non_tensor_batch["reward_extra/seen"][0] == ["openai/gsm8k", "text", "truth", {"a": 1}]
    assert out.non_tensor_batch["score"][0] == 0.5


def test_a_function_cannot_change_the_row(scorer_of):
    body = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        extra_info["list"].append(1)
        return len(extra_info["list"])
    """
    shared = {"list": []}
    out = scorer_of(body).score(batch_of(["a", "b"], extras=[shared, shared]))
    assert out.non_tensor_batch["score"].tolist() == [1.0, 1.0] and shared == {"list": []}


ASYNC = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    await asyncio.sleep(0.2)
    if solution_str == "fail":
        raise ValueError("judge is away")
    return float(solution_str)
"""


def test_async_functions_overlap_and_keep_the_order(scorer_of):
    scorer, texts = scorer_of(ASYNC), [str(i) for i in range(16)]
    start = time.perf_counter()
    out = scorer.score(batch_of([*texts, "fail"]))
    assert time.perf_counter() - start < 1.6  # one after the other: 3.4 s
    assert out.non_tensor_batch["score"].tolist() == [float(i) for i in range(16)] + [None]
    assert "judge is away (reward.py:" in out.non_tensor_batch["reward_reason"][16]


def test_async_works_inside_a_running_loop_and_from_callable_objects(scorer_of):
    body = """
    class Score:
        async def __call__(self, data_source, solution_str, ground_truth, extra_info=None):
            return 0.75
    compute_score = Score()
    """

    async def outer(scorer: RuleScorer) -> DataProto:
        return scorer.score(batch_of(["1", "2"]))

    for scorer in (scorer_of(body), scorer_of(ASYNC)):
        out = asyncio.run(outer(scorer))
        assert out.batch["scored"].tolist() == [True, True]


def test_lone_surrogates_reach_the_function_and_come_back(scorer_of):
    body = by_text("return {'score': len(solution_str), 'pred': solution_str}")
    out = scorer_of(body).score(batch_of(["x\ud835y", "fine"]))
    assert out.non_tensor_batch["score"].tolist() == [3.0, 4.0]
    assert out.non_tensor_batch["reward_extra/pred"][0] == "x\ud835y"
    assert RuleScorer(RewardConfig()).score(batch_of(["\ud835 #### 1"])).non_tensor_batch["score"][0] == 1.0


# --- which rule


def test_rules_by_name_and_by_source():
    batch = batch_of([r"\boxed{1}"], source="anything")
    assert RuleScorer(RewardConfig(rule="boxed")).score(batch).non_tensor_batch["score"][0] == 1.0
    with pytest.raises(RewardError, match="belongs to this data source"):
        RuleScorer(RewardConfig()).score(batch)


def rows_of(*sources: str, **columns) -> list[PromptRow]:
    return [PromptRow("p", source, "t", {"split": "x"}, i, columns) for i, source in enumerate(sources)]


def test_sources_are_checked_before_the_run(scorer_of):
    with pytest.raises(RewardError, match="my/data"):
        RuleScorer(RewardConfig()).check_rows(rows_of("openai/gsm8k", "my/data"))
    RuleScorer(RewardConfig()).check_rows(rows_of("openai/gsm8k", "reasoning_gym/chain_sum"))
    RuleScorer(RewardConfig(rule="exact_match")).check_rows(rows_of("my/data"))
    scorer_of(EVAL).check_rows(rows_of("my/data"))


def test_reward_kwargs_of_rules():
    config = RewardConfig(rule="gsm8k", reward_kwargs={"method": "flexible"})
    assert RuleScorer(config).score(batch_of(["it is 1"])).non_tensor_batch["score"][0] == 1.0
    with pytest.raises(RewardError, match="exact_match does not take method"):
        RuleScorer(RewardConfig(rule="exact_match", reward_kwargs={"method": "strict"}))
    with pytest.raises(RewardError, match="does not take scale"):
        RuleScorer(RewardConfig(reward_kwargs={"scale": 2})).check_rows(rows_of("openai/gsm8k"))


def test_a_truth_that_the_rule_cannot_use_is_a_failure_not_a_wrong_answer():
    out = RuleScorer(RewardConfig()).score(batch_of(["#### 1", "#### 1"], ["1", "one"]))
    assert out.batch["scored"].tolist() == [True, False]
    assert "The ground truth is not a number. value: one" in out.non_tensor_batch["reward_reason"][1]


def test_an_unknown_rule_or_file_is_refused_at_start(tmp_path):
    with pytest.raises(RewardError, match="did you mean gsm8k"):
        RuleScorer(RewardConfig(rule="gsm8"))
    with pytest.raises(RewardError, match="does not exist"):
        RuleScorer(RewardConfig(custom_reward_function={"path": str(tmp_path / "none.py")}))


def test_scores_of_pieces_join_whatever_each_reported(scorer_of):
    scorer, whole = scorer_of(EVAL, max_failed_fraction=1.0), batch_of(["1", "1/0", "{'score': 0, 'acc': 1}", "None"])
    pieces = [scorer.score(piece) for piece in whole.chunk(2)]
    assert DataProto.concat([pieces[0], pieces[0]]).meta_info["metrics"]["reward/failed"] == [1, 1]
    joined = whole.union(scorer.score(whole))
    assert joined.batch["scored"].tolist() == [True, False, True, False]


def test_a_batch_without_its_columns_is_refused_by_name():
    batch = batch_of(["1"]).select(non_tensor_batch_keys=["response_text", "data_source", "extra_info"])
    with pytest.raises(DataError, match="ground_truth"):
        RuleScorer(RewardConfig()).score(batch)


def test_throughput_in_batches():
    text = "Let me think. 16 - 3 - 4 = 9 eggs, which sell for 9 * 2 = $18.\n" * 5
    batch, scorer = batch_of([f"{text}#### {i}" for i in range(4096)]), RuleScorer(RewardConfig())
    start = time.process_time()  # whatever else runs here
    scorer.score(batch)
    assert 4096 / (time.process_time() - start) > 5000  # several times that on a quiet core
