"""Training ranks as processes that stay alive over many examples, for laws about what several of them compute."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from step_cases import Policies, Shape, capture_gradients, load, make_batch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.metric import Metric, merge_all, reduce_metrics
from verl.cluster.role_turns import share_trained
from verl.config import ActorConfig, CriticConfig
from verl.config.schema_data import Fp16Config
from verl.errors import OutOfMemoryError, VerlError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm
from verl.models.policy import PolicyModel, enable_checkpointing
from verl.protocol import DataProto
from verl.training.actor import Actor
from verl.training.critic import Critic
from verl.training.micro_batches import Limits
from verl.training.offload import Turns
from verl.training.optimizer import MasterWeights
from verl.training.parallel import ALONE, Ranks, join_ranks, leave_ranks
from verl.training.parallel_sharded import ShardedWeights, master_weights
from verl.training.passes import Passes
from verl.training.reference import Reference
from verl.training.saving import load_trained, save_trained

Outcome = tuple[dict[str, Tensor], dict[str, float]]
TEMPERATURE = 0.7
FIXED_DIVISOR = 11.0


class Member:
    """One rank: models in float64 and float32, and the steps that tests ask of it."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        self.models: dict[tuple[torch.dtype, str], Policies] = {}

    def policies(self, dtype: torch.dtype, strategy: str = "replicate", **changes: Any) -> Policies:
        ranks = Ranks(self.ranks.rank, self.ranks.size, lockstep=strategy != "replicate", **changes)
        if (dtype, strategy) not in self.models:
            whole = strategy in ("replicate", "replicate in lockstep")
            reshard = strategy != "fsdp2, layers kept"
            self.models[dtype, strategy] = load(self.folder, dtype, ALONE if whole else ranks, reshard)
        models = self.models[dtype, strategy]
        models.policy_weights.ranks = models.value_weights.ranks = ranks
        return models

    def actor(
        self, batch: DataProto, limits: Limits, config: ActorConfig, dtype: torch.dtype = torch.float64, **changes: Any
    ) -> tuple[dict[str, Tensor], dict[str, Metric], Tensor]:
        """Gradient, this rank's metrics, and the log-probs (B, R) before the step."""
        models = self.policies(dtype, **changes)
        batch.batch["draws"] = batch.batch["old_log_probs"].mul(1e4).remainder(1.0)  # go with their rows
        actor = Actor(models.policy, config, limits, TEMPERATURE, models.policy_weights)
        column = actor.log_probs(batch).tensors["old_log_probs"]
        gradient = capture_gradients(actor.optimizer, models.policy_weights)
        metrics = actor.update(batch, count_denominators(batch.batch["response_mask"], FIXED_DIVISOR))
        return whole(models.policy_weights, gradient), floats(metrics), column

    def critic(
        self, batch: DataProto, limits: Limits, mode: str, dtype: torch.dtype = torch.float64, **changes: Any
    ) -> tuple[dict[str, Tensor], dict[str, Metric], Tensor]:
        models = self.policies(dtype, **changes)
        critic = Critic(models.value, CriticConfig(loss_agg_mode=mode), limits, models.value_weights)
        column = critic.values(batch).tensors["values"]
        gradient = capture_gradients(critic.optimizer, models.value_weights)
        metrics = critic.update(batch, count_denominators(batch.batch["response_mask"], FIXED_DIVISOR))
        return whole(models.value_weights, gradient), floats(metrics), column


def whole(weights: MasterWeights, gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(weights, ShardedWeights):
        return gradient
    assert all(len(weights.masters[name]) <= -(-len(g) // 2) for name, g in weights.whole())
    return {name: weights.gather(name, part) for name, part in gradient.items()}


def floats(metrics: dict[str, Metric]) -> dict[str, Metric]:
    return {name: metric.to_floats() for name, metric in metrics.items()}


class Pool:
    """All ranks of one size."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def ask(self, call: str, shape: Shape, order: list[int], *arguments: Any, **settings: Any) -> Any:
        """Outcome of a step of :class:`Member` on a batch, which must be the same on all ranks but for the metrics,
        and the column that the ranks filled together."""
        for pipe in self._pipes:
            pipe.send((call, shape, order, arguments, settings))
        answers = [pipe.recv() for pipe in self._pipes]
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        gradient, _, column = answers[0]
        for other, _, other_column in answers:
            assert gradient.keys() == other.keys() and all(torch.equal(gradient[n], other[n]) for n in gradient)
            assert torch.equal(column, other_column)
        return (gradient, reduce_metrics(merge_all(metrics for _, metrics, _ in answers))), column

    def each(self, call: str, *arguments: Any) -> list[Any]:
        """Answers of every rank to a call of a function of this module by name."""
        self.send(call, *arguments)
        return [pipe.recv() for pipe in self._pipes]

    def send(self, call: str, *arguments: Any) -> None:
        for pipe in self._pipes:
            pipe.send((call, None, None, arguments, {}))

    def receive(self, rank: int, seconds: float) -> Any:
        assert self._pipes[rank].poll(seconds), f"no answer of rank {rank} within {seconds} s"
        return self._pipes[rank].recv()


@contextmanager
def started_pool(folder: Path, size: int, meeting: Path) -> Iterator[Pool]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["rank_pool"])  # torch is imported once for all of them
    with pytest.MonkeyPatch.context() as patched:  # Python 3.11's server looks for it in its own path alone
        patched.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        multiprocessing.forkserver.ensure_running()
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(folder, rank, size, str(meeting), theirs, sys.path), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        yield Pool(pipes)
    finally:
        for pipe in pipes:
            with suppress(OSError):  # of a rank that has ended
                pipe.send(None)
        for process in processes:
            process.kill()


def serve(folder: Path, rank: int, size: int, meeting: str, pipe: Connection, path: list[str]) -> None:
    sys.path[:] = path
    torch.set_num_threads(1)
    ranks = Ranks(rank, size)
    join_ranks(ranks, meeting, 60.0, torch.device("cpu"))
    member = Member(folder, ranks)
    while (asked := pipe.recv()) is not None:
        call, shape, order, arguments, settings = asked
        try:
            if shape is None:
                answer = globals()[call](member, *arguments)
            else:
                answer = getattr(member, call)(make_batch(shape).select_idxs(order), *arguments, **settings)
        except Exception as error:
            answer = error
        pipe.send(answer)
    leave_ranks()


def one_rank(folder: Path) -> Member:
    return Member(folder, ALONE)


def exit_at_once(member: Member, rank: int) -> str:
    """One rank ends without a word; what another sees while it waits for it."""
    if member.ranks.rank == rank:
        os._exit(9)
    member.ranks.sum_([torch.zeros(3)], "a test")
    return "not reached"


def process(member: Member) -> int:
    """Its id, once all have exchanged something."""
    member.ranks.sum_([torch.zeros(3)], "a test")
    return os.getpid()


def compare(member: Member, change: int) -> str:
    """What comparing weights says when the last rank's are changed by so much in one number."""
    weights = {"w": torch.arange(5.0)}
    weights["w"][3] += change * (member.ranks.rank == member.ranks.size - 1)
    try:
        member.ranks.require_same(weights, "the weights")
    except VerlError as error:
        return error.what
    return "same"


def no_memory(member: Member, rank: int) -> str:
    """A pass that never fits on one rank."""

    def run() -> str:
        if member.ranks.rank == rank:
            raise OutOfMemoryError("what did not fit")
        return "not reached"

    shape = Shape(prompt_lengths=[4], groups=[2], responses=[3, 2], seed=1)
    return Passes("actor", Limits(2, None, True), member.ranks, adapt=True)._adapted(make_batch(shape), run)


class Trap(TorchDispatchMode):
    """Memory runs out once, at the operator of this number, forward or backward, whatever it is.

    Exchanges between ranks are no such operators, nor is the word with which they begin.
    """

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left, self.open = at, True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.open and func.namespace != "c10d":
            self.left -= 1
            if self.left == 0:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried ...")
        return func(*args, **(kwargs or {}))


@contextmanager
def trapped(at: int) -> Iterator[Trap]:
    """Around everything that may be tried again: from the beginning of a pass to its last exchange."""
    trap, adapted, summed = Trap(at), Passes._adapted, Ranks.summed

    def closed(self: Ranks, values: Any, what: str) -> list[float]:
        before, trap.open = trap.open, False
        try:
            return summed(self, values, what)
        finally:
            trap.open = before

    def within(self: Passes, batch: DataProto, run: Any) -> Any:
        with trap:
            return adapted(self, batch, run)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Ranks, "summed", closed)
        patched.setattr(Passes, "_adapted", within)
        yield trap


def adapting(member: Member, strategy: str, call: str, tokens: int, at: Mapping[int, float]) -> Any:
    """A pass of a role with these limits, for which memory runs out on these ranks after so much of it has been done.

    Returns:
        The limits that are left, gradient, metrics and column; what the same pass gives afterwards, untroubled; and
        whether memory did run out.
    """
    ranks = Ranks(member.ranks.rank, member.ranks.size, lockstep=True)
    key = torch.float64, f"{strategy}, adapting"
    if key not in member.models:
        member.models[key] = load(member.folder, torch.float64, ranks, strategy == "fsdp2", adapt=True)
    models, limits = member.models[key], Limits(None, tokens, True)
    reference = PolicyModel(load_causal_lm(member.folder, torch.float64, attn_implementation=ATTENTION_NAME))
    batch = make_batch(Shape(prompt_lengths=[4, 6, 3], groups=[4, 2, 3], responses=[5, 2, 7, 3, 6, 1, 9, 2, 4], seed=4))
    denominators = count_denominators(batch.batch["response_mask"], FIXED_DIVISOR)

    def done() -> Any:
        config = ActorConfig(auto_micro_batch=True)
        actor = Actor(models.policy, config, limits, TEMPERATURE, models.policy_weights)
        critic = Critic(models.value, CriticConfig(), limits, models.value_weights, adapt=True)
        frozen = Reference(reference, Passes("reference", limits, ranks, True, actor.weights.abandon), TEMPERATURE)
        role = critic if "critic" in call else frozen if call == "full_kl" else actor
        if call.startswith("update"):
            gradient = capture_gradients(role.optimizer, role.weights)
            metrics = floats(role.update(batch, denominators))
            metrics = {name: m for name, m in metrics.items() if "timing" not in name}
            return role.passes.limits.tokens, whole(role.weights, gradient), metrics
        calls = {
            "log_probs": lambda: actor.log_probs(batch),
            "values of the critic": lambda: critic.values(batch),
            "full_kl": lambda: frozen.full_kl(batch, models.policy),
        }
        columns = dict(calls[call]().tensors)
        return role.passes.limits.tokens, columns, {}

    done()  # what is worked out at first use is
    with trapped(0) as counter:
        done()
    operators = -counter.left
    place = max(1, round(operators * at[ranks.rank])) if ranks.rank in at else 0
    with trapped(place) as trap:
        found = done()
    return found, done(), place > 0 and trap.left < 0


def in_turns(member: Member, folder: Path | None, lockstep: bool) -> Any:
    """Actor and critic take turns for two training steps, and make room for each other where there is a folder.

    Returns:
        Weights, moments and metrics; bytes of each one's storages in the other's turn.
    """
    ranks = Ranks(member.ranks.rank, member.ranks.size, lockstep)
    models, limits = load(member.folder, torch.float32, ranks), Limits(None, 24, True)
    actor = Actor(models.policy, ActorConfig(), limits, TEMPERATURE, models.policy_weights)
    critic = Critic(models.value, CriticConfig(), limits, models.value_weights)
    turns, held, metrics = Turns(torch.device("cpu"), folder or Path()), [], []
    for name, role in (("actor", actor), ("critic", critic)) if folder else ():
        share_trained(turns, role, name, True, True, role.weights.rest)
    batch = make_batch(Shape(prompt_lengths=[4, 6], groups=[4, 2], responses=[5, 2, 7, 3, 6, 1], seed=4))
    batch.meta_info["learning_rate"] = 1e-2
    for _ in range(2):
        turns.begin("critic")
        batch.batch["values"] = critic.values(batch).batch["values"]
        turns.begin("actor")
        batch.batch["old_log_probs"] = actor.log_probs(batch).batch["old_log_probs"]
        held.append(sum(t.untyped_storage().size() for t in (*critic.weights.computing(), *actor.optimizer.moments())))
        for name, role, other in (("critic update", critic, actor), ("actor update", actor, critic)):
            turns.begin(name)
            metrics.append(floats(role.update(batch, count_denominators(batch.batch["response_mask"], FIXED_DIVISOR))))
            away = *other.weights.computing(), *other.optimizer.moments()
            held.append(sum(tensor.untyped_storage().size() for tensor in away))
    found = {}
    for name, role in (("actor", actor), ("critic", critic)):
        turns.begin(f"{name} update")
        found |= {f"{name}/{key}": value.detach().clone() for key, value in role.weights.masters.items()}
        found |= {f"{name}/{key}": value.clone() for key, value in role.optimizer.state().items()}
    return found, metrics, held


def go_on(member: Member, strategy: str, source: Path | None, target: Path) -> dict[str, Tensor]:
    """Take a checkpoint, or make a first step of actor and critic; save; the weights as an engine would get them."""
    models = load(member.folder, torch.float32, Ranks(member.ranks.rank, member.ranks.size, strategy == "fsdp2"))
    limits = Limits(None, 24, True)
    actor = Actor(models.policy, ActorConfig(), limits, TEMPERATURE, models.policy_weights)
    critic = Critic(models.value, CriticConfig(), limits, models.value_weights)
    if source is None:
        batch = make_batch(Shape(prompt_lengths=[4, 6], groups=[4, 2], responses=[5, 2, 7, 3, 6, 1], seed=4))
        batch.meta_info["learning_rate"] = 1e-2
        for role in (actor, critic):
            role.update(batch, count_denominators(batch.batch["response_mask"], FIXED_DIVISOR))
    for name, role in (("actor", actor), ("critic", critic)):
        if source is not None:
            load_trained(source / name, role.weights, role.optimizer)
        save_trained(target / name, role.weights, role.optimizer)
    return {name: tensor.clone() for name, tensor in models.policy_weights.whole()}


def copies_that_differ(member: Member, folder: Path, checkpointing: bool) -> list[int]:
    """Log-probs of a sharded bfloat16 policy that are not those of a copy with the weights it publishes, a step."""
    ranks = Ranks(member.ranks.rank, member.ranks.size, lockstep=True)
    policy, copy = (
        PolicyModel(load_causal_lm(folder, dtype, attn_implementation=ATTENTION_NAME))
        for dtype in (torch.float32, torch.bfloat16)
    )
    if checkpointing:
        enable_checkpointing(policy.model)
    weights = master_weights(policy, torch.bfloat16, Fp16Config(), ranks, torch.device("cpu"))
    limits, found = Limits(None, 24, True), []
    actor = Actor(policy, ActorConfig(), limits, TEMPERATURE, weights)
    for seed in range(3):
        batch = make_batch(Shape(prompt_lengths=[4, 6], groups=[4, 2], responses=[5, 2, 7, 3, 6, 1], seed=seed))
        batch.meta_info["learning_rate"] = 1e-2
        actor.update(batch, count_denominators(batch.batch["response_mask"], FIXED_DIVISOR))
        with torch.no_grad():
            for name, tensor in weights.whole():
                copy.model.get_parameter(name).copy_(tensor)
        one = actor.log_probs(batch).batch["old_log_probs"]
        other = Passes("copy", limits).column(batch, torch.device("cpu"), lambda packed: copy(packed, TEMPERATURE)[0])
        found.append(int((one != other).sum()))
    return found
