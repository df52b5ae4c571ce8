"""What a bare import costs: the heavy libraries stay out until something needs them."""

from __future__ import annotations

import importlib
import importlib.util
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "ray", "transformers", "tensordict", "pyarrow", "numpy"]


def run(code: str) -> str:
    """Standard output of ``code`` in a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded_after(code: str) -> set[str]:
    """Top-level names in ``sys.modules`` after ``code`` ran in a fresh interpreter."""
    tail = "import json, sys; print('\\n' + json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    return set(json.loads(run(f"{code}\n{tail}").splitlines()[-1]))


def test_a_heavy_import_would_be_seen() -> None:
    assert "numpy" in loaded_after("import numpy")


def test_import_verl_is_cheap() -> None:
    assert not loaded_after("import verl") & {*HEAVY, "pydantic", "yaml"}


def test_the_data_container_resolves_on_use() -> None:
    assert "torch" in loaded_after("import verl; verl.DataProto")


def test_config_loads_neither_torch_nor_ray() -> None:
    names = loaded_after("import verl.config.schema, verl.config, pkgutil, importlib\n" + _import_all("verl.config"))
    assert "pydantic" in names
    assert not names & {"torch", "ray", "transformers"}


def test_watching_a_run_needs_none_of_the_heavy_libraries() -> None:
    assert not loaded_after("import verl.tracking.watch, verl.diagnostics.doctor") & set(HEAVY)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_is_cheap(arguments: list[str]) -> None:
    code = (
        f"import sys; sys.argv = ['verl', *{arguments!r}]\n"
        "from verl.cli import main\n"
        "try: code = main()\n"
        "except SystemExit as stop: code = stop.code\n"
        "assert not code, code"
    )
    assert not loaded_after(code) & {"torch", "ray", "transformers"}


def test_every_module_imports() -> None:
    """A module that no test touches still has to load."""
    import verl

    for module in pkgutil.walk_packages(verl.__path__, "verl."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _import_all(package: str) -> str:
    return (
        f"for module in pkgutil.walk_packages({package}.__path__, '{package}.'):\n"
        "    importlib.import_module(module.name)"
    )
