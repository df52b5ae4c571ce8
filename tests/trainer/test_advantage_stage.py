"""What the process stage makes of scores: shaping, greedy baselines, several rewards, bootstrapped values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stage_cases import StubRole, column, hand_batch, stub_roles, tiny_config, write_reward

from verl.cluster.roles import Roles, SharedRollout
from verl.cluster.worker import Worker
from verl.config import Config
from verl.data.dataset import PromptDataset
from verl.data.loader import PromptLoader
from verl.errors import RewardError, VerlError
from verl.models.loading import load_tokenizer
from verl.protocol import DataProto
from verl.trainer.advantages import critic_columns, reward_values
from verl.trainer.sampling import Sampler
from verl.trainer.stages import process, rollout, take_baselines
from verl.trainer.timer import StepTimer


def with_columns(batch: DataProto, **columns: list[Any]) -> DataProto:
    return batch.union(DataProto.from_dict({}, {name.replace("__", "/"): values for name, values in columns.items()}))


def configured(folder: Path, **sections: dict[str, Any]) -> Config:
    return tiny_config(folder, "tiny", sections)


# --- shaping -------------------------------------------------------------------------------------------------------


def test_shaped_scores_reach_the_advantages_and_raw_ones_stay(tmp_path: Path) -> None:
    """Scores 1 and 1, lengths 1 and 4 (of 6): only the length penalty tells them apart, 0.3 / 6 a token."""
    config = configured(tmp_path, reward={"length_penalty": 0.3}, algorithm={"norm_adv_by_std_in_grpo": False})
    batch = hand_batch([1.0, 1.0, None, 2.0], [1, 4, 2, 2], n=2)
    done, metrics = process(batch, stub_roles(), config, 0.0, StepTimer())
    rewards = done.batch["token_level_rewards"]
    assert rewards[0].tolist() == pytest.approx([0.95, 0, 0, 0])
    assert rewards[1].tolist() == pytest.approx([0, 0, 0, 0.8])
    assert rewards[2].tolist() == [0.0] * 4
    assert done.batch["advantages"][:, 0].tolist() == pytest.approx([0.075, -0.075, 0, 0])
    assert torch.equal(done.batch["token_level_scores"].nan_to_num(7), batch.batch["token_level_scores"].nan_to_num(7))
    assert metrics["reward/length_penalty"].value() == pytest.approx(-(0.05 + 0.2 + 0.1) / 3)


def test_the_kl_penalty_comes_after_shaping(tmp_path: Path) -> None:
    config = configured(tmp_path, reward={"clip": 0.5}, algorithm={"use_kl_in_reward": True})
    roles = stub_roles(reference=column("ref_log_probs", [[-3.0] * 4] * 2))
    done, _ = process(hand_batch([4.0, -4.0], [1, 1], n=2), roles, config, 0.25, StepTimer())
    assert done.batch["token_level_rewards"][:, 0].tolist() == [0.5 - 0.25 * 2, -0.5 - 0.25 * 2]


# --- several rewards -----------------------------------------------------------------------------------------------


def test_gdpo_takes_its_rewards_from_the_columns(tmp_path: Path) -> None:
    keys = {"adv_estimator": "gdpo", "gdpo_reward_keys": ["acc", "score"]}
    config = configured(tmp_path, algorithm=keys, rollout={"n": 2})
    batch = with_columns(hand_batch([1.0, 1.0], [2, 2], n=2), reward_extra__acc=[True, None], score=[1.0, 1.0])
    done, _ = process(batch, stub_roles(), config, 0.0, StepTimer())
    assert bool((done.batch["advantages"] == 0).all())  # one acc only, and equal scores
    batch = with_columns(hand_batch([1.0, 1.0], [2, 2], n=2), reward_extra__acc=[True, 0], score=[1.0, 1.0])
    done, _ = process(batch, stub_roles(), config, 0.0, StepTimer())
    assert done.batch["advantages"][:, 0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], abs=1e-4)


def test_a_reward_that_nothing_returned_is_named() -> None:
    batch = with_columns(hand_batch([1.0], [2], n=1), reward_extra__accuracy=["yes"], score=[1.0])
    with pytest.raises(
        RewardError, match=r"(?s)a\.setting: .*no such value.*acuracy.*did you mean accuracy\?.*score, accuracy"
    ):
        reward_values(batch, "acuracy", "a.setting")
    with pytest.raises(RewardError, match=r"(?s)a\.setting=accuracy: .*is no number.*'yes'"):
        reward_values(batch, "accuracy", "a.setting")
    assert reward_values(batch, "score", "a.setting").tolist() == [1.0]


# --- greedy baselines ----------------------------------------------------------------------------------------------


def baselined() -> DataProto:
    """Two prompts of two responses and a greedy one each (scores 5 and None)."""
    batch = hand_batch([1.0, 2.0, 5.0, 3.0, 4.0, None], [1, 2, 3, 1, 2, 4], n=3)
    return with_columns(batch, index=[0, 1, -1] * 2)


def test_baselines_become_columns_of_their_prompts_rows() -> None:
    batch = take_baselines(baselined())
    assert batch.non_tensor_batch["index"].tolist() == [0, 1, 0, 1]
    assert batch.batch["baseline_scores"].tolist() == [5, 5, 0, 0]
    assert batch.batch["baseline_lengths"].tolist() == [3, 3, 4, 4]
    assert batch.batch["scored"].tolist() == [True, True, False, False]  # nothing to compare with
    assert batch.meta_info["metrics"]["reward/baseline_unscored"] == 1


def test_remax_of_the_stage(tmp_path: Path) -> None:
    config = configured(tmp_path, algorithm={"adv_estimator": "remax"}, reward={"clip": 4.5}, rollout={"n": 2})
    batch = take_baselines(baselined())
    batch.batch["response_mask"] &= batch.batch["scored"][:, None]
    done, metrics = process(batch, stub_roles(), config, 0.0, StepTimer())
    assert done.batch["advantages"][:, 0].tolist() == pytest.approx([1 - 4.5, 2 - 4.5, 0, 0])
    assert metrics["critic/baseline/mean"].value() == 4.5


def real(config: Config) -> tuple[Roles, Sampler, PromptLoader]:
    worker = Worker(config)
    parity = worker.setup()
    roles = Roles.of(dict.fromkeys(config.roles, worker), SharedRollout(worker), parity.exact)
    tokenizer = load_tokenizer(config.model.path)
    loader = PromptLoader(PromptDataset.load(config.data.train_files, config.data, tokenizer), 4)
    return roles, Sampler(config.training_sampling, config, tokenizer), loader


def test_the_greedy_response_is_sampled_scored_and_not_trained_on(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Its score is that of validation's greedy response to the same prompt, and other slots do not notice it."""
    reward = write_reward(tmp_path / "sum.py", "return float(sum(map(ord, solution_str)))")
    settings = {"reward": {"custom_reward_function": {"path": str(reward)}}}
    remax = tiny_config(tmp_path, tiny_model_dir, settings, {"algorithm": {"adv_estimator": "remax"}})
    roles, sampler, loader = real(remax)
    prompts = loader.next_batch()
    batch = rollout(prompts, roles, sampler, StepTimer())
    assert batch.non_tensor_batch["index"].tolist() == [0, 1, 2] * 4
    assert batch.meta_info["metrics"]["reward/scored"] == 16
    greedy = Sampler(remax.validation_sampling, remax, sampler.tokenizer)
    alone = greedy.assemble(prompts, roles.rollout.generate(greedy.requests(prompts), prompts))
    expected = [float(sum(map(ord, text))) for text in alone.non_tensor_batch["response_text"]]
    assert batch.batch["baseline_scores"].tolist() == np.repeat(expected, 3).tolist()
    plain = tiny_config(tmp_path, tiny_model_dir, settings)
    without = rollout(prompts, roles, Sampler(plain.training_sampling, plain, sampler.tokenizer), StepTimer())
    assert without.non_tensor_batch["response_text"].tolist() == batch.non_tensor_batch["response_text"].tolist()


# --- bootstrapped values -------------------------------------------------------------------------------------------


def test_the_value_behind_a_cut_response_is_asked_for_with_one_token_more() -> None:
    """The stub's value of token t is 10 t: 20 behind two tokens; a finished response has none, and padding none."""

    def tens(batch: DataProto) -> DataProto:
        assert batch.batch["attention_mask"][:, 2:].sum(1).tolist() == [3, 2, 5]
        rows, width = batch.batch["responses"].shape
        return DataProto.from_dict({"values": torch.arange(0.0, 10.0 * width, 10.0).expand(rows, width)})

    batch = with_columns(hand_batch([1.0] * 3, [2, 2, 4], n=1), finish_reason=["length", "stop", "length"])
    columns = critic_columns(batch, StubRole(tens), True)  # type: ignore[arg-type]
    assert columns.batch["values"].tolist() == [[0, 10, 0, 0], [0, 10, 0, 0], [0, 10, 20, 30]]
    assert columns.batch["bootstrap_values"].tolist() == [20, 0, 40]


def test_b004_the_bootstrap_reaches_the_advantages(tmp_path: Path) -> None:
    """B004: no reward, values 0.5 0.4 0.3 and 0.6 behind them, gamma 0.9, lambda 0.8."""
    gae = {"adv_estimator": "gae", "gamma": 0.9, "lam": 0.8, "whiten_advantages": False}
    for truncated, expected in ((True, [-0.109184, 0.0428, 0.24]), (False, [-0.38912, -0.346, -0.3])):
        config = configured(tmp_path, algorithm=gae | {"bootstrap_truncated": truncated}, rollout={"n": 1})
        values = torch.tensor([[0.5, 0.4, 0.3, 0.6, 0.0][: 4 + truncated]])
        roles = stub_roles(critic=column("values", values))
        batch = with_columns(hand_batch([0.0], [3], n=1), finish_reason=["length"])
        done, _ = process(batch, roles, config, 0.0, StepTimer())
        assert done.batch["advantages"][0].tolist() == pytest.approx([*expected, 0], abs=1e-6)


def test_the_critics_values_are_the_same_bits_with_and_without(tmp_path: Path, tiny_model_dir: Path) -> None:
    critic = {"ppo_max_token_len_per_gpu": 512, "optim": {"lr": 1e-2}}
    settings = {"algorithm": {"adv_estimator": "gae", "bootstrap_truncated": True}, "critic": critic}
    config = tiny_config(tmp_path, tiny_model_dir, settings)
    roles, sampler, loader = real(config)
    batch = rollout(loader.next_batch(), roles, sampler, StepTimer())
    with torch.no_grad():
        roles.critic.worker._critic.model.value_head.weight.normal_()  # type: ignore[union-attr, attr-defined]
    plain = roles.critic.values(batch).batch["values"]  # type: ignore[union-attr]
    columns = critic_columns(batch, roles.critic, True)  # type: ignore[arg-type]
    assert torch.equal(columns.batch["values"], plain)
    cut = torch.tensor([reason == "length" for reason in batch.non_tensor_batch["finish_reason"]])
    assert bool(cut.any())
    assert torch.equal(columns.batch["bootstrap_values"] != 0, cut)


# --- the user's estimator ------------------------------------------------------------------------------------------


def test_a_users_estimator_decides_and_its_faults_stop_the_step(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from verl.algorithms.advantage_inputs import spread_over_tokens\n"
        "def estimator(inputs, config):\n    return spread_over_tokens(inputs, inputs.totals.scores * 10)\n"
        "def endless(inputs, config):\n    return spread_over_tokens(inputs, inputs.totals.scores / 0)\n"
    )
    own = {"path": str(tmp_path / "mine.py")}
    config = configured(tmp_path, algorithm={"custom_estimator": own})
    done, _ = process(hand_batch([1.0, 2.0], [1, 2], n=2), stub_roles(), config, 0.0, StepTimer())
    assert done.batch["advantages"].tolist() == [[10, 0, 0, 0], [20, 20, 0, 0]]
    config = configured(tmp_path, algorithm={"custom_estimator": own | {"name": "endless"}})
    with pytest.raises(VerlError, match="adv_estimator=endless gave advantages that are not finite"):
        process(hand_batch([1.0, 2.0], [1, 2], n=2), stub_roles(), config, 0.0, StepTimer())
