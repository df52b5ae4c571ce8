"""Set-up files agree with each other and name no place."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PINS = [
    line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if not line.startswith("#")
]


def canonical(requirement: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", requirement, maxsplit=1)[0]).lower()


def test_constraints_are_plain_pins() -> None:
    assert [line for line in PINS if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    assert "torch==2.13.0" in PINS


def test_every_requirement_is_pinned() -> None:
    project, build = PROJECT["project"], PROJECT["build-system"]["requires"]
    wanted = {canonical(r) for group in project["optional-dependencies"].values() for r in group}
    wanted |= {canonical(r) for r in [*project["dependencies"], *build]}
    assert wanted - {canonical(pin) for pin in PINS} == set()


def test_version_is_that_of_the_package() -> None:
    import verl

    assert PROJECT["project"]["version"] == verl.__version__


def test_files_beside_the_code_are_shipped() -> None:
    """Presets, and the report's page."""
    package = ROOT / "verl"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["verl"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    beside = {path for path in package.rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert package / "config" / "presets" / "grpo.yaml" in shipped and beside - shipped == set()


def test_ci_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
