"""The C code beside this file, compiled once by the machine's compiler and looked at before it is trusted.

It is written for CPUs with instructions for bfloat16: AMX, or those of AVX-512. Where there are none, where there is no
compiler, or where a probe finds one bit that differs from torch's operators, the engine stays with these.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import stat
import subprocess
import tempfile
from functools import lru_cache
from itertools import product
from pathlib import Path

import torch
from torch import Tensor

from verl.models.model_cache import cache_root
from verl.models.rows import PROOF, RowRule, linear_rows, packed_weight, telling_rows, telling_weight

HERE = Path(__file__).parent
SOURCES = ("decode.c", "head.c", "train.c")
FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fopenmp", "-shared", "-fPIC")
BUILD_SECONDS = 120
MULTIPLE = 32  # of all sizes
WIDTHS = 32, 64  # of oneDNN's layouts
PARTS = range(1, 9)  # as many of one size may it cut the inputs of a product into,
CHUNKS = 256, 512, 1024, 2048  # or into parts of this size
PROBE_ROWS = 64


class Unavailable(Exception):
    """Why the engine stays with torch's operators."""


class Product(ctypes.Structure):
    """How oneDNN computes with weights of one shape; see ``numbers.h``."""

    _fields_ = (("width", ctypes.c_int64), ("chunk", ctypes.c_int64))


@lru_cache(maxsize=1)
def library() -> ctypes.CDLL:
    """The compiled code.

    Raises:
        Unavailable: there is no compiler, or the CPU has no instructions for bfloat16.
    """
    if os.environ.get("VERL_NATIVE") == "0":
        raise Unavailable("VERL_NATIVE=0")
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        raise Unavailable("it is written for Linux on x86") from None
    if "avx512_bf16" not in flags.split() or torch.backends.cpu.get_cpu_capability() != "AVX512":
        raise Unavailable("the CPU has no AVX-512 for bfloat16, or torch does not use it")
    digest = hashlib.sha256(repr((FLAGS, flags)).encode())
    for source in sorted(HERE.glob("*.[ch]")):
        digest.update(source.read_bytes())
    try:
        folder = cache_root() / "native"
        path = folder / f"{digest.hexdigest()[:20]}.so"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise Unavailable(f"others may write into {folder}")
        if not path.exists():
            _compile(path)
        try:
            loaded = ctypes.CDLL(str(path))
        except OSError:  # what was kept has lost its end
            _compile(path)
            loaded = ctypes.CDLL(str(path))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home
        raise Unavailable(f"the compiled code could not be kept or loaded: {error}") from error
    if not loaded.may_use_tiles():
        raise Unavailable("the system does not let this process use AMX")
    return loaded


def _compile(path: Path) -> None:
    compiler = shutil.which("gcc") or shutil.which("cc")  # torch brings the OpenMP of gcc
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc or cc)")
    handle, made = tempfile.mkstemp(suffix=".so", dir=path.parent)
    os.close(handle)
    try:
        command = [compiler, *FLAGS, "-o", made, *(str(HERE / source) for source in SOURCES), "-lm"]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS)
        if done.returncode:
            raise Unavailable(f"{compiler} failed: {done.stderr.strip()[:200]}")
        with open(made, "rb") as file:
            os.fsync(file.fileno())  # or a power cut could leave the name without its content
        os.replace(made, path)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{compiler} took more than {BUILD_SECONDS} s") from None
    finally:
        Path(made).unlink(missing_ok=True)


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def laid_out(weight: Tensor, rule: RowRule) -> tuple[Tensor, int]:
    """The weight in oneDNN's layout, and where that lies."""
    packed = packed_weight(weight, rule)
    return packed, torch.ops.mkldnn.data_ptr(packed)


class Space:
    """Memory that is kept from call to call."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}

    def take(self, name: str, count: int, dtype: torch.dtype) -> Tensor:
        kept = self._kept.get(name)
        if kept is None or kept.numel() < count:
            kept = self._kept[name] = torch.zeros(count, dtype=dtype)
        return kept


def find_product(shape: torch.Size, rule: RowRule) -> Product:
    """How oneDNN computes with weights (O, I) of this shape in bfloat16.

    Raises:
        Unavailable: in no way that ``numbers.h`` knows.
    """
    outputs, inputs = shape
    if outputs % MULTIPLE or inputs % MULTIPLE:
        raise Unavailable(f"its sizes are not multiples of {MULTIPLE}")
    rows = -(-PROOF // outputs // PROBE_ROWS) * PROBE_ROWS
    weight = telling_weight(shape, torch.bfloat16)
    x = telling_rows(weight, rows)
    expected = linear_rows(x, weight, None, rule)
    out = torch.empty_like(expected)
    packed, place = laid_out(weight, rule)
    numbers = torch.ops.mkldnn._nbytes(packed) // weight.itemsize
    sizes = [ctypes.c_int64(size) for size in (rows, inputs, outputs)]
    chunks = [-(-inputs // MULTIPLE // count) * MULTIPLE for count in PARTS] + [x for x in CHUNKS if x < inputs]
    for width, chunk in product(WIDTHS, dict.fromkeys(chunks)):
        how = Product(width, chunk)
        if -(-outputs // width) * width * inputs <= numbers:  # the last outputs are filled up
            library().one_linear(address(x), ctypes.c_void_p(place), None, address(out), *sizes, how)
            if torch.equal(out, expected):
                return how
    raise Unavailable("oneDNN adds up a product in an order of its own")
