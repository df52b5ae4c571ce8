"""From drawn prompts to requests, and from results to one padded batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from verl.config import Config, SamplingPlan
from verl.data.rows import Tokenizer
from verl.protocol import DataProto
from verl.protocol.columns import padded
from verl.protocol.keys import check_columns
from verl.rollout.protocol import BASELINE_INDEX, Request, Result, SamplingParams, Slot
from verl.rollout.seeds import slot_seed
from verl.rollout.text import response_text

OVER_PROMPTS = ("prompts", "input_ids", "attention_mask", "position_ids")  # left padded columns
TOKEN_IDS = ("prompts", "responses", "input_ids")

WIDTH_BUCKET = 8  # batches are padded to their longest row, rounded up to a multiple of this


@dataclass(frozen=True)
class Sampler:
    """Makes the requests of a batch of prompts and puts the results together."""

    plan: SamplingPlan  # temperature, truncation and responses a prompt
    config: Config  # lengths, stop conditions and the run's seed
    tokenizer: Tokenizer  # decodes responses for the reward functions; training never reads the text
    max_new_tokens: int | None = None  # of a response; None: ``data.max_response_length``

    def requests(self, prompts: DataProto) -> list[Request]:
        """``plan.n`` requests a prompt, those of a prompt side by side, a greedy baseline (index -1) behind them."""
        check_columns(prompts, "uid", "prompt_ids")
        columns = prompts.non_tensor_batch
        return [
            Request(Slot(uid, index), list(ids), self._params(uid, index))
            for uid, ids in zip(columns["uid"], columns["prompt_ids"], strict=True)
            for index in self.indices
        ]

    @property
    def indices(self) -> list[int]:
        """Of the responses to a prompt."""
        return [*range(self.plan.n), *([BASELINE_INDEX] if self.plan.greedy_baseline else [])]

    def _params(self, uid: str, index: int) -> SamplingParams:
        rollout = self.config.rollout
        return SamplingParams(
            max_new_tokens=self.max_new_tokens or self.config.data.max_response_length,
            temperature=0.0 if index == BASELINE_INDEX else self.plan.temperature,
            top_p=self.plan.top_p,
            top_k=self.plan.top_k,
            seed=slot_seed(self.config.trainer.seed, uid, index),
            stop=tuple(rollout.stop),
            stop_token_ids=tuple(rollout.stop_token_ids),
            ignore_eos=rollout.ignore_eos,
            min_p=self.plan.min_p,
            repetition_penalty=self.plan.repetition_penalty,
            presence_penalty=self.plan.presence_penalty,
            frequency_penalty=self.plan.frequency_penalty,
            logit_bias=self.plan.logit_bias,
            min_new_tokens=self.plan.min_new_tokens,
        )

    def assemble(self, prompts: DataProto, results: Sequence[Result]) -> DataProto:
        """One row a result: prompts left padded, responses right padded, masks from the engine's lengths."""
        rows = prompts.repeat(len(self.indices), interleave=True)
        pad = self.tokenizer.pad_token_id
        column = partial(padded, multiple=WIDTH_BUCKET)
        prompt_ids, prompt_mask = column(rows.non_tensor_batch["prompt_ids"].tolist(), pad, left=True)
        responses, mask = column([result.response_ids.tolist() for result in results], pad)
        log_probs, _ = column([result.log_probs.tolist() for result in results], 0.0, dtype=torch.float32)
        trained, _ = column([result.loss_mask.tolist() for result in results], False, dtype=torch.bool)
        versions, _ = column([result.versions.tolist() for result in results], 0, dtype=torch.int32)
        attention_mask = torch.cat([prompt_mask, mask], 1)
        newest = max((int(result.versions.max(initial=0)) for result in results), default=0)
        generated = DataProto.from_dict(
            tensors={
                "prompts": prompt_ids,
                "responses": responses,
                "input_ids": torch.cat([prompt_ids, responses], 1),
                "attention_mask": attention_mask,
                "position_ids": (attention_mask.cumsum(1) - 1).clamp(min=0),
                "response_mask": trained,
                "rollout_log_probs": log_probs,
                "versions": versions,
                "policy_version": torch.tensor([int(result.versions.min(initial=newest)) for result in results]),
            },
            non_tensors={
                "index": [result.slot.index for result in results],
                "finish_reason": [result.finish_reason for result in results],
                "response_text": [
                    response_text(r, self._decode, self.config.rollout.stop, self.plan.min_new_tokens) for r in results
                ],
            },
        )
        return rows.union(generated)

    def _decode(self, ids: Sequence[int] | NDArray[np.int32]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def join(batches: Sequence[DataProto], pad: int) -> DataProto:
    """Assembled batches as one: padded to the widest, with every column that any of them has (None where missing).

    Counts in ``meta_info["metrics"]`` add up.
    """
    prompt_width = max(batch.tensors["prompts"].shape[1] for batch in batches)
    response_width = max(batch.tensors["responses"].shape[1] for batch in batches)
    names = sorted({name for batch in batches for name in batch.non_tensor_batch})
    counts: Counter[str] = Counter()
    for batch in batches:
        counts.update(batch.meta_info.get("metrics", {}))
    joined = DataProto.concat([_widened(batch, prompt_width, response_width, pad, names) for batch in batches])
    joined.meta_info["metrics"] = dict(counts)
    return joined


def _widened(batch: DataProto, prompt_width: int, response_width: int, pad: int, names: Sequence[str]) -> DataProto:
    left = prompt_width - batch.tensors["prompts"].shape[1]
    right = response_width - batch.tensors["responses"].shape[1]
    tensors = {}
    for name, tensor in batch.tensors.items():
        if tensor.dim() == 2:
            sides = (left * (name in OVER_PROMPTS), right * (name != "prompts"))
            tensor = torch.nn.functional.pad(tensor, sides, value=pad if name in TOKEN_IDS else 0)
        tensors[name] = tensor
    missing = [None] * len(batch)
    columns = {name: batch.non_tensor_batch.get(name, missing) for name in names}
    return DataProto.from_dict(tensors, columns, batch.meta_info)
