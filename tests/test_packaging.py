"""Set-up files agree with each other and name no place."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from pathlib import Path

import yaml

import verl

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


def test_the_version_stands_in_the_package_and_the_papers_follow() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "verl.__version__"}
    newest = re.search(r"^## \[(\S+)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert newest and newest[1] == verl.__version__
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    assert citation["version"] == verl.__version__ and citation["license"] == PROJECT["project"]["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(citation)


def test_size_counts_every_line_by_package() -> None:
    done = subprocess.run(["make", "-s", "size"], cwd=ROOT, capture_output=True, text=True, check=True)
    sizes = {name: int(lines) for lines, name in map(str.split, done.stdout.splitlines())}
    counted = {path: path.read_bytes().count(b"\n") for path in (ROOT / "verl").rglob("*.py")}
    cli = ROOT / "verl" / "cli"
    assert sizes["verl/cli"] == sum(lines for path, lines in counted.items() if cli in path.parents)
    assert sizes.pop("all") == sum(sizes.values()) == sum(counted.values())


def test_files_beside_the_code_are_shipped() -> None:
    """Presets, and the report's page."""
    package = ROOT / "verl"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["verl"]
    shipped = {path for pattern in patterns for path in package.glob(pattern)}
    beside = {path for path in package.rglob("*.*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert {package / "py.typed", package / "config" / "presets" / "grpo.yaml"} <= shipped and beside - shipped == set()


def test_ci_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
