from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from advantage_oracles import ORACLES
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantage_inputs import AdvantageInputs, group_index, outcome_scores, zero_spread_metric
from verl.algorithms.advantages import ESTIMATORS, gpg, grpo, grpo_passk, maxrl, opo, reinforce_plus_plus_baseline, rloo
from verl.algorithms.masking import count_nonfinite, place_at_last
from verl.algorithms.token_advantages import gae
from verl.config.schema_run import AlgorithmConfig

NAN, INF = math.nan, math.inf


def f64(rows: Any) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def config(**fields: Any) -> AlgorithmConfig:
    return AlgorithmConfig(**({"whiten_advantages": False} | fields))


def token_inputs(rewards: Any, values: Any, mask: Any, **more: Any) -> AdvantageInputs:
    mask = torch.tensor(mask, dtype=torch.bool)
    rows = len(mask)
    columns = {"group_ids": torch.arange(rows), "scored": torch.ones(rows, dtype=torch.bool)} | more
    return AdvantageInputs(f64(rewards), mask, values=f64(values), **columns)


def group_inputs(scores: list[float], groups: list[Any], scored: Any = None, dtype=torch.float64) -> AdvantageInputs:
    """One reward on the last of two or three tokens a row, garbage under the mask."""
    rows = len(scores)
    mask = torch.ones(rows, 4, dtype=torch.bool)
    mask[:, 3] = False
    mask[::2, 2] = False
    rewards = place_at_last(torch.tensor(scores, dtype=dtype), mask)
    rewards[~mask] = NAN
    scored = torch.ones(rows, dtype=torch.bool) if scored is None else torch.tensor(scored)
    return AdvantageInputs(rewards, mask, group_index(groups), scored)


def row_advantages(result: Any, inputs: AdvantageInputs) -> list[float]:
    """The one advantage of each row; checks that all its trained tokens have it and the others have 0."""
    first = result.advantages[:, 0]
    expected = torch.where(inputs.response_mask, first.unsqueeze(1), 0.0)
    assert torch.equal(result.advantages, expected)
    assert torch.equal(result.returns, expected)
    return first.tolist()


# GAE


@pytest.mark.parametrize("garbage", [9.0, NAN, INF, -INF])
def test_b001_gae_with_right_padding(garbage):
    inputs = token_inputs([[0, 0, 1, garbage, garbage]], [[0.5, 0.4, 0.3, garbage, 7]], [[1, 1, 1, 0, 0]])
    result = gae(inputs, config(gamma=1.0, lam=0.95))
    assert result.advantages.tolist()[0] == pytest.approx([0.43675, 0.565, 0.7, 0, 0], abs=1e-12)
    assert result.returns.tolist()[0] == pytest.approx([0.93675, 0.965, 1.0, 0, 0], abs=1e-12)
    result = gae(inputs, config(gamma=0.9, lam=0.8))
    assert result.advantages.tolist()[0] == pytest.approx([0.12928, 0.374, 0.7, 0, 0], abs=1e-12)


@pytest.mark.parametrize("padding", [0, 2])
def test_b004_bootstrap_of_truncated_responses(padding):
    tail = [NAN] * padding
    row = ([0, 0, 0, *tail], [0.5, 0.4, 0.3, *tail], [1, 1, 1] + [0] * padding)
    terminated = gae(token_inputs([row[0]], [row[1]], [row[2]]), config(gamma=0.9, lam=0.8)).advantages
    assert terminated[0, :3].tolist() == pytest.approx([-0.38912, -0.346, -0.3], abs=1e-12)
    both = token_inputs([row[0]] * 2, [row[1]] * 2, [row[2]] * 2, bootstrap_values=f64([0.6, 0.0]))
    result = gae(both, config(gamma=0.9, lam=0.8)).advantages
    assert result[0, :3].tolist() == pytest.approx([-0.109184, 0.0428, 0.24], abs=1e-12)
    assert result[1, :3].tolist() == pytest.approx([-0.38912, -0.346, -0.3], abs=1e-12)


def test_gae_closes_masked_gaps():
    gap = token_inputs([[0, 5, NAN, 0, 1, 3]], [[0.5, 9, INF, 0.4, 0.3, 9]], [[1, 0, 0, 1, 1, 0]])
    result = gae(gap, config(gamma=0.9, lam=0.8))
    assert result.advantages.tolist()[0] == pytest.approx([0.12928, 0, 0, 0.374, 0.7, 0], abs=1e-12)
    assert result.returns.tolist()[0] == pytest.approx([0.62928, 0, 0, 0.774, 1.0, 0], abs=1e-12)


def test_a_terminal_reward_on_a_masked_tail_is_not_seen():
    mask = [[1, 1, 0, 0]]
    left_on_tail = gae(token_inputs([[0, 0, 0, 1]], [[0.0, 0, 0, 0]], mask), config())
    assert left_on_tail.returns.tolist() == [[0, 0, 0, 0]]
    placed = place_at_last(f64([1]), torch.tensor(mask)).tolist()
    assert gae(token_inputs(placed, [[0.0, 0, 0, 0]], mask), config()).returns.tolist() == [[1, 1, 0, 0]]


@pytest.mark.parametrize("name", ["gae", "reinforce_plus_plus", "remax", "rloo"])
def test_blocks_of_rows_do_not_show(name, monkeypatch):
    inputs = drawn_inputs(3, 7, 5)
    whole = ESTIMATORS[name](inputs, config(lam=0.9, whiten_advantages=True))
    monkeypatch.setattr("verl.algorithms.masking._ELEMENTS_AT_ONCE", 10)
    blocks = ESTIMATORS[name](replace(inputs), config(lam=0.9, whiten_advantages=True))
    torch.testing.assert_close(blocks.advantages, whole.advantages, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(blocks.returns, whole.returns, rtol=1e-12, atol=1e-12)


def test_gae_of_unscored_rows_has_no_advantage_and_moves_no_statistic():
    rewards, values, mask = [[0, 1], [NAN, 50], [0.5, 2]], [[0.1, 0.2], [0.3, 0.4], [0.2, 0.1]], [[1, 1]] * 3
    scored = torch.tensor([True, False, True])
    with_it = gae(token_inputs(rewards, values, mask, scored=scored), config(whiten_advantages=True))
    assert with_it.advantages[1].tolist() == [0, 0]
    assert with_it.returns[1].tolist() == pytest.approx([0.3, 0.4])
    without = gae(token_inputs(rewards[::2], values[::2], mask[::2]), config(whiten_advantages=True))
    torch.testing.assert_close(with_it.advantages[::2], without.advantages)


def test_gae_needs_values():
    with pytest.raises(ValueError, match="critic"):
        gae(group_inputs([1.0], ["a"]), config())


# Group estimators


def test_b009_b011_normalised_by_group_not_by_batch():
    inputs = group_inputs([1, 0, 1, 1], ["a", "a", "b", "b"])
    assert row_advantages(grpo(inputs, config()), inputs) == pytest.approx([0.7071, -0.7071, 0, 0], abs=1e-4)


def test_b010_reference_values():
    inputs = group_inputs([1] * 3 + [0] * 5, ["a"] * 8)
    got = row_advantages(grpo(inputs, config()), inputs)
    assert got == pytest.approx([1.207612] * 3 + [-0.724567] * 5, abs=1e-6)
    got = row_advantages(grpo(inputs, config(norm_adv_by_std_in_grpo=False)), inputs)
    assert got == pytest.approx([0.625] * 3 + [-0.375] * 5, abs=1e-12)
    got = row_advantages(rloo(inputs, config()), inputs)
    assert got == pytest.approx([0.714286] * 3 + [-0.428571] * 5, abs=1e-6)
    inputs = group_inputs([1, 0, 0.5], ["a"] * 3)
    assert row_advantages(rloo(inputs, config()), inputs) == pytest.approx([0.75, -0.75, 0], abs=1e-12)


@pytest.mark.parametrize("estimator", [grpo, rloo, grpo_passk, opo, gpg, maxrl])
@pytest.mark.parametrize("by_std", [True, False])
def test_b011_a_group_of_one_has_advantage_0(estimator, by_std):
    inputs = group_inputs([0.7, 1, 0], ["a", "b", "b"])
    got = row_advantages(estimator(inputs, config(norm_adv_by_std_in_grpo=by_std)), inputs)
    assert got[0] == 0.0
    assert got[1] > 0 >= got[2]
    # Alone after its partners could not be scored, too.
    survivor = group_inputs([0.7, NAN, 1, 0], ["a", "a", "b", "b"], scored=[True, False, True, True])
    assert row_advantages(estimator(survivor, config(norm_adv_by_std_in_grpo=by_std)), survivor)[:2] == [0.0, 0.0]


@pytest.mark.parametrize(
    "estimator", [grpo, rloo, grpo_passk, opo, gpg, maxrl, reinforce_plus_plus_baseline], ids=lambda e: e.__name__
)
@pytest.mark.parametrize("score", [0.1, -1e-9, 1234.567, 0.0])
def test_identical_rewards_give_exactly_zero_whatever_the_rounding(estimator, score):
    mask = torch.ones(3, 4, dtype=torch.bool)
    spread_out = torch.zeros(3, 4)
    spread_out[0, 3] = score
    spread_out[1] = torch.tensor([0.3, 0.3, 0.3, 0.1]) * score
    spread_out[2] = torch.tensor([0.7, -0.9, 1.1, 0.1]) * score
    inputs = AdvantageInputs(spread_out, mask, torch.zeros(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))
    assert torch.equal(estimator(inputs, config()).advantages, torch.zeros(3, 4))


def test_a_small_but_real_spread_is_kept():
    inputs = group_inputs([1.0, 1.0 + 1e-4], ["a", "a"])
    got = row_advantages(rloo(inputs, config()), inputs)
    assert got == pytest.approx([-1e-4, 1e-4], rel=1e-6)


@pytest.mark.parametrize("estimator", [grpo, rloo, grpo_passk, gpg, maxrl])
def test_b102_unscored_rows_enter_no_statistic(estimator):
    with_it = group_inputs([1, NAN, 0, 0.5, 3], ["a", "a", "a", "b", "b"], scored=[True, False, True, True, True])
    without = group_inputs([1, 0, 0.5, 3], ["a", "a", "b", "b"])
    got = row_advantages(estimator(with_it, config()), with_it)
    assert got.pop(1) == 0.0
    assert got == row_advantages(estimator(without, config()), without)


@pytest.mark.parametrize("estimator", [grpo, rloo, grpo_passk, gpg, maxrl])
def test_b007_a_row_without_tokens_drives_nothing(estimator):
    # Score 10 of the empty response was left in its last padded slot.
    rewards = f64([[0, 0, 10], [0, 0, NAN], [0, 1, NAN]])
    mask = torch.tensor([[0, 0, 0], [1, 1, 0], [1, 1, 0]], dtype=torch.bool)
    assert outcome_scores(rewards, mask).tolist() == [0, 0, 1]
    inputs = AdvantageInputs(rewards, mask, torch.tensor([7, 7, 7]), torch.ones(3, dtype=torch.bool))
    got = row_advantages(estimator(inputs, config()), inputs)
    pair = group_inputs([0, 1], ["a", "a"])
    assert got == [0.0, *row_advantages(estimator(pair, config()), pair)]


def test_b015_a_nan_score_stays_in_its_group_and_is_countable():
    inputs = group_inputs([1, NAN, 0, 1, 0], ["a", "a", "a", "b", "b"])
    result = grpo(inputs, config())
    assert result.advantages[:3, 0].isnan().all()
    assert result.advantages[3:].isfinite().all()
    assert count_nonfinite(result.advantages, inputs.response_mask) == int(inputs.response_mask[:3].sum())


@pytest.mark.parametrize("odd", [NAN, INF, -INF])
@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in ("gdpo", "remax", "gae")])
def test_a_score_that_is_no_number_shows(name, odd):
    inputs = group_inputs([1, odd, 0, 1, 0], ["a", "a", "a", "b", "b"])
    assert count_nonfinite(ESTIMATORS[name](inputs, config()).advantages, inputs.response_mask) > 0


def test_group_ids_are_labels_not_indices():
    a = group_inputs([1, 0, 2, 5], ["x", "y", "x", "y"])
    assert a.group_ids.tolist() == [0, 1, 0, 1]
    far = AdvantageInputs(a.token_level_rewards, a.response_mask, torch.tensor([-5, 10**12, -5, 10**12]), a.scored)
    assert torch.equal(grpo(a, config()).advantages, grpo(far, config()).advantages)


def test_zero_spread_metric_is_a_share_of_groups():
    inputs = group_inputs([1, 0, 1, 1, 1, 0.3], ["a", "a", "b", "b", "b", "c"])
    assert zero_spread_metric(inputs).value() == pytest.approx(2 / 3)
    assert math.isnan(zero_spread_metric(group_inputs([1.0], ["a"], scored=[False])).value())


# All of them


def drawn_inputs(seed: int, rows: int, width: int, gaps: bool = True, dtype=torch.float64) -> AdvantageInputs:
    """Rows of any length with a reward on every token, some unscored, in up to four groups; garbage under the mask."""
    g = torch.Generator().manual_seed(seed)
    mask = torch.arange(width) < torch.randint(0, width + 1, (rows, 1), generator=g)
    if gaps:
        mask &= torch.rand(rows, width, generator=g) < 0.7
    rewards, values = (torch.randn(rows, width, generator=g, dtype=dtype) for _ in range(2))
    if seed % 2:  # few different scores, so that there are ties and groups without spread
        rewards = place_at_last(torch.randint(0, 3, (rows,), generator=g).to(dtype), mask)
    components = torch.randint(0, 3, (rows, 2), generator=g).to(dtype)
    return AdvantageInputs(
        torch.where(mask, rewards, NAN),
        mask,
        torch.randint(0, 4, (rows,), generator=g),
        torch.rand(rows, generator=g) < 0.8,
        values=torch.where(mask, values, INF),
        bootstrap_values=torch.randn(rows, generator=g, dtype=dtype) if seed % 3 else None,
        reward_components=torch.where(torch.rand(rows, 2, generator=g) < 0.1, NAN, components),
        baselines=torch.randn(rows, generator=g, dtype=dtype),
    )


def changed(inputs: AdvantageInputs, change: Any) -> AdvantageInputs:
    """The same change to every column that there is."""
    columns = {field.name: getattr(inputs, field.name) for field in fields(inputs)}
    return AdvantageInputs(**{name: None if x is None else change(name, x) for name, x in columns.items()})


SIZES = st.tuples(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 9))


@settings(max_examples=30, deadline=None)
@given(
    SIZES,
    st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    st.sampled_from([0.0, 0.05, 0.9, 1.0]),
    st.booleans(),
    st.sampled_from([None, [1.0, 0.5], [0.0, -2.0]]),
)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_against_its_definition(name, sizes, gamma, lam, switch, weights):
    inputs = drawn_inputs(*sizes, gaps=sizes[0] % 5 > 0)
    how = config(
        gamma=gamma,
        lam=lam,
        whiten_advantages=switch,
        norm_adv_by_std_in_grpo=switch,
        gdpo_reward_weights=weights,
    )
    result = ESTIMATORS[name](inputs, how)
    np.testing.assert_allclose(result.advantages.numpy(), ORACLES[name](inputs, how), atol=1e-9)
    if name == "gae":
        raw = gae(inputs, how.model_copy(update={"whiten_advantages": False})).advantages
        values = torch.where(inputs.response_mask, inputs.values, 0.0)
        torch.testing.assert_close(result.returns, raw + values, rtol=0, atol=1e-12)


@pytest.mark.parametrize("lam", [0.0, 1e-30, 1e-4, 0.2, 0.7, 0.97, 1.0])
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_long_rows_with_any_decay(lam, gaps, dtype):
    """Over many chunks, where a decay is far below what float32 can hold."""
    inputs = drawn_inputs(8, 6, 300, gaps, dtype)
    result = gae(inputs, config(gamma=0.99, lam=lam)).advantages
    expected = ORACLES["gae"](inputs, config(gamma=0.99, lam=lam))
    tolerance = 1e-10 if dtype == torch.float64 else 1e-4
    np.testing.assert_allclose(result.numpy(), expected, atol=tolerance, rtol=tolerance)


@settings(max_examples=15, deadline=None)
@given(SIZES, st.sampled_from([NAN, INF, -INF, 1e30]), st.integers(0, 3))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_law_1_padding(name, sizes, garbage, extra):
    """Neither what stands under the mask nor how wide the batch is padded changes anything."""
    inputs, width = drawn_inputs(*sizes), sizes[2]
    mask = torch.nn.functional.pad(inputs.response_mask, (0, extra))

    def padded(name: str, x: torch.Tensor) -> torch.Tensor:
        if x.dim() < 2 or name == "reward_components":
            return x
        x = torch.nn.functional.pad(x, (0, extra))
        return mask if name == "response_mask" else torch.where(mask, x, garbage)

    for how in (config(lam=0.9), config(whiten_advantages=True, norm_adv_by_std_in_grpo=False)):
        clean = ESTIMATORS[name](inputs, how)
        dirty = ESTIMATORS[name](changed(inputs, padded), how)
        torch.testing.assert_close(dirty.advantages[:, :width], clean.advantages, rtol=0, atol=1e-10)
        torch.testing.assert_close(dirty.returns[:, :width], clean.returns, rtol=0, atol=1e-10)
        assert (dirty.advantages[:, width:] == 0).all()
        assert (clean.advantages[~inputs.response_mask] == 0).all()
        assert (clean.returns[~inputs.response_mask] == 0).all()
        assert (clean.advantages[~inputs.scored] == 0).all()


@settings(max_examples=20, deadline=None)
@given(SIZES)
@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_order_of_rows_and_the_labels_of_groups_mean_nothing(name, sizes):
    inputs, how = drawn_inputs(*sizes), config(lam=0.9, whiten_advantages=True)
    order = torch.randperm(sizes[1], generator=torch.Generator().manual_seed(sizes[0]))
    labels = torch.tensor([-5, 10**12, 7, 0])
    shuffled = changed(inputs, lambda name, x: labels[x[order]] if name == "group_ids" else x[order])
    expected, got = ESTIMATORS[name](inputs, how).advantages, ESTIMATORS[name](shuffled, how).advantages
    torch.testing.assert_close(got, expected[order], rtol=0, atol=1e-9)


SHIFTED = ("grpo", "grpo_passk", "rloo", "opo", "gpg", "reinforce_plus_plus_baseline")  # r + c changes nothing
SCALED = {"rloo": 1, "opo": 1, "gpg": 1, "maxrl": 0}  # how advantages grow with r


@settings(max_examples=20, deadline=None)
@given(SIZES, st.sampled_from([0.25, 3.0, 64.0]))
@pytest.mark.parametrize("name", [*SHIFTED, "maxrl"])
def test_shifting_and_scaling_all_scores(name, sizes, factor):
    inputs = drawn_inputs(*sizes)
    expected = ESTIMATORS[name](inputs, config()).advantages

    def with_rewards(change: Any) -> torch.Tensor:
        rewards = lambda field, x: change(x) if field == "token_level_rewards" else x  # noqa: E731
        return ESTIMATORS[name](changed(inputs, rewards), config()).advantages

    if name in SHIFTED:
        shift = place_at_last(torch.full((sizes[1],), factor, dtype=torch.float64), inputs.response_mask)
        torch.testing.assert_close(with_rewards(lambda x: x + shift), expected, rtol=0, atol=1e-9)
    if name in SCALED:
        scaled = expected * factor ** SCALED[name]
        torch.testing.assert_close(with_rewards(lambda x: x * factor), scaled, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_nothing_to_do(name, shape):
    empty = torch.zeros(shape)
    rows = torch.zeros(shape[0])
    inputs = AdvantageInputs(
        empty,
        empty.bool(),
        rows.long(),
        rows.bool(),
        values=empty,
        baselines=rows,
        reward_components=torch.zeros(shape[0], 2),
    )
    result = ESTIMATORS[name](inputs, config(whiten_advantages=True))
    assert torch.equal(result.advantages, empty)
    assert torch.equal(result.returns, empty)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_inputs_are_left_alone_and_dtypes_kept(name):
    inputs = drawn_inputs(4, 6, 5, dtype=torch.float32)
    before = changed(inputs, lambda _, x: x.clone())
    result = ESTIMATORS[name](inputs, config(whiten_advantages=True))
    assert result.advantages.dtype == result.returns.dtype == torch.float32
    for field in fields(inputs):
        torch.testing.assert_close(
            getattr(inputs, field.name), getattr(before, field.name), equal_nan=True, rtol=0, atol=0
        )


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"values has shape \(4, 1\)"):
        token_inputs([[0, 0]] * 4, [[0]] * 4, [[1, 1]] * 4)
    with pytest.raises(ValueError, match="group_ids"):
        token_inputs([[0, 0]], [[0, 0]], [[1, 1]], group_ids=torch.arange(2))
    with pytest.raises(ValueError, match="reward_components"):
        token_inputs([[0, 0]], [[0, 0]], [[1, 1]], reward_components=f64([[1, 2], [3, 4]]))


def test_the_documentation_names_the_estimators_that_exist():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    section = page.partition("## Advantages")[2].partition("## Reward shaping")[0]
    assert re.findall(r"^\| `(\w+)` \|", section, re.M) == list(ESTIMATORS)
