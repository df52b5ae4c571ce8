"""How the actor's present weights reach rollout workers: the strategies of ``rollout.weight_sync``.

Weights have versions. A worker takes a version between two of its calls, whole or not at all, and an engine that gets
new weights drops what it kept of the old ones.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from verl.errors import DataError, EngineError, first_line
from verl.protocol.files import read_safetensors
from verl.protocol.wire import own_storage

WEIGHTS = "weights"  # Ray's concurrency group for what is sent and received while a process computes
BUCKET_BYTES = 2**28  # of one broadcast, unless a tensor alone is larger
ALIGNMENT = 64  # bytes, of each tensor in a bucket
MEET_SECONDS = 30.0  # for those who have just said that they are there

Weights = Mapping[str, tuple[str, NDArray[np.generic]]]
"""By parameter name its dtype and its bytes as numpy has them (bfloat16 as int16)."""

Workers = Callable[..., Callable[[], dict[str, Any]]]
"""Has all rollout workers that are ready do something beside whatever they compute. Calling what it returns waits for
their answers by name; a worker that is lost meanwhile has none."""


class WeightSync(Protocol):
    def publish(self, version: int, workers: Workers) -> None:
        """Make the actor's present weights those that :meth:`reference` is of."""
        ...

    def reference(self, worker: str) -> Any:
        """What this worker's ``load_weights`` is given."""
        ...

    def retire(self, used: set[int]) -> None:
        """Older versions than the newest of these are needed by nobody any more, unless they are among them."""
        ...

    def close(self) -> None: ...


class SharedMemory:
    """In Ray's object store: once on the actor's machine, mapped by all its workers; other machines get a copy each.

    Args:
        export: puts :func:`exported` weights there and returns the reference.
    """

    def __init__(self, export: Callable[[], Any]) -> None:
        self._export = export

    def publish(self, version: int, workers: Workers) -> None:
        self._reference = self._export()

    def reference(self, worker: str) -> Any:
        return self._reference

    def retire(self, used: set[int]) -> None:
        """What nobody refers to any more leaves the store by itself."""

    def close(self) -> None:
        pass


class Disk:
    """A file for each version in a folder that all machines share: there when it is whole, and read by each worker.

    Args:
        write: writes the weights into a file, atomically.
        folder: made by the first version; what an earlier run left there is removed.
    """

    def __init__(self, write: Callable[[str], None], folder: Path) -> None:
        self._write, self._folder = write, folder.absolute()  # workers may stand in another folder
        self._files: dict[int, Path] = {}
        self.close()

    def publish(self, version: int, workers: Workers) -> None:
        self._folder.mkdir(exist_ok=True)
        self._files[version] = file = self._folder / f"version_{version:06d}.safetensors"
        self._write(str(file))

    def reference(self, worker: str) -> str:
        return str(self._files[max(self._files)])

    def retire(self, used: set[int]) -> None:
        for version in [version for version in self._files if version < max(used) and version not in used]:
            self._files.pop(version).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


@dataclass(frozen=True)
class Meeting:
    """Of the actor's first process, which sends and is rank 0, and the workers that receive.

    Attributes:
        name: under which they find each other. Another one for every group.
        workers: by name, in the order of their ranks.
        seconds: most that a broadcast may take.
        nccl: all of them compute on GPUs; else they exchange main memory by gloo.
        local: all are on one machine, and exchange over its loopback interface; else from the addresses that Ray uses.
    """

    name: str
    workers: tuple[str, ...]
    seconds: float
    nccl: bool
    local: bool


class Broadcast:
    """Straight from the actor's first process to the workers that are ready, beside whatever they compute. Those who
    come later, and those whom it did not reach, get the same version as from :class:`SharedMemory`.

    Args:
        send: sends to those who meet there, and says what went wrong, if anything.
        export: puts what was sent last into the object store and returns the reference.
        meeting: of a name and workers.
        forget: takes away what they left where they met under that name.
        log: of events.
    """

    def __init__(
        self,
        send: Callable[[Meeting], str],
        export: Callable[[], Any],
        meeting: Callable[[str, tuple[str, ...]], Meeting],
        forget: Callable[[str], None],
        log: Callable[[str, str, str], None],
    ) -> None:
        self._send, self._export, self._meeting_of, self._forget, self._log = send, export, meeting, forget, log
        self._meeting: Meeting | None = None
        self._received: set[str] = set()
        self._exported: Any = None

    def publish(self, version: int, workers: Workers) -> None:
        there = tuple(sorted(workers("ready")()))  # who is dead is not waited for; whoever answered first
        new = self._meeting is None or there != self._meeting.workers
        meeting = self._meeting_of(f"broadcast-{secrets.token_hex(8)}", there) if new else self._meeting
        assert meeting is not None
        self._meeting = meeting
        answered = workers("receive", version, meeting)
        missed = {"actor": self._send(meeting)} | dict.fromkeys(there, "it was lost") | answered()
        if new:
            self._forget(meeting.name)
        self._received = {name for name in there if not missed[name]}
        self._exported = None
        told = "; ".join(f"{name}: {missed[name]}" for name in ("actor", *there) if missed[name])
        if told:
            self._meeting = None  # they meet anew for the next version
            self._log("missed", f"weights {version}", f"{told}. Who lives gets them from the object store")

    def reference(self, worker: str) -> Any:
        if worker in self._received:
            return None
        if self._exported is None:
            self._exported = self._export()
        return self._exported

    def retire(self, used: set[int]) -> None:
        """Who sends and who receives let go of a version when they have the next."""

    def close(self) -> None:
        pass


def _over_ray(name: str, seconds: float) -> dist.Store:
    from verl.cluster.network import RayStore  # not where all is in one process

    return RayStore(name, seconds)


class Participant:
    """A process's part in broadcasts. It stays connected as long as the meeting is the same and all goes well.

    Args:
        store: of a meeting's name and a limit in seconds, over which they find each other.
    """

    def __init__(self, store: Callable[[str, float], dist.Store] = _over_ray) -> None:
        self._store_of = store
        self._store: dist.Store | None = None
        self._meeting: Meeting | None = None
        self._group: Any = None

    def exchange(self, named: Mapping[str, Tensor], rank: int, meeting: Meeting) -> tuple[dict[str, Tensor], str]:
        """Send these tensors (rank 0), or receive such.

        Returns:
            Copies of what is sent, or what was received, a few large buffers together; and what went wrong, if
            anything, with the limit and what was waited for.
        """
        buckets, copies = _buckets(named, torch.device("cuda" if meeting.nccl else "cpu"))
        if rank == 0:
            for name, copy in copies.items():
                copy.copy_(named[name])
        end = time.monotonic() + meeting.seconds
        doing = f"to meet, {min(MEET_SECONDS, meeting.seconds):g} s"
        try:
            if meeting.workers and meeting != self._meeting:
                self._group = None
                self._store = self._store_of(meeting.name, min(MEET_SECONDS, meeting.seconds))
                self._group, self._meeting = _met(rank, meeting, self._store), meeting
            for number, bucket in enumerate(buckets if meeting.workers else (), 1):
                doing = f"with part {number} of {len(buckets)}, {meeting.seconds:g} s (rollout.worker_timeout)"
                options = dist.BroadcastOptions()
                options.rootRank, options.timeout = 0, timedelta(seconds=max(end - time.monotonic(), 0.001))
                self._group.broadcast([bucket], options).wait()
        except RuntimeError as error:
            self._group = self._meeting = None  # which the others notice
            return copies, f"waited for the others {doing} at most: {first_line(error)}"
        return copies, ""


def _met(rank: int, meeting: Meeting, store: Any) -> Any:
    size = len(meeting.workers) + 1
    if meeting.nccl:
        from verl.cluster.network import network_interface

        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo" if meeting.local else network_interface())
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # its errors and limits are raised here, and end no process
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=meeting.seconds)
        return dist.ProcessGroupNCCL(store, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = timedelta(seconds=min(MEET_SECONDS, meeting.seconds))
    options._devices = [dist.ProcessGroupGloo.create_device(**_own_address(meeting))]
    return dist.ProcessGroupGloo(store, rank, size, options)


def _own_address(meeting: Meeting) -> dict[str, str]:
    """Where the others reach this process, as gloo is told."""
    if meeting.local:
        return {"interface": "lo"}
    from verl.cluster.network import node_address

    wish = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    # The loopback interface is not the user's wish, but that of ranks on one machine. An interface may have addresses
    # that the others do not reach; Ray's they do.
    return {"interface": wish} if wish != "lo" else {"hostname": node_address()}


def _buckets(named: Mapping[str, Tensor], device: torch.device) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Buffers that hold such tensors together, in the order of their names, and the place of each as a tensor."""
    sizes: list[int] = []
    places: dict[str, tuple[int, int]] = {}
    for name in sorted(named):
        size = -(-named[name].nbytes // ALIGNMENT) * ALIGNMENT
        if not sizes or sizes[-1] + size > BUCKET_BYTES:
            sizes.append(0)
        places[name] = len(sizes) - 1, sizes[-1]
        sizes[-1] += size
    buckets = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    tensors = {
        name: buckets[number][start : start + named[name].nbytes].view(named[name].dtype).view(named[name].shape)
        for name, (number, start) in places.items()
    }
    return buckets, tensors


def exported(named: Iterable[tuple[str, Tensor]]) -> Weights:
    """A model's parameters for other processes, each once; not copied where they are in the machine's memory."""
    return {name: (str(p.dtype).removeprefix("torch."), _array(p.detach())) for name, p in named}


def take(parameters: Mapping[str, Tensor], weights: Weights | Mapping[str, Tensor] | str) -> None:
    """Give parameters these weights: where they are, if they are in the machine's memory; a copy of a file's.

    Raises:
        EngineError: they are of another model, or there is no such file.
    """
    if isinstance(weights, str):
        try:
            tensors = read_safetensors(Path(weights))[0]
        except DataError as error:
            fix = (
                "the run's folder must be on storage that all machines share, or set rollout.weight_sync=shared_memory"
            )
            raise EngineError(
                f"a rollout worker cannot read the published weights: {error.what}", weights, fix
            ) from error
    else:
        tensors = {name: w if isinstance(w, Tensor) else _tensor(*w) for name, w in weights.items()}
    if {name: t.shape for name, t in tensors.items()} != {name: p.shape for name, p in parameters.items()}:
        raise EngineError("the published weights are of another model than the rollout worker's")
    for name, parameter in parameters.items():
        # A file is mapped, and goes away.
        parameter.data = tensors[name].to(parameter.device, copy=isinstance(weights, str))


def _array(tensor: Tensor) -> NDArray[np.generic]:
    tensor = own_storage(tensor.cpu().contiguous())
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tensor(dtype: str, array: NDArray[np.generic]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what lies in the object store is read-only, and is only read
        return torch.from_numpy(array).view(getattr(torch, dtype))
