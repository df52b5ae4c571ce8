"""Row rules: when the rows of a linear layer keep their bits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from toy_models import random_lm
from transformers.pytorch_utils import Conv1D

from verl.models import rows
from verl.models.rows import ALL_ROWS, BLOCK, IN_BLOCKS, PACKED, RowRule, apply_row_rule, choose_row_rule, linear_rows


def test_padded() -> None:
    assert [ALL_ROWS.padded(n) for n in (0, 1, 8, 9)] == [8, 8, 8, 16]
    assert [IN_BLOCKS.padded(n) for n in (1, 64, 65)] == [64, 64, 128]


def test_no_call_has_too_few_rows() -> None:
    rule = RowRule(least=40, block=128)
    assert [rule.padded(n) for n in (0, 1, 40, 41)] == [8, 8, 40, 48]  # a call fills itself up
    shape = torch.Size([4, 4])
    found = [rule.calls(n, shape) for n in (40, 128, 168, 136, 264)]
    assert found == [[40], [128], [128, 40], [72, 64], [128, 72, 64]]
    large = replace(rule, large={shape: 512})
    found = [large.calls(n, shape) for n in (1032, 1112, 1064, 512)]
    assert found == [[512, 256, 128, 72, 64], [512, 512, 88], [512, 512, 40], [512]]
    for count in range(40, 1200, 8):
        for calls in (rule.calls(count, shape), large.calls(count, shape), large.calls(count, shape[:1])):
            assert sum(calls) == count and all(call >= 40 and call % 8 == 0 for call in calls)
            assert all(call <= 128 or call in (256, 512) for call in calls)


def test_large_calls_are_taken_as_far_as_they_add_up_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = rows.F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return plain(x, weight, bias) + (x.shape[0] > 512 and weight.shape[0] == 16)

    monkeypatch.setattr(rows.F, "linear", linear)
    rule = RowRule(block=128)
    assert [rows._largest_call(torch.randn(size, 4), rule, [1]) for size in (16, 24)] == [512, 4096]


@pytest.mark.parametrize("shape", [(128, 6), (1, 192, 6)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_blocks_are_a_linear_layer(shape: tuple[int, ...], with_bias: bool) -> None:
    leaves = [torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in (shape, (5, 6), (5,))]
    x, weight, bias = leaves
    used = leaves if with_bias else leaves[:2]
    ours, plain = (
        linear(x, weight, bias if with_bias else None)
        for linear in (lambda *inputs: linear_rows(*inputs, IN_BLOCKS), F.linear)
    )
    torch.testing.assert_close(ours, plain)
    factor = torch.randn_like(plain)
    for a, b in zip(torch.autograd.grad(ours, used, factor), torch.autograd.grad(plain, used, factor), strict=True):
        torch.testing.assert_close(a, b)


def test_blocks_call_the_kernel_with_one_row_count_only(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = F.linear

    def spy(x: Tensor, *rest: Tensor) -> Tensor:
        seen.append(x.shape[0])
        return plain(x, *rest)

    monkeypatch.setattr(rows.F, "linear", spy)
    linear_rows(torch.randn(1, 3 * BLOCK, 4), torch.randn(2, 4), None, IN_BLOCKS)
    assert seen == [BLOCK] * 3


def test_every_linear_layer_follows_and_keeps_its_parameters() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), Conv1D(4, 8), nn.Linear(4, 2, bias=False))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    names, x = [name for name, _ in model.named_parameters()], torch.randn(64, 6)
    before = model(x)
    for rule in (IN_BLOCKS, ALL_ROWS, IN_BLOCKS):  # a second rule replaces the first
        apply_row_rule(model, rule)
        assert [layer.row_rule for layer in model if not isinstance(layer, nn.ReLU)] == [rule] * 3
        torch.testing.assert_close(model(x), before)
    assert [name for name, _ in model.named_parameters()] == names


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_proven_rule_holds(family: str, dtype: torch.dtype) -> None:
    """On shapes of the probe and on row counts beside it."""
    model = random_lm(family, dtype)
    rule = choose_row_rule(model)
    apply_row_rule(model, rule)
    if not rule.proven:
        pytest.skip("no rule holds on this machine; the tolerance form of the parity law applies")
    layer = next(m for m in model.modules() if hasattr(m, "row_rule"))
    x = torch.randn(rule.padded(700), 32).to(dtype)
    whole = layer(x)
    for count in (1, 2, 11, 65, 300):
        count = rule.padded(count)
        assert torch.equal(layer(x[8 : 8 + count]), whole[8 : 8 + count])


needs_packing = pytest.mark.skipif(
    not rows._can_pack([torch.zeros(1, dtype=torch.bfloat16)]), reason="oneDNN does not compute in bfloat16 here"
)


@needs_packing
@pytest.mark.parametrize("conv", [False, True])
def test_a_packed_weight_follows_its_parameter(conv: bool) -> None:
    """In place, through ``.data``, and back: what is packed is never older than the parameter."""
    layer = Conv1D(48, 24) if conv else nn.Linear(24, 48)
    nn.init.normal_(layer.weight)
    layer = nn.Sequential(layer.bfloat16())
    apply_row_rule(layer, PACKED)
    x, weight = torch.randn(296, 24).bfloat16(), layer[0].weight

    def reference() -> Tensor:
        matrix = (weight.T if conv else weight).detach()
        return F.linear(x.double(), matrix.double(), layer[0].bias.detach().double())

    def halved() -> None:
        weight.data = weight.data * 0.5

    for change in (lambda: None, lambda: weight.mul_(-2), halved, lambda: weight.copy_(torch.randn_like(weight))):
        with torch.no_grad():
            change()
        torch.testing.assert_close(layer(x).double(), reference(), rtol=0.02, atol=0.1)


@needs_packing
def test_packed_gradients_are_those_of_a_linear_layer() -> None:
    x, weight = torch.randn(136, 24).bfloat16().requires_grad_(), torch.randn(16, 24).bfloat16().requires_grad_()
    factor = torch.randn(136, 16).bfloat16()
    ours = torch.autograd.grad(linear_rows(x, weight, None, PACKED), (x, weight), factor)
    plain = torch.autograd.grad(F.linear(x, weight), (x, weight), factor)
    for a, b in zip(ours, plain, strict=True):
        torch.testing.assert_close(a, b)


@needs_packing
def test_weights_whose_kernels_disagree_are_laid_out_for_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two shapes one agrees from 40 rows on in either layout, the other in that for a single row only."""
    plain, threads = rows.linear_rows, torch.get_num_threads()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
        few = max(x.shape[0], rule.least) < 40
        wrong = rule.packed and weight.shape not in rule.single and (weight.shape[0] == 24 or few)
        return plain(x, weight, bias, rule) + (x.shape[0] if wrong else 0.0)

    monkeypatch.setattr(rows, "linear_rows", linear)
    found = choose_row_rule(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)).bfloat16())
    expected = RowRule(least=40, block=128, packed=True, single=frozenset({torch.Size([24, 16])}), proven=True)
    assert replace(found, large={}) == expected
    assert torch.get_num_threads() == threads


def noisy(changes: bool, in_blocks: bool) -> object:
    """A linear layer whose rows depend on how many there are: in calls of all rows, in calls of a block."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
        wrong = in_blocks if rule.block else changes
        return F.linear(x, weight, bias) + (x.shape[0] * 1e-3 if wrong else 0.0)

    return linear


@pytest.mark.parametrize(
    ("all_rows", "in_blocks", "expected"),
    [
        (False, False, RowRule(proven=True)),
        (True, False, RowRule(BLOCK, BLOCK, BLOCK, proven=True)),
        (True, True, RowRule()),
    ],
)
def test_the_probe_tells(all_rows: bool, in_blocks: bool, expected: RowRule, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "linear_rows", noisy(all_rows, in_blocks))
    monkeypatch.setattr(rows, "_batches_keep_bits", lambda: True)
    assert choose_row_rule(nn.Sequential(nn.Linear(8, 4), Conv1D(2, 4))) == expected


@pytest.mark.parametrize("inputs", [64, 575])
def test_what_the_probe_looks_at_shows_the_order_of_sums(inputs: int) -> None:
    weight = rows.telling_weight(torch.Size([1000, inputs]), torch.bfloat16)
    x = rows.telling_rows(weight, 16)
    exact = F.linear(x.double(), weight.double())
    assert weight.shape == (1000, inputs) and exact.abs().max() == 0.0
    terms = x.float()[:, None] * weight.float()[:100]
    forth, back = torch.zeros(16, 100), torch.zeros(16, 100)
    for i in range(inputs):
        forth += terms[..., i]
        back += terms[..., inputs - 1 - i]
    assert (forth != back).float().mean() > 0.4


def test_conv1d_is_probed_as_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(rows, "_keeps_bits", lambda weight, *_: shapes.append(tuple(weight.shape)) or True)
    monkeypatch.setattr(rows, "_batches_keep_bits", lambda: True)
    assert choose_row_rule(nn.Sequential(nn.Linear(8, 4), Conv1D(2, 4), nn.Linear(8, 4))).proven
    assert shapes == [(4, 8), (2, 4)]  # (out, in), each shape once


@needs_packing
def test_a_call_of_few_rows_is_filled_up(monkeypatch: pytest.MonkeyPatch) -> None:
    seen, product = [], rows._linear_packed

    def counting(x: Tensor, *arguments: object) -> Tensor:
        seen.append(x.shape[-2])
        return product(x, *arguments)  # type: ignore[no-any-return]

    monkeypatch.setattr(rows, "_linear_packed", counting)
    weight, x = torch.randn(24, 16).bfloat16(), torch.randn(1, 48, 16).bfloat16()
    rule = replace(PACKED, least=40)
    whole = linear_rows(x, weight, None, rule)
    for part in (x[:, :8], x[:, :8].clone().requires_grad_()):
        assert torch.equal(linear_rows(part, weight, None, rule), whole[:, :8])
    assert seen == [48, 40, 40]
