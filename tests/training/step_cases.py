"""Tiny models in full precision and random processed batches, for the laws of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from verl.config.schema_data import Fp16Config
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm
from verl.models.policy import PolicyModel, ValueModel
from verl.protocol import DataProto
from verl.training.optimizer import MasterWeights, Optimizer
from verl.training.parallel import ALONE, Ranks
from verl.training.parallel_sharded import master_weights

FLOAT_COLUMNS = ("old_log_probs", "rollout_log_probs", "ref_log_probs", "advantages", "values", "returns")


@dataclass(repr=False)
class Policies:
    """A policy and a value model of one dtype, shared by all examples: no test moves their weights."""

    policy: PolicyModel
    policy_weights: MasterWeights
    value: ValueModel
    value_weights: MasterWeights


class WideNorm(LlamaRMSNorm):
    """transformers computes RMS norms in float32 whatever the model is in; a float64 law needs them in float64."""

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def load(folder: Path, dtype: torch.dtype, ranks: Ranks = ALONE, reshard: bool = True, adapt: bool = False) -> Policies:
    """Sharded where the ranks go in lockstep."""
    policy = PolicyModel(load_causal_lm(folder, dtype, attn_implementation=ATTENTION_NAME))
    value = ValueModel(load_causal_lm(folder, dtype, attn_implementation=ATTENTION_NAME)).to(dtype)
    for module in (*policy.modules(), *value.modules()):
        if dtype == torch.float64 and isinstance(module, LlamaRMSNorm):
            module.__class__ = WideNorm
    generator = torch.Generator().manual_seed(5)
    nn.init.normal_(value.value_head.weight, std=0.3, generator=generator)  # from zero nothing reaches the backbone
    settings = dtype, Fp16Config(), ranks, torch.device("cpu"), reshard, adapt
    return Policies(policy, master_weights(policy, *settings), value, master_weights(value, *settings))


@dataclass
class Shape:
    """Rows of a random batch: one entry of ``responses`` a row, ``groups`` the number of responses of each prompt."""

    prompt_lengths: list[int]
    groups: list[int]
    responses: list[int]
    seed: int


def make_batch(shape: Shape, garbage: float | None = None) -> DataProto:
    """A processed batch; masked positions and padding hold ``garbage`` (None: what a stage leaves there, zeros).

    About one response in five has its mask cleared, and masks have gaps.
    """
    rng = np.random.default_rng(shape.seed)
    rows = len(shape.responses)
    width, response_width = max(shape.prompt_lengths) + 2, max([*shape.responses, 1]) + 3
    token_fill = 256 if garbage is None else 7
    prompts = torch.full((rows, width), token_fill)
    responses = torch.full((rows, response_width), token_fill)
    attention = torch.zeros(rows, width + response_width, dtype=torch.int64)
    mask = torch.zeros(rows, response_width, dtype=torch.bool)
    uids = [group for group, count in enumerate(shape.groups) for _ in range(count)]
    texts = [torch.from_numpy(rng.integers(0, 256, length)) for length in shape.prompt_lengths]
    for row, (group, length) in enumerate(zip(uids, shape.responses, strict=True)):
        prompt = texts[group]
        prompts[row, width - len(prompt) :] = prompt
        responses[row, :length] = torch.from_numpy(rng.integers(0, 256, length))
        attention[row, width - len(prompt) : width + length] = 1
        trained = torch.from_numpy(rng.random(length) < 0.85)
        mask[row, :length] = trained & (rng.random() > 0.2)
    columns = {}
    for name in FLOAT_COLUMNS:
        scale = 1.0 if name in ("advantages", "values", "returns") else 0.3
        column = torch.from_numpy(rng.normal(0.0, scale, (rows, response_width))).float()
        column = column - 5.6 if name.endswith("log_probs") else column  # ln(1 / 264): near the models' own
        columns[name] = torch.where(mask, column, 0.0 if garbage is None else garbage)
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": responses,
            "attention_mask": attention,
            "response_mask": mask,
            **columns,
        },
        non_tensors={"uid": [f"train:{group}:test:0" for group in uids]},
        meta_info={"learning_rate": 0.0, "fresh_weights": True, "scheduled": {}},
    )


def capture_gradients(optimizer: Optimizer, weights: MasterWeights) -> dict[str, Tensor]:
    """Note the whole gradient of the next step, over all ranks, as it is before clipping."""
    seen: dict[str, Tensor] = {}
    real = weights.reduce_gradients

    def reduce_gradients() -> dict[str, Tensor]:
        weights.reduce_gradients = real  # type: ignore[method-assign]
        found = real()
        seen.update({name: gradient.clone() for name, gradient in found.items()})
        return found

    weights.reduce_gradients = reduce_gradients  # type: ignore[method-assign]
    return seen


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Norm of the difference over the norm of ``a``, over all parameters together."""
    assert a.keys() == b.keys()
    difference = math.sqrt(sum(float((a[n] - b[n]).double().square().sum()) for n in a))
    size = math.sqrt(sum(float(a[n].double().square().sum()) for n in a))
    return difference / size if size else difference
