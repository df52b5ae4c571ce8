from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.algorithms.advantages import (
    ESTIMATORS,
    AdvantageInputs,
    gae,
    group_index,
    grpo,
    outcome_scores,
    rloo,
    zero_spread_metric,
)
from verl.algorithms.masking import count_nonfinite, place_at_last
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


def gae_oracle(inputs: AdvantageInputs, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Equation 16 as the sum it is defined by, row by row, over the trained tokens only."""
    shape = inputs.response_mask.shape
    advantages, returns = np.zeros(shape), np.zeros(shape)
    for b in range(shape[0]):
        places = np.flatnonzero(inputs.response_mask[b].numpy())
        r = inputs.token_level_rewards[b].numpy()[places]
        end = 0.0 if inputs.bootstrap_values is None else float(inputs.bootstrap_values[b])
        v = np.append(inputs.values[b].numpy()[places], end)
        deltas = r + gamma * v[1:] - v[:-1]
        for t, place in enumerate(places):
            weights = (gamma * lam) ** np.arange(len(places) - t)
            advantages[b, place] = weights @ deltas[t:] if inputs.scored[b] else 0.0
            returns[b, place] = advantages[b, place] + v[t]
    return advantages, returns


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 10**6), st.booleans(), st.booleans(), st.booleans())
def test_gae_against_the_definition(seed, gaps, bootstrap, whiten):
    g = torch.Generator().manual_seed(seed)
    rows, width = (int(n) for n in torch.randint(1, 9, (2,), generator=g))
    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths.unsqueeze(1)
    if gaps:
        mask &= torch.rand(rows, width, generator=g) < 0.7
    rewards, values = (torch.randn(rows, width, generator=g, dtype=torch.float64) for _ in range(2))
    inputs = AdvantageInputs(
        rewards,
        mask,
        torch.arange(rows),
        torch.rand(rows, generator=g) < 0.8,
        values=values,
        bootstrap_values=torch.randn(rows, generator=g, dtype=torch.float64) if bootstrap else None,
    )
    gamma, lam = 0.9, 0.7
    advantages, returns = gae_oracle(inputs, gamma, lam)
    counted = mask.numpy() & inputs.scored.numpy()[:, None]
    if whiten and counted.any():
        kept = advantages[counted]
        deviation = math.sqrt(kept.var(ddof=1) + 1e-8) if len(kept) > 1 else 1.0
        advantages[counted] = (kept - kept.mean()) / deviation
    result = gae(inputs, config(gamma=gamma, lam=lam, whiten_advantages=whiten))
    np.testing.assert_allclose(result.advantages.numpy(), advantages, atol=1e-10)
    np.testing.assert_allclose(result.returns.numpy(), returns, atol=1e-10)


def test_gae_blocks_of_rows_do_not_show(monkeypatch):
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(7, 5, generator=g) < 0.8
    columns = [torch.randn(7, 5, generator=g) for _ in range(2)]
    inputs = AdvantageInputs(
        columns[0],
        mask,
        torch.arange(7),
        torch.ones(7, dtype=torch.bool),
        values=columns[1],
        bootstrap_values=torch.ones(7),
    )
    whole = gae(inputs, config(lam=0.9))
    monkeypatch.setattr("verl.algorithms.advantages._ROWS_AT_ONCE", 2)
    blocks = gae(inputs, config(lam=0.9))
    torch.testing.assert_close(blocks.advantages, whole.advantages)
    torch.testing.assert_close(blocks.returns, whole.returns)


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


@pytest.mark.parametrize("estimator", [grpo, rloo])
@pytest.mark.parametrize("by_std", [True, False])
def test_b011_a_group_of_one_has_advantage_0(estimator, by_std):
    inputs = group_inputs([0.7, 1, 0], ["a", "b", "b"])
    got = row_advantages(estimator(inputs, config(norm_adv_by_std_in_grpo=by_std)), inputs)
    assert got[0] == 0.0
    assert got[1] == -got[2] > 0
    # Alone after its partners could not be scored, too.
    survivor = group_inputs([0.7, NAN, 1, 0], ["a", "a", "b", "b"], scored=[True, False, True, True])
    assert row_advantages(estimator(survivor, config(norm_adv_by_std_in_grpo=by_std)), survivor)[:2] == [0.0, 0.0]


@pytest.mark.parametrize("estimator", [grpo, rloo])
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


@pytest.mark.parametrize("estimator", [grpo, rloo])
def test_b102_unscored_rows_enter_no_statistic(estimator):
    with_it = group_inputs([1, NAN, 0, 0.5, 3], ["a", "a", "a", "b", "b"], scored=[True, False, True, True, True])
    without = group_inputs([1, 0, 0.5, 3], ["a", "a", "b", "b"])
    got = row_advantages(estimator(with_it, config()), with_it)
    assert got.pop(1) == 0.0
    assert got == row_advantages(estimator(without, config()), without)


@pytest.mark.parametrize("estimator", [grpo, rloo])
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


def group_oracle(name: str, scores: np.ndarray, groups: np.ndarray, by_std: bool) -> np.ndarray:
    out = np.zeros(len(scores))
    for group in set(groups.tolist()):
        members = np.flatnonzero(groups == group)
        if len(members) < 2 or np.ptp(scores[members]) < 1e-9:
            continue
        for i in members:
            if name == "rloo":
                out[i] = scores[i] - scores[[j for j in members if j != i]].mean()
            else:
                deviation = scores[members].std(ddof=1) + 1e-6 if by_std else 1.0
                out[i] = (scores[i] - scores[members].mean()) / deviation
    return out


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([-1.0, 0.0, 0.25, 1.0, 3.5]), st.integers(0, 4), st.booleans()), min_size=1),
    st.sampled_from(["grpo", "rloo"]),
    st.booleans(),
)
def test_group_estimators_against_their_definition(rows, name, by_std):
    scores, groups, scored = (np.array(column) for column in zip(*rows, strict=True))
    inputs = group_inputs(scores.tolist(), groups.tolist(), scored=scored.tolist())
    expected = np.zeros(len(scores))
    expected[scored] = group_oracle(name, scores[scored], groups[scored], by_std)
    settings_ = config(norm_adv_by_std_in_grpo=by_std)
    got = row_advantages(ESTIMATORS[name](inputs, settings_), inputs)
    np.testing.assert_allclose(got, expected, atol=1e-10)
    # The order of the rows, and so whether groups are contiguous, means nothing.
    order = np.random.default_rng(0).permutation(len(scores))
    shuffled = group_inputs(scores[order].tolist(), groups[order].tolist(), scored=scored[order].tolist())
    got = row_advantages(ESTIMATORS[name](shuffled, settings_), shuffled)
    np.testing.assert_allclose(got, expected[order], atol=1e-10)


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


def with_padding_changed(inputs: AdvantageInputs, value: float, extra: int) -> AdvantageInputs:
    mask = torch.nn.functional.pad(inputs.response_mask, (0, extra))
    columns = [torch.nn.functional.pad(x, (0, extra)) for x in (inputs.token_level_rewards, inputs.values)]
    rewards, values = (torch.where(mask, x, value) for x in columns)
    return AdvantageInputs(rewards, mask, inputs.group_ids, inputs.scored, values=values)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([NAN, INF, -INF, 1e30]), st.integers(0, 3))
@pytest.mark.parametrize("name", ESTIMATORS)
def test_law_1_padding(name, seed, garbage, extra):
    g = torch.Generator().manual_seed(seed)
    rows, width = (int(n) for n in torch.randint(1, 8, (2,), generator=g))
    mask = torch.rand(rows, width, generator=g) < 0.6
    rewards, values = (torch.randn(rows, width, generator=g, dtype=torch.float64) for _ in range(2))
    scored = torch.rand(rows, generator=g) < 0.8
    inputs = AdvantageInputs(rewards, mask, torch.randint(0, 3, (rows,), generator=g), scored, values=values)
    for settings_ in (config(lam=0.9), config(whiten_advantages=True, norm_adv_by_std_in_grpo=False)):
        clean = ESTIMATORS[name](inputs, settings_)
        dirty = ESTIMATORS[name](with_padding_changed(inputs, garbage, extra), settings_)
        torch.testing.assert_close(dirty.advantages[:, :width], clean.advantages, rtol=0, atol=1e-10)
        torch.testing.assert_close(dirty.returns[:, :width], clean.returns, rtol=0, atol=1e-10)
        assert (dirty.advantages[:, width:] == 0).all()
        assert (clean.advantages[~mask] == 0).all()
        assert (clean.returns[~mask] == 0).all()
        assert (clean.advantages[~scored] == 0).all()


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (2, 3)])
def test_nothing_to_do(name, shape):
    empty = torch.zeros(shape)
    rows = torch.zeros(shape[0])
    inputs = AdvantageInputs(empty, empty.bool(), rows.long(), rows.bool(), values=empty)
    result = ESTIMATORS[name](inputs, config(whiten_advantages=True))
    assert torch.equal(result.advantages, empty)
    assert torch.equal(result.returns, empty)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_inputs_are_left_alone_and_dtypes_kept(name):
    inputs = group_inputs([1, 0, 2, 0.5], ["a", "a", "b", "b"], dtype=torch.float32)
    inputs = AdvantageInputs(
        inputs.token_level_rewards, inputs.response_mask, inputs.group_ids, inputs.scored, values=torch.randn(4, 4)
    )
    before = [inputs.token_level_rewards.clone(), inputs.values.clone()]
    result = ESTIMATORS[name](inputs, config(whiten_advantages=True))
    assert result.advantages.dtype == result.returns.dtype == torch.float32
    torch.testing.assert_close([inputs.token_level_rewards, inputs.values], before, equal_nan=True, rtol=0, atol=0)


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"values has shape \(4, 1\)"):
        token_inputs([[0, 0]] * 4, [[0]] * 4, [[1, 1]] * 4)
    with pytest.raises(ValueError, match="group_ids"):
        token_inputs([[0, 0]], [[0, 0]], [[1, 1]], group_ids=torch.arange(2))
