"""Sampling one token for each row from tempered logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from verl.rollout.protocol import SamplingParams
from verl.rollout.seeds import uniforms

if TYPE_CHECKING:
    from verl.rollout.scheduler import Sequence as Draft


@dataclass(frozen=True)
class SampledTokens:
    tokens: Tensor  # (N,) int64
    log_probs: Tensor  # (N,) float32, over the whole vocabulary
    kept_log_mass: Tensor  # (N,) float32, 0 where nothing is cut


class Sampler:
    """The draws of one engine. What follows from the parameters of a batch is kept for as long as its rows stay."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self._vocabulary, self._device = vocabulary, device
        self._drafts: list[Draft] = []
        self._rows = RowParameters([], vocabulary, device)

    def temperatures(self, drafts: Sequence[Draft]) -> Tensor:
        """(N,) float32; 0 for greedy rows."""
        return self._rows_of(drafts).temperature

    def draw(self, logits: Tensor, drafts: Sequence[Draft]) -> SampledTokens:
        """The next token of each draft, from its own random stream at its own position; ``logits`` (N, V) tempered."""
        rows = self._rows_of(drafts)
        positions = np.array([len(draft.ids) for draft in drafts], dtype=np.int64)
        return sample(logits, torch.from_numpy(uniforms(rows.seeds, positions)).to(self._device), rows)

    def _rows_of(self, drafts: Sequence[Draft]) -> RowParameters:
        if len(drafts) != len(self._drafts) or not all(map(is_, drafts, self._drafts)):
            self._drafts = list(drafts)
            parameters = [draft.request.sampling for draft in drafts]
            self._rows = RowParameters(parameters, self._vocabulary, self._device)
        return self._rows


class RowParameters:
    """The sampling parameters of N rows as tensors, and which rows need more than a plain draw."""

    def __init__(self, parameters: Sequence[SamplingParams], vocabulary: int, device: torch.device) -> None:
        self.temperature = torch.tensor([p.temperature for p in parameters], dtype=torch.float32, device=device)
        self.seeds = np.array([p.seed for p in parameters], dtype=np.uint64)
        self.greedy = _places([p.greedy for p in parameters], device)
        top_k = [p.top_k if p.top_k and 0 < p.top_k < vocabulary else vocabulary for p in parameters]
        cut = [not p.greedy and (p.top_p < 1.0 or k < vocabulary) for p, k in zip(parameters, top_k, strict=True)]
        self.cut = _places(cut, device)
        self.top_k = torch.tensor(top_k, dtype=torch.int64, device=device)[self.cut]
        self.top_p = torch.tensor([p.top_p for p in parameters], dtype=torch.float32, device=device)[self.cut]


def _places(chosen: Sequence[bool], device: torch.device) -> Tensor:
    return torch.tensor([i for i, yes in enumerate(chosen) if yes], dtype=torch.int64, device=device)


def sample(logits: Tensor, uniform: Tensor, rows: RowParameters) -> SampledTokens:
    """Inverse-CDF sampling; a row's outcome depends on that row alone.

    Logits that are not finite give an id of no meaning and a log-prob of NaN, for the caller to see.

    Args:
        logits: (N, V) float32, tempered.
        uniform: (N,) float32 in [0, 1); greedy rows take the most likely token whatever it is.
    """
    log_p = torch.log_softmax(logits, -1)
    mass = torch.zeros_like(uniform)
    if len(rows.greedy) == len(logits):
        tokens = logits.argmax(-1)
    else:
        probs = log_p.exp()
        if len(rows.cut):
            probs[rows.cut], mass[rows.cut] = truncate(probs[rows.cut], rows.top_p, rows.top_k)
        tokens = draw(probs, uniform)
        if len(rows.greedy):
            tokens[rows.greedy] = logits[rows.greedy].argmax(-1)
    return SampledTokens(tokens, log_p.gather(1, tokens[:, None])[:, 0], mass)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """(N,) tokens: the first whose share of the mass, with all before it, exceeds ``uniform``. ``probs``: (N, V)."""
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:].contiguous()
    picked = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
    # u * total can round up to total: the last token that has any mass is then meant, not one beyond the vocabulary.
    return torch.minimum(picked, torch.searchsorted(cdf, total))[:, 0].clamp(max=probs.shape[1] - 1)


def truncate(probs: Tensor, top_p: Tensor, top_k: Tensor) -> tuple[Tensor, Tensor]:
    """Zero what top-k and then top-p drop: the smallest set of most likely tokens whose mass reaches top-p stays.

    Args:
        probs: (N, V) float32.
        top_p: (N,); 1 is off.
        top_k: (N,); V is off.

    Returns:
        probs with the dropped tokens at 0, and the log of the kept mass (N,).
    """
    ordered, index = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[1], device=probs.device)
    keep = rank < top_k[:, None]
    ordered = torch.where(keep, ordered, 0.0)
    reached = ordered.cumsum(-1)  # not sum: with one row its bits depend on the threads
    before = (reached - ordered) / reached[:, -1:]  # mass of the more likely tokens, after top-k
    keep &= (before < top_p[:, None]) | (top_p[:, None] >= 1.0) | (rank == 0)
    kept = torch.where(keep, ordered, 0.0)
    return torch.zeros_like(probs).scatter_(1, index, kept), kept.cumsum(-1)[:, -1].log()
