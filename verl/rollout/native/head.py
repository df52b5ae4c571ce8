"""From hidden states to the next tokens in compiled code, wherever the model's own distribution is sampled."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor
from torch.nn import functional as F

from verl.models.log_probs import PLAIN
from verl.models.native.build import Space, Unavailable, address, find_product, laid_out, library
from verl.models.policy import PolicyModel
from verl.rollout.sampling import BLOCK, SampledTokens, draw, draw_by_block

MOST_ROWS = 256  # whose logits exist at once
PROBE_ROWS = (40, 1)


class NativeHead:
    """The vocabulary projection of one model and the draws from it.

    Raises:
        Unavailable: it would not give the bits of torch's operators, or not here.
    """

    def __init__(self, policy: PolicyModel) -> None:
        self._head, self._rule = policy.model.get_output_embeddings(), policy.rows
        if self._head.weight.device.type != "cpu" or self._head.weight.dtype != torch.bfloat16 or not self._rule.packed:
            raise Unavailable("the model is not in bfloat16 on a CPU")
        if policy.logits_of != PLAIN or self._head.weight.shape[0] < BLOCK:
            raise Unavailable("the model changes its logits, or has very few")
        self._product, self._space = find_product(self._head.weight.shape, self._rule), Space()
        self._library = library()
        self._probe(policy)

    def draw(self, hidden: Tensor, temperatures: Tensor, uniform: Tensor) -> SampledTokens:
        """A token for each row of hidden states (N, H): the likeliest where the temperature is 0.

        Args:
            temperatures, uniform: (N,) float32; see :func:`verl.rollout.sampling.sample`.
        """
        parts = zip(*(tensor.split(MOST_ROWS) for tensor in (hidden, temperatures, uniform)), strict=True)
        drawn = [self._draw(*part) for part in parts]
        tokens, log_probs = (torch.cat(found) for found in zip(*drawn, strict=True))
        return SampledTokens(tokens, log_probs, torch.zeros_like(log_probs))

    def _draw(self, hidden: Tensor, temperatures: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        rows, (vocabulary, width), threads = len(hidden), self._head.weight.shape, torch.get_num_threads()
        filled = F.pad(hidden, (0, 0, 0, -rows % 16)).contiguous()
        logits = self._space.take("logits", len(filled) * vocabulary, hidden.dtype)
        held, place = laid_out(self._head.weight, self._rule)
        sizes = [ctypes.c_int64(size) for size in (rows, width, vocabulary)]
        self._library.project_head(
            address(filled), ctypes.c_void_p(place), address(self._head.bias), address(logits), *sizes, self._product,
            ctypes.c_int(threads),
        )  # fmt: skip
        del held
        divisors = torch.where(temperatures == 0, 1.0, temperatures)
        sums, best = torch.empty(rows, 3), torch.empty(rows, dtype=torch.int64)
        masses = torch.empty(rows, -(-vocabulary // BLOCK))
        scratch = self._space.take("scratch", threads * vocabulary, torch.float32)
        shape = ctypes.c_int64(rows), ctypes.c_int64(vocabulary)
        outs = (address(tensor) for tensor in (divisors, sums, best, masses, scratch))
        self._library.masses(address(logits), *shape, *outs, ctypes.c_int(threads))

        def in_block(block: Tensor) -> Tensor:
            out = torch.empty(rows, BLOCK)
            self._library.block_of(address(logits), *shape, *map(address, (divisors, sums, block, out)))
            return out

        drawn = draw_by_block(masses, uniform, in_block, vocabulary)
        tokens = torch.where(temperatures == 0, best, drawn)
        own = logits[: rows * vocabulary].view(rows, vocabulary).gather(1, tokens[:, None])[:, 0].float() / divisors
        return tokens, own - sums[:, 0] - sums[:, 1]

    def _probe(self, policy: PolicyModel) -> None:
        generator = torch.Generator().manual_seed(0)
        for rows in PROBE_ROWS:
            hidden = torch.randn(rows, self._head.weight.shape[1], generator=generator).to(self._head.weight.dtype)
            uniform, temperatures = (torch.rand(rows, generator=generator) for _ in range(2))
            temperatures[1::3], temperatures[2::3] = 1.0, 0.0
            logits = policy.logits(hidden, temperatures)
            expected = torch.where(temperatures == 0, logits.argmax(-1), draw(logits.softmax(-1), uniform))
            log_probs = torch.log_softmax(logits, -1).gather(1, expected[:, None])[:, 0]
            found = self.draw(hidden, temperatures, uniform)
            if not torch.equal(found.tokens, expected) or not torch.equal(found.log_probs, log_probs):
                raise Unavailable("its bits differ from those of torch's operators here")
