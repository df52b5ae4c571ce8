"""Parts of roles that are not needed now make room for the role whose turn it is.

Roles of one process compute one after another. A part is what comes and goes together: the weights of a role, or what
its optimizer alone reads. It is moved by its storages, whose bytes go into a store and come back, while all tensors
that look into them stay the objects they are: views, masters, shards of FSDP.

The store is pinned main memory where the part is on a GPU, and else a file without a name in the run's folder, which is
gone when the process is. The file is written and read, not mapped: a full disk is an error then, and no signal.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, Concatenate, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from verl.errors import VerlError

PINNED = 2**26  # bytes of a piece of pinned memory: the allocator rounds up to powers of two

P = ParamSpec("P")
T = TypeVar("T")


class Store(Protocol):
    """Keeps bytes of one part by their place."""

    def write(self, place: int, data: Tensor) -> None: ...
    def read(self, place: int, data: Tensor) -> None: ...


class PinnedMemory:
    """Copies are queued behind what the GPU is computing, and before what it will."""

    def __init__(self) -> None:
        self._pieces: list[Tensor] = []

    def write(self, place: int, data: Tensor) -> None:
        while len(self._pieces) * PINNED < place + len(data):
            self._pieces.append(torch.empty(PINNED, dtype=torch.uint8, pin_memory=torch.cuda.is_available()))
        for kept, part in self._pairs(place, data):
            kept.copy_(part, non_blocking=True)

    def read(self, place: int, data: Tensor) -> None:
        for kept, part in self._pairs(place, data):
            part.copy_(kept, non_blocking=True)

    def _pairs(self, place: int, data: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        done = 0
        while done < len(data):
            number, start = divmod(place + done, PINNED)
            count = min(PINNED - start, len(data) - done)
            yield self._pieces[number][start : start + count], data[done : done + count]
            done += count


class ScratchFile:
    """Args: folder: made if missing.

    Raises:
        VerlError: the disk is full, or nobody may write there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def write(self, place: int, data: Tensor) -> None:
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - as long as this is
            left = _memory(data)
            while left:
                written = os.pwrite(self._file.fileno(), left, place)
                left, place = left[written:], place + written
        except OSError as error:
            raise _trouble("put idle weights away", self._folder, error) from error

    def read(self, place: int, data: Tensor) -> None:
        assert self._file is not None
        left = _memory(data)
        try:
            while left:
                count = os.preadv(self._file.fileno(), [left], place)
                if not count:
                    raise OSError(0, "the file has lost its end")
                left, place = left[count:], place + count
        except OSError as error:
            raise _trouble("read idle weights back", self._folder, error) from error


def _memory(data: Tensor) -> memoryview:
    """Of a CPU's tensor of bytes; numpy would fix the size of its storage."""
    return memoryview((ctypes.c_char * len(data)).from_address(data.data_ptr())).cast("B")


def _trouble(what: str, folder: Path, error: OSError) -> VerlError:
    fix = "free space there, or set param_offload and optimizer_offload of actor, critic, ref and reward.model to false"
    found = VerlError(f"cannot {what}", f"{folder} ({error.strerror})", fix)
    found.bad_input = False
    return found


@dataclass
class Part:
    """What comes and goes together.

    Attributes:
        tensors: that it consists of at present; of one device.
        turns: in which it is needed.
        fixed: nobody changes it, so that it is written once.
        forget: drops what is made from it.
        away: storages that are empty now, with their sizes, in the order of their places in the store.
    """

    tensors: Callable[[], Iterable[Tensor]]
    turns: Collection[str]
    fixed: bool
    forget: Callable[[], None]
    store: Store
    away: list[tuple[Any, int]] = field(default_factory=list)
    written: bool = False

    def put_away(self) -> None:
        if self.away:
            return
        self.forget()
        # One that is not resizable is looked into by an engine of the user's own, through numpy: it stays.
        found = (tensor.untyped_storage() for tensor in self.tensors())
        storages = {storage.data_ptr(): storage for storage in found if storage.size() and storage.resizable()}
        place = 0
        for storage in storages.values() if not (self.fixed and self.written) else ():
            self.store.write(place, _bytes(storage))
            place += storage.size()
        if any(storage.device.type == "cuda" for storage in storages.values()):
            torch.cuda.synchronize()  # streams of FSDP's own, too, have read what goes
        self.written = True
        for storage in storages.values():
            self.away.append((storage, storage.size()))
            storage.resize_(0)

    def bring_back(self) -> None:
        away, self.away, place = self.away, [], 0
        for storage, size in away:
            storage.resize_(size)
            self.store.read(place, _bytes(storage))
            place += size


def _bytes(storage: Any) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Turns:
    """Whose turn it is among the roles of one process.

    A turn has no end but the beginning of the next: what it needed stays while nobody needs the room, as for several
    optimizer steps in a row, or for an answer that still looks into weights.

    Args:
        device: that models compute on.
        folder: for files of what is put away, where that is a CPU.

    Attributes:
        seconds: that moving has taken so far.
    """

    def __init__(self, device: torch.device, folder: Path) -> None:
        self._device, self._folder = device, folder
        self._parts: list[Part] = []
        self.seconds = 0.0

    def share(
        self,
        tensors: Callable[[], Iterable[Tensor]],
        turns: Collection[str],
        fixed: bool = False,
        forget: Callable[[], None] = lambda: None,
    ) -> None:
        """Have a part go at once, and be there in these turns only. See :class:`Part`."""
        for tensor in tensors():
            if not tensor.untyped_storage().resizable():  # it looks into a file, say
                tensor.data = tensor.detach().clone()
        store: Store = PinnedMemory() if self._device.type == "cuda" else ScratchFile(self._folder)
        self._parts.append(Part(tensors, turns, fixed, forget, store))
        self.begin("")

    def begin(self, turn: str) -> None:
        """What this turn does not need goes, and what it needs comes back.

        Raises:
            VerlError: what goes cannot be written.
        """
        going = [part for part in self._parts if turn not in part.turns and not part.away]
        coming = [part for part in self._parts if turn in part.turns and part.away]
        if not going and not coming:
            return
        started = time.perf_counter()
        for part in going:
            part.put_away()
        if any(part.away for part in going):
            _give_memory_back(self._device)
        for part in coming:
            part.bring_back()
        self.seconds += time.perf_counter() - started


class HasTurns(Protocol):
    turns: Turns


def turn_of(turn: str) -> Callable[[Callable[Concatenate[Any, P], T]], Callable[Concatenate[Any, P], T]]:
    """Of a method that computes with what this turn needs."""

    def around(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
        @wraps(method)
        def call(self: HasTurns, *arguments: P.args, **named: P.kwargs) -> T:
            self.turns.begin(turn)
            return method(self, *arguments, **named)

        return call

    return around


def _give_memory_back(device: torch.device) -> None:
    """What allocators keep for later is otherwise no less than before."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)
