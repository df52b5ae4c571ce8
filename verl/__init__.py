"""VeRL: reinforcement learning for large language models, from a laptop to a cluster."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.protocol import DataProto as DataProto

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    # Resolved on use: ``import verl`` loads neither torch nor ray.
    if name == "DataProto":
        from verl.protocol import DataProto

        return DataProto
    raise AttributeError(f"module 'verl' has no attribute {name!r}")
