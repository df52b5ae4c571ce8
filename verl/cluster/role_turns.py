"""In which turns of a worker each part of its roles is needed, for those that are to make room in others.

Turns: rollout, actor, actor update, critic, critic update, reference, full KL, reward. A checkpoint is written and read
in the updates' turns.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from verl.algorithms.kl import is_full
from verl.config import Config
from verl.models.rows import forget_packed
from verl.training.actor import Actor
from verl.training.critic import Critic
from verl.training.offload import Turns
from verl.training.reference import Reference
from verl.training.reward_model import RewardModel


def share_actor(turns: Turns, actor: Actor, config: Config, rest: Callable[[], None]) -> None:
    """``rest``: drops what the engine has made of the weights."""
    weights = actor.weights

    def forget() -> None:
        rest()
        weights.rest()

    # An engine beside sharded weights has a copy of its own.
    also = ["full KL", *["rollout"] * (not weights.sharded)]
    share_trained(turns, actor, "actor", config.actor.param_offload, config.actor.optimizer_offload, forget, *also)


def share_critic(turns: Turns, critic: Critic, config: Config) -> None:
    asked = config.critic.param_offload, config.critic.optimizer_offload
    share_trained(turns, critic, "critic", *asked, critic.weights.rest)


def share_trained(
    turns: Turns, role: Actor | Critic, name: str, weights: bool, state: bool, forget: Callable[[], None], *more: str
) -> None:
    if weights:
        turns.share(role.weights.computing, {name, f"{name} update", *more}, forget=forget)
    if state:
        turns.share(lambda: [*role.weights.apart(), *role.optimizer.moments()], {f"{name} update"})


def share_reference(turns: Turns, reference: Reference, config: Config) -> None:
    in_loss = config.actor.use_kl_loss and is_full(config.actor.kl_loss_type)
    if config.ref.param_offload:
        _share_frozen(turns, reference.policy, "reference", "full KL", *["actor update"] * in_loss)


def share_reward_model(turns: Turns, model: RewardModel | None, config: Config) -> None:
    if model is not None and config.reward.model.param_offload:
        _share_frozen(turns, model.model, "reward")


def _share_frozen(turns: Turns, model: nn.Module, *names: str) -> None:
    def forget() -> None:
        for weight in model.parameters():
            forget_packed(weight)

    turns.share(lambda: model.parameters(), names, fixed=True, forget=forget)
