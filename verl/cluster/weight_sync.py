"""How the actor's present weights reach rollout workers: the strategies of ``rollout.weight_sync``.

Weights have versions. A worker takes a version between two of its calls, whole or not at all, and an engine that gets
new weights drops what it kept of the old ones.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.errors import DataError, EngineError
from verl.protocol.files import read_safetensors

Weights = Mapping[str, tuple[str, NDArray[np.generic]]]
"""By parameter name its dtype and its bytes as numpy has them (bfloat16 as int16)."""


class WeightSync(Protocol):
    def publish(self, version: int) -> Any:
        """Put the actor's present weights where workers find them; what a worker's ``load_weights`` is given."""
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

    def publish(self, version: int) -> Any:
        return self._export()

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

    def publish(self, version: int) -> str:
        self._folder.mkdir(exist_ok=True)
        self._files[version] = file = self._folder / f"version_{version:06d}.safetensors"
        self._write(str(file))
        return str(file)

    def retire(self, used: set[int]) -> None:
        for version in [version for version in self._files if version < max(used) and version not in used]:
            self._files.pop(version).unlink(missing_ok=True)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


def exported(named: Iterable[tuple[str, Tensor]]) -> Weights:
    """A model's parameters for other processes, each once; not copied where they are in the machine's memory."""
    return {name: (str(p.dtype).removeprefix("torch."), _array(p.detach())) for name, p in named}


def take(parameters: Mapping[str, Tensor], weights: Weights | str) -> None:
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
        tensors = {name: _tensor(*weight) for name, weight in weights.items()}
    if {name: t.shape for name, t in tensors.items()} != {name: p.shape for name, p in parameters.items()}:
        raise EngineError("the published weights are of another model than the rollout worker's")
    for name, parameter in parameters.items():
        # A file is mapped, and goes away.
        parameter.data = tensors[name].to(parameter.device, copy=isinstance(weights, str))


def _array(tensor: Tensor) -> NDArray[np.generic]:
    tensor = tensor.cpu().contiguous()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tensor(dtype: str, array: NDArray[np.generic]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what lies in the object store is read-only, and is only read
        return torch.from_numpy(array).view(getattr(torch, dtype))
