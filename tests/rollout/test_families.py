"""Every family of decoders: the engine's numbers are the trainer's, and its greedy tokens are transformers' own."""

from __future__ import annotations

import pytest
import torch
from contract import assert_idle, assert_parity, groups, make_engine, random_prompts, run_all
from toy_models import ALL_FAMILIES, EOS, random_lm, random_policy

from verl.rollout.protocol import Slot

# Experts see as many rows as tokens chose them: in float32 their matmuls may differ by a bit between row counts.
EXPERTS = ("gpt_oss", "mixtral")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_bits_are_the_trainers(family: str, dtype: torch.dtype) -> None:
    """Groups, ragged ends, more requests than rows, keys over several blocks, windows shorter than the rows."""
    policy = random_policy(family, dtype)
    requests = groups(random_prompts([1, 30, 260]), 2, lambda i: 3 + (11 * i) % 30, 0.7)
    engine = make_engine(policy, 4)
    results = run_all(engine, requests)
    assert_idle(engine)
    if family in EXPERTS:
        policy.rows = policy.rows.__class__(proven=False)  # the tolerance form of the law
    assert_parity(policy, requests, results, 0.7)


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
