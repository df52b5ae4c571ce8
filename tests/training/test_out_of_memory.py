"""An allocator's error: what is said about it, and smaller micro-batches in its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import Policies, Shape, capture_gradients, distance, make_batch
from test_split_law import FIXED_DIVISOR, TEMPERATURE, actor_config

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.metric import reduce_metrics
from verl.config import ActorConfig, CriticConfig
from verl.errors import OutOfMemoryError
from verl.models.policy import PolicyModel
from verl.training.actor import Actor
from verl.training.critic import Critic
from verl.training.micro_batches import Limits
from verl.training.passes import Passes, is_out_of_memory

SHAPE = Shape(prompt_lengths=[4, 6], groups=[3, 3], responses=[5, 2, 7, 3, 6, 1], seed=4)
CPU_MESSAGE = "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory: you tried ..."


def small_memory(monkeypatch: pytest.MonkeyPatch, policies: Policies, most: int, error: Exception) -> list[int]:
    """Forward passes over more packed tokens than ``most`` fail; the sizes of those that do not."""
    done: list[int] = []
    for model in (policies.policy, policies.value):
        real = model.forward

        def forward(packed: Any, *arguments: Any, real: Any = real) -> Any:
            if packed.input_ids.shape[0] > most:
                raise error
            done.append(packed.input_ids.shape[0])
            return real(packed, *arguments)

        monkeypatch.setattr(model, "forward", forward)
    return done


@pytest.mark.parametrize(
    "error", [RuntimeError(CPU_MESSAGE), torch.OutOfMemoryError("CUDA out of memory."), MemoryError()]
)
@pytest.mark.parametrize("limits", [Limits(None, 40, True), Limits(6, None, True)], ids=["tokens", "rows"])
def test_smaller_micro_batches_give_the_same_step(
    float64: Policies, monkeypatch: pytest.MonkeyPatch, error: Exception, limits: Limits
) -> None:
    config = actor_config("token-mean", auto_micro_batch=True)
    batch = make_batch(SHAPE)
    denominators = count_denominators(batch.batch["response_mask"], FIXED_DIVISOR)

    def step() -> tuple[Any, Any, Any, Limits]:
        actor = Actor(float64.policy, config, limits, TEMPERATURE, float64.policy_weights)
        gradient = capture_gradients(actor.optimizer, float64.policy_weights)
        metrics = reduce_metrics(actor.update(batch, denominators))
        return gradient, metrics, actor.log_probs(batch).batch["old_log_probs"], actor.passes.limits

    expected = step()
    assert expected[3] == limits
    with monkeypatch.context() as patched:
        done = small_memory(patched, float64, 16, error)
        found = step()
    assert max(done) <= 16 and found[3] != limits
    assert distance(expected[0], found[0]) <= 1e-10
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-5)
    assert torch.allclose(found[2], expected[2], rtol=0, atol=1e-6)


def test_law_4_halved_limits_survive_a_checkpoint(tmp_path: Path) -> None:
    """Unless the configuration asks for other limits by then."""
    fresh = lambda limits: Passes("actor", limits)  # noqa: E731
    whole, halved = Limits(None, 40, True), Limits(None, 20, True)
    one, other = fresh(whole), fresh(whole)
    one.save(tmp_path)
    assert not list(tmp_path.iterdir())
    one.limits = halved
    one.save(tmp_path)
    other.load(tmp_path)
    assert other.limits == halved
    another = fresh(Limits(None, 60, True))
    another.load(tmp_path)
    assert another.limits.tokens == 60


def test_what_did_not_fit_is_named(float64: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch(SHAPE)
    denominators = count_denominators(batch.batch["response_mask"], FIXED_DIVISOR)
    actor = Actor(float64.policy, ActorConfig(), Limits(None, 40, True), TEMPERATURE, float64.policy_weights)
    critic = Critic(float64.value, CriticConfig(), Limits(6, None, True), float64.value_weights)
    reference, device = Passes("reference", Limits(None, 40, True)), torch.device("cpu")
    small_memory(monkeypatch, float64, 8, RuntimeError(CPU_MESSAGE))
    # All rows in one pack: prompts 4 + 6, responses 24 but for the last token of each, 18; the longest has 4 + 7.
    what = {
        "actor": (lambda: actor.update(batch, denominators), "actor.ppo_max_token_len_per_gpu (now 40)"),
        "critic": (lambda: critic.values(batch), "critic.ppo_micro_batch_size_per_gpu (now 6)"),
        "reference": (lambda: reference.column(batch, device, float64.value), "log_prob_max_token_len_per_gpu of ref"),
    }
    for role, (call, knob) in what.items():
        with pytest.raises(OutOfMemoryError, match=f"not enough memory for a micro-batch of the {role}") as caught:
            call()
        assert str(caught.value.value).startswith("6 rows, 28 packed tokens, longest row 12: [enforce fail")
        assert knob in (caught.value.fix or "") and "actor.auto_micro_batch=true" in (caught.value.fix or "")
        assert not caught.value.bad_input


def test_one_row_that_does_not_fit_ends_it(float64: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ActorConfig(auto_micro_batch=True)
    actor = Actor(float64.policy, config, Limits(None, 40, True), TEMPERATURE, float64.policy_weights)
    small_memory(monkeypatch, float64, 2, RuntimeError(CPU_MESSAGE))
    with pytest.raises(OutOfMemoryError, match="not enough memory"):
        actor.log_probs(make_batch(SHAPE))


def test_other_errors_are_left_alone(float64: Policies, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor(
        float64.policy, ActorConfig(auto_micro_batch=True), Limits(None, 40, True), TEMPERATURE, float64.policy_weights
    )
    small_memory(monkeypatch, float64, 2, RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    with pytest.raises(RuntimeError, match="mat1"):
        actor.log_probs(make_batch(SHAPE))
    assert not is_out_of_memory(ValueError("x")) and issubclass(PolicyModel, torch.nn.Module)


def test_the_allocators_own_words() -> None:
    """What this torch says when the CPU's allocator refuses."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**50, dtype=torch.float32)
    assert is_out_of_memory(caught.value)
