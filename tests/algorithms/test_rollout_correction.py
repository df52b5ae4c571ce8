"""Weights for the difference between engine and trainer: by hand, against a loop, and by the laws."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.loss_inputs import LossInputs
from verl.algorithms.metric import merge_all, reduce_metrics
from verl.algorithms.policy_loss import vanilla
from verl.algorithms.rollout_correction import correct_rollout
from verl.config.schema_roles import REJECTIONS, ActorConfig, RolloutCorrectionConfig

NAN, INF = math.nan, math.inf


def correct(differences: list[list[float]], mask: Any = None, **config: Any) -> tuple[list[list[float]], dict]:
    """Weights and metrics where the trainer's log-probs exceed the engine's by ``differences``."""
    d = torch.tensor(differences, dtype=torch.float64)
    chosen = torch.ones_like(d, dtype=torch.bool) if mask is None else torch.tensor(mask, dtype=torch.bool)
    weights, metrics = correct_rollout(d - 1.0, torch.full_like(d, -1.0), chosen, RolloutCorrectionConfig(**config))
    return weights.tolist(), reduce_metrics(metrics)


LN2, LN3 = math.log(2), math.log(3)


def test_truncated_token_weights():
    weights, metrics = correct([[LN2, -LN2, LN3, 0.0]], rollout_is="token", rollout_is_threshold=2.0)
    assert weights[0] == pytest.approx([2.0, 0.5, 2.0, 1.0])
    assert metrics["rollout_corr/rollout_is_clipped_frac"] == pytest.approx(0.25)
    assert metrics["rollout_corr/rollout_is/mean"] == pytest.approx(5.5 / 4)
    assert metrics["rollout_corr/rollout_is/min"] == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is/max"] == 2.0
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(5.5**2 / (4 * 9.25))
    assert metrics["rollout_corr/kl"] == pytest.approx(-(LN3) / 4)
    k3 = (2 - 1 - LN2) + (0.5 - 1 + LN2) + (3 - 1 - LN3)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx(k3 / 4)


def test_icepop_zeroes_outside_and_keeps_inside():
    d = [[LN2, -LN2, LN3, -LN3, 0.3]]
    weights, metrics = correct(d, rollout_is="token", rollout_is_threshold=(0.49, 2.01))
    assert weights[0] == pytest.approx([2.0, 0.5, 0.0, 0.0, math.exp(0.3)])
    assert metrics["rollout_corr/rollout_is_masked_frac"] == pytest.approx(0.4)
    masked, _ = correct(d, rollout_is="token", rollout_is_threshold=(0.0, 2.01))  # MIS: above only
    assert masked[0] == pytest.approx([2.0, 0.5, 0.0, 1 / 3, math.exp(0.3)])


def test_sequence_weights_are_of_the_whole_response():
    mask = [[1, 1, 0], [1, 1, 1]]
    weights, metrics = correct([[0.2, 0.1, 9.0], [1.0, 1.0, -0.5]], mask, rollout_is="sequence")
    assert weights[0] == pytest.approx([math.exp(0.3), math.exp(0.3), 1.0])
    assert weights[1] == pytest.approx([2.0] * 3)
    assert metrics["rollout_corr/rollout_is_clipped_frac"] == pytest.approx(3 / 5)


@pytest.mark.parametrize(
    ("statistic", "threshold", "kept"),
    [
        ("token_k1", 2.5, [[1, 1, 0], [1, 1, 1]]),
        ("token_k1", (0.6, 1.5), [[1, 0, 0], [1, 1, 1]]),
        ("token_k2", 0.3, [[1, 1, 0], [1, 1, 1]]),
        ("token_k3", 0.2, [[1, 1, 0], [1, 1, 1]]),
        ("seq_sum_k1", (0.5, 1.8), [[1, 1, 1], [1, 1, 1]]),  # 3 / 2 and exp(.3)
        ("seq_sum_k1", (0.5, 1.4), [[0, 0, 0], [1, 1, 1]]),
        ("seq_mean_k1", (0.5, 1.2), [[1, 1, 1], [1, 1, 1]]),  # 1.1447 and 1.105: the geometric means
        ("seq_mean_k1", (0.5, 1.12), [[0, 0, 0], [1, 1, 1]]),
        ("seq_max_k1", 2.5, [[0, 0, 0], [1, 1, 1]]),
        ("seq_max_k2", 0.7, [[1, 1, 1], [1, 1, 1]]),
        ("seq_max_k2", 0.5, [[0, 0, 0], [1, 1, 1]]),
        ("seq_sum_k2", 0.8, [[0, 0, 0], [1, 1, 1]]),
        ("seq_mean_k2", 0.29, [[1, 1, 1], [1, 1, 1]]),
        ("seq_mean_k3", 0.3, [[0, 0, 0], [1, 1, 1]]),
        ("seq_mean_k3", 0.4, [[1, 1, 1], [1, 1, 1]]),
        ("seq_max_k3", 0.5, [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_rejection_by_hand(statistic, threshold, kept):
    """Ratios 1, 1/2, 3 in the first response, exp(.1) in the second."""
    weights, metrics = correct(
        [[0.0, -LN2, LN3], [0.1, 0.1, 0.1]], rollout_rs=statistic, rollout_rs_threshold=threshold
    )
    assert weights == kept
    rejected = 6 - sum(map(sum, kept))
    assert metrics["rollout_corr/rollout_rs_masked_frac"] == pytest.approx(rejected / 6)
    assert metrics["rollout_corr/rollout_rs_seq_masked_frac"] == (0.5 if rejected else 0.0)


def test_b040_rejected_tokens_stay_in_every_denominator():
    """Five tokens, three rejected, a loss of 1 on the others: 2/5, of the loss and of the metric, however split."""
    difference = torch.tensor([[LN3, 0.0], [-LN3, 0.0], [LN3, 5.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True], [True, True], [True, False]])
    config = RolloutCorrectionConfig(rollout_rs="token_k1", rollout_rs_threshold=2.0)
    weights, metrics = correct_rollout(difference - 1.0, torch.full_like(difference, -1.0), mask, config)
    assert reduce_metrics(metrics)["rollout_corr/rollout_rs_masked_frac"] == pytest.approx(0.6)
    whole = count_denominators(mask, 1.0)
    for rows in ([[0, 1, 2]], [[2], [0, 1]]):
        found = []
        for part in rows:
            ones = torch.ones(len(part), 2, dtype=torch.float64)
            inputs = LossInputs(-ones, -ones, -ones, mask[part], importance_weights=weights[part])
            found.append(vanilla(inputs, ActorConfig(), whole))
        assert float(sum(loss for loss, _ in found)) == pytest.approx(0.4)
        assert reduce_metrics(merge_all(part for _, part in found))["actor/pg_loss"] == pytest.approx(0.4)


def test_the_worst_token_is_a_trained_one():
    mask, bounds = [[1, 0]], {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": (1.1, 2.0)}
    assert correct([[0.5, 9.0]], mask, **bounds)[0] == [[1.0, 1.0]]
    assert correct([[0.0, 0.5]], mask, **bounds)[0] == [[0.0, 1.0]]


def test_weights_and_rejection_multiply():
    weights, metrics = correct(
        [[LN2, LN3]], rollout_is="token", rollout_is_threshold=9.0, rollout_rs="token_k1", rollout_rs_threshold=2.5
    )
    assert weights[0] == pytest.approx([2.0, 0.0])
    assert metrics["rollout_corr/rollout_is/mean"] == pytest.approx(2.5)  # before rejection


def oracle(rows: list[list[float]], config: RolloutCorrectionConfig) -> list[list[float]]:
    """Loops over lists of each response's log-ratios."""
    out = []
    for row in rows:
        weights = [1.0] * len(row)
        if config.rollout_is is not None:
            logs = row if config.rollout_is == "token" else [sum(row)] * len(row)
            weights = [math.exp(min(max(x, -20), 20)) for x in logs]
            c = config.rollout_is_threshold
            weights = [(w if c[0] <= w <= c[1] else 0.0) if isinstance(c, tuple) else min(w, c) for w in weights]
        if config.rollout_rs is not None:
            over, kind = config.rollout_rs.rsplit("_", 1)
            values = [{"k1": x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[kind] for x in row]
            groups = {
                "token": [[v] for v in values],
                "seq_sum": [[sum(values)]] * len(row),
                "seq_mean": [[sum(values) / max(len(row), 1)]] * len(row),
                "seq_max": [values] * len(row),
            }[over]
            c = config.rollout_rs_threshold
            assert c is not None
            for t, judged in enumerate(groups):
                if kind == "k1":
                    low, high = c if isinstance(c, tuple) else (1 / c, c)
                    fine = all(low <= math.exp(v) <= high for v in judged)
                else:
                    fine = all(v <= c for v in judged)
                weights[t] *= fine
        out.append(weights)
    return out


CONFIGS = [
    {"rollout_is": "token", "rollout_is_threshold": 1.3},
    {"rollout_is": "sequence", "rollout_is_threshold": (0.4, 2.1)},
    *({"rollout_rs": name, "rollout_rs_threshold": 1.4 if name.endswith("k1") else 0.11} for name in REJECTIONS),
    {"rollout_is": "token", "rollout_rs": "seq_mean_k1", "rollout_rs_threshold": (0.8, 1.1)},
]


@pytest.mark.parametrize("settings_", CONFIGS, ids=lambda s: "-".join(str(v) for v in s.values()))
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 10**6), garbage=st.sampled_from([NAN, INF, -INF, 1e30]), size=st.integers(1, 3))
def test_against_the_loop_and_the_laws(settings_, seed, garbage, size):
    """Padding and split: what is masked changes nothing, and rows may be corrected in any portions."""
    rng = np.random.default_rng(seed)
    shape = int(rng.integers(1, 6)), int(rng.integers(1, 7))
    mask = rng.random(shape) < 0.7
    d = rng.normal(0, 0.4, shape)
    config = RolloutCorrectionConfig(**settings_)
    engine = torch.from_numpy(np.where(mask, -2.0, garbage))
    trainer = torch.from_numpy(np.where(mask, d - 2.0, -garbage))
    chosen = torch.from_numpy(mask)
    weights, metrics = correct_rollout(trainer, engine, chosen, config)
    rows = [list(row[m]) for row, m in zip(d, mask, strict=True)]
    for found, kept, expected in zip(weights.numpy(), mask, oracle(rows, config), strict=True):
        assert list(found[kept]) == pytest.approx(expected, rel=1e-9)
        assert (found[~kept] == 1).all()
    parts = [
        correct_rollout(trainer[i : i + size], engine[i : i + size], chosen[i : i + size], config)
        for i in range(0, len(d), size)
    ]
    assert torch.equal(torch.cat([w for w, _ in parts]), weights)
    assert reduce_metrics(merge_all(m for _, m in parts)) == pytest.approx(reduce_metrics(metrics), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("settings_", CONFIGS, ids=lambda s: "-".join(str(v) for v in s.values()))
def test_equal_log_probs_give_weights_of_exactly_1(settings_):
    weights, metrics = correct([[0.0, 0.0], [0.0, 0.0]], **settings_)
    assert weights == [[1.0, 1.0], [1.0, 1.0]]
    assert metrics["rollout_corr/kl"] == metrics["rollout_corr/k3_kl"] == 0.0
    assert metrics.get("rollout_corr/rollout_is_eff_sample_size", 1.0) == 1.0
    assert all(value == 0 for name, value in metrics.items() if name.endswith("_frac"))


def test_far_log_probs_stay_finite_nan_surfaces_and_weights_carry_no_gradient():
    weights, _ = correct([[1000.0, -1000.0]], rollout_is="token", rollout_is_threshold=1e30)
    assert weights[0] == pytest.approx([math.exp(20), math.exp(-20)])
    for settings_ in CONFIGS:
        weights, _ = correct([[NAN, 0.0]], **settings_)
        assert math.isnan(weights[0][0])
    log_probs = torch.zeros(1, 2, requires_grad=True)
    found, _ = correct_rollout(
        log_probs, torch.ones(1, 2), torch.ones(1, 2), RolloutCorrectionConfig(rollout_is="token")
    )
    assert not found.requires_grad


def test_no_trained_token():
    weights, metrics = correct([[NAN, 5.0]], [[0, 0]], rollout_is="sequence", rollout_rs="seq_max_k3",
                               rollout_rs_threshold=0.1)  # fmt: skip
    assert weights == [[1.0, 1.0]]
    assert metrics == {}
