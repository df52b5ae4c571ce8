from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.loss_inputs import LossInputs, PolicyLoss, guarded
from verl.algorithms.metric import reduce_metrics
from verl.algorithms.policy_loss import POLICY_LOSSES, actor_loss, find_policy_loss, vanilla
from verl.config.schema_roles import ActorConfig, PolicyLossConfig
from verl.errors import ConfigError

NAN, INF = math.nan, math.inf


def row(*values: float, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor([values], dtype=dtype)


def whole_loss(inputs: LossInputs, config: ActorConfig, denominators: Any) -> Any:
    return actor_loss(POLICY_LOSSES["vanilla"], inputs, config, denominators)


def evaluate(function: Any, config: ActorConfig, log_probs: torch.Tensor, advantages: torch.Tensor, **columns: Any):
    """Loss and finished metrics; old log-probs are 0 and every token is trained unless said otherwise."""
    mask = columns.pop("response_mask", torch.ones_like(log_probs, dtype=torch.bool))
    old = columns.pop("old_log_probs", torch.zeros_like(log_probs))
    inputs = LossInputs(log_probs, old, advantages, mask, **columns)
    loss, metrics = function(inputs, config, count_denominators(mask, log_probs.shape[1]))
    return loss, reduce_metrics(metrics)


@pytest.mark.parametrize(
    ("advantage", "ratio", "expected"),
    [(-1, 10, 3), (-1, 3.5, 3), (-1, 2, 2), (-1, 0.5, 0.8), (1, 10, -1.2), (1, 0.5, -0.5), (2, 10, -2.4)],
)
def test_b026_clip_and_dual_clip(advantage, ratio, expected):
    loss, metrics = evaluate(vanilla, ActorConfig(), row(math.log(ratio)), row(advantage))
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert metrics["actor/pg_loss"] == loss.item()
    assert metrics["actor/pg_clipfrac_lower"] == (1.0 if advantage < 0 and ratio > 3 else 0.0)
    assert metrics["actor/ppo_kl"] == pytest.approx(-math.log(ratio))


def test_low_and_high_clip_are_separate():
    config = ActorConfig(clip_ratio_low=0.1, clip_ratio_high=0.4)
    for advantage, ratio, expected in ((1, 1.3, -1.3), (1, 1.5, -1.4), (-1, 0.95, 0.95), (-1, 0.7, 0.9)):
        loss, _ = evaluate(vanilla, config, row(math.log(ratio)), row(advantage))
        assert loss.item() == pytest.approx(expected, abs=1e-12)


def test_b029_clip_fraction_is_where_the_clip_won():
    _, metrics = evaluate(vanilla, ActorConfig(), row(1.0, 0.1, -0.5), row(1.0, 1.0, -1.0))
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)
    _, metrics = evaluate(vanilla, ActorConfig(), row(1.0, 0.1, -0.5), row(-1.0, 1.0, 1.0))
    assert metrics["actor/pg_clipfrac"] == 0  # pessimistic: here the plain term is the larger


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("log_ratio", "advantage", "expected"),
    [(1000, 0, 0), (1000, 1, -1.2), (1000, -1, 3), (-1000, 0, 0), (-1000, 1, 0), (-1000, -1, 0.8), (INF, 1, -1.2)],
)
def test_b021_far_ratios_give_a_finite_loss_and_no_gradient(log_ratio, advantage, expected, dtype):
    log_probs = row(log_ratio, dtype=dtype).requires_grad_()
    loss, _ = evaluate(vanilla, ActorConfig(), log_probs, row(advantage, dtype=dtype))
    loss.backward()
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    assert log_probs.grad.item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_b021_the_guard_changes_no_bit_inside_and_stops_the_gradient_outside(dtype):
    inside = torch.linspace(-20, 20, 4001, dtype=dtype).requires_grad_()
    plain = inside.detach().clone().requires_grad_()
    assert torch.equal(guarded(inside).exp(), plain.exp())
    guarded(inside).exp().sum().backward()
    plain.exp().sum().backward()
    assert torch.equal(inside.grad, plain.grad)
    outside = torch.tensor([20.001, 88.8, 1e30, INF, -20.001, -1e30, -INF], dtype=dtype, requires_grad=True)
    guarded(outside).exp().sum().backward()
    assert guarded(outside).exp().isfinite().all()
    assert (outside.grad == 0).all()


@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
def test_b021_a_nan_log_prob_surfaces(advantage):
    loss, metrics = evaluate(vanilla, ActorConfig(), row(NAN, 0.0), row(advantage, 1.0))
    assert loss.isnan()
    assert math.isnan(metrics["actor/pg_loss"])
    assert metrics["actor/ppo_kl/skipped"] == 1
    loss, _ = evaluate(vanilla, ActorConfig(), row(0.0), row(advantage), old_log_probs=row(NAN))
    assert loss.isnan()


def test_b022_a_rejected_token_has_exactly_no_gradient():
    log_probs = row(1000.0, 0.0).requires_grad_()
    loss, _ = evaluate(vanilla, ActorConfig(), log_probs, row(1.0, 1.0), importance_weights=row(0.0, 1.0))
    loss.backward()
    assert loss.item() == pytest.approx(-0.5)  # the rejected token stays in the denominator
    assert log_probs.grad.tolist() == [[0.0, -0.5]]


def test_b025_nothing_leaks_from_sentinels():
    mask = torch.tensor([[1, 1, 0, 0]], dtype=torch.bool)
    columns = {"response_mask": mask, "entropy": row(0.5, 1.0, -1.0, -1.0), "old_log_probs": row(-0.4, -1.0, 9, NAN)}
    _, metrics = evaluate(whole_loss, ActorConfig(), row(-0.5, -1.0, 1.0, 1.0), row(1.0, 1.0, NAN, INF), **columns)
    assert metrics["actor/entropy"] == 0.75
    assert metrics["actor/ppo_kl"] == pytest.approx(0.05)


def test_b047_unchanged_weights_give_ratio_1_exactly_and_bf16_storage_does_not():
    log_probs = row(-5.3, -0.01, dtype=torch.float32)
    loss, metrics = evaluate(vanilla, ActorConfig(), log_probs, row(1.0, 1.0), old_log_probs=log_probs.clone())
    assert loss.item() == -1.0
    assert metrics["actor/ppo_kl"] == 0.0
    stored = row(-5.3, dtype=torch.bfloat16)
    loss, _ = evaluate(vanilla, ActorConfig(), row(-5.3), row(1.0), old_log_probs=stored)
    assert loss.item() == pytest.approx(-1.012578, abs=1e-6)


def test_the_gradient_on_policy_is_the_policy_gradient():
    log_probs = row(-1.0, -2.0, -3.0).requires_grad_()
    advantages = row(0.5, -2.0, 7.0)
    mask = torch.tensor([[1, 1, 0]], dtype=torch.bool)
    columns = {"old_log_probs": log_probs.detach().clone(), "response_mask": mask}
    loss, _ = evaluate(vanilla, ActorConfig(), log_probs, advantages, **columns)
    loss.backward()
    assert log_probs.grad.tolist() == [[-0.25, 1.0, 0.0]]


# The actor's whole loss


def test_b018_kl_is_aggregated_under_the_mask():
    # k2 of d is d^2 / 2: KL terms .1, .3 and 9.9; ratio 1 and A = -1: policy loss 1 a token.
    d = row(math.sqrt(0.2), math.sqrt(0.6), math.sqrt(19.8))
    config = ActorConfig(use_kl_loss=True, kl_loss_coef=0.5, kl_loss_type="k2")
    columns = {
        "old_log_probs": d.clone(),
        "ref_log_probs": torch.zeros_like(d),
        "response_mask": torch.tensor([[1, 1, 0]], dtype=torch.bool),
    }
    loss, metrics = evaluate(whole_loss, config, d, -torch.ones_like(d), **columns)
    assert loss.item() == pytest.approx(1.1, abs=1e-12)
    assert metrics["actor/kl_loss"] == pytest.approx(0.2, abs=1e-12)
    assert metrics["actor/pg_loss"] == pytest.approx(1.0, abs=1e-12)


def test_the_entropy_bonus_lowers_the_loss():
    entropy = row(1.0, 3.0).requires_grad_()
    config = ActorConfig(entropy_coeff=0.1)
    loss, metrics = evaluate(whole_loss, config, row(0.0, 0.0), row(1.0, 1.0), entropy=entropy)
    loss.backward()
    assert loss.item() == pytest.approx(-1.0 - 0.1 * 2.0)
    assert entropy.grad.tolist() == [[-0.05, -0.05]]
    assert metrics["actor/entropy"] == 2.0


def test_terms_that_are_off_leave_the_policy_loss_alone():
    columns = {"entropy": row(1.0, NAN), "ref_log_probs": row(NAN, 0.0)}
    loss, metrics = evaluate(whole_loss, ActorConfig(), row(0.0, 0.0), row(1.0, 1.0), **columns)
    assert loss.item() == -1.0
    assert "actor/kl_loss" not in metrics


def test_a_term_without_its_column_is_an_error():
    with pytest.raises(ValueError, match="entropy"):
        evaluate(whole_loss, ActorConfig(entropy_coeff=0.1), row(0.0), row(1.0))
    with pytest.raises(ValueError, match="ref_log_probs"):
        evaluate(whole_loss, ActorConfig(use_kl_loss=True), row(0.0), row(1.0))
    with pytest.raises(ConfigError, match="zero in expectation"):
        config = ActorConfig.model_construct(**(dict(ActorConfig()) | {"use_kl_loss": True, "kl_loss_type": "k1"}))
        evaluate(whole_loss, config, row(0.0), row(1.0), ref_log_probs=row(0.0))


def test_shapes_must_agree():
    mask = torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match=r"advantages has shape \(2, 1\)"):
        LossInputs(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1), mask)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_gradcheck(mode):
    config = ActorConfig(loss_agg_mode=mode, use_kl_loss=True, kl_loss_coef=0.3, entropy_coeff=0.2)
    g = torch.Generator().manual_seed(0)
    log_probs, old, advantages, ref, entropy = (torch.randn(3, 4, generator=g, dtype=torch.float64) for _ in range(5))
    mask = torch.rand(3, 4, generator=g) < 0.7

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor) -> torch.Tensor:
        columns = {"old_log_probs": old, "ref_log_probs": ref, "entropy": entropy, "response_mask": mask}
        return evaluate(whole_loss, config, log_probs, advantages, **columns)[0]

    assert torch.autograd.gradcheck(loss, (log_probs.requires_grad_(), entropy.requires_grad_()))


# A user's own loss


OWN = """
def policy_loss(inputs, config, denominators):
    loss = (inputs.statistics["mean"] * inputs.log_probs).sum() / denominators.tokens
    return loss, {}

def statistics(inputs, config):
    return {"mean": inputs.advantages.mean()}

policy_loss.statistics = statistics

def wrong(inputs):
    return 0

nothing = 3
"""


def test_a_users_own_loss_from_a_file(tmp_path):
    (tmp_path / "mine.py").write_text(OWN)
    found = find_policy_loss(PolicyLossConfig(path=str(tmp_path / "mine.py")))
    inputs = LossInputs(row(1.0, 3.0), row(0.0, 0.0), row(4.0, 2.0), row(1.0, 1.0).bool())
    assert found.statistics is not None
    statistics = found.statistics(inputs, ActorConfig())
    loss, _ = actor_loss(
        found,
        replace(inputs, statistics=statistics),
        ActorConfig(),
        count_denominators(inputs.response_mask, 2),
    )
    assert loss.item() == 6.0
    assert isinstance(found, PolicyLoss)


@pytest.mark.parametrize(
    ("file", "name", "complaint"),
    [
        ("mine.py", "wrong", r"called with \(inputs, config, denominators\)"),
        ("mine.py", "policy_los", "did you mean policy_loss"),
        ("mine.py", "nothing", "is no function"),
        ("mime.py", "policy_loss", "did you mean mine"),
    ],
)
def test_a_users_own_loss_that_does_not_fit(tmp_path, file, name, complaint):
    (tmp_path / "mine.py").write_text(OWN)
    with pytest.raises(ConfigError, match=complaint):
        find_policy_loss(PolicyLossConfig(path=str(tmp_path / file), name=name))


def test_schema_and_documentation_name_the_losses_that_exist():
    field = PolicyLossConfig.model_fields["loss_mode"].annotation
    assert list(field.__args__) == list(POLICY_LOSSES)
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    assert re.findall(
        r"^\| `(\w+)` \|", page.partition("## Value loss")[0].partition("## Policy losses")[2], re.M
    ) == list(POLICY_LOSSES)
