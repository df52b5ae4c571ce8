"""Commands called in this process."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty folder to stand in; threads and the reaction to SIGTERM stay those of the tests."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr("verl.cluster.threads.set_environment", lambda threads: None)
    monkeypatch.chdir(tmp_path)
    yield
    signal.signal(signal.SIGTERM, before)
