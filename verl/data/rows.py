"""What a row of a data file means: prompt, ground truth, source and the rest, under the field's names.

Accepted layouts (``conventions``: a dataset row):

- ``{"prompt": [messages] | str, "data_source": ..., "reward_model": {"ground_truth": ...}, "extra_info": {...}}``
- ``{"prompt": ..., <columns>}`` with the ground truth in the column ``data.answer_key``, or, when that is not set, in
  the first of ``ground_truth, label, answer, solution`` that the file has. The other columns are kept and are handed
  to the reward function inside ``extra_info``, where they never replace a key that is already there.
"""

from __future__ import annotations

import inspect
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config import DataConfig
from verl.config.names import did_you_mean, nearest
from verl.data.tables import RawRow, expand_entries, open_tables
from verl.errors import DataError
from verl.user_code import describe, load_user_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer
else:
    Tokenizer = Any  # transformers takes seconds to load

Messages = list[dict[str, Any]]

SHOWN_ROWS = 5  # in a message

TRUTH_COLUMNS = ("ground_truth", "label", "answer", "solution")
PROMPT_COLUMNS = ("prompt", "question", "input", "messages", "query", "instruction", "problem")
CONVENTION_COLUMNS = frozenset({"prompt", "data_source", "reward_model", "extra_info", "ability"})
DEFAULT_SOURCE = "unknown"  # of a row that names no source


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a dataset."""

    prompt: str | Messages  # a message list, or plain text
    data_source: str  # what the reward is chosen by and validation is reported by
    ground_truth: Any  # what the reward compares with; never None and never blank
    extra_info: dict[str, Any]  # handed to the reward function
    row_index: int  # number of the row in the whole dataset (all files in order, before any filter)
    columns: dict[str, Any] = field(default_factory=dict)  # the file's further columns, as they are
    location: str = ""  # file and row, for messages
    file_row: int = 0  # number of the row in its file

    @property
    def text(self) -> str:
        """The prompt without a chat template: the contents of its messages."""
        if isinstance(self.prompt, str):
            return self.prompt
        contents = (message["content"] for message in self.prompt)
        return "\n".join(part if isinstance(part, str) else json.dumps(part, default=str) for part in contents)

    def refused(self, reason: str) -> BadRow:
        """That it turned out to be of no use."""
        file, _, where = self.location.rpartition(", ")
        return BadRow(file, self.file_row, where, self.row_index, reason)


@dataclass(frozen=True)
class BadRow:
    """A row that cannot be used: one line of ``skipped.jsonl``."""

    file: str
    row: int  # in the file, counted from 0
    where: str  # the same in a person's words, such as "line 4"
    index: int  # in the whole dataset
    reason: str

    def __str__(self) -> str:
        return f"{self.file}, {self.where}: {self.reason}"


def too_many_bad(bad: Sequence[BadRow], read: int, key: str, limit: str | None) -> DataError:
    """That more rows of those ``read`` are bad than may be; ``limit``: the setting that allows more, if one does."""
    shown = "".join(f"\n    {row}" for row in bad[:SHOWN_ROWS])
    more = f"\n    and {len(bad) - SHOWN_ROWS} more" if len(bad) > SHOWN_ROWS else ""
    fix = "correct or remove these rows" + (f", or raise {limit}" if limit else "")
    return DataError(f"{len(bad)} of {read} rows in {key} cannot be used.", shown + more, fix)


def check_columns(path: Path, columns: Sequence[str], config: DataConfig) -> None:
    """Refuse a file without the columns that the configuration names, or without any ground truth. Raises DataError:
    with the columns that are there and the nearest one."""
    for name, key in ((config.prompt_key, "data.prompt_key"), (config.answer_key, "data.answer_key")):
        if name is not None and name not in columns:
            usual = PROMPT_COLUMNS if key == "data.prompt_key" else TRUTH_COLUMNS
            close = nearest(name, columns, 0.6) or next((c for c in usual if c in columns), None)
            fix = f"the file has the columns {', '.join(columns)}"
            if close:
                fix += f"; did you mean {key}={close}?"
            raise DataError(f"{key} names a column that {path} does not have.", name, fix)
    if config.answer_key is None and "reward_model" not in columns and not any(c in columns for c in TRUTH_COLUMNS):
        fix = (
            f"the file has the columns {', '.join(columns)}; set data.answer_key to the one with the answers "
            "(or to any column if the reward needs none)"
        )
        raise DataError("A data file has no column with the ground truth.", path, fix)
    if config.reward_fn_key != "data_source" and config.reward_fn_key not in columns:
        fix = f"{did_you_mean(config.reward_fn_key, columns)}the file has the columns {', '.join(columns)}"
        raise DataError(f"data.reward_fn_key names a column that {path} does not have.", config.reward_fn_key, fix)


def find_columns(
    columns: Sequence[str], prompt_key: str | None, answer_key: str | None
) -> tuple[str | None, str | None, DataConfig]:
    """Where a command finds prompt and ground truth: by option, else under the usual names; None: nowhere. Returns
    both, and a configuration that reads rows so. Without any ground truth the prompt stands in for it. Raises
    DataError: an option names a column that is not there."""
    for name, option in ((prompt_key, "--prompt-key"), (answer_key, "--answer-key")):
        if name is not None and name not in columns:
            raise no_column(option, name, columns)
    prompt = prompt_key or next((name for name in PROMPT_COLUMNS if name in columns), None)
    usual = "reward_model.ground_truth" if "reward_model" in columns else None
    truth = answer_key or usual or next((name for name in TRUTH_COLUMNS if name in columns), None)
    key = prompt or "prompt"
    answer = answer_key or (None if truth else key)
    return prompt, truth, DataConfig(train_files=["-"], prompt_key=key, answer_key=answer)


def no_column(option: str, name: str, columns: Sequence[str]) -> DataError:
    fix = f"{did_you_mean(name, columns)}columns: {', '.join(columns)}"
    return DataError(f"{option} names a column that is not there.", name, fix)


def prompt_row(
    record: RawRow, columns: Sequence[str], config: DataConfig, index: int, number: int
) -> PromptRow | BadRow:
    """What the row means, or what is wrong with it. ``columns``: names that any row of its file has; ``index, number``:
    its number in the whole dataset, and in its file."""
    if record.problem:
        return BadRow(record.file, number, record.where, index, record.problem)
    values = record.values
    prompt: Any = values.get(config.prompt_key)
    truth, truth_column = _truth(values, columns, config)
    extra = values.get("extra_info")
    problem = (
        prompt_problem(prompt, config.prompt_key)
        or truth_problem(truth, truth_column)
        or (f"extra_info is {type(extra).__name__}, not an object" if not isinstance(extra, dict | None) else None)
    )
    if problem:
        return BadRow(record.file, number, record.where, index, problem)
    used = CONVENTION_COLUMNS | {config.prompt_key, config.reward_fn_key}
    others = {name: value for name, value in values.items() if name not in used}
    source = values.get(config.reward_fn_key)
    return PromptRow(
        prompt=prompt,
        data_source=DEFAULT_SOURCE if source is None or source == "" else str(source),
        ground_truth=truth,
        extra_info={**{k: v for k, v in others.items() if k != truth_column}, **(extra or {})},
        row_index=index,
        columns=others,
        location=str(record),
        file_row=number,
    )


def _truth(values: dict[str, Any], columns: Sequence[str], config: DataConfig) -> tuple[Any, str]:
    if config.answer_key is not None:
        return values.get(config.answer_key), config.answer_key
    if "reward_model" in columns:
        holder = values.get("reward_model")
        return (holder.get("ground_truth") if isinstance(holder, dict) else None), "reward_model.ground_truth"
    column = next((c for c in TRUTH_COLUMNS if c in columns), "ground_truth")
    return values.get(column), column


def truth_problem(truth: Any, column: str) -> str | None:
    """What is wrong with a ground truth, if anything."""
    if truth is None:
        return f"no ground truth in column {column!r}"
    return f"the ground truth in column {column!r} is empty" if isinstance(truth, str) and not truth.strip() else None


def prompt_problem(prompt: Any, key: str) -> str | None:
    """What is wrong with a prompt of column ``key``, if anything."""
    if prompt is None:
        return f"no prompt in column {key!r}"
    if isinstance(prompt, str):
        return None if prompt.strip() else f"the prompt in column {key!r} is empty"
    if not isinstance(prompt, list):
        return f"the prompt in column {key!r} is {type(prompt).__name__}, neither text nor a list of messages"
    if not prompt:
        return f"the prompt in column {key!r} is an empty list of messages"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number} of the prompt has no role"
        if message.get("content") is None:
            return f"message {number} of the prompt ({message['role']}) has no content"
    contents = [message["content"] for message in prompt]
    if not any(content.strip() if isinstance(content, str) else content for content in contents):
        return f"every message of the prompt in column {key!r} is empty"
    return None


SHOWN_FILES = 5


class RowSource:
    """All rows of a dataset, numbered through, good and bad."""

    name: str  # of all of it, for messages
    entry_starts: list[int]  # number of the first row of each entry of ``data.train_files``, and the number of rows

    def __len__(self) -> int:
        return self.entry_starts[-1]

    def read(self, start: int, stop: int) -> list[PromptRow | BadRow]:
        """Rows ``start`` to ``stop`` (excluded)."""
        raise NotImplementedError


class FileRows(RowSource):
    """Rows of all files, in order; only what is asked for is in memory. Raises DataError: a file that cannot be read, a
    column that is not there, or no row at all."""

    def __init__(self, files: str | Sequence[str], config: DataConfig, key: str = "data.train_files") -> None:
        entries = expand_entries(files, key)
        paths = [path for entry in entries for path in entry]
        more = f" and {len(paths) - SHOWN_FILES} more" if len(paths) > SHOWN_FILES else ""
        self.name = ", ".join(map(str, paths[:SHOWN_FILES])) + more
        self._config = config
        self._tables = open_tables(paths)
        self._starts = [0, *accumulate(map(len, self._tables))]
        self.entry_starts = [self._starts[i] for i in [0, *accumulate(map(len, entries))]]
        for table in self._tables:
            if table.columns:  # none: no row of it can be used
                check_columns(table.path, table.columns, config)
        if not len(self):
            raise DataError(f"{key} holds no rows.", self.name, "give a file with at least one row")

    def read(self, start: int, stop: int) -> list[PromptRow | BadRow]:
        rows: list[PromptRow | BadRow] = []
        while start < min(stop, len(self)):
            number = bisect_right(self._starts, start) - 1
            table, first = self._tables[number], self._starts[number]
            end = min(self._starts[number + 1], stop)
            for i, record in enumerate(table.read(start - first, end - first), start=start):
                rows.append(prompt_row(record, table.columns, self._config, i, i - first))
            start = end
        return rows


class CustomRows(RowSource):
    """Rows of the user's own dataset class (``data.custom_cls``).

    The class is made with the keyword arguments ``data_files, tokenizer, config`` and, where it takes them,
    ``processor`` (None: prompts are text) and ``max_samples``. It has ``len()``, and ``[i]`` gives the i-th row as a
    dict in any layout that files may have, always the same one. Raises DataError: no such class, arguments or results
    that do not fit, an exception in it, or no row at all.
    """

    def __init__(self, files: Sequence[str], config: DataConfig, tokenizer: Tokenizer, max_samples: int = -1) -> None:
        path, name = config.custom_cls.path, config.custom_cls.name
        assert path is not None and name is not None
        self._config = config
        self.name = f"{name} of {path}"
        make, self._file = load_user_function(path, name, "dataset", "data.custom_cls.path", DataError, is_class=True)
        given = {"data_files": list(files), "tokenizer": tokenizer, "config": config}
        taken = inspect.signature(make).parameters
        optional = {"processor": None, "max_samples": max_samples}
        given |= {key: value for key, value in optional.items() if key in taken}
        try:
            self._rows = make(**given)
            size = len(self._rows)
        except Exception as error:
            fix = f"it is made with {', '.join(given)} and must have len() and [number]"
            raise DataError(f"The dataset class {self.name} fails.", describe(error, self._file), fix) from error
        if not size:
            raise DataError(f"The dataset class {self.name} has no rows.", fix="its len() must be at least 1")
        self.entry_starts = [0, size]

    def read(self, start: int, stop: int) -> list[PromptRow | BadRow]:
        """Rows ``start`` to ``stop`` (excluded); a row that the class fails to give is a bad one."""
        return [self._read(i) for i in range(start, min(stop, len(self)))]

    def _read(self, index: int) -> PromptRow | BadRow:
        values, problem = {}, None
        try:
            values = self._rows[index]
            if not isinstance(values, dict):
                values, problem = {}, f"the class gives {type(values).__name__}, not a dict"
        except Exception as error:
            problem = describe(error, self._file)
        record = RawRow(self.name, f"row {index} (counted from 0)", values, problem)
        return prompt_row(record, tuple(record.values), self._config, index, index)


def open_source(
    files: Sequence[str], config: DataConfig, tokenizer: Tokenizer, max_samples: int, key: str
) -> RowSource:
    """The rows that ``data.train_files`` or ``data.val_files`` (``key``) stands for."""
    if config.custom_cls.path is not None:
        return CustomRows(files, config, tokenizer, max_samples)
    return FileRows(files, config, key)
