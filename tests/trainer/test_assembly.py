"""Requests of a batch of prompts, the padded batch of their results, and validation's figures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from stage_cases import tiny_config

from verl.config import SamplingPlan
from verl.data.loader import PromptDataset, iterate_once
from verl.models.loading import load_tokenizer
from verl.protocol import DataProto
from verl.rollout.protocol import Request, Result
from verl.rollout.seeds import slot_seed
from verl.trainer.loop import evaluate
from verl.trainer.sampling import WIDTH_BUCKET, Sampler


@pytest.fixture
def sampler(tmp_path: Path, tiny_model_dir: Path) -> Sampler:
    settings = {"rollout": {"stop": ["##", "!"], "stop_token_ids": [7]}, "data": {"max_response_length": 12}}
    config = tiny_config(tmp_path, tiny_model_dir, settings)
    return Sampler(config.training_sampling, config, load_tokenizer(tiny_model_dir))


def prompts(*texts: str) -> DataProto:
    return DataProto.from_dict(
        non_tensors={
            "uid": [f"train:{i}:tiny:{i}" for i in range(len(texts))],
            "prompt_ids": [list(text.encode()) for text in texts],
        }
    )


def result(request: Request, text: str, finish: str = "stop") -> Result:
    ids = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    count = len(ids)
    log_probs = -np.arange(1, count + 1, dtype=np.float32)
    return Result(request.slot, ids, log_probs, np.ones(count, bool), np.zeros(count, np.int32), finish)  # type: ignore[arg-type]


def test_b085_requests_stand_by_prompt_and_have_seeds_of_their_own(sampler: Sampler) -> None:
    requests = sampler.requests(prompts("ab", "xyz"))
    assert [(r.slot.uid, r.slot.index) for r in requests] == [
        (f"train:{p}:tiny:{p}", i) for p in range(2) for i in range(3)
    ]
    assert [r.prompt_ids for r in requests] == [[97, 98]] * 3 + [[120, 121, 122]] * 3
    assert len({r.sampling.seed for r in requests}) == 6
    assert requests[4].sampling.seed == slot_seed(1, "train:1:tiny:1", 1)
    first = requests[0].sampling
    assert (first.max_new_tokens, first.stop, first.stop_token_ids) == (12, ("##", "!"), (7,))


def test_assemble_pads_left_and_right_and_keeps_rows_together(sampler: Sampler) -> None:
    drawn = prompts("ab", "xyz")
    requests = sampler.requests(drawn)
    texts = ["one", "", "three", "4444", "fi", "sixsixsix"]
    batch = sampler.assemble(drawn, [result(r, t) for r, t in zip(requests, texts, strict=True)])
    width, response_width = batch.batch["prompts"].shape[1], batch.batch["responses"].shape[1]
    assert (width, response_width) == (WIDTH_BUCKET, 2 * WIDTH_BUCKET)
    for row, text in enumerate(texts):
        prompt = [97, 98] if row < 3 else [120, 121, 122]
        attention = batch.batch["attention_mask"][row]
        assert batch.batch["prompts"][row, width - len(prompt) :].tolist() == prompt
        assert batch.batch["responses"][row, : len(text)].tolist() == list(text.encode())
        assert attention.tolist() == (
            [0] * (width - len(prompt)) + [1] * (len(prompt) + len(text)) + [0] * (response_width - len(text))
        )
        assert batch.batch["response_mask"][row].tolist() == [True] * len(text) + [False] * (response_width - len(text))
        assert batch.batch["rollout_log_probs"][row, : len(text)].tolist() == [-(t + 1) for t in range(len(text))]
        positions = batch.batch["position_ids"][row][attention.bool()]
        assert positions.tolist() == list(range(len(prompt) + len(text)))
    assert torch.equal(batch.batch["input_ids"], torch.cat([batch.batch["prompts"], batch.batch["responses"]], 1))
    assert batch.non_tensor_batch["index"].tolist() == [0, 1, 2] * 2
    assert batch.non_tensor_batch["response_text"].tolist() == texts
    assert batch.batch["rollout_log_probs"].dtype == torch.float32  # B047: never bf16


def test_b005_b006_masks_are_of_the_engines_lengths_whatever_the_ids(sampler: Sampler) -> None:
    """Neither the end token's id nor the padding's says where a response ends; lengths 3, 3, 8 (cut) and 1."""
    drawn, pad, eos = prompts("a"), sampler.tokenizer.pad_token_id, sampler.tokenizer.eos_token_id
    sampler = replace(sampler, plan=SamplingPlan(n=5, temperature=1.0, top_p=1.0, top_k=-1))
    kept = [[5, 6, 7], [5, 6, eos], [5, 6, 7, 8, 9, 10, 11, 12], [eos], [5, pad, eos, pad]]
    results = [
        replace(result(request, "x" * len(ids)), response_ids=np.array(ids, np.int32))
        for request, ids in zip(sampler.requests(drawn), kept, strict=True)
    ]
    batch = sampler.assemble(drawn, results)
    width = batch.batch["prompts"].shape[1]
    expected = [[column < len(ids) for column in range(8)] for ids in kept]
    assert batch.batch["response_mask"].tolist() == expected
    assert batch.batch["attention_mask"][:, width:].bool().tolist() == expected
    assert [row[: len(ids)] for row, ids in zip(batch.batch["responses"].tolist(), kept, strict=True)] == kept


class Merging:
    """A tokenizer that would write what was sampled as [1, 2] with one token, and 0 as nothing."""

    pad_token_id = 9

    def __call__(self, text: str) -> list[int]:
        return [3] if text == "ab" else [" ab".index(c) for c in text]

    encode = __call__

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        special = "" if skip_special_tokens else "<s>"
        return "".join({0: special, 1: "a", 2: "b", 3: "ab"}[i] for i in ids)


@pytest.mark.parametrize("ids", [[1, 2], [1, 0, 2]])
def test_b093_b094_what_is_trained_are_the_tokens_that_were_sampled(sampler: Sampler, ids: list[int]) -> None:
    """However its text would be tokenized again, and with the special tokens that the text lacks."""
    sampler = replace(sampler, tokenizer=Merging(), plan=SamplingPlan(n=1, temperature=1.0, top_p=1.0, top_k=-1))  # type: ignore[arg-type]
    drawn = prompts("a")
    (request,) = sampler.requests(drawn)
    sampled = replace(result(request, "x" * len(ids)), response_ids=np.array(ids, np.int32))
    batch, count = sampler.assemble(drawn, [sampled]), len(ids)
    assert batch.non_tensor_batch["response_text"].tolist() == ["ab"]
    assert batch.batch["responses"][0].tolist() == ids + [9] * (WIDTH_BUCKET - count)
    assert batch.batch["response_mask"][0].tolist() == [True] * count + [False] * (WIDTH_BUCKET - count)
    assert batch.batch["rollout_log_probs"][0, :count].tolist() == [-1.0, -2.0, -3.0][:count]


def test_the_text_for_the_reward_ends_before_the_stop_string(sampler: Sampler) -> None:
    drawn = prompts("a")
    requests = sampler.requests(drawn)
    results = [
        result(requests[0], "yes!no##"),
        result(requests[1], "cut ## here", "length"),
        result(requests[2], "plain"),
    ]
    batch = sampler.assemble(drawn, results)
    assert batch.non_tensor_batch["response_text"].tolist() == ["yes", "cut ## here", "plain"]
    assert batch.batch["response_mask"].sum(1).tolist() == [8, 11, 5]  # the tokens stay, all of them


class Recorded:
    """Engine and scorer: a response of as many tokens as the number in the prompt, 1 point where it is 0."""

    def __init__(self) -> None:
        self.asked: list[Request] = []

    def generate(self, requests: list[Request], prompts: DataProto | None = None) -> list[Result]:
        self.asked += requests
        return [result(request, "x") for request in requests]

    def score(self, batch: DataProto) -> DataProto:
        points = [float(source_row == 0) for source_row in batch.non_tensor_batch["row_index"]]
        return DataProto.from_dict(
            {
                "token_level_scores": torch.zeros(batch.batch["responses"].shape),
                "scored": torch.ones(len(batch)).bool(),
            },
            {"score": points},
        )


@pytest.mark.parametrize("batch_size", [None, 1, 2, 4, 5, 9])
def test_b071_every_validation_row_counts_once(tmp_path: Path, tiny_model_dir: Path, batch_size: int | None) -> None:
    """Five rows, scores [1, 0, 0, 0, 0]: 0.2, whatever the batches."""
    config = tiny_config(tmp_path, tiny_model_dir)
    tokenizer = load_tokenizer(tiny_model_dir)
    dataset = PromptDataset.load(config.data.train_files, config.data, tokenizer, 5)
    both = Recorded()
    roles = type("R", (), {"rollout": both, "scorer": both})
    greedy = Sampler(config.validation_sampling, config, tokenizer)
    metrics, batches = evaluate(dataset, batch_size, roles, greedy, 7)  # type: ignore[arg-type]
    assert metrics == {"val-core/tiny/reward/mean@1": 0.2}
    assert sum(map(len, batches)) == len(both.asked) == len({request.slot for request in both.asked}) == 5
    assert {request.slot.uid.split(":")[1] for request in both.asked} == {"7"}
    assert all(request.sampling.temperature == 0.0 for request in both.asked)


def test_b086_validation_has_its_own_number_of_responses(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Training n=3, validation n=2: the mean over all, the best per prompt; no accuracy where there is none."""
    config = tiny_config(tmp_path, tiny_model_dir, {"rollout": {"val_kwargs": {"n": 2, "temperature": 0.5}}})
    plan = config.validation_sampling
    assert plan == SamplingPlan(0.5, 1.0, -1, 2)
    dataset = PromptDataset.load(config.data.train_files, config.data, load_tokenizer(tiny_model_dir), 3)
    sampler = Sampler(plan, config, load_tokenizer(tiny_model_dir))
    (drawn,) = iterate_once(dataset, None)
    requests = sampler.requests(drawn)
    assert len(requests) == 6 and len(sampler.assemble(drawn, [result(r, "x") for r in requests])) == 6
