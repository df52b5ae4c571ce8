"""From padded columns to packed micro-batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algorithms.advantage_inputs import group_index
from verl.data.packing import plan_ranks
from verl.models.packed import PackedBatch, pack_rows
from verl.protocol import DataProto
from verl.protocol.keys import check_columns
from verl.training.parallel import ALONE, Ranks


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
    """Rows of a batch, packed.

    An idle one keeps step with other ranks whose forward passes are collectives: some row's first tokens, whose
    ``response_mask`` is cleared, so that it adds 0 to every loss, gradient and metric.
    """

    rows: Tensor  # (b,) int64: which rows of the batch
    packed: PackedBatch
    columns: dict[str, Tensor]  # the asked columns of these rows, (b, R) or (b,)
    idle: bool = False


def micro_batches(
    batch: DataProto,
    limits: Limits,
    device: torch.device,
    columns: tuple[str, ...] = (),
    ranks: Ranks = ALONE,
    rows: Sequence[int] | None = None,
) -> Iterator[MicroBatch]:
    """Split a batch by the limits and pack each part.

    Args:
        batch: rows with the columns of a finished rollout.
        columns: tensor columns to bring along.
        ranks: the micro-batches of this one.
        rows: only these; None: all.
    """
    check_columns(batch, "prompts", "responses", "attention_mask", "uid", *columns)
    tensors = batch.tensors
    width, response_width = tensors["prompts"].shape[1], tensors["responses"].shape[1]
    mask = tensors["attention_mask"].bool()
    prompt_lengths = mask[:, :width].sum(1).tolist()
    response_lengths = mask[:, width:].sum(1).tolist()
    groups = group_index(batch.non_tensor_batch["uid"].tolist()).tolist()
    prompts, responses = tensors["prompts"], tensors["responses"]
    chosen = range(len(batch)) if rows is None else rows
    plan = plan_ranks(
        [response_lengths[i] for i in chosen],
        [groups[i] for i in chosen],
        limits.rows,
        limits.tokens,
        prompt_lengths=[prompt_lengths[i] for i in chosen],
        shared=limits.share_prompts,
        ranks=ranks.size,
        balance=ranks.balance,
        lockstep=ranks.lockstep,
    )[ranks.rank]
    for part in plan:
        idle, part = not part, [chosen[place] for place in part] or [chosen[0]]
        packed = pack_rows(
            [prompts[i, width - prompt_lengths[i] :][: 1 if idle else None].tolist() for i in part],
            [responses[i, : 1 if idle else response_lengths[i]].tolist() for i in part],
            response_width,
            [groups[i] for i in part] if limits.share_prompts else None,
        )
        index = torch.tensor(part)
        brought = {name: tensors[name].index_select(0, index).to(device) for name in columns}
        if idle and "response_mask" in brought:
            brought["response_mask"] = torch.zeros_like(brought["response_mask"])
        yield MicroBatch(index, packed.to(device), brought, idle)
