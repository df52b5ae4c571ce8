"""Trees of plain values, tensors and arrays as JSON plus named tensors. Used by data files and checkpoints.

JSON as it is: None, bool, int, finite float, str, list, and dict with str keys of which none begins
with "$". Everything else is a dict with one key:

    {"$float": "nan" | "inf" | "-inf"}
    {"$tuple": [...]}
    {"$dict": [[key, value], ...]}                     other keys (scalars or tuples of them)
    {"$tensor": [name, dtype, shape]}                  the tensor ``name`` beside the JSON
    {"$array": [name, dtype, shape]}                   numeric numpy array, likewise
    {"$objects": [shape, items]}                       numpy array of objects, row by row
    {"$strings": [dtype, shape, items]}                numpy array of fixed-width text
    {"$number": [dtype, value]}                        numpy scalar
    {"$bytes": base64}

Subclasses (OrderedDict, named tuples, IntEnum) come back as what they are built on. Anything else
(classes, functions, sets, dates) is refused by its path in the tree. Nothing here runs code.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from verl.errors import DataError
from verl.protocol.columns import object_array
from verl.protocol.wire import tensor_over

Tree = Any
"""None, bool, int, float, str, bytes, torch.Tensor, numpy array or scalar, or list, tuple, dict of trees."""

_PLAIN = {str, int, bool, type(None)}
_MAX_TEXT_BYTES = 1 << 30  # of an array of fixed-width text, whose width a few bytes could make anything
_MAX_INT_DIGITS = 4000  # beyond, Python refuses to read the number back from text


def encode(tree: Tree) -> tuple[Any, dict[str, torch.Tensor]]:
    """JSON value and named tensors (not copied) of a tree. Raises DataError: something in the tree cannot be encoded;
    its path and type are named."""
    encoder = _Encoder()
    try:
        return encoder.encode(tree, ""), encoder.tensors
    except RecursionError as error:
        raise DataError("a value is nested too deeply to be saved, or contains itself") from error


def decode(value: Any, tensors: Mapping[str, torch.Tensor]) -> Tree:
    """Inverse of ``encode``. Raises DataError: the JSON is not of this encoding, or a tensor is missing or of another
    kind."""
    try:
        return _Decoder(tensors).decode(value)
    except DataError:
        raise
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, RuntimeError) as error:
        raise DataError("the JSON part does not follow VeRL's encoding", f"{type(error).__name__}: {error}") from error


def to_json_bytes(value: Any, indent: int | None = None) -> bytes:
    """Strict JSON (no NaN) in ASCII, so that lone surrogates survive."""
    return json.dumps(value, ensure_ascii=True, allow_nan=False, indent=indent).encode("ascii")


def from_json_bytes(data: bytes) -> Any:
    """Raises ValueError (also for NaN and for bytes that are not text) and RecursionError."""

    def refuse(text: str) -> Any:
        raise ValueError(f"{text} is not JSON")

    return json.loads(data.decode("ascii"), parse_constant=refuse)


class _Encoder:
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            if kind is int and value.bit_length() > _MAX_INT_DIGITS * 3:
                raise DataError(f"'{path}' is an integer too long to be saved", f"{value.bit_length()} bits")
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            tensor = _dense(value, path)
            return {"$tensor": [self._name(path, tensor), _dtype_name(tensor), list(tensor.shape)]}
        if isinstance(value, (np.ndarray, np.generic)) and not isinstance(value, str):
            return self._numpy(value, path)
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, (list, tuple)):
            items = self._items(value, path)
            return {"$tuple": items} if isinstance(value, tuple) else items
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        for base, make in ((str, str.__str__), (int, int), (float, float)):
            if isinstance(value, base):
                return self.encode(make(value), path)
        raise DataError(
            f"'{path or 'the value'}' holds a {kind.__module__}.{kind.__qualname__}, which cannot be saved",
            fix="save numbers, strings, lists, tuples, dicts, numpy arrays or tensors instead",
        )

    def _items(self, values: list | tuple, path: str) -> list[Any]:
        kinds = set(map(type, values))
        if kinds <= _PLAIN and (int not in kinds or _small_ints(values)):
            return list(values)  # token ids: no call per entry
        return [self.encode(item, f"{path}/{row}") for row, item in enumerate(values)]

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(type(key) is str and not key.startswith("$") for key in value):
            return {key: self.encode(item, f"{path}/{key}" if path else key) for key, item in value.items()}
        pairs = [
            [self.encode(key, f"{path} (a key)"), self.encode(item, f"{path}/{key}" if path else str(key))]
            for key, item in value.items()
        ]
        return {"$dict": pairs}

    def _numpy(self, value: np.ndarray | np.generic, path: str) -> Any:
        if value.dtype.kind in "OU" and isinstance(value, np.ndarray):
            items = self._items(value.ravel().tolist(), path)
            if value.dtype.kind == "O":
                return {"$objects": [list(value.shape), items]}
            return {"$strings": [value.dtype.str, list(value.shape), items]}
        native = value.dtype.newbyteorder("=")
        try:
            tensor = tensor_over(np.asarray(value, dtype=native, order="C"))
        except (TypeError, ValueError):
            tensor = None
        if tensor is None or tensor.dtype not in DTYPE_CODES:
            raise DataError(f"'{path}' is a numpy value of a kind that cannot be saved", str(value.dtype))
        if isinstance(value, np.generic) and native.kind != "c":
            return {"$number": [native.name, self.encode(value.item(), path)]}
        return {"$array": [self._name(path, tensor), native.name, list(value.shape)]}

    def _name(self, path: str, tensor: torch.Tensor) -> str:
        base = name = path if path and path != "__metadata__" else f"{path}/"
        copy = 1
        while name in self.tensors:
            copy += 1
            name = f"{base}#{copy}"
        self.tensors[name] = tensor
        return name


class _Decoder:
    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.tensors = tensors
        self.tags: dict[str, Callable[[Any], Any]] = {
            "$float": lambda text: {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[text],
            "$tuple": lambda items: tuple(self._list(items)),
            "$dict": lambda pairs: {self.decode(key): self.decode(item) for key, item in pairs},
            "$tensor": self._tensor,
            "$array": lambda spec: self._tensor(spec).numpy(),
            "$objects": lambda spec: object_array(self._list(spec[1])).reshape(spec[0]),
            "$strings": self._strings,
            "$number": lambda spec: _numeric_dtype(spec[0]).type(self.decode(spec[1])),
            "$bytes": lambda text: base64.b64decode(text, validate=True),
        }

    def decode(self, value: Any) -> Any:
        if isinstance(value, list):
            return self._list(value)
        if not isinstance(value, dict):
            return value
        tags = [key for key in value if key.startswith("$")]
        if not tags:
            return {key: self.decode(item) for key, item in value.items()}
        if len(value) != 1 or tags[0] not in self.tags:
            raise DataError("the JSON part has an unknown kind of value", tags)
        return self.tags[tags[0]](value[tags[0]])

    def _list(self, values: Any) -> list[Any]:
        if not isinstance(values, list):
            raise DataError("the JSON part does not follow VeRL's encoding", type(values).__name__)
        if not {list, dict} & set(map(type, values)):
            return values
        return [self.decode(item) for item in values]

    def _tensor(self, spec: Any) -> torch.Tensor:
        name, dtype, shape = spec
        if name not in self.tensors:
            raise DataError(f"the tensor '{name}' is missing")
        tensor = self.tensors[name]
        if _dtype_name(tensor) != dtype or list(tensor.shape) != shape:
            found = f"{_dtype_name(tensor)} {list(tensor.shape)}"
            raise DataError(f"the tensor '{name}' is not what the JSON part says", f"{found}, not {dtype} {shape}")
        return tensor

    def _strings(self, spec: Any) -> np.ndarray:
        dtype, shape, items = spec
        if np.dtype(dtype).kind != "U" or np.dtype(dtype).itemsize * len(items) > _MAX_TEXT_BYTES:
            raise DataError("the JSON part does not follow VeRL's encoding", dtype)
        return np.array(items, dtype=dtype).reshape(shape)


def _small_ints(values: list | tuple) -> bool:
    numbers = [value for value in values if type(value) is int]
    return max(numbers).bit_length() < 64 and min(numbers).bit_length() < 64


def _numeric_dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.kind not in "biuf":
        raise DataError("the JSON part does not follow VeRL's encoding", name)
    return dtype


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _dense(tensor: torch.Tensor, path: str) -> torch.Tensor:
    plain = tensor.detach()
    odd = plain.layout is not torch.strided or plain.is_quantized or plain.is_nested
    if odd or plain.dtype not in DTYPE_CODES:
        raise DataError(f"'{path}' is a tensor of a kind that cannot be saved", f"{plain.layout} {plain.dtype}")
    return plain


_DTYPES = (
    "float64 F64, float32 F32, float16 F16, bfloat16 BF16, float8_e4m3fn F8_E4M3, float8_e5m2 F8_E5M2, complex64 C64, "
    "int64 I64, int32 I32, int16 I16, int8 I8, uint64 U64, uint32 U32, uint16 U16, uint8 U8, bool BOOL"
)
# Names of dtypes in safetensors headers; a dtype that is not here cannot be saved.
DTYPE_CODES: dict[torch.dtype, str] = {
    getattr(torch, name): code for name, code in (pair.split() for pair in _DTYPES.split(", "))
}
