"""The compiled engine against torch's operators: the same tokens and log-probs, bit for bit, or not in use."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from contract import groups, make_engine, random_prompts, request
from toy_models import has_avx512_bf16, needs_avx512_bf16, random_policy

from verl.errors import EngineError
from verl.models.native import build
from verl.models.native.build import Product, Unavailable, find_product
from verl.models.policy import PolicyModel
from verl.models.rows import PACKED, linear_rows, telling_rows, telling_weight
from verl.rollout import embedded
from verl.rollout.embedded import EmbeddedEngine
from verl.rollout.protocol import Request, Result, generate

VOCABULARY = 544  # not a multiple of a block of draws
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_hidden_layers": 3},
    "qwen2": {},
    "qwen3": {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 64},
    "mistral": {"sliding_window": 40},
}


def policy_of(family: str) -> PolicyModel:
    return random_policy(family, torch.bfloat16, **SIZES | FAMILIES[family])


def requests() -> list[Request]:
    """Prompts that cross blocks, groups, greedy and tempered rows, and lengths that end one after the other."""
    prompts = random_prompts([5, 125, 130, 61, 300], VOCABULARY - 1)
    sampled = groups(prompts, 4, lambda i: 3 + i % 13, ignore_eos=True)
    tempered = groups(prompts[:2], 2, lambda i: 9, 0.6, run_seed=2, ignore_eos=True)
    greedy = [request("greedy", 0, prompts[1], 12, 0.0, ignore_eos=True)]
    return sampled + [replaced(one, f"t-{one.slot.uid}") for one in tempered] + greedy


def replaced(one: Request, uid: str) -> Request:
    return request(uid, one.slot.index, one.prompt_ids, one.sampling.max_new_tokens, one.sampling.temperature)


def same(found: list[Result], expected: list[Result]) -> None:
    others = {result.slot: result for result in expected}
    for result in found:
        other = others.pop(result.slot)
        assert list(result.response_ids) == list(other.response_ids)
        assert np.array_equal(result.log_probs, other.log_probs)
    assert not others


def compiled(policy: PolicyModel, **limits: Any) -> EmbeddedEngine:
    engine = make_engine(policy, 24, **limits)
    assert engine._native is not None and engine._native_head is not None, engine.eager_because
    return engine


@needs_avx512_bf16
@pytest.mark.parametrize("family", FAMILIES)
def test_bits_of_the_operators(family: str) -> None:
    policy = policy_of(family)
    engine = compiled(policy)
    same(generate(engine, requests()), generate(make_engine(policy, 24, eager=True), requests()))
    assert engine.stats().blocks_used == 0


@needs_avx512_bf16
@pytest.mark.parametrize("limit", [1024, 40, 0])
def test_prompts_in_chunks_beside_responses(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places are taken again as responses end: new prompts are computed, by either, beside tokens that decode."""
    monkeypatch.setattr(embedded, "COMPILED_TOKENS", limit)
    policy = policy_of("llama")
    expected = generate(make_engine(policy, 24, eager=True), requests())
    same(generate(make_engine(policy, 5, 70), requests()), expected)


@needs_avx512_bf16
def test_any_number_of_threads_and_rows() -> None:
    policy = policy_of("llama")
    expected = generate(make_engine(policy, 24, eager=True), requests())
    before = torch.get_num_threads()
    try:
        engine = compiled(policy)
        for threads in (1, 3):  # products of oneDNN may differ with them: each number is looked at for itself
            torch.set_num_threads(threads)
            same(generate(engine, requests()), expected)
        assert len(engine._made) == 2 * len({before, 1, 3})
    finally:
        torch.set_num_threads(before)
    alone = make_engine(policy, 1)
    same([result for one in requests()[::6] for result in generate(alone, [one])], expected_of(expected, 6))


def expected_of(results: list[Result], step: int) -> list[Result]:
    wanted = {one.slot for one in requests()[::step]}
    return [result for result in results if result.slot in wanted]


@needs_avx512_bf16
def test_new_weights_are_laid_out_anew() -> None:
    policy = policy_of("llama")
    engine = compiled(policy)
    first = generate(engine, requests())
    with torch.no_grad():
        for layer in policy.model.model.layers:
            layer.mlp.down_proj.weight.mul_(-1.0)
            layer.input_layernorm.weight.add_(0.25)
        policy.model.get_output_embeddings().weight.mul_(0.5)
    engine.load_weights(1)
    second = generate(engine, requests())
    same(second, generate(make_engine(policy, 24, eager=True), requests()))
    assert any(list(a.response_ids) != list(b.response_ids) for a, b in zip(first, second, strict=True))


@needs_avx512_bf16
def test_what_it_does_not_know_is_left_to_the_operators() -> None:
    policy = policy_of("llama")
    engine = compiled(policy)
    prompt = random_prompts([20], VOCABULARY - 1)[0]
    rows = [request("a", 0, prompt, 8, top_p=0.7), request("b", 0, prompt, 8, repetition_penalty=1.3)]
    same(generate(engine, rows), generate(make_engine(policy, eager=True), rows))


@pytest.mark.parametrize(
    ("policy", "because"),
    [
        (lambda: random_policy("llama", torch.float32, **SIZES), "bfloat16"),
        (lambda: random_policy("gpt2", torch.bfloat16), "Llama|bfloat16"),
        (lambda: random_policy("llama", torch.bfloat16, **SIZES | {"head_dim": 16}), "heads|multiples|Llama|AVX-512"),
    ],
)
def test_other_models_are_refused_with_a_reason(policy: Any, because: str) -> None:
    engine = make_engine(policy())
    assert engine._native is None
    assert re.search(because, engine.eager_because), engine.eager_because


def test_no_compiler_and_no_amx(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    with pytest.raises(Unavailable, match="no C compiler" if has_avx512_bf16() else "no AVX-512|Linux"):
        build.library.__wrapped__()
    monkeypatch.setattr(build.torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(Unavailable, match="AVX-512|Linux"):
        build.library.__wrapped__()


@needs_avx512_bf16
def test_built_where_only_the_user_writes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cache_root", lambda: tmp_path)
    (tmp_path / "native").mkdir()
    (tmp_path / "native").chmod(0o777)
    with pytest.raises(Unavailable, match="others may write"):
        build.library.__wrapped__()
    (tmp_path / "native").chmod(0o700)
    monkeypatch.setattr(build, "FLAGS", ("-no-such-flag",))
    with pytest.raises(Unavailable, match="failed"):
        build.library.__wrapped__()
    assert not list((tmp_path / "native").iterdir())


@needs_avx512_bf16
def test_what_was_kept_and_is_broken_is_built_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(build, "cache_root", lambda: tmp_path)
    monkeypatch.setattr(build, "FLAGS", tuple("-O0" if flag == "-O3" else flag for flag in build.FLAGS))
    made, compile = [], build._compile

    def cut_off_at_first(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"\x7fELF") if len(made) == 1 else compile(path)

    monkeypatch.setattr(build, "_compile", cut_off_at_first)
    assert build.library.__wrapped__()._name == str(made[1])


@needs_avx512_bf16
def test_nobody_has_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("VERL_CACHE", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(Unavailable, match="home directory"):
        build.library.__wrapped__()


@needs_avx512_bf16
def test_a_product_of_another_kind_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong width or chunk gives other bits, so that nothing but the right one is taken."""
    policy = policy_of("llama")
    shape = policy.model.model.layers[0].mlp.gate_proj.weight.shape
    right = find_product(shape, policy.rows)
    assert (right.width, right.chunk) in [(width, chunk) for width in build.WIDTHS for chunk in (96, 64, 32)]
    monkeypatch.setattr(build, "WIDTHS", tuple({16, 32, 64} - {right.width}))
    with pytest.raises(Unavailable, match="order of its own"):
        find_product(shape, policy.rows)
    assert isinstance(right, Product)


@needs_avx512_bf16
def test_a_sum_that_begins_anew_near_its_end_is_noticed() -> None:
    """Of 192 outputs of 576 random inputs one in 100,000 differs, as its last 64 inputs are summed apart or not."""
    shape = torch.Size([192, 576])
    right, other = find_product(shape, PACKED), {}
    weight = telling_weight(shape, torch.bfloat16)
    x = telling_rows(weight, 64)
    _, place = build.laid_out(weight, PACKED)
    for chunk in (right.chunk, 512 if right.chunk != 512 else 576):
        other[chunk] = torch.empty(64, 192, dtype=torch.bfloat16)
        sizes = [ctypes.c_int64(size) for size in (64, 576, 192)]
        how = Product(right.width, chunk)
        build.library().one_linear(
            build.address(x), ctypes.c_void_p(place), None, build.address(other[chunk]), *sizes, how
        )
    first, second = other.values()
    assert torch.equal(first, linear_rows(x, weight, None, PACKED))
    assert (first != second).float().mean() > 0.5


@needs_avx512_bf16
def test_broken_weights_are_told() -> None:
    policy = policy_of("llama")
    engine = compiled(policy)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[3] = float("nan")
    with pytest.raises(EngineError, match="no finite log-probs"):
        generate(engine, [request("a", 0, [1, 2], 4)])
