"""Pools and placement: what is refused, with the nearest name; shorthands that must agree; what has no effect."""

from __future__ import annotations

import pytest

from verl.config import load_config
from verl.config.load import LoadedConfig
from verl.errors import ConfigError

BASE = ["data.train_files=[train.parquet]", "model.path=tiny", "trainer.device=cpu"]


def load(*overrides: str) -> LoadedConfig:
    return load_config(None, [*BASE, *overrides])


def refused(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("cluster.pools.critics.threads=1", "cluster.placement.critic=critic"), "did you mean critics? cluster.pools"),
        (("cluster.placement.actor=train",), "cluster.placement.actor names no pool"),
        (("cluster.placement.rollout=[fast]",), "cluster.placement.rollout names no pool"),
        (("cluster.pool.a.threads=1",), "did you mean cluster.pools?"),
        (("cluster.pools.a.theads=1",), "a.theads is no key"),
        (("cluster.pools.a.theads=1",), "did you mean threads?"),
        (("cluster.pools.a.threads=0",), "a.threads: Input should be greater than or equal to 1"),
        (("cluster.pools.a=3",), "an entry is a mapping with processes, nodes, threads"),
        (("cluster.pools.a.gpus=1.5",), "a share of one GPU (0.5), or whole ones"),
        (("cluster.pools={a: {device: cuda, gpus: 0}}",), "a has device: cuda and gpus: 0"),
        (("cluster.pools={a: {resources: {CPU: 2}}}",), "CPUs are threads"),
        (("cluster.pools.a.threads=1", "cluster.placement={critic: a, rollout: a}"), "share no pool with other roles"),
        (("cluster.pools.a.threads=1", "cluster.placement.rollout=[a, a]"), "names a pool twice"),
        (("cluster.pools.a.processes=2", "cluster.placement.reward=a"), "which one process does"),
        (
            (
                "cluster.pools.a.gpus=0",
                "cluster.placement.reference=a",
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_penalty=full",
            ),
            "needs the logits of actor and reference in one process",
        ),
        (
            ("cluster.pools.a.processes=2", "cluster.placement.critic=a", "cluster.backend=inline"),
            "critic: 2 ranks",
        ),
        # The critic's batch sizes are of its own ranks.
        (
            (
                "cluster.pools.a.processes=3",
                "cluster.placement.critic=a",
                "actor.ppo_micro_batch_size_per_gpu=4",
            ),
            "4 responses on each of 3 rank(s)",
        ),
        (
            ("cluster.pools.a.processes=3", "cluster.placement.critic=a", "critic.ppo_micro_batch_size=4"),
            "4 responses / 3 ranks",
        ),
        (
            ("trainer={mode: async, max_staleness: 0}", "algorithm.filter_groups.enable=true", "rollout.n=2"),
            "samples whole batches as sync does",
        ),
        (("actor.world_size=3", "trainer.nnodes=2"), "3 processes, 2 machines"),
        (("cluster.pools.a.nodes=2", "cluster.placement.critic=a"), "1 processes, 2 machines"),
        (("cluster.pools.main.nodes=2", "trainer.nnodes=4", "actor.world_size=4"), "given twice, and differently"),
        (("cluster.pools.a.nodes=2", "cluster.placement.rollout=a"), "cluster.pools.a is of rollout workers"),
        (("trainer.memory_save_freq=1", "cluster.address=a:1"), "keeps states on this machine"),
        (("reward_model.enable_resource_pool=true",), "cluster.placement.reward=reward"),
        (("rollout.nnodes=1",), "cluster.placement.rollout=rollout"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_words(overrides: tuple[str, ...], said: str) -> None:
    assert said in refused(*overrides)


def test_all_that_say_how_many_ranks_there_are_must_agree() -> None:
    agreeing = ("cluster.pools.main.processes=2", "actor.world_size=2", "trainer.n_gpus_per_node=2")
    loaded = load(*agreeing, "trainer.device=cuda")
    assert loaded.config.ranks == 2 and loaded.notices == []
    for changed in range(3):
        words = [word.replace("=2", "=4") if place == changed else word for place, word in enumerate(agreeing)]
        said = refused(*words, "trainer.device=cuda")
        assert "given more than once, and differently" in said
        numbers = ["4" if place == changed else "2" for place in range(3)]
        assert f"cluster.pools.main.processes: {numbers[0]}, actor.world_size: {numbers[1]}, trainer.n_gpus" in said
    loaded = load("actor.world_size=2", "trainer.n_gpus_per_node=8")  # on a CPU
    assert loaded.config.ranks == 2
    assert loaded.notices == ["trainer.n_gpus_per_node=8 is set aside: trainer.device=cpu uses no GPU"]


def test_ranks_of_each_role() -> None:
    config = load("cluster.pools={t: {processes: 4}, c: {}}", "cluster.placement={actor: t, critic: c}").config
    assert [config.ranks_of(role) for role in ("actor", "critic", "reference", "reward")] == [4, 1, 4, 4]
    assert config.critic_batch().rows_per_mini_batch == 256


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (("cluster.pools.a.threads=1",), "cluster.pools.a has no effect: no role of this run is placed there"),
        (
            ("cluster.pools.a.threads=1", "cluster.placement.reference=a", "cluster.placement.critic=a"),
            "cluster.placement.reference has no effect: this run has no reference",
        ),
        (("trainer.memory_save_freq=1", "cluster.backend=inline"), "trainer.memory_save_freq=1 has no effect"),
        (("trainer.memory_save_freq=1", "trainer.max_restarts=0"), "trainer.memory_save_freq=1 has no effect"),
        (("cluster.pools.main.gpus=1",), "cluster.pools.main.gpus=1 is set aside"),
        (("cluster.pools.main.threads=1", "cluster.backend=inline"), "cluster.pools has no effect"),
    ],
)
def test_what_has_no_effect_is_said(overrides: tuple[str, ...], notice: str) -> None:
    (found,) = load(*overrides).notices
    assert found.startswith(notice)
