"""Law 3: the engine's log-probs are the trainer's, bit for bit on CPU where the row rule is proven."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from contract import assert_idle, assert_parity, groups, make_engine, random_prompts, run_all
from toy_models import FAMILIES, markov_policy, random_policy, successor_logits

from verl.cluster.start import _agreement
from verl.config.load import build_config
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, load_tokenizer
from verl.models.policy import PolicyModel
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.parity import ParityReport, check_parity, trainer_forward
from verl.rollout.protocol import BIT_PARITY

DTYPES = (torch.float32, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_tiny(family: str, dtype: torch.dtype, temperature: float) -> None:
    """Groups, ragged ends, more requests than rows, keys over several blocks."""
    policy = random_policy(family, dtype)
    engine = make_engine(policy, 5)
    assert BIT_PARITY in engine.capabilities
    requests = groups(random_prompts([1, 30, 260, 120]), 3, lambda i: 3 + (11 * i) % 40, temperature)
    results = run_all(engine, requests)
    assert_idle(engine)
    assert_parity(policy, requests, results, temperature)


@pytest.mark.parametrize(("heads", "kv_heads", "hidden"), [(4, 4, 32), (9, 3, 72), (8, 1, 64), (2, 1, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes_of_heads(heads: int, kv_heads: int, hidden: int, dtype: torch.dtype) -> None:
    policy = random_policy("llama", dtype, num_attention_heads=heads, num_key_value_heads=kv_heads, hidden_size=hidden)
    requests = groups(random_prompts([7, 150]), 3, lambda i: 5 + 9 * i, ignore_eos=True)
    assert_parity(policy, requests, run_all(make_engine(policy, 4), requests), 1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_smollm(smollm_dir: Path, dtype: torch.dtype) -> None:
    """The real model at both temperatures, prompts as they are and one of several key blocks, refilled rows."""
    model = load_causal_lm(smollm_dir, dtype, attn_implementation=ATTENTION_NAME)
    policy, tokenizer = PolicyModel(model), load_tokenizer(smollm_dir)
    engine = EmbeddedEngine(policy, tokenizer, EngineLimits(6))
    texts = ["What is 17 + 25?", "Say hello.", "Numbers: " + " ".join(map(str, range(90)))]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for text in texts
    ]
    assert len(prompts[2]) > 256
    for temperature in (1.0, 0.7):
        requests = groups(prompts, 3, lambda i: 3 + (5 * i) % 13, temperature)
        results = run_all(engine, requests)
        assert len({tuple(r.response_ids.tolist()) for r in results.values()}) > 6
        assert_parity(policy, requests, results, temperature)
    assert_idle(engine)


# --- the check at the start of a run ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_check_at_the_start(dtype: torch.dtype) -> None:
    policy = random_policy("llama", dtype)
    report = check_parity(make_engine(policy, 8), policy, rows=8, longest=300, group_size=4, temperature=0.7)
    assert report.tokens == 8 * 5
    assert report.exact == policy.rows.proven and (report.differing == 0 or not policy.rows.proven)
    assert report.largest < 1e-2


@pytest.mark.parametrize(("rows", "longest", "group_size"), [(1, 1, 1), (1, 2, 8), (5, 6, 2), (3, 512, 1)])
def test_the_check_fits_any_run(rows: int, longest: int, group_size: int) -> None:
    engine = make_engine(random_policy(), 4)
    report = check_parity(engine, engine.policy, rows=rows, longest=longest, group_size=group_size, temperature=1.0)
    assert report.tokens == rows * min(5, longest)
    assert_idle(engine)


def test_the_check_sees_the_longest_row_and_full_rows() -> None:
    engine = make_engine(random_policy(), 6)
    seen: list[int] = []
    lengths: list[int] = []
    submit = engine.submit

    def spy(requests) -> None:  # type: ignore[no-untyped-def]
        submit(requests)
        seen.append(len(requests))
        lengths.extend(len(r.prompt_ids) + r.sampling.max_new_tokens for r in requests)

    engine.submit = spy  # type: ignore[method-assign]
    check_parity(engine, engine.policy, rows=6, longest=200, group_size=4, temperature=1.0)
    assert seen == [6] and max(lengths) == 200


def test_the_check_finds_a_difference() -> None:
    """Of one bit, and of an engine with other weights."""
    policy, other = markov_policy(successor_logits(16, 0.9)), markov_policy(successor_logits(16, 0.899))
    arguments = {"rows": 4, "longest": 9, "group_size": 2, "temperature": 1.0}
    report = check_parity(make_engine(policy), other, **arguments)
    assert not report.exact and report.differing == 20 and 0 < report.largest < 0.02
    engine = make_engine(policy)
    step = engine.step

    def one_bit() -> list:  # type: ignore[type-arg]
        results = step()
        for result in results[:1]:
            result.log_probs[0] = np.nextafter(result.log_probs[0], np.float32(0))
        return results

    engine.step = one_bit  # type: ignore[method-assign]
    report = check_parity(engine, policy, **arguments)
    assert not report.exact and report.differing >= 1 and report.largest < 1e-6


def test_a_report_of_nothing_proves_nothing() -> None:
    assert not ParityReport(0, 0, 0.0).exact
    assert ParityReport(5, 0, 0.0).exact and not ParityReport(5, 1, 1e-9).exact
    assert not ParityReport(5, 0, 0.0, proven=False).exact


def test_trainer_forward_takes_rows_in_order() -> None:
    policy = random_policy()
    requests = groups(random_prompts([4, 6]), 2, lambda i: 2 + i)
    results = run_all(make_engine(policy), requests)
    ordered = [results[r.slot] for r in requests]
    whole = trainer_forward(policy, requests, ordered, 1.0)
    alone = [trainer_forward(policy, [r], [results[r.slot]], 1.0) for r in requests]
    torch.testing.assert_close(whole, torch.cat(alone), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("parity", "said", "exact"),
    [
        (ParityReport(320, 0, 0.0), "agree to the bit (320 log-probs of bfloat16 compared)", True),
        (ParityReport(320, 0, 0.0, proven=False), "agree in the 320 log-probs compared, but not by proof", False),
        (ParityReport(320, 2, 1e-6), "differ in 2 of 320 log-probs on this machine (at most 1e-06 nats)", False),
    ],
)
def test_what_a_run_says_of_it(parity: ParityReport, said: str, exact: bool) -> None:
    lines: list[str] = []
    config = build_config({"data": {"train_files": "x"}, "model": {"path": "x"}})
    assert _agreement(parity, config, lines.append) is exact
    assert said in lines[0]
