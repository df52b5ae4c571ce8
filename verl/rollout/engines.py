"""The engine that ``rollout.name`` names: the embedded one, or a class in a Python file of the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.config import Config
from verl.errors import ConfigError, EngineError, VerlError
from verl.models.policy import PolicyModel
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.protocol import SHARED_WEIGHTS, Request, Result, RolloutEngine
from verl.user_code import describe, load_user_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

METHODS = [name for name, member in vars(RolloutEngine).items() if inspect.isfunction(member) and name[0] != "_"]


@dataclass(frozen=True)
class EngineContext:
    """What an engine is made from.

    Attributes:
        policy: the model, where it computes. Its weights are those of the version that ``load_weights`` was told last;
            they may be the trainer's own, so an engine reads them and computes without gradients.
        end_tokens: the model's own.
        limits: what the configuration lets an engine hold.
        config: of the whole run.
    """

    policy: PolicyModel
    tokenizer: PreTrainedTokenizerBase
    end_tokens: Iterable[int]
    limits: EngineLimits
    config: Config


def make_engine(context: EngineContext) -> RolloutEngine:
    """Raises ConfigError as :func:`engine_class`, or for a class of the user's own that cannot be made."""
    name = context.config.rollout.name
    made = engine_class(name)
    if made is EmbeddedEngine:
        return EmbeddedEngine(context.policy, context.tokenizer, context.limits, context.end_tokens)
    try:
        return made(context)  # type: ignore[no-any-return]
    except VerlError:
        raise
    except Exception as error:
        fix = "it is made with one argument, an EngineContext; see docs/extending.md"
        raise ConfigError(
            f"the engine {name} cannot be made", describe(error, Path(inspect.getfile(made))), fix
        ) from error


def engine_class(name: str) -> Any:
    """The class that ``rollout.name`` names; ``file.py:Class`` is one of the user's own.

    Raises:
        ConfigError: there is none, its file cannot be imported, or it is no engine.
    """
    if name == "embedded":
        return EmbeddedEngine
    path, _, class_name = name.rpartition(":")
    found, file = load_user_function(path, class_name, "engine", "rollout.name", ConfigError, is_class=True)
    missing = [] if isinstance(getattr(found, "capabilities", None), frozenset) else ["capabilities, a frozenset"]
    missing += [f"{method}({', '.join(_parameters(method))})" for method in METHODS if not _fits(found, method)]
    if missing:
        fix = f"the class must have {'; '.join(missing)}: see RolloutEngine in verl/rollout/protocol.py"
        raise ConfigError("The class that rollout.name names is no rollout engine.", f"{class_name} in {file}", fix)
    return found


def _parameters(method: str) -> list[str]:
    return list(inspect.signature(getattr(RolloutEngine, method)).parameters)


def _fits(found: Any, method: str) -> bool:
    own = getattr(found, method, None)
    if not callable(own) or own is getattr(RolloutEngine, method):  # of a class that derives from the protocol
        return False
    try:
        inspect.signature(own).bind(*_parameters(method))
    except TypeError:
        return False
    return True


@torch.no_grad()
def give_weights(
    engine: RolloutEngine, policy: PolicyModel, version: int, whole: Iterable[tuple[str, Tensor]] = ()
) -> None:
    """The engine samples with this version from now on.

    Args:
        policy: of the engine's context, whose parameters hold the weights already but for those in ``whole``.
    """
    parameters = dict(policy.model.named_parameters())
    for name, tensor in whole:
        parameters[name].copy_(tensor)
    engine.load_weights(version, () if SHARED_WEIGHTS in engine.capabilities else parameters.items())


def require_answers(name: str, requests: list[Request], results: list[Result]) -> None:
    """Raise EngineError where an engine of the user's own answers these with what is no response."""
    for request, result in zip(requests, results, strict=True):
        tokens, most = len(result.response_ids), request.sampling.max_new_tokens
        columns = {column: len(getattr(result, column)) for column in ("log_probs", "loss_mask", "versions")}
        if not 1 <= tokens <= most:
            raise EngineError(f"{name} sampled {tokens} tokens", result.slot, f"{most} tokens were asked for")
        if wrong := [f"{column} {length}" for column, length in columns.items() if length != tokens]:
            raise EngineError(f"{name} sampled {tokens} tokens, and its result has other columns", ", ".join(wrong))
