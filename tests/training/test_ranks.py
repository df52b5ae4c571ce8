"""Laws of several training ranks, with gloo processes: what they compute together is what one rank computes alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from rank_pool import Member, Outcome, Pool, go_on, in_turns, one_rank, started_pool
from step_cases import Shape, distance, make_batch
from test_split_law import MODES, WHOLE, actor_config, shapes
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from verl_process import listening

from verl.algorithms.metric import reduce_metrics
from verl.config import ActorConfig
from verl.errors import ConfigError, OutOfMemoryError, RanksLostError
from verl.models.tiny import build_tiny
from verl.protocol.files import read_safetensors
from verl.training import parallel_sharded
from verl.training.micro_batches import Limits
from verl.training.parallel import Ranks


@pytest.fixture(scope="module")
def pools(small_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Pool]]:
    folder = tmp_path_factory.mktemp("ranks")
    with started_pool(small_dir, 2, folder / "two") as two, started_pool(small_dir, 3, folder / "three") as three:
        yield {2: two, 3: three}


@pytest.fixture(scope="module")
def alone(small_dir: Path) -> Member:
    return one_rank(small_dir)


def assert_same(expected: Outcome, found: Outcome, tolerance: float) -> None:
    assert distance(expected[0], found[0]) <= tolerance
    assert expected[1].keys() == found[1].keys()
    for name, value in expected[1].items():
        assert found[1][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def outcome(answer: tuple[dict[str, Tensor], dict[str, Any], Tensor]) -> tuple[Outcome, Tensor]:
    return (answer[0], reduce_metrics(answer[1])), answer[2]


STRATEGIES = ["replicate", "replicate in lockstep", "fsdp2", "fsdp2, layers kept"]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Shape, Limits, list[int], dict[str, bool]]:
    shape = draw(shapes())
    groups = [group for group, count in enumerate(shape.groups) for _ in range(count)]
    tokens = [shape.prompt_lengths[group] + length for group, length in zip(groups, shape.responses, strict=True)]
    rows = draw(st.none() | st.integers(1, len(tokens)))
    most = draw(st.integers(max(tokens), sum(tokens) + 1)) if rows is None else None
    order = draw(st.permutations(range(len(tokens))))
    settings = {"strategy": draw(st.sampled_from(STRATEGIES)), "balance": draw(st.booleans())}
    return shape, Limits(rows, most, draw(st.booleans())), order, settings


@pytest.mark.parametrize("size", [2, 3])
@settings(max_examples=12)
@given(case=cases(), mode=st.sampled_from(MODES))
def test_law_2_ranks(pools: dict[int, Pool], alone: Member, size: int, case: Any, mode: str) -> None:
    """Gradients, metrics and columns of 2 and 3 ranks are those of one, over lengths, groups, limits, with rows spread
    by tokens or in order, with and without idle micro-batches, with whole and with sharded weights."""
    shape, limits, order, changes = case
    batch = make_batch(shape)
    for call, setting in (("actor", actor_config(mode)), ("critic", mode)):
        whole, column = outcome(getattr(alone, call)(batch, WHOLE, setting))
        found, together = pools[size].ask(call, shape, order, limits, setting, **changes)
        assert_same(whole, found, 1e-10)
        assert torch.allclose(column[order], together, rtol=0, atol=1e-6)  # B114: every row its own


SHAPE = Shape(prompt_lengths=[4, 6, 3], groups=[4, 2, 3], responses=[5, 2, 7, 3, 6, 1, 9, 2, 4], seed=4)
ORDER = list(range(9))


@pytest.mark.parametrize("strategy", ["replicate", "fsdp2"])
@pytest.mark.parametrize("size", [2, 3])
def test_law_2_ranks_float32_and_statistics_of_all(
    pools: dict[int, Pool], alone: Member, size: int, strategy: str
) -> None:
    """In float32 too; and a loss that needs statistics of the whole mini-batch gets those of all ranks."""
    whole, _ = outcome(alone.actor(make_batch(SHAPE), WHOLE, actor_config("token-mean"), torch.float32))
    limits = Limits(None, 24, True)
    settings = {"strategy": strategy}
    found, _ = pools[size].ask("actor", SHAPE, ORDER, limits, actor_config("token-mean"), torch.float32, **settings)
    assert_same(whole, found, 1e-4)
    config = ActorConfig(policy_loss={"loss_mode": "kl_cov", "kl_cov_ratio": 0.3})
    whole, _ = outcome(alone.actor(make_batch(SHAPE), WHOLE, config))
    assert_same(whole, pools[size].ask("actor", SHAPE, ORDER, limits, config, **settings)[0], 1e-10)


def test_law_4_a_checkpoint_goes_on_with_any_ranks_and_strategy(
    pools: dict[int, Pool], alone: Member, tmp_path: Path
) -> None:
    """Written by two ranks, each its share; what others make of it and write again is the same, byte for byte."""
    first, whole = tmp_path / "first", tmp_path / "whole"
    engines = pools[2].each("go_on", "fsdp2", None, first)
    files = [path.relative_to(first) for path in sorted(first.rglob("*.safetensors"))]
    assert len(files) == 4
    saved, _ = read_safetensors(first / "actor" / "model.safetensors")
    for engine in engines:
        assert engine.keys() == saved.keys() and all(torch.equal(engine[name], saved[name]) for name in saved)
    go_on(alone, "replicate", None, whole)
    expected, _ = read_safetensors(whole / "actor" / "optimizer.safetensors")
    found, _ = read_safetensors(first / "actor" / "optimizer.safetensors")
    assert distance(expected, found) <= 1e-4
    pools[3].each("go_on", "fsdp2", first, tmp_path / "three")
    pools[2].each("go_on", "replicate", tmp_path / "three", tmp_path / "two")
    go_on(alone, "replicate", tmp_path / "two", tmp_path / "one")
    pools[2].each("go_on", "fsdp2", tmp_path / "one", tmp_path / "again")
    for path in files:
        for folder in ("three", "two", "one", "again"):
            assert (tmp_path / folder / path).read_bytes() == (first / path).read_bytes(), (folder, path)


@pytest.mark.parametrize(("family", "checkpointing"), [("llama", True), ("gpt2", False)])
def test_law_3_published_weights_give_the_bits_of_the_sharded_ones(
    pools: dict[int, Pool], tmp_path: Path, family: str, checkpointing: bool
) -> None:
    folder = build_tiny(tmp_path, family=family)
    assert pools[2].each("copies_that_differ", folder, checkpointing) == [[0, 0, 0]] * 2


def test_b160_ranks_listen_on_loopback_alone(pools: dict[int, Pool]) -> None:
    ranks = pools[2].each("process")
    assert listening(ranks) == {rank: {"127.0.0.1"} for rank in ranks}


def test_ranks_that_differ_are_found(pools: dict[int, Pool]) -> None:
    same, different = pools[3].each("compare", 0), pools[3].each("compare", 1)
    assert same == ["same"] * 3
    assert len(set(different)) == 1 and different[0].startswith("the weights differ between training ranks")


def test_memory_that_never_suffices_on_one_rank_is_told_by_that_rank(pools: dict[int, Pool]) -> None:
    """The others, too, end the pass, with an error that gives way to the cause."""
    found = pools[3].each("no_memory", 1)
    assert [type(error) for error in found] == [RanksLostError, OutOfMemoryError, RanksLostError]
    assert found[1].what == "what did not fit"


@pytest.mark.parametrize("size", [1, 2, 3])
def test_roles_that_make_room_for_each_other_learn_the_same(
    pools: dict[int, Pool], alone: Member, tmp_path: Path, size: int
) -> None:
    """To the bit, with whole weights on one rank and with sharded ones on several; and nothing of a role is there while
    the other works."""
    if size == 1:
        found = [[in_turns(alone, folder, False)] for folder in (None, tmp_path)]
    else:
        found = [pools[size].each("in_turns", folder, True) for folder in (None, tmp_path)]
    for (expected, metrics, stayed), (weights, others, held) in zip(*found, strict=True):
        assert weights.keys() == expected.keys() and all(torch.equal(weights[n], expected[n]) for n in weights)
        assert others == metrics and any("exp_avg_sq" in name for name in weights)
        assert held == [0] * 6 and all(stayed)


CALLS = ["log_probs", "update of the actor", "values of the critic", "update of the critic", "full_kl"]
PLACES = [0.0, 0.09, 0.22, 0.36, 0.47, 0.58, 0.71, 0.83, 0.94, 1.0]  # of a pass
KEPT = [("layers kept", call) for call in CALLS[:2]]


@pytest.mark.parametrize(("strategy", "call"), [*(("fsdp2", call) for call in CALLS), *KEPT])
def test_law_2_memory_that_runs_out_anywhere_in_a_pass_over_gathered_layers(
    pools: dict[int, Pool], strategy: str, call: str
) -> None:
    """On one rank or on several at once, forward and backward, in whatever micro-batch: all ranks start over with half
    the limit, and have to the bit what that limit gives; as they do afterwards, with the whole one."""
    expected = {tokens: pools[2].each("adapting", strategy, call, tokens, {}) for tokens in (28, 14, 12)}
    ways = [{rank: place} for place in PLACES for rank in (0, 1)] + [{0: 0.3, 1: 0.3}, {0: 0.8, 1: 0.2}]
    for at in ways:
        found = pools[2].each("adapting", strategy, call, 28, at)
        assert any(answer[2] for answer in found), at
        tokens = found[0][0][0]
        assert tokens == 14 or (
            tokens == 12 and len(at) == 2
        )  # the other rank may run out in the pass that starts over
        for rank, (troubled, after, _) in enumerate(found):
            assert same(troubled, expected[tokens][rank][0]), (at, rank)
            assert same(after, expected[28][rank][0]), (at, rank)
    assert {tokens: answers[0][0][0] for tokens, answers in expected.items()} == {28: 28, 14: 14, 12: 12}
    three = pools[3].each("adapting", strategy, call, 28, {2: 0.6})
    assert [answer[0][0] for answer in three] == [14] * 3 and three[2][2]


def same(one: Any, other: Any) -> bool:
    """Limits, tensors and metrics, to the bit."""
    tensors = one[1].keys() == other[1].keys() and all(torch.equal(one[1][n], other[1][n]) for n in one[1])
    return one[0] == other[0] and tensors and reduce_metrics(one[2]) == reduce_metrics(other[2])


def test_an_error_of_ones_own_is_not_blamed_on_the_others() -> None:
    ranks = Ranks(1, 2)
    with pytest.raises(RuntimeError, match="out of memory"), ranks.waiting_for("a test"):
        raise RuntimeError("out of memory")
    for theirs in (dist.DistBackendError("NCCL"), RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed")):
        with pytest.raises(RanksLostError, match="training rank 1 waited in vain"), ranks.waiting_for("a test"):
            raise theirs


def test_a_rank_that_ends_is_noticed_at_once(small_dir: Path, tmp_path: Path) -> None:
    """Not after the time limit of an exchange, and with the name of what was waited for."""
    with started_pool(small_dir, 2, tmp_path / "two") as pool:
        assert pool.each("compare", 0) == ["same", "same"]  # all have met
        pool.send("exit_at_once", 1)
        answer = pool.receive(0, seconds=20.0)
    assert isinstance(answer, RanksLostError) and answer.what == "training rank 0 waited in vain for the others: a test"


def test_an_old_torch_is_told_when_it_cannot_break_off_a_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    parallel_sharded._require_reset()
    monkeypatch.delattr(FSDPModule, "reset_iter_state")
    with pytest.raises(ConfigError, match=r"actor\.auto_micro_batch cannot start a pass over") as caught:
        parallel_sharded._require_reset()
    assert "torch 2.13" in (caught.value.fix or "")
