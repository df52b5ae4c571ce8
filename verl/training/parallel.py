"""The processes that train together, as one of them sees them.

Every rank gets the whole batch and works out by itself which rows are its own, so that all agree without a word. What
they exchange is sums: of gradients once an optimizer step, of columns that each filled in part, of flags.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import RanksLostError, VerlError, first_line
from verl.protocol.wire import own_storage

BUCKET_ELEMENTS = 2**23  # of one all-reduce, unless a tensor alone is larger
IN_FLIGHT = 4
_SAID_OF_OTHERS = ("gloo", "NCCL", "Wait timeout")  # in errors that have no class of their own


class PassAbandonedError(Exception):
    """All ranks are leaving a pass through a batch, since one of the others has no memory for it."""


@dataclass(frozen=True)
class Ranks:
    """Alone (``size`` 1), nothing is exchanged and no process group exists.

    Attributes:
        lockstep: forward passes are collectives (sharded weights): all ranks must make the same number of them.
        balance: rows are spread by their tokens; False: in order.
    """

    rank: int = 0
    size: int = 1
    lockstep: bool = False
    balance: bool = True

    def sum_(self, tensors: Sequence[Tensor], what: str) -> None:
        """Add up over all ranks, in place: the same bits on every rank. Several buckets are under way at once.

        Raises:
            RanksLostError: another rank ended, or did not come within the time limit.
        """
        if self.size == 1 or not tensors:
            return
        with self.waiting_for(what):
            under_way: list[tuple[list[Tensor], Tensor, dist.Work]] = []
            for bucket in _buckets(tensors):
                if len(under_way) == IN_FLIGHT:
                    _finish(*under_way.pop(0))
                alone = len(bucket) == 1 and bucket[0].is_contiguous()
                flat = bucket[0].view(-1) if alone else torch.cat([tensor.reshape(-1) for tensor in bucket])
                work = dist.all_reduce(flat, async_op=True)
                assert work is not None
                under_way.append(([] if alone else bucket, flat, work))
            for entry in under_way:
                _finish(*entry)

    def summed(self, values: Sequence[float], what: str) -> list[float]:
        """Of each number, the sum over all ranks, in float64."""
        if self.size == 1:
            return list(values)
        numbers = torch.tensor(values, dtype=torch.float64)
        self.sum_([numbers], what)
        return numbers.tolist()

    def any(self, flag: bool, what: str) -> bool:
        """Whether any rank says so."""
        return self.summed([float(flag)], what)[0] > 0

    def go_on(self, what: str) -> None:
        """Before an exchange in the middle of a pass: every rank says that it is there.

        Raises:
            PassAbandonedError: another has no memory for its micro-batch. It takes part in this word instead of the
                exchange, so that all ranks leave the pass at the same place, whatever came first.
        """
        if self.any(False, what):
            raise PassAbandonedError(what)

    def require_same(self, tensors: Mapping[str, Tensor], what: str) -> None:
        """Compare a checksum of these tensors over all ranks.

        Raises:
            VerlError: they differ.
        """
        if self.size == 1:
            return
        sums = [0.0] * self.size
        sums[self.rank] = float(checksum(tensors))
        found = [int(number) for number in self.summed(sums, f"checksums of {what}")]
        if len(set(found)) > 1:
            error = VerlError(f"{what} differ between training ranks", " ".join(f"{number:08x}" for number in found))
            error.bad_input = False
            raise error

    @contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Raises RanksLostError for what gloo and NCCL raise, for a connection lost and for a time limit alike."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and not any(said in str(error) for said in _SAID_OF_OTHERS):
                raise
            raise RanksLostError(
                f"training rank {self.rank} waited in vain for the others: {what}",
                first_line(error),
                "look for the first rank that ended; if all live, raise cluster.collective_timeout",
            ) from error


ALONE = Ranks()


def join_ranks(ranks: Ranks, rendezvous: str, seconds: float, device: torch.device) -> None:
    """Make the process group of all ranks: gloo, NCCL between GPUs; over the loopback interface, unless the
    environment names another (ranks on several machines).

    Args:
        rendezvous: a file that all ranks can reach; no port is opened to meet.
        seconds: limit of every exchange.

    Raises:
        RanksLostError: not all came.
    """
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    Path(rendezvous).parent.mkdir(mode=0o700, exist_ok=True)
    with ranks.waiting_for("all ranks to start"):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=dist.FileStore(rendezvous, ranks.size),
            rank=ranks.rank,
            world_size=ranks.size,
            timeout=timedelta(seconds=seconds),
        )


def leave_ranks() -> None:
    """End the process group, where there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def checksum(tensors: Mapping[str, Tensor]) -> int:
    """CRC-32 of the bits of all tensors, in their order."""
    found = 0
    for tensor in tensors.values():
        data = own_storage(tensor.detach().cpu().contiguous()).view(-1)
        found = zlib.crc32(data.view(torch.uint8).numpy().data, found)
    return found


def _finish(bucket: list[Tensor], flat: Tensor, work: dist.Work) -> None:
    work.wait()
    sizes = [tensor.numel() for tensor in bucket]
    for tensor, part in zip(bucket, flat.split(sizes) if bucket else (), strict=True):
        tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Consecutive tensors of one dtype and device, up to ``BUCKET_ELEMENTS`` together."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        fits = size + tensor.numel() <= BUCKET_ELEMENTS
        if bucket and not (fits and (tensor.dtype, tensor.device) == (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket
