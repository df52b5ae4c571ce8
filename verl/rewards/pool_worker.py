"""A reward worker: takes calls over a socket, makes them one after the other, and tells each result at once."""

from __future__ import annotations

from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from verl.errors import RewardError
from verl.rewards.calls import Call, Callee, run
from verl.rewards.custom import load_function
from verl.rewards.results import Score
from verl.rewards.rules import rule_named

IN_PROCESS = "set reward.num_workers=0 to call the function in the run's own process, without a time limit"


class Target(NamedTuple):
    """What is to be called: a function of the user's file, or a built-in rule.

    Attributes:
        path: None: a rule.
    """

    name: str
    path: str | None = None


@lru_cache(maxsize=64)
def load(target: Target) -> Callee:
    """Raises RewardError."""
    if target.path is None:
        return Callee(rule_named(target.name), target.name)
    loaded = load_function(target.path, target.name)
    return Callee(loaded.function, loaded.name, loaded.file)


def serve(descriptor: int, idle: float | None) -> None:
    """Answer to the end of the connection, or until nothing was asked for ``idle`` seconds.

    A message is the target, the limit of an async call, and the calls. The answers are ``("begun",)``, for each
    call ``(its number, scores)``, and for what ends the run ``("refused", what, value, fix)``.
    """
    connection = Connection(descriptor)
    try:
        while connection.poll(idle):
            try:
                target, limit, calls = _received(connection)
                callee = load(target)
                connection.send(("begun",))
                run(callee, calls, lambda number, found: connection.send((number, portable(found))), limit)
            except RewardError as error:
                connection.send(("refused", error.what, plain(error.value), error.fix))
    except (EOFError, OSError):  # the run has ended
        return


def _received(connection: Connection) -> tuple[Target, float, list[Call]]:
    try:
        message: tuple[Target, float, list[Call]] = connection.recv()
    except (EOFError, OSError):
        raise
    except Exception as error:
        raise RewardError("A reward worker cannot read what a row holds.", repr(error), IN_PROCESS) from error
    return message


def portable(scores: list[Score]) -> list[Score]:
    """The same, with extras that can be read where the user's own classes and torch are not."""
    for score in scores:
        for key, value in score.extras.items():
            score.extras[key] = plain(value)
    return scores


def plain(value: Any) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and type(value).__module__ == "builtins"):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    if type(value) is dict:
        return {str(key): plain(inner) for key, inner in value.items()}
    if hasattr(value, "tolist"):  # numpy's and torch's
        return value.tolist()
    return repr(value)
