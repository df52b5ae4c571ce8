"""A dataset of rows that are in memory already."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from verl.data.dataset import PromptDataset
from verl.data.prepare import digest, kinds_of
from verl.data.rows import PromptRow


def dataset_in_memory(rows: Sequence[PromptRow], prompt_ids: Sequence[Sequence[int]]) -> PromptDataset:
    hashed = hashlib.sha256()
    for row, ids in zip(rows, prompt_ids, strict=True):
        hashed.update(digest(row, ids).to_bytes(8, "little"))
    by_number = {row.row_index: row for row in rows}
    return PromptDataset(
        rows,
        prompt_ids,
        numbers=np.array([row.row_index for row in rows], np.int64),
        entries=np.zeros(len(rows), np.int32),
        sources=[row.data_source for row in rows],
        exemplars=[by_number[i] for i in sorted(set(kinds_of(rows).values()))],
        content_hash=hashed.hexdigest(),
    )
