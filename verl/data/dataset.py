"""A dataset of rendered prompts: rows on demand, token ids in compact arrays, whatever its size."""

from __future__ import annotations

import hashlib
import mmap
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from verl.config import DataConfig
from verl.data.cache import data_cache
from verl.data.prepare import Prepared, prepare_all
from verl.data.rows import SHOWN_ROWS, BadRow, PromptRow, RowSource, Tokenizer, open_source, too_many_bad
from verl.errors import DataError
from verl.protocol import DataProto

IDS_IN_MEMORY = 2**26  # bytes of token ids; more of them go to an unnamed file that is mapped


@dataclass(frozen=True)
class PromptDataset:
    """Prompts that can be drawn, in the order of the files, and what was left out on the way.

    ``numbers``, ``entries``, ``weights`` are (N,): each row's number among all rows read (ascending; its
    ``row_index``), the place of its entry in ``data.train_files``, and its ``data.sampler.weight_column`` if any.
    """

    rows: Sequence[PromptRow]
    prompt_ids: Sequence[Sequence[int]]  # without padding
    dropped: int = 0  # rows over the length limit that were removed
    truncated: int = 0  # or cut
    skipped: Sequence[BadRow] = ()  # rows that could not be used
    numbers: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    entries: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    sources: Sequence[str] = ()
    weights: np.ndarray = field(default_factory=lambda: np.zeros(0))
    exemplars: Sequence[PromptRow] = ()  # for each data source and each further column the first row that has it
    content_hash: str = ""  # of rows, truths and ids; the same for the same data wherever and however it was read

    @classmethod
    def load(
        cls,
        files: str | Sequence[str],
        config: DataConfig,
        tokenizer: Tokenizer,
        max_samples: int = -1,
        key: str = "data.train_files",
    ) -> PromptDataset:
        """Read, render and fit the prompts of ``files``, which ``key`` of the configuration names: the first
        ``max_samples`` that can be used (-1: all). Raises DataError: a file that cannot be read; no rows, or none left;
        more bad rows than ``data.on_bad_row`` and ``data.max_skipped_fraction`` allow; prompts over the limit with
        ``data.truncation=error``; chat messages for a tokenizer without a chat template."""
        if max_samples == 0 or max_samples < -1:
            raise DataError(
                f"The number of rows to use from {key} is not positive.", max_samples, "use -1 for all rows"
            )
        paths = [files] if isinstance(files, str) else list(files)
        source = open_source(paths, config, tokenizer, max_samples, key)
        parts = _Parts(source, max_samples)
        for part in prepare_all(source, paths, config, tokenizer, key):
            parts.add(part)
            if parts.full:
                break
        parts.check(config, key)
        rows, over = np.concatenate(parts.rows), len(np.concatenate(parts.over))
        numbers = rows["number"].copy()
        return cls(
            LazyRows(source, numbers),
            parts.ids.finish(rows["length"]),
            dropped=over if config.filter_overlong_prompts else 0,
            truncated=0 if config.filter_overlong_prompts else over,
            skipped=parts.bad,
            numbers=numbers,
            entries=np.searchsorted(source.entry_starts, numbers, side="right").astype(np.int32) - 1,
            sources=np.array(list(parts.names), object)[rows["source"]],  # type: ignore[arg-type]
            weights=rows["weight"].copy() if config.sampler.weight_column else np.zeros(0),
            exemplars=[row for i in sorted(set(parts.kinds.values())) for row in _good(source.read(i, i + 1))],
            content_hash=parts.digest.hexdigest(),
        )

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, places: Sequence[int], split: str, draws: Sequence[int]) -> DataProto:
        """The rows at ``places`` as a prompt batch (no tensors; columns uid, prompt_ids, raw_prompt, ...). ``split,
        draws``: what is in each row's uid beside its source and number."""
        rows = [self.rows[i] for i in places]
        named = zip(rows, draws, strict=True)
        columns: dict[str, list[Any]] = {
            "uid": [f"{split}:{draw}:{row.data_source}:{row.row_index}" for row, draw in named],
            # Copies: what a later stage does to its batch must not reach the dataset.
            "prompt_ids": [list(self.prompt_ids[i]) for i in places],
            "raw_prompt": [row.prompt for row in rows],
            "data_source": [row.data_source for row in rows],
            "ground_truth": [row.ground_truth for row in rows],
            "extra_info": [dict(row.extra_info) for row in rows],
            "row_index": [row.row_index for row in rows],
            # What extra_info does not hold: rows cross processes once a response.
            "columns": [{k: v for k, v in row.columns.items() if row.extra_info.get(k) is not v} for row in rows],
        }
        return DataProto.from_dict(tensors={}, non_tensors=columns, meta_info={})


class _Parts:
    """Prepared chunks, put together in order up to the number of rows that is wanted."""

    def __init__(self, source: RowSource, max_samples: int) -> None:
        self.source = source
        self.wanted = max_samples if max_samples > 0 else len(source)
        self.rows: list[np.ndarray] = []
        self.over: list[np.ndarray] = []
        self.names: dict[str, int] = {}
        self.bad: list[BadRow] = []
        self.kinds: dict[str, int] = {}
        self.ids = TokenStore()
        self.digest = hashlib.sha256()
        self.count = 0

    @property
    def full(self) -> bool:
        return self.count >= self.wanted

    def add(self, part: Prepared) -> None:
        part = part.first(self.wanted - self.count)
        self.count += len(part.rows)
        rows = part.rows.copy()
        places = np.array([self.names.setdefault(name, len(self.names)) for name in part.names], np.int32)
        rows["source"] = places[rows["source"]]
        self.rows.append(rows)
        self.over.append(part.over)
        self.bad += part.bad
        self.kinds = part.kinds | self.kinds
        self.ids.add(part.ids)
        self.digest.update(rows["digest"].tobytes())

    def check(self, config: DataConfig, key: str) -> None:
        """Refuse what cannot be trained on; see :meth:`PromptDataset.load`."""
        over, filtered = np.concatenate(self.over), config.filter_overlong_prompts
        read = self.count + len(self.bad) + (len(over) if filtered else 0)
        allowed = 0.0 if config.on_bad_row == "error" else config.max_skipped_fraction
        if len(self.bad) > allowed * read:
            raised = f"data.max_skipped_fraction (now {config.max_skipped_fraction:g})"
            raise too_many_bad(self.bad, read, key, raised if config.on_bad_row == "skip" else None)
        limit = config.max_prompt_length
        if filtered and not self.count:
            raise DataError(
                f"{len(over)} of {read} prompts were filtered: all are longer than data.max_prompt_length={limit}.",
                f"the shortest has {over['length'].min()} tokens",
                "raise data.max_prompt_length",
            )
        if config.truncation == "error" and not filtered and len(over):
            shown = [(row, n) for i, n in over[:SHOWN_ROWS].tolist() for row in _good(self.source.read(i, i + 1))]
            raise DataError(
                f"{len(over)} of {self.count} prompts are longer than data.max_prompt_length={limit}.",
                "; ".join(f"{row.location}: {length} tokens" for row, length in shown),
                "raise the limit, set data.filter_overlong_prompts=true, or set data.truncation to left, right or "
                "middle",
            )
        if not self.count:
            raise DataError(f"{key} holds no row that can be used.", self.source.name, "give a file with rows")


def _good(rows: Sequence[PromptRow | BadRow]) -> list[PromptRow]:
    return [row for row in rows if isinstance(row, PromptRow)]


@dataclass(frozen=True)
class LazyRows(Sequence[PromptRow]):
    """Rows of a source, read when they are asked for; ``numbers``: (N,) int64, ascending: which rows of the source."""

    source: RowSource
    numbers: np.ndarray

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, place: int) -> PromptRow:  # type: ignore[override]
        number = int(self.numbers[place])
        row = self.source.read(number, number + 1)[0]
        if isinstance(row, BadRow):  # only a class of the user's can change its mind
            raise DataError("A row that could be used cannot be read again.", row, "the same row must be given always")
        return row


class TokenRows(Sequence[list[int]]):
    """Lists of token ids of unequal ``lengths`` (N,), end to end in one int32 array (T,); ``mapped``: the file map that
    it looks at, if it does."""

    def __init__(self, flat: np.ndarray, lengths: np.ndarray, mapped: mmap.mmap | None = None) -> None:
        self._flat, self._map = flat, mapped
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, place: int) -> list[int]:  # type: ignore[override]
        place = range(len(self))[place]
        start = int(self._ends[place - 1]) if place else 0
        ids: list[int] = self._flat[start : int(self._ends[place])].tolist()
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
        return ids


class TokenStore:
    """Collects token ids: in memory, and beyond ``IDS_IN_MEMORY`` in a file without a name, gone with the process."""

    def __init__(self) -> None:
        self._held: list[np.ndarray] = []
        self._size = 0
        self._file: BinaryIO | None = None

    def add(self, ids: np.ndarray) -> None:
        """(T,) int32 ids of the next rows."""
        self._held.append(ids)
        self._size += ids.nbytes
        if self._size > IDS_IN_MEMORY:
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=data_cache())  # noqa: SIM115  (mapped until the process ends)
            for part in self._held:
                self._file.write(part.tobytes())
            self._held, self._size = [], 0

    def finish(self, lengths: np.ndarray) -> TokenRows:
        """All that was added, cut into (N,) ``lengths``."""
        if self._file is None:
            return TokenRows(np.concatenate(self._held), lengths)
        for part in self._held:
            self._file.write(part.tobytes())
        self._file.flush()
        mapped = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
        return TokenRows(np.frombuffer(mapped, np.int32), lengths, mapped)
