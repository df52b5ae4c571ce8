"""Bias, penalties and forced length: what changes logits before they are sampled, for the rows that ask for any.

Log-probs stay those of the model: these change what is drawn, not what is reported.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.rollout.scheduler import Sequence as Draft


class Adjustments:
    """The changes to the logits of S rows.

    Tempered logits z / T are changed as z would be before the temperature: what is added is divided by T, and the
    repetition penalty, which only scales, commutes with it. Entries are places in the flattened (S, V) logits, so that
    rows cost what they use, and no row sees another's.
    """

    def __init__(self, drafts: Sequence[Draft], vocabulary: int, device: torch.device) -> None:
        self._drafts, self._vocabulary, self._device = drafts, vocabulary, device
        parameters = [draft.request.sampling for draft in drafts]
        divisors = [p.temperature or 1.0 for p in parameters]

        def by_row(values: Sequence[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)

        self._repetition = by_row([p.repetition_penalty for p in parameters])
        self._presence = by_row([p.presence_penalty / t for p, t in zip(parameters, divisors, strict=True)])
        self._frequency = by_row([p.frequency_penalty / t for p, t in zip(parameters, divisors, strict=True)])
        self._biased = self._places([list(p.logit_bias) for p in parameters])
        self._bias = by_row([b / t for p, t in zip(parameters, divisors, strict=True) for b in p.logit_bias.values()])
        self._counting = any(p.counts_tokens for p in parameters)
        self._prompts = self._places(
            [draft.request.prompt_ids if draft.request.sampling.repetition_penalty != 1.0 else [] for draft in drafts]
        )
        self._responses = self._places([[] for _ in drafts])  # of rows that count, caught up with at each use
        self._seen = [0] * len(drafts)
        self._least = max(p.min_new_tokens for p in parameters)

    def apply(self, logits: Tensor) -> None:
        """Change (S, V) logits in place for the token that comes next."""
        flat = logits.view(-1)
        if len(self._biased):
            flat[self._biased] += self._bias
        if self._counting:
            self._catch_up()
            responses = self._responses
            tokens, rows = torch.cat([self._prompts, responses]), responses // self._vocabulary
            penalty = self._repetition[tokens // self._vocabulary]
            found = flat[tokens]
            flat[tokens] = torch.where(found > 0, found / penalty, found * penalty)
            flat[responses] = flat[responses] - self._presence[rows]  # once, however often a token is there
            flat.index_put_((responses,), -self._frequency[rows], accumulate=True)
        if any(len(draft.ids) < self._least for draft in self._drafts):
            early = [len(d.ids) < d.request.sampling.min_new_tokens for d in self._drafts]
            ends = [sorted(d.end_tokens) if yes else [] for d, yes in zip(self._drafts, early, strict=True)]
            flat[self._places(ends)] = -torch.inf

    def _catch_up(self) -> None:
        new = [
            d.ids[n:] if d.request.sampling.counts_tokens else [] for d, n in zip(self._drafts, self._seen, strict=True)
        ]
        self._responses = torch.cat([self._responses, self._places(new)])
        self._seen = [len(draft.ids) for draft in self._drafts]

    def _places(self, ids: Sequence[Sequence[int]]) -> Tensor:
        """Where these tokens of each row stand in the flattened logits; ids that the model lacks are left out."""
        rows = [np.asarray(row, dtype=np.int64) for row in ids]
        places = [row[row < self._vocabulary] + i * self._vocabulary for i, row in enumerate(rows)]
        return torch.from_numpy(np.concatenate(places)).to(self._device)
