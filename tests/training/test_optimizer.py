"""Master weights and the optimizer over them, by hand-computed steps."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from verl.algorithms.metric import merge_all, reduce_metrics
from verl.config import OptimConfig
from verl.config.schema_data import Fp16Config
from verl.errors import CheckpointError, VerlError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm
from verl.models.policy import ValueModel
from verl.models.tiny import build_tiny
from verl.training.optimizer import MasterWeights, Optimizer, layer_of, part_of


class Pair(nn.Module):
    """One decayed parameter and one that is not."""

    def __init__(self, weight: list[list[float]], bias: list[float]) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.tensor(weight)), nn.Parameter(torch.tensor(bias))


def pair(dtype: torch.dtype = torch.float32) -> tuple[Pair, MasterWeights]:
    model = Pair([[1.0, -2.0]], [0.5])
    return model, MasterWeights(model, dtype)


def optimizer_of(weights: MasterWeights, grad_clip: float = 1e9, **settings: Any) -> Optimizer:
    return Optimizer("actor", weights, OptimConfig(**settings), grad_clip)


def values(weights: MasterWeights) -> dict[str, Tensor]:
    return {name: master.detach().clone() for name, master in weights.masters.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- the optimizer -------------------------------------------------------------------------------------------------


def test_b049_clipping_once_a_step() -> None:
    """Micro-batch gradients [3, 0] and [0, 4], largest norm 1: the step sees [0.6, 0.8] and reports 5."""
    model, weights = pair()
    optimizer = optimizer_of(weights, grad_clip=1.0, lr=0.1)
    for gradient in ([3.0, 0.0], [0.0, 4.0]):
        (model.weight * torch.tensor([gradient])).sum().backward()
    metrics = reduce_metrics(optimizer.step(0.1))
    assert metrics["actor/grad_norm"] == pytest.approx(5.0)
    first_moment = optimizer.state()["exp_avg/weight"] / 0.1  # 1 - beta1
    assert torch.allclose(first_moment, torch.tensor([[0.6, 0.8]]), atol=1e-6)


def test_a_step_by_hand_norms_and_biases_are_not_decayed() -> None:
    model, weights = pair()
    optimizer = optimizer_of(weights, lr=7.0, weight_decay=0.5)
    (3.0 * model.weight.sum() + 2.0 * model.bias.sum()).backward()
    metrics = reduce_metrics(optimizer.step(0.1))  # the rate of the step, not the configured one
    # Adam's first step is lr * g / |g|; decay takes lr * 0.5 of the weight first.
    assert torch.allclose(model.weight, torch.tensor([[0.95 - 0.1, -1.9 - 0.1]]), atol=1e-6)
    assert torch.allclose(model.bias, torch.tensor([0.5 - 0.1]), atol=1e-6)
    assert metrics["actor/lr"] == 0.1 and metrics["actor/skipped_steps"] == 0.0
    assert all(master.grad is None for master in weights.masters.values())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_b048_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(bad: float) -> None:
    model, weights = pair()
    optimizer = optimizer_of(weights, lr=0.1)
    model.weight.sum().backward()
    optimizer.step(0.1)
    before, moments = values(weights), {name: t.clone() for name, t in optimizer.state().items()}
    (bad * model.weight[0, 0] + model.bias.sum()).backward()
    skipped = optimizer.step(0.1)
    assert same(before, values(weights)) and same(moments, optimizer.state())
    assert "actor/grad_norm" not in reduce_metrics(skipped)
    model.weight.sum().backward()
    later = optimizer.step(0.1)  # the run goes on, with the clean gradient alone
    merged = reduce_metrics(merge_all([skipped, later]))
    assert merged["actor/skipped_steps"] == 1.0
    assert merged["actor/grad_norm"] == pytest.approx(math.sqrt(2))
    assert not same(before, values(weights))


def test_b108_a_gradient_of_zero_changes_nothing() -> None:
    """Neither decay nor the momentum of earlier steps moves weights in a step that has nothing to teach."""
    model, weights = pair()
    optimizer = optimizer_of(weights, lr=0.1, weight_decay=0.5)
    model.weight.sum().backward()
    optimizer.step(0.1)
    before, moments = values(weights), {name: t.clone() for name, t in optimizer.state().items()}
    (0.0 * model.weight.sum()).backward()
    assert reduce_metrics(optimizer.step(0.1))["actor/grad_norm"] == 0.0
    assert same(before, values(weights)) and same(moments, optimizer.state())


def test_b143_state_round_trip_and_another_models_state_is_refused() -> None:
    model, weights = pair()
    optimizer = optimizer_of(weights, lr=0.1)
    assert optimizer.state() == {}
    model.weight.square().sum().backward()
    model.bias.sum().backward()
    optimizer.step(0.1)
    saved, start = {name: t.clone() for name, t in optimizer.state().items()}, values(weights)

    twin = Pair(start["weight"].tolist(), start["bias"].tolist())
    twin_weights = MasterWeights(twin, torch.float32)
    other = optimizer_of(twin_weights, lr=0.1)
    other.load_state(saved)
    for one, step in ((model, optimizer), (twin, other)):
        (one.weight.square().sum() + one.bias.sum()).backward()
        step.step(0.05)  # B143: the rate of this step, and no rate out of the saved state
    assert same(values(weights), values(twin_weights))  # moments and step counts went along: bias correction too

    for wrong in ({"exp_avg/other": torch.zeros(1)}, {"exp_avg/weight": torch.zeros(3)}):
        with pytest.raises(CheckpointError, match="actor's optimizer state"):
            other.load_state(wrong)


def test_norms_and_biases_are_decayed_on_demand() -> None:
    model, weights = pair()
    optimizer = optimizer_of(weights, weight_decay=0.5, decay_norms_and_biases=True)
    (3.0 * model.weight.sum() + 2.0 * model.bias.sum()).backward()
    optimizer.step(0.1)
    assert torch.allclose(model.bias, torch.tensor([0.5 * 0.95 - 0.1]), atol=1e-6)


def test_a_gradient_that_is_not_finite_stops_the_run_on_demand() -> None:
    model, weights = pair()
    optimizer = optimizer_of(weights, on_nonfinite="stop")
    (math.nan * model.weight.sum()).backward()
    with pytest.raises(VerlError, match="actor's gradient is not finite") as caught:
        optimizer.step(0.1)
    assert caught.value.value == "first in weight" and not caught.value.bad_input


def test_the_parts_of_the_gradients_norm(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "untied", hidden_size=32, tie_embeddings=False)
    model = load_causal_lm(folder, torch.float32)
    weights = MasterWeights(model, torch.float32)
    model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    found = {name: master.grad for name, master in weights.masters.items() if master.grad is not None}
    gradients = {name: gradient.double().square().sum().item() for name, gradient in found.items()}
    metrics = reduce_metrics(optimizer_of(weights).step(0.0))
    parts = {name.rpartition("/")[2]: value for name, value in metrics.items() if "/grad_norm/" in name}
    assert parts.keys() == {"embedding", "attention", "mlp", "head", "norms_and_biases"}
    assert parts["head"] == pytest.approx(math.sqrt(gradients["lm_head.weight"]), rel=1e-5)
    assert parts["embedding"] == pytest.approx(math.sqrt(gradients["model.embed_tokens.weight"]), rel=1e-5)
    assert metrics["actor/grad_norm"] ** 2 == pytest.approx(sum(x * x for x in parts.values()))
    assert metrics["actor/grad_norm"] ** 2 == pytest.approx(sum(gradients.values()), rel=1e-5)
    layers = [sum(x for name, x in gradients.items() if f".layers.{i}." in name) ** 0.5 for i in (0, 1)]
    ends = [metrics[f"actor/layer_grad_norm/{end}"] for end in ("min", "max")]
    assert ends == pytest.approx(sorted(layers), rel=1e-5) and ends[0] < ends[1]
    assert [layer_of(name) for name in ("transformer.h.12.mlp.w", "model.layers.3.x.w", "lm_head.weight")] == [
        "12", "3", None
    ]  # fmt: skip
    for name in ("transformer.h.0.attn.c_attn.weight", "transformer.wte.weight", "h.0.mlp.c_fc.weight"):
        assert part_of(name, 2) in ("attention", "embedding", "mlp")


# --- float16 -------------------------------------------------------------------------------------------------------


def fp16(grad_clip: float = 1e9, **scale: float) -> tuple[Pair, MasterWeights, Optimizer]:
    model = Pair([[1.0, -2.0]], [0.5])
    weights = MasterWeights(model, torch.float16, fp16=Fp16Config(**scale))
    return model, weights, optimizer_of(weights, grad_clip, weight_decay=0.0)


def test_b048_an_overflow_skips_the_step_and_halves_the_scale() -> None:
    """A gradient of 2 times 65536 is infinite in float16; the next step has the gradient 2 exactly, unscaled once."""
    model, weights, optimizer = fp16()
    before = values(weights)
    optimizer.backward(2.0 * model.weight.sum())
    skipped = reduce_metrics(optimizer.step(0.1))
    assert same(before, values(weights))
    assert skipped["actor/skipped_steps"] == 1.0 and skipped["actor/loss_scale"] == 65536.0
    optimizer.backward(1.0 * model.weight.sum())
    optimizer.backward(1.0 * model.weight.sum())  # two micro-batches
    done = reduce_metrics(optimizer.step(0.1))
    assert done["actor/skipped_steps"] == 0.0 and done["actor/loss_scale"] == 32768.0
    assert done["actor/grad_norm"] == pytest.approx(math.sqrt(8))
    assert optimizer.state()["exp_avg/weight"].tolist() == [[pytest.approx(0.2), pytest.approx(0.2)]]
    assert model.weight.dtype == torch.float16 and weights.masters["weight"].dtype == torch.float32


def test_a_dynamic_scale_grows_and_a_fixed_one_stays() -> None:
    seen: dict[float, list[float]] = {}
    for fixed in (0.0, 1024.0):
        model, _, optimizer = fp16(loss_scale=fixed, initial_scale_power=4, loss_scale_window=2)
        seen[fixed] = []
        for factor in (1.0, 1.0, 0.0, 1.0, math.inf, 1.0):  # a gradient of zero proves nothing about the scale
            optimizer.backward((factor * model.weight).sum())
            seen[fixed].append(reduce_metrics(optimizer.step(0.1))["actor/loss_scale"])
    assert seen == {0.0: [16.0, 16.0, 32.0, 32.0, 32.0, 16.0], 1024.0: [1024.0] * 6}


def test_clipping_sees_the_unscaled_gradient() -> None:
    model, _, optimizer = fp16(grad_clip=1.0, loss_scale=8.0)
    optimizer.backward((model.weight * torch.tensor([[3.0, 4.0]])).sum())
    assert reduce_metrics(optimizer.step(0.1))["actor/grad_norm"] == pytest.approx(5.0)
    assert (optimizer.state()["exp_avg/weight"] / 0.1).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]


def test_the_scale_is_part_of_the_state() -> None:
    model, _, optimizer = fp16(loss_scale_window=3)
    for factor in (2.0, 1.0, 1.0):
        optimizer.backward(factor * model.weight.sum())
        optimizer.step(0.1)
    other_model, _, other = fp16(loss_scale_window=3)
    other.load_state(optimizer.state())
    for _ in range(2):
        other.backward(0.5 * other_model.weight.sum())
        metrics = reduce_metrics(other.step(0.1))
    assert metrics["actor/loss_scale"] == 65536.0  # 32768, doubled after the third good step


@pytest.mark.parametrize(("power", "stops"), [(1, False), (0, True)])
def test_only_what_the_scale_cannot_mend_stops_the_run(power: int, stops: bool) -> None:
    model = Pair([[1.0, -2.0]], [0.5])
    weights = MasterWeights(model, torch.float16, fp16=Fp16Config(initial_scale_power=power))
    optimizer = optimizer_of(weights, on_nonfinite="stop")
    optimizer.backward(math.inf * model.weight.sum())
    if stops:
        with pytest.raises(VerlError, match="not finite"):
            optimizer.step(0.1)
    else:
        assert reduce_metrics(optimizer.step(0.1))["actor/skipped_steps"] == 1.0


# --- master weights ------------------------------------------------------------------------------------------------


def test_bf16_gradients_add_up_in_float32() -> None:
    """256 + 1 is lost in bf16 (8 bits); in float32 masters a thousand backward passes of 1 add up behind a 256."""
    model, weights = pair(torch.bfloat16)
    (256.0 * model.bias.sum()).backward()
    for _ in range(3):
        model.bias.sum().backward()
    assert weights.masters["bias"].dtype == torch.float32
    assert weights.masters["bias"].grad is not None
    assert weights.masters["bias"].grad.tolist() == [259.0]
    assert model.bias.grad is None and model.bias.dtype == torch.bfloat16


def test_bf16_steps_too_small_for_bf16_are_kept() -> None:
    """1 - 0.001 rounds to 1 in bf16: only float32 masters move, and after enough steps the model does."""
    model, weights = pair(torch.bfloat16)
    optimizer = optimizer_of(weights, lr=1e-3, weight_decay=0.0)
    seen = []
    for _ in range(8):
        model.weight.sum().backward()
        optimizer.step(1e-3)
        seen.append((weights.masters["weight"][0, 0].item(), model.weight[0, 0].item()))
    assert seen[0] == (pytest.approx(0.999, abs=1e-6), 1.0)
    assert seen[-1][0] == pytest.approx(0.992, abs=1e-5)
    assert seen[-1][1] == float(torch.tensor(seen[-1][0]).bfloat16()) < 1.0


def test_masters_keep_the_full_precision_of_the_loaded_weights(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "tied", hidden_size=32)
    exact = load_causal_lm(folder, torch.float32, attn_implementation=ATTENTION_NAME).state_dict()
    model = load_causal_lm(folder, torch.float32, attn_implementation=ATTENTION_NAME)
    weights = MasterWeights(model, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    for name, master in weights.masters.items():
        assert master.dtype == torch.float32 and torch.equal(master, exact[name])
    parameters = dict(model.named_parameters())
    assert parameters.keys() == weights.masters.keys()

    # Tied weights: one master, and the projection still is the embedding after a step.
    assert "lm_head.weight" not in weights.masters
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert head is embedding
    with torch.no_grad():
        for master in weights.masters.values():
            master.add_(0.25)
    weights.publish()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, (exact[name] + 0.25).bfloat16())
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_tied_weights_get_both_gradients(tmp_path: Path) -> None:
    """Of the embedding and of the projection, as in a float32 model without copies."""
    folder = build_tiny(tmp_path / "tied", hidden_size=32)
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_causal_lm(folder, torch.float32)
        weights = MasterWeights(model, dtype)
        model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
        gradients.append(weights.masters["model.embed_tokens.weight"].grad)
    full, copied = gradients
    assert full is not None and copied is not None and copied.dtype == torch.float32
    assert float((full - copied).norm() / full.norm()) < 0.05  # bf16 rounding of the passes
    assert float(copied[200:].abs().sum()) > 0  # ids that occur only in the projection


def test_the_value_head_stays_float32(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "v", hidden_size=32)
    model = ValueModel(load_causal_lm(folder, torch.float32, attn_implementation=ATTENTION_NAME))
    weights = MasterWeights(model, torch.bfloat16, cast=lambda name: not name.startswith("value_head"))
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    assert {dtypes.pop("value_head.weight"), dtypes.pop("value_head.bias")} == {torch.float32}
    assert set(dtypes.values()) == {torch.bfloat16}
    assert weights.masters["value_head.weight"] is model.value_head.weight


def test_a_float32_model_is_its_own_master() -> None:
    model, weights = pair()
    assert all(weights.masters[name] is parameter for name, parameter in model.named_parameters())
