"""What the run and its reward workers say to each other: JSON over a socket, nothing that runs code when it is read.

A worker may be in the hands of a program that a model wrote. So what comes from one is bounded in size, is never waited
for in the middle of a message, and is checked before it is believed.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Iterator
from typing import Any

MESSAGE_LIMIT = 2**28  # bytes
SEND_SECONDS = 120.0  # for the other side to make room for a message
_PIECE = 2**18
_HEADER = struct.Struct("!I")


class Channel:
    """One end of a stream socket, which it owns. A message: its length (uint32, network order), then its JSON."""

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
