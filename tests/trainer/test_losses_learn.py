"""Each policy loss end to end with grpo: a short run on the tiny model, finite, with a reward that rises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_estimators_learn import LEAST_RISE, config_of, rise, run

from verl.algorithms.policy_loss import POLICY_LOSSES

# Two updates a batch: the second one's ratios are not 1.
TWICE: dict[str, Any] = {"ppo_mini_batch_size": 4}
SETTINGS: dict[str, dict[str, Any]] = {
    "gspo": {"loss_agg_mode": "seq-mean-token-mean"},
    "geo_mean": {"loss_agg_mode": "seq-mean-token-mean", "clip_ratio": 0.4},
    "cispo": {"clip_ratio_low": 1.0},
    "clip_cov": {"policy_loss": {"clip_cov_ratio": 0.02, "clip_cov_lb": 0.1}},
    "kl_cov": {"policy_loss": {"kl_cov_ratio": 0.02}},
    "dppo_tv": {"clip_ratio": 0.05},
    "dppo_kl": {"clip_ratio": 0.002},
}
LOGGED = {"clip_cov": "actor/cov_frac", "kl_cov": "actor/cov_frac", "decoupled": "actor/behave_imp_weight"}
UNCLIPPED = {"gpg", "sapo", "kl_cov"}


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_it_learns(tmp_path: Path, tiny_model_dir: Path, name: str) -> None:
    own = SETTINGS.get(name, {})
    loss = {"policy_loss": {"loss_mode": name} | own.get("policy_loss", {})}
    override = {"actor": TWICE | own | loss, "trainer": {"total_training_steps": 9}}
    config = config_of(tmp_path, tiny_model_dir, "grpo", override)
    lines = run(config)
    assert rise(lines) > LEAST_RISE
    assert any(line["actor/ppo_kl"] != 0 for line in lines)
    assert any(line.get("actor/pg_clipfrac", 0) > 0 for line in lines) == (name not in UNCLIPPED)
    if name in LOGGED:
        assert all(line[LOGGED[name]] > 0 for line in lines)
