"""Laws 1 and 2 at the level of one optimizer step: how rows are cut, packed, ordered and padded changes nothing.

Float64: gradients agree norm-wise to 1e-10; float32: to 1e-4; metrics to 1e-5 in both.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import Policies, Shape, capture_gradients, distance, make_batch
from torch import Tensor

from verl.algorithms.aggregation import LOSS_AGGREGATIONS, count_denominators
from verl.algorithms.metric import reduce_metrics
from verl.config import ActorConfig, CriticConfig
from verl.protocol import DataProto
from verl.training.actor import Actor
from verl.training.critic import Critic
from verl.training.micro_batches import Limits

MODES = sorted(LOSS_AGGREGATIONS)
WHOLE = Limits(rows=10_000, tokens=None, share_prompts=False)
TEMPERATURE = 0.7
FIXED_DIVISOR = 11.0

Outcome = tuple[dict[str, Tensor], dict[str, float]]


def actor_config(mode: str, **settings: Any) -> ActorConfig:
    defaults: dict[str, Any] = {"loss_agg_mode": mode, "use_kl_loss": True, "kl_loss_coef": 0.3, "entropy_coeff": 0.05}
    return ActorConfig(**(defaults | settings))


def actor_step(models: Policies, batch: DataProto, limits: Limits, config: ActorConfig) -> Outcome:
    actor = Actor(models.policy, config, limits, TEMPERATURE, models.policy_weights)
    gradient = capture_gradients(actor.optimizer, models.policy_weights)
    metrics = actor.update(batch, count_denominators(batch.batch["response_mask"], FIXED_DIVISOR))
    return gradient, reduce_metrics(metrics)


def critic_step(models: Policies, batch: DataProto, limits: Limits, mode: str) -> Outcome:
    critic = Critic(models.value, CriticConfig(loss_agg_mode=mode), limits, models.value_weights)
    gradient = capture_gradients(critic.optimizer, models.value_weights)
    metrics = critic.update(batch, count_denominators(batch.batch["response_mask"], FIXED_DIVISOR))
    return gradient, reduce_metrics(metrics)


def assert_same(expected: Outcome, found: Outcome, tolerance: float) -> None:
    assert distance(expected[0], found[0]) <= tolerance
    assert expected[1].keys() == found[1].keys()
    for name, value in expected[1].items():
        assert found[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    groups = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return Shape(
        prompt_lengths=draw(st.lists(st.integers(1, 9), min_size=len(groups), max_size=len(groups))),
        groups=groups,
        responses=draw(st.lists(st.integers(0, 9), min_size=sum(groups), max_size=sum(groups))),
        seed=draw(st.integers(0, 10_000)),
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[Shape, Limits, list[int]]:
    """A batch, limits of its micro-batches, and an order of its rows."""
    shape = draw(shapes())
    tokens = [
        shape.prompt_lengths[group] + shape.responses[row]
        for row, group in enumerate(g for g, count in enumerate(shape.groups) for _ in range(count))
    ]
    rows = draw(st.none() | st.integers(1, len(tokens)))
    most = draw(st.none() | st.integers(max(tokens), sum(tokens) + 1)) if rows is not None else None
    if rows is None:
        most = draw(st.integers(max(tokens), sum(tokens) + 1))
    order = draw(st.permutations(range(len(tokens))))
    return shape, Limits(rows, most, draw(st.booleans())), order


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20)
@given(split=splits())
def test_law_2_actor_float64(float64: Policies, mode: str, split: tuple[Shape, Limits, list[int]]) -> None:
    shape, limits, order = split
    batch, config = make_batch(shape), actor_config(mode)
    whole = actor_step(float64, batch, WHOLE, config)
    assert_same(whole, actor_step(float64, batch.select_idxs(order), limits, config), 1e-10)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=12)
@given(split=splits())
def test_law_2_critic_float64(float64: Policies, mode: str, split: tuple[Shape, Limits, list[int]]) -> None:
    shape, limits, order = split
    batch = make_batch(shape)
    whole = critic_step(float64, batch, WHOLE, mode)
    assert_same(whole, critic_step(float64, batch.select_idxs(order), limits, mode), 1e-10)


@settings(max_examples=20)
@given(split=splits(), mode=st.sampled_from(MODES))
def test_law_2_float32(float32: Policies, split: tuple[Shape, Limits, list[int]], mode: str) -> None:
    shape, limits, order = split
    batch, config = make_batch(shape), actor_config(mode)
    turned = batch.select_idxs(order)
    assert_same(actor_step(float32, batch, WHOLE, config), actor_step(float32, turned, limits, config), 1e-4)
    assert_same(critic_step(float32, batch, WHOLE, mode), critic_step(float32, turned, limits, mode), 1e-4)


@settings(max_examples=20)
@given(split=splits(), mode=st.sampled_from(MODES), garbage=st.sampled_from([math.nan, math.inf, -math.inf, 1e30]))
def test_law_1_garbage_where_nothing_is_trained(
    float64: Policies, split: tuple[Shape, Limits, list[int]], mode: str, garbage: float
) -> None:
    """Floats at masked positions and token ids in the padding: not a bit of gradient or metric changes."""
    shape, limits, _ = split
    clean, dirty = make_batch(shape), make_batch(shape, garbage)
    mask = clean.batch["response_mask"]
    assert torch.equal(mask, dirty.batch["response_mask"])
    if not bool(mask.all()):
        assert not torch.equal(clean.batch["old_log_probs"], dirty.batch["old_log_probs"])
    for step, config in ((actor_step, actor_config(mode)), (critic_step, mode)):
        expected, found = step(float64, clean, limits, config), step(float64, dirty, limits, config)  # type: ignore[operator]
        assert all(torch.equal(expected[0][name], found[0][name]) for name in expected[0])
        assert expected[1] == found[1]


def test_columns_come_back_in_the_rows_own_order(float64: Policies) -> None:
    """B114: lengths [1, 5, 2, 4] are sorted for packing; every row must get its own values back."""
    shape = Shape(prompt_lengths=[3, 2, 4, 1], groups=[1, 1, 1, 1], responses=[1, 5, 2, 4], seed=4)
    batch = make_batch(shape)
    whole = Actor(float64.policy, ActorConfig(), WHOLE, TEMPERATURE, float64.policy_weights).log_probs(batch)
    packed = Actor(float64.policy, ActorConfig(), Limits(None, 7, True), TEMPERATURE, float64.policy_weights)
    found = packed.log_probs(batch).batch["old_log_probs"]
    assert torch.allclose(found, whole.batch["old_log_probs"], rtol=0, atol=1e-6)
    for row, length in enumerate(shape.responses):
        alone = packed.log_probs(batch.select_idxs([row])).batch["old_log_probs"][0]
        assert torch.allclose(found[row], alone, rtol=0, atol=1e-6)
        assert bool((found[row, :length] < 0).all()) and bool((found[row, length:] == 0).all())


def plain_log_probs(models: Policies, batch: DataProto, row: int) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of one row's response by a plain forward over that row alone: no packing, no padding."""
    from transformers.modeling_utils import PreTrainedModel

    width = batch.batch["prompts"].shape[1]
    attention = batch.batch["attention_mask"][row].bool()
    prompt = batch.batch["prompts"][row][attention[:width]]
    response = batch.batch["responses"][row][attention[width:]]
    model = models.policy.model
    assert isinstance(model, PreTrainedModel)
    used = model.config._attn_implementation
    model.set_attn_implementation("sdpa")
    try:
        logits = model(torch.cat([prompt, response])[None], use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(used)
    log_p = torch.log_softmax(logits[len(prompt) - 1 : -1] / TEMPERATURE, -1)
    return log_p.gather(1, response[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def aggregated(loss: Tensor, mode: str, tokens: int, rows: int) -> Tensor:
    """What the token losses of one row add to the loss of a mini-batch of so many tokens and rows."""
    return {
        "token-mean": loss.sum() / tokens,
        "seq-mean-token-sum": loss.sum() / rows,
        "seq-mean-token-mean": loss.mean() / rows,
        "seq-mean-token-sum-norm": loss.sum() / rows / FIXED_DIVISOR,
        "token-sum": loss.sum(),
    }[mode]


@pytest.mark.parametrize("mode", MODES)
def test_the_actors_gradient_is_that_of_the_loss_written_out(float64: Policies, mode: str) -> None:
    """An oracle that shares no code: a plain forward a row, and the loss by its definition."""
    shape = Shape(prompt_lengths=[4, 6], groups=[3, 2], responses=[5, 2, 7, 3, 6], seed=0)
    batch, config = make_batch(shape), actor_config(mode)
    columns = batch.tensors
    mask = columns["response_mask"]
    assert 0 < int(mask.any(1).sum()) < 5  # some row has its mask cleared
    float64.policy.zero_grad(set_to_none=True)
    tokens, rows = int(mask.sum()), int(mask.any(1).sum())
    total = torch.zeros((), dtype=torch.float64)
    for row, length in enumerate(shape.responses):
        log_probs, entropy = plain_log_probs(float64, batch, row)
        old, ref, advantage = (columns[n][row, :length] for n in ("old_log_probs", "ref_log_probs", "advantages"))
        ratio = (log_probs - old).exp()
        surrogate = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
        loss = torch.where(advantage < 0, torch.minimum(surrogate, -advantage * 3.0), surrogate)
        kl = (ref - log_probs).exp() - 1 - (ref - log_probs)
        loss = (loss - 0.05 * entropy + 0.3 * kl)[mask[row, :length]]
        if len(loss):
            total = total + aggregated(loss, mode, tokens, rows)
    total.backward()
    expected = {n: p.grad.clone() for n, p in float64.policy_weights.masters.items() if p.grad is not None}
    found, metrics = actor_step(float64, batch, Limits(2, None, True), config)
    assert distance(expected, found) <= 1e-10
    assert metrics["actor/grad_norm"] == pytest.approx(
        math.sqrt(sum(float(g.square().sum()) for g in expected.values())), rel=1e-9
    )
    combined = metrics["actor/pg_loss"] + 0.3 * metrics["actor/kl_loss"]
    assert config.entropy_coeff == 0.05
    if mode == "token-mean":  # the one mode in which the logged entropy is the one in the loss
        assert combined - 0.05 * metrics["actor/entropy"] == pytest.approx(total.item(), abs=1e-9)


@pytest.mark.parametrize("mode", MODES)
def test_the_critics_gradient_is_that_of_the_loss_written_out(float64: Policies, mode: str) -> None:
    """Values from a plain forward a row, read before the token that they are of; half the larger squared error."""
    shape = Shape(prompt_lengths=[4, 6], groups=[3, 2], responses=[5, 2, 7, 3, 6], seed=0)
    batch = make_batch(shape)
    columns, model = batch.tensors, float64.value
    mask = columns["response_mask"]
    width = columns["prompts"].shape[1]
    tokens, rows = int(mask.sum()), int(mask.any(1).sum())
    model.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    moved = 0
    for row, length in enumerate(shape.responses):
        attention = columns["attention_mask"][row].bool()
        prompt = columns["prompts"][row][attention[:width]]
        response = columns["responses"][row, :length]
        used = model.backbone.config._attn_implementation
        model.backbone.set_attn_implementation("sdpa")
        try:
            states = model.backbone(torch.cat([prompt, response])[None], use_cache=False).last_hidden_state[0]
        finally:
            model.backbone.set_attn_implementation(used)
        values = model.value_head(states[len(prompt) - 1 : -1])
        old, returns = columns["values"][row, :length], columns["returns"][row, :length]
        held = old + (values - old).clamp(-0.5, 0.5)
        loss = (0.5 * torch.maximum((values - returns) ** 2, (held - returns) ** 2))[mask[row, :length]]
        moved += int(((values - old).abs() > 0.5)[mask[row, :length]].sum())
        if len(loss):
            total = total + aggregated(loss, mode, tokens, rows)
    total.backward()
    expected = {n: p.grad.clone() for n, p in float64.value_weights.masters.items() if p.grad is not None}
    found, metrics = critic_step(float64, batch, Limits(2, None, True), mode)
    assert distance(expected, found) <= 1e-10
    assert metrics["critic/vf_loss"] == pytest.approx(total.item(), abs=1e-9)
    assert 0 < moved < tokens and metrics["critic/vf_clipfrac"] == pytest.approx(moved / tokens)
