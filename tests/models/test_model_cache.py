"""The model cache: complete or absent, built once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl.errors import ModelError
from verl.models.model_cache import build_once, cache_root, file_sha256

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write(folder: Path) -> None:
    (folder / "weights").write_text("new")


def forbidden(folder: Path) -> None:
    raise AssertionError("built again")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root() == tmp_path / "cache"
    monkeypatch.delenv("VERL_CACHE")
    assert cache_root() == Path.home() / ".cache" / "verl"


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")
    assert file_sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_built_once(cache: Path) -> None:
    entry = build_once("m", {"v": 1}, write)
    assert entry == cache / "m" and (entry / "weights").read_text() == "new"
    assert build_once("m", {"v": 1}, forbidden) == entry
    assert names(cache) == [".m.lock", "m"]


def test_built_again_when_the_source_changes(cache: Path) -> None:
    build_once("m", {"v": 1}, lambda folder: (folder / "old").write_text("old"))
    entry = build_once("m", {"v": 2}, write)
    assert names(entry) == ["verl_source.json", "weights"]
    assert names(cache) == [".m.lock", "m"]


def test_a_failed_build_leaves_nothing_and_the_old_entry(cache: Path) -> None:
    def half(folder: Path) -> None:
        write(folder)
        raise ModelError("cut short")

    for versions in ([1], [2]):
        with pytest.raises(ModelError, match="cut short"):
            build_once("m", {"v": versions}, half)
        assert not (cache / "m" / "weights").exists()
    build_once("m", {"v": 3}, write)
    with pytest.raises(ModelError, match="cut short"):
        build_once("m", {"v": 4}, half)
    assert build_once("m", {"v": 3}, forbidden).is_dir()
    assert names(cache) == [".m.lock", "m"]


def test_what_a_killed_build_left_is_removed(cache: Path) -> None:
    code = (
        "import os\n"
        "from verl.models.model_cache import build_once\n"
        "def build(folder):\n"
        "    (folder / 'weights').write_text('half')\n"
        "    os._exit(9)\n"
        "build_once('m', {'v': 1}, build)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 9
    assert len(names(cache)) == 2 and not (cache / "m").exists()
    assert (build_once("m", {"v": 1}, write) / "weights").read_text() == "new"
    assert names(cache) == [".m.lock", "m"]


def test_two_processes_build_once(cache: Path, tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from verl.models.model_cache import build_once\n"
        "def build(folder):\n"
        f"    with open({str(tmp_path / 'built')!r}, 'a') as log: log.write('x')\n"
        "    time.sleep(1)\n"
        "    (folder / 'weights').write_text('new')\n"
        "print((build_once('m', {'v': 1}, build) / 'weights').read_text())"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    assert [process.communicate(timeout=60)[0] for process in started] == ["new\n"] * 3
    assert (tmp_path / "built").read_text() == "x"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="cache cannot be written") as caught:
        build_once("m", {}, write)
    assert caught.value.fix is not None and "VERL_CACHE" in caught.value.fix
    assert os.environ["VERL_CACHE"] in str(caught.value.value)
