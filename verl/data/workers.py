"""The work of :mod:`verl.data.prepare`, shared among processes; results and their order do not depend on how many.

A worker is a plain ``python -m verl.data.workers`` that is told over its standard input what to do, so nothing of the
program that started it (a notebook, ``python -c``, a script on standard input) is run again in it. It ends when that
input ends, also when its parent was killed.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from verl.config import DataConfig
from verl.data.prepare import CHUNK, KEPT, OVER, Prepared, prepare
from verl.data.rows import BadRow
from verl.data.sources import FileRows, RowSource
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROWS_PER_WORKER = 20_000  # with fewer, starting a process costs more than it saves
MOST_WORKERS = 8  # where data.num_workers does not say
ANSWER_SECONDS = 900.0  # a chunk takes seconds; a process that says nothing for so long is stuck
_ARRAYS = {"rows": KEPT, "ids": np.dtype(np.int32), "over": OVER}


def prepare_all(
    source: RowSource, files: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, key: str
) -> Iterator[Prepared]:
    """All chunks of ``source``, in order. Raises DataError: as :func:`prepare`; a worker ended or failed."""
    chunks = [(start, min(start + CHUNK, len(source))) for start in range(0, len(source), CHUNK)]
    most = min(len(os.sched_getaffinity(0)), MOST_WORKERS) if config.num_workers is None else config.num_workers
    count = min(most, len(source) // ROWS_PER_WORKER)
    if count < 2 or not isinstance(source, FileRows):  # a class of the user's own lives in this process
        for start, stop in chunks:
            yield prepare(source, start, stop, config, tokenizer)
        return
    with ExitStack() as stack:
        job = {
            "files": list(files),
            "config": config.model_dump(),
            "key": key,
            "rows": len(source),
            # Code that came with the tokenizer was executed here only if the user allowed it.
            "trusted": type(tokenizer).__module__.startswith("transformers_modules"),
        }
        workers = [stack.enter_context(_Worker()) for _ in range(count)]
        with tempfile.TemporaryDirectory() as folder:
            tokenizer.save_pretrained(folder)
            for worker in workers:
                worker.tell(job | {"tokenizer": folder})
            for worker in workers:
                worker.hear()
        # Chunk i goes to worker i modulo count, which has at most one more in hand: memory stays bounded.
        for worker, chunk in zip(workers, chunks, strict=False):
            worker.tell(chunk)
        for i in range(len(chunks)):
            worker = workers[i % count]
            part = worker.hear()
            if i + count < len(chunks):
                worker.tell(chunks[i + count])
            yield _decode(part)


class _Worker:
    """One process, and the two pipes to it."""

    def __init__(self) -> None:
        self._stuck = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        # The parent may have found this package in a folder that is not on the child's path.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.data.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=environment,
        )

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def tell(self, message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self._gone() from None

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        limit = threading.Timer(ANSWER_SECONDS, self._give_up)
        limit.daemon = True
        limit.start()
        try:
            line = self._process.stdout.readline()
        finally:
            limit.cancel()
        if not line.endswith(b"\n"):
            raise self._gone()
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise DataError(*answer["error"])
        return answer

    def _give_up(self) -> None:
        self._stuck = True
        self._process.kill()

    def _gone(self) -> DataError:
        code = self._process.wait()
        if self._stuck:
            fix = "data.num_workers=0 does the work in this process, where Ctrl-C and --debug show what it waits for"
            return DataError("A process that prepares data gave no answer.", f"{ANSWER_SECONDS:g} seconds", fix)
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        ended = f"killed by signal {-code}" if code < 0 else f"ended with code {code}"
        fix = "it may have run out of memory; data.num_workers=0 does the work in this process"
        return DataError("A process that prepares data died.", "; ".join([ended, *said[-1:]]), fix)


def _decode(answer: dict[str, Any]) -> Prepared:
    arrays = {name: np.frombuffer(base64.b64decode(answer[name]), kind) for name, kind in _ARRAYS.items()}
    return Prepared(**{**answer, **arrays, "bad": [BadRow(**row) for row in answer["bad"]]})


def _encode(part: Prepared) -> dict[str, Any]:
    arrays = {name: base64.b64encode(getattr(part, name).tobytes()).decode() for name in _ARRAYS}
    return {**arrays, "names": part.names, "bad": [asdict(row) for row in part.bad], "kinds": part.kinds}


def _send(out: IO[bytes], answer: dict[str, Any]) -> None:
    out.write(json.dumps(answer).encode() + b"\n")
    out.flush()


def work(commands: IO[bytes], out: IO[bytes]) -> None:
    """Serve one parent: first the job, then chunks, until ``commands`` ends."""
    try:
        from verl.config import DataConfig

        job = json.loads(commands.readline() or "null")
        if job is None:
            return
        config = DataConfig(**job["config"])
        source = FileRows(job["files"], config, job["key"])
        if len(source) != job["rows"]:
            raise DataError("The data files change while they are read.", source.name, "wait for their writer")

        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"], trust_remote_code=job["trusted"])
        _send(out, {})
        for line in commands:
            start, stop = json.loads(line)
            _send(out, _encode(prepare(source, start, stop, config, tokenizer)))
    except BrokenPipeError:
        return
    except DataError as error:
        _send(out, {"error": [error.what, None if error.value is None else str(error.value), error.fix]})


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal: the parent ends its workers
    # What libraries print must not get between the answers.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    work(sys.stdin.buffer, answers)
