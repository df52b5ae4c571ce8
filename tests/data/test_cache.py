"""Converted files on disk: keyed by content, safe under kills and rivals, mapped and never in memory as a whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from verl.data import cache, tables
from verl.data.cache import fingerprint
from verl.data.tables import open_table
from verl.errors import DataError


@pytest.fixture(autouse=True)
def everything_is_large(monkeypatch):
    monkeypatch.setattr(tables, "SMALL_BYTES", 0)


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"n": i, "prompt": "x" * i}) + "\n" for i in range(50)))
    return path


def numbers(path: Path) -> list[int]:
    table = open_table(path)
    return [row.values["n"] for row in table.read(0, len(table))]


@pytest.fixture
def conversions(monkeypatch) -> list[Path]:
    made = []
    write = tables._write
    monkeypatch.setattr(tables, "_write", lambda path, *rest: made.append(path) or write(path, *rest))
    return made


def test_a_file_is_converted_once_and_again_when_its_content_changes(file, own_cache, conversions):
    assert numbers(file) == numbers(file) == list(range(50)) and len(conversions) == 1
    assert open_table(file).columns == ["n", "prompt"]
    copy = file.with_name("copy.jsonl")
    copy.write_bytes(file.read_bytes())
    os.utime(copy, (1, 1))
    assert numbers(copy) == list(range(50)) and len(conversions) == 1  # the same content under another name
    copy.write_bytes(file.read_bytes().replace(b'"n": 7', b'"n": 8'))
    os.utime(copy, (1, 1))
    assert numbers(copy)[7] == 8 and len(conversions) == 2
    assert sorted(path.suffix for path in own_cache.iterdir()) == [".arrow", ".arrow", ".json", ".json"]


def test_the_ending_is_part_of_the_key(file, conversions):
    numbers(file)
    numbers(file.rename(file.with_suffix(".json")))
    assert len(conversions) == 2


def test_small_files_leave_nothing_in_the_cache(file, own_cache, monkeypatch):
    monkeypatch.setattr(tables, "SMALL_BYTES", 2**22)
    assert numbers(file) == list(range(50)) and not own_cache.exists()


def damage_end(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def damage_middle(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize("ending", [".arrow", ".json"])
@pytest.mark.parametrize("damage", [damage_end, damage_middle, Path.unlink, lambda path: path.write_bytes(b"")])
def test_a_damaged_entry_is_made_again(file, own_cache, conversions, ending, damage):
    numbers(file)
    (entry,) = own_cache.glob(f"*{ending}")
    damage(entry)
    assert numbers(file) == list(range(50))
    # A changed letter in the note is noticed only where it is the fingerprint's or the columns'.
    assert len(conversions) == 2 or (ending == ".json" and damage is damage_middle)
    assert numbers(file) == list(range(50)) and len(conversions) <= 2


def test_an_open_table_outlives_its_entry(file, own_cache):
    table = open_table(file)
    for path in own_cache.iterdir():
        path.unlink()
    assert table.read(49, 50)[0].values["n"] == 49


def test_a_failed_conversion_leaves_nothing(file, own_cache):
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(DataError, match="cut"):
        open_table(file)
    assert list(own_cache.iterdir()) == []


def test_halves_of_killed_writers_are_swept_up_later(file, own_cache):
    own_cache.mkdir(parents=True)
    old, new = own_cache / ".k.arrow.partial-aa", own_cache / ".k.arrow.partial-bb"
    for path in (old, new):
        path.write_bytes(b"half")
    os.utime(old, (time.time() - 2 * cache.ABANDONED_AFTER,) * 2)
    numbers(file)
    assert not old.exists() and new.exists()


def test_a_clock_that_is_set_makes_no_living_writer_a_killed_one(file, own_cache, monkeypatch):
    write, real = tables._write, time.time

    def slow(path, *rest):
        columns = write(path, *rest)
        with monkeypatch.context() as patched:
            patched.setattr(cache.time, "time", lambda: real() + 3 * cache.ABANDONED_AFTER)
            cache._sweep(own_cache)  # as another process would
        return columns

    monkeypatch.setattr(tables, "_write", slow)
    assert numbers(file)


def test_a_file_that_changes_while_it_is_read(file, monkeypatch):
    write = tables._write

    def rival(path, *rest):
        columns = write(path, *rest)
        with path.open("a") as out:
            out.write('{"n": 99}\n')
        return columns

    monkeypatch.setattr(tables, "_write", rival)
    with pytest.raises(DataError, match=r"(?s)changes while it is read.*a\.jsonl"):
        open_table(file)


def test_many_writers_of_one_entry(file, own_cache):
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(numbers(file))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [list(range(50))] * 8 and len(list(own_cache.iterdir())) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_cache_that_cannot_be_written(file, tmp_path, monkeypatch):
    (tmp_path / "locked").mkdir(mode=0o500)
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "locked"))
    with pytest.raises(DataError, match="VERL_CACHE"):
        open_table(file)


def test_a_cache_folder_that_is_a_file(file, tmp_path, monkeypatch):
    (tmp_path / "no-folder").write_text("x")
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "no-folder"))
    with pytest.raises(DataError, match="VERL_CACHE"):
        open_table(file)


def test_fingerprints_of_large_files_sample_them(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "WHOLE_BYTES", 1000)
    monkeypatch.setattr(cache, "SAMPLE_BYTES", 10)
    path = tmp_path / "large"
    path.write_bytes(bytes(5000))

    def changed(at: int, mtime: int) -> str:
        raw = bytearray(5000)
        raw[at] = 1
        path.write_bytes(bytes(raw))
        os.utime(path, (mtime, mtime))
        return fingerprint(path)

    os.utime(path, (5, 5))
    base = fingerprint(path)
    assert changed(0, 5) != base and changed(4999, 5) != base  # first and last byte, at the same time and size
    assert changed(15, 6) != base  # between the samples: the time tells
    assert changed(15, 5) == base  # the documented gap
    path.write_bytes(bytes(5001))
    os.utime(path, (5, 5))
    assert fingerprint(path) != base


PROGRAM = """
import gc, json, sys
from verl.data.tables import open_table
from pathlib import Path
import pyarrow as pa, pyarrow.parquet, numpy

def resident():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmRSS"].split()[0]) / 1024, int(fields["VmHWM"].split()[0]) / 1024

path = Path(sys.argv[1])
open_table(Path(sys.argv[2])).read(0, 5)  # imports and first allocations
gc.collect()
before, _ = resident()
open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
table, rows = open_table(path), 0
for start in range(0, len(table), 500):
    rows += sum(len(row.values["prompt"]) == 2000 for row in table.read(start, start + 500))
print(json.dumps([rows, before, *resident()]))
"""


@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_memory_does_not_grow_with_the_file(tmp_path, own_cache, ending):
    """60 MB are converted and read through; at no time are 30 MB more resident than before, mapped pages included."""
    rows, small, large = 30_000, tmp_path / f"small.{ending}", tmp_path / f"large.{ending}"
    for path, count in ((small, 10), (large, rows)):
        if ending == "jsonl":
            with path.open("wb") as out:
                for i in range(count):
                    out.write(json.dumps({"prompt": f"{i:2000}", "label": "1"}).encode() + b"\n")
        else:
            import pyarrow as pa

            table = pa.table({"prompt": [f"{i:2000}" for i in range(count)], "label": ["1"] * count})
            pq.write_table(table, path, compression="none", use_dictionary=False, row_group_size=3000)
    assert large.stat().st_size > 60e6
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(large), str(small)],
        capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    read, before, after, peak = json.loads(done.stdout)
    assert read == rows
    assert peak - before < 30 and after - before < 30, (before, after, peak)
