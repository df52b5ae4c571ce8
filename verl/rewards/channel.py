"""What the run and its reward workers say to each other: JSON over a socket, nothing that runs code when it is read.

A worker may be in the hands of a program that a model wrote. So what comes from one is bounded in size, is never waited
for in the middle of a message, and is checked before it is believed.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any

MESSAGE_LIMIT = 2**28  # bytes
SEND_SECONDS = 120.0  # for the other side to make room for a message
_PIECE = 2**18
_HEADER = struct.Struct("!I")

# Values that JSON lacks and tables have: how they are written and read again.
_WRITTEN: dict[type, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    tuple: ("$tuple", lambda value: [pack(inner) for inner in value], lambda told: tuple(map(unpack, told))),
    bytes: ("$bytes", bytes.hex, bytes.fromhex),
    Decimal: ("$decimal", str, Decimal),
    datetime: ("$datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("$date", date.isoformat, date.fromisoformat),
    time: ("$time", time.isoformat, time.fromisoformat),
    timedelta: ("$timedelta", lambda value: [value.days, value.seconds, value.microseconds], lambda t: timedelta(*t)),
}
_READ = {tag: read for tag, _, read in _WRITTEN.values()}


def pack(value: Any) -> Any:
    """``value`` as JSON can hold it; numpy's scalars and arrays become Python's numbers and lists.

    Raises:
        TypeError: something in it is no plain value.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return [pack(inner) for inner in value]
    if kind is dict:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: pack(inner) for key, inner in value.items()}
        return {"$dict": [[pack(key), pack(inner)] for key, inner in value.items()]}
    if kind in _WRITTEN:
        tag, write, _ = _WRITTEN[kind]
        return {tag: write(value)}
    if kind.__module__ == "numpy" and type(listed := value.tolist()) is not kind:
        return pack(listed)
    raise TypeError(f"{kind.__name__} is no plain value")


def unpack(told: Any) -> Any:
    """What :func:`pack` was given. Raises ValueError, TypeError and others where it is no such thing."""
    if type(told) is list:
        return [unpack(inner) for inner in told]
    if type(told) is not dict:
        return told
    if len(told) == 1:
        (tag, inner), *_ = told.items()
        if tag == "$dict":
            return {unpack(key): unpack(value) for key, value in inner}
        if tag in _READ:
            return _READ[tag](inner)
    return {key: unpack(inner) for key, inner in told.items()}


class Channel:
    """One end of a stream socket, which it owns. A message: its length (uint32, network order), then its JSON."""

    def __init__(self, own: socket.socket) -> None:
        self._socket, self._got = own, bytearray()

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
        """The messages that are complete by what has arrived; waits for the first byte only.

        Raises:
            EOFError, OSError: the other side has ended.
            ValueError, RecursionError: it sent what is no message.
        """
        self._socket.settimeout(None)
        arrived = self._socket.recv(_PIECE)
        if not arrived:
            raise EOFError
        self._got += arrived
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
