"""A dataset of rendered prompts and the resumable stream of batches drawn from it.

The order of an epoch is a pure function of (seed, epoch, number of rows), made of integer arithmetic only, so that a
run resumed years later under another numpy still sees the same prompts. The whole state of the stream is therefore
three counters; no random generator has to be saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.data.rendering import fit, render
from verl.data.rows import PromptRow, read_prompt_rows
from verl.errors import DataError
from verl.protocol import DataProto

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import DataConfig

STATE_VERSION = 1


@dataclass(frozen=True)
class PromptDataset:
    """Rows of one or more files with the token ids of their prompts.

    Attributes:
        rows, prompt_ids: the same length; ids without padding.
        dropped, truncated: rows over the length limit that were removed, or cut.
    """

    rows: list[PromptRow]
    prompt_ids: list[list[int]]
    dropped: int = 0
    truncated: int = 0
    content_hash: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "content_hash", _content_hash(self.rows, self.prompt_ids))

    @classmethod
    def load(
        cls,
        files: str | Iterable[str],
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        max_samples: int = -1,
        key: str = "data.train_files",
    ) -> PromptDataset:
        """Read, render and fit the prompts of ``files``.

        Args:
            max_samples: the first so many rows are used, counted after filtering; -1: all.
            key: the configuration key that named the files, for messages.

        Raises:
            DataError: see :func:`read_prompt_rows`, :func:`render`, :func:`fit`.
        """
        rows = read_prompt_rows(files, config, key)
        if max_samples == 0 or max_samples < -1:
            raise DataError(
                f"The number of rows to use from {key} is not positive.", max_samples, "use -1 for all rows"
            )
        wanted = max_samples if max_samples > 0 else len(rows)
        if not config.filter_overlong_prompts:
            rows = rows[:wanted]
        ids = render(rows, tokenizer, config.chat_template_kwargs)
        fitted = fit(rows, ids, config.max_prompt_length, config.truncation, config.filter_overlong_prompts)
        return cls(fitted.rows[:wanted], fitted.ids[:wanted], fitted.dropped, fitted.truncated)

    def __len__(self) -> int:
        return len(self.rows)

    def batch(self, indices: Sequence[int], uids: Sequence[str]) -> DataProto:
        """The rows at ``indices`` as a prompt batch (no tensors; columns uid, prompt_ids, raw_prompt, ...)."""
        rows = [self.rows[i] for i in indices]
        columns: dict[str, list[Any]] = {
            "uid": list(uids),
            # Copies: what a later stage does to its batch must not reach the dataset.
            "prompt_ids": [list(self.prompt_ids[i]) for i in indices],
            "raw_prompt": [row.prompt for row in rows],
            "data_source": [row.data_source for row in rows],
            "ground_truth": [row.ground_truth for row in rows],
            "extra_info": [dict(row.extra_info) for row in rows],
            "row_index": [row.row_index for row in rows],
        }
        return DataProto.from_dict(tensors={}, non_tensors=columns, meta_info={})


def _content_hash(rows: Sequence[PromptRow], prompt_ids: Sequence[Sequence[int]]) -> str:
    digest = hashlib.sha256()
    for row, ids in zip(rows, prompt_ids, strict=True):
        record = [row.row_index, row.data_source, row.prompt, row.ground_truth, list(ids)]
        # ASCII escapes keep lone surrogates encodable; repr serves types that only Arrow has (dates, decimals).
        digest.update(json.dumps(record, sort_keys=True, default=repr).encode("ascii"))
        digest.update(b"\n")
    return digest.hexdigest()


def epoch_order(size: int, seed: int, epoch: int) -> np.ndarray:
    """``(size,)`` int64 permutation of the rows for one epoch.

    Rows are sorted by a 64-bit key, splitmix64 (Steele, Lea, Flood 2014) of (hash of seed and epoch) + row number.
    """
    base = int.from_bytes(hashlib.sha256(f"prompt order {seed} {epoch}".encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        z = np.uint64(base) + (np.arange(size, dtype=np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z = z ^ (z >> np.uint64(31))
    return np.argsort(z, kind="stable").astype(np.int64)


class PromptLoader:
    """An endless, seeded, resumable stream of prompt batches.

    A batch never straddles two epochs. Within an epoch every row is drawn at most once; exactly once when
    ``drop_last`` is off or the batch size divides the dataset.

    Args:
        batch_size: prompts a batch.
        shuffle: a new order each epoch, from (seed, epoch); else the order of the files.
        drop_last: leave out the short batch at the end of an epoch, else give it.
        split: first part of every uid.

    Raises:
        DataError: the dataset is smaller than a batch.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        shuffle: bool = True,
        seed: int = 1,
        drop_last: bool = True,
        split: str = "train",
    ) -> None:
        if batch_size < 1:
            raise DataError("data.train_batch_size (prompts) is not positive.", batch_size, "use at least 1")
        if len(dataset) < batch_size:
            raise DataError(
                f"The dataset is smaller than a batch: {len(dataset)} prompts, data.train_batch_size={batch_size}.",
                f"{dataset.dropped} prompts were filtered as too long" if dataset.dropped else None,
                f"set data.train_batch_size to at most {len(dataset)}, or give more data",
            )
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.seed, self.drop_last, self.split = int(seed), drop_last, split
        self.epoch = 0  # the epoch of the latest batch
        self._position = 0  # rows of this epoch already drawn
        self._draw = 0  # rows drawn since the start of the stream: part of every uid
        self._order = self._epoch_order()

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def next_batch(self) -> DataProto:
        """The next prompts, B = ``batch_size`` (fewer in the last batch of an epoch without ``drop_last``)."""
        left = len(self.dataset) - self._position
        if left == 0 or (self.drop_last and left < self.batch_size):
            self.epoch, self._position = self.epoch + 1, 0
            self._order = self._epoch_order()
        indices = self._order[self._position : self._position + self.batch_size].tolist()
        rows = [self.dataset.rows[i] for i in indices]
        uids = [f"{self.split}:{self._draw + k}:{row.data_source}:{row.row_index}" for k, row in enumerate(rows)]
        self._position += len(indices)
        self._draw += len(indices)
        return self.dataset.batch(indices, uids)

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream as JSON values."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "position": self._position,
            "draw": self._draw,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "rows": len(self.dataset),
            "content_hash": self.dataset.content_hash,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the stream of ``state`` was.

        The batch size may have changed since; dataset, seed and shuffling may not.

        Raises:
            DataError: the state is of another dataset or another order, or is not such a state.
        """
        expected = self.state_dict()
        missing = sorted(set(expected) - set(state))
        if missing or state["version"] != STATE_VERSION:
            reason = f"it lacks {', '.join(missing)}" if missing else f"version {state['version']}"
            raise DataError("The saved state of the data loader cannot be used.", reason, "start without resuming")
        if (state["rows"], state["content_hash"]) != (expected["rows"], expected["content_hash"]):
            raise DataError(
                "The training data is not the data that the checkpoint was made with.",
                f"then {state['rows']} rows, hash {str(state['content_hash'])[:12]}; "
                f"now {expected['rows']} rows, hash {expected['content_hash'][:12]}",
                "give the same files, tokenizer and data settings, or start anew with trainer.resume_mode=disable",
            )
        for name in ("seed", "shuffle"):
            if state[name] != expected[name]:
                raise DataError(
                    f"data.{name} is not what the checkpoint was made with.",
                    f"then {state[name]}, now {expected[name]}",
                    f"set data.{name}={json.dumps(state[name])}, or start anew with trainer.resume_mode=disable",
                )
        epoch, position, draw = (int(state[name]) for name in ("epoch", "position", "draw"))
        if epoch < 0 or draw < 0 or not 0 <= position <= len(self.dataset):
            raise DataError("The saved state of the data loader is damaged.", state, "use an older checkpoint")
        self.epoch, self._position, self._draw = epoch, position, draw
        self._order = self._epoch_order()

    def _epoch_order(self) -> np.ndarray:
        if self.shuffle:
            return epoch_order(len(self.dataset), self.seed, self.epoch)
        return np.arange(len(self.dataset), dtype=np.int64)


def iterate_once(
    dataset: PromptDataset, batch_size: int | None = None, split: str = "val", pass_number: int = 0
) -> Iterator[DataProto]:
    """Batches that hold every row exactly once, in order; the last may be short. Nothing is padded or repeated.

    Args:
        batch_size: prompts a batch; None: the whole dataset at once.
        pass_number: number of this validation pass, the draw in the uids.
    """
    if batch_size is not None and batch_size < 1:
        raise DataError("data.val_batch_size (prompts) is not positive.", batch_size, "use at least 1, or null for all")
    size = batch_size or max(len(dataset), 1)
    for start in range(0, len(dataset), size):
        indices = range(start, min(start + size, len(dataset)))
        rows = [dataset.rows[i] for i in indices]
        uids = [f"{split}:{pass_number}:{row.data_source}:{row.row_index}" for row in rows]
        yield dataset.batch(indices, uids)
