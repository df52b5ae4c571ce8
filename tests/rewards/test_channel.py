"""The channel between the run and its reward workers carries values, not code."""

from __future__ import annotations

import json
import socket
import struct
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl.data.typed_json import pack, unpack
from verl.rewards.pool_worker import MESSAGE_LIMIT, Channel

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.datetimes(), st.dates(), st.times(), st.timedeltas(), st.decimals(allow_nan=False),
)  # fmt: skip
KEYS = st.one_of(st.text(), st.integers(), st.sampled_from(["__kind__", "items"]))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(st.lists(inner), st.lists(inner).map(tuple), st.dictionaries(KEYS, inner)),
    max_leaves=8,
)


def same(left: object, right: object) -> bool:
    """Equal and of equal types all the way down."""
    if type(left) is not type(right) or left != right:
        return False
    if isinstance(left, dict):
        return all(same(a, b) for a, b in zip(left.items(), right.items(), strict=True))
    return not isinstance(left, list | tuple) or all(map(same, left, right))


@given(VALUES)
def test_a_value_comes_back_as_it_was(value):
    assert same(unpack(json.loads(json.dumps(pack(value)))), value)


def test_kinds_of_values():
    value = {"a": (1, [b"\x00"]), 2: Decimal("1.50"), "t": datetime(2026, 1, 2, tzinfo=UTC), "d": date(2026, 1, 2)}
    value |= {"time": time(3, 4), "delta": timedelta(days=1, microseconds=5), "__kind__": [1], "s": {1, 2}}
    assert same(unpack(json.loads(json.dumps(pack(value)))), value)
    assert pack([np.float32(0.5), np.int64(3), np.arange(2), np.str_("x"), np.bool_(True)]) == [
        0.5,
        3,
        [0, 1],
        "x",
        True,
    ]
    for odd in (object(), lambda: 1, {"x": {1, object()}}, [type], np.array([object()])):
        with pytest.raises(TypeError, match="no plain value"):
            pack(odd)


def test_messages_arrive_whole_in_order_and_bounded():
    ours, theirs = socket.socketpair()
    channel, message = Channel(ours), b'["x", 1]'
    with theirs:
        framed = struct.pack("!I", len(message)) + message
        for part, complete in (
            (framed[:2], 0),
            (framed[2:7], 0),
            (framed[7:] + framed + framed[:5], 2),
            (framed[5:], 1),
        ):
            theirs.sendall(part)
            assert list(channel.receive()) == [["x", 1]] * complete
        theirs.sendall(struct.pack("!I", MESSAGE_LIMIT + 1))
        with pytest.raises(ValueError, match="bytes"):
            list(channel.receive())
    with pytest.raises((EOFError, OSError)):
        list(channel.receive())
    channel.close()


def test_what_is_too_long_is_not_sent(monkeypatch):
    monkeypatch.setattr("verl.rewards.pool_worker.MESSAGE_LIMIT", 10)
    ours, theirs = socket.socketpair()
    with theirs, pytest.raises(ValueError, match="12 bytes, more than 10"):
        Channel(ours).send("x" * 10)
