"""Every policy loss against an oracle written from its paper: plain loops in float64, value and gradient.

An oracle gives a mini-batch's loss and its gradient in each token's log-prob, by the closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.loss_inputs import LossInputs
from verl.algorithms.metric import reduce_metrics
from verl.algorithms.policy_loss import POLICY_LOSSES
from verl.config.schema_roles import ActorConfig, PolicyLossConfig

SETTINGS: dict[str, dict[str, Any]] = {
    "clip_cov": {"clip_cov_ratio": 0.3, "clip_cov_lb": -0.5, "clip_cov_ub": 2.0},
    "kl_cov": {"kl_cov_ratio": 0.3, "ppo_kl_coef": 0.7},
}


@dataclass
class Rows:
    """A mini-batch as lists of rows, each row the list of its trained tokens."""

    new: list[list[float]]
    old: list[list[float]]
    rollout: list[list[float]]
    advantages: list[list[float]]
    draws: list[list[float]]

    def tokens(self) -> list[tuple[int, int]]:
        return [(i, t) for i, row in enumerate(self.new) for t in range(len(row))]


Outcome = tuple[float, dict[tuple[int, int], float]]
TokenRule = Callable[[Rows, int, int, ActorConfig], tuple[float, float]]


def by_token(rule: TokenRule) -> Callable[[Rows, ActorConfig], Outcome]:
    """Token losses and gradients, averaged over all tokens."""

    def oracle(rows: Rows, config: ActorConfig) -> Outcome:
        places = rows.tokens()
        found = {place: rule(rows, *place, config) for place in places}
        count = max(len(places), 1)
        return sum(value for value, _ in found.values()) / count, {p: g / count for p, (_, g) in found.items()}

    return oracle


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ppo(rows: Rows, i: int, t: int, config: ActorConfig, dual: bool = True) -> tuple[float, float]:
    """min(rho A, clip(rho) A), and for A < 0 not below c A; the loss is its negative."""
    a = rows.advantages[i][t]
    rho = math.exp(rows.new[i][t] - rows.old[i][t])
    held = clip(rho, 1 - config.clip_low, 1 + config.clip_high)
    objective, slope = (rho * a, rho * a) if rho * a <= held * a else (held * a, 0.0)
    if dual and a < 0 and objective < config.clip_ratio_c * a:
        objective, slope = config.clip_ratio_c * a, 0.0
    return -objective, -slope


def decoupled(rows: Rows, i: int, t: int, config: ActorConfig) -> tuple[float, float]:
    weight = math.exp(rows.old[i][t] - rows.rollout[i][t])
    loss, slope = ppo(rows, i, t, config)
    return weight * loss, weight * slope


def cispo(rows: Rows, i: int, t: int, config: ActorConfig) -> tuple[float, float]:
    rho = math.exp(rows.new[i][t] - rows.old[i][t])
    weight = clip(rho, 1 - config.clip_low, 1 + config.clip_high) * rows.advantages[i][t]
    return -weight * rows.new[i][t], -weight


def gpg(rows: Rows, i: int, t: int, config: ActorConfig) -> tuple[float, float]:
    return -rows.advantages[i][t] * rows.new[i][t], -rows.advantages[i][t]


def sapo(rows: Rows, i: int, t: int, config: ActorConfig) -> tuple[float, float]:
    a = rows.advantages[i][t]
    tau = config.tau_pos if a > 0 else config.tau_neg
    rho = math.exp(rows.new[i][t] - rows.old[i][t])
    sigmoid = 1 / (1 + math.exp(-tau * (rho - 1)))
    return -4 / tau * sigmoid * a, -4 * sigmoid * (1 - sigmoid) * rho * a


def dppo(divergence: Callable[[float, float], float]) -> TokenRule:
    def rule(rows: Rows, i: int, t: int, config: ActorConfig) -> tuple[float, float]:
        a, pi, mu = rows.advantages[i][t], math.exp(rows.new[i][t]), math.exp(rows.rollout[i][t])
        away = (a > 0 and pi > mu) or (a < 0 and pi < mu)
        if away and divergence(pi, mu) > (config.clip_high if a > 0 else config.clip_low):
            return 0.0, 0.0
        rho = math.exp(rows.new[i][t] - rows.old[i][t])
        return -a * rho, -a * rho

    return rule


def binary_kl(pi: float, mu: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def gspo(rows: Rows, config: ActorConfig) -> Outcome:
    used = [i for i, row in enumerate(rows.new) if row]
    loss, slopes = 0.0, {}
    for i in used:
        length = len(rows.new[i])
        s = math.exp(sum(n - o for n, o in zip(rows.new[i], rows.old[i], strict=True)) / length)
        for t, a in enumerate(rows.advantages[i]):
            held = clip(s, 1 - config.clip_low, 1 + config.clip_high)
            loss += -min(s * a, held * a) / length / len(used)
            slopes[i, t] = -s * a / length / len(used) if s * a <= held * a else 0.0
    return loss, slopes


def geo_mean(rows: Rows, config: ActorConfig) -> Outcome:
    used = [i for i, row in enumerate(rows.new) if row]
    loss, slopes = 0.0, {}
    for i in used:
        ratios = [n - o for n, o in zip(rows.new[i], rows.old[i], strict=True)]
        held = []
        for ratio, a in zip(ratios, rows.advantages[i], strict=True):
            held.append(min(ratio, config.clip_high) if a > 0 else max(ratio, -config.clip_low) if a < 0 else ratio)
        s, advantage = math.exp(np.mean(held)), float(np.mean(rows.advantages[i]))
        loss += -advantage * s / len(used)
        for t, ratio in enumerate(ratios):
            slopes[i, t] = -advantage * s / len(ratios) / len(used) if held[t] == ratio else 0.0
    return loss, slopes


def covariances(rows: Rows) -> dict[tuple[int, int], float]:
    places = rows.tokens()
    a = np.array([rows.advantages[i][t] for i, t in places])
    p = np.array([rows.new[i][t] for i, t in places])
    return dict(zip(places, (a - a.mean()) * (p - p.mean()), strict=True)) if places else {}


def clip_cov(rows: Rows, config: ActorConfig) -> Outcome:
    cov, chosen = covariances(rows), []
    for i, t in rows.tokens():
        a, rho = rows.advantages[i][t], math.exp(rows.new[i][t] - rows.old[i][t])
        clipped = (a > 0 and rho > 1 + config.clip_high) or (a < 0 and rho < 1 - config.clip_low)
        if not clipped and config.policy_loss.clip_cov_lb < cov[i, t] < config.policy_loss.clip_cov_ub:
            chosen.append((rows.draws[i][t], (i, t)))
    count = math.floor(config.policy_loss.clip_cov_ratio * len(cov) + 1e-9)
    left_out = {place for _, place in sorted(chosen)[:count]}

    def rule(rows: Rows, i: int, t: int, config: ActorConfig) -> tuple[float, float]:
        return (0.0, 0.0) if (i, t) in left_out else ppo(rows, i, t, config, dual=False)

    return by_token(rule)(rows, config)


def kl_cov(rows: Rows, config: ActorConfig) -> Outcome:
    cov = covariances(rows)
    count = math.floor(config.policy_loss.kl_cov_ratio * len(cov) + 1e-9)
    top = {place for _, place in sorted(((-c, place) for place, c in cov.items()))[:count]}

    def rule(rows: Rows, i: int, t: int, config: ActorConfig) -> tuple[float, float]:
        distance = rows.new[i][t] - rows.old[i][t]
        loss = slope = -rows.advantages[i][t] * math.exp(distance)
        if (i, t) in top:
            beta = config.policy_loss.ppo_kl_coef
            return loss + beta * abs(distance), slope + beta * math.copysign(1.0, distance)
        return loss, slope

    return by_token(rule)(rows, config)


ORACLES: dict[str, Callable[[Rows, ActorConfig], Outcome]] = {
    "vanilla": by_token(ppo),
    "decoupled": by_token(decoupled),
    "gspo": gspo,
    "cispo": by_token(cispo),
    "gpg": by_token(gpg),
    "geo_mean": geo_mean,
    "sapo": by_token(sapo),
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "dppo_tv": by_token(dppo(lambda pi, mu: abs(pi - mu))),
    "dppo_kl": by_token(dppo(binary_kl)),
}


def test_every_loss_has_an_oracle():
    assert ORACLES.keys() == POLICY_LOSSES.keys()


def random_batch(seed: int) -> tuple[dict[str, torch.Tensor], Rows]:
    """(B, R) columns whose masked places hold NaN, and the same as rows of trained tokens."""
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    mask = rng.random(shape) < 0.7
    old = rng.uniform(-4.0, -0.2, shape)
    columns = {
        "old_log_probs": old,
        "log_probs": np.minimum(old + rng.normal(0, 0.4, shape), -0.01),
        "rollout_log_probs": np.minimum(old + rng.normal(0, 0.2, shape), -0.01),
        "advantages": rng.normal(0, 1.5, shape) * (rng.random(shape) < 0.9),
        "draws": rng.random(shape),
    }
    kept = {name: [list(x[i][mask[i]]) for i in range(len(x))] for name, x in columns.items()}
    rows = Rows(*(kept[n] for n in ("log_probs", "old_log_probs", "rollout_log_probs", "advantages", "draws")))
    dirty = {name: torch.from_numpy(np.where(mask, x, math.nan)) for name, x in columns.items()}
    return dirty | {"response_mask": torch.from_numpy(mask)}, rows


def run(name: str, columns: dict[str, torch.Tensor], config: ActorConfig) -> tuple[torch.Tensor, torch.Tensor, dict]:
    entry = POLICY_LOSSES[name]
    log_probs = columns["log_probs"].clone().requires_grad_()
    inputs = LossInputs(**(columns | {"log_probs": log_probs}))
    if entry.statistics is not None:
        with torch.no_grad():
            inputs = replace(inputs, statistics=entry.statistics(inputs, config))
    mask = columns["response_mask"]
    loss, metrics = entry.function(inputs, config, count_denominators(mask, mask.shape[1]))
    loss.backward()
    return loss.detach(), log_probs.grad, reduce_metrics(metrics)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([(0.2, 0.2, 3.0), (0.1, 0.5, 1.5), (0.05, 0.02, 10.0)]))
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_against_the_paper(name, seed, ranges):
    low, high, c = ranges
    loss_config = PolicyLossConfig(loss_mode=name, **SETTINGS.get(name, {}))
    config = ActorConfig(clip_ratio_low=low, clip_ratio_high=high, clip_ratio_c=c, policy_loss=loss_config)
    columns, rows = random_batch(seed)
    loss, gradient, metrics = run(name, columns, config)
    expected, slopes = ORACLES[name](rows, config)
    assert loss.item() == pytest.approx(expected, rel=1e-10, abs=1e-12)
    mask = columns["response_mask"].numpy()
    assert (gradient.numpy()[~mask] == 0).all()
    found = [list(g[m]) for g, m in zip(gradient.numpy(), mask, strict=True)]
    for (i, t), slope in slopes.items():
        assert found[i][t] == pytest.approx(slope, rel=1e-9, abs=1e-12)
    if mask.any():
        assert metrics["actor/pg_loss"] == loss.item()
        drift = np.mean([rows.old[i][t] - rows.new[i][t] for i, t in rows.tokens()])
        assert metrics["actor/ppo_kl"] == pytest.approx(drift, abs=1e-12)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_on_policy_the_ratio_is_exactly_1_and_the_gradient_is_the_policy_gradient(name):
    columns, rows = random_batch(5)
    columns["old_log_probs"] = columns["rollout_log_probs"] = columns["log_probs"]
    loss_config = PolicyLossConfig(loss_mode=name, clip_cov_ratio=0.0, kl_cov_ratio=0.0)
    columns["advantages"] = torch.where(columns["response_mask"], torch.tensor([[1.5]] * 5)[: len(rows.new)], math.nan)
    loss, gradient, metrics = run(name, columns, ActorConfig(policy_loss=loss_config))
    mask = columns["response_mask"]
    assert metrics["actor/ppo_kl"] == 0.0
    assert metrics.get("actor/pg_clipfrac", 0.0) == 0.0
    lengths = mask.sum(1, keepdim=True)
    weights = 1 / lengths.double() / (lengths > 0).sum() if name in ("gspo", "geo_mean") else 1 / mask.double().sum()
    torch.testing.assert_close(gradient[mask], (-1.5 * weights).expand(mask.shape)[mask], rtol=1e-12, atol=0)
    if name in ("vanilla", "decoupled", "gspo", "geo_mean", "clip_cov", "kl_cov", "dppo_tv", "dppo_kl"):
        assert loss.item() == -1.5  # -A times a ratio of 1


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_importance_weights_multiply_each_tokens_gradient(name):
    columns, _ = random_batch(17)
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, **SETTINGS.get(name, {})))
    _, plain, _ = run(name, columns, config)
    weights = torch.rand(plain.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    weights[::2, ::2] = 0.0
    dirty = torch.where(columns["response_mask"], weights, math.nan)
    _, weighted, _ = run(name, columns | {"importance_weights": dirty}, config)
    assert plain.abs().sum() > 0
    torch.testing.assert_close(weighted, plain * weights, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", ["sapo", "gpg"])
def test_gradcheck_of_the_smooth_losses(name):
    columns, _ = random_batch(3)
    mask = columns["response_mask"]
    clean = {n: torch.where(mask, x, 0.0) if x.is_floating_point() else x for n, x in columns.items()}

    def loss(log_probs: torch.Tensor) -> torch.Tensor:
        inputs = LossInputs(**(clean | {"log_probs": log_probs}))
        return POLICY_LOSSES[name].function(inputs, ActorConfig(), count_denominators(mask, 5))[0]

    assert torch.autograd.gradcheck(loss, (clean["log_probs"].clone().requires_grad_(),))


# Hand-computed cases


def one_row(log_ratio: list[float], advantages: list[float], **columns: Any) -> dict[str, torch.Tensor]:
    new = torch.tensor([log_ratio], dtype=torch.float64)
    mask = columns.pop("response_mask", torch.ones_like(new, dtype=torch.bool))
    a = torch.tensor([advantages], dtype=torch.float64)
    return {"log_probs": new, "old_log_probs": new * 0, "advantages": a, "response_mask": mask, **columns}


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_b038_sequence_ratio(sign):
    """Two tokens alone exceed 1.2, their response's ratio does not; a masked 5.0 plays no part."""
    mask = torch.tensor([[1, 1, 1, 0]], dtype=torch.bool)
    columns = one_row([0.3, -0.1, 0.2, 5.0], [sign] * 4, response_mask=mask)
    columns["old_log_probs"] = torch.zeros(1, 4, dtype=torch.float64)
    loss, gradient, metrics = run("gspo", columns, ActorConfig())
    assert loss.item() == pytest.approx(-sign * 1.142631, abs=1e-6)
    assert gradient[0, 3] == 0
    assert gradient[0, :3].tolist() == pytest.approx([-sign * 1.142631 / 3] * 3, abs=1e-6)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_geo_mean_by_hand():
    """A = 2: log-ratios .3, -.1 are cut to .2, -.1; mean .05."""
    loss, gradient, metrics = run("geo_mean", one_row([0.3, -0.1], [2.0, 2.0]), ActorConfig())
    assert loss.item() == pytest.approx(-2 * math.exp(0.05))
    assert gradient.tolist()[0] == pytest.approx([0.0, -math.exp(0.05)])
    assert metrics["actor/pg_clipfrac"] == 0.5


def test_sapo_by_hand():
    loss, _, _ = run("sapo", one_row([0.0, math.log(2)], [1.0, -1.0]), ActorConfig(tau_pos=2.0, tau_neg=0.5))
    assert loss.item() == pytest.approx((-2 * 0.5 + 8 / (1 + math.exp(-0.5))) / 2)


def test_dppo_masks_only_what_moves_away():
    """|pi - mu| is .3 throughout, the limit .2; tokens on their way back are not masked."""
    mu = torch.tensor([[0.5, 0.5, 0.5, 0.5]], dtype=torch.float64).log()
    pi = torch.tensor([[0.8, 0.8, 0.2, 0.2]], dtype=torch.float64).log()
    columns = one_row([0.0] * 4, [1.0, -1.0, 1.0, -1.0], rollout_log_probs=mu)
    columns |= {"log_probs": pi, "old_log_probs": mu}
    loss, gradient, metrics = run("dppo_tv", columns, ActorConfig())
    assert metrics["actor/pg_clipfrac"] == 0.5
    assert (gradient[0] == 0).tolist() == [True, False, False, True]
    assert loss.item() == pytest.approx((1.6 - 0.4) / 4)
    _, _, metrics = run("dppo_kl", columns, ActorConfig(clip_ratio=0.23))  # the KL is .223
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_the_behaviour_policy_of_dppo_is_the_engines():
    columns = one_row([math.log(0.5)], [1.0], rollout_log_probs=torch.tensor([[math.log(0.1)]], dtype=torch.float64))
    columns["old_log_probs"] = columns["log_probs"]
    assert run("dppo_tv", columns, ActorConfig())[2]["actor/pg_clipfrac"] == 1.0
    del columns["rollout_log_probs"]
    assert run("dppo_tv", columns, ActorConfig())[2]["actor/pg_clipfrac"] == 0.0


def test_clip_cov_leaves_out_a_share_of_all_tokens_in_the_range():
    g = torch.Generator().manual_seed(1)
    advantages, log_probs = (torch.randn(40, 50, generator=g, dtype=torch.float64) for _ in range(2))
    columns = {
        "log_probs": log_probs,
        "old_log_probs": log_probs,
        "advantages": advantages,
        "response_mask": torch.ones(40, 50, dtype=torch.bool),
        "draws": torch.rand(40, 50, generator=g),
    }
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="clip_cov", clip_cov_ratio=0.01))
    _, gradient, metrics = run("clip_cov", columns, config)
    left_out = gradient == 0
    assert int(left_out.sum()) == 20 and metrics["actor/cov_frac"] == 0.01
    cov = (advantages - advantages.mean()) * (log_probs - log_probs.mean())
    assert ((cov[left_out] > 1) & (cov[left_out] < 5)).all()
    eligible = (cov > 1) & (cov < 5)
    assert columns["draws"][left_out].max() < columns["draws"][eligible & ~left_out].min()


def test_equal_covariances_are_chosen_by_draws_not_by_order():
    """Without spread every covariance is 0: the choice must not depend on how rows are ordered."""
    columns = one_row([0.5] * 10, [1.0] * 10, draws=torch.tensor([[0.9, 0.2, 0.5, 0.1, 0.7, 0.6, 0.3, 0.8, 0.4, 0.99]]))
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode="kl_cov", kl_cov_ratio=0.2))
    _, gradient, _ = run("kl_cov", columns, config)
    assert (gradient[0] > gradient[0, 0]).tolist() == [False, True, False, True] + [False] * 6


# B021 for every loss


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("advantage", [0.0, 1.0, -1.0])
@pytest.mark.parametrize("log_ratio", [1000.0, -1000.0, 21.0, -21.0, math.inf, -math.inf])
@pytest.mark.parametrize("name", [name for name in POLICY_LOSSES if name != "gpg"])
def test_b021_beyond_the_guard_the_loss_is_finite_and_has_no_gradient(name, log_ratio, advantage, dtype):
    columns = one_row([log_ratio, 0.1], [advantage, 1.0], draws=torch.tensor([[0.1, 0.2]]))
    columns = {n: x.to(dtype) if x.is_floating_point() else x for n, x in columns.items()}
    columns["old_log_probs"] = torch.zeros(1, 2, dtype=dtype)
    columns["rollout_log_probs"] = columns["old_log_probs"]
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name, kl_cov_ratio=0.5))
    if name in ("clip_cov", "kl_cov"):  # an infinite log-prob has no covariance
        columns["log_probs"] = columns["log_probs"].clamp(-1000, 1000)
    loss, gradient, _ = run(name, columns, config)
    assert loss.isfinite()
    assert gradient[0, 0] == 0
    assert gradient.isfinite().all()


@pytest.mark.parametrize("where", ["log_probs", "old_log_probs", "rollout_log_probs"])
@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_b021_a_nan_log_prob_surfaces(name, where):
    columns, _ = random_batch(17)
    mask = columns["response_mask"]
    reads = {"gpg": {"log_probs"}, "decoupled": {where}, "dppo_tv": {where}, "dppo_kl": {where}}
    if where not in reads.get(name, {"log_probs", "old_log_probs"}):
        return
    broken = columns[where].clone()
    broken[tuple(mask.nonzero()[0])] = math.nan
    config = ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name))
    loss, gradient, metrics = run(name, columns | {where: broken}, config)
    assert loss.isnan()
    # So that the optimizer leaves the step out. The gradient of gpg in log pi is -A; the model's own is NaN then.
    assert gradient.isnan().any() or name == "gpg"
    assert math.isnan(metrics["actor/pg_loss"])


def test_b022_a_rejected_token_stays_in_the_denominator():
    weights = torch.tensor([[0.0, 1.0]], dtype=torch.float64)
    for name in POLICY_LOSSES:
        columns = one_row([0.0, 0.0], [1.0, 1.0], importance_weights=weights, draws=weights)
        columns["rollout_log_probs"] = columns["old_log_probs"]
        loss, gradient, _ = run(name, columns, ActorConfig(policy_loss=PolicyLossConfig(loss_mode=name)))
        assert gradient.tolist() == [[0.0, -0.5]], name
        if name not in ("gpg", "cispo", "sapo"):  # whose value on-policy is not -A
            assert loss.item() == -0.5, name
