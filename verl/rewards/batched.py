"""What reward functions that take a whole batch (TRL's and OpenRLHF's signatures) are called with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from verl.protocol import DataProto
from verl.rewards.custom import OPENRLHF, TRL, UserFunction

COLUMNS = ("responses", "attention_mask", "prompt_ids", "raw_prompt", "columns")
"""What the batch must have, beside the columns that every reward is told of."""

ALWAYS = ("data_source", "ground_truth", "extra_info")
"""Columns that a function in TRL's signature finds whatever its file has."""

Decode = Callable[[list[int]], str]


def arguments(function: UserFunction, rows: DataProto, decode: Decode | None) -> dict[str, list[Any]]:
    """Keyword arguments of one call for all rows: lists, aligned with the rows; ``decode``: token ids to text, special
    tokens included; OpenRLHF's signature needs it."""
    told = _trl(rows) if function.signature is TRL else _openrlhf(rows, decode)
    # Only what it takes is copied, and each row by itself: what the function does to a value must not reach the dataset
    # or the other responses of the group.
    return {name: [copy.deepcopy(value) for value in told[name]] for name in told if function.takes(name)}


def _trl(rows: DataProto) -> dict[str, list[Any]]:
    columns, tensors = rows.non_tensor_batch, rows.batch
    prompts, texts = columns["raw_prompt"].tolist(), columns["response_text"].tolist()
    responses = tensors["responses"]
    lengths = tensors["attention_mask"][:, -responses.shape[1] :].sum(1).tolist()
    always = {name: columns[name].tolist() for name in ALWAYS}
    own = [
        {**(extra or {}), **dict(zip(always, row, strict=True)), **further}
        for extra, further, *row in zip(columns["extra_info"], columns["columns"], *always.values(), strict=True)
    ]
    return {
        **{name: [row.get(name) for row in own] for name in dict.fromkeys(name for row in own for name in row)},
        "prompts": prompts,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ],
        "completion_ids": [ids[:length].tolist() for ids, length in zip(responses, lengths, strict=True)],
    }


def _openrlhf(rows: DataProto, decode: Decode | None) -> dict[str, list[Any]]:
    assert decode is not None, "OpenRLHF's signature needs a tokenizer"
    columns = rows.non_tensor_batch
    prompts = [decode([int(token) for token in ids]) for ids in columns["prompt_ids"]]
    queries = [prompt + text for prompt, text in zip(prompts, columns["response_text"], strict=True)]
    return dict(zip(OPENRLHF.given, (queries, prompts, columns["ground_truth"].tolist()), strict=True))
