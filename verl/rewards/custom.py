"""A reward function in the user's own Python file, in one of the three signatures of the field (docs/rewards.md).

They are told apart by the names of their parameters: ``solution_str`` belongs to verl's only, ``completions`` and
``completion_ids`` to TRL's, ``queries`` to OpenRLHF's. What fits none or several is refused, never guessed at.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.names import did_you_mean
from verl.errors import RewardError
from verl.rewards.results import Callee
from verl.user_code import load_user_function


@dataclass(frozen=True)
class Signature:
    """One way of the field to write a reward function.

    Attributes:
        marks: parameter names that no other signature has; one of them is enough.
        given: what a call may pass by keyword.
        required: which of these the function must take.
        shown: the definition, for messages.
    """

    name: str
    marks: tuple[str, ...]
    given: tuple[str, ...]
    required: tuple[str, ...]
    shown: str


VERL = Signature(
    "verl",
    marks=("solution_str",),
    given=("data_source", "solution_str", "ground_truth", "extra_info"),
    required=("data_source", "solution_str", "ground_truth"),
    shown="def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)  # one response",
)
TRL = Signature(
    "TRL",
    marks=("completions", "completion_ids"),
    given=("prompts", "completions", "completion_ids"),
    required=(),
    shown="def reward(prompts, completions, completion_ids, **columns)  # a batch: returns a list",
)
OPENRLHF = Signature(
    "OpenRLHF",
    marks=("queries",),
    given=("queries", "prompts", "labels"),
    required=("queries", "prompts", "labels"),
    shown='def reward_func(queries, prompts, labels)  # a batch: returns {"rewards": ..., "extra_logs": ...}',
)
SIGNATURES = (VERL, TRL, OPENRLHF)


@dataclass(frozen=True)
class UserFunction(Callee):
    """A reward function that has been read and checked; ``columns``: parameters without a default that only columns of
    the data can fill (TRL's signature)."""

    signature: Signature = VERL
    columns: tuple[str, ...] = ()
    parameters: Mapping[str, inspect.Parameter] = field(default_factory=dict, repr=False)

    def takes(self, name: str) -> bool:
        """Whether ``name`` can be given by keyword."""
        return _takes(self.parameters, name)


def load_function(path: str | Path, name: str = "compute_score", kwargs: Iterable[str] = ()) -> UserFunction:
    """The function ``name`` of the Python file ``path``, checked before a run depends on it. ``kwargs``: names of
    ``reward.reward_kwargs``, which the function must accept. Raises RewardError: no such file, an exception while it is
    imported, no such function, or parameters that do not fit."""
    function, file = load_user_function(path, name, "reward", "reward.custom_reward_function.path", RewardError)
    return check_function(function, name, file, kwargs)


def check_function(
    function: Callable[..., Any], name: str, file: Path | None = None, kwargs: Iterable[str] = ()
) -> UserFunction:
    """A reward function of a file, or (``file`` None) of the running program; errors as :func:`load_function`."""
    if file is None:
        file = Path(getattr(getattr(function, "__code__", None), "co_filename", "this program"))
    kwargs, where = tuple(kwargs), f"{name} in {file}"
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):  # some builtins have none to show
        raise _no_signature(f"{where}, whose parameters cannot be read", ()) from None
    shown = f"{name}{inspect.signature(function)} in {file}"
    found = [s for s in SIGNATURES if any(mark in parameters for mark in s.marks)]
    if len(found) != 1:
        raise _no_signature(shown, found, parameters)
    (signature,) = found
    needed = [p.name for p in parameters.values() if _needed(p) and p.name not in {*signature.given, *kwargs}]
    missing = [n for n in signature.required if not _takes(parameters, n)]
    by_position = [p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY and _needed(p)]
    reasons = [f"it does not take {', '.join(missing)}"] if missing else []
    if by_position or (needed and signature is not TRL):
        reasons.append(f"nothing is given for {', '.join(dict.fromkeys(by_position or needed))}")
    if reasons:
        fix = f"{' and '.join(reasons)}; {signature.name}'s signature is called by keyword as {signature.shown}"
        raise RewardError("The reward function's parameters do not fit.", shown, fix)
    unknown = [k for k in kwargs if not _takes(parameters, k)]
    if unknown:
        raise RewardError(
            f"The reward function does not take {', '.join(unknown)} of reward.reward_kwargs.",
            shown,
            "add the parameter or **kwargs to the function, or remove the key",
        )
    return UserFunction(function, where, file, signature, tuple(needed), parameters)


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``name`` can be given to ``function`` by keyword."""
    return _takes(inspect.signature(function).parameters, name)


def _takes(parameters: Mapping[str, inspect.Parameter], name: str) -> bool:
    given = parameters.get(name)
    if given is not None and given.kind in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _needed(parameter: inspect.Parameter) -> bool:
    variadic = (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.default is parameter.empty and parameter.kind not in variadic


def _no_signature(shown: str, found: Iterable[Signature], parameters: Iterable[str] = ()) -> RewardError:
    several = " and ".join(signature.name for signature in found)
    what = "The reward function's parameters fit none of the three signatures."
    if several:
        what = f"The reward function's parameters fit several signatures ({several})."
    marks = [mark for signature in SIGNATURES for mark in signature.marks]
    near = "" if several else next(filter(None, (did_you_mean(name, marks, 0.7) for name in parameters)), "")
    forms = "".join(f"\n    {signature.name}: {signature.shown}" for signature in SIGNATURES)
    return RewardError(what, shown, f"{near}write it as one of{forms}")
