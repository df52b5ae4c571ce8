"""Rows made ready in chunks: token ids, the length limit, bad rows. The same work here and in worker processes."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import IO, Any

import numpy as np

from verl.config import DataConfig
from verl.data.rendering import cut, render
from verl.data.rows import BadRow, FileRows, PromptRow, RowSource, Tokenizer
from verl.errors import DataError

CHUNK = 1024  # rows


# Of a row that can be used: its number, tokens after the limit, a hash of what it means and of its ids, its weight of
# data.sampler.weight_column, and the place of its data source in ``names``. Of one over the limit: tokens before it.
KEPT = np.dtype([("number", "i8"), ("length", "i4"), ("digest", "u8"), ("weight", "f8"), ("source", "i4")])
OVER = np.dtype([("number", "i8"), ("length", "i4")])


@dataclass
class Prepared:
    """What became of consecutive rows of a source."""

    rows: np.ndarray  # (K,) of type ``KEPT``: the rows that can be used, in order
    ids: np.ndarray  # (sum of their lengths,) int32 token ids, end to end
    over: np.ndarray  # (X,) of type ``OVER``: rows over the limit, kept or not
    names: list[str]  # data sources
    bad: list[BadRow]  # rows that cannot be used
    kinds: dict[str, int]  # for each data source and each further column its first row

    def first(self, count: int) -> Prepared:
        """This, as if the source ended with the ``count``-th usable row."""
        if count > len(self.rows):
            return self
        rows, last = self.rows[:count], int(self.rows["number"][count - 1])
        return Prepared(
            rows,
            self.ids[: rows["length"].sum()],
            self.over[self.over["number"] <= last],
            self.names,
            [row for row in self.bad if row.index <= last],
            {kind: row for kind, row in self.kinds.items() if row <= last},
        )


def prepare(source: RowSource, start: int, stop: int, config: DataConfig, tokenizer: Tokenizer) -> Prepared:
    """Rows ``start`` to ``stop`` (excluded) of ``source``: rendered, cut to ``data.max_prompt_length`` or left out.
    Raises DataError: message lists on a tokenizer without a chat template."""
    read = source.read(start, stop)
    good = [row for row in read if isinstance(row, PromptRow)]
    bad = [row for row in read if isinstance(row, BadRow)]
    ids, refused = render(good, tokenizer, config.chat_template_kwargs)
    rows, used = list[tuple[Any, ...]](), list[PromptRow]()
    tokens, over, names = list[int](), list[tuple[int, int]](), dict[str, int]()
    for place, row in enumerate(good):
        own, weight = ids[place], row_weight(row, config.sampler.weight_column)
        reason = refused.get(place) or (weight if isinstance(weight, str) else None)
        if reason:
            bad.append(row.refused(reason))
            continue
        if len(own) > config.max_prompt_length:
            over.append((row.row_index, len(own)))
            if config.filter_overlong_prompts:
                continue
            if config.truncation != "error":
                own = cut(own, config.max_prompt_length, config.truncation)
        source_place = names.setdefault(row.data_source, len(names))
        rows.append((row.row_index, len(own), digest(row, own), weight, source_place))
        used.append(row)
        tokens += own
    arrays = np.array(rows, KEPT), np.array(tokens, np.int32), np.array(over, OVER)
    return Prepared(*arrays, list(names), sorted(bad, key=lambda row: row.index), kinds_of(used))


def digest(row: PromptRow, ids: Sequence[int]) -> int:
    """64 bits that stand for a row's number, source, prompt, truth and token ids."""
    record = [row.row_index, row.data_source, row.prompt, row.ground_truth, list(ids)]
    # ASCII escapes keep lone surrogates encodable; repr serves types that only Arrow has (dates, decimals).
    text = json.dumps(record, sort_keys=True, default=repr).encode("ascii")
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def row_weight(row: PromptRow, column: str | None) -> float | str:
    """The row's own weight, or what is wrong with it."""
    if column is None:
        return 1.0
    value: Any = {**row.extra_info, **row.columns}.get(column)
    try:
        weight = float(value)
    except (TypeError, ValueError):
        return f"the weight in column {column!r} is {value!r}, not a number"
    return weight if 0 <= weight < math.inf else f"the weight in column {column!r} is {value!r}, not 0 or more"


def kinds_of(rows: Sequence[PromptRow]) -> dict[str, int]:
    """For each data source and each further column among ``rows`` the number of the first row that has it."""
    kinds: dict[str, int] = {}
    for row in rows:
        kinds.setdefault(f"source {row.data_source}", row.row_index)
        for name in (*row.extra_info, *row.columns):
            kinds.setdefault(f"column {name}", row.row_index)
    return kinds


ROWS_PER_WORKER = 20_000  # with fewer, starting a process costs more than it saves
MOST_WORKERS = 8  # where data.num_workers does not say
ANSWER_SECONDS = 900.0  # a chunk takes seconds; a process that says nothing for so long is stuck
_ARRAYS = {"rows": KEPT, "ids": np.dtype(np.int32), "over": OVER}


def prepare_all(
    source: RowSource, files: Sequence[str], config: DataConfig, tokenizer: Tokenizer, key: str
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
    """One process and the two pipes to it: a plain ``python -m``, so that nothing of the program that started it (a
    notebook, ``python -c``) is run again in it. It ends when its input does, also when its parent was killed."""

    def __init__(self) -> None:
        self._stuck = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed on exit)
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        # The parent may have found this package in a folder that is not on the child's path.
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.data.prepare"],
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
