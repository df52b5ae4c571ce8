"""Compiled passes of an update against torch's operators: the same bits forth and back, or not in use."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from toy_models import needs_avx512_bf16, random_policy

from verl.models.native import training
from verl.models.native.training import compiled
from verl.models.packed import pack_rows
from verl.models.policy import PolicyModel

HEADS = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32}
SIZES = {"vocab_size": 320, "hidden_size": 96, "intermediate_size": 160, **HEADS}
LENGTHS = (1, 16, 17, 128, 145, 150)  # of parts and sixteens of tokens, whole and not


def policy_of(family: str) -> PolicyModel:
    return random_policy(family, torch.bfloat16, **SIZES)


def trained(policy: PolicyModel, modules: bool) -> list[Tensor]:
    """Log-probs, and the gradients of their weighted sum; through the modules or without them."""
    policy.train(modules)
    policy.zero_grad()
    packed = pack_rows([[1, 2, 3]] * len(LENGTHS), [[*range(4, 4 + length)] for length in LENGTHS], max(LENGTHS))
    log_probs = policy(packed, 1.0)[0]
    (log_probs * torch.linspace(-1, 1, len(log_probs))).sum().backward()
    return [log_probs.detach(), *(x.grad.clone() for x in policy.parameters() if x.grad is not None)]


@needs_avx512_bf16
@pytest.mark.parametrize("modules", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_bits_of_an_update(family: str, modules: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = policy_of(family)
    assert compiled(torch.zeros(8, 32, dtype=torch.bfloat16)) is not None
    found = trained(policy, modules)
    monkeypatch.setattr(training, "_kernels", lambda: None)
    expected = trained(policy, modules)
    assert len(found) == len(expected) > 20
    assert all(map(torch.equal, found, expected))


@needs_avx512_bf16
@pytest.mark.parametrize("threads", [1, 3])
def test_any_number_of_threads(threads: int) -> None:
    policy, before = policy_of("llama"), torch.get_num_threads()
    expected = trained(policy, False)
    try:
        torch.set_num_threads(threads)
        assert all(map(torch.equal, trained(policy, False), expected))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(8, 32),
        lambda: torch.zeros(8, 48, dtype=torch.bfloat16),
        lambda: torch.zeros(32, 8, dtype=torch.bfloat16).T,
        lambda: torch.zeros(7, 32, dtype=torch.bfloat16),
        lambda: torch.zeros(8, 32, dtype=torch.bfloat16, device="meta"),
    ],
)
def test_other_tensors_are_left_to_the_operators(make: Callable[[], Tensor]) -> None:
    assert compiled(make()) is None


@needs_avx512_bf16
def test_kernels_that_differ_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = training.Kernels.gate
    monkeypatch.setattr(training.Kernels, "gate", lambda self, g, up: gate(self, g, up) + 1)
    assert training._kernels.__wrapped__() is None


def test_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.models.native import build

    monkeypatch.setenv("VERL_NATIVE", "0")
    with pytest.raises(build.Unavailable, match="VERL_NATIVE=0"):
        build.library.__wrapped__()
