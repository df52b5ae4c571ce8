"""Which processes a run has: roles in pools, threads by who computes at once, wanted against available (B152)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.cluster.placement import GIB, Plan, crowded, make_plan, require
from verl.config import Config, build_config
from verl.errors import ClusterError, ConfigError

ROLES = ("actor", "critic", "reference", "reward")


def config_of(pools: dict[str, Any] | None = None, placement: dict[str, Any] | None = None, **sections: Any) -> Config:
    tree: dict[str, Any] = {
        "data": {"train_files": "none.jsonl"},
        "model": {"path": "none"},
        "algorithm": {"use_kl_in_reward": True},
        "trainer": {"device": "cpu"},
        "cluster": {"pools": pools or {}, "placement": placement or {}},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return build_config(tree)


def threads(plan: Plan) -> dict[str, int]:
    return {process.pool: process.threads for process in (*plan.groups, *plan.rollout)}


def test_by_default_one_process_has_all_roles_and_all_cores() -> None:
    plan = make_plan(config_of(), 6, 0)
    (group,) = plan.groups
    assert group.roles == {*ROLES, "rollout"} and (group.count, group.threads, group.device) == (1, 6, "cpu")
    assert plan.rollout == () and group.needs() == {"CPU": 6.0}
    plan = make_plan(config_of(algorithm={"use_kl_in_reward": False}, actor={"world_size": 2}), 7, 0)
    assert plan.groups[0].roles == {"actor", "critic", "reward", "rollout"}
    assert (plan.groups[0].count, plan.groups[0].threads) == (2, 3)


def test_streamed_mini_batches_need_rollout_workers_that_work_beside_the_trainer() -> None:
    algorithm = {"adv_estimator": "grpo", "use_kl_in_reward": False}
    streamed = {"device": "cpu", "stream_minibatches": True}
    plan = make_plan(config_of(algorithm=algorithm, trainer=streamed, rollout={"n": 2}), 6, 0)
    assert threads(plan) == {"main": 3, "rollout": 3}
    with pytest.raises(ConfigError, match="stream_minibatches=true needs rollout workers of their own"):
        config_of({"main": {}}, {"rollout": "main"}, algorithm=algorithm, trainer=streamed, rollout={"n": 2})


def with_mode(config: Config, mode: str, **rollout: Any) -> Config:
    return config.model_copy(
        update={
            "trainer": config.trainer.model_copy(update={"mode": mode}),
            "rollout": config.rollout.model_copy(update=rollout),
        }
    )


def test_schedules_that_overlap_have_rollout_workers_of_their_own() -> None:
    plan = make_plan(with_mode(config_of(), "one_step_off"), 8, 0)
    assert threads(plan) == {"main": 4, "rollout": 4} and plan.rollout[0].count == 1
    assert "rollout" not in plan.groups[0].roles
    plan = make_plan(with_mode(config_of(), "async", max_workers=3), 8, 0)
    assert threads(plan) == {"main": 2, "rollout": 2}  # room for two more
    inline = config_of(cluster={"backend": "inline"})
    assert make_plan(with_mode(inline, "async"), 8, 0).rollout == ()
    with pytest.raises(ConfigError, match="needs rollout workers of their own"):
        config_of({}, {"rollout": ["main"]}, trainer={"device": "cpu", "mode": "async"})


def test_every_role_in_a_pool_of_its_own() -> None:
    pools = {"c": {"processes": 2, "threads": 1}, "r": {}, "s": None, "fast": {"processes": 3}, "slow": {"threads": 1}}
    config = config_of(pools, {"critic": "c", "reference": "r", "reward": "s", "rollout": ["fast", "slow"]})
    plan = make_plan(config, 16, 0)
    assert {group.pool: group.roles for group in plan.groups} == {
        "main": {"actor"}, "c": {"critic"}, "r": {"reference"}, "s": {"reward"}
    }  # fmt: skip
    assert [(spec.pool, spec.count) for spec in plan.rollout] == [("fast", 3), ("slow", 1)]
    # Training: 2 x 1 are given, actor and reference share 14. Sampling and scoring come at another time: 1 is given.
    assert threads(plan) == {"main": 7, "c": 1, "r": 7, "s": 3, "fast": 3, "slow": 1}
    assert threads(make_plan(with_mode(config, "async"), 16, 0)) == {
        "main": 2,
        "c": 1,
        "r": 2,
        "s": 2,
        "fast": 2,
        "slow": 1,
    }
    assert plan.group_of("critic").pool == "c" and plan.groups[0].roles == {"actor"}


def test_pools_mean_nothing_inline_and_the_actors_pool_may_sample() -> None:
    (group,) = make_plan(config_of({"c": {}}, {"critic": "c"}, cluster={"backend": "inline"}), 4, 0).groups
    assert group.roles == {*ROLES, "rollout"} and group.threads == 4
    plan = make_plan(config_of({"c": {}}, {"critic": "c", "rollout": ["main"]}), 4, 0)
    assert plan.rollout == () and plan.group_of("rollout").pool == "main"


@given(
    cores=st.integers(1, 24),
    homes=st.tuples(*[st.sampled_from(["main", "a", "b"])] * 3),
    counts=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    rollout=st.lists(st.sampled_from(["w", "v"]), unique=True, max_size=2),
    overlap=st.booleans(),
)
def test_threads_that_nobody_chose_fit_the_cores(
    cores: int, homes: tuple[str, ...], counts: list[int], rollout: list[str], overlap: bool
) -> None:
    placement = dict(zip(("critic", "reference", "reward"), homes, strict=True)) | {"rollout": rollout}
    names = ("main", "a", "b")
    trained = {placement["critic"], placement["reference"], "main"}
    pools = {
        name: {"processes": count if name in trained else 1} for name, count in zip(names, counts, strict=True)
    } | {"w": {"processes": 2}, "v": {}}
    mode = {"device": "cpu", "mode": "one_step_off" if overlap else "sync"}
    plan = make_plan(config_of(pools, placement, trainer=mode), cores, 0)
    assert sorted(role for group in plan.groups for role in group.roles if role != "rollout") == sorted(ROLES)
    for phase in plan.phases():
        busy = sum(process.count * process.threads for process in phase)
        assert busy <= cores or all(process.threads == 1 for process in phase)
    too_many = max(group.count for group in plan.groups) > cores
    try:
        require(plan, [{"CPU": cores}], "this machine", shared=True)
        assert not too_many
    except ClusterError:
        assert too_many
    assert (crowded(plan, cores) > 0) == any(sum(p.count * p.threads for p in phase) > cores for phase in plan.phases())


GPUS = {"trainer": {"device": "auto"}}


def test_gpus() -> None:
    config = config_of({"c": {}, "j": {"gpus": 0.5}, "s": {}}, {"critic": "c", "reference": "j", "reward": "s"}, **GPUS)
    plan = make_plan(config, 8, 4)
    assert {g.pool: (g.count, g.gpus, g.device) for g in plan.groups} == {
        "main": (2, 1.0, "cuda"),  # the GPUs that are left
        "c": (1, 1.0, "cuda"),
        "j": (1, 0.5, "cuda"),
        "s": (1, 0.0, "cpu"),  # functions alone
    }
    model = {"model": {"path": "judge"}}
    assert make_plan(config_of({"s": {}}, {"reward": "s"}, reward=model, **GPUS), 8, 2).group_of("reward").gpus == 1
    assert make_plan(config, 8, 0).groups[1].device == "cpu"
    config = config_of({"c": {"device": "cpu"}}, {"critic": "c"}, trainer={"device": "cuda", "n_gpus_per_node": 2})
    plan = make_plan(config, 8, 2)
    assert [(g.count, g.device) for g in plan.groups] == [(2, "cuda"), (1, "cpu")]
    (group,) = make_plan(config_of({"main": {"gpus": 1}}, trainer={"device": "cpu"}), 8, 2).groups
    assert (group.gpus, group.device) == (0, "cpu")


def refused(plan: Plan, *machines: dict[str, float], shared: bool = False) -> ClusterError:
    with pytest.raises(ClusterError) as caught:
        require(plan, list(machines), "the Ray cluster", shared)
    return caught.value


def test_b152_wanted_against_available_of_every_resource() -> None:
    pools = {"c": {"threads": 3, "memory_gb": 4, "resources": {"fast": 1}}, "main": {"threads": 2}}
    plan = make_plan(config_of(pools, {"critic": "c"}), 16, 0)
    require(plan, [{"CPU": 5, "memory": 4 * GIB, "fast": 1}], "the Ray cluster", shared=False)
    require(plan, [{"CPU": 2}, {"CPU": 3, "memory": 4 * GIB, "fast": 1}], "the Ray cluster", shared=False)
    error = refused(plan, {"CPU": 4, "memory": 2 * GIB})
    assert error.what == "more was asked for than the Ray cluster has"
    assert error.value == "wanted 5 CPU, available 4; wanted 4 GiB memory, available 2; wanted 1 fast, available 0"
    assert "lower cluster.threads" in str(error.fix)
    error = refused(plan, {"CPU": 2, "fast": 1}, {"CPU": 4, "memory": 4 * GIB})
    assert "no machine of the Ray cluster has room for the 1 process(es) of cluster.pools.c" in error.what
    assert "wanted 1 fast, available 0" in str(error.value)
    gpus = make_plan(config_of(trainer={"device": "cuda", "n_gpus_per_node": 8}), 64, 2)
    error = refused(gpus, {"CPU": 64, "GPU": 2}, shared=True)
    assert error.value == "wanted 8 GPU, available 2" and "trainer.device=cpu" in str(error.fix)


def test_ranks_on_several_machines() -> None:
    trainer = {"device": "cpu", "nnodes": 2}
    plan = make_plan(config_of(actor={"world_size": 4}, trainer=trainer), 8, 0)
    (group,) = plan.groups
    assert (group.count, group.nodes, group.on_one, group.threads) == (4, 2, 2, 4)
    require(plan, [{"CPU": 8}, {"CPU": 1}, {"CPU": 8}], "the Ray cluster", shared=False)
    error = refused(plan, {"CPU": 8}, shared=True)
    assert (
        error.what == "more machines were asked for than the Ray cluster has: 1" and error.value == "trainer.nnodes=2"
    )
    error = refused(plan, {"CPU": 13}, {"CPU": 4})
    assert error.what.startswith("only 1 of 2 machines of the Ray cluster has room for the 2 process(es)")
    assert error.value == "wanted 8 CPU, available 4"
    trainer = {"device": "cuda", "nnodes": 3}
    gpus = make_plan(config_of({"c": {"processes": 2, "nodes": 2}}, {"critic": "c"}, trainer=trainer), 16, 4)
    assert [(g.count, g.nodes, g.gpus) for g in gpus.groups] == [(6, 3, 1.0), (2, 2, 1.0)]  # two GPUs are the critic's


def test_threads_that_somebody_chose_are_never_more_than_the_cores() -> None:
    chosen = {"c": {"threads": 2}, "main": {"threads": 1}}
    plan = make_plan(config_of(chosen, {"critic": "c"}), 2, 0)
    assert refused(plan, {"CPU": 2}, shared=True).value == "wanted 3 CPU, available 2"
    one_each = make_plan(config_of({"c": {}, "r": {}}, {"critic": "c", "reference": "r"}, cluster={"threads": 1}), 2, 0)
    require(one_each, [{"CPU": 2}], "this machine", shared=True)
    assert crowded(one_each, 2) == 3
    assert refused(one_each, {"CPU": 2}).value == "wanted 3 CPU, available 2"  # a cluster reserves them
    ranks = make_plan(config_of(actor={"world_size": 4}), 2, 0)
    error = refused(ranks, {"CPU": 2}, shared=True)
    assert error.value == "wanted 4 CPU, available 2" and "actor.world_size" in str(error.fix)


def test_a_plan_says_what_it_is() -> None:
    pools = {"c": {"processes": 2, "memory_gb": 4}, "w": {"processes": 3}}
    lines = make_plan(config_of(pools, {"critic": "c", "rollout": "w"}), 9, 0).describe()
    assert lines == [
        "main: actor, reference, reward: 1 process of 3 threads",
        "c: critic: 2 processes of 3 threads, 4 GiB",
        "w: rollout: 3 processes of 3 threads",
    ]
