"""Decoders without their modules: for the families that they can stand for, with the modules' bits; for no others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from toy_models import ALL_FAMILIES, random_policy

from verl.models.packed import PackedContext, pack_rows
from verl.models.plain import _Turn
from verl.models.policy import PolicyModel

PLAIN = {"llama", "qwen2", "qwen2-windows", "qwen3", "mistral", "smollm3"}
ROWS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [8, 9, 7], [*range(30)]]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl.models.plain.ROWS", 2)


def states(policy: PolicyModel) -> torch.Tensor:
    packed = pack_rows(ROWS, [[7, 2]] * len(ROWS), 2).filled(policy.rows.padded)
    return policy.hidden_states(packed.input_ids, packed.position_ids, PackedContext(packed))


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_bits_of_the_modules(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        policy = random_policy(family, dtype)
        assert (policy.plain is not None) == (family in PLAIN)
        if family in PLAIN:
            same_bits(policy)


def same_bits(policy: PolicyModel) -> None:
    """Without gradients and with them, which are those of the modules up to rounding."""
    with torch.no_grad():
        found = states(policy)
    ours, theirs = differentiated(policy), differentiated(policy.train())
    assert torch.equal(found, ours[0]) and torch.equal(found, theirs[0])
    for own, other in zip(ours, theirs, strict=True):
        assert (own - other).norm() <= (1e-5 if own.dtype == torch.float32 else 2e-2) * other.norm()
    policy.eval()


def differentiated(policy: PolicyModel) -> list[torch.Tensor]:
    """The states, and the gradient of their weighted sum."""
    policy.zero_grad()
    found = states(policy)
    (found * torch.linspace(-1, 1, found.numel()).view(found.shape)).sum().backward()
    return [found.detach(), *(p.grad for p in policy.parameters() if p.grad is not None)]


def test_gradients_of_turning() -> None:
    x, sin, cos = (torch.randn(*shape, dtype=torch.float64) for shape in ((5, 3, 8), (5, 1, 8), (5, 1, 8)))
    assert torch.autograd.gradcheck(lambda x: _Turn.apply(x, cos, sin), x.requires_grad_())


def test_layers_without_positions_are_not_taken_for_others() -> None:
    assert random_policy("smollm3", no_rope_layers=[1, 0]).plain is None


def test_changed_weights_are_seen() -> None:
    policy = random_policy("llama")
    with torch.no_grad():
        before = states(policy)
        policy.model.model.layers[0].self_attn.k_proj.weight.mul_(2.0)
        assert not torch.equal(states(policy), before)
    same_bits(policy)


def test_not_over_modules_with_something_of_their_own() -> None:
    hooked = random_policy("llama")
    hooked.model.model.layers[1].register_forward_pre_hook(lambda module, inputs: None)
    assert hooked.plain is None

    class Adapted(nn.Linear):
        """As an adapter begins: nothing is added yet."""

    adapted = random_policy("llama")
    adapted.model.model.layers[0].self_attn.q_proj.__class__ = Adapted
    assert adapted.plain is None


def test_sharded_afterwards_the_modules_compute() -> None:
    policy = random_policy("llama")
    with torch.no_grad():
        expected = states(policy)
        layer = policy.model.model.layers[0]
        called: list[int] = []

        class Sharded(type(layer)):  # type: ignore[misc]
            def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
                called.append(1)
                return super().forward(*args, **kwargs)  # type: ignore[no-any-return]

        layer.__class__ = Sharded
        assert torch.equal(states(policy), expected) and called
