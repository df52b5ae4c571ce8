from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from verl.algorithms.schedules import learning_rate, warmup_steps


def optim(**changes: Any) -> Any:
    fields = {
        "lr": 1.0,
        "lr_scheduler_type": "constant",
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.0,
        "min_lr_ratio": 0.0,
    }
    return SimpleNamespace(**(fields | changes))


def course(total: int, config: Any) -> list[float]:
    return [learning_rate(step, total, config) for step in range(total)]


def test_b050_warm_up_of_four():
    assert course(6, optim(lr_warmup_steps=4)) == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_b050_warm_up_as_long_as_the_run_or_longer(kind):
    config = optim(lr_warmup_steps=4, lr_scheduler_type=kind)
    assert course(4, config) == [0.25, 0.5, 0.75, 1.0]
    assert course(2, config) == [0.25, 0.5]
    assert learning_rate(4, 4, config) == (1.0 if kind == "constant" else pytest.approx(0.0))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
def test_b050_no_warm_up_starts_at_the_full_rate(kind):
    assert learning_rate(0, 10, optim(lr_scheduler_type=kind, lr_warmup_steps=0)) == 1.0


def test_linear_and_cosine_by_hand():
    assert course(4, optim(lr_scheduler_type="linear")) == pytest.approx([1.0, 0.75, 0.5, 0.25])
    floor = course(4, optim(lr_scheduler_type="linear", min_lr_ratio=0.2, lr=2.0))
    assert floor == pytest.approx([2.0, 1.6, 1.2, 0.8])
    half = math.sqrt(0.5)
    expected = [0.5, 1.0, 1.0, 0.5 * (1 + half), 0.5, 0.5 * (1 - half)]
    assert course(6, optim(lr_scheduler_type="cosine", lr_warmup_steps=2)) == pytest.approx(expected)


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_the_end_and_beyond_is_the_floor(kind):
    config = optim(lr_scheduler_type=kind, min_lr_ratio=0.1)
    assert learning_rate(10, 10, config) == pytest.approx(0.1)
    assert learning_rate(99, 10, config) == pytest.approx(0.1)
    rates = course(10, config)
    assert rates == sorted(rates, reverse=True)
    assert min(rates) > 0.1


def test_warm_up_by_ratio_and_by_steps():
    assert warmup_steps(100, optim(lr_warmup_steps_ratio=0.29)) == 29
    assert warmup_steps(30, optim(lr_warmup_steps_ratio=0.1)) == 3
    assert warmup_steps(9, optim(lr_warmup_steps_ratio=0.25)) == 2
    assert warmup_steps(100, optim(lr_warmup_steps_ratio=0.29, lr_warmup_steps=0)) == 0
    assert warmup_steps(100, optim(lr_warmup_steps_ratio=0.29, lr_warmup_steps=7)) == 7


def test_refusals():
    with pytest.raises(ValueError, match="negative"):
        learning_rate(-1, 10, optim())
    with pytest.raises(ValueError, match="triangle"):
        learning_rate(0, 10, optim(lr_scheduler_type="triangle"))
