"""What is in data files, and what looks wrong with it: one pass, in memory that grows by a few bytes a row."""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from verl.config import DataConfig
from verl.data.rendering import render, untemplated
from verl.data.rows import BadRow, PromptRow, Tokenizer, find_columns, prompt_row
from verl.data.tables import RawRow, RowTable, expand_files, open_tables
from verl.errors import RewardError
from verl.json_lines import json_value
from verl.rewards.rules import by_source

CHUNK = 1024  # rows read at once
SHOWN = 3  # places named for each thing that looks wrong
BARS = 12  # of the histogram
PERCENTILES = (50, 90, 95, 99)
ENORMOUS_BYTES = 2**20
SHORT_TRUTH = 4  # a shorter ground truth stands in a prompt by chance ("4")
LONG_TRUTH = 200  # characters
ROLES = ("system", "user", "assistant", "tool", "developer")
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ud800-\udfff\ufffd]")


@dataclass
class Count:
    """How many rows something is true of, and where the first of them are."""

    rows: int = 0
    places: list[str] = field(default_factory=list)

    def add(self, place: str) -> None:
        self.rows += 1
        if len(self.places) < SHOWN:
            self.places.append(place)


@dataclass
class ColumnReport:
    types: dict[str, int] = field(default_factory=dict)  # how many rows have each
    example: Any = None


@dataclass
class Lengths:
    """Lengths of the prompts that can be used."""

    unit: str  # ``tokens`` (the ids that the engine gets, chat template included) or ``characters``
    least: int
    mean: float
    most: int
    percentiles: dict[str, int]  # by name, ``p50`` to ``p99``
    histogram: list[tuple[int, int, int]]  # (from, to, prompts), ``to`` excluded
    limit: int | None = None  # data.max_prompt_length; None without a tokenizer
    over: int | None = None  # how many prompts are longer


@dataclass
class Shown:
    """One prompt as the model gets it (or, without a tokenizer, as the file has it)."""

    place: str
    length: int
    text: str
    truth: str


@dataclass
class Inspection:
    """The report; :meth:`as_json` for programs."""

    files: list[str]
    rows: int = 0
    usable: int = 0
    plain: int = 0  # prompts that are text: no chat template is put around them
    prompt_key: str | None = None
    truth_key: str | None = None
    columns: dict[str, ColumnReport] = field(default_factory=dict)
    bad: dict[str, Count] = field(default_factory=dict)
    suspicious: dict[str, Count] = field(default_factory=dict)
    sources: dict[str, int] = field(default_factory=dict)
    rules: dict[str, str | None] = field(default_factory=dict)
    duplicates: int = 0
    conflicting: int = 0
    duplicate_places: list[tuple[str, str]] = field(default_factory=list)
    lengths: Lengths | None = None
    shown: list[Shown] = field(default_factory=list)

    def as_json(self) -> Any:
        """Everything, as strict JSON values."""
        return json_value(asdict(self))


def inspect_files(
    files: str | Sequence[str],
    tokenizer: Tokenizer | None = None,
    limit: int = 512,
    prompt_key: str | None = None,
    answer_key: str | None = None,
) -> Inspection:
    """Look at every row of ``files``; without a ``tokenizer`` prompts are measured in characters. ``limit``:
    ``data.max_prompt_length``. Raises DataError: a file that cannot be read, a named column that is not there, messages
    without a chat template."""
    tables = open_tables(expand_files(files, "FILE"))
    columns = list(dict.fromkeys(name for table in tables for name in table.columns))
    report = Inspection([str(table.path) for table in tables], columns={name: ColumnReport() for name in columns})
    report.prompt_key, report.truth_key, config = find_columns(columns, prompt_key, answer_key)
    return _Inspector(tables, tokenizer, limit, config, report).run()


@dataclass
class _Inspector:
    tables: list[RowTable]
    tokenizer: Tokenizer | None
    limit: int
    config: DataConfig
    report: Inspection
    told: dict[str, str] = field(default_factory=dict)
    measured: list[np.ndarray] = field(default_factory=list)
    prompts: array[int] = field(default_factory=lambda: array("Q"))  # a hash of each usable prompt
    pairs: array[int] = field(default_factory=lambda: array("Q"))  # of prompt and truth
    places: array[int] = field(default_factory=lambda: array("q"))  # number of each usable row among all

    def run(self) -> Inspection:
        """Every row once."""
        report = self.report
        for table in self.tables:
            for start in range(0, len(table), CHUNK):
                self._chunk(table, table.read(start, start + CHUNK))
        report.usable = len(self.places)
        report.rules = {source: _rule(source) for source in report.sources}
        if self.places:
            self._duplicates()
            self._lengths()
        return report

    def _chunk(self, table: RowTable, records: list[RawRow]) -> None:
        good: list[PromptRow] = []
        for record in records:
            index = self.report.rows
            self.report.rows += 1
            self._columns(record)
            if self.report.prompt_key is None and not record.problem:
                continue
            row = prompt_row(record, table.columns, self.config, index, 0)
            if isinstance(row, BadRow):
                self._bad(row.reason, str(record))
            else:
                good.append(row)
        if self.tokenizer is not None and good:
            ids, refused = render(good, self.tokenizer)
            for place, reason in refused.items():
                self._bad(reason, good[place].location)
            good = [row for place, row in enumerate(good) if place not in refused]
            self.measured.append(np.array([len(row) for place, row in enumerate(ids) if place not in refused]))
        elif good:
            self.measured.append(np.array([len(row.text) for row in good]))
        for row in good:
            self._row(row)

    def _bad(self, reason: str, place: str) -> None:
        # Numbers in a reason differ from row to row: one kind of problem is told once, in the words of the first.
        kind = re.sub(r"\d+", "N", reason.partition(":")[0].partition(" (")[0])
        self.report.bad.setdefault(self.told.setdefault(kind, reason), Count()).add(place)

    def _columns(self, record: RawRow) -> None:
        for name, value in record.values.items():
            column = self.report.columns[name]
            kind = _kind(value)
            column.types[kind] = column.types.get(kind, 0) + 1
            if column.example is None:
                column.example = value

    def _row(self, row: PromptRow) -> None:
        report = self.report
        report.plain += isinstance(row.prompt, str)
        report.sources[row.data_source] = report.sources.get(row.data_source, 0) + 1
        prompt = json.dumps(row.prompt, sort_keys=True, default=str).encode()
        self.prompts.append(_hash(prompt))
        self.pairs.append(_hash(prompt + json.dumps(row.ground_truth, sort_keys=True, default=str).encode()))
        self.places.append(row.row_index)
        for reason in self._odd(row, len(prompt)):
            report.suspicious.setdefault(reason, Count()).add(row.location)

    def _odd(self, row: PromptRow, size: int) -> list[str]:
        text, truth = row.text, row.ground_truth
        found = []
        named = self.report.truth_key and isinstance(truth, str) and len(truth.strip()) >= SHORT_TRUTH
        if named and re.search(rf"(?<!\w){re.escape(truth.strip())}(?!\w)", text):
            found.append("the ground truth stands in the prompt")
        if self.report.truth_key and isinstance(truth, str) and len(truth) > LONG_TRUTH:
            found.append(f"the ground truth has more than {LONG_TRUTH} characters (a whole solution?)")
        if _CONTROL.search(text):
            found.append("control or replacement characters in the prompt (a broken encoding?)")
        if not isinstance(row.prompt, str):
            roles = [str(message["role"]) for message in row.prompt]
            found += [f"role {role!r}" for role in sorted(set(roles) - set(ROLES))]
            if roles[-1] not in ("user", "tool"):
                found.append(f"the last message is of role {roles[-1]!r}, not of the user")
        if size > ENORMOUS_BYTES:
            found.append("the prompt is larger than 1 MiB")
        if self.tokenizer is not None:
            if untemplated([row], self.tokenizer):
                found.append("plain text, though the model has a chat template (verl data convert makes chat messages)")
            inside = [token for token in self.tokenizer.all_special_tokens if len(token) > 2 and token in text]
            found += [f"the model's special token {token} stands in the text" for token in inside]
        return found

    def _duplicates(self) -> None:
        prompts, pairs = np.frombuffer(self.prompts, np.uint64), np.frombuffer(self.pairs, np.uint64)
        _, first, inverse = np.unique(prompts, return_index=True, return_inverse=True)
        self.report.duplicates = len(prompts) - len(first)
        self.report.conflicting = len(np.unique(pairs)) - len(first)
        later = np.flatnonzero(first[inverse] != np.arange(len(prompts)))[:SHOWN]
        self.report.duplicate_places = [
            (str(self._record(self.places[first[inverse[i]]])[1]), str(self._record(self.places[i])[1]))
            for i in later.tolist()
        ]

    def _record(self, number: int) -> tuple[RowTable, RawRow]:
        for table in self.tables:
            if number < len(table):
                return table, table.read(number, number + 1)[0]
            number -= len(table)
        raise IndexError(number)

    def _lengths(self) -> None:
        lengths = np.concatenate(self.measured)
        with_model = self.tokenizer is not None
        levels = np.percentile(lengths, PERCENTILES, method="inverted_cdf").astype(int).tolist()
        self.report.lengths = Lengths(
            unit="tokens" if with_model else "characters",
            least=int(lengths.min()),
            mean=float(lengths.mean()),
            most=int(lengths.max()),
            percentiles={f"p{level}": value for level, value in zip(PERCENTILES, levels, strict=True)},
            histogram=_histogram(lengths),
            limit=self.limit if with_model else None,
            over=int((lengths > self.limit).sum()) if with_model else None,
        )
        picked = dict.fromkeys([0, len(lengths) // 2, int(lengths.argmax())])
        self.report.shown = [self._shown(self.places[i], int(lengths[i])) for i in picked]

    def _shown(self, number: int, length: int) -> Shown:
        table, record = self._record(number)
        row = prompt_row(record, table.columns, self.config, number, 0)
        assert isinstance(row, PromptRow)
        text = row.text
        if self.tokenizer is not None:
            text = str(self.tokenizer.decode(render([row], self.tokenizer)[0][0]))
        truth = str(row.ground_truth) if self.report.truth_key else ""
        return Shown(str(record), length, text, truth)


def _hash(content: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _kind(value: Any) -> str:
    names = {type(None): "null", bool: "bool", int: "int", float: "float", str: "text", dict: "object"}
    if isinstance(value, list):
        inner = Counter(_kind(item) for item in value)
        return f"list of {' or '.join(sorted(inner))}" if inner else "empty list"
    return names.get(type(value), type(value).__name__)


def _rule(source: str) -> str | None:
    try:
        return by_source(source).__name__
    except RewardError:
        return None


def _histogram(lengths: np.ndarray) -> list[tuple[int, int, int]]:
    """At most ``BARS`` bars of one width: 1, 2 or 5 times a power of ten."""
    span = int(lengths.max()) - int(lengths.min()) + 1
    width = next(w for power in range(12) for w in (10**power, 2 * 10**power, 5 * 10**power) if span <= w * (BARS - 1))
    start = int(lengths.min()) // width * width
    counts = np.bincount((lengths - start) // width)
    return [(start + i * width, start + (i + 1) * width, int(count)) for i, count in enumerate(counts)]
