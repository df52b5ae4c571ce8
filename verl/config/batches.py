"""Batch sizes: their units, how one follows from another, and when they do not fit.

Prompts are counted in ``data.train_batch_size`` and ``ppo_mini_batch_size``, responses (prompts x ``rollout.n``) in
``ppo_micro_batch_size_per_gpu``, tokens in ``ppo_max_token_len_per_gpu``. With MBS, n, uBS and R ranks, one
optimizer step takes K = MBS n / (uBS R) backward passes on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from verl.config.plan import BatchPlan
from verl.config.problems import Problem, raise_problems
from verl.config.schema_cluster import TRAINED

if TYPE_CHECKING:
    from verl.config.schema import Config


@dataclass(frozen=True)
class _Sizes:
    """The batch sizes of one role after "null: the actor's" has been filled in; keys name where each came from."""

    role: str
    mini: int
    mini_key: str
    micro: int | None
    micro_key: str
    dynamic: bool
    max_tokens: int
    accumulation: int | None
    epochs: int


def ranks(config: Config, role: str = "actor") -> int | None:
    """Ranks of a role, if the configuration alone tells them: a CPU machine trains as one, unless asked for more."""
    cluster, trainer = config.cluster, config.trainer
    own = cluster.processes_of(role)
    if own is not None or cluster.placement.pool_of(role) != cluster.placement.actor:
        return own
    if config.actor.world_size is not None:
        return config.actor.world_size
    if config.device_of("actor") == "cpu":
        return trainer.nnodes
    if trainer.n_gpus_per_node == "auto":
        return None
    return trainer.nnodes * max(1, trainer.n_gpus_per_node)


def _actor(config: Config) -> _Sizes:
    actor = config.actor
    return _Sizes(
        role="actor",
        mini=actor.ppo_mini_batch_size,
        mini_key="actor.ppo_mini_batch_size",
        micro=None if actor.dynamic else actor.ppo_micro_batch_size_per_gpu,
        micro_key="actor.ppo_micro_batch_size_per_gpu",
        dynamic=actor.dynamic,
        max_tokens=actor.ppo_max_token_len_per_gpu,
        accumulation=actor.gradient_accumulation,
        epochs=actor.ppo_epochs,
    )


def _critic(config: Config) -> _Sizes:
    actor, critic = config.actor, config.critic
    own_micro = critic.ppo_micro_batch_size_per_gpu is not None
    dynamic = critic.use_dynamic_bsz
    if dynamic is None:
        dynamic = False if own_micro else actor.dynamic
    own_mini = critic.ppo_mini_batch_size is not None
    return _Sizes(
        role="critic",
        mini=critic.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        mini_key="critic.ppo_mini_batch_size" if own_mini else "actor.ppo_mini_batch_size",
        micro=None if dynamic else critic.ppo_micro_batch_size_per_gpu or actor.ppo_micro_batch_size_per_gpu,
        micro_key=("critic" if own_micro else "actor") + ".ppo_micro_batch_size_per_gpu",
        dynamic=dynamic,
        max_tokens=critic.ppo_max_token_len_per_gpu,
        accumulation=None,
        epochs=critic.ppo_epochs or actor.ppo_epochs,
    )


def plan(config: Config, role: str, over: int | None) -> BatchPlan:
    """See :meth:`verl.config.schema.Config.actor_batch`; ``role``: actor or critic."""
    sizes = _actor(config) if role == "actor" else _critic(config)
    over = over or ranks(config, role) or 1
    raise_problems(list(_rank_problems(config, sizes, over, known=True)))
    rows = sizes.mini * config.rollout.n
    if sizes.micro is None:
        return BatchPlan(sizes.mini, rows, None, sizes.max_tokens, None, sizes.epochs)
    return BatchPlan(sizes.mini, rows, sizes.micro, None, rows // (sizes.micro * over), sizes.epochs)


def reference_limits(config: Config) -> tuple[int | None, int | None]:
    """Responses or tokens in one forward pass of the reference: its own limit, else the actor's."""
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
    roles = [_actor(config)] + ([_critic(config)] if config.uses_critic else [])
    for sizes in roles:
        known = ranks(config, sizes.role)
        # What the critic takes over from the actor is reported once, for the actor.
        if sizes.mini_key.startswith(sizes.role):
            yield from _prompt_problems(config, sizes)
        yield from _mode_problems(sizes)
        if sizes.dynamic:
            yield from _token_problems(config, f"{sizes.role}.ppo_max_token_len_per_gpu", sizes.max_tokens)
        own = sizes.mini_key.startswith("critic") or sizes.micro_key.startswith("critic")
        if sizes.role == "actor" or own or known != ranks(config):
            # With an unknown number of ranks, what fails on one rank fails on any number.
            yield from _rank_problems(config, sizes, known or 1, known=known is not None)
    if config.uses_reference:
        rows, tokens = reference_limits(config)
        if rows is None and tokens is None:
            yield Problem(
                "ref.log_prob_use_dynamic_bsz=false needs a size of one forward pass",
                "ref.log_prob_micro_batch_size_per_gpu is null",
                "set ref.log_prob_micro_batch_size_per_gpu (responses in one forward pass on one rank)",
            )
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
        said[f"trainer.n_gpus_per_node={gpus} x trainer.nnodes={trainer.nnodes}"] = gpus * trainer.nnodes
    given = {key: number for key, number in said.items() if number is not None}
    if len(set(given.values())) > 1:
        yield Problem(
            "the number of training ranks is given more than once, and differently",
            ", ".join(f"{key}: {number}" for key, number in given.items()),
            "keep one of them",
        )
    many = {role: ranks(config, role) for role in TRAINED}
    if set(many.values()) != {1} and config.actor.strategy == "fsdp2" and config.actor.auto_micro_batch:
        yield Problem(
            "actor.auto_micro_batch cannot start a pass over whose layers are gathered from all ranks",
            "actor.strategy=fsdp2",
            "set actor.auto_micro_batch=false and lower actor.ppo_max_token_len_per_gpu, or actor.strategy=replicate",
        )
    if cluster.backend == "inline" and max(number or 1 for number in many.values()) > 1:
        yield Problem(
            "cluster.backend=inline is one process, and more are asked for",
            ", ".join(f"{role}: {number} ranks" for role, number in many.items() if (number or 1) > 1)
            + f" (actor.world_size={config.actor.world_size}, trainer.nnodes={trainer.nnodes}, "
            f"trainer.n_gpus_per_node={gpus})",
            "set cluster.backend=ray, or leave actor.world_size, trainer.n_gpus_per_node and processes out",
        )


def _divisor(number: int, limit: int) -> int:
    """A divisor of ``number`` that is at most ``limit``: the largest, unless the numbers are absurd."""
    nearby = range(min(number, limit), max(0, min(number, limit) - 10_000), -1)
    return next((size for size in nearby if number % size == 0), gcd(number, limit))


def _prompt_problems(config: Config, sizes: _Sizes) -> Iterator[Problem]:
    train = config.data.train_batch_size
    if sizes.mini > train:
        yield Problem(
            f"{sizes.mini_key} is larger than data.train_batch_size; both count prompts",
            f"{sizes.mini} prompts > {train} prompts",
            f"set {sizes.mini_key} to at most {train} prompts"
            + (f" (prompts, not responses: rollout.n={config.rollout.n})" if config.rollout.n > 1 else ""),
        )
    elif train % sizes.mini:
        yield Problem(
            f"data.train_batch_size is not a multiple of {sizes.mini_key}; both count prompts",
            f"{train} prompts / {sizes.mini} prompts",
            f"for example {sizes.mini_key}={_divisor(train, sizes.mini)}",
        )


def _mode_problems(sizes: _Sizes) -> Iterator[Problem]:
    if not sizes.dynamic and sizes.micro is None:
        yield Problem(
            f"{sizes.role}.use_dynamic_bsz=false needs a micro-batch size",
            f"{sizes.role}.ppo_micro_batch_size_per_gpu is null",
            f"set {sizes.role}.ppo_micro_batch_size_per_gpu (responses in one backward pass on one rank)",
        )
    if sizes.dynamic and sizes.accumulation is not None:
        yield Problem(
            f"{sizes.role}.gradient_accumulation has no meaning with dynamic batching, "
            "where the tokens decide how many micro-batches there are",
            sizes.accumulation,
            f"remove it, or set {sizes.micro_key} (responses) and leave {sizes.role}.use_dynamic_bsz out",
        )


def _token_problems(config: Config, key: str, limit: int) -> Iterator[Problem]:
    longest = config.data.max_prompt_length + config.data.max_response_length + config.bootstraps
    more = (" + 1", " and one for algorithm.bootstrap_truncated") if config.bootstraps else ("", "")
    if limit < longest:
        yield Problem(
            f"{key} is smaller than the longest sequence, "
            f"data.max_prompt_length + data.max_response_length{more[1]}; all count tokens",
            f"{limit} tokens < {config.data.max_prompt_length} + {config.data.max_response_length}{more[0]} = "
            f"{longest} tokens",
            f"set {key} to at least {longest} tokens",
        )


def _rank_problems(config: Config, sizes: _Sizes, over: int, known: bool) -> Iterator[Problem]:
    """``known``: ``over`` is the true number of ranks, not a stand-in."""
    n = config.rollout.n
    rows = sizes.mini * n
    product = f"{sizes.mini_key} x rollout.n = {sizes.mini} x {n} = {rows} responses"
    if sizes.micro is None:
        if rows < over:
            yield Problem(
                f"{product} cannot be spread over {over} ranks",
                f"{rows} responses / {over} ranks",
                f"set {sizes.mini_key} to at least {-(-over // n)} prompts, or use fewer ranks",
            )
        return
    if rows % (sizes.micro * over):
        yield Problem(
            f"{product} do not divide into {sizes.micro_key}={sizes.micro} responses on each of {over} rank(s)",
            f"{rows} responses / ({sizes.micro} responses x {over} rank(s))",
            f"for example {sizes.micro_key}={_divisor(rows // over, sizes.micro)}"
            if rows % over == 0
            else f"make {sizes.mini_key} x rollout.n a multiple of {over} ranks",
        )
        return
    steps, given = rows // (sizes.micro * over), sizes.accumulation
    if given is not None and (given != steps if known else steps % given):
        unknown = "" if known else " (the number of ranks is not known yet, and no number of them gives this)"
        yield Problem(
            f"{sizes.role}.gradient_accumulation does not agree with the batch sizes: {product}, in micro-batches "
            f"of {sizes.micro} responses on each of {over} rank(s), are {steps} micro-batches{unknown}",
            f"{given} micro-batches",
            f"remove {sizes.role}.gradient_accumulation (it is derived), or set it to {steps}",
        )
