"""The actor with losses that need more than a micro-batch's own columns: laws 1 and 2 of a whole optimizer step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import Policies, Shape, capture_gradients, distance, load, make_batch

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.loss_inputs import PolicyLoss
from verl.algorithms.metric import reduce_metrics
from verl.algorithms.policy_loss import POLICY_LOSSES
from verl.config import ActorConfig
from verl.config.schema_roles import PolicyLossConfig, RolloutCorrectionConfig
from verl.models.packed import PackedBatch
from verl.models.policy import PolicyModel
from verl.models.tiny import build_tiny
from verl.protocol import DataProto
from verl.training.actor import Actor
from verl.training.micro_batches import Limits
from verl.training.passes import Passes
from verl.training.reference import Reference

SHAPE = Shape(prompt_lengths=[4, 6], groups=[3, 3], responses=[5, 2, 7, 3, 6, 1], seed=4)
WHOLE = Limits(rows=10_000, tokens=None, share_prompts=False)
SPLITS = [(Limits(1, None, False), [0, 1, 2, 3, 4, 5]), (Limits(None, 20, True), [4, 0, 3, 5, 2, 1])]
COVARIANCE = {"clip_cov_ratio": 0.3, "clip_cov_lb": -0.3, "kl_cov_ratio": 0.3}


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> PolicyModel:
    folder = build_tiny(tmp_path_factory.mktemp("reference"), seed=8, hidden_size=32, tie_embeddings=False)
    return load(folder, torch.float64).policy


def batch_of(garbage: float | None = None) -> DataProto:
    batch = make_batch(SHAPE, garbage)
    mask = batch.batch["response_mask"]
    draws = torch.rand(mask.shape, generator=torch.Generator().manual_seed(2))
    batch.batch["draws"] = torch.where(mask, draws, 0.0 if garbage is None else garbage)
    return batch


def step(
    models: Policies,
    batch: DataProto,
    limits: Limits,
    config: ActorConfig,
    correction: RolloutCorrectionConfig | None = None,
    reference: PolicyModel | None = None,
    scheduled: dict[str, float] | None = None,
) -> tuple[dict[str, Any], dict[str, float]]:
    actor = Actor(models.policy, config, limits, 0.7, models.policy_weights, correction, reference)
    gradient = capture_gradients(actor.optimizer, models.policy_weights)
    batch.meta_info["scheduled"] = scheduled or {}
    metrics = actor.update(batch, count_denominators(batch.batch["response_mask"], 11.0))
    return gradient, reduce_metrics(metrics)


def loss_config(name: str, **settings: Any) -> ActorConfig:
    return ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **COVARIANCE), **settings)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_laws_1_and_2_for_every_loss(float64: Policies, name: str) -> None:
    config = loss_config(name)
    whole = step(float64, batch_of(), WHOLE, config)
    assert float(sum(g.norm() for g in whole[0].values())) > 0
    for limits, order in SPLITS:
        gradient, metrics = step(float64, batch_of().select_idxs(order), limits, config)
        assert distance(whole[0], gradient) <= 1e-10
        assert metrics == pytest.approx(whole[1], rel=1e-5, abs=1e-5)
    gradient, metrics = step(float64, batch_of(math.nan), WHOLE, config)
    assert distance(whole[0], gradient) == 0.0 and metrics == whole[1]


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_rows_without_advantage_get_no_backward_pass(
    float64: Policies, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six rows: gradient and every metric are what they are with it. kl_cov has a penalty for such rows."""
    batch = batch_of()
    batch.batch["advantages"][[0, 1, 4]] = 0.0
    passes: list[tuple[bool, int]] = []
    real = PolicyModel.forward

    def forward(self: PolicyModel, packed: PackedBatch, *arguments: Any) -> Any:
        passes.append((torch.is_grad_enabled(), packed.shape[0]))
        return real(self, packed, *arguments)

    full = step(float64, batch, SPLITS[0][0], loss_config(name, skip_zero_loss=False))
    with monkeypatch.context() as patched:
        patched.setattr(PolicyModel, "forward", forward)
        gradient, metrics = step(float64, batch, SPLITS[0][0], loss_config(name))
    assert distance(full[0], gradient) <= 1e-10
    assert metrics == pytest.approx(full[1], rel=1e-9, abs=1e-9)
    counted = batch.batch["response_mask"].any(1)
    still = int(counted[[2, 3, 5]].sum())
    backward, forward_only = (sum(rows for grad, rows in passes if grad is kind) for kind in (True, False))
    if POLICY_LOSSES[name].statistics is None:
        assert (backward, forward_only) == (still, int(counted.sum()) - still)
    assert backward == (int(counted.sum()) if name == "kl_cov" else still)
    for also in ({"entropy_coeff": 0.1}, {"use_kl_loss": True}):
        shortened = step(float64, batch, WHOLE, loss_config(name, **also))
        assert (
            distance(step(float64, batch, WHOLE, loss_config(name, skip_zero_loss=False, **also))[0], shortened[0])
            == 0.0
        )


def test_a_broken_row_without_advantage_still_spoils_the_step(float64: Policies) -> None:
    batch = batch_of()
    batch.batch["advantages"][[0, 1, 4]] = 0.0
    row = int(batch.batch["response_mask"][[0, 1, 4]].any(1).nonzero()[0])
    batch.batch["old_log_probs"][[0, 1, 4][row]] = math.nan
    assert step(float64, batch, SPLITS[0][0], ActorConfig())[1]["actor/skipped_steps"] == 1.0


@pytest.mark.parametrize("name", ["clip_cov", "kl_cov"])
def test_statistics_are_of_the_whole_mini_batch(float64: Policies, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They really choose tokens here, and the pass for them is made for these losses alone, once a step."""
    _, metrics = step(float64, batch_of(), SPLITS[0][0], loss_config(name))
    tokens = int(batch_of().batch["response_mask"].sum())
    assert metrics["actor/cov_frac"] == pytest.approx(math.floor(0.3 * tokens) / tokens)
    passes: list[int] = []
    real = Actor.log_probs
    monkeypatch.setattr(Actor, "log_probs", lambda self, batch: passes.append(len(batch)) or real(self, batch))
    step(float64, batch_of(), SPLITS[0][0], loss_config(name))
    step(float64, batch_of(), SPLITS[0][0], loss_config("vanilla"))
    assert passes == [6]


def test_bypass_mode_weighs_by_the_current_policy(float64: Policies) -> None:
    """REINFORCE with weights pi / pi_rollout has the gradient of the ratio itself: -A grad(pi / pi_rollout)."""
    batch = batch_of()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"]
    correction = RolloutCorrectionConfig(
        rollout_is="token", rollout_is_threshold=1e6, bypass_mode=True, loss_type="reinforce"
    )
    ratio = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.0))
    expected, _ = step(float64, batch, WHOLE, ratio)
    for limits, order in ((WHOLE, [0, 1, 2, 3, 4, 5]), *SPLITS):
        found, metrics = step(float64, batch.select_idxs(order), limits, ActorConfig(), correction)
        assert distance(expected, found) <= 1e-10
        assert 0 < metrics["rollout_corr/rollout_is_eff_sample_size"] < 1
    rejecting = RolloutCorrectionConfig(rollout_rs="seq_mean_k1", rollout_rs_threshold=1.0001, bypass_mode=True)
    gradient, metrics = step(float64, batch, WHOLE, ActorConfig(), rejecting)
    assert metrics["rollout_corr/rollout_rs_masked_frac"] == 1.0
    assert all(float(g.abs().max()) == 0 for g in gradient.values())  # all rejected: loss 0, no gradient


def test_weights_of_the_process_stage_reach_the_loss(float64: Policies) -> None:
    batch = batch_of()
    plain, _ = step(float64, batch, WHOLE, loss_config("gpg"))
    batch.batch["importance_weights"] = torch.full(batch.batch["response_mask"].shape, 2.0)
    doubled, _ = step(float64, batch, SPLITS[1][0], loss_config("gpg"))
    assert distance({n: 2 * g for n, g in plain.items()}, doubled) <= 1e-10


def test_scheduled_values_reach_the_loss(float64: Policies) -> None:
    values = {"clip_ratio_low": 0.01, "clip_ratio_high": 0.02, "entropy_coeff": 0.3, "kl_loss_coef": 2.0}
    configured = step(float64, batch_of(), WHOLE, ActorConfig(use_kl_loss=True, **values))
    scheduled = step(float64, batch_of(), WHOLE, ActorConfig(use_kl_loss=True), scheduled=values)
    assert distance(configured[0], scheduled[0]) == 0.0 and configured[1] == scheduled[1]
    assert distance(step(float64, batch_of(), WHOLE, ActorConfig(use_kl_loss=True))[0], scheduled[0]) > 1e-3


def test_the_full_kl_as_a_loss_and_as_a_column(float64: Policies, reference: PolicyModel) -> None:
    config = loss_config("gpg", use_kl_loss=True, kl_loss_type="full", kl_loss_coef=1.0)
    batch = batch_of()
    batch.batch["advantages"] = torch.zeros_like(batch.batch["advantages"])
    whole = step(float64, batch, WHOLE, config, reference=reference)
    for limits, order in SPLITS:
        gradient, metrics = step(float64, batch.select_idxs(order), limits, config, reference=reference)
        assert distance(whole[0], gradient) <= 1e-10
        assert metrics == pytest.approx(whole[1], rel=1e-5, abs=1e-5)
    mask = batch.batch["response_mask"]
    found = Reference(reference, Passes("reference", WHOLE), 0.7).full_kl(batch, float64.policy).batch["full_kl"]
    assert bool((found[mask] > 0).all())
    assert whole[1]["actor/kl_loss"] == pytest.approx(float(found[mask].mean()), rel=1e-6)


OWN = """
import torch

def policy_loss(inputs, config, denominators):
    centred = inputs.advantages - inputs.statistics["mean"]
    loss = torch.where(inputs.response_mask, -centred * inputs.log_probs, 0.0).sum() / denominators.tokens
    return loss, {}

def statistics(inputs, config):
    assert inputs.draws is not None
    return {"mean": inputs.advantages[inputs.response_mask].mean()}

policy_loss.statistics = statistics
"""


def test_a_users_own_loss(float64: Policies, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    config = ActorConfig(policy_loss=PolicyLossConfig(path=str(tmp_path / "own.py")))
    batch = batch_of()
    found, metrics = step(float64, batch, SPLITS[1][0], config)
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = batch.batch["advantages"] - batch.batch["advantages"][mask].mean()
    expected, _ = step(float64, batch, WHOLE, loss_config("gpg"))
    assert distance(expected, found) <= 1e-6  # the mean is rounded to float32 in between
    assert "actor/entropy" in metrics
    assert isinstance(POLICY_LOSSES["gpg"], PolicyLoss)
