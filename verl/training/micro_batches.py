"""From padded columns to packed micro-batches, and back to columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.advantages import group_index
from verl.data.packing import plan_micro_batches
from verl.models.packed import PackedBatch, pack_rows
from verl.protocol import DataProto
from verl.protocol.keys import check_columns


@dataclass(frozen=True)
class Limits:
    """What one forward may hold.

    Attributes:
        rows: most responses; None: as many as the tokens allow.
        tokens: most packed tokens; None: as many as the rows allow.
        share_prompts: a group's prompt is packed once a micro-batch.
    """

    rows: int | None
    tokens: int | None
    share_prompts: bool


@dataclass(frozen=True)
class MicroBatch:
    rows: Tensor  # (b,) int64: which rows of the batch
    packed: PackedBatch
    columns: dict[str, Tensor]  # the asked columns of these rows, (b, R) or (b,)


def micro_batches(
    batch: DataProto, limits: Limits, device: torch.device, columns: tuple[str, ...] = ()
) -> Iterator[MicroBatch]:
    """Split a batch by the limits and pack each part.

    Args:
        batch: rows with the columns of a finished rollout.
        columns: tensor columns to bring along.
    """
    check_columns(batch, "prompts", "responses", "attention_mask", "uid", *columns)
    tensors = batch.tensors
    width, response_width = tensors["prompts"].shape[1], tensors["responses"].shape[1]
    mask = tensors["attention_mask"].bool()
    prompt_lengths = mask[:, :width].sum(1).tolist()
    response_lengths = mask[:, width:].sum(1).tolist()
    groups = group_index(batch.non_tensor_batch["uid"].tolist()).tolist()
    prompts, responses = tensors["prompts"], tensors["responses"]
    plan = plan_micro_batches(
        response_lengths,
        groups,
        limits.rows,
        limits.tokens,
        prompt_lengths=prompt_lengths,
        shared=limits.share_prompts,
    )
    for rows in plan:
        packed = pack_rows(
            [prompts[i, width - prompt_lengths[i] :].tolist() for i in rows],
            [responses[i, : response_lengths[i]].tolist() for i in rows],
            response_width,
            [groups[i] for i in rows] if limits.share_prompts else None,
        )
        index = torch.tensor(rows)
        yield MicroBatch(
            index, packed.to(device), {name: tensors[name].index_select(0, index).to(device) for name in columns}
        )


@torch.no_grad()
def column(batch: DataProto, limits: Limits, device: torch.device, compute: Callable[[PackedBatch], Tensor]) -> Tensor:
    """A (B, R) float32 column from a value per response token, in the rows' own order; 0 at padding."""
    out = torch.zeros(batch.tensors["responses"].shape, dtype=torch.float32)
    for part in micro_batches(batch, limits, device):
        out[part.rows] = part.packed.scatter(compute(part.packed).float()).cpu()
    return out
