"""The group estimators by hand, and estimators from a user's file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.algorithms.advantage_inputs import AdvantageInputs
from verl.algorithms.advantages import ESTIMATORS, estimate, find_estimator
from verl.algorithms.masking import place_at_last
from verl.config.schema_run import AlgorithmConfig
from verl.errors import ConfigError, VerlError

NAN = math.nan


def inputs_of(scores: list[float], groups: list[int], lengths: list[int] | None = None, **more: Any) -> AdvantageInputs:
    lengths = lengths or [2] * len(scores)
    mask = torch.arange(max(lengths)) < torch.tensor(lengths).unsqueeze(1)
    rewards = place_at_last(torch.tensor(scores, dtype=torch.float64), mask)
    columns = {"scored": torch.ones(len(scores), dtype=torch.bool)} | more
    return AdvantageInputs(rewards, mask, torch.tensor(groups), **columns)


def rows_of(name: str, inputs: AdvantageInputs, **settings: Any) -> list[float]:
    return ESTIMATORS[name](inputs, AlgorithmConfig(**settings)).advantages[:, 0].tolist()


def test_grpo_passk_rewards_the_lead_of_the_best():
    inputs = inputs_of([1, 0.25, 0, 0.5, 2, 2], [0, 0, 0, 0, 1, 1])
    std = math.sqrt(sum((r - 0.4375) ** 2 for r in (1, 0.25, 0, 0.5)) / 3)
    assert rows_of("grpo_passk", inputs) == pytest.approx([0.5 / std, 0, 0, 0, 0, 0], abs=1e-12)
    plain = rows_of("grpo_passk", inputs, norm_adv_by_std_in_grpo=False)
    assert plain == pytest.approx([0.5, 0, 0, 0, 0, 0], abs=1e-12)


def test_grpo_passk_of_two_that_are_equally_good_is_0():
    assert rows_of("grpo_passk", inputs_of([1, 1, 0], [0, 0, 0])) == [0, 0, 0]


def test_opo_weighs_the_baseline_by_length():
    """(2 * 1 + 6 * 0) / 8 = 0.25"""
    assert rows_of("opo", inputs_of([1, 0], [0, 0], [2, 6])) == pytest.approx([0.75, -0.25])


def test_gpg_makes_up_for_groups_without_spread():
    """Three groups, one with spread: alpha 3. A group that was not scored at all is none."""
    scored = torch.tensor([True] * 5 + [False] * 2)
    inputs = inputs_of([1, 0, 1, 1, 1, NAN, NAN], [0, 0, 1, 1, 2, 3, 3], scored=scored)
    assert rows_of("gpg", inputs) == pytest.approx([1.5, -1.5, 0, 0, 0, 0, 0])
    assert rows_of("gpg", inputs_of([1, 1], [0, 0])) == [0, 0]


def test_maxrl_divides_by_the_mean():
    inputs = inputs_of([1, 0, 0, 0, 0, 0, -1, 0.5], [0, 0, 0, 0, 1, 1, 2, 2])
    assert rows_of("maxrl", inputs) == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0])


def test_b015_gdpo_normalises_each_reward_on_its_own_and_row_2_uses_one():
    """f1 = 1 0 1 0: +-0.866; f2 = 0.2 None 0.4 0.3: -1 0 1 about its own mean and deviation."""
    components = torch.tensor([[1, 0.2], [0, NAN], [1, 0.4], [0, 0.3]], dtype=torch.float64)
    inputs = inputs_of([9, 9, 9, 9], [0] * 4, reward_components=components)
    root = math.sqrt(0.75)
    sums = [root - 1, -root, root + 1, -root]
    scale = math.sqrt(sum(x * x for x in sums) / 3)
    assert rows_of("gdpo", inputs) == pytest.approx([x / scale for x in sums], abs=1e-4)
    sums = [-2.0, 0.0, 2.0, 0.0]
    scale = math.sqrt(sum(x * x for x in sums) / 3)
    only_second = rows_of("gdpo", inputs, gdpo_reward_weights=[0.0, 2.0])
    assert only_second == pytest.approx([x / scale for x in sums], abs=1e-4)


def test_gdpo_groups_without_spread_stay_exactly_0():
    components = torch.tensor([[0.1, 1], [0.1, 1], [1, 0], [0, 1], [0.1, 5]], dtype=torch.float64)
    inputs = inputs_of([0] * 5, [0, 0, 1, 1, 2], reward_components=components)
    got = rows_of("gdpo", inputs, gdpo_reward_weights=[1.0, 0.5])
    assert [got[0], got[1], got[4]] == [0, 0, 0]
    assert got[2] == -got[3] > 0


def test_gdpo_an_infinite_reward_shows():
    components = torch.tensor([[math.inf], [0.0]], dtype=torch.float64)
    assert not all(map(math.isfinite, rows_of("gdpo", inputs_of([0, 0], [0, 0], reward_components=components))))


def test_reinforce_plus_plus_whitens_discounted_returns():
    """Returns 0.5 1 and 1.5 3 (gamma 0.5): mean 1.5, variance 3.5 / 3."""
    inputs = inputs_of([1, 3], [0, 0])
    result = ESTIMATORS["reinforce_plus_plus"](inputs, AlgorithmConfig(gamma=0.5))
    assert result.returns.tolist() == [[0.5, 1], [1.5, 3]]
    scale = math.sqrt(3.5 / 3)
    expected = [[-1 / scale, -0.5 / scale], [0, 1.5 / scale]]
    torch.testing.assert_close(result.advantages, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-7)


def test_reinforce_plus_plus_baseline_whitens_over_tokens():
    """+0.5 on one token, -0.5 on three: mean -0.25, variance (0.75^2 + 3 * 0.25^2) / 3 = 0.25."""
    inputs = inputs_of([1, 0], [0, 0], [1, 3])
    assert rows_of("reinforce_plus_plus_baseline", inputs) == pytest.approx([1.5, -0.5], abs=1e-6)
    # A group without spread has 0 before the whitening, which moves it with all others.
    inputs = inputs_of([1, 0, 1, 1, 7], [0, 0, 1, 1, 2], [1, 3, 1, 1, 1])
    got = rows_of("reinforce_plus_plus_baseline", inputs)
    assert got[2] == got[3] == got[4] > 0
    assert rows_of("reinforce_plus_plus_baseline", inputs_of([1, 1, 7], [1, 1, 2])) == [0, 0, 0]


def test_remax_subtracts_the_greedy_return():
    rewards = torch.tensor([[-0.1, 0.0, 1.0], [0.0, 0.5, NAN]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]], dtype=torch.bool)
    baselines = torch.tensor([0.4, 0.5], dtype=torch.float64)
    inputs = AdvantageInputs(rewards, mask, torch.arange(2), torch.ones(2, dtype=torch.bool), baselines=baselines)
    result = ESTIMATORS["remax"](inputs, AlgorithmConfig(gamma=0.5))
    assert result.returns.tolist() == [pytest.approx([0.9, 1, 1]), [0.5, 0.5, 0]]
    assert result.advantages.tolist() == [pytest.approx([0.5, 0.6, 0.6]), [0, 0, 0]]


@pytest.mark.parametrize(("name", "needs"), [("gae", "critic"), ("gdpo", "reward_components"), ("remax", "baselines")])
def test_what_an_estimator_needs(name, needs):
    with pytest.raises(ValueError, match=needs):
        ESTIMATORS[name](inputs_of([1.0], [0]), AlgorithmConfig())


# the user's own


HALF = """
import torch
from verl.algorithms.advantage_inputs import Advantages
from verl.algorithms.advantage_inputs import spread_over_tokens

def estimator(inputs, config):
    return spread_over_tokens(inputs, config.gamma * inputs.groups.relative)

def broken(inputs, config):
    return inputs.token_level_rewards / 0 + [][1]

def narrow(inputs, config):
    return Advantages(inputs.scored, inputs.scored)

def garbage_under_the_mask(inputs, config):
    ones = torch.full_like(inputs.token_level_rewards, float("nan")).masked_fill_(inputs.response_mask, 1.0)
    return Advantages(ones, ones)
"""


def own(folder: Path, name: str = "estimator", **settings: Any) -> AlgorithmConfig:
    (folder / "mine.py").write_text(HALF)
    return AlgorithmConfig(custom_estimator={"path": str(folder / "mine.py"), "name": name}, **settings)


def test_an_estimator_of_the_users_own(tmp_path):
    inputs = inputs_of([1, 0], [0, 0])
    config = own(tmp_path, gamma=0.5)
    assert estimate(inputs, config).advantages.tolist() == [[0.25, 0.25], [-0.25, -0.25]]
    assert config.estimator == "estimator" and not config.uses_critic and not config.compares_group
    assert own(tmp_path).model_copy(update={"adv_estimator": "gdpo"}).uses("gdpo") is False
    assert find_estimator(config) is find_estimator(config)  # read once a run
    assert find_estimator(config) is not find_estimator(config, reread=True)
    clean = estimate(inputs_of([1, 0], [0, 0], [1, 2]), own(tmp_path, "garbage_under_the_mask")).advantages
    assert clean.tolist() == [[1, 0], [1, 1]]


def test_what_is_wrong_with_it_is_said(tmp_path):
    inputs = inputs_of([1, 0], [0, 0])
    with pytest.raises(VerlError, match=r"(?s)the advantage estimator failed.*broken in .*IndexError.*mine\.py:10"):
        estimate(inputs, own(tmp_path, "broken"))
    with pytest.raises(VerlError, match=r"(?s)something else than advantages.*both of shape \(2, 2\)"):
        estimate(inputs, own(tmp_path, "narrow"))
    with pytest.raises(ConfigError, match="did you mean estimator"):
        find_estimator(own(tmp_path, "estimators"))
    with pytest.raises(ConfigError, match="The file of algorithm.custom_estimator.path does not exist"):
        find_estimator(AlgorithmConfig(custom_estimator={"path": str(tmp_path / "none.py")}))
