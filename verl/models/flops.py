"""How many floating-point operations a pass takes, and how many this machine could do meanwhile."""

from __future__ import annotations

import time
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

TRAINING = 3  # forwards that an update costs: the backward pass is two (Kaplan et al. 2020, arXiv:2001.08361)


def forward_flops(model: PreTrainedModel, lengths: Tensor, responses: Tensor) -> float:
    """Of one forward over whole rows: two a weight and token, and causal attention (Chowdhery et al. 2022, PaLM,
    arXiv:2204.02311, appendix B).

    The vocabulary projection is computed for response tokens alone. All experts of a mixture count.

    Args:
        lengths: (B,) tokens of each row.
        responses: (B,) of these, those of the response.
    """
    config = model.config.get_text_config()
    table = model.get_input_embeddings().weight.numel()
    body = sum(p.numel() for p in model.base_model.parameters() if p.dim() >= 2) - table
    head = model.get_output_embeddings()
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    lengths = lengths.double()
    projected = float(responses.sum()) * (head.weight.numel() if head is not None else 0)
    attention = config.num_hidden_layers * width * float(lengths.square().sum())
    return 2 * (body * float(lengths.sum()) + projected + attention)


@cache
def peak_flops(dtype: torch.dtype, device: torch.device, threads: int) -> float:
    """Operations a second of a large matrix product, the best of five; ``threads``: that there are now."""
    size = 8192 if device.type == "cuda" else 512
    matrix = torch.ones(size, size, dtype=dtype, device=device)
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        (matrix @ matrix)[0, 0].item()  # waits for a GPU
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best
