"""The cap on training responses: by hand over sequences of steps, and in runs that are stopped and resumed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from stage_cases import hand_batch, stub_roles, tiny_config, updates
from verl_process import assert_same_run, computed

from verl.config import Config, load_config
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.trainer import loop
from verl.trainer.run import train
from verl.trainer.sampling import Sampler
from verl.trainer.stages import process, update
from verl.trainer.state import ResponseCap
from verl.trainer.timer import StepTimer

BASE = ["data.train_files=[t.parquet]", "model.path=tiny"]


def make(longest: int = 100, **settings: Any) -> ResponseCap:
    words = [f"rollout.response_length.{name}={value}" for name, value in ({"mode": "adaptive"} | settings).items()]
    return ResponseCap(load_config(None, [*BASE, f"data.max_response_length={longest}", *words]).config)


def sampled(lengths: Sequence[int], cut: int = 0) -> DataProto:
    """Rows of these lengths, the last ``cut`` of them cut."""
    batch = hand_batch([1.0] * len(lengths), list(lengths), n=1, width=100)
    reasons = ["stop"] * (len(lengths) - cut) + ["length"] * cut
    return batch.union(DataProto.from_dict({}, {"finish_reason": reasons}))


def after(cap: ResponseCap, *steps: tuple[Sequence[int], int]) -> list[int]:
    """The cap after each step."""
    found = []
    for lengths, cut in steps:
        before = cap.value
        cap.learn(sampled(lengths, cut))
        assert cap.value == before  # never within a step
        assert cap.advance() == {"response_length/cap": before}
        found.append(cap.value)
    return found


def test_it_follows_a_quantile_of_the_window() -> None:
    """Lengths 1..10: 9 of 10 are at most 9, times 1.5 is 13.5; then windows of two steps."""
    cap = make(quantile=0.9, margin=1.5, window=2, min=2, max_cut_share=1.0)
    assert cap.value == 100
    steps = [(range(1, 11), 0), ([20] * 10, 0), ([4] * 10, 0), ([4] * 10, 0), ([1] * 10, 0), ([1] * 10, 0)]
    # 9; of 1..10 and ten 20s the 18th: 20; of 20s and 4s: 20; of 4s: 4; of 4s and 1s: 4; of 1s: 1, but min 2
    assert after(cap, *steps) == [14, 30, 30, 6, 6, 2]
    assert after(make(quantile=0.5, margin=1.0), ([7, 3, 5, 9], 0)) == [12]  # 5, but an eighth of 100 is the least
    assert after(make(longest=20, quantile=1.0), ([18, 3], 0)) == [20]  # 21.6, and 20 is the longest
    assert after(make(quantile=0.95, min=1), ([5] * 19 + [50], 0)) == [6]  # 19 of 20 is 95%
    assert after(make(quantile=0.95, min=1), ([5] * 18 + [50] * 2, 0)) == [60]


def test_it_opens_when_too_many_are_cut_and_starts_anew() -> None:
    cap = make(quantile=0.9, margin=1.2, window=3, min=2, max_cut_share=0.2)
    short, at_cap = ([10] * 10, 0), ([10] * 7 + [12] * 3, 3)
    # 3 of 10 cut at 12: open. 60 is what they wanted; what was known before is forgotten.
    assert after(cap, short, at_cap, ([10] * 7 + [60] * 3, 0), ([10] * 10, 0)) == [12, 100, 72, 72]
    # Exactly the share, and less: no; lengths at the cap raise it by the margin.
    cap = make(quantile=0.9, margin=1.2, window=1, min=2, max_cut_share=0.2)
    assert after(cap, short, ([10] * 8 + [12] * 2, 2), ([10] * 9 + [15], 1)) == [12, 15, 12]
    # Cut at the longest there is: there is nothing to open.
    assert after(make(quantile=0.5, margin=1.0, min=2), ([3] * 6 + [100] * 4, 4)) == [3]


def test_all_batches_of_a_step_count() -> None:
    cap = make(quantile=0.5, margin=1.0, min=1, max_cut_share=0.25)
    for lengths in ([2, 2], [8, 8], [9, 9]):
        cap.learn(sampled(lengths))
    cap.advance()
    assert cap.value == 8
    cap.learn(sampled([8, 8], cut=2))
    cap.learn(sampled([1] * 6))
    cap.advance()  # a quarter: not more than that
    assert cap.value < 100


def test_fixed_stays_and_says_nothing() -> None:
    cap = make(mode="fixed")
    cap.learn(sampled([3] * 10))
    assert cap.advance() == {} and cap.value == 100


def test_its_state_goes_on() -> None:
    first = make(quantile=0.9, window=2, min=2)
    after(first, ([10] * 10, 0), ([20] * 10, 0))
    second = make(quantile=0.9, window=2, min=2)
    second.load_state_dict(first.state_dict())
    assert second.value == first.value == 24
    assert after(first, ([5] * 10, 0), ([5] * 10, 0)) == after(second, ([5] * 10, 0), ([5] * 10, 0)) == [24, 6]
    shorter, fixed = make(longest=15, min=2), make(mode="fixed")
    for other in (shorter, fixed):
        other.load_state_dict({"value": 24, "recent": []})
    assert (shorter.value, fixed.value) == (15, 100)


def test_rules_and_notices() -> None:
    def load(*words: str) -> list[str]:
        return load_config(None, [*BASE, *words]).notices

    adaptive = "rollout.response_length.mode=adaptive"
    with pytest.raises(ConfigError, match=r"rollout\.response_length\.min is more than data\.max_response_length"):
        load(adaptive, "rollout.response_length.min=513")
    with pytest.raises(ConfigError, match="mask_truncated=true trains on no cut one"):
        load("rollout.ignore_eos=true", "algorithm.mask_truncated=true")
    assert load("rollout.ignore_eos=true", "algorithm.mask_truncated=true", "rollout.stop=x") == []
    assert load(adaptive, "rollout.response_length.window=9") == []
    assert "no effect: rollout.response_length.mode is fixed" in load("rollout.response_length.window=9")[0]
    words = ["rollout.response_length.quantile=0.8", "rollout.response_length.margin=1"]
    assert "open again and again" in load(adaptive, *words)[0]
    assert (
        "bootstrap_truncated has little effect"
        in load("algorithm.bootstrap_truncated=true", "algorithm.mask_truncated=true")[0]
    )
    # verl's key of the same name still means nothing.
    assert load("actor_rollout_ref.rollout.response_length=512")[0].startswith("no meaning here")


# --- what is done about cut responses -----------------------------------------------------------------------------


def test_masked_responses_count_in_their_group_and_train_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Scores 0, 1 and 5 (cut): advantages against their mean of 2; B036: no token of the third in a denominator."""
    settings = {
        "algorithm": {"norm_adv_by_std_in_grpo": False, "mask_truncated": True},
        "actor": {"ppo_mini_batch_size": 1},
    }
    config = tiny_config(tmp_path, tiny_model_dir, settings, {"data": {"train_batch_size": 1}})
    batch = hand_batch([0.0, 1.0, 5.0], [2, 1, 4], n=3)
    batch = batch.union(DataProto.from_dict({}, {"finish_reason": ["stop", "stop", "length"], "index": [0, 1, 2]}))
    roles = stub_roles()
    done, _ = process(batch, roles, config, 0.0, StepTimer())
    assert done.batch["advantages"][:, 0].tolist() == [-2, -1, 3]
    before = done.batch["response_mask"].clone()
    update(done, roles, config, {"actor": 1e-3, "critic": 0.0}, 0, StepTimer())
    ((_, mini_batch, denominators),) = updates(roles)
    assert mini_batch.batch["response_mask"].sum(1).tolist() == [2, 1, 0]
    assert denominators.tokens == 3
    assert torch.equal(done.batch["response_mask"], before)  # metrics and samples still see the score
    only_cut = batch.union(DataProto.from_dict({}, {}))
    only_cut.non_tensor_batch["finish_reason"][:] = "length"
    done, _ = process(only_cut, stub_roles(), config, 0.0, StepTimer())
    assert update(done, stub_roles(), config, {"actor": 1e-3, "critic": 0.0}, 0, StepTimer()) == {}


def test_the_overlong_penalty_does_not_move_with_the_cap(tmp_path: Path, tiny_model_dir: Path) -> None:
    """Limit 4, buffer 2: lengths 2, 3 and 4 lose 0, 1/2 and 1, also where the cap of the step was 3."""
    buffer = {"reward": {"overlong_buffer": {"enable": True, "len": 2}}, "data": {"max_response_length": 4}}
    adaptive = {"rollout": {"response_length": {"mode": "adaptive"}}, "actor": {"ppo_mini_batch_size": 1}}
    config = tiny_config(tmp_path, tiny_model_dir, buffer, adaptive, {"data": {"train_batch_size": 1}})
    batch = hand_batch([1.0, 1.0, 1.0], [2, 3, 3], n=3)
    batch = batch.union(DataProto.from_dict({}, {"finish_reason": ["stop", "stop", "length"]}))
    done, _ = process(batch, stub_roles(), config, 0.0, StepTimer())
    assert done.batch["token_level_rewards"].sum(1).tolist() == [1.0, 0.5, 0.5]


# --- runs ---------------------------------------------------------------------------------------------------------

STEPS = 6


def configured(folder: Path, model: Path, run: str, **more: dict[str, Any]) -> Config:
    """Responses that end at a quarter of all tokens: about 4 long, the longest 24."""
    settings: dict[str, Any] = {
        "data": {"max_response_length": 24, "val_files": str(folder / "train.jsonl"), "val_max_samples": 2},
        "rollout": {
            "stop_token_ids": list(range(0, 264, 4)),
            "response_length": {
                "mode": "adaptive",
                "quantile": 0.6,
                "margin": 1.0,
                "window": 2,
                "max_cut_share": 0.45,
                "min": 2,
            },
        },
        "trainer": {
            "default_local_dir": str(folder / run),
            "total_training_steps": STEPS,
            "save_freq": 4,
            "val_before_train": True,
        },
        "cluster": {"threads": 1},
    }
    return tiny_config(folder, model, settings, *more.values())


def go(config: Config) -> None:
    train(config, Console(file=io.StringIO()))


def test_a_run_is_capped_opens_again_and_resumes_exactly(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []
    real = Sampler.requests

    def noted(self: Sampler, prompts: DataProto) -> Any:
        requests = real(self, prompts)
        asked.append((requests[0].slot.uid.split(":")[0], requests[0].sampling.max_new_tokens))
        return requests

    monkeypatch.setattr(Sampler, "requests", noted)
    go(configured(tmp_path, tiny_model_dir, "whole"))
    lines = [line for line in computed(tmp_path / "whole") if "response_length/cap" in line]
    caps = [line["response_length/cap"] for line in lines]
    assert [cap for split, cap in asked if split == "train"] == caps
    assert {cap for split, cap in asked if split == "val"} == {24}
    assert caps[0] == 24 and min(caps) < 10
    for line in lines:
        assert line["response_length/max"] <= line["response_length/cap"]
        assert (line["response_length/clip_ratio"] > 0) == (line["response_length/max"] == line["response_length/cap"])
    for before, now in pairwise(lines):
        if before["response_length/cap"] < 24:
            assert (now["response_length/cap"] == 24) == (before["response_length/clip_ratio"] > 0.45)
    assert 24 in caps[1:] and caps[4] < 24  # it did open; and what a resumed run starts with is not the start's
    calls = iter(range(100))

    def dying(*arguments: Any) -> Any:
        if next(calls) == 4:
            raise KeyboardInterrupt
        return real_update(*arguments)

    real_update = loop.update
    config = configured(tmp_path, tiny_model_dir, "stopped")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "update", dying)
        go(config)
    go(config)
    assert_same_run(tmp_path / "whole", tmp_path / "stopped", STEPS)
