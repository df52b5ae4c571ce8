"""The three stages, with roles of known answers and values by hand, and once each with the real worker."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from stage_cases import column, hand_batch, stub_roles, tiny_config, updates, write_reward

from verl.algorithms.metric import reduce_metrics
from verl.checkpoint.store import CheckpointStore
from verl.cluster.roles import Roles, SharedRollout
from verl.cluster.worker import Worker
from verl.config import Config
from verl.data.loader import PromptDataset, PromptLoader
from verl.errors import VerlError
from verl.models.loading import load_tokenizer
from verl.protocol import DataProto
from verl.run_dir import RunDir
from verl.trainer.loop import TrainingLoop, due
from verl.trainer.sampling import Sampler
from verl.trainer.sources import Feed, Now
from verl.trainer.stages import process, rollout, update
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer

ROOT = Path(__file__).parents[2]


@pytest.fixture
def config(tmp_path: Path, tiny_model_dir: Path) -> Config:
    return tiny_config(tmp_path, tiny_model_dir)


def with_settings(config: Config, **sections: dict[str, Any]) -> Config:
    tree = config.model_dump()
    for section, values in sections.items():
        tree[section] |= values
    return Config.model_validate(tree)


# --- process -------------------------------------------------------------------------------------------------------


def test_grpo_advantages_of_the_stage(config: Config) -> None:
    """Two groups of two, one token each: scores 1 and 0 give +-0.7071, equal scores give 0 (B072: by uid)."""
    batch = hand_batch([1.0, 0.0, 1.0, 1.0], [2, 1, 3, 4], n=2)
    done, metrics = process(batch, stub_roles(), config, 0.0, StepTimer())
    root_half = 1 / math.sqrt(2)
    expected = torch.tensor([[root_half] * 2 + [0] * 2, [-root_half, 0, 0, 0], [0.0] * 4, [0.0] * 4])
    assert torch.allclose(done.batch["advantages"], expected, atol=1e-5)
    assert reduce_metrics(metrics)["training/frac_reward_zero_std"] == 0.5


def test_rloo_advantages_of_the_stage(config: Config) -> None:
    """Scores 3, 0, 0: less the mean of the two others, 3 - 0 and twice 0 - 1.5."""
    config = with_settings(config, algorithm={"adv_estimator": "rloo"})
    done, _ = process(hand_batch([3.0, 0.0, 0.0], [1, 2, 1], n=3), stub_roles(), config, 0.0, StepTimer())
    assert done.batch["advantages"][:, 0].tolist() == pytest.approx([3.0, -1.5, -1.5])


def test_gae_advantages_of_the_stage(config: Config) -> None:
    """gamma 1, lambda 0.5, values 0.1 and 0.4, reward 1 on the last of two tokens, by hand."""
    config = with_settings(config, algorithm={"adv_estimator": "gae", "lam": 0.5, "whiten_advantages": False})
    roles = stub_roles(critic=column("values", [[0.1, 0.4, 9.0, math.nan]]))
    done, _ = process(hand_batch([1.0], [2], n=1), roles, config, 0.0, StepTimer())
    last = 1.0 - 0.4
    first = (0.4 - 0.1) + 0.5 * last
    assert done.batch["advantages"][0].tolist() == pytest.approx([first, last, 0.0, 0.0])
    assert done.batch["returns"][0, :2].tolist() == pytest.approx([first + 0.1, last + 0.4])


def test_kl_in_the_reward_with_a_fixed_coefficient(config: Config) -> None:
    """Per token 0.5 (old - ref): old -1 -2, ref -1.5 -1 gives KL 0.5 and -1, so rewards -0.25 and 1 + 0.5."""
    config = with_settings(config, algorithm={"use_kl_in_reward": True})
    roles = stub_roles(reference=column("ref_log_probs", [[-1.5, -1.0, 5.0, math.nan]] * 2))
    batch, metrics = process(hand_batch([1.0, None], [2, 2], n=2), roles, config, 0.5, StepTimer())
    assert batch.batch["token_level_rewards"][0].tolist() == pytest.approx([-0.25, 1.5, 0.0, 0.0])
    assert batch.batch["token_level_rewards"][1].tolist() == [0.0] * 4  # no score: nothing, not even KL
    numbers = reduce_metrics(metrics)
    assert numbers["actor/reward_kl_penalty"] == pytest.approx(-0.25)  # the mean over the one row that counts
    assert numbers["actor/reward_kl_penalty_coeff"] == 0.5
    assert math.isnan(float(batch.batch["token_level_scores"][0, 2]))  # scores stay as they came


def test_kl_in_the_reward_is_of_the_trainers_log_probs(config: Config) -> None:
    """Recomputed old log-probs -3, reference -1: KL -2, whatever the engine said."""
    config = with_settings(config, algorithm={"use_kl_in_reward": True})
    roles = stub_roles(
        policy=column("old_log_probs", [[-3.0] * 4] * 2),
        reference=column("ref_log_probs", [[-1.0] * 4] * 2),
        exact=False,
    )
    batch, _ = process(hand_batch([1.0, 0.0], [2, 1], n=2), roles, config, 0.5, StepTimer())
    assert batch.batch["token_level_rewards"].tolist() == [[1.0, 2.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


def test_old_log_probs_are_the_engines_where_proven_and_recomputed_elsewhere(config: Config) -> None:
    other = column("old_log_probs", [[-9.0] * 4] * 2)
    for choice, exact, recomputed in [
        ("auto", True, False),
        ("auto", False, True),
        ("always", True, True),
        ("never", False, False),
    ]:
        changed = with_settings(config, actor={"recompute_old_log_probs": choice})
        roles = stub_roles(policy=other if recomputed else None, exact=exact)  # the stub refuses to be asked in vain
        done, _ = process(hand_batch([1.0, 0.0], [2, 2], n=2), roles, changed, 0.0, StepTimer())
        expected = [-9.0, -9.0] if recomputed else [-1.0, -2.0]
        assert done.batch["old_log_probs"][0, :2].tolist() == expected
    assert done.batch["old_log_probs"].data_ptr() != done.batch["rollout_log_probs"].data_ptr()


def test_scores_that_are_not_finite_stop_the_step(config: Config) -> None:
    with pytest.raises(VerlError, match="adv_estimator=grpo gave advantages that are not finite"):
        process(hand_batch([math.nan, 0.0], [2, 1], n=2), stub_roles(), config, 0.0, StepTimer())


# --- update --------------------------------------------------------------------------------------------------------


def processed(groups: int, n: int) -> DataProto:
    rows = groups * n
    batch = hand_batch([float(row) for row in range(rows)], [1 + row % 4 for row in range(rows)], n)
    zeros = torch.zeros(rows, 4)
    return batch.union(DataProto.from_dict({"old_log_probs": zeros, "advantages": zeros, "returns": zeros}))


def drawn(roles: Roles, name: str = "actor") -> list[list[int]]:
    """Groups of each mini-batch of a role, whole and in order."""
    found = []
    for role, mini_batch, _ in updates(roles):
        if role == name:
            uids = [int(uid.split(":")[1]) for uid in mini_batch.non_tensor_batch["uid"]]
            groups = list(dict.fromkeys(uids))
            assert uids == [group for group in groups for _ in range(len(uids) // len(groups))]
            found.append(groups)
    return found


def run_update(config: Config, step: int = 0, critic: bool = False, groups: int = 4) -> Roles:
    roles = stub_roles(critic=column("values", torch.zeros(groups * 3, 4)) if critic else None)
    update(processed(groups, 3), roles, config, {"actor": 0.5, "critic": 0.25}, step, StepTimer())
    return roles


def test_mini_batches_in_order_and_over_epochs(config: Config) -> None:
    config = with_settings(config, actor={"ppo_mini_batch_size": 2, "ppo_epochs": 3})
    roles = run_update(config)
    assert drawn(roles) == [[0, 1], [2, 3]] * 3
    meta = [mini_batch.meta_info for _, mini_batch, _ in updates(roles)]
    assert [m["fresh_weights"] for m in meta] == [True] + [False] * 5
    assert {m["learning_rate"] for m in meta} == {0.5}
    for _, mini_batch, denominators in updates(roles):
        mask = mini_batch.batch["response_mask"]
        assert denominators.tokens == int(mask.sum()) and denominators.rows == 6
        assert denominators.max_response_length == config.data.max_response_length


def test_a_short_last_batch(config: Config) -> None:
    config = with_settings(config, actor={"ppo_mini_batch_size": 2}, data={"drop_last": False})
    assert drawn(run_update(config, groups=3)) == [[0, 1], [2]]


def test_shuffled_mini_batches_are_a_function_of_seed_step_and_epoch(config: Config) -> None:
    config = with_settings(
        config, actor={"ppo_mini_batch_size": 4, "ppo_epochs": 2, "shuffle": True}, data={"train_batch_size": 8}
    )
    first = drawn(run_update(config, step=5, groups=8))
    assert first == drawn(run_update(config, step=5, groups=8))
    epochs = [[group for mini_batch in half for group in mini_batch] for half in (first[:2], first[2:])]
    assert all(sorted(epoch) == list(range(8)) for epoch in epochs)
    assert epochs[0] != epochs[1] and epochs[0] != list(range(8))
    assert first != drawn(run_update(config, step=6, groups=8))
    assert first != drawn(run_update(with_settings(config, trainer={"seed": 2}), step=5, groups=8))


def test_critic_before_actor_with_its_own_sizes_and_warm_up(config: Config) -> None:
    config = with_settings(
        config,
        algorithm={"adv_estimator": "gae"},
        critic={"ppo_mini_batch_size": 2, "ppo_epochs": 2},
        trainer={"critic_warmup": 2},
    )
    early = run_update(config, step=1, critic=True)
    assert drawn(early) == [] and drawn(early, "critic") == [[0, 1], [2, 3]] * 2
    late = run_update(config, step=2, critic=True)
    assert [name for name, _, _ in updates(late)] == ["critic"] * 4 + ["actor"]
    rates = {name: mini_batch.meta_info["learning_rate"] for name, mini_batch, _ in updates(late)}
    assert rates == {"critic": 0.25, "actor": 0.5}


def test_without_a_critic_there_is_no_warm_up(config: Config) -> None:
    config = with_settings(config, trainer={"critic_warmup": 2})
    assert drawn(run_update(config, step=0)) == [[0, 1, 2, 3]]


def test_a_mini_batch_without_a_trained_token_is_left_out(config: Config) -> None:
    """The next one is then the first that sees the weights that sampled."""
    config = with_settings(config, actor={"ppo_mini_batch_size": 1})
    roles = stub_roles()
    batch = processed(4, 3)
    batch.batch["response_mask"] = batch.batch["response_mask"] & (torch.arange(12) >= 3)[:, None]
    update(batch, roles, config, {"actor": 0.5, "critic": 0.5}, 0, StepTimer())
    assert drawn(roles) == [[1], [2], [3]]
    assert [m.meta_info["fresh_weights"] for _, m, _ in updates(roles)] == [True, False, False]
    batch.batch["response_mask"] = torch.zeros_like(batch.batch["response_mask"])
    assert update(batch, roles, config, {"actor": 0.5, "critic": 0.5}, 0, StepTimer()) == {}


# --- with the real worker ------------------------------------------------------------------------------------------


class Stage:
    """A worker and what the loop would hand to the stages."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.worker = Worker(config)
        self.parity = self.worker.setup()
        self.roles = Roles.of(dict.fromkeys(config.roles, self.worker), SharedRollout(self.worker), self.parity.exact)
        self.tokenizer = load_tokenizer(config.model.path)
        self.loader = PromptLoader(
            PromptDataset.load(config.data.train_files, config.data, self.tokenizer), config.data.train_batch_size
        )

    def sampled(self) -> DataProto:
        sampler = Sampler(self.config.training_sampling, self.config, self.tokenizer)
        return rollout(self.loader.next_batch(), self.roles, sampler, StepTimer())

    def step(self) -> dict[str, float]:
        batch, found = process(self.sampled(), self.roles, self.config, 0.0, StepTimer())
        rates = {"actor": self.config.actor.optim.lr, "critic": self.config.critic.optim.lr}
        return reduce_metrics(found | update(batch, self.roles, self.config, rates, 0, StepTimer()))

    def masters(self) -> dict[str, torch.Tensor]:
        weights = self.worker._actor.weights.masters
        return {name: value.detach().clone() for name, value in weights.items()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_law_3_old_log_probs_and_the_first_ratio_are_exact(config: Config, dtype: str) -> None:
    stage = Stage(with_settings(config, model={"dtype": dtype}, actor={"ppo_mini_batch_size": 2}))
    assert stage.parity.exact
    batch = stage.sampled()
    recomputed = stage.roles.policy.log_probs(batch).batch["old_log_probs"]
    mask = batch.batch["response_mask"]
    assert int(mask.sum()) > 20
    assert torch.equal(recomputed[mask], batch.batch["rollout_log_probs"][mask])

    both = []
    for choice in ("auto", "always"):
        changed = with_settings(stage.config, actor={"recompute_old_log_probs": choice})
        both.append(process(batch.select(deepcopy=True), stage.roles, changed, 0.0, StepTimer())[0])
    assert torch.equal(*(b.batch["old_log_probs"][mask] for b in both))
    assert torch.equal(*(b.batch["advantages"] for b in both))

    first = with_settings(stage.config, actor={"ppo_mini_batch_size": 4})
    metrics = reduce_metrics(update(both[0], stage.roles, first, {"actor": 1e-3, "critic": 0.0}, 0, StepTimer()))
    assert metrics["actor/ppo_kl"] == 0.0 and metrics["actor/pg_clipfrac"] == 0.0
    assert metrics["training/rollout_probs_diff_max"] == 0.0
    # Behind that update the weights differ, so that the zeros above say something.
    again = reduce_metrics(update(both[0], stage.roles, first, {"actor": 1e-3, "critic": 0.0}, 0, StepTimer()))
    assert again["actor/ppo_kl"] != 0.0 and again["training/rollout_probs_diff_max"] > 0.0


def test_only_the_first_mini_batch_is_compared_with_the_engine(config: Config) -> None:
    stage = Stage(with_settings(config, actor={"ppo_mini_batch_size": 1, "ppo_epochs": 2}))
    metrics = stage.step()
    assert metrics["training/rollout_probs_diff_max"] == 0.0
    assert metrics["actor/ppo_kl"] != 0.0


@pytest.mark.parametrize("entropy", [0.0, 0.01])
def test_b108_equal_rewards_change_no_weight(tmp_path: Path, tiny_model_dir: Path, entropy: float) -> None:
    reward = write_reward(tmp_path / "constant.py", "return 0.5")
    settings = {
        "reward": {"custom_reward_function": {"path": str(reward)}},
        "actor": {"entropy_coeff": entropy, "optim": {"weight_decay": 0.1}},
    }
    stage = Stage(tiny_config(tmp_path, tiny_model_dir, settings))
    before = stage.masters()
    metrics = stage.step()
    assert metrics["training/frac_reward_zero_std"] == 1.0
    assert metrics["actor/pg_loss"] == 0.0
    unchanged = all(torch.equal(before[name], value) for name, value in stage.masters().items())
    assert unchanged == (entropy == 0.0)
    assert (metrics["actor/grad_norm"] == 0.0) == (entropy == 0.0)


def test_rows_without_a_score_train_nothing(tmp_path: Path, tiny_model_dir: Path) -> None:
    """None from the reward function: mask cleared, out of every mean, and their group goes on without them."""
    body = "return None if len(set(solution_str)) % 2 else float(len(solution_str))"
    reward = write_reward(tmp_path / "some.py", body)
    stage = Stage(tiny_config(tmp_path, tiny_model_dir, {"reward": {"custom_reward_function": {"path": str(reward)}}}))
    batch = stage.sampled()
    scored = batch.batch["scored"]
    assert 0 < int(scored.sum()) < len(batch)
    assert not bool(batch.batch["response_mask"][~scored].any())
    assert bool(batch.batch["response_mask"][scored].any(1).all())
    done, _ = process(batch, stage.roles, stage.config, 0.0, StepTimer())
    assert bool((done.batch["advantages"][~scored] == 0).all())


# --- loop ----------------------------------------------------------------------------------------------------------


def trainer_of(config: Config, tmp_path: Path, total_steps: int = 10) -> TrainingLoop:
    tokenizer = load_tokenizer(config.model.path)
    loader = PromptLoader(PromptDataset.load(config.data.train_files, config.data, tokenizer), 4)
    sampler = Sampler(config.training_sampling, config, tokenizer)
    nothing: Any = None
    roles, state = stub_roles(), TrainerState.fresh(config, loader)
    return TrainingLoop(
        config=config,
        total_steps=total_steps,
        roles=roles,
        state=state,
        source=Now(Feed(config, roles, state, sampler, StepTimer(), total_steps)),
        val_sampler=sampler,
        validation=None,
        run_dir=RunDir(tmp_path / "run"),
        store=CheckpointStore(tmp_path / "run" / "checkpoints"),
        tracker=nothing,
        timer=StepTimer(),
    )


def test_the_adaptive_coefficient_by_hand(config: Config, tmp_path: Path) -> None:
    """KL 0.3 at target 0.1 is over by more than a fifth: coef * (1 + 0.2 * rows / horizon)."""
    control = {"type": "adaptive", "kl_coef": 0.01, "target_kl": 0.1, "horizon": 100}
    config = with_settings(config, algorithm={"use_kl_in_reward": True, "kl_ctrl": control})
    trainer = trainer_of(config, tmp_path)
    coef = trainer.state.kl_coef.value(0, 5)
    roles = stub_roles(reference=column("ref_log_probs", [[-1.3, -2.3, 0.0, 0.0]] * 2))
    batch, found = process(hand_batch([1.0, 0.0], [2, 2], n=2), roles, config, coef, StepTimer())
    trainer.state.observe(reduce_metrics(found), len(batch))
    assert trainer.state.kl_coef.value(1, 5) == pytest.approx(0.01 * (1 + 0.2 * 2 / 100))
    trainer.state.observe({}, len(batch))  # no KL this step: nothing moves
    assert trainer.state.kl_coef.value(2, 5) == pytest.approx(0.01 * (1 + 0.2 * 2 / 100))


def test_a_fixed_coefficient_stays(config: Config, tmp_path: Path) -> None:
    config = with_settings(config, algorithm={"use_kl_in_reward": True})
    trainer = trainer_of(config, tmp_path)
    before = trainer.state.kl_coef.value(0, 5)
    roles = stub_roles(reference=column("ref_log_probs", [[-9.0] * 4] * 2))
    batch, found = process(hand_batch([1.0, 0.0], [2, 2], n=2), roles, config, before, StepTimer())
    trainer.state.observe(reduce_metrics(found), len(batch))
    assert trainer.state.kl_coef.value(1, 5) == before == config.algorithm.kl_ctrl.kl_coef


def test_learning_rates_are_a_function_of_the_step(config: Config, tmp_path: Path) -> None:
    """B142: nothing is stored, so nothing can be advanced twice by a resume."""
    optim = {"lr": 1.0, "lr_scheduler_type": "linear", "lr_warmup_steps": 2}
    trainer = trainer_of(with_settings(config, actor={"optim": optim}), tmp_path)
    rates = []
    for step in (0, 1, 2, 6):
        trainer.state = replace(trainer.state, step=step)
        rates.append(trainer.state.learning_rates(trainer.config, trainer.total_steps)["actor"])
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.5])


def test_b048_a_step_without_a_finite_gradient_holds_the_learning_rate(config: Config, tmp_path: Path) -> None:
    trainer = trainer_of(with_settings(config, actor={"optim": {"lr": 1.0, "lr_warmup_steps": 5}}), tmp_path)
    rates = []
    for numbers in (
        {"actor/skipped_steps": 2.0},  # all of them
        {"actor/skipped_steps": 1.0, "actor/grad_norm": 3.0},  # one of several
        {"critic/skipped_steps": 1.0, "actor/skipped_steps": 0.0, "actor/grad_norm": 3.0},
    ):
        rates.append(trainer.state.learning_rates(trainer.config, trainer.total_steps)["actor"])
        trainer.state.observe(numbers, 4)
        trainer.state = replace(trainer.state, step=trainer.state.step + 1)
    assert rates == pytest.approx([0.2, 0.2, 0.4])
    assert trainer.state.held == {"actor": 1, "critic": 1}


def test_due() -> None:
    assert [step for step in range(1, 10) if due(step, 4)] == [4, 8]
    assert not due(4, -1) and not due(4, 0)
