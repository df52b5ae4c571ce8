"""GRPO and PPO as a textbook has them, to measure VeRL against (:mod:`step`): one process, transformers and torch.

`generate` over left-padded prompts until the last row ends; then log-probs and updates over rows padded to the
workload's longest, micro-batch by micro-batch. No packing, no sharing of prompts. What any careful author would do is
done: logits only of response positions, inference mode where nothing is trained, one fused AdamW, the dtype, thread
count and micro-batch that are fastest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LogitsProcessor

CLIP, KL_COEF, LAM = 0.2, 0.001, 0.95


class Lengths(LogitsProcessor):
    """Ends row i with the end token after ``lengths[i]`` tokens, and no sooner: all sides see the same work."""

    def __init__(self, lengths: list[int], prompt_width: int, end: int) -> None:
        self.lengths, self.width, self.end = torch.tensor(lengths), prompt_width, end

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        last = self.lengths == input_ids.shape[1] - self.width + 1
        scores[:, self.end] = float("-inf")
        scores[last] = float("-inf")
        scores[last, self.end] = 0.0
        return scores


class Naive:
    """Actor, reference and, for PPO, a critic.

    Args:
        prompts: token ids of each row.
        lengths: tokens of each row's response.
        group: responses a prompt, side by side.
        rows: of a micro-batch.
    """

    def __init__(
        self,
        model: str,
        dtype: torch.dtype,
        prompts: list[list[int]],
        lengths: list[int],
        group: int,
        rows: int,
        end: int,
        critic: bool,
    ) -> None:
        width = max(map(len, prompts))
        self.prompts = torch.tensor([[end] * (width - len(ids)) + ids for ids in prompts])
        self.prompt_mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids in prompts])
        self.lengths, self.group, self.rows, self.end = lengths, group, rows, end
        self.mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # (B, R)
        self.actor, self.reference = (AutoModelForCausalLM.from_pretrained(model, dtype=dtype) for _ in range(2))
        self.critic = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).base_model if critic else None
        trained = list(self.actor.parameters())
        self.optimizers = [torch.optim.AdamW(trained, lr=1e-6, fused=True)]
        if self.critic is not None:
            self.head = nn.Linear(self.actor.config.hidden_size, 1)
            trained = [*self.critic.parameters(), *self.head.parameters()]
            self.optimizers.append(torch.optim.AdamW(trained, lr=1e-5, fused=True))

    def step(self) -> dict[str, float]:
        """One training step; seconds by part."""
        started = time.perf_counter()
        ids = self.actor.generate(
            self.prompts,
            attention_mask=self.prompt_mask,
            max_new_tokens=max(self.lengths),
            do_sample=True,
            top_k=0,
            pad_token_id=self.end,
            eos_token_id=self.end,
            logits_processor=[Lengths(self.lengths, self.prompts.shape[1], self.end)],
        )
        scores = torch.tensor([float(row % 2) for row in range(len(ids))])
        generated = time.perf_counter()
        with torch.inference_mode():
            old, ref = (
                torch.cat([self.log_probs(model, ids[rows], rows) for rows in self.parts()])
                for model in (self.actor, self.reference)
            )
            if self.critic is not None:
                values = torch.cat([self.values(ids[rows], rows) for rows in self.parts()])
        if self.critic is not None:
            advantages, returns = self.gae(scores, old, ref, values)
        else:
            groups = scores.view(-1, self.group)
            advantages = ((groups - groups.mean(1, True)) / (groups.std(1, keepdim=True) + 1e-6)).view(-1, 1)
            advantages = advantages.expand(old.shape)
        processed = time.perf_counter()
        tokens = self.mask.sum()
        if self.critic is not None:
            for rows in self.parts():
                loss = (self.values(ids[rows], rows) - returns[rows])[self.mask[rows]].square().sum() / tokens
                loss.backward()
            self.apply(1, [*self.critic.parameters(), *self.head.parameters()])
        for rows in self.parts():
            new = self.log_probs(self.actor, ids[rows], rows)
            ratio = (new - old[rows]).exp()
            gain = torch.minimum(ratio * advantages[rows], ratio.clamp(1 - CLIP, 1 + CLIP) * advantages[rows])
            away = ref[rows] - new
            loss = KL_COEF * (away.exp() - away - 1) - gain if self.critic is None else -gain
            (loss[self.mask[rows]].sum() / tokens).backward()
        self.apply(0, list(self.actor.parameters()))
        ended = time.perf_counter()
        return {"rollout": generated - started, "process": processed - generated, "update": ended - processed}

    def apply(self, number: int, parameters: list[nn.Parameter]) -> None:
        nn.utils.clip_grad_norm_(parameters, 1.0)
        self.optimizers[number].step()
        self.optimizers[number].zero_grad()

    def parts(self) -> Iterator[slice]:
        return (slice(start, start + self.rows) for start in range(0, len(self.lengths), self.rows))

    def inputs(self, ids: Tensor, rows: slice) -> dict[str, Tensor]:
        attention = torch.cat([self.prompt_mask[rows], self.mask[rows].long()], 1)
        return {"input_ids": ids, "attention_mask": attention, "position_ids": (attention.cumsum(1) - 1).clamp(min=0)}

    def log_probs(self, model: Any, ids: Tensor, rows: slice) -> Tensor:
        """(b, R) of the response tokens."""
        width = self.mask.shape[1]
        logits = model(**self.inputs(ids, rows), use_cache=False, logits_to_keep=width + 1).logits[:, :-1]
        responses = ids[:, -width:]
        return -F.cross_entropy(logits.flatten(0, 1).float(), responses.flatten(), reduction="none").view_as(responses)

    def values(self, ids: Tensor, rows: slice) -> Tensor:
        """(b, R): what is to come, seen before each response token."""
        assert self.critic is not None
        hidden = self.critic(**self.inputs(ids, rows), use_cache=False).last_hidden_state
        return self.head(hidden[:, -self.mask.shape[1] - 1 : -1].float())[..., 0]

    def gae(self, scores: Tensor, old: Tensor, ref: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages (whitened) and returns, the KL penalty being part of the reward."""
        rewards = -KL_COEF * (old - ref)
        ends = torch.tensor(self.lengths) - 1
        rewards[torch.arange(len(scores)), ends] += scores
        advantages, following, after = torch.zeros_like(rewards), torch.zeros(len(scores)), torch.zeros(len(scores))
        for place in reversed(range(rewards.shape[1])):
            inside = self.mask[:, place]
            delta = rewards[:, place] + following - values[:, place]
            after = torch.where(inside, delta + LAM * after, after)
            following = torch.where(inside, values[:, place], following)
            advantages[:, place] = after
        found = advantages[self.mask]
        return (advantages - found.mean()) / (found.std() + 1e-8), advantages + values
