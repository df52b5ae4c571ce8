"""A reward model as a reward: transformers' own scores, the same whatever the batch, read by its own chat template."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForSequenceClassification

from verl.cluster.early_scoring import PROMPT_COLUMNS, EarlyScoring
from verl.config import RewardConfig
from verl.config.schema_reward import RewardModelConfig
from verl.errors import ModelError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, load_classifier
from verl.models.packed import pack_rows
from verl.models.policy import ValueModel
from verl.models.tiny import EOS_ID, build_tiny, byte_tokenizer
from verl.protocol import DataProto
from verl.protocol.columns import padded
from verl.rewards.scorer import RuleScorer
from verl.rollout.protocol import Request, Result, SamplingParams, Slot
from verl.training.reward_model import RewardModel

USER, ASSISTANT = 259, 260
TOKENIZER = byte_tokenizer()


@pytest.fixture(scope="module")
def scorer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a random score head, as transformers writes it."""
    folder = build_tiny(tmp_path_factory.mktemp("scorer"), seed=4, hidden_size=32)
    torch.manual_seed(2)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def reward_model(folder: Path, tokenizer: Any = TOKENIZER, alone: bool = False, **settings: Any) -> RewardModel:
    model = ValueModel(load_classifier(folder, torch.float32, attn_implementation=ATTENTION_NAME))
    config = RewardModelConfig(path=str(folder), **settings)
    return RewardModel(model, config, tokenizer, [EOS_ID], TOKENIZER, 2048, alone)


def stock(folder: Path, ids: list[int]) -> float:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    return model(input_ids=torch.tensor([ids])).logits.item()


def batch_of(rows: list[tuple[str, str, str]]) -> DataProto:
    """Rows of (group, question, answer), as they come from the engine."""
    prompts = [[USER, *question.encode(), ASSISTANT] for _, question, _ in rows]
    responses = [[*answer.encode(), EOS_ID] for _, _, answer in rows]
    ids, mask = padded(responses)
    return DataProto.from_dict(
        tensors={"responses": ids, "attention_mask": torch.cat([padded(prompts, left=True)[1], mask], 1).long()},
        non_tensors={
            "prompt_ids": prompts,
            "raw_prompt": [[{"role": "user", "content": question}] for _, question, _ in rows],
            "response_text": [answer for _, _, answer in rows],
            "uid": [group for group, _, _ in rows],
        },
        meta_info={},
    )


ROWS = [("a", "one", "x"), ("a", "one", "yes and no"), ("b", "a longer question", "12"), ("a", "one", "")]


def test_in_a_process_of_its_own_it_scores_each_group_as_it_finishes(scorer_dir: Path, monkeypatch) -> None:
    asked: list[int] = []
    scored = RewardModel._score
    monkeypatch.setattr(RewardModel, "_score", lambda self, rows: asked.append(len(rows)) or scored(self, rows))
    config = RewardConfig(model={"path": str(scorer_dir)})
    whole = scored_batch(ROWS)
    expected = RuleScorer(config, model=reward_model(scorer_dir)).score(whole).batch["token_level_scores"]
    with closing(RuleScorer(config, model=reward_model(scorer_dir, alone=True))) as scorer:
        early = EarlyScoring(scorer, TOKENIZER)
        columns = whole.non_tensor_batch
        slots = list(map(Slot, columns["uid"], columns["index"]))
        prompts = whole.select_idxs([0, 2]).select(batch_keys=[], non_tensor_batch_keys=PROMPT_COLUMNS)
        early.expect([Request(slot, [1], SamplingParams(8)) for slot in slots], prompts)
        ids = [np.array([*answer.encode(), EOS_ID], np.int32) for _, _, answer in ROWS]
        results = [Result(s, i, i.astype(np.float32), i > 0, i, "stop") for s, i in zip(slots, ids, strict=True)]
        early.finished(results[1:])
        assert not scorer._begun.keys() - {("", "b", 0, (*b"12", EOS_ID))}, "of the other group one is still sampled"
        early.finished(results[:1])
        found = scorer.score(whole).batch["token_level_scores"]
        assert torch.equal(found, expected) and asked == [4, 1, 3]
        early.expect([Request(slots[2], [1], SamplingParams(8))], prompts[1:])
        early.finished(results[2:3])
        whole.batch["responses"][2, 2] = 7  # sampled anew: the same text, as read, but not the same ids
        again = scorer.score(whole).batch["token_level_scores"]
        assert torch.equal(again[[0, 1, 3]], expected[[0, 1, 3]]) and again[2, 2] != expected[2, 2]


def scored_batch(rows: list[tuple[str, str, str]]) -> DataProto:
    batch = batch_of(rows)
    mask = batch.batch["attention_mask"][:, -batch.batch["responses"].shape[1] :].bool()
    columns = {"data_source": ["s"] * len(rows), "ground_truth": ["1"] * len(rows), "extra_info": [{}] * len(rows)}
    index = [[other for other, _, _ in rows[:i]].count(group) for i, (group, _, _) in enumerate(rows)]
    return batch.union(DataProto.from_dict({"response_mask": mask}, columns | {"index": index}))


def values(model: RewardModel, batch: DataProto) -> list[float]:
    scores = model.score(batch)
    assert all(score.outcome == "scored" for score in scores)
    return [score.value for score in scores if score.value is not None]


def test_scores_are_those_of_transformers(scorer_dir: Path) -> None:
    found = values(reward_model(scorer_dir), batch_of(ROWS))
    texts = [[USER, *question.encode(), ASSISTANT, *answer.encode(), EOS_ID] for _, question, answer in ROWS]
    expected = [stock(scorer_dir, ids) for ids in texts]
    assert found == pytest.approx(expected, abs=1e-5) and len(set(found)) == len(ROWS)


@settings(max_examples=8)
@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.text("xyz ", max_size=20)), min_size=1, max_size=6),
    st.integers(40, 120),
)
def test_law_2_a_score_stands_alone(scorer_dir: Path, drawn: list[tuple[str, str]], budget: int) -> None:
    rows = [(group, f"question of {group}", answer) for group, answer in drawn]
    alone = [values(reward_model(scorer_dir), batch_of([row]))[0] for row in rows]
    assert values(reward_model(scorer_dir, max_token_len_per_gpu=budget), batch_of(rows)) == alone


def test_a_model_with_another_template_reads_by_its_own(scorer_dir: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    found = values(reward_model(scorer_dir, tokenizer), batch_of(ROWS[:1]))
    assert found == pytest.approx([stock(scorer_dir, [*b"user: one\nassistant: x\n", EOS_ID])], abs=1e-5)


def test_long_texts_are_cut_on_the_side_that_is_asked_for(scorer_dir: Path) -> None:
    whole = [USER, *b"one", ASSISTANT, *b"yes and no", EOS_ID]
    for side, part in (("left", whole[-6:]), ("right", whole[:6])):
        found = values(reward_model(scorer_dir, max_length=6, truncation=side), batch_of(ROWS[1:2]))
        assert found == pytest.approx([stock(scorer_dir, part)], abs=1e-5), side


def test_a_row_that_its_template_refuses_fails_and_is_no_zero(scorer_dir: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% if messages|length == 2 %}{{ raise_exception('not today') }}{% endif %}hello"
    scores = reward_model(scorer_dir, tokenizer).score(batch_of(ROWS[:2]))
    assert [(score.value, score.outcome) for score in scores] == [(None, "failed")] * 2
    assert "not today" in str(scores[0].reason)


def test_only_models_with_one_score_are_reward_models(scorer_dir: Path, tiny_model_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a sequence-classification model"):
        load_classifier(tiny_model_dir, torch.float32)
    with pytest.raises(ModelError, match="not a decoder language model"):
        load_causal_lm(scorer_dir, torch.float32)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=3)
    model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="gives 3 scores, not one"):
        load_classifier(tmp_path, torch.float32)


def test_a_critic_starts_from_the_score_head(scorer_dir: Path, tiny_model_dir: Path) -> None:
    """Its values are the scores of the text so far; from a causal model they are 0."""
    scorer = ValueModel(load_classifier(scorer_dir, torch.float32, attn_implementation=ATTENTION_NAME))
    plain = ValueModel(load_causal_lm(tiny_model_dir, torch.float32, attn_implementation=ATTENTION_NAME))
    packed = pack_rows([[1, 2, 3]], [[4, 5]], 2)
    expected = [stock(scorer_dir, [1, 2, 3]), stock(scorer_dir, [1, 2, 3, 4])]
    assert scorer(packed).tolist() == pytest.approx(expected, abs=1e-5)
    assert plain(packed).tolist() == [0.0, 0.0]
