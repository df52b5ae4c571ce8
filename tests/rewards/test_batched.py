"""Functions that take a batch, TRL's and OpenRLHF's: what they are told, and what they may return (B125, B126)."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
import torch

from verl.config import RewardConfig
from verl.data.rows import PromptRow
from verl.errors import DataError, RewardError
from verl.protocol import DataProto
from verl.rewards.scorer import RuleScorer

CHAT = [{"role": "user", "content": "hi"}]


def batch_of(texts, *, prompts=None, truths=None, columns=None, extras=None, lengths=None, width=4) -> DataProto:
    rows = len(texts)
    lengths = lengths or [2] * rows
    mask = torch.arange(width)[None, :] < torch.tensor(lengths)[:, None]
    trained = mask.clone()
    trained[:, 0] &= torch.tensor(lengths) < 2  # the first token of longer ones was not sampled by the policy
    return DataProto.from_dict(
        tensors={
            "responses": torch.arange(rows * width).view(rows, width),
            "response_mask": trained,
            "attention_mask": torch.cat([torch.ones(rows, 3, dtype=torch.int64), mask.long()], 1),
        },
        non_tensors={
            "response_text": list(texts),
            "raw_prompt": prompts or ["p"] * rows,
            "prompt_ids": [[70 + i, 80] for i in range(rows)],
            "data_source": ["src"] * rows,
            "ground_truth": truths or ["t"] * rows,
            "extra_info": extras or [{} for _ in range(rows)],
            "columns": columns or [{} for _ in range(rows)],
        },
    )


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


@pytest.fixture
def scorer_of(tmp_path: Path):
    def make(body: str, name: str = "reward", **fields) -> RuleScorer:
        path = tmp_path / "reward.py"
        path.write_text(textwrap.dedent(body))
        return RuleScorer(
            RewardConfig(custom_reward_function={"path": str(path), "name": name}, num_workers=0, **fields), decode
        )

    return make


def returning(expression: str, parameters: str = "completions, **columns") -> str:
    return f"""
    import numpy as np, torch
    nan, inf = float("nan"), float("inf")
    def reward({parameters}):
        return {expression}
    """


# --- what they are told


def test_trl_gets_prompts_completions_ids_and_the_columns_of_the_row(scorer_of):
    body = """
    def reward(prompts, completions, completion_ids, answer, level, data_source, weight, **columns):
        seen = zip(prompts, completions, completion_ids, answer, level, data_source, strict=True)
        return [{"score": weight, "seen": list(row), "others": sorted(columns)} for row in seen]
    """
    batch = batch_of(
        ["one", "two"],
        prompts=[CHAT, "plain"],
        columns=[{"answer": "1"}, {"answer": "2"}],
        extras=[{"level": 3, "split": "a"}, {"level": 4}],
        lengths=[2, 3],
    )
    out = scorer_of(body, reward_kwargs={"weight": 0.5}).score(batch)
    assert out.non_tensor_batch["reward_extra/seen"].tolist() == [
        [CHAT, [{"role": "assistant", "content": "one"}], [0, 1], "1", 3, "src"],
        ["plain", "two", [4, 5, 6], "2", 4, "src"],
    ]
    assert out.non_tensor_batch["reward_extra/others"][0] == ["extra_info", "ground_truth", "split"]
    assert out.non_tensor_batch["score"].tolist() == [0.5, 0.5]


def test_a_column_of_the_file_wins_and_a_row_without_it_has_none(scorer_of):
    body = """
    def reward(completions, ground_truth, level):
        return [{"score": 1, "seen": [g, x]} for g, x in zip(ground_truth, level)]
    """
    batch = batch_of(["a", "b"], columns=[{"ground_truth": "own"}, {}], extras=[{"level": 1}, {}])
    seen = scorer_of(body).score(batch).non_tensor_batch["reward_extra/seen"].tolist()
    assert seen == [["own", 1], ["t", None]]


def test_openrlhf_gets_queries_that_start_with_their_prompts(scorer_of):
    body = """
    def reward_func(queries, prompts, labels):
        return {"rewards": [1.0] * len(queries), "extra_logs": {"seen": list(zip(queries, prompts, labels))}}
    """
    out = scorer_of(body, "reward_func").score(batch_of(["one", "two"], truths=["1", "2"]))
    assert out.non_tensor_batch["reward_extra/seen"].tolist() == [("FPone", "FP", "1"), ("GPtwo", "GP", "2")]


def test_empty_responses_are_not_asked_about_and_places_are_kept(scorer_of):
    body = """
    def reward(completions, **columns):
        return [float(len(text)) for text in completions]
    """
    scorer = scorer_of(body)
    out = scorer.score(batch_of(["", "ab", "", "abcd"], lengths=[0, 1, 0, 2]))
    assert out.non_tensor_batch["score"].tolist() == [None, 2.0, None, 4.0]
    assert out.batch["token_level_scores"].tolist() == [[0] * 4, [2, 0, 0, 0], [0] * 4, [0, 4, 0, 0]]
    nobody = scorer.score(batch_of(["", ""], lengths=[0, 0]))
    assert nobody.meta_info["metrics"]["reward/empty"] == 2 and not nobody.batch["scored"].any()


def test_a_batch_function_cannot_change_the_rows(scorer_of):
    body = """
    def reward(completions, extra_info, prompts, **columns):
        for info, prompt in zip(extra_info, prompts):
            info["list"].append(1)
            prompt[0]["content"] = "changed"
        return [len(info["list"]) for info in extra_info]
    """
    shared, prompt = {"list": []}, [dict(CHAT[0])]
    out = scorer_of(body).score(batch_of(["a", "b"], extras=[shared, shared], prompts=[prompt, prompt]))
    assert out.non_tensor_batch["score"].tolist() == [1.0, 1.0] and shared == {"list": []} and prompt == CHAT


def test_b130_a_box_in_the_prompt_is_no_answer():
    texts = ["I do not know.", r"\boxed{42}"]
    batch = batch_of(texts, prompts=[r"Answer as in \boxed{42}."] * 2, truths=["42", "42"])
    for rule in ("math", "boxed"):
        assert RuleScorer(RewardConfig(rule=rule, num_workers=0)).score(batch).non_tensor_batch["score"].tolist() == [
            0,
            1,
        ]


def test_async_batch_functions_and_callable_objects(scorer_of):
    body = """
    class Reward:
        async def __call__(self, completions, **columns):
            return [0.5] * len(completions)
    reward = Reward()
    """
    assert scorer_of(body).score(batch_of(["a", "b"])).non_tensor_batch["score"].tolist() == [0.5, 0.5]


def test_the_columns_that_it_asks_for_are_checked_before_the_run(scorer_of):
    scorer = scorer_of("def reward(completions, answer, level, data_source): return []")
    scorer.check_rows([PromptRow("p", "s", "1", {"level": 2}, 0, {"answer": "1", "level": 2})])
    with pytest.raises(RewardError) as caught:
        scorer.check_rows([PromptRow("p", "s", "1", {}, 0, {"answers": "1"})])
    said = str(caught.value)
    assert "asks for answer, level" in said and "answers, data_source" in said
    batch = batch_of(["a"])
    kept = [name for name in batch.non_tensor_batch if name != "columns"]
    with pytest.raises(DataError, match="'columns' is missing"):
        scorer.score(batch.select(non_tensor_batch_keys=kept))


# --- what they may return


@pytest.mark.parametrize(
    "expression",
    ["[0, 1, 2, 3]", "(0, 1, 2, 3)", "np.arange(4)", "torch.arange(4.0)", "[np.float32(i) for i in range(4)]",
     '{"rewards": torch.arange(4.0), "scores": None}'],
)  # fmt: skip
def test_a_list_as_long_as_the_batch(scorer_of, expression):
    out = scorer_of(returning(expression)).score(batch_of(["a"] * 4))
    assert out.non_tensor_batch["score"].tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("parameters", ["completions, **columns", "queries, prompts, labels"])
@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("[1.0]", "1 values for 4"), ("[1.0] * 5", "5 values for 4"), ("[]", "0 values for 4"),
        ("torch.ones(3)", "3 values for 4"), ("1.0", "no list for 4 responses"), ("None", "no list for 4 responses"),
        ("torch.tensor(1.0)", "no list for 4"), ("torch.ones(4, 1)", "no list for 4"), ("'abcd'", "no list for 4"),
        ('{"score": 1.0}', "no list for 4"), ('{"rewards": 1.0}', "no list for 4"),
        ('{"rewards": [1.0] * 3}', "3 values for 4"), ("iter([1, 1, 1, 1])", "no list for 4"),
        ('{"rewards": [1] * 4, "extra_logs": {"len": [1, 2]}}', "2 values for 4"),
        ('{"rewards": [1] * 4, "extra_logs": [1]}', '"extra_logs" is no dict'),
    ],
)  # fmt: skip
def test_b125_anything_else_is_refused_with_both_lengths(scorer_of, parameters, expression, said):
    scorer = scorer_of(returning(expression, parameters), max_failed_fraction=1.0)
    with pytest.raises(RewardError) as caught:
        scorer.score(batch_of(["a"] * 4))
    assert said in str(caught.value) and "reward in " in str(caught.value) and "reward.py" in str(caught.value)


def test_b126_each_entry_is_a_score_or_is_not(scorer_of):
    out = scorer_of(returning("[1, True, np.float32(.5), None, nan, '1', inf]")).score(batch_of(["a"] * 7))
    assert out.non_tensor_batch["score"].tolist() == [1.0, 1.0, 0.5, None, None, None, None]
    assert out.batch["scored"].tolist() == [True] * 3 + [False] * 4
    metrics = out.meta_info["metrics"]
    assert (metrics["reward/scored"], metrics["reward/none"], metrics["reward/invalid"]) == (3, 1, 3)
    assert torch.isfinite(out.batch["token_level_scores"]).all()


def test_openrlhf_extras(scorer_of):
    result = (
        '{"rewards": torch.tensor([1.0, 2.0]), "scores": [0.1, 0.2], "extra_logs": {"n": torch.tensor([3, 4]), "v": 5}}'
    )
    out = scorer_of(returning(result, "queries, prompts, labels")).score(batch_of(["a", "b"]))
    columns = out.non_tensor_batch
    assert columns["score"].tolist() == [1.0, 2.0] and columns["reward_extra/scores"].tolist() == [0.1, 0.2]
    assert columns["reward_extra/n"].tolist() == [3, 4] and columns["reward_extra/v"].tolist() == [5, 5]
    assert type(columns["reward_extra/n"][0]) is int


def test_a_failing_call_fails_every_response_and_zeroes_none(scorer_of):
    body = returning("[1 / 0 for _ in completions]")
    with pytest.raises(RewardError, match=r"(?s)failed for 2 of 2.*ZeroDivisionError: division by zero \(reward\.py:"):
        scorer_of(body).score(batch_of(["a", "b", ""], lengths=[1, 1, 0]))
    out = scorer_of(body, max_failed_fraction=1.0).score(batch_of(["a", "b", ""], lengths=[1, 1, 0]))
    assert not out.batch["scored"].any() and out.non_tensor_batch["score"].tolist() == [None] * 3
    metrics = out.meta_info["metrics"]
    assert (metrics["reward/failed"], metrics["reward/empty"], metrics["reward/scored"]) == (2, 1, 0)
