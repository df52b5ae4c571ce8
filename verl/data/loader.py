"""The resumable stream of prompt batches drawn from a dataset, and passes over it for validation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from verl.data.dataset import PromptDataset
from verl.data.samplers import EpochSampler, Sampler
from verl.errors import DataError
from verl.protocol import DataProto

STATE_VERSION = 2


class PromptLoader:
    """An endless, seeded, resumable stream of prompt batches.

    A batch never straddles two epochs. With the usual sampler every row is drawn at most once in an epoch; exactly once
    when ``drop_last`` is off or the batch size divides the dataset. Raises DataError: the dataset, or an epoch of the
    sampler, is smaller than a batch.

    Args:
        batch_size: prompts a batch.
        sampler: which rows; None: all in the order of the files.
        drop_last: leave out the short batch at the end of an epoch, else give it.
        split: first part of every uid.
    """

    def __init__(
        self,
        dataset: PromptDataset,
        batch_size: int,
        sampler: Sampler | None = None,
        drop_last: bool = True,
        split: str = "train",
    ) -> None:
        if batch_size < 1:
            raise DataError("data.train_batch_size (prompts) is not positive.", batch_size, "use at least 1")
        self.sampler = sampler or EpochSampler(len(dataset), seed=0, shuffle=False)
        for what, size in (("The dataset", len(dataset)), ("An epoch of the sampler", self.sampler.size)):
            if size < batch_size:
                raise DataError(
                    f"{what} is smaller than a batch: {size} prompts, data.train_batch_size={batch_size}.",
                    f"{dataset.dropped} prompts were filtered as too long" if dataset.dropped else None,
                    f"set data.train_batch_size to at most {size}, or give more data",
                )
        self.dataset, self.batch_size, self.drop_last, self.split = dataset, batch_size, drop_last, split
        self.epoch = 0  # the epoch of the latest batch
        self._position = 0  # rows of this epoch already drawn
        self._draw = 0  # rows drawn since the start of the stream: part of every uid

    @property
    def steps_per_epoch(self) -> int:
        """Batches in one epoch."""
        full, rest = divmod(self.sampler.size, self.batch_size)
        return full + (1 if rest and not self.drop_last else 0)

    def next_batch(self, size: int | None = None) -> DataProto:
        """The next prompts, B = ``batch_size`` (fewer in the last batch of an epoch without ``drop_last``). ``size``:
        another B. Raises DataError: a sampler of the user's own gives a whole epoch without a batch."""
        places = self._next_places(size or self.batch_size)
        draws = range(self._draw, self._draw + len(places))
        self._position += len(places)
        self._draw += len(places)
        return self.dataset.batch(places, self.split, draws)

    def recall(self, uids: list[str]) -> DataProto:
        """Prompts that were drawn, once more."""
        parts = [uid.split(":") for uid in uids]  # the name of a source may have colons, too
        places = np.searchsorted(self.dataset.numbers, [int(part[-1]) for part in parts])
        return self.dataset.batch(places.tolist(), self.split, [int(part[1]) for part in parts])

    def _next_places(self, size: int) -> list[int]:
        least = size if self.drop_last else 1
        for _ in range(2):
            left = self.sampler.size - self._position
            if left >= least:
                places = self.sampler.take(self.epoch, self._position, self._draw, min(size, left))
                if len(places) >= least:
                    return places
            self.epoch, self._position = self.epoch + 1, 0
        fix = f"it must give {least} rows or more"
        raise DataError("The sampler gave an epoch without a batch.", f"epoch {self.epoch - 1}", fix)

    def learn(self, batch: DataProto) -> None:
        """Tell the sampler how the responses to drawn prompts were scored (columns uid, row_index, score)."""
        self.sampler.learn(batch)

    def state_dict(self) -> dict[str, Any]:
        """The state of the stream: JSON values, and arrays where the sampler has them."""
        return {
            "version": STATE_VERSION,
            "epoch": self.epoch,
            "position": self._position,
            "draw": self._draw,
            "settings": self.sampler.settings,
            "sampler": self.sampler.state_dict(),
            "rows": len(self.dataset),
            "content_hash": self.dataset.content_hash,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where the stream of ``state`` was.

        The batch size may have changed since; dataset, seed and way of drawing may not. Raises DataError: the state is
        of another dataset or another order, or is not such a state.
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
        self._check_settings(state["settings"])
        epoch, position, draw = (int(state[name]) for name in ("epoch", "position", "draw"))
        if epoch < 0 or draw < 0 or not 0 <= position <= self.sampler.size:
            raise DataError("The saved state of the data loader is damaged.", state, "use an older checkpoint")
        self.epoch, self._position, self._draw = epoch, position, draw
        self.sampler.load_state_dict(state["sampler"])

    def _check_settings(self, then: dict[str, Any]) -> None:
        now = self.sampler.settings
        for name in ("seed", "shuffle"):
            if name in then and name in now and then[name] != now[name]:
                raise DataError(
                    f"data.{name} is not what the checkpoint was made with.",
                    f"then {then[name]}, now {now[name]}",
                    f"set data.{name}={json.dumps(then[name])}, or start anew with trainer.resume_mode=disable",
                )
        if then != now:
            raise DataError(
                "data.sampler is not what the checkpoint was made with.",
                f"then {json.dumps(then)}, now {json.dumps(now)}",
                "set it as it was, or start anew with trainer.resume_mode=disable",
            )


def iterate_once(
    dataset: PromptDataset, batch_size: int | None = None, split: str = "val", pass_number: int = 0
) -> Iterator[DataProto]:
    """Batches that hold every row exactly once, in order; the last may be short. Nothing is padded or repeated.
    ``batch_size``: prompts a batch; None: the whole dataset at once. ``pass_number``: number of this validation pass,
    the draw in the uids."""
    if batch_size is not None and batch_size < 1:
        raise DataError("data.val_batch_size (prompts) is not positive.", batch_size, "use at least 1, or null for all")
    size = batch_size or max(len(dataset), 1)
    for start in range(0, len(dataset), size):
        places = range(start, min(start + size, len(dataset)))
        yield dataset.batch(places, split, [pass_number] * len(places))
