"""Norms and gated MLPs: transformers' bits forward, autograd's gradients, and only where that is so."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP, LlamaRMSNorm

from verl.models import fused
from verl.models.fused import gated_mlp, install, rms_norm
from verl.models.rows import ALL_ROWS


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "ROWS", 8)


def wide(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_gradients_of_a_norm() -> None:
    x, weight = wide(2, 5, 6).requires_grad_(), wide(6).requires_grad_()
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-5), (x, weight))


@pytest.mark.parametrize("with_bias", [True, False])
def test_gradients_of_a_gated_mlp(with_bias: bool) -> None:
    x = wide(1, 11, 3).requires_grad_()
    weights = [wide(*shape).requires_grad_() for shape in ((5, 3), (5, 3), (4, 5))]
    biases = [wide(len(weight)).requires_grad_() if with_bias else None for weight in weights]

    def mlp(x: Tensor, *given: Tensor | None) -> Tensor:
        return gated_mlp(x, *zip(given[:3], given[3:], strict=True), ALL_ROWS)  # type: ignore[arg-type]

    assert torch.autograd.gradcheck(mlp, (x, *weights, *biases))
    gate, up = (F.linear(x, weights[i], biases[i]) for i in (0, 1))
    assert torch.equal(mlp(x, *weights, *biases), F.linear(F.silu(gate) * up, weights[2], biases[2]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_models_norms_and_mlps_keep_their_bits_and_their_inputs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24)
    model = nn.Sequential(LlamaRMSNorm(16), LlamaMLP(config)).to(dtype)
    nn.init.normal_(model[0].weight)
    x = torch.randn(1, 24, 16).to(dtype).requires_grad_()

    def run() -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        out = model(x)
        out.square().sum().backward()
        return [out, x.grad, *(parameter.grad for parameter in model.parameters())]  # type: ignore[list-item]

    before, given = run(), x.detach().clone()
    install(model, ALL_ROWS)
    assert all("forward" in vars(module) for module in model)
    after = run()
    assert torch.equal(before[0], after[0]) and torch.equal(x, given)
    for then, now in zip(before[1:], after[1:], strict=True):
        assert (then - now).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * then.norm()
    with torch.no_grad():
        assert torch.equal(model(x), before[0])


def test_what_computes_something_else_is_left_alone() -> None:
    """Gemma multiplies by 1 + weight; another MLP has another activation."""
    norm = GemmaRMSNorm(16)
    norm.variance_epsilon = norm.eps
    mlp = LlamaMLP(LlamaConfig(hidden_size=16, num_attention_heads=2, intermediate_size=24, hidden_act="gelu"))
    nn.init.normal_(norm.weight)
    install(nn.Sequential(norm, mlp), ALL_ROWS)
    assert "forward" not in vars(norm) and "forward" not in vars(mlp)
