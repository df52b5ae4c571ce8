"""Sampling one token for each row from tempered logits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.rollout.adjustments import Adjustments
from verl.rollout.seeds import uniforms

if TYPE_CHECKING:
    from verl.rollout.scheduler import Sequence as Draft

CACHED_LOGITS = 2**19  # that stay in a CPU core's cache with what is computed of them
BLOCK = 256  # tokens; a draw finds its block by the blocks' masses, and then its token in there
CANDIDATES = (256, 4096)  # likeliest tokens that are put in order to find a kept set, before all are


@dataclass(frozen=True)
class SampledTokens:
    tokens: Tensor  # (N,) int64
    log_probs: Tensor  # (N,) float32, of the tempered model over the whole vocabulary
    kept_log_mass: Tensor  # (N,) float32, 0 where nothing is cut


class Sampler:
    """The draws of one engine. What follows from the parameters of a batch is kept for as long as its rows stay.

    Attributes:
        rows_at_once: whose logits are looked at together.
    """

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary, self._device = vocabulary, device
        self.rows_at_once = max(1, CACHED_LOGITS // vocabulary) if device.type == "cpu" else 2**31
        self._drafts: list[Draft] = []
        self._rows: list[RowParameters] = []

    def temperatures(self, drafts: Sequence[Draft]) -> Tensor:
        """(N,) float32; 0 for greedy rows."""
        return torch.cat([rows.temperature for rows in self._rows_of(drafts)])

    def draw(self, pieces: Iterable[Tensor], drafts: Sequence[Draft]) -> SampledTokens:
        """The next token of each draft, from its own random stream at its own position.

        Args:
            pieces: tempered logits, (``rows_at_once``, V) each, the last of the N rows that are left.
        """
        each = self.uniforms(drafts).split(self.rows_at_once)
        drawn = [sample(*piece) for piece in zip(pieces, each, self._rows_of(drafts), strict=True)]
        return SampledTokens(*(torch.cat([getattr(part, name) for part in drawn]) for name in vars(drawn[0])))

    def uniforms(self, drafts: Sequence[Draft]) -> Tensor:
        """(N,) float32 in [0, 1): the next draw of each draft's random stream."""
        seeds = np.concatenate([rows.seeds for rows in self._rows_of(drafts)])
        positions = np.array([len(draft.ids) for draft in drafts], dtype=np.int64)
        return torch.from_numpy(uniforms(seeds, positions)).to(self._device)

    def is_plain(self, drafts: Sequence[Draft]) -> bool:
        """Whether every row samples the model's own distribution, or its likeliest token."""
        return all(rows.adjustments is None and not len(rows.cut) for rows in self._rows_of(drafts))

    def _rows_of(self, drafts: Sequence[Draft]) -> list[RowParameters]:
        if len(drafts) != len(self._drafts) or not all(map(is_, drafts, self._drafts)):
            self._drafts = list(drafts)
            parts = [drafts[i : i + self.rows_at_once] for i in range(0, len(drafts), self.rows_at_once)]
            self._rows = [RowParameters(part, self.vocabulary, self._device) for part in parts]
        return self._rows


class RowParameters:
    """The sampling parameters of N rows as tensors, and which rows need more than a plain draw."""

    def __init__(self, drafts: Sequence[Draft], vocabulary: int, device: torch.device) -> None:
        def places(chosen: Sequence[bool]) -> Tensor:
            return torch.tensor([i for i, yes in enumerate(chosen) if yes], dtype=torch.int64, device=device)

        parameters = [draft.request.sampling for draft in drafts]
        self.temperature = torch.tensor([p.temperature for p in parameters], dtype=torch.float32, device=device)
        self.seeds = np.array([p.seed for p in parameters], dtype=np.uint64)
        self.greedy = places([p.greedy for p in parameters])

        top_k = [p.top_k if p.top_k and 0 < p.top_k < vocabulary else vocabulary for p in parameters]
        cuts = [
            p.truncated and (p.top_p < 1.0 or p.min_p > 0.0 or k < vocabulary)
            for p, k in zip(parameters, top_k, strict=True)
        ]
        self.cut = places(cuts)
        self.top_k = torch.tensor(top_k, dtype=torch.int64, device=device)[self.cut]
        self.top_p = torch.tensor([p.top_p for p in parameters], dtype=torch.float32, device=device)[self.cut]
        self.min_p = torch.tensor([p.min_p for p in parameters], dtype=torch.float32, device=device)[self.cut]

        adjusted = [draft for draft in drafts if draft.request.sampling.adjusted]
        self.adjustments = Adjustments(adjusted, vocabulary, device) if adjusted else None
        self.adjusted = places([p.adjusted for p in parameters])
        self.adjusted_greedy = places([draft.request.sampling.greedy for draft in adjusted])


def sample(logits: Tensor, uniform: Tensor, rows: RowParameters) -> SampledTokens:
    """Inverse-CDF sampling; a row's outcome depends on that row alone.

    Logits that are not finite give an id of no meaning and a log-prob of NaN, for the caller to see.

    Args:
        logits: (N, V) float32, tempered.
        uniform: (N,) float32 in [0, 1); greedy rows take the most likely token whatever it is.
    """
    log_p = torch.log_softmax(logits, -1)
    mass = torch.zeros_like(uniform)
    other = logits[:0]  # (S, V) logits of the rows that do not sample the model's own
    if rows.adjustments is not None:
        other = logits[rows.adjusted]
        rows.adjustments.apply(other)
    if len(rows.greedy) == len(logits):
        tokens = most_likely(logits)
    else:
        probs = logits.softmax(-1)
        if len(other):
            probs[rows.adjusted] = other.softmax(-1)
        if len(rows.cut):
            probs[rows.cut], mass[rows.cut] = truncate(probs[rows.cut], rows.top_p, rows.top_k, rows.min_p)
        tokens = draw(probs, uniform)
        if len(rows.greedy):
            tokens[rows.greedy] = most_likely(logits[rows.greedy])
    if len(rows.adjusted_greedy):
        tokens[rows.adjusted[rows.adjusted_greedy]] = most_likely(other[rows.adjusted_greedy])
    return SampledTokens(tokens, log_p.gather(1, tokens[:, None])[:, 0], mass)


def draw(probs: Tensor, uniform: Tensor) -> Tensor:
    """(N,) tokens: the first whose share of the mass, with all before it, exceeds ``uniform``. ``probs``: (N, V)."""
    return draw_by_block(
        _by_block(probs, torch.sum), uniform, lambda block: _in_block(probs, block, 0.0), probs.shape[1]
    )


def draw_by_block(masses: Tensor, uniform: Tensor, in_block: Callable[[Tensor], Tensor], size: int) -> Tensor:
    """:func:`draw` from the blocks' masses (N, blocks) and the probabilities (N, BLOCK) of one block (N, 1) of each."""
    blocks = masses.cumsum(-1)
    target = uniform[:, None] * blocks[:, -1:]
    block = _first_above(blocks, target)
    rest = target - pad(blocks, (1, 0)).gather(1, block)
    token = block * BLOCK + _first_above(in_block(block).cumsum(-1), rest)
    return token[:, 0].clamp(max=size - 1)


def most_likely(logits: Tensor) -> Tensor:
    """(N,) the first of the largest, as ``argmax``, which takes several times as long over (N, V)."""
    block = _by_block(logits, torch.amax).argmax(-1, keepdim=True)
    return (block * BLOCK + _in_block(logits, block, -torch.inf).argmax(-1, keepdim=True))[:, 0]


def _by_block(values: Tensor, reduce: Callable[..., Tensor]) -> Tensor:
    """(N, V) to (N, blocks), the last block being shorter."""
    whole = values.shape[1] // BLOCK * BLOCK
    parts = [reduce(values[:, :whole].unflatten(1, (-1, BLOCK)), -1)] if whole else []
    if whole < values.shape[1]:
        parts.append(reduce(values[:, whole:], -1, keepdim=True))
    return torch.cat(parts, 1)


def _in_block(values: Tensor, block: Tensor, beyond: float) -> Tensor:
    """(N, BLOCK) what stands in block (N, 1) of each row; ``beyond`` the end of the vocabulary."""
    places = block * BLOCK + torch.arange(BLOCK, device=values.device)
    last = values.shape[1] - 1
    return values.gather(1, places.clamp(max=last)).masked_fill_(places > last, beyond)


def _first_above(cdf: Tensor, target: Tensor) -> Tensor:
    """(N, 1) the first place whose ``cdf`` (N, W) exceeds ``target`` (N, 1); never one that has no mass of its own.

    A target can round up to the whole mass: the last place that has any is then meant, not one beyond.
    """
    picked = torch.searchsorted(cdf, target, right=True)
    return torch.minimum(picked, torch.searchsorted(cdf, cdf[:, -1:].contiguous())).clamp(max=cdf.shape[1] - 1)


def truncate(probs: Tensor, top_p: Tensor, top_k: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """Zero what top-k, top-p and min-p drop.

    The smallest set of the most likely tokens whose mass reaches top-p (of what top-k keeps) stays, and of it the
    tokens that are at least ``min_p`` times as likely as the first.

    Args:
        probs: (N, V) float32, each row's sum 1.
        top_p: (N,); 1 is off.
        top_k: (N,); V is off.
        min_p: (N,); 0 is off.

    Returns:
        probs with the dropped tokens at 0, and the log of the kept mass (N,).
    """
    size = probs.shape[1]
    top_p = torch.where(top_p < 1.0, top_p, torch.inf)
    kept, mass = torch.zeros_like(probs), torch.zeros_like(top_p)
    left = torch.arange(len(probs), device=probs.device)
    for width in [*(few for few in CANDIDATES if few < size), size]:
        p, k, own = top_p[left, None], top_k[left, None], probs[left]
        ordered, index = own.topk(width) if width < size else own.sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(width, device=probs.device)
        ordered = torch.where(rank < k, ordered, 0.0)
        reached = ordered.cumsum(-1)  # not sum: with one row its bits depend on the threads
        floor = min_p[left, None] * ordered[:, :1]
        whole = torch.where(k < size, reached[:, -1:], 1.0)
        keep = (rank < k) & (reached - ordered < p * whole) & (ordered >= floor) | (rank == 0)
        # A row is done when its kept set ends within these candidates, which is for the row alone to say.
        ended = (reached[:, -1:] >= p) | (ordered[:, -1:] < floor)
        done = ((k <= width) | ended & ((k == size) | p.isinf()))[:, 0]
        settled = left[done]
        chosen = torch.where(keep, ordered, 0.0)[done]
        kept[settled] = torch.zeros_like(own[done]).scatter_(1, index[done], chosen)
        mass[settled] = chosen.cumsum(-1)[:, -1].log()
        left = left[~done]
        if not len(left):
            break
    return kept, mass
