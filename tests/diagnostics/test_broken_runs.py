"""The doctor's proof: runs of the real trainer with one fault each are diagnosed by name, healthy ones left alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty import LETTERS, WORDS, build_letters, config_of, found, right, row, trained
from torch import Tensor

from verl.cluster.worker import Worker
from verl.protocol import DataProto
from verl.trainer import advantages
from verl.trainer.sampling import Sampler
from verl.training.actor import Actor
from verl.training.optimizer import Optimizer

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_letters(tmp_path_factory.mktemp("letters"))


# --- healthy --------------------------------------------------------------------------------------------------------

HEALTHY: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ppo": {"algorithm__adv_estimator": "gae", "critic__optim__lr": 1e-3, "actor__ppo_mini_batch_size": 4},
    "rloo": {"algorithm__adv_estimator": "rloo", "actor__ppo_epochs": 2},
    "dapo-like": {
        "algorithm__filter_groups__enable": True,
        "algorithm__filter_groups__max_num_gen_batches": 10,
        "actor__clip_ratio_high": 0.28,
        "actor__ppo_mini_batch_size": 4,
        "model__dtype": "bfloat16",
    },
    "kl": {
        "actor__use_kl_loss": True,
        "algorithm__use_kl_in_reward": True,
        "actor__recompute_old_log_probs": "always",
        "trainer__mode": "one_step_off",
    },
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_raise_nothing(tmp_path: Path, letters: Path, name: str) -> None:
    assert not found(trained(config_of(tmp_path, letters, **HEALTHY[name], trainer__total_training_steps=6)))


# --- faults put in --------------------------------------------------------------------------------------------------


def after_setup(change: Callable[[Worker], None]) -> Callable[[Patch], None]:
    """``change`` gets the worker once its models are loaded and checked against each other."""

    def put_in(patch: Patch) -> None:
        real = Worker.setup

        def setup(self: Worker) -> Any:
            report = real(self)
            change(self)
            return report

        patch.setattr(Worker, "setup", setup)

    return put_in


def in_batch(change: Callable[[DataProto], None]) -> Callable[[Patch], None]:
    """``change`` gets every batch of responses."""

    def put_in(patch: Patch) -> None:
        real = Sampler.assemble

        def assemble(*arguments: Any) -> DataProto:
            batch = real(*arguments)
            change(batch)
            return batch

        patch.setattr(Sampler, "assemble", assemble)

    return put_in


def in_advantages(change: Callable[[Tensor], Tensor]) -> Callable[[Patch], None]:
    def put_in(patch: Patch) -> None:
        real = advantages.estimate
        patch.setattr(
            advantages,
            "estimate",
            lambda *given: (made := real(*given)).__class__(change(made.advantages), made.returns),
        )

    return put_in


def from_step(step: int, owner: Any, name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """From its ``step``-th call on a method is ``change(real, *arguments)``."""

    def put_in(patch: Patch) -> None:
        real, calls = getattr(owner, name), iter(range(1, 10**6))

        def changed(*arguments: Any) -> Any:
            return change(real, *arguments) if next(calls) >= step else real(*arguments)

        patch.setattr(owner, name, changed)

    return put_in


def _noise_in_reference(worker: Worker) -> None:
    with torch.no_grad():
        for parameter in worker._reference.policy.parameters():
            parameter.add_(torch.randn_like(parameter, generator=None) * 0.1)


def _sharpen(worker: Worker) -> None:
    with torch.no_grad():
        worker._actor.policy.model.lm_head.weight.mul_(20)


def _freeze_attention(worker: Worker) -> None:
    for name, parameter in worker._actor.policy.named_parameters():
        if "attn" in name:
            parameter.requires_grad_(False)


def _layer_1(worker: Worker) -> list[Tensor]:
    return [parameter for name, parameter in worker._actor.policy.named_parameters() if ".layers.1." in name]


def _follow(worker: Worker) -> None:
    """The reference goes half of the way to the policy: a KL is left at every step."""
    with torch.no_grad():
        for behind, ahead in zip(worker._reference.policy.parameters(), worker._actor.policy.parameters(), strict=True):
            behind.lerp_(ahead, 0.5)


def _engine_of_its_own(worker: Worker) -> None:
    worker._engine.policy = copy.deepcopy(worker._engine.policy)


def _roll(batch: DataProto, column: str) -> None:
    batch.batch[column] = batch.batch[column].roll(1, dims=1)


def _drop_last(batch: DataProto) -> None:
    mask = batch.batch["response_mask"]
    batch.batch["response_mask"] = mask & (mask.cumsum(1) < mask.sum(1, keepdim=True))


def _late_reward() -> Callable[..., float]:
    calls = iter(range(10**6))
    return scored(lambda text, truth: float(next(calls) < 4 * 32) + 0.1 * right("", text, truth))


def _raises(error: Exception) -> Callable[..., float]:
    def reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        if len(solution_str) % 3 == 0:
            raise error
        return right(data_source, solution_str, ground_truth)

    return reward


def _without_end(real: Callable[..., Any], sampler: Sampler, *arguments: Any) -> Any:
    params = real(sampler, *arguments)
    return params.__class__(**{**vars(params), "ignore_eos": True})


def scored(score: Callable[[str, str], float]) -> Callable[..., float]:
    return lambda data_source, solution_str, ground_truth, extra_info=None: score(solution_str, ground_truth)


KL = {"actor__use_kl_loss": True}


@dataclass
class Fault:
    """How a run is broken: a patch, a reward, rows of data, settings."""

    put_in: Callable[[Patch], None] = lambda patch: None
    reward: Callable[..., Any] = right
    rows: list[dict[str, Any]] | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def long(**settings: Any) -> dict[str, Any]:
    return {"trainer__total_training_steps": 7, **settings}


FAULTS: dict[str, Fault] = {
    # reward
    "reward_inverted": Fault(reward=scored(lambda text, truth: -right("", text, truth))),
    "reward_constant": Fault(reward=scored(lambda text, truth: 0.5)),
    "reward_format_only": Fault(reward=scored(lambda text, truth: float(len(text) % 2)), settings=long()),
    "reward_follows_length": Fault(reward=scored(lambda text, truth: len(text) / 10)),
    "reward_failed": Fault(reward=_raises(KeyError("answer"))),
    "reward_timed_out": Fault(reward=_raises(TimeoutError("no answer within 2 seconds"))),
    "reward_collapsed": Fault(reward=_late_reward, settings=long()),
    "groups_without_spread": Fault(reward=scored(lambda text, truth: float(text.startswith(f"{truth} ")))),
    # advantages
    "advantages_not_normalised": Fault(in_advantages(lambda values: values * 5)),
    "advantages_not_centred": Fault(in_advantages(lambda values: values + 1)),
    "advantages_large": Fault(
        reward=scored(lambda text, truth: 1000.0 * (truth in text)),
        settings={"algorithm__norm_adv_by_std_in_grpo": False},
    ),
    # KL
    "reference_not_base": Fault(after_setup(_noise_in_reference), settings=KL),
    "reference_moves": Fault(
        after_setup(lambda worker: setattr(worker._reference, "policy", worker._actor.policy)), settings=KL
    ),
    "reference_changes": Fault(
        from_step(2, Worker, "reference_log_probs", lambda real, self, batch: (_follow(self), real(self, batch))[1]),
        settings=KL,
    ),
    "kl_exploded": Fault(settings={**KL, "actor__optim__lr": 0.3}),
    "kl_dominates": Fault(
        settings={"algorithm__use_kl_in_reward": True, "algorithm__kl_ctrl__kl_coef": 1e3, "actor__optim__lr": 1e-2}
    ),
    # updates
    "lr_zero": Fault(settings={"actor__optim__lr": 0.0}),
    "weights_unmoved": Fault(after_setup(lambda worker: setattr(worker._actor.optimizer._adamw, "step", lambda: None))),
    "part_without_gradient": Fault(after_setup(_freeze_attention)),
    "layer_without_gradient": Fault(
        after_setup(lambda worker: [parameter.requires_grad_(False) for parameter in _layer_1(worker)])
    ),
    "layers_uneven": Fault(
        after_setup(lambda worker: [parameter.register_hook(lambda g: g * 1e-6) for parameter in _layer_1(worker)])
    ),
    "gradient_clipped_away": Fault(settings={"actor__grad_clip": 1e-4}),
    "gradient_exploded": Fault(
        from_step(5, Optimizer, "backward", lambda real, self, loss, *rest: real(self, loss * 1000, *rest)),
        settings=long(),
    ),
    "steps_skipped": Fault(
        from_step(3, Optimizer, "step", lambda real, self, rate: (self.spoil(), real(self, rate))[1])
    ),
    "policy_clipped": Fault(
        reward=scored(lambda text, truth: text.count("a")), settings={"actor__clip_ratio": 1e-5, "actor__ppo_epochs": 6}
    ),
    "ratio_not_one": Fault(
        lambda patch: patch.setattr(Actor, "log_probs", _at_another_temperature(Actor.log_probs)),
        settings={"actor__recompute_old_log_probs": "always"},
    ),
    # engine and trainer
    "engine_differs": Fault(after_setup(lambda worker: setattr(worker._actor, "_temperature", 0.5))),
    "engine_weights_stale": Fault(after_setup(_engine_of_its_own), settings=long(actor__optim__lr=1e-2)),
    "tokens_misaligned": Fault(in_batch(partial(_roll, column="rollout_log_probs"))),
    "tokens_not_trained": Fault(in_batch(partial(_roll, column="response_mask"))),
    "eos_not_trained": Fault(in_batch(_drop_last)),
    # collapse
    "entropy_collapsed": Fault(after_setup(_sharpen)),
    "repetition": Fault(after_setup(_sharpen), settings={"rollout__ignore_eos": True, "data__max_response_length": 40}),
    "responses_cut": Fault(settings={"rollout__ignore_eos": True}),
    "length_runaway": Fault(
        from_step(4 * 32 + 1, Sampler, "_params", _without_end), settings=long(data__max_response_length=64)
    ),
    # data
    "truth_empty": Fault(
        rows=[row(i, answer="" if i % 4 == 0 else LETTERS[i % 4]) for i in range(16)],
        settings={"data__max_skipped_fraction": 0.5},
    ),
    "duplicates": Fault(rows=[row(i, prompt=WORDS[i % 4]) for i in range(16)]),
    "answer_in_prompt": Fault(rows=[row(i, prompt=f"x {WORDS[i % 8]} {i}", answer=WORDS[i % 8]) for i in range(16)]),
    "prompts_too_long": Fault(settings={"data__max_prompt_length": 8, "data__truncation": "left"}),
}


def _at_another_temperature(real: Callable[..., DataProto]) -> Callable[..., DataProto]:
    def log_probs(self: Actor, batch: DataProto) -> DataProto:
        self._temperature = 0.7
        made = real(self, batch)
        self._temperature = 1.0
        return made

    return log_probs


def test_there_are_enough() -> None:
    assert len(FAULTS) >= 20


@pytest.mark.parametrize("name", FAULTS)
def test_each_fault_is_diagnosed_by_name(tmp_path: Path, letters: Path, monkeypatch: Patch, name: str) -> None:
    fault = FAULTS[name]
    fault.put_in(monkeypatch)
    reward = fault.reward() if fault.reward is _late_reward else fault.reward
    findings = found(trained(config_of(tmp_path, letters, fault.rows, **fault.settings), reward))
    assert name in findings, sorted(findings)
    assert findings[name].evidence and findings[name].fix
    print("FOUND", name, sorted(findings))
