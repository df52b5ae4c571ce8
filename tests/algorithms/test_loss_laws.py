"""Laws 1 (padding) and 2 (split) for every policy loss, with entropy and KL terms, and for the value loss."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algorithms.aggregation import LOSS_AGGREGATIONS, count_denominators
from verl.algorithms.kl import KL_ESTIMATORS
from verl.algorithms.loss_inputs import LossInputs, PolicyLoss
from verl.algorithms.metric import merge_all, reduce_metrics
from verl.algorithms.policy_loss import POLICY_LOSSES, actor_loss
from verl.algorithms.value_loss import ValueLossInputs, value_loss
from verl.config.schema_roles import ActorConfig, CriticConfig, PolicyLossConfig

MAX_LENGTH = 11.0
KINDS = [kind + plus for kind in (*KL_ESTIMATORS, "full") for plus in ("", "+") if kind + plus not in ("k1", "kl")]


@dataclass
class Case:
    """A loss of columns; the named ones get a gradient. ``policy_loss`` None: the value loss."""

    policy_loss: PolicyLoss | None
    config: Any
    columns: dict[str, Tensor]
    trained: tuple[str, ...]

    def statistics(self) -> dict[str, Tensor]:
        """Of the whole mini-batch, before it is split."""
        if self.policy_loss is None or self.policy_loss.statistics is None:
            return {}
        return self.policy_loss.statistics(LossInputs(**self.columns), self.config)

    def run(self, rows: Tensor, width: int | None = None) -> tuple[Tensor, dict[str, float], dict[str, Tensor]]:
        """One micro-batch of ``rows`` cut to ``width``: loss, metrics still to merge, leaves with their gradient."""
        part = {name: x[rows] if x.dim() == 1 else x[rows, :width] for name, x in self.columns.items()}
        leaves = {name: part[name].detach().clone().requires_grad_() for name in self.trained}
        whole = count_denominators(self.columns["response_mask"], MAX_LENGTH)
        if self.policy_loss is None:
            loss, metrics = value_loss(ValueLossInputs(**(part | leaves)), self.config, whole)
        else:
            found = {name: x[rows, :width] for name, x in self.statistics().items()}
            inputs = LossInputs(**(part | leaves), statistics=found)
            loss, metrics = actor_loss(self.policy_loss, inputs, self.config, whole)
        loss.backward()
        return loss.detach(), metrics, {n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None}


def make_case(seed: int, which: str, mode: str) -> Case:
    g = torch.Generator().manual_seed(seed)
    rows, width = (int(n) for n in torch.randint(1, 9, (2,), generator=g))
    lengths = torch.randint(0, width + 1, (rows,), generator=g)
    mask = torch.arange(width) < lengths.unsqueeze(1)
    if seed % 2:
        mask &= torch.rand(rows, width, generator=g) < 0.7

    def column() -> Tensor:
        return torch.randn(rows, width, generator=g, dtype=torch.float64)

    if which == "value":
        names = [field.name for field in fields(ValueLossInputs) if field.name != "response_mask"]
        columns = {name: column() for name in names} | {"response_mask": mask}
        config = CriticConfig(loss_agg_mode=mode, huber_delta=0.7 if seed % 3 else None)
        return Case(None, config, columns, ("values",))
    names = [
        field.name for field in fields(LossInputs) if field.name not in ("response_mask", "group_ids", "statistics")
    ]
    config = ActorConfig(
        loss_agg_mode=mode,
        use_kl_loss=True,
        kl_loss_type=KINDS[seed % len(KINDS)],
        kl_loss_coef=0.3,
        entropy_coeff=0.2,
        policy_loss=PolicyLossConfig(loss_mode=which, clip_cov_ratio=0.3, clip_cov_lb=-0.5, kl_cov_ratio=0.3),
    )
    columns = {name: column() for name in names}
    columns |= {"response_mask": mask, "group_ids": torch.arange(rows) // 2}
    return Case(POLICY_LOSSES[which], config, columns, ("log_probs", "entropy", "full_kl"))


every_loss = pytest.mark.parametrize("which", [*POLICY_LOSSES, "value"])
every_mode = pytest.mark.parametrize("mode", LOSS_AGGREGATIONS)


@every_loss
@every_mode
@settings(max_examples=6, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([math.nan, math.inf, -math.inf, 1e300]),
    st.integers(0, 3),
    st.integers(0, 99),
)
def test_law_1_padding(which, mode, seed, garbage, extra, salt):
    case = make_case(seed, which, mode)
    every = torch.arange(len(case.columns["response_mask"]))
    loss, metrics, gradients = case.run(every)
    mask = torch.nn.functional.pad(case.columns["response_mask"], (0, extra))
    g = torch.Generator().manual_seed(salt)
    dirty_columns = {}
    for name, x in case.columns.items():
        if x.is_floating_point():
            wide = torch.nn.functional.pad(x, (0, extra))
            noise = torch.full_like(wide, 7.0)
            noise[torch.rand(wide.shape, generator=g) < 0.5] = garbage  # elsewhere than in other columns
            x = torch.where(mask, wide, noise)
        dirty_columns[name] = x
    dirty = Case(case.policy_loss, case.config, dirty_columns | {"response_mask": mask}, case.trained)
    dirty_loss, dirty_metrics, dirty_gradients = dirty.run(every)
    assert dirty_loss.item() == pytest.approx(loss.item(), abs=1e-10, rel=1e-10)
    assert reduce_metrics(dirty_metrics) == pytest.approx(reduce_metrics(metrics), abs=1e-10, rel=1e-10)
    width = case.columns["response_mask"].shape[1]
    for name, gradient in gradients.items():
        assert (dirty_gradients[name][~mask] == 0).all()
        torch.testing.assert_close(dirty_gradients[name][:, :width], gradient, rtol=0, atol=1e-10)


@every_loss
@every_mode
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 4), st.randoms(use_true_random=False))
def test_law_2_split(which, mode, seed, size, random):
    case = make_case(seed, which, mode)
    mask = case.columns["response_mask"]
    every = torch.arange(len(mask))
    loss, metrics, gradients = case.run(every)
    order = every.tolist()
    random.shuffle(order)
    total, parts = 0.0, []
    pieces = {name: torch.zeros_like(gradient) for name, gradient in gradients.items()}
    for start in range(0, len(order), size):
        rows = torch.tensor(order[start : start + size])
        used = mask[rows].any(dim=0).nonzero()
        width = int(used.max()) + 1 if len(used) else 1  # each micro-batch is padded to its own longest row
        part_loss, part_metrics, part_gradients = case.run(rows, width)
        total += part_loss.item()
        parts.append(part_metrics)
        for name, gradient in part_gradients.items():
            pieces[name][rows, :width] = gradient
    assert total == pytest.approx(loss.item(), abs=1e-10, rel=1e-10)
    for name, gradient in gradients.items():
        torch.testing.assert_close(pieces[name], gradient, rtol=1e-10, atol=1e-10)
    assert reduce_metrics(merge_all(parts)) == pytest.approx(reduce_metrics(metrics), abs=1e-9, rel=1e-9)


@every_loss
@every_mode
def test_b036_an_all_masked_mini_batch_gives_0_with_zero_gradient(which, mode):
    case = make_case(4, which, mode)
    case.columns["response_mask"] = torch.zeros_like(case.columns["response_mask"])
    for name in case.trained:
        case.columns[name] = torch.full_like(case.columns[name], math.nan)
    loss, metrics, gradients = case.run(torch.arange(len(case.columns["response_mask"])))
    assert loss.item() == 0
    assert all((gradient == 0).all() for gradient in gradients.values())
    assert reduce_metrics(metrics) == {}
