"""``trainer.stream_minibatches``: mini-batches that train while the others of their batch are being sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stage_cases import hand_batch, stub_roles, tiny_config
from test_sources import run_in
from verl_process import checkpoint_bytes, computed

from verl.config import load_config
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.rollout.protocol import Request, Result, lost_result
from verl.run_dir import RunDir
from verl.trainer.inputs import Inputs
from verl.trainer.run import source_of
from verl.trainer.sampling import Sampler
from verl.trainer.sources import Feed
from verl.trainer.stages import process
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer


@pytest.mark.parametrize("estimator", ["grpo", "remax"])
def test_in_order_they_are_those_of_the_whole_batch(tmp_path: Path, tiny_model_dir: Path, estimator: str) -> None:
    """Inline all groups are complete before the first update: the same mini-batches, gradients and metrics."""
    settings: dict[str, Any] = {
        "actor": {"ppo_mini_batch_size": 2, "use_kl_loss": True, "optim": {"lr": 1e-2}},
        "algorithm": {"adv_estimator": estimator},
    }
    whole = run_in(tmp_path, tiny_model_dir, "whole", {"save_freq": 4}, **settings)
    streaming = {"save_freq": 4, "stream_minibatches": True, "dump_steps": 3}
    streamed = run_in(tmp_path, tiny_model_dir, "streamed", streaming, **settings)
    assert checkpoint_bytes(whole, 4) == checkpoint_bytes(streamed, 4)
    for one, other in zip(computed(whole), computed(streamed), strict=True):
        assert one == pytest.approx(other, rel=1e-6)
    dumped = DataProto.load_from_disk(RunDir(streamed).dump(3))
    assert len(dumped) == 12 and len(set(dumped.non_tensor_batch["uid"])) == 4
    assert "scored" in dumped.tensors and "advantages" not in dumped.tensors


class Slow:
    """Answers in an order of its own, one at a time; a lost response for each prompt in ``lost``."""

    def __init__(self, order: list[int]) -> None:
        self.order, self.answered = order, 0
        self.submitted: list[Request] = []

    def submit(self, requests: list[Request], prompts: DataProto) -> None:
        self.submitted += requests

    def finished(self) -> list[Result]:
        slot = self.submitted[self.order[self.answered]].slot
        self.answered += 1
        if slot.index == 2:
            return [lost_result(slot)]
        one = np.ones(1, dtype=np.int32)
        return [Result(slot, one, -one.astype(np.float32), one > 0, one - 1, "stop")]


def scores(batch: DataProto) -> DataProto:
    mask = batch.tensors["response_mask"]
    return DataProto.from_dict({"token_level_scores": mask.float(), "scored": mask.any(1)})


def test_a_part_is_given_as_soon_as_its_groups_are_complete(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Four prompts of three: the last two groups are complete first, but for one response of another prompt."""
    config = tiny_config(
        tmp_path, tiny_model_dir, {"actor": {"ppo_mini_batch_size": 2}, "trainer": {"stream_minibatches": True}}
    )
    inputs = Inputs.load(config)
    rollout = Slow([11, 0, 10, 9, 6, 7, 8, 4, 5, 1, 3, 2])
    roles: Any = type("Roles", (), {"rollout": rollout, "scorer": type("Scorer", (), {"score": staticmethod(scores)})})
    state = TrainerState.fresh(config, inputs.loader)
    sampler = Sampler(config.training_sampling, config, inputs.tokenizer)
    parts = source_of(Feed(config, roles, state, sampler, StepTimer(), 9)).parts()
    drawn: list[list[int]] = []
    answered = []
    for part in parts:
        answered.append(rollout.answered)
        assert part.non_tensor_batch["index"].tolist() == [0, 1, 2] * 2
        assert part.tensors["scored"].tolist() == [True, True, False] * 2  # one of each prompt is lost
        assert torch.equal(part.tensors["policy_version"], torch.zeros(6, dtype=torch.int64))
        drawn.append([int(uid.split(":")[1]) for uid in part.non_tensor_batch["uid"][::3]])
    assert answered == [7, 12] and drawn == [[2, 3], [0, 1]]
    assert state.cap._lengths == [1, 1, 0] * 4


def test_the_old_log_probs_are_the_engines_also_where_these_are_not_the_trainers(tmp_path: Path) -> None:
    """The trainer's weights have moved since the batch began; the policy is not asked."""
    streamed = {"actor": {"ppo_mini_batch_size": 2}, "trainer": {"stream_minibatches": True}}
    config, batch = tiny_config(tmp_path, "none", streamed), hand_batch([1.0, 0.0, 0.0], [2, 3, 1], n=3)
    done, _ = process(batch, stub_roles(exact=False), config, 0.0, StepTimer())
    torch.testing.assert_close(done.batch["old_log_probs"], batch.batch["rollout_log_probs"], equal_nan=True)


STREAMED = ("trainer.stream_minibatches=true", "algorithm.adv_estimator=grpo", "rollout.n=2")


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (("trainer.mode=one_step_off",), "trainer.mode=one_step_off"),
        (("trainer.mode=async", "trainer.max_staleness=0"), "trainer.mode=async"),
        (("actor.shuffle=true",), "actor.shuffle=true"),
        (("actor.ppo_epochs=2",), "actor.ppo_epochs=2"),
        (("algorithm.adv_estimator=gae",), "algorithm.whiten_advantages=true"),
        (
            ("algorithm.adv_estimator=gae", "algorithm.whiten_advantages=false", "critic.ppo_epochs=2"),
            "critic.ppo_epochs=2",
        ),
        *(
            ((f"algorithm.adv_estimator={name}",), f"algorithm.adv_estimator={name}")
            for name in ("reinforce_plus_plus", "reinforce_plus_plus_baseline", "gpg")
        ),
        (("algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[score]"), "algorithm.adv_estimator=gdpo"),
        (("algorithm.custom_estimator.path=mine.py",), "algorithm.custom_estimator.path"),
        (("reward.scaling=running",), "reward.scaling=running"),
        (("algorithm.filter_groups.enable=true",), "algorithm.filter_groups.enable=true"),
        (("actor.recompute_old_log_probs=always",), "actor.recompute_old_log_probs=always"),
        (("algorithm.rollout_correction.rollout_is=token",), "algorithm.rollout_correction"),
        (("algorithm.use_kl_in_reward=true", "algorithm.kl_penalty=full"), "algorithm.kl_penalty=full"),
    ],
)
def test_what_needs_the_whole_batch_or_the_weights_that_sampled_is_refused(
    overrides: tuple[str, ...], key: str
) -> None:
    with pytest.raises(ConfigError, match=r"does not go with trainer\.stream_minibatches") as caught:
        load_config(None, ["data.train_files=[train.parquet]", "model.path=tiny", *STREAMED, *overrides])
    assert str(caught.value).startswith(f"{key} does not go") and "\n" not in caught.value.what
