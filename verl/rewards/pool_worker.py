"""A reward worker: takes calls over a socket, makes them one after the other, and tells each result at once."""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import time
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple, get_args

from verl.data.typed_json import pack, unpack
from verl.errors import RewardError
from verl.rewards.custom import load_function
from verl.rewards.results import MAX_SCORE, Call, Callee, Outcome, Score, run
from verl.rewards.rules import rule_named

MESSAGE_LIMIT = 2**28  # bytes
SEND_SECONDS = 120.0  # for the other side to make room for a message
_PIECE = 2**18
_HEADER = struct.Struct("!I")


class Channel:
    """One end of a stream socket, which it owns. A message: its length (uint32, network order), then its JSON.

    A worker may be in the hands of a program that a model wrote. So what comes from one is bounded in size, is never
    waited for in the middle of a message, runs no code when it is read, and is checked before it is believed.
    """

    def __init__(self, own: socket.socket) -> None:
        self._socket, self._got = own, bytearray()
        self.heard = 0.0  # when something arrived last, by the monotonic clock

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def partial(self) -> bool:
        """Whether a message has begun to arrive."""
        return bool(self._got)

    def close(self) -> None:
        self._socket.close()

    def send(self, message: Any) -> None:
        """Raises OSError: the other side is gone, or takes nothing; ValueError and others: what cannot be sent."""
        text = json.dumps(message).encode()
        if len(text) > MESSAGE_LIMIT:
            raise ValueError(f"{len(text)} bytes, more than {MESSAGE_LIMIT}")
        self._socket.settimeout(SEND_SECONDS)
        self._socket.sendall(_HEADER.pack(len(text)) + text)

    def receive(self) -> Iterator[Any]:
        """The messages that are complete by what has arrived; waits for the first byte only. Raises EOFError, OSError:
        the other side has ended; ValueError, RecursionError: it sent what is no message."""
        self._socket.settimeout(None)
        arrived = self._socket.recv(_PIECE)
        if not arrived:
            raise EOFError
        self._got += arrived
        self.heard = time.monotonic()
        while len(self._got) >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._got)
            if length > MESSAGE_LIMIT:
                raise ValueError(f"a message of {length} bytes")
            end = _HEADER.size + length
            if len(self._got) < end:
                return
            text = bytes(self._got[_HEADER.size : end])
            del self._got[:end]
            yield json.loads(text)


IN_PROCESS = "set reward.num_workers=0 to call the function in the run's own process, without a time limit"


class Target(NamedTuple):
    """What is to be called: a function of the user's file, or (``path`` None) a built-in rule."""

    name: str
    path: str | None = None


@lru_cache(maxsize=64)
def load(target: Target) -> Callee:
    """Raises RewardError."""
    if target.path is None:
        return Callee(rule_named(target.name), target.name)
    return load_function(target.path, target.name)


def serve(descriptor: int, idle: float | None) -> None:
    """Answer to the end of the connection, or until nothing was asked for ``idle`` seconds.

    A message is the target, the limit of an async call, and of each call its arguments and count. The answers are
    ``["begun"]``, for each call ``[its number, scores]``, and for what ends the run ``["refused", what, value, fix]``.
    """
    channel = Channel(socket.socket(fileno=descriptor))
    try:
        for target, limit, asked in _asked(channel, idle):
            try:
                callee = load(Target(*target))
                calls = [Call(unpack(arguments), count) for arguments, count in asked]
                channel.send(["begun"])
                run(callee, calls, lambda number, found: _tell(channel, number, found), limit)
            except RewardError as error:
                channel.send(["refused", error.what, pack(error.value, repr), error.fix])
    except (EOFError, OSError):  # the run has ended
        return


def _asked(channel: Channel, idle: float | None) -> Iterator[Any]:
    ready = select.poll()
    ready.register(channel, select.POLLIN)
    while ready.poll(None if idle is None else 1000 * idle):
        yield from channel.receive()


def _tell(channel: Channel, number: int, scores: list[Score]) -> None:
    try:
        channel.send([number, [told(score) for score in scores]])
    except OSError:
        raise
    except Exception as error:  # too long, too deep, or what stands for it (its __repr__) fails
        reason = f"what it returned cannot be sent to the run: {error}"
        channel.send([number, [told(Score(None, "failed", reason=reason))] * len(scores)])


def told(score: Score) -> list[Any]:
    """For the channel; extras as values that can be read where the user's own classes and torch are not."""
    return [score.value, score.outcome, pack(score.extras, repr), score.reason, score.seconds]


def heard(told: Any, count: int) -> list[Score]:
    """The scores of one call. Raises ValueError, TypeError and others: a worker that is no longer its own master said
    this."""
    scores = [
        Score(value, outcome, unpack(extras), reason, seconds) for value, outcome, extras, reason, seconds in told
    ]
    if len(scores) != count or not all(map(_is_sound, scores)):
        raise ValueError("no scores")
    return scores


def _is_sound(score: Score) -> bool:
    scored = type(score.value) is float and abs(score.value) <= MAX_SCORE
    return (
        score.outcome in get_args(Outcome)
        and (scored if score.outcome == "scored" else score.value is None)
        and type(score.extras) is dict
        and (score.reason is None or type(score.reason) is str)
        and type(score.seconds) is float
        and 0 <= score.seconds < math.inf
    )
