"""Fixtures and settings of all tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before torch is imported by anything: its thread pools are sized once. Two threads on purpose, not one: results must
# not depend on it, and work that is split differs from work that is not.
THREADS = "2"
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_name, THREADS)
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# As the workers, so that rows of float32 matmuls keep their bits; on CPUs of others than Intel MKL has no strict mode.
_cpu = Path("/proc/cpuinfo")
_intel = not _cpu.exists() or "GenuineIntel" in _cpu.read_text()
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT" if _intel else "COMPATIBLE")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads crawl on a machine that others use too
# No test asks the hub: what is not on this machine fails at once and the same everywhere.
os.environ["HF_HUB_OFFLINE"] = "1"

# What a shell starts in the background ignores Ctrl-C, and so would the commands under test.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("default"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random two-layer Llama with a byte tokenizer (seed 0)."""
    from verl.models.tiny import build_tiny

    return build_tiny(tmp_path_factory.mktemp("models") / "tiny-llama")


@pytest.fixture(scope="session")
def smollm_dir() -> Path:
    """Folder of SmolLM2-135M-Instruct in the user's cache; downloads and converts it once."""
    from verl.models.smollm import ModelDownloadError, get_smollm

    try:
        return get_smollm()
    except ModelDownloadError as error:
        pytest.skip(f"SmolLM2 is neither cached nor to be had here: {error.what}")
