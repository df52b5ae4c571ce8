from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from verl.algorithms.schedules import (
    AdaptiveKLController,
    Course,
    actor_schedules,
    kl_schedule,
    learning_rate,
    moving_values,
    scheduled_actor,
    warmup_steps,
)
from verl.config.schema_roles import ActorConfig, ClipScheduleConfig, ScheduleConfig
from verl.config.schema_run import KlControlConfig
from verl.errors import ConfigError

NAN, INF = math.nan, math.inf


def optim(**changes: Any) -> Any:
    fields = {
        "lr": 1.0,
        "lr_scheduler_type": "constant",
        "lr_warmup_steps": -1,
        "lr_warmup_steps_ratio": 0.0,
        "lr_wsd_decay_steps": None,
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


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine", "wsd"])
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


def test_wsd_by_hand():
    config = optim(lr_scheduler_type="wsd", lr_warmup_steps=2, lr_wsd_decay_steps=4, min_lr_ratio=0.2)
    assert course(9, config) == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4])
    assert learning_rate(9, 9, config) == pytest.approx(0.2)
    tenth = course(20, optim(lr_scheduler_type="wsd"))  # the last tenth: two steps
    assert tenth == pytest.approx([1.0] * 19 + [0.5])
    assert course(3, optim(lr_scheduler_type="wsd", lr_warmup_steps=2, lr_wsd_decay_steps=9)) == [0.5, 1.0, 1.0]


# Coefficients


def actor_config(**settings: Any) -> ActorConfig:
    return ActorConfig(**settings)


def actor_course(config: ActorConfig, total: int = 4) -> list[ActorConfig]:
    return [scheduled_actor(config, actor_schedules(config), step, total) for step in range(total)]


def test_constant_coefficients_stay_as_configured_and_are_not_logged():
    config = actor_config(clip_ratio_high=0.28, entropy_coeff=0.01, kl_loss_coef=0.5)
    for now in actor_course(config):
        assert (now.clip_low, now.clip_high, now.entropy_coeff, now.kl_loss_coef) == (0.2, 0.28, 0.01, 0.5)
        assert moving_values(now) == {}


def test_linear_and_cosine_coefficients_by_hand():
    config = actor_config(
        clip_ratio_low=0.1,
        clip_ratio_high=0.4,
        clip_ratio_schedule=ClipScheduleConfig(type="linear", end=0.2),
        entropy_coeff=0.02,
        entropy_coeff_schedule=ScheduleConfig(type="cosine", end=0.0),
        kl_loss_coef=0.0,
        kl_loss_coef_schedule=ScheduleConfig(type="linear", end=1.0),
    )
    steps = actor_course(config)
    assert [now.clip_high for now in steps] == pytest.approx([0.4, 0.35, 0.3, 0.25])
    assert [now.clip_low for now in steps] == pytest.approx([0.1, 0.0875, 0.075, 0.0625])  # in proportion
    half = math.sqrt(0.5)
    assert [now.entropy_coeff for now in steps] == pytest.approx([0.02, 0.01 * (1 + half), 0.01, 0.01 * (1 - half)])
    assert [now.kl_loss_coef for now in steps] == pytest.approx([0, 0.25, 0.5, 0.75])
    assert moving_values(steps[2]) == pytest.approx(
        {
            "actor/clip_ratio_low": 0.075,
            "actor/clip_ratio_high": 0.3,
            "actor/entropy_coeff": 0.01,
            "actor/kl_loss_coef": 0.5,
        }
    )
    assert scheduled_actor(config, actor_schedules(config), 9, 4).clip_high == 0.2  # beyond the end


@pytest.mark.parametrize(
    ("measured", "expected"), [(0.02, 0.18), (0.0125, 0.195), (0.01, 0.2), (0.0, 0.22), (-5.0, 0.22), (NAN, 0.2)]
)
def test_an_adaptive_clip_narrows_when_the_kl_is_over_its_target(measured, expected):
    config = actor_config(clip_ratio_schedule=ClipScheduleConfig(type="adaptive", target=0.01))
    schedules = actor_schedules(config)
    clip = schedules["clip_ratio_high"]
    assert clip.metric == "actor/ppo_kl"
    clip.update(measured, 64)
    now = scheduled_actor(config, schedules, 1, 4)
    assert (now.clip_low, now.clip_high) == pytest.approx((expected, expected))


def test_an_adaptive_clip_widens_when_too_much_is_clipped_and_stays_in_its_bounds():
    schedule = ClipScheduleConfig(type="adaptive", target=0.1, target_metric="pg_clipfrac", rate=0.5, max=0.3)
    config = actor_config(clip_ratio_schedule=schedule)
    clip = actor_schedules(config)["clip_ratio_high"]
    assert clip.metric == "actor/pg_clipfrac"
    clip.update(0.15, 64)
    assert clip.value(1, 4) == pytest.approx(0.25)
    clip.update(0.9, 64)
    assert clip.value(2, 4) == 0.3
    for _ in range(9):
        clip.update(0.0, 64)
    assert clip.value(9, 4) == pytest.approx(0.02)  # a tenth of the start


def test_entropy_and_kl_coefficients_push_against_their_metric():
    adaptive = ScheduleConfig(type="adaptive", target=1.0)
    config = actor_config(
        entropy_coeff=0.01, entropy_coeff_schedule=adaptive, kl_loss_coef=0.01, kl_loss_coef_schedule=adaptive
    )
    schedules = actor_schedules(config)
    assert (schedules["entropy_coeff"].metric, schedules["kl_loss_coef"].metric) == ("actor/entropy", "actor/kl_loss")
    for name in ("entropy_coeff", "kl_loss_coef"):
        schedules[name].update(0.5, 64)  # below its target
    now = scheduled_actor(config, schedules, 1, 4)
    assert (now.entropy_coeff, now.kl_loss_coef) == pytest.approx((0.0105, 0.0095))


def test_a_wide_clip_low_ends_at_1():
    config = actor_config(clip_ratio_low=0.8, clip_ratio_schedule=ClipScheduleConfig(type="linear", end=0.4))
    assert scheduled_actor(config, actor_schedules(config), 4, 4).clip_low == 1.0


def test_schedules_resume_through_json():
    config = actor_config(clip_ratio_schedule=ClipScheduleConfig(type="adaptive", target=0.01))
    for before, after in (
        (actor_schedules(config)["clip_ratio_high"], actor_schedules(config)["clip_ratio_high"]),
        (kl_schedule(KlControlConfig(type="adaptive")), kl_schedule(KlControlConfig(type="adaptive"))),
    ):
        start = before.value(0, 4)
        before.update(12, 256)
        after.load_state_dict(json.loads(json.dumps(before.state_dict())))
        assert after.value(1, 4) == before.value(1, 4) != start
        after.load_state_dict({})  # of a run whose schedule was a fixed course
        assert after.value(1, 4) == before.value(1, 4)
    fixed = kl_schedule(KlControlConfig(kl_coef=0.3))
    fixed.update(12, 256)
    fixed.load_state_dict(json.loads(json.dumps(Course(0.1).state_dict())))
    assert fixed.value(3, 4) == 0.3  # the configured coefficient wins


def test_the_kl_coefficient_follows_a_course():
    linear = kl_schedule(KlControlConfig(type="linear", kl_coef=0.4, kl_coef_end=0.2))
    assert [linear.value(step, 4) for step in range(4)] == pytest.approx([0.4, 0.35, 0.3, 0.25])
    cosine = kl_schedule(KlControlConfig(type="cosine", kl_coef=0.4))
    assert cosine.value(2, 4) == pytest.approx(0.2)


@pytest.mark.parametrize(("kl", "expected"), [(12, 0.201024), (6.6, 0.200512), (6, 0.2), (3, 0.198976)])
def test_b054_adaptive_controller(kl, expected):
    controller = AdaptiveKLController(0.2, 6, 10000)
    controller.update(kl, 256)
    assert controller.coef == pytest.approx(expected, abs=1e-9)


def test_b054_refusals():
    for coef, target, horizon in ((0, 6, 100), (0.2, 6, 0), (0.2, 0, 100), (-1, 6, 100), (NAN, 6, 100)):
        with pytest.raises(ConfigError, match="above 0"):
            AdaptiveKLController(coef, target, horizon)


def test_the_coefficient_survives_bad_and_huge_steps():
    controller = AdaptiveKLController(0.2, 6, 100)
    for kl in (NAN, INF, -INF):
        controller.update(kl, 256)
        assert controller.coef == 0.2
    controller.update(0.0, 100000)
    assert controller.coef > 0
