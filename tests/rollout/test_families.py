"""Every family of decoders: the engine's numbers are the trainer's, and its greedy tokens are transformers' own."""

from __future__ import annotations

import pytest
import torch
from contract import assert_idle, assert_parity, groups, make_engine, random_prompts, run_all
from toy_models import ALL_FAMILIES, EOS, random_lm, random_policy

from verl.rollout.parity import check_parity
from verl.rollout.protocol import Slot


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_bits_are_the_trainers(family: str, dtype: torch.dtype) -> None:
    """Groups, ragged ends, more requests than rows, keys over several blocks, windows shorter than the rows."""
    policy = random_policy(family, dtype)
    requests = groups(random_prompts([1, 30, 260]), 2, lambda i: 3 + (11 * i) % 30, 0.7)
    engine = make_engine(policy, 4)
    results = run_all(engine, requests)
    assert_idle(engine)
    assert_parity(policy, requests, results, 0.7)


def test_experts_are_not_taken_for_proven() -> None:
    """They see as many rows as tokens chose them, so that equal bits in a check may be a coincidence."""
    engine = make_engine(random_policy("gpt_oss", torch.bfloat16), 4)
    report = check_parity(engine, engine.policy, rows=4, longest=12, group_size=2, temperature=1.0)
    assert not report.proven and not report.exact and report.largest < 0.1


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_greedy_is_transformers_greedy(family: str) -> None:
    stock, policy = random_lm(family, attention="eager"), random_policy(family)
    prompts = random_prompts([1, 9, 40], seed=8)
    results = run_all(make_engine(policy, 2), groups(prompts, 1, lambda i: 20, 0.0))
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = stock.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=20,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        assert results[Slot(f"p{i}", 0)].response_ids.tolist() == out[0, len(prompt) :].tolist()
