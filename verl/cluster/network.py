"""How processes on several machines find and reach each other: over the Ray cluster that they are in."""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta

import ray
import torch.distributed as dist
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_exists, _internal_kv_get, _internal_kv_put

SIOCGIFADDR = 0x8915  # an interface's address, of netdevice(7)
NAMESPACE = "verl"
POLL_SECONDS = 0.02


class RayStore(dist.Store):
    """As much of a store as gloo and NCCL ask of one to meet, in the cluster's own key-value store.

    That is reached from every machine, asks for the cluster's token, and needs neither a port nor a file system that
    they share. Whoever makes this keeps it as long as the group lives.

    Args:
        name: of the meeting; the keys of other meetings are others.
        seconds: limit of a wait without one of its own.
    """

    def __init__(self, name: str, seconds: float) -> None:
        super().__init__()
        self._prefix, self._seconds = f"{name}/", seconds

    def set(self, key: str, value: bytes | str) -> None:
        _internal_kv_put(self._prefix + key, value, overwrite=True, namespace=NAMESPACE)

    def get(self, key: str) -> bytes:
        self.wait([key])
        found = _internal_kv_get(self._prefix + key, namespace=NAMESPACE)
        if found is None:
            raise dist.DistStoreError(f"{key} was removed")
        return found

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        end = time.monotonic() + seconds
        for key in keys:
            while not self.check([key]):
                if time.monotonic() > end:
                    raise dist.DistStoreError(f"nobody has set {key} within {seconds:g} s")
                time.sleep(POLL_SECONDS)

    def check(self, keys: list[str]) -> bool:
        return all(_internal_kv_exists(self._prefix + key, namespace=NAMESPACE) for key in keys)


def forget_meeting(name: str) -> None:
    """All have met, or given up."""
    _internal_kv_del(f"{name}/", del_by_prefix=True, namespace=NAMESPACE)


def node_address() -> str:
    """Of this machine, by which the others of the cluster reach it."""
    return str(ray.util.get_node_ip_address())


def network_interface() -> str:
    """The one that Ray uses on this machine, by name; empty where none has its address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # one without an address
                found = fcntl.ioctl(asked.fileno(), SIOCGIFADDR, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == node_address():
                    return name
    return ""
