"""Rollout correction, the KL over the vocabulary, draws and schedules where the stages put them to use."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_cases import column, hand_batch, stub_roles, tiny_config, updates
from test_estimators_learn import config_of, run
from verl_process import checkpoint_bytes, computed

from verl.algorithms.metric import reduce_metrics
from verl.config import Config
from verl.protocol import DataProto
from verl.trainer import loop
from verl.trainer.stages import loss_draws, needs_old_log_probs, process, update
from verl.trainer.timer import StepTimer
from verl.training.actor import Actor

RATES = {"actor": 0.0, "critic": 0.0}


def config_with(tmp_path: Path, model: Path, correction: dict[str, Any]) -> Config:
    return tiny_config(tmp_path, model, {"algorithm": {"rollout_correction": correction}, "rollout": {"n": 2}})


def perturbed() -> tuple[DataProto, Any]:
    """Two rows of two tokens; the trainer's log-probs exceed the engine's by ln 3 and ln 1/2, and by 0."""
    batch = hand_batch([1.0, 0.0], [2, 2], n=2)
    trainer = [[-1 + math.log(3), -2 - math.log(2), math.nan, 0.0], [-1.0, -2.0, 0.0, 0.0]]
    return batch, column("old_log_probs", trainer)


def test_weights_of_artificially_perturbed_log_probs(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_with(tmp_path, tiny_model_dir, {"rollout_is": "token"})
    batch, trainer = perturbed()
    done, metrics = process(batch, stub_roles(policy=trainer, exact=False), config, 0.0, StepTimer())
    assert done.batch["importance_weights"][:, :2].tolist() == [pytest.approx([2.0, 0.5]), [1.0, 1.0]]
    assert bool((done.batch["importance_weights"][:, 2:] == 1).all())
    numbers = reduce_metrics(metrics)
    assert numbers["rollout_corr/kl"] == pytest.approx(-(math.log(3) - math.log(2)) / 4)
    assert numbers["rollout_corr/rollout_is_clipped_frac"] == 0.25


def test_rejected_rows_keep_their_reward_and_their_place_in_the_denominators(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    rejecting = {"rollout_rs": "seq_max_k1", "rollout_rs_threshold": 2.5}
    config = config_with(tmp_path, tiny_model_dir, rejecting)
    batch, trainer = perturbed()
    roles = stub_roles(policy=trainer, exact=False)
    done, metrics = process(batch, roles, config, 0.0, StepTimer())
    assert done.batch["importance_weights"][:, 0].tolist() == [0.0, 1.0]
    assert done.batch["advantages"][:, 0].abs().min() > 0.5  # the group's statistics are of both
    assert reduce_metrics(metrics)["rollout_corr/rollout_rs_seq_masked_frac"] == 0.5
    update(done, roles, config, RATES, 0, StepTimer())
    _, mini_batch, denominators = updates(roles)[0]
    assert (denominators.tokens, denominators.rows) == (4, 2)
    assert "importance_weights" in mini_batch.tensors


def test_without_correction_there_is_no_column_and_no_metric(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch, trainer = perturbed()
    config = config_with(tmp_path, tiny_model_dir, {})
    done, metrics = process(batch, stub_roles(policy=trainer, exact=False), config, 0.0, StepTimer())
    assert "importance_weights" not in done.tensors
    assert not [name for name in metrics if name.startswith("rollout_corr")]


def test_bypass_mode_takes_the_engines_log_probs(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_with(
        tmp_path, tiny_model_dir, {"bypass_mode": True, "rollout_rs": "token_k2", "rollout_rs_threshold": 0.1}
    )
    roles = stub_roles(exact=False)
    assert not needs_old_log_probs(config, roles)
    done, _ = process(hand_batch([1.0, 0.0], [2, 2], n=2), roles, config, 0.0, StepTimer())
    assert torch.equal(done.batch["old_log_probs"][:, :2], done.batch["rollout_log_probs"][:, :2])
    assert "importance_weights" not in done.tensors  # they need the current policy


def test_draws_are_of_slot_position_and_optimizer_step(tmp_path: Path, tiny_model_dir: Path) -> None:
    batch = hand_batch([1.0, 0.0, 1.0, 0.0], [2, 2, 3, 1], n=2)
    batch.non_tensor_batch["index"] = torch.tensor([0, 1, 0, 1]).numpy().astype(object)
    draws = loss_draws(batch, 1, 3, 0)
    assert draws.shape == (4, 4) and draws.unique().numel() == 16
    assert torch.equal(loss_draws(batch.select_idxs([2, 0]), 1, 3, 0), draws[[2, 0]])
    others = [loss_draws(batch, 1, 3, 1), loss_draws(batch, 1, 4, 0), loss_draws(batch, 2, 3, 0)]
    assert not any(torch.equal(draws, other) for other in others)
    for loss, given in (("vanilla", False), ("clip_cov", True), ("kl_cov", True)):
        actor = {"policy_loss": {"loss_mode": loss}, "ppo_mini_batch_size": 1}
        config = tiny_config(tmp_path, tiny_model_dir, {"actor": actor, "rollout": {"n": 2}})
        roles = stub_roles()
        done, _ = process(batch, roles, config, 0.0, StepTimer())
        update(done, roles, config, RATES, 3, StepTimer())
        found = [mini_batch.tensors.get("draws") for _, mini_batch, _ in updates(roles)]
        assert [x is not None for x in found] == [given, given]
        if given:
            assert torch.equal(found[0], loss_draws(batch, config.trainer.seed, 3, 0)[:2])


# --- with the real worker ------------------------------------------------------------------------------------------


def test_weights_are_exactly_1_where_engine_and_trainer_agree(tmp_path: Path, tiny_model_dir: Path) -> None:
    """On a CPU, old log-probs recomputed: no weight differs from 1 by a bit."""
    override = {
        "algorithm": {"rollout_correction": {"rollout_is": "sequence", "rollout_rs": "seq_mean_k3",
                                             "rollout_rs_threshold": 1e-9}},
        "actor": {"recompute_old_log_probs": "always"},
        "trainer": {"total_training_steps": 2},
    }  # fmt: skip
    for line in run(config_of(tmp_path, tiny_model_dir, "grpo", override)):
        assert line["rollout_corr/rollout_is/min"] == line["rollout_corr/rollout_is/max"] == 1.0
        assert line["rollout_corr/rollout_is_eff_sample_size"] == 1.0
        assert line["rollout_corr/kl"] == line["rollout_corr/rollout_rs_masked_frac"] == 0.0


@pytest.mark.parametrize("where", ["loss", "reward"])
def test_the_full_kl_end_to_end(tmp_path: Path, tiny_model_dir: Path, where: str) -> None:
    """Exactly 0 at the start, where the policy is the reference; afterwards near its estimate from samples."""
    override: dict[str, Any] = {"trainer": {"total_training_steps": 4}}
    if where == "loss":
        override["actor"] = {"use_kl_loss": True, "kl_loss_type": "full", "kl_loss_coef": 0.1}
        name = "actor/kl_loss"
    else:
        override["algorithm"] = {"use_kl_in_reward": True, "kl_penalty": "full"}
        name = "actor/reward_kl_penalty"
    lines = run(config_of(tmp_path, tiny_model_dir, "grpo", override))
    values = [line[name] for line in lines]
    assert values[0] == 0.0 and 0 < values[1] < values[-1]
    assert len({line["training/ref_checksum"] for line in lines}) == 1  # what the doctor looks at


def test_bypass_with_reinforce_end_to_end(tmp_path: Path, tiny_model_dir: Path) -> None:
    correction = {"rollout_is": "token", "bypass_mode": True, "loss_type": "reinforce"}
    override = {
        "algorithm": {"rollout_correction": correction},
        "actor": {"ppo_mini_batch_size": 4},
        "trainer": {"total_training_steps": 3},
    }
    lines = run(config_of(tmp_path, tiny_model_dir, "grpo", override))
    assert all(line["rollout_corr/rollout_is_eff_sample_size"] < 1 for line in lines)  # of the second update
    assert all("actor/pg_clipfrac" not in line for line in lines)


SCHEDULED = {
    "actor": {
        "ppo_mini_batch_size": 4,
        "clip_ratio_schedule": {"type": "adaptive", "target": 1e-4},
        "entropy_coeff": 0.01,
        "entropy_coeff_schedule": {"type": "cosine", "end": 0.001},
        "use_kl_loss": True,
        "kl_loss_coef_schedule": {"type": "adaptive", "target": 0.01},
        "optim": {"lr_scheduler_type": "wsd", "lr_wsd_decay_steps": 3},
        "policy_loss": {"loss_mode": "clip_cov", "clip_cov_ratio": 0.05, "clip_cov_lb": 0.0},
    },
    "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"type": "linear", "kl_coef_end": 0.1}},
    "trainer": {"total_training_steps": 5, "save_freq": 1, "keep_last": None},
}
MOVING = (
    "actor/clip_ratio_low",
    "actor/clip_ratio_high",
    "actor/entropy_coeff",
    "actor/kl_loss_coef",
    "actor/reward_kl_penalty_coeff",
)


class Killed(BaseException):
    """Stands in for a death."""


@pytest.fixture
def two_folders(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    for name in ("whole", "killed"):
        (tmp_path / name).mkdir()
    yield tmp_path / "whole", tmp_path / "killed"


def test_law_4_schedules_and_draws_resume(
    two_folders: tuple[Path, Path], tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All schedules at once, with a loss that draws: killed after step 3, the run ends with the same bits."""
    whole, killed = (config_of(folder, tiny_model_dir, "grpo", SCHEDULED) for folder in two_folders)
    seen: list[dict[str, float]] = []
    with monkeypatch.context() as patch:
        step = Actor.update
        patch.setattr(
            Actor, "update", lambda *args: seen.append(args[1].meta_info["scheduled"]) or step(*args)  # type: ignore[func-returns-value]
        )  # fmt: skip
        lines = run(whole)
    for name in MOVING:
        assert len({line[name] for line in lines}) == 5, name
    assert seen[::2] == seen[1::2]  # both optimizer steps of a training step
    assert [{f"actor/{name}": value for name, value in values.items()} for values in seen[::2]] == [
        {name: line[name] for name in MOVING[:4]} for line in lines
    ]
    assert [line["actor/lr"] for line in lines] == pytest.approx([0.01, 0.01, 0.01, 0.02 / 3, 0.01 / 3])
    with monkeypatch.context() as patch:
        real = loop.update

        def dying(*arguments: Any) -> Any:
            if arguments[4] == 3:
                raise Killed
            return real(*arguments)

        patch.setattr(loop, "update", dying)
        with pytest.raises(Killed):
            run(killed)
    run(killed)
    assert computed(whole.run_dir) == computed(killed.run_dir)
    assert checkpoint_bytes(whole.run_dir, 5) == checkpoint_bytes(killed.run_dir, 5)
    assert b"kl_loss_coef" in checkpoint_bytes(killed.run_dir, 5)["trainer.json"]
