"""The layers of the house (docs/architecture.md) and the rules about libraries, read from the source with ``ast``.

Every import counts: inside functions, under ``TYPE_CHECKING``, relative ones and ``import_module`` with a literal name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

LAYERS = {
    "errors": 0,
    "atomic": 0,
    "json_lines": 0,
    "run_dir": 0,
    "user_code": 0,
    "config": 0,
    "protocol": 0,
    "algorithms": 1,
    "models": 1,
    "data": 1,
    "rewards": 1,
    "rollout": 2,
    "training": 2,
    "checkpoint": 2,
    "cluster": 3,
    "trainer": 4,
    "tracking": 4,
    "diagnostics": 4,
    "cli": 5,
}

# Beyond "downwards only": what a room may not import although its layer allows it.
FORBIDDEN_ROOMS = {
    "algorithms": {"protocol"},
    "rollout": {"training"},
    "training": {"rollout"},
    "checkpoint": {"rollout", "training"},
    "tracking": {"trainer"},
    "diagnostics": {"trainer"},
}

# Files of another room than their folder: verl's launch line, by the name that scripts call it.
ELSEWHERE = {"verl/trainer/main_ppo.py": "cli"}

# Library (a module and all below it) -> the only files that may import it.
ALLOWED_FILES = {
    "ray": ("verl/cluster/*",),
    "torch.distributed": (
        "verl/training/parallel*.py",
        "verl/checkpoint/*",
        "verl/cluster/network.py",
        "verl/cluster/weight_sync.py",
    ),
    # Files and channels of ours carry tensors and JSON, nothing that runs code when it is read.
    "pickle": (),
    "cloudpickle": (),
    "dill": (),
    "joblib": (),
    "marshal": (),
    "shelve": (),
    "multiprocessing": (),  # its connections, queues and managers pickle
    "torch.load": (),
    "torch.save": (),
    "np.load": (),
}

# Files -> libraries that they may not import.
FORBIDDEN_LIBRARIES = {
    "verl/config/*": ("torch", "ray", "transformers"),
    "verl/errors.py": ("torch", "ray", "transformers"),
    "verl/json_lines.py": ("torch", "ray", "transformers"),
    "verl/run_dir.py": ("torch", "ray", "transformers"),
    "verl/rollout/scheduler.py": ("torch",),
}


class Use(NamedTuple):
    """A name of a module (or of something in it) that a file uses, and the line."""

    name: str
    line: int


def uses(tree: ast.AST, package: str) -> Iterator[Use]:
    """All dotted names that code in ``package`` imports, or reaches as an attribute of a plain name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Use(alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            yield from (Use(f"{module}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            name = _dotted(node)
            if name is not None:
                yield Use(name, node.lineno)
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
            if called in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield Use(str(node.args[0].value), node.lineno)


def _dotted(node: ast.expr) -> str | None:
    """``torch.distributed`` of the expression ``torch.distributed``; None if it hangs on anything but a plain name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = _dotted(node.value)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def within(name: str, module: str) -> bool:
    return name == module or name.startswith(module + ".")


def room_of(file: str) -> str | None:
    """The room of a source file given relative to the repository; None for ``verl/__init__.py``, which is lazy."""
    parts = Path(file).with_suffix("").parts
    return None if parts == ("verl", "__init__") else ELSEWHERE.get(file, parts[1])


def violations(file: str, source: str) -> list[str]:
    """One line for every import in ``source`` that the rules forbid in ``file`` ('verl/...')."""
    parts = Path(file).with_suffix("").parts
    found = set()
    for name, line in uses(ast.parse(source), ".".join(parts[:-1])):
        for problem in (_room_problem(file, name), _library_problem(file, name)):
            if problem:
                found.add(f"{file}:{line}: {problem}")
    return sorted(found)


def _room_problem(file: str, name: str) -> str | None:
    room = room_of(file)
    if room is None or not within(name, "verl") or name == "verl":
        return None
    target = name.split(".")[1]
    if target == room or target not in LAYERS:
        # What is no room is a name of the lazy verl/__init__.py; test_every_room_has_a_layer finds new rooms.
        return None
    if LAYERS[target] > LAYERS[room]:
        return f"{room} (layer {LAYERS[room]}) imports {target} (layer {LAYERS[target]}): imports go downwards only"
    if target in FORBIDDEN_ROOMS.get(room, ()):
        return f"{room} may not import {target}"
    return None


def _library_problem(file: str, name: str) -> str | None:
    for library, allowed in ALLOWED_FILES.items():
        if within(name, library) and not any(fnmatch(file, pattern) for pattern in allowed):
            return f"{library} may be used only in {', '.join(allowed) or 'no file'}"
    for pattern, libraries in FORBIDDEN_LIBRARIES.items():
        for library in libraries:
            if fnmatch(file, pattern) and within(name, library):
                return f"{library} may not be used here"
    return None


def sources() -> list[str]:
    return sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "verl").rglob("*.py"))


def test_every_import_keeps_the_layers() -> None:
    files = sources()
    assert "verl/errors.py" in files
    found = [line for file in files for line in violations(file, (ROOT / file).read_text(encoding="utf-8"))]
    assert not found, "\n" + "\n".join(found)


def test_every_room_has_a_layer() -> None:
    rooms = {room for room in map(room_of, sources()) if room is not None}
    assert rooms <= LAYERS.keys(), f"no layer for {sorted(rooms - LAYERS.keys())}: add a row to LAYERS and to the docs"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("verl/models/a.py", "import verl.training.worker"),
        ("verl/models/a.py", "from verl import trainer"),
        ("verl/models/a.py", "def f():\n    from verl.rollout.engine import Engine"),
        ("verl/models/a.py", "if TYPE_CHECKING:\n    from verl.cluster.pool import Pool"),
        ("verl/models/deep/a.py", "from ...trainer import stages"),
        ("verl/models/a.py", "from ..trainer.stages import rollout"),
        ("verl/models/a.py", "importlib.import_module('verl.cli')"),
        ("verl/config/a.py", "from verl.data import readers"),
        ("verl/config/__init__.py", "from ..data import readers"),
        ("verl/run_dir.py", "from .data import readers"),
        ("verl/algorithms/kl.py", "from verl.protocol import DataProto"),
        ("verl/rollout/a.py", "from verl.training.actor import Actor"),
        ("verl/training/a.py", "import verl.rollout"),
        ("verl/checkpoint/a.py", "from verl.training import optim"),
        ("verl/tracking/a.py", "from verl.trainer.loop import fit"),
        ("verl/trainer/a.py", "from verl.cli import main"),
        ("verl/trainer/a.py", "import ray"),
        ("verl/rollout/a.py", "def f():\n    import ray.util as u"),
        ("verl/training/actor.py", "import torch.distributed as dist"),
        ("verl/training/actor.py", "from torch import distributed"),
        ("verl/training/actor.py", "from torch.distributed.tensor import DTensor"),
        ("verl/training/actor.py", "import torch\ntorch.distributed.barrier()"),
        ("verl/cluster/pools.py", "import torch.distributed"),
        ("verl/config/a.py", "import torch"),
        ("verl/config/a.py", "def f():\n    from transformers import AutoConfig"),
        ("verl/config/a.py", "__import__('ray')"),
        ("verl/rollout/scheduler.py", "from torch import Tensor"),
        ("verl/checkpoint/a.py", "import pickle"),
        ("verl/checkpoint/a.py", "from pickle import loads"),
        ("verl/checkpoint/a.py", "import torch\ntorch.load('x')"),
        ("verl/cluster/a.py", "import cloudpickle"),
        ("verl/rewards/a.py", "from multiprocessing.connection import Connection"),
        ("verl/rewards/a.py", "import multiprocessing as mp"),
    ],
)
def test_the_checker_sees(file: str, source: str) -> None:
    assert len(violations(file, source)) == 1


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("verl/cluster/a.py", "import ray\nfrom ray.util import placement_group"),
        ("verl/training/parallel_fsdp.py", "import torch.distributed as dist"),
        ("verl/checkpoint/sharded.py", "import torch.distributed"),
        ("verl/cluster/weight_sync.py", "from torch import distributed"),
        ("verl/algorithms/a.py", "from verl.config.schema import Config\nimport torch"),
        ("verl/trainer/a.py", "from verl.rollout import a\nfrom verl.training import b\nfrom verl.tracking import c"),
        ("verl/models/a.py", "from verl.models.b import f\nfrom . import b\nfrom .b import g\nfrom ..errors import E"),
        ("verl/models/a.py", "import array\nimport torchvision\nfrom verl import __version__"),
        ("verl/__init__.py", "from verl.protocol import DataProto"),
        ("verl/cli/train.py", "from verl.trainer import loop\nfrom verl.config import load_config"),
    ],
)
def test_the_checker_lets_pass(file: str, source: str) -> None:
    assert violations(file, source) == []
