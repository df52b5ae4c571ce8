"""Batch sizes: their units, how one follows from another, and when they do not fit.

Prompts are counted in ``data.train_batch_size`` and ``ppo_mini_batch_size``, responses (prompts x ``rollout.n``) in
``ppo_micro_batch_size_per_gpu``, tokens in ``ppo_max_token_len_per_gpu``. With MBS, n, uBS and R ranks, one
optimizer step takes K = MBS n / (uBS R) backward passes on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import gcd
from typing import TYPE_CHECKING

from verl.config.problems import Problem, raise_problems
from verl.config.schema_cluster import TRAINED

if TYPE_CHECKING:
    from verl.config.schema import Config


@dataclass(frozen=True)
class BatchPlan:
    """How one trained role goes through a batch. With dynamic batching only the tokens of a backward pass are known."""

    mini_batch_prompts: int  # in one optimizer step, all ranks together
    rows_per_mini_batch: int  # responses in it: prompts x rollout.n
    micro_batch_rows: int | None  # responses in one backward pass on one rank; None with dynamic batching
    max_tokens: int | None  # most tokens in one backward pass on one rank; None without dynamic batching
    accumulation: int | None  # backward passes in one optimizer step on one rank; None with dynamic batching
    epochs: int  # passes over the batch


@dataclass(frozen=True)
class SamplingPlan:
    """What the engine is asked for; behind ``greedy_baseline`` as :class:`verl.rollout.protocol.SamplingParams`."""

    temperature: float  # the divisor of the logits; 0: greedy
    top_p: float  # probability mass kept, 1 for all
    top_k: int  # number of tokens kept, -1 for all
    n: int  # responses for each prompt
    greedy_baseline: bool = False  # one greedy response more for each prompt, with index -1, which is not trained on
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    min_new_tokens: int = 0


@dataclass(frozen=True)
class _Sizes:
    """The batch sizes of one role after "null: the actor's" has been filled in; keys name where each came from."""

    role: str
    mini_key: str
    mini: int
    micro_key: str
    micro: int | None
    dynamic: bool
    max_tokens: int
    epochs: int
    accumulation: int | None


def ranks(config: Config, role: str = "actor") -> int | None:
    """Processes of a role other than rollout, if the configuration alone tells them and not the machine's GPUs: a CPU
    machine trains as one, unless asked for more."""
    cluster, trainer = config.cluster, config.trainer
    own = cluster.processes_of(role)
    if own is not None or cluster.placement.pool_of(role) != cluster.placement.actor:
        return own
    if config.actor.world_size is not None:
        return config.actor.world_size
    if config.device_of("actor") == "cpu":
        return nodes(config, cluster.placement.actor)
    if trainer.n_gpus_per_node == "auto":
        return None
    return nodes(config, cluster.placement.actor) * max(1, trainer.n_gpus_per_node)


def nodes(config: Config, pool: str) -> int:
    """Machines that the ranks of a pool are spread over."""
    return config.cluster.pool(pool).nodes or (config.trainer.nnodes if pool == config.cluster.placement.actor else 1)


def _sizes(config: Config, role: str) -> _Sizes:
    actor, own = config.actor, config.critic if role == "critic" else config.actor
    mini, micro, dynamic = own.ppo_mini_batch_size, own.ppo_micro_batch_size_per_gpu, own.use_dynamic_bsz
    if dynamic is None:
        dynamic = micro is None and actor.dynamic
    return _Sizes(
        role,
        f"{'actor' if mini is None else role}.ppo_mini_batch_size",
        mini or actor.ppo_mini_batch_size,
        f"{'actor' if micro is None else role}.ppo_micro_batch_size_per_gpu",
        None if dynamic else micro or actor.ppo_micro_batch_size_per_gpu,
        dynamic,
        own.ppo_max_token_len_per_gpu,
        own.ppo_epochs or actor.ppo_epochs,
        actor.gradient_accumulation if role == "actor" else None,
    )


def plan(config: Config, role: str, over: int | None) -> BatchPlan:
    """See :meth:`verl.config.schema.Config.actor_batch`; ``role``: actor or critic."""
    sizes = _sizes(config, role)
    over = over or ranks(config, role) or 1
    raise_problems(list(_rank_problems(config, sizes, over, known=True)))
    rows = sizes.mini * config.rollout.n
    if sizes.micro is None:
        return BatchPlan(sizes.mini, rows, None, sizes.max_tokens, None, sizes.epochs)
    return BatchPlan(sizes.mini, rows, sizes.micro, None, rows // (sizes.micro * over), sizes.epochs)


def reference_limits(config: Config) -> tuple[int | None, int | None]:
    """Responses and tokens of one forward pass of the reference on a rank: its own or the actor's; one is None."""
    ref, actor = config.ref, config.actor
    rows, tokens = ref.log_prob_micro_batch_size_per_gpu, ref.log_prob_max_token_len_per_gpu
    dynamic = ref.log_prob_use_dynamic_bsz
    if dynamic is None:
        dynamic = tokens is not None if (rows is None) != (tokens is None) else actor.dynamic
    if dynamic:
        return None, tokens or actor.ppo_max_token_len_per_gpu
    return rows or actor.ppo_micro_batch_size_per_gpu, None


def problems(config: Config) -> Iterator[Problem]:
    """Everything about batch sizes that cannot work, found before any worker starts."""
    yield from _world_size_problems(config)
    for role in ("actor", "critic") if config.uses_critic else ("actor",):
        sizes, known = _sizes(config, role), ranks(config, role)
        # What the critic takes over from the actor is reported once, for the actor.
        if sizes.mini_key.startswith(role):
            yield from _prompt_problems(config, sizes)
        yield from _mode_problems(sizes)
        if sizes.dynamic:
            yield from _token_problems(config, f"{role}.ppo_max_token_len_per_gpu", sizes.max_tokens)
        if role in sizes.mini_key + sizes.micro_key or known != ranks(config):
            # With an unknown number of ranks, what fails on one rank fails on any number.
            yield from _rank_problems(config, sizes, known or 1, known=known is not None)
    if config.uses_reference:
        rows, tokens = reference_limits(config)
        if rows is None and tokens is None:
            key = "ref.log_prob_micro_batch_size_per_gpu"
            what = "ref.log_prob_use_dynamic_bsz=false needs a size of one forward pass"
            yield Problem(what, f"{key} is null", f"set {key} (responses in one forward pass on one rank)")
        elif tokens is not None and config.ref.log_prob_max_token_len_per_gpu is not None:
            yield from _token_problems(config, "ref.log_prob_max_token_len_per_gpu", tokens)


def _world_size_problems(config: Config) -> Iterator[Problem]:
    """Every key that says how many processes the actor has must say the same."""
    trainer, cluster = config.trainer, config.cluster
    pool, gpus = cluster.placement.actor, trainer.n_gpus_per_node
    said = {
        f"cluster.pools.{pool}.processes": cluster.processes_of("actor"),
        "actor.world_size": config.actor.world_size,
    }
    if isinstance(gpus, int) and gpus and config.device_of("actor") != "cpu":
        machines = nodes(config, pool)
        said[f"trainer.n_gpus_per_node={gpus} x trainer.nnodes={machines}"] = gpus * machines
    given = {key: number for key, number in said.items() if number is not None}
    if len(set(given.values())) > 1:
        what = "the number of training ranks is given more than once, and differently"
        yield Problem(what, ", ".join(f"{key}: {number}" for key, number in given.items()), "keep one of them")
    own = cluster.pool(pool).nodes
    if own is not None and trainer.nnodes not in (1, own):
        value = f"trainer.nnodes: {trainer.nnodes}, cluster.pools.{pool}.nodes: {own}"
        yield Problem("the number of machines that train is given twice, and differently", value, "keep one of them")
    many = {role: ranks(config, role) for role in TRAINED}
    for name, number in {cluster.placement.pool_of(role): number for role, number in many.items()}.items():
        if number is not None and number % nodes(config, name):
            value = f"{number} processes, {nodes(config, name)} machines"
            fix = "give a multiple (actor.world_size and processes count those of all machines)"
            yield Problem(f"each machine of the pool {name} must have as many of its processes", value, fix)
    if cluster.backend == "inline" and max(number or 1 for number in many.values()) > 1:
        asked = ", ".join(f"{role}: {number} ranks" for role, number in many.items() if (number or 1) > 1)
        keys = f"actor.world_size={config.actor.world_size}, trainer.nnodes={trainer.nnodes}"
        fix = "set cluster.backend=ray, or leave actor.world_size, trainer.n_gpus_per_node and processes out"
        what = "cluster.backend=inline is one process, and more are asked for"
        yield Problem(what, f"{asked} ({keys}, trainer.n_gpus_per_node={gpus})", fix)


def _divisor(number: int, limit: int) -> int:
    """A divisor of ``number`` that is at most ``limit``: the largest, unless the numbers are absurd."""
    nearby = range(min(number, limit), max(0, min(number, limit) - 10_000), -1)
    return next((size for size in nearby if number % size == 0), gcd(number, limit))


def _prompt_problems(config: Config, sizes: _Sizes) -> Iterator[Problem]:
    train, mini, key = config.data.train_batch_size, sizes.mini, sizes.mini_key
    if mini > train:
        more = f" (prompts, not responses: rollout.n={config.rollout.n})" if config.rollout.n > 1 else ""
        what = f"{key} is larger than data.train_batch_size; both count prompts"
        yield Problem(what, f"{mini} prompts > {train} prompts", f"set {key} to at most {train} prompts{more}")
    elif train % mini:
        what = f"data.train_batch_size is not a multiple of {key}; both count prompts"
        yield Problem(what, f"{train} prompts / {mini} prompts", f"for example {key}={_divisor(train, mini)}")


def _mode_problems(sizes: _Sizes) -> Iterator[Problem]:
    role = sizes.role
    if not sizes.dynamic and sizes.micro is None:
        what, key = f"{role}.use_dynamic_bsz=false needs a micro-batch size", f"{role}.ppo_micro_batch_size_per_gpu"
        yield Problem(what, f"{key} is null", f"set {key} (responses in one backward pass on one rank)")
    if sizes.dynamic and sizes.accumulation is not None:
        what = f"{role}.gradient_accumulation has no meaning with dynamic batching, where the tokens decide"
        fix = f"remove it, or set {sizes.micro_key} (responses) and leave {role}.use_dynamic_bsz out"
        yield Problem(what, sizes.accumulation, fix)


def _token_problems(config: Config, key: str, limit: int) -> Iterator[Problem]:
    prompt, response, one = config.data.max_prompt_length, config.data.max_response_length, config.bootstraps
    longest = prompt + response + one
    if limit < longest:
        more = " and one for algorithm.bootstrap_truncated" if one else ""
        sequence = f"the longest sequence, data.max_prompt_length + data.max_response_length{more}"
        value = f"{limit} tokens < {prompt} + {response}{' + 1' if one else ''} = {longest} tokens"
        fix = f"set {key} to at least {longest} tokens"
        yield Problem(f"{key} is smaller than {sequence}; all count tokens", value, fix)


def _rank_problems(config: Config, sizes: _Sizes, over: int, known: bool) -> Iterator[Problem]:
    """``known``: ``over`` is the true number of ranks, not a stand-in."""
    n, mini, key, micro = config.rollout.n, sizes.mini, sizes.mini_key, sizes.micro
    rows = mini * n
    product = f"{key} x rollout.n = {mini} x {n} = {rows} responses"
    if micro is None:
        if rows < over:
            fix = f"set {key} to at least {-(-over // n)} prompts, or use fewer ranks"
            what = f"{product} cannot be spread over {over} ranks"
            yield Problem(what, f"{rows} responses / {over} ranks", fix)
        return
    if rows % (micro * over):
        fix = f"make {key} x rollout.n a multiple of {over} ranks"
        if rows % over == 0:
            fix = f"for example {sizes.micro_key}={_divisor(rows // over, micro)}"
        what = f"{product} do not divide into {sizes.micro_key}={micro} responses on each of {over} rank(s)"
        yield Problem(what, f"{rows} responses / ({micro} responses x {over} rank(s))", fix)
        return
    steps, given = rows // (micro * over), sizes.accumulation
    if given is not None and (given != steps if known else steps % given):
        unknown = "" if known else " (the number of ranks is not known yet, and no number of them gives this)"
        accumulation = f"{sizes.role}.gradient_accumulation"
        what = (
            f"{accumulation} does not agree with the batch sizes: {product}, in micro-batches of {micro} responses on "
            f"each of {over} rank(s), are {steps} micro-batches{unknown}"
        )
        fix = f"remove {accumulation} (it is derived), or set it to {steps}"
        yield Problem(what, f"{given} micro-batches", fix)
