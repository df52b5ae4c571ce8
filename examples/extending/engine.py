"""A rollout engine without a cache: every step computes all running responses from their first token on."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from verl.errors import EngineError
from verl.models.packed import pack_rows
from verl.models.policy import model_device
from verl.rollout.engines import EngineContext
from verl.rollout.protocol import SHARED_WEIGHTS, EngineStats, Request, Result, Slot
from verl.rollout.sampling import Sampler
from verl.rollout.scheduler import Sequence


class PlainEngine:
    """Claims no BIT_PARITY: the trainer computes old log-probs itself, however well those of the engine agree."""

    capabilities = frozenset({SHARED_WEIGHTS})  # it reads context.policy, and needs no tensors in load_weights

    def __init__(self, context: EngineContext) -> None:
        self._policy, self._decode = context.policy, context.tokenizer.decode
        self._end_tokens, self._most = frozenset(context.end_tokens), context.limits.max_num_seqs
        vocabulary = self._policy.model.get_output_embeddings().weight.shape[0]
        self._sampler = Sampler(vocabulary, model_device(self._policy))
        self._sequences: dict[Slot, Sequence] = {}  # a request, and what has been sampled for it
        self._version = self._decoded = self._finished = 0
        self._paused = False

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            if request.slot in self._sequences:
                raise EngineError("a slot was submitted twice", request.slot)
            self._sequences[request.slot] = Sequence.of(request, self._end_tokens, 2**31)

    @torch.no_grad()
    def step(self) -> list[Result]:
        running = [] if self._paused else list(self._sequences.values())[: self._most]
        if not running:
            return []
        texts = [sequence.tokens(0, sequence.length) for sequence in running]
        packed = pack_rows(texts, [[0]] * len(texts), 1).to(model_device(self._policy))
        hidden = self._policy.predictors(packed)  # (N, H), behind the last token of each
        temperatures, rows = self._sampler.temperatures(running), self._sampler.rows_at_once
        drawn = self._sampler.draw(self._policy.logits_by_piece(hidden, temperatures, rows), running)
        columns = (drawn.tokens.tolist(), drawn.log_probs.tolist(), drawn.kept_log_mass.tolist())
        for sequence, token, log_prob, mass in zip(running, *columns, strict=True):
            sequence.append(token, log_prob, self._version, mass)
        reasons = {sequence.request.slot: sequence.finish_reason(self._decode) for sequence in running}
        ended = [self._sequences.pop(slot).result(reason) for slot, reason in reasons.items() if reason]
        self._decoded += len(running)
        self._finished += len(ended)
        return ended

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        chosen = [slot for slot in self._sequences if slots is None or slot in slots]
        return [self._sequences.pop(slot).result("abort") for slot in chosen]

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        self._version = version

    def stats(self) -> EngineStats:
        waiting = max(len(self._sequences) - self._most, 0)
        active = len(self._sequences) - waiting
        return EngineStats(waiting, active, self._version, 0, self._decoded, self._finished, paused=self._paused)
