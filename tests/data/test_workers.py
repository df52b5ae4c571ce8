"""Preparing rows in several processes: the same result, clear failures, nothing left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from verl.config import DataConfig
from verl.data import prepare
from verl.data.dataset import PromptDataset
from verl.errors import DataError

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def few_rows_are_many(monkeypatch):
    monkeypatch.setattr(prepare, "ROWS_PER_WORKER", 20)
    monkeypatch.setattr(prepare, "CHUNK", 16)


@pytest.fixture
def files(write, row_of, words_of) -> list[str]:
    def row(i: int):
        prompt = [{"role": "user", "content": words_of(i % 9 + 1, i)}]
        return row_of("" if i % 50 == 7 else prompt, truth=str(i), source=f"s{i % 3}", w=float(i % 5))

    paths = [write("a.jsonl", [row(i) for i in range(90)]), write("b.jsonl", [row(i) for i in range(90, 130)])]
    return [str(path) for path in paths]


def load(files, tokenizer, count: int | None, **fields) -> PromptDataset:
    fields = {"max_prompt_length": 10, "truncation": "left", "max_skipped_fraction": 0.1, **fields}
    config = DataConfig(train_files=files, num_workers=count, **fields)
    return PromptDataset.load(config.train_files, config, tokenizer)


def everything(dataset: PromptDataset) -> dict:
    return {
        "hash": dataset.content_hash,
        "ids": [list(ids) for ids in dataset.prompt_ids],
        "numbers": dataset.numbers.tolist(),
        "sources": list(dataset.sources),
        "entries": dataset.entries.tolist(),
        "weights": dataset.weights.tolist(),
        "skipped": list(dataset.skipped),
        "counts": (dataset.dropped, dataset.truncated),
        "exemplars": [row.row_index for row in dataset.exemplars],
    }


def test_any_number_of_processes_gives_the_same(files, make_tokenizer, monkeypatch):
    started = []
    make = subprocess.Popen
    monkeypatch.setattr(
        prepare.subprocess, "Popen", lambda *args, **kw: started.append(make(*args, **kw)) or started[-1]
    )
    tokenizer = make_tokenizer(adds_bos=True)
    fields = {"sampler": {"weight_column": "w"}}
    inline = everything(load(files, tokenizer, 0, **fields))
    assert not started and len(inline["skipped"]) == 3 and inline["counts"] == (0, 40)
    assert everything(load(files, tokenizer, 3, **fields)) == inline
    assert len(started) == 3 and all(process.poll() is not None for process in started)
    assert everything(load(files, tokenizer, 1)) == everything(load(files, tokenizer, 0)) and len(started) == 3


def test_few_rows_start_no_process(files, make_tokenizer, monkeypatch):
    monkeypatch.setattr(prepare, "ROWS_PER_WORKER", 100)
    monkeypatch.setattr(prepare.subprocess, "Popen", None)
    assert len(load(files, make_tokenizer(), 8)) == len(load(files, make_tokenizer(), None)) == 127


@pytest.fixture
def altered(monkeypatch):
    """``altered(change)``: ``change(worker, message)`` gives what a worker is told in place of ``message``."""
    tell = prepare._Worker.tell

    def install(change) -> None:
        monkeypatch.setattr(prepare._Worker, "tell", lambda worker, message: tell(worker, change(worker, message)))

    return install


def test_a_data_error_of_a_worker_is_raised_here(files, make_tokenizer, altered):
    altered(lambda worker, job: job | {"rows": 7})
    with pytest.raises(DataError, match=r"(?s)change while they are read.*a\.jsonl, .*b\.jsonl.*wait for their writer"):
        load(files, make_tokenizer(), 2)


def test_any_other_failure_of_a_worker_shows_its_last_line(files, make_tokenizer, altered):
    altered(lambda worker, job: {"no": "job"})
    with pytest.raises(DataError, match=r"(?s)prepares data died.*ended with code 1; KeyError: 'config'"):
        load(files, make_tokenizer(), 2)


def test_a_worker_that_is_killed(files, make_tokenizer, altered):
    def kill(worker, job):
        worker._process.kill()
        worker._process.wait()
        return job

    altered(kill)
    with pytest.raises(
        DataError, match=r"(?s)A process that prepares data died.*killed by signal 9.*data\.num_workers=0"
    ):
        load(files, make_tokenizer(), 2)


PROGRAM = """
import sys
from transformers import AutoTokenizer
from verl.config import DataConfig
from verl.data import prepare
from verl.data.dataset import PromptDataset

prepare.ROWS_PER_WORKER, prepare.CHUNK = 20, 16
tokenizer = AutoTokenizer.from_pretrained({tokenizer!r})
config = DataConfig(train_files={files!r}, num_workers=2, max_prompt_length=64, max_skipped_fraction=0.1)
print(len(PromptDataset.load(config.train_files, config, tokenizer)), "rows", flush=True)
"""


def start(*arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def test_a_script_on_standard_input(files, make_tokenizer, tmp_path):
    # No file to import again and no guard for __main__: what a notebook has in common with it.
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    program = PROGRAM.format(tokenizer=str(tmp_path / "tokenizer"), files=files)
    out, err = start("-").communicate(program, timeout=120)
    assert out == "127 rows\n", err


def test_a_worker_that_gives_no_answer_is_given_up(monkeypatch):
    monkeypatch.setattr(prepare, "ANSWER_SECONDS", 0.2)
    with prepare._Worker() as worker, pytest.raises(DataError, match="gave no answer") as caught:
        worker.hear()  # it was asked nothing
    assert caught.value.value == "0.2 seconds" and worker._process.poll() == -signal.SIGKILL


def test_workers_end_when_their_parent_is_killed():
    code = "from verl.data.prepare import _Worker; import time; w = _Worker()\n"
    parent = start("-c", code + "print(w._process.pid, flush=True); time.sleep(60)")
    worker = int(parent.stdout.readline())
    assert running(worker)
    parent.send_signal(signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 20
    while running(worker):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except FileNotFoundError:
        return False


def test_the_wire_keeps_every_array():
    part = prepare.Prepared(
        rows=np.array([(3, 1, 1, 0.1, 0), (2**40, 2, 2**64 - 1, 2.0, 1)], prepare.KEPT),
        ids=np.array([7, 8, 9], np.int32),
        over=np.array([], prepare.OVER),
        names=["a", "\u2028"],
        bad=[prepare.BadRow("f", 1, "line 2", 9, "no\nreason")],
        kinds={"source a": 3},
    )
    import io

    sent = io.BytesIO()
    prepare._send(sent, prepare._encode(part))
    sent.seek(0)
    back = prepare._decode(json.loads(sent.readline()))
    for name in prepare._ARRAYS:
        ours, theirs = getattr(part, name), getattr(back, name)
        assert ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
    assert (back.names, back.bad, back.kinds) == (part.names, part.bad, part.kinds)
