"""Set-up files agree with each other and name no place."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
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


@pytest.mark.drill
def test_the_wheel_trains_the_tiny_example(tmp_path: Path) -> None:
    """From another folder, without the sources: what the wheel holds is enough."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    shutil.copytree(ROOT / "verl", tmp_path / "source" / "verl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / "source")
    build = ["wheel", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(tmp_path / "source")]
    subprocess.run([*pip, *build], check=True)
    (wheel,) = tmp_path.glob("verl-*.whl")
    subprocess.run([*pip, "install", "--no-deps", "--target", str(tmp_path / "installed"), str(wheel)], check=True)
    shutil.copytree(ROOT / "examples" / "tiny", tmp_path / "examples" / "tiny")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "installed")}
    settings = ["trainer.total_training_steps=2", "cluster.threads=1"]
    where = [sys.executable, "-c", "import verl; print(verl.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).is_relative_to(tmp_path / "installed")
    train = [sys.executable, "-m", "verl.cli", "train", "examples/tiny/grpo.yaml", *settings]
    subprocess.run(train, cwd=tmp_path, env=environment, check=True)
    assert (tmp_path / "runs" / "tiny-grpo" / "report.html").stat().st_size > 10_000


def test_ci_calls_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "make test" in script.read_text(encoding="utf-8")
