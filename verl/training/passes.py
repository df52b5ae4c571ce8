"""How a role goes through a batch: its micro-batches on this rank, and what happens when memory does not suffice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from verl.algorithms.metric import Metric, merge_all
from verl.errors import OutOfMemoryError, RanksLostError, first_line
from verl.models.packed import PackedBatch
from verl.protocol import DataProto
from verl.run_dir import write_atomic
from verl.training.micro_batches import Limits, MicroBatch, micro_batches
from verl.training.optimizer import Optimizer
from verl.training.parallel import ALONE, PassAbandonedError, Ranks

T = TypeVar("T")
Metrics = dict[str, Metric]

# How allocators say it, beside exceptions of their own: of the CPU, of CUDA, of Python.
_MESSAGES = ("not enough memory", "can't allocate memory", "out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


class Passes:
    """Forward and backward passes of one role.

    Args:
        role: for messages and metrics.
        limits: of one micro-batch.
        ranks: that share the rows of every batch.
        adapt: when memory runs out, all ranks halve their limits and start the pass over (``auto_micro_batch``).
        abandon: makes the model ready for another pass after one that was broken off.

    Attributes:
        whole_tokens, packed_tokens: of all rows that optimizer steps went through on this rank, each counted whole,
            and as they were packed: with a group's prompt once.
    """

    def __init__(
        self,
        role: str,
        limits: Limits,
        ranks: Ranks = ALONE,
        adapt: bool = False,
        abandon: Callable[[], None] = lambda: None,
    ) -> None:
        self.role, self.limits, self.ranks, self.adapt, self._abandon = role, limits, ranks, adapt, abandon
        self.whole_tokens = self.packed_tokens = 0
        self._configured = limits

    def save(self, folder: Path) -> None:
        """Note in a checkpoint folder that is being made what :attr:`limits` have come to."""
        if self.limits != self._configured and self.ranks.rank == 0:
            known = {"configured": asdict(self._configured), "now": asdict(self.limits)}
            write_atomic(folder / f"{self.role}_limits.json", json.dumps(known))

    def load(self, folder: Path) -> None:
        """Go on with what was noted there, unless other limits are configured by now."""
        file = folder / f"{self.role}_limits.json"
        known = json.loads(file.read_text()) if file.exists() else {}
        if known.get("configured") == asdict(self._configured):
            self.limits = Limits(**known["now"])

    @torch.no_grad()
    def column(self, batch: DataProto, device: torch.device, compute: Callable[[PackedBatch], Tensor]) -> Tensor:
        """A (B, R) float32 column from a value per response token, in the rows' own order; 0 at padding.

        Whole on every rank.
        """

        def fill() -> Tensor:
            out = torch.zeros(batch.tensors["responses"].shape, dtype=torch.float32)
            for part in micro_batches(batch, self.limits, device, ranks=self.ranks):
                with self._watched(part):
                    values = part.packed.scatter(compute(part.packed).float()).cpu()
                if not part.idle:
                    out[part.rows] = values
            return out

        out = self._adapted(batch, fill)
        self.ranks.sum_([out], f"columns of the {self.role}")
        return out

    def step(
        self,
        optimizer: Optimizer,
        batch: DataProto,
        device: torch.device,
        columns: tuple[str, ...],
        loss_of: Callable[[MicroBatch], tuple[Tensor, Metrics]],
        learning_rate: float,
        without_gradient: Sequence[int] = (),
    ) -> Metrics:
        """One optimizer step. Rows without a trained token have no part in it, and none in its metrics.

        Args:
            columns: that ``loss_of`` needs.
            loss_of: a micro-batch's addend to the loss, and its metrics.
            without_gradient: rows whose loss is known to have none; only their metrics are computed.
        """
        lengths = batch.tensors["attention_mask"].sum(1) - 1  # a row's last token is not packed
        counted = batch.tensors["response_mask"].bool().any(1).nonzero().flatten().tolist()
        watched = set(without_gradient)
        kinds = [row for row in counted if row not in watched], [row for row in counted if row in watched]

        def run() -> list[Metrics]:
            optimizer.clear()
            parts = []
            for rows, backward in zip(kinds, (True, False), strict=True):
                cut = micro_batches(batch, self.limits, device, columns, self.ranks, rows) if rows else iter(())
                for part, last in with_last(cut):
                    with self._watched(part), torch.set_grad_enabled(backward):
                        loss, metrics = loss_of(part)
                        if backward:
                            optimizer.backward(loss, last)
                        elif not bool(torch.isfinite(loss)):
                            optimizer.spoil()  # broken weights or columns: the step must not pass for a good one
                    parts.append(metrics)
                    self.whole_tokens += 0 if part.idle else int(lengths[part.rows].sum())
                    self.packed_tokens += int(part.packed.cu_seqlens[-1])
            return parts

        parts = self._adapted(batch, run)
        found = optimizer.step(learning_rate)
        return merge_all([*parts, found] if self.ranks.rank == 0 else parts)

    def _adapted(self, batch: DataProto, run: Callable[[], T]) -> T:
        """Run to the end on all ranks; again with smaller micro-batches where the memory of one does not suffice.

        Where layers are gathered from all ranks, the others are in the middle of the pass, and hear of it at their next
        exchange (:meth:`Ranks.go_on`), to which the word of the one that failed belongs; else at the end of theirs.
        """
        what = f"a pass of the {self.role}"  # whose layers are gathered from all ranks where they are sharded
        if not self.adapt:
            with self.ranks.waiting_for(what):
                return run()
        while True:
            failure: OutOfMemoryError | None = None
            told = False
            try:
                with self.ranks.waiting_for(what):
                    result = run()
            except (OutOfMemoryError, RuntimeError, MemoryError) as error:
                failure = self._failure(error).with_traceback(None)  # its frames hold the tensors that are to make room
                failure.__cause__ = failure.__context__ = None
            except PassAbandonedError:
                told = True
            word = f"word that the {self.role}'s pass fits into memory"
            if not told and not self.ranks.any(failure is not None, word):
                return result
            self._abandon()
            smaller = _halved(self.limits, batch)
            if smaller == self.limits:
                raise failure or RanksLostError(f"another training rank has no memory for one row of the {self.role}")
            self.limits = smaller
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()

    def _failure(self, error: Exception) -> OutOfMemoryError:
        """What went wrong within a micro-batch, or between two of them."""
        if isinstance(error, OutOfMemoryError):
            return error
        if not is_out_of_memory(error):
            raise error
        return OutOfMemoryError(f"not enough memory for a batch of the {self.role}", first_line(error))

    def _watched(self, part: MicroBatch) -> AbstractContextManager[None]:
        role = "actor" if self.role == "reference" else self.role
        names = f"{role}.ppo_micro_batch_size_per_gpu", f"{role}.ppo_max_token_len_per_gpu"
        knob, value = (names[0], self.limits.rows) if self.limits.tokens is None else (names[1], self.limits.tokens)
        lower = f"lower {knob} (now {value})" + (f" or log_prob_{knob[10:]} of ref" if role != self.role else "")
        return watched(part, f"the {self.role}", f"{lower}, set actor.auto_micro_batch=true")


def with_last(parts: Iterator[T]) -> Iterator[tuple[T, bool]]:
    """Each, and whether it is the last."""
    ahead = next(parts, None)
    while (part := ahead) is not None:
        ahead = next(parts, None)
        yield part, ahead is None


@contextmanager
def watched(part: MicroBatch, whose: str, fix: str) -> Iterator[None]:
    """Raises OutOfMemoryError, which says what did not fit, for an allocator's error."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        rows, tokens = part.packed.shape[0], part.packed.input_ids.shape[0]
        longest = int(part.packed.position_ids.max()) + 2  # the last token of a response is not packed
        said = first_line(error)
        raise OutOfMemoryError(
            f"not enough memory for a micro-batch of {whose}",
            f"{rows} rows, {tokens} packed tokens, longest row {longest}: {said}",
            f"{fix}, or model.enable_gradient_checkpointing=true",
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocator raised this."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(said in str(error) for said in _MESSAGES)


def _halved(limits: Limits, batch: DataProto) -> Limits:
    """Half of each limit, but a row must still fit."""
    longest = int(batch.tensors["attention_mask"].sum(1).max())
    return replace(
        limits,
        rows=None if limits.rows is None else max(1, limits.rows // 2),
        tokens=None if limits.tokens is None else min(limits.tokens, max(longest, limits.tokens // 2)),
    )
