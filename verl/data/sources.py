"""Where a dataset's rows come from: data files, or a class of the user's own; always the same, in the same order."""

from __future__ import annotations

import inspect
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from verl.config import DataConfig
from verl.data.files import expand_entries
from verl.data.rows import BadRow, PromptRow, check_columns, prompt_row
from verl.data.tables import RawRow, open_tables
from verl.errors import DataError
from verl.user_code import describe, load_user_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


SHOWN_FILES = 5


class RowSource:
    """All rows of a dataset, numbered through, good and bad.

    Attributes:
        name: of all of it, for messages.
        entry_starts: number of the first row of each entry of ``data.train_files``, and the number of rows.
    """

    name: str
    entry_starts: list[int]

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
    dict in any layout that files may have, always the same one.

    Raises:
        DataError: no such class, arguments or results that do not fit, an exception in it, or no row at all.
    """

    def __init__(
        self, files: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_samples: int = -1
    ) -> None:
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
    files: Sequence[str], config: DataConfig, tokenizer: PreTrainedTokenizerBase, max_samples: int, key: str
) -> RowSource:
    """The rows that ``data.train_files`` or ``data.val_files`` (``key``) stands for."""
    if config.custom_cls.path is not None:
        return CustomRows(files, config, tokenizer, max_samples)
    return FileRows(files, config, key)
