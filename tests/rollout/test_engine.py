"""The embedded engine: what it samples, when it stops, and that no neighbour, order or interruption changes it."""

from __future__ import annotations

import math
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import (
    PieceTokenizer,
    assert_contract,
    assert_idle,
    assert_parity,
    groups,
    log_probs_of,
    make_engine,
    random_prompts,
    request,
    run,
    run_all,
    same_results,
)
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from toy_models import EOS, FAMILIES, markov_policy, random_policy, same_numbers, successor_logits

from verl.errors import EngineError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, load_tokenizer
from verl.models.policy import PolicyModel
from verl.models.tiny import build_tiny
from verl.rollout.embedded import EmbeddedEngine
from verl.rollout.parity import trainer_forward
from verl.rollout.protocol import Request, Result, Resume, SamplingParams, Slot, generate
from verl.rollout.seeds import slot_seed, uniforms

DTYPES = (torch.float32, torch.bfloat16)


def ids_of(results: dict[Slot, Result]) -> dict[Slot, list[int]]:
    return {slot: result.response_ids.tolist() for slot, result in results.items()}


# --- what is sampled ----------------------------------------------------------------------------------------------


def test_draw_k_belongs_to_position_k() -> None:
    """A Markov chain, sampled again here in float64 from the same uniform numbers."""
    table = torch.randn(12, 12, generator=torch.Generator().manual_seed(6)) * 2
    requests = [request("a", k, [3, k], 20, 0.8) for k in range(5)]
    results = run_all(make_engine(markov_policy(table), 3), requests)
    for r in requests:
        last, expected, log_probs = r.prompt_ids[-1], [], []
        draws = uniforms(np.full(20, r.sampling.seed, dtype=np.uint64), np.arange(20))
        for u in draws.tolist():
            p = torch.softmax(table[last].double() / 0.8, 0)
            last = int((p.cumsum(0) > u).nonzero()[0, 0])
            expected.append(last)
            log_probs.append(math.log(p[last]))
        assert results[r.slot].response_ids.tolist() == expected
        assert results[r.slot].log_probs.tolist() == pytest.approx(log_probs, abs=1e-5)


def test_no_two_samples_are_alike_and_each_comes_again() -> None:
    """B088: uniform over 100 tokens, 8 of them, n = 4 on each of two engines."""
    policy = markov_policy(torch.zeros(100, 100))

    def sampled(uid: str, run_seed: int = 1) -> list[list[int]]:
        found = []
        for engine_indices in (range(0, 4), range(4, 8)):
            requests = [request(uid, k, [1, 2], 8, run_seed=run_seed) for k in engine_indices]
            found += [r.response_ids.tolist() for r in generate(make_engine(policy), requests)]
        return found

    first = sampled("train:0:sums:5")
    assert len({tuple(ids) for ids in first}) == 8
    assert sampled("train:0:sums:5") == first
    for other in (sampled("train:1:sums:5"), sampled("train:0:sums:5", run_seed=2)):
        assert not {tuple(ids) for ids in other} & {tuple(ids) for ids in first}


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_is_transformers_greedy(family: str, tmp_path: Path) -> None:
    """Token for token, with prompts of many lengths running beside each other."""
    folder = build_tiny(tmp_path / family, seed=3, family=family, hidden_size=32, tie_embeddings=False)
    stock = load_causal_lm(folder, torch.float32, attn_implementation="eager")
    ours = load_causal_lm(folder, torch.float32, attn_implementation=ATTENTION_NAME)
    with torch.no_grad():
        for model in (stock, ours):  # far from uniform, so that the likeliest token is one
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.mul_(10 if "embed" not in name and "wte" not in name else 5)
    engine = make_engine(PolicyModel(ours), 4, tokenizer=load_tokenizer(folder))
    prompts = random_prompts([1, 2, 9, 30, 33, 64], 256, seed=8)
    results = run_all(engine, groups(prompts, 1, lambda i: 24, 0.0))
    distinct = set()
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        out = stock.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False)
        expected = out[0, len(prompt) :].tolist()
        assert results[Slot(f"p{i}", 0)].response_ids.tolist() == expected
        distinct |= set(expected)
    assert len(distinct) > 10
    assert_idle(engine)


def test_greedy_forms() -> None:
    """B089, B090: temperature 0 and top_k 1 are greedy, and the log-probs of temperature 0 are untempered."""
    policy = random_policy()
    prompts = random_prompts([4, 7])
    zero = run_all(make_engine(policy), groups(prompts, 2, lambda i: 10, 0.0))
    one = run_all(make_engine(policy), groups(prompts, 2, lambda i: 10, 0.5, top_k=1))
    assert ids_of(zero) == ids_of(one)
    ordered = groups(prompts, 2, lambda i: 10, 0.0)
    plain = trainer_forward(policy, ordered, [zero[r.slot] for r in ordered], 1.0)
    same_numbers(log_probs_of(zero[r.slot] for r in ordered), plain, policy)
    sampled = run_all(make_engine(policy), groups(prompts, 2, lambda i: 10, 1.0, top_k=None))
    assert ids_of(sampled) != ids_of(zero) and all(r.kept_log_mass is None for r in sampled.values())


def test_kept_mass_comes_with_truncated_sampling() -> None:
    table = torch.tensor([2.0, 1.0, 0.0, -30.0]).repeat(4, 1)  # B042's three tokens and one that is never drawn
    results = run_all(make_engine(markov_policy(table)), [request("a", k, [0], 30, top_p=0.9) for k in range(3)])
    for result in results.values():
        assert set(result.response_ids.tolist()) == {0, 1}
        assert result.kept_log_mass is not None
        assert result.kept_log_mass.tolist() == pytest.approx([-0.094344] * 30, abs=1e-5)
        full = {0: -0.407606, 1: -1.407606}
        assert result.log_probs.tolist() == pytest.approx([full[i] for i in result.response_ids.tolist()], abs=1e-5)


def test_requests_of_all_kinds_run_side_by_side() -> None:
    """B090: each with its own parameters."""
    policy = random_policy()
    kinds = [(0.0, {}), (1.0, {}), (0.6, {"top_k": 3}), (1.3, {"top_p": 0.8}), (1.0, {"top_k": 0}), (1e-6, {})]
    requests = [request("a", k, [1, 2, 3], 12, t, **more) for k, (t, more) in enumerate(kinds)]
    together = run_all(make_engine(policy), requests)
    for r in requests:
        same_results({r.slot: together[r.slot]}, run_all(make_engine(policy), [r]), policy)
        assert np.isfinite(together[r.slot].log_probs).all()
    assert together[Slot("a", 5)].response_ids.tolist() == together[Slot("a", 0)].response_ids.tolist()


# --- when it stops ------------------------------------------------------------------------------------------------

SUCCESSOR = successor_logits(16, 0.9)


def greedy(policy: PolicyModel, prompt: list[int], new: int, tokenizer: PieceTokenizer | None = None, **more) -> Result:  # type: ignore[no-untyped-def]
    return generate(make_engine(policy, tokenizer=tokenizer), [request("a", 0, prompt, new, 0.0, **more)])[0]


def test_the_end_token_is_kept() -> None:
    """B006: the tokenizer's end token, which may be its pad token too; in the prompt it ends nothing."""
    policy = markov_policy(SUCCESSOR)
    result = greedy(policy, [6, 5], 10, PieceTokenizer(eos_token_id=6))
    assert (result.response_ids.tolist(), result.finish_reason) == ([6], "stop")
    result = greedy(policy, [6, 3], 10, PieceTokenizer(eos_token_id=6))
    assert (result.response_ids.tolist(), result.finish_reason) == ([4, 5, 6], "stop")
    assert result.loss_mask.tolist() == [True] * 3
    assert result.log_probs.tolist() == pytest.approx([math.log(0.9)] * 3, abs=1e-5)


def test_end_tokens_of_the_model() -> None:
    """Those that it is given; neither the tokenizer's own nor the loaded configuration's default."""
    policy = markov_policy(SUCCESSOR)
    policy.model.config.eos_token_id = 4
    engine = EmbeddedEngine(policy, PieceTokenizer(eos_token_id=14), end_tokens=[5, 9])
    result = generate(engine, [request("a", 0, [3], 10, 0.0)])[0]
    assert (result.response_ids.tolist(), result.finish_reason) == ([4, 5], "stop")
    result = generate(engine, [request("a", 0, [3], 10, 0.0, ignore_eos=True)])[0]
    assert (len(result.response_ids), result.finish_reason) == (10, "length")


def test_cut_at_the_limit() -> None:
    """B092: exactly the sampled ids, no end token put in."""
    result = greedy(markov_policy(SUCCESSOR), [3], 3, PieceTokenizer(eos_token_id=7))
    assert (result.response_ids.tolist(), result.finish_reason) == ([4, 5, 6], "length")
    result = greedy(markov_policy(SUCCESSOR), [3], 4, PieceTokenizer(eos_token_id=7))
    assert (result.response_ids.tolist(), result.finish_reason) == ([4, 5, 6, 7], "stop")
    assert greedy(markov_policy(SUCCESSOR), [3], 1).response_ids.tolist() == [4]


def test_stop_ids_and_strings() -> None:
    """B091."""
    policy = markov_policy(SUCCESSOR)
    result = greedy(policy, [3], 10, stop_token_ids=(6, 5))
    assert (result.response_ids.tolist(), result.finish_reason) == ([4, 5], "stop")
    text = PieceTokenizer(["a", "EN", "D!", "b"])
    result = greedy(policy, [15], 10, text, stop=("END",))
    assert (result.response_ids.tolist(), result.finish_reason) == ([0, 1, 2], "stop")
    assert len(result.log_probs) == len(result.versions) == len(result.loss_mask) == 3
    result = greedy(policy, [15], 3, text, stop=("END",))  # stop and limit at the same token
    assert (result.response_ids.tolist(), result.finish_reason) == ([0, 1, 2], "stop")
    result = greedy(policy, [0, 1], 2, text, stop=("END",))  # the prompt is no part of it
    assert (result.response_ids.tolist(), result.finish_reason) == ([2, 3], "length")


def test_a_stop_string_over_an_interruption() -> None:
    """Aborted after every token of "a", "EN", "D!" and gone on with elsewhere: as if it had never been interrupted."""
    policy, text = markov_policy(SUCCESSOR), PieceTokenizer(["a", "EN", "D!", "b"])
    asked = request("a", 0, [15], 10, 0.0, stop=("END",))
    for tokens in (1, 2):
        first, second = (make_engine(policy, tokenizer=text) for _ in "ab")
        first.submit([asked])
        for _ in range(tokens):
            assert first.step() == []
        (part,) = first.abort()
        assert part.response_ids.tolist() == [0, 1][:tokens]
        resume = Resume(part.response_ids, part.log_probs, part.versions)
        (result,) = generate(second, [Request(asked.slot, asked.prompt_ids, asked.sampling, resume)])
        assert (result.response_ids.tolist(), result.finish_reason) == ([0, 1, 2], "stop")


def test_prompts_at_the_model_s_limit() -> None:
    """B095: 16 positions, prompts of 15, 16 and 17 tokens, 8 new ones asked for, and one that fits beside them."""
    engine = make_engine(markov_policy(SUCCESSOR, positions=16))
    requests = [request("p", n, [n % 16] * n, 8, 0.0) for n in (15, 16, 17, 4)]
    results = generate(engine, requests)
    assert [(r.finish_reason, len(r.response_ids)) for r in results] == [
        ("length", 1),
        ("refused", 0),
        ("refused", 0),
        ("length", 8),
    ]
    assert results[0].response_ids.tolist() == [0] and results[3].response_ids.tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert_idle(engine)


# --- neither neighbours nor order nor interruptions change a result ------------------------------------------------


def mixed_requests(seed: int = 0) -> list[Request]:
    """Groups over prompts of many lengths, at two temperatures, with ragged limits; some end by themselves."""
    prompts = random_prompts([3, 17, 1, 140, 40], seed=seed)
    cool = [request("cool", k, prompts[1][::-1], 9, 0.7) for k in range(2)]
    return groups(prompts, 2, lambda i: 1 + (7 * i) % 17) + cool


def renamed(requests: list[Request]) -> list[Request]:
    """The same work under other slots: the seeds stay, so the samples do."""
    return [Request(Slot("other:" + r.slot.uid, r.slot.index), r.prompt_ids, r.sampling) for r in requests]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_batch_composition_does_not_matter(family: str, dtype: torch.dtype) -> None:
    policy = random_policy(family, dtype)
    requests = {r.slot: r for r in mixed_requests()}
    wide = run_all(make_engine(policy, 64), list(requests.values()))
    assert {r.finish_reason for r in wide.values()} == {"stop", "length"}
    shuffled = list(requests.values())
    random.Random(1).shuffle(shuffled)
    for max_num_seqs, budget in ((1, 8192), (3, 50), (16, 8192)):
        engine = make_engine(policy, max_num_seqs, budget)
        same_results(run_all(engine, shuffled), wide, policy)
        assert_idle(engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_aborts_of_others_and_new_weights_that_are_the_same(dtype: torch.dtype) -> None:
    policy = random_policy("llama", dtype)
    requests = mixed_requests()
    expected = run_all(make_engine(policy, 64), requests)
    engine = make_engine(policy, 5)
    others = renamed(requests)
    engine.submit([r for pair in zip(others, requests, strict=False) for r in pair])
    found: dict[Slot, Result] = {}
    for step in range(400):
        if step == 12:
            found |= {r.slot: r for r in engine.abort([r.slot for r in others])}
        if step in (3, 9, 20):
            engine.load_weights(step + 1, policy.model.state_dict().items() if step == 9 else ())
        found |= {r.slot: r for r in engine.step()}
    assert_idle(engine)
    assert any(found[r.slot].finish_reason == "abort" for r in others)
    same_results({r.slot: found[r.slot] for r in requests}, expected, policy)
    versions = np.concatenate([found[r.slot].versions for r in requests])
    assert set(versions.tolist()) == {0, 4, 10, 21}
    for r in others:  # what an aborted one had sampled is the beginning of what it would have
        part, whole = found[r.slot], expected[Slot(r.slot.uid.removeprefix("other:"), r.slot.index)]
        assert part.response_ids.tolist() == whole.response_ids[: len(part.response_ids)].tolist()
        same_numbers(log_probs_of([part]), log_probs_of([whole])[: len(part.response_ids)], policy)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_paused_response_goes_on_elsewhere(family: str, dtype: torch.dtype) -> None:
    policy = random_policy(family, dtype)
    requests = [
        Request(r.slot, r.prompt_ids, SamplingParams(30, 0.9, 0.95, seed=r.sampling.seed)) for r in mixed_requests()
    ]
    expected = run_all(make_engine(policy, 16), requests)
    first, second = make_engine(policy, 4), make_engine(policy, 7)
    first.load_weights(3)
    first.submit(requests)
    parts: dict[Slot, Result] = {}
    for _ in range(25):
        parts |= {r.slot: r for r in first.step()}
    first.pause()
    assert first.step() == []
    parts |= {r.slot: r for r in first.abort()}
    assert_idle(first)
    assert len(parts) == len(requests) and {"abort", "stop"} <= {p.finish_reason for p in parts.values()}
    second.load_weights(8)
    second.submit(
        [
            Request(r.slot, r.prompt_ids, r.sampling, Resume(p.response_ids, p.log_probs, p.versions, p.kept_log_mass))
            for r in requests
            if (p := parts[r.slot]).finish_reason == "abort"
        ]
    )
    resumed = run(second)
    same_results(parts | resumed, expected, policy)
    for slot, result in resumed.items():
        before = len(parts[slot].response_ids)
        assert result.versions.tolist() == [3] * before + [8] * (len(result.versions) - before)
        mass, whole = result.kept_log_mass, expected[slot].kept_log_mass
        assert mass is not None and whole is not None
        same_numbers(torch.from_numpy(mass), torch.from_numpy(whole), policy)


def test_metrics_of_shared_prompts() -> None:
    """4 prompts of 20 tokens, each computed by the first of its 3 responses, are used again by the other two."""
    engine = make_engine(random_policy(), 16)
    before = engine.stats()
    idle = {"rollout/waiting": 0.0, "rollout/active": 0.0, "rollout/kv_blocks_used": 0.0}
    assert before.metrics(before) == idle | {"rollout/preemptions": 0.0, "rollout/prefix_reuse": 0.0}
    run_all(engine, groups(random_prompts([20] * 4), 3, lambda i: 2 + i))
    found = engine.stats()
    # The last token of a prompt is fed again by whoever samples behind it, one at a time.
    assert found.metrics(before) == idle | {
        "rollout/preemptions": 0.0,
        "rollout/prefix_reuse": pytest.approx(152 / 232),
    }
    assert replace(before, preemptions=3).metrics(before)["rollout/preemptions"] == 3.0
    assert before.metrics(found) == idle | {
        "rollout/preemptions": 0.0,
        "rollout/prefix_reuse": 0.0,
    }  # it left, another came


def test_pause_holds_everything_and_resume_goes_on() -> None:
    policy = random_policy()
    requests = mixed_requests()
    expected = run_all(make_engine(policy, 4), requests)
    engine = make_engine(policy, 4)
    engine.submit(requests[:5])
    found = {r.slot: r for _ in range(4) for r in engine.step()}
    engine.pause()
    before = engine.stats()
    engine.submit([*requests[5:], request("too", 0, range(600), 4)])  # queued; what cannot run is said at once
    assert [r.finish_reason for r in engine.step()] == ["refused"]
    assert engine.step() == []
    after = engine.stats()
    assert (after.active, after.decode_tokens) == (before.active, before.decode_tokens)
    engine.resume()
    same_results(found | run(engine), expected, policy)


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_do_not_matter(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small steps run on one thread; on all of them they give the same."""
    policy = random_policy("llama", dtype)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        alone = run_all(make_engine(policy, 16), mixed_requests())
        assert torch.get_num_threads() == 2
        monkeypatch.setattr("verl.rollout.embedded.ONE_THREAD", 0)
        same_results(run_all(make_engine(policy, 16), mixed_requests()), alone, policy)
    finally:
        torch.set_num_threads(before)


def test_a_paused_engine_is_not_waited_for() -> None:
    engine = make_engine(markov_policy(SUCCESSOR))
    engine.pause()
    with pytest.raises(EngineError, match="paused"):
        generate(engine, [request("a", 0, [3], 4, 0.0)])
    engine.resume()
    assert generate(engine, [request("a", 0, [3], 4, 0.0)])[0].response_ids.tolist() == [4, 5, 6, 7]


@examples(max_examples=8, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 80), st.integers(3, 7), st.booleans())
def test_any_schedule_gives_what_each_request_gives_alone(
    seed: int, rows: int, budget: int, blocks: int, cached: bool
) -> None:
    """Submit, step, abort, pause, reload at random, in little memory, with a prefix cache or without."""
    rng = random.Random(seed)
    policy, requests, alone = schedule_case()
    engine = tight_engine(policy, blocks, rows, budget, prefix_cache=cached)
    waiting = requests[:]
    rng.shuffle(waiting)
    found: dict[Slot, Result] = {}

    def take(results: list[Result]) -> None:
        for result in results:
            assert result.slot not in found
            found[result.slot] = result

    while waiting or engine.stats().waiting or engine.stats().active:
        action = rng.random()
        if waiting and action < 0.4:
            count = rng.randint(1, 4)
            engine.submit(waiting[:count])
            del waiting[:count]
        elif action < 0.43:
            engine.load_weights(rng.randrange(100))
        elif action < 0.46:
            take(engine.abort([rng.choice(requests).slot]))
        elif action < 0.48:
            engine.pause()
            assert engine.step() == []
            engine.resume()
        else:
            take(engine.step())
    assert_idle(engine)
    assert found.keys() == alone.keys()
    finished = {slot: r for slot, r in found.items() if r.finish_reason != "abort"}
    same_results(finished, {slot: alone[slot] for slot in finished}, policy)
    if policy.rows.proven:
        for slot, result in found.items():
            assert result.response_ids.tolist() == alone[slot].response_ids[: len(result.response_ids)].tolist()


CASE: list[tuple[PolicyModel, list[Request], dict[Slot, Result]]] = []


def schedule_case() -> tuple[PolicyModel, list[Request], dict[Slot, Result]]:
    """Groups that cross borders of blocks, two of them with a common beginning of one block."""
    if not CASE:
        policy = random_policy("llama")
        prompts = random_prompts([2, 122, 260])
        requests = groups([*prompts, prompts[2][:128] + prompts[0]], 2, lambda i: 2 + (5 * i) % 11)
        alone: dict[Slot, Result] = {}
        for r in requests:
            alone |= run_all(make_engine(policy, 1), [r])
        CASE.append((policy, requests, alone))
    return CASE[0]


# --- memory, chunks and shared prompts ------------------------------------------------------------------------------


def gigabytes(policy: PolicyModel, blocks: int) -> float:
    return blocks * make_engine(policy)._pool.block_bytes / 2**30


def tight_engine(policy: PolicyModel, blocks: int, *limits: int, **more: Any) -> EmbeddedEngine:
    engine = make_engine(policy, *limits, kv_cache_gb=gigabytes(policy, blocks), **more)
    assert engine.stats().blocks == blocks
    return engine


@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", DTYPES[0]), ("gpt2", DTYPES[0]), ("llama", DTYPES[1]), ("gemma2", DTYPES[1])]
)
def test_little_memory_changes_nothing(family: str, dtype: torch.dtype) -> None:
    """Responses that outgrow their blocks side by side: some are sent back in the middle and computed again."""
    policy = random_policy(family, dtype)
    requests = groups(random_prompts([100, 122, 250, 3]), 2, lambda i: 12 + (11 * i) % 40, 0.7, ignore_eos=True)
    prompt = random_prompts([90], seed=4)[0]
    requests += [request("more", k, prompt, 50, 0.7, ignore_eos=True) for k in range(3)]
    plenty = make_engine(policy, 16)
    expected = run_all(plenty, requests)
    assert plenty.stats().preemptions == 0
    assert_parity(policy, requests, expected, 0.7)
    for blocks, budget, cached in ((3, 8192, False), (5, 40, True)):
        engine = tight_engine(policy, blocks, 8, budget, prefix_cache=cached)
        engine.submit(requests)
        assert engine.stats().blocks_used == 0
        engine.step()
        assert 0 < engine.stats().blocks_used <= blocks == len(engine._pool.keys[0])
        same_results(run(engine), expected, policy)
        assert engine.stats().preemptions > 0 or blocks == 3
        assert_idle(engine)


@pytest.mark.parametrize("dtype", DTYPES)
def test_prompts_at_the_borders_of_blocks(dtype: torch.dtype) -> None:
    policy = random_policy("llama", dtype, max_position_embeddings=1024)
    prompts = random_prompts([1, 127, 128, 129, 255, 256, 257, 700])
    requests = groups(prompts, 3, lambda i: 1 + (5 * i) % 4, 0.7, ignore_eos=True)
    expected = run_all(make_engine(policy, 24), requests)
    assert_parity(policy, requests, expected, 0.7)
    for rows, budget in ((5, 64), (24, 1)):
        engine = make_engine(policy, rows, budget)
        same_results(run_all(engine, requests), expected, policy)
        assert_idle(engine)


@pytest.mark.parametrize("new", [1, 2])
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_followers_of_a_prompt_of_one_block(heads: int, new: int) -> None:
    """They read the same single block, alone or beside others: B rows, B * G from 1 to 16, of heads of 16."""
    policy = random_policy(num_attention_heads=heads, hidden_size=16 * heads)
    prompts = random_prompts([128, 5, 128])
    for n in (2, 3, 5, 9):
        for chosen in (prompts[:1], prompts[:2], prompts[1:], prompts):
            requests = groups(chosen, n, lambda i: new, ignore_eos=True)
            assert_parity(policy, requests, run_all(make_engine(policy, 32), requests), 1.0)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
@pytest.mark.parametrize("cached", [False, True])
def test_groups_over_prompts_with_a_common_beginning(n: int, cached: bool) -> None:
    policy = random_policy()
    base, other = random_prompts([300, 60], seed=5)
    prompts = [base, base[:150] + other, base[:129], base[:128], base[:128] + other, base[:256], base[:127], other]
    requests = groups(prompts, n, lambda i: 1 + (3 * i) % 8, 0.7, ignore_eos=True)
    engine = make_engine(policy, 20, 310, prefix_cache=cached)
    results = run_all(engine, requests)
    assert_parity(policy, requests, results, 0.7)
    stats = engine.stats()
    fed = sum(len(r.prompt_ids) + len(results[r.slot].response_ids) - 1 for r in requests)
    assert stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens == fed and stats.preemptions == 0
    # Each follower skips all but the last token of its prompt; leaders of later prompts find one block or two.
    followers = (n - 1) * sum(len(prompt) - 1 for prompt in prompts)
    assert stats.reused_tokens >= followers + (3 if cached or n > 1 else 2) * 128
    assert_idle(engine)


def test_a_pool_too_small_for_one_response_is_said_at_once() -> None:
    policy = random_policy()
    with pytest.raises(EngineError, match=r"kv_cache_gb has no room for one response of 300 tokens") as caught:
        tight_engine(policy, 2, longest=300)
    assert caught.value.value == gigabytes(policy, 2)
    advice = float(re.findall(r"at least ([0-9.e-]+)", str(caught.value.fix))[0])
    assert gigabytes(policy, 3) <= advice <= gigabytes(policy, 3) + 0.001
    assert make_engine(policy, kv_cache_gb=advice, longest=300).stats().blocks >= 3  # followed, it helps
    assert tight_engine(policy, 4, longest=9999).stats().blocks == 4  # the model has no more than 512 positions
    with pytest.raises(EngineError, match="kv_cache_gb"):
        make_engine(policy, kv_cache_gb=gigabytes(policy, 1) / 2)


def test_a_pool_larger_than_the_machine_is_refused_before_anything_is_laid_out() -> None:
    with pytest.raises(EngineError, match=r"kv_cache_gb is more than the [0-9.]+ GiB of memory that cpu has") as caught:
        make_engine(random_policy(), kv_cache_gb=1e6)  # a list of its blocks alone would take all memory
    assert caught.value.value == 1e6


def test_what_the_pool_can_never_hold_is_refused_alone() -> None:
    engine = tight_engine(random_policy(), 2)
    results = generate(engine, [request("a", 0, [1] * 200, 57, ignore_eos=True), request("b", 0, [1] * 200, 58)])
    assert [(r.finish_reason, len(r.response_ids)) for r in results] == [("length", 57), ("refused", 0)]
    assert_idle(engine)


def test_memory_of_the_pool() -> None:
    """Without a size: for as many of the longest responses as run at once; held only while something runs."""
    policy = random_policy()
    engine = make_engine(policy, 3, longest=130)
    assert engine.stats().blocks == 6 and not engine._pool.keys
    engine.submit([request("a", 0, [1], 3, ignore_eos=True)])
    engine.step()
    assert engine._pool.keys and engine.stats().blocks_used == 1
    run(engine)
    assert not engine._pool.keys and engine.stats().blocks_used == 0


# --- caches and weights -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_left_overs_reach_nobody(dtype: torch.dtype) -> None:
    """Whatever lies in blocks that nobody uses, and behind the tokens of those in use, is in no response."""
    policy = random_policy("llama", dtype)
    early, late = mixed_requests(1)[:6], mixed_requests(2)
    expected = run_all(make_engine(policy, 64), early + renamed(late))
    engine = make_engine(policy, 4)
    engine.submit(early + renamed(late))
    engine._pool.acquire()
    for tensor in (*engine._pool.keys, *engine._pool.values):
        tensor.fill_(1e4)
    found = {}
    while engine.stats().waiting or engine.stats().active:
        found |= {r.slot: r for r in engine.step()}
        blocks = engine.scheduler.blocks
        for tensor in (*engine._pool.keys, *engine._pool.values):
            tensor[blocks._free] = -3e4
    same_results(found, expected, policy)


@pytest.mark.parametrize("shared", [True, False])
def test_no_prefix_cache_outlives_its_weights(shared: bool) -> None:
    """B106: with the prompt's blocks known, whether the weights are copied or the trainer's own change."""
    policy, new = random_policy(seed=1), random_policy(seed=2)
    requests = groups(random_prompts([5, 128, 300]), 2, lambda i: 8, 0.0, ignore_eos=True)
    prompt = random_prompts([140], seed=3)[0]
    requests += [request("sampled", k, prompt, 8, ignore_eos=True) for k in range(2)]
    engine = make_engine(policy, 8, prefix_cache=True)
    before = run_all(engine, requests)
    first = engine.stats().prefill_tokens
    same_results(run_all(engine, requests), before, policy)  # from the cache
    assert engine.stats().prefill_tokens == first == 5 + 128 + 300 + 140
    engine.submit(renamed(requests))
    parts = {r.slot: r for _ in range(3) for r in engine.step()}
    if shared:
        policy.model.load_state_dict(new.model.state_dict())
        engine.load_weights(1)
    else:
        engine.load_weights(1, new.model.state_dict().items())
    assert not engine._pool.keys and not engine.scheduler.blocks._known
    under_way = parts | run(engine)
    assert all(set(r.versions.tolist()) == {0, 1} for r in under_way.values())
    expected = run_all(make_engine(new, 8), requests)
    assert all(before[slot].response_ids.tolist() != expected[slot].response_ids.tolist() for slot in before)
    for _ in "cold", "warm":
        same_results(run_all(engine, requests), expected, new)
    assert_idle(engine)


def test_no_cache_outlives_its_weights() -> None:
    """B106: the next token follows the new weights, in responses under way as well."""
    policy = markov_policy(successor_logits(16, 0.9))
    engine = make_engine(policy)
    assert generate(engine, [request("a", 0, [3], 4, 0.0)])[0].response_ids.tolist() == [4, 5, 6, 7]
    engine.submit([request("b", 0, [3], 4, 0.0)])
    engine.step()
    engine.step()
    backwards = successor_logits(16, 0.8).T.contiguous()
    engine.load_weights(1, [("lm_head.weight", backwards.T / 4)])
    result = run(engine)[Slot("b", 0)]
    assert result.response_ids.tolist() == [4, 5, 4, 3] and result.versions.tolist() == [0, 0, 1, 1]
    with torch.no_grad():
        policy.model.lm_head.weight.copy_(successor_logits(16, 0.9).T / 4)  # the trainer's own tensors
    engine.load_weights(2)
    result = generate(engine, [request("a", 0, [3], 4, 0.0)])[0]
    assert result.response_ids.tolist() == [4, 5, 6, 7] and result.versions.tolist() == [2] * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_keys_and_values_are_computed_again_under_new_weights(family: str) -> None:
    """Every weight changes in mid-response; the rest is what the new weights say to prompt and response so far."""
    old, new = random_policy(family, seed=1), random_policy(family, seed=2)
    engine = make_engine(old)
    requests = groups(random_prompts([5, 9]), 2, lambda i: 12, ignore_eos=True)
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    engine.load_weights(7, new.model.state_dict().items())
    results = run(engine)
    ordered = [results[r.slot] for r in requests]
    assert [r.versions.tolist() for r in ordered] == [[0] * k + [7] * (12 - k) for k in (5, 4, 5, 4)]
    trainer = trainer_forward(new, requests, ordered, 1.0).view(4, 12)
    same_numbers(log_probs_of(ordered).view(4, 12)[:, 5:], trainer[:, 5:], new)


def test_published_weights_are_checked() -> None:
    policy = random_policy("qwen2", tie_word_embeddings=True)
    engine = make_engine(policy)
    engine.load_weights(1, policy.model.state_dict().items())  # names a tied tensor twice
    with pytest.raises(EngineError, match="lacks") as caught:
        engine.load_weights(2, [("model.other.weight", torch.zeros(1))])
    assert caught.value.value == "model.other.weight"
    with pytest.raises(EngineError, match="do not fit model.norm.weight"):
        engine.load_weights(2, [("model.norm.weight", torch.zeros(1))])
    assert engine.stats().version == 1


def test_broken_weights_are_said_to_be_broken() -> None:
    policy = markov_policy(SUCCESSOR)
    engine = make_engine(policy)
    with torch.no_grad():
        policy.model.lm_head.weight.fill_(math.nan)
    engine.submit([request("a", 0, [1], 4), request("b", 0, [1], 4, 0.0)])
    with pytest.raises(EngineError, match="no finite log-probs"):
        engine.step()


# --- bookkeeping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 2, "max_num_batched_tokens": 50, "prefix_cache": True}])
def test_contract(limits: dict[str, Any]) -> None:
    policy = random_policy()
    assert_contract(lambda: make_engine(policy, **limits), policy, random_prompts([1, 30, 130]))


def test_results_are_what_was_sampled() -> None:
    engine = make_engine(random_policy())
    requests = mixed_requests()
    results = generate(engine, requests)
    assert [r.slot for r in results] == [r.slot for r in requests]
    for result in results:
        length = len(result.response_ids)
        assert result.response_ids.dtype == np.int32 and result.log_probs.dtype == np.float32
        assert result.loss_mask.tolist() == [True] * length and result.versions.tolist() == [0] * length
        assert len(result.log_probs) == length >= 1 and (result.log_probs <= 0).all()
        assert (result.response_ids[:-1] != EOS).all()
        assert (result.finish_reason == "stop") == (result.response_ids[-1] == EOS)
    stats = engine.stats()
    tokens = sum(len(r.response_ids) for r in results)
    fed = sum(len(r.prompt_ids) for r in requests) + tokens - len(requests)  # the last token of each is not
    assert stats.finished == len(requests) and stats.preemptions == stats.blocks_used == 0
    assert stats.prefill_tokens + stats.decode_tokens + stats.reused_tokens == fed
    assert stats.prefill_tokens == 3 + 17 + 140 + 40 + 17  # that of one token is no chunk
    assert_idle(engine)


def test_a_group_prefills_its_prompt_once() -> None:
    engine = make_engine(random_policy())
    generate(engine, groups(random_prompts([30]), 8, lambda i: 2))
    stats = engine.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.reused_tokens) == (30, 7 + 8, 7 * 29)


def test_a_free_row_is_filled_at_once() -> None:
    engine = make_engine(random_policy(), 2)
    engine.submit([request(u, 0, [ord(u) % 32, 2], new, ignore_eos=True) for u, new in (("a", 1), ("b", 9), ("c", 9))])
    assert [r.slot.uid for r in engine.step()] == ["a"]
    assert engine.stats().waiting == 1
    engine.step()
    assert engine.stats().waiting == 0 and engine.stats().active == 2


def test_generate_wants_the_engine_to_itself() -> None:
    engine = make_engine(random_policy())
    engine.submit([request("a", 0, [1], 4)])
    with pytest.raises(EngineError, match="other requests"):
        generate(engine, [request("b", 0, [1], 4)])
    engine.abort()
    assert len(generate(engine, [request("b", 0, [1], 4)])) == 1
    assert generate(engine, []) == []


def test_an_abort_takes_refused_requests_along() -> None:
    engine = make_engine(markov_policy(SUCCESSOR, positions=16))
    engine.submit([request("long", 0, [1] * 20, 4), request("long", 1, [1] * 20, 4), request("a", 0, [1], 4)])
    assert [r.slot.index for r in engine.abort([Slot("long", 1)])] == [1]
    assert [(r.slot.uid, r.finish_reason) for r in engine.abort()] == [("a", "abort"), ("long", "refused")]
    assert engine.step() == []
    assert_idle(engine)


def test_wrong_requests_are_refused_whole() -> None:
    engine = make_engine(random_policy())
    good = request("a", 0, [1], 4)
    for bad in (request("b", 0, [], 4), good):
        with pytest.raises(EngineError):
            engine.submit([good, bad])
        assert_idle(engine)
    assert len(generate(engine, [good])) == 1


def test_the_seed_is_the_slot_s() -> None:
    assert request("u", 2, [1], 4, run_seed=9).sampling.seed == slot_seed(9, "u", 2)
