"""VeRL: reinforcement learning for large language models, from a laptop to a cluster."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.config import load_config as load_config
    from verl.protocol import DataProto as DataProto
    from verl.trainer.api import Trainer as Trainer

__version__ = "0.1.0"

_LAZY = {"DataProto": "verl.protocol", "Trainer": "verl.trainer.api", "load_config": "verl.config"}


def __getattr__(name: str) -> object:
    # Resolved on use: ``import verl`` loads neither torch nor ray.
    if name not in _LAZY:
        raise AttributeError(f"module 'verl' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_LAZY]
