"""Tiny models in full precision, shared by the tests of an optimizer step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from step_cases import Policies, load

from verl.models.tiny import build_tiny


@pytest.fixture(scope="session")
def small_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer model of width 32 with grouped key-value heads and an output projection of its own."""
    return build_tiny(tmp_path_factory.mktemp("small"), seed=3, hidden_size=32, tie_embeddings=False)


@pytest.fixture(scope="session")
def float64(small_dir: Path) -> Policies:
    return load(small_dir, torch.float64)


@pytest.fixture(scope="session")
def float32(small_dir: Path) -> Policies:
    return load(small_dir, torch.float32)
