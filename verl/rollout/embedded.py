"""The embedded engine: generation in the training process, on the trainer's own tensors.

A step feeds every running response its last token, and waiting prompts chunk by chunk, in one forward. Attention,
projection and log-softmax are the trainer's own functions, so that the log-probs are the trainer's to the bit (design:
parity law).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from verl.errors import EngineError
from verl.models.attention import KEY_BLOCK
from verl.models.memory import free_memory, total_memory
from verl.models.native.build import Unavailable
from verl.models.policy import PolicyModel, model_device
from verl.rollout.blocks import BlockManager, blocks_for
from verl.rollout.native.decoder import NativeDecoder
from verl.rollout.native.head import NativeHead
from verl.rollout.paged import KVPool, PagedContext
from verl.rollout.protocol import BIT_PARITY, SHARED_WEIGHTS, EngineStats, Request, Result, Slot
from verl.rollout.sampling import Sampler
from verl.rollout.scheduler import Plan, Scheduler, Sequence, Work

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import DataConfig, RolloutConfig

T = TypeVar("T")
# Compiled code takes every token for itself: faster than torch's operators, which take pieces of prompts at once, up to
# this many tokens of a step, and keys that tokens of prompts see.
COMPILED_TOKENS, COMPILED_KEYS = 1024, 2**19
DIVERGED_FIX = "train with a lower learning rate, from an earlier checkpoint"
# Of the memory that is free when the engine is made, for a pool whose size nobody gave.
POOL_SHARE = 0.5
# Multiply-adds of a step's largest layer up to which one thread is faster on a CPU, since waking another takes longer
# than the product (1.4 times faster at one row of a model of 135 million parameters on two cores).
ONE_THREAD = 2**23


@dataclass(frozen=True)
class EngineLimits:
    """What an engine may hold.

    Attributes:
        max_num_seqs: responses that run at once.
        max_num_batched_tokens: tokens that one step feeds the model; longer prompts go in chunks.
        kv_cache_gb: memory (GiB) of the keys and values; None: enough for ``max_num_seqs`` responses of the longest
            kind, but no more than half of what is free.
        longest: tokens of the longest prompt and response together, where that is known.
        prefix_cache: blocks of prompts stay for later requests with the same beginning, until the weights change.
        engines: that share this machine's main memory.
        eager: decode with torch's operators, even where compiled code has the same bits.
    """

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 8192
    kv_cache_gb: float | None = None
    longest: int | None = None
    prefix_cache: bool = False
    engines: int = 1
    eager: bool = False

    @classmethod
    def of_run(cls, rollout: RolloutConfig, data: DataConfig, engines: int = 1) -> EngineLimits:
        longest = data.max_prompt_length + data.max_response_length
        sizes = rollout.max_num_seqs, rollout.max_num_batched_tokens, rollout.kv_cache_gb
        return cls(*sizes, longest, rollout.enable_prefix_caching, engines, rollout.enforce_eager)


class EmbeddedEngine:
    """A :class:`~verl.rollout.protocol.RolloutEngine` over a :class:`~verl.models.policy.PolicyModel`.

    Args:
        policy: the trainer's model; it is read, never written, unless ``load_weights`` is given tensors.
        tokenizer: decodes for stop strings.
        limits: of memory and batches.
        end_tokens: the model's own end tokens, as :func:`verl.models.loading.stop_ids` reads them from its files (a
            loaded configuration fills in its family's default, which may be any other token); None: the tokenizer's.

    Raises:
        EngineError: ``kv_cache_gb`` cannot hold one response of the longest kind, or is more than there is.
    """

    capabilities = frozenset({BIT_PARITY, SHARED_WEIGHTS})

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        limits: EngineLimits | None = None,
        end_tokens: Iterable[int] | None = None,
    ) -> None:
        limits = limits or EngineLimits()
        self.policy, self.tokenizer = policy, tokenizer
        config = policy.model.config.get_text_config()
        positions = getattr(config, "max_position_embeddings", None) or 2**31
        self._pool = _make_pool(policy, limits, min(limits.longest or positions, positions))
        self.scheduler = Scheduler(
            limits.max_num_seqs,
            limits.max_num_batched_tokens,
            positions,
            [tokenizer.eos_token_id] if end_tokens is None else end_tokens,
            BlockManager(self._pool.blocks),
            KEY_BLOCK,
            limits.prefix_cache,
        )
        layers = [m.weight.numel() for m in policy.model.base_model.modules() if isinstance(m, nn.Linear | Conv1D)]
        self._largest_layer = max(layers, default=0)
        weight = policy.model.get_output_embeddings().weight
        self._sampler = Sampler(weight.shape[0], model_device(policy))
        self.eager, self.eager_because = limits.eager, ""
        self._made: dict[Any, Any] = {}
        self._version = 0
        self._paused = False
        self._refused: list[Result] = []
        self._prefilled = self._decoded = self._finished = 0

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            request.sampling.check_ids(self._sampler.vocabulary)
        self._refused += self.scheduler.submit(requests)

    @torch.inference_mode()
    def step(self) -> list[Result]:
        if self._refused:
            refused, self._refused = self._refused, []
            return refused
        if self._paused:
            return []
        plan = self.scheduler.schedule()
        if not plan.work:
            return []
        hidden = self._forward(plan)
        sampled = [part.sequence for part in plan.work if part.samples]
        self.scheduler.complete(plan)
        return self._advance(sampled, hidden) if sampled else []

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        results = self.scheduler.abort(None if slots is None else set(slots))
        self._release()
        chosen = [slots is None or result.slot in slots for result in self._refused]
        results += [result for result, gone in zip(self._refused, chosen, strict=True) if gone]
        self._refused = [result for result, gone in zip(self._refused, chosen, strict=True) if not gone]
        return results

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @torch.no_grad()
    def load_weights(self, version: int, tensors: Iterable[tuple[str, Tensor]] = ()) -> None:
        """Take new weights: none given means that the shared tensors have changed.

        Running responses go on under the new weights; their keys and values are computed again.
        """
        parameters = dict(self.policy.model.named_parameters(remove_duplicate=False))  # tied ones by either name
        for name, tensor in tensors:
            if name not in parameters:
                raise EngineError("published weights hold a tensor that the model lacks", name)
            if parameters[name].shape != tensor.shape:
                raise EngineError(f"published weights do not fit {name}", f"{tuple(tensor.shape)}")
            parameters[name].copy_(tensor)
        self.scheduler.requeue_active()
        self._forget()
        self._version = version

    def rest(self) -> None:
        """Let go of weights in another layout, which are made anew at the next step."""
        for made in self._made.values():
            if isinstance(made, NativeDecoder):
                made.rest()

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            active=len(self.scheduler.active),
            version=self._version,
            prefill_tokens=self._prefilled,
            decode_tokens=self._decoded,
            finished=self._finished,
            reused_tokens=self.scheduler.reused_tokens,
            preemptions=self.scheduler.preemptions,
            blocks=self.scheduler.blocks.count,
            blocks_used=self.scheduler.blocks.used,
            paused=self._paused,
        )

    def _forward(self, plan: Plan) -> Tensor:
        """Feed the plan's tokens; hidden states (N, H) behind the last tokens of the N sequences that sample."""
        work, device = plan.work, model_device(self.policy)
        self._pool.acquire()
        self._pool.copy(plan.copies)
        hidden = self._hidden(work)
        lengths = [part.end - part.start for part in work]
        single = lengths.count(1)
        self._decoded += single
        self._prefilled += sum(lengths) - single
        ends = np.cumsum(lengths)[[part.samples for part in work]]
        return hidden.index_select(0, torch.from_numpy(ends - 1).to(device))

    def _hidden(self, work: list[Work]) -> Tensor:
        """Hidden states of the work's tokens, and perhaps of some that fill them up. No part depends on another."""
        if self._native is None:
            return self._operators(work)
        single, chunks = ([part for part in work if (part.end - part.start > 1) == longer] for longer in (False, True))
        keys = sum((part.end - part.start) * (part.start + part.end) // 2 for part in chunks)
        few = sum(part.end - part.start for part in work) <= COMPILED_TOKENS and keys <= COMPILED_KEYS
        if few or not chunks:
            return self._native(_tokens(work), work, self._pool)
        if not single:
            return self._operators(chunks)
        return torch.cat([self._native(_tokens(single), single, self._pool), self._operators(chunks)])

    def _operators(self, work: list[Work]) -> Tensor:
        tokens, device, rule = _tokens(work), model_device(self.policy), self.policy.rows
        context = PagedContext(self._pool, work, device)
        fill = rule.padded(len(tokens)) - len(tokens)
        positions = F.pad(context.positions, (0, fill))
        ids = torch.tensor(tokens + [0] * fill, device=device)
        small = rule.any_threads and max(len(ids), rule.least) * self._largest_layer <= ONE_THREAD
        with _threads(1 if small else torch.get_num_threads()):
            return self.policy.hidden_states(ids, positions, context)

    @property
    def _native(self) -> NativeDecoder | None:
        return self._compiled(NativeDecoder)

    @property
    def _native_head(self) -> NativeHead | None:
        return self._compiled(NativeHead)

    @property
    def decoding(self) -> str:
        """By what tokens are decoded, in words; nothing where there is no choice."""
        if self.eager or model_device(self.policy).type != "cpu":
            return ""
        if self._native is None or self._native_head is None:
            return f"by torch's operators{'' if self._native is None else ' in part'}: {self.eager_because}"
        return "in compiled code"

    def _compiled(self, kind: type[T]) -> T | None:
        """Made at its first use with so many threads: with others the products that it has to match may differ."""
        if self.eager:
            return None
        key = kind, torch.get_num_threads()
        if key not in self._made:
            try:
                self._made[key] = kind(self.policy)  # type: ignore[call-arg]
            except Unavailable as reason:
                self._made[key], self.eager_because = None, str(reason)
        return self._made[key]

    def _advance(self, sequences: list[Sequence], hidden: Tensor) -> list[Result]:
        """Sample the next token of these sequences; the responses that end with it."""
        temperatures = self._sampler.temperatures(sequences)
        if self._native_head is not None and self._sampler.is_plain(sequences):
            drawn = self._native_head.draw(hidden, temperatures, self._sampler.uniforms(sequences))
        else:
            pieces = self.policy.logits_by_piece(hidden, temperatures, self._sampler.rows_at_once)
            drawn = self._sampler.draw(pieces, sequences)
        for sequence, token, log_prob, mass in zip(
            sequences, drawn.tokens.tolist(), drawn.log_probs.tolist(), drawn.kept_log_mass.tolist(), strict=True
        ):
            if not math.isfinite(log_prob):
                self.scheduler.requeue_active()
                self._forget()  # what is not finite must not lie where another response will be
                raise EngineError(
                    "the model gives no finite log-probs: its weights are broken", sequence.request.slot, DIVERGED_FIX
                )
            sequence.append(token, log_prob, self._version, mass)
        results, ended = [], []
        for sequence in sequences:
            reason = sequence.finish_reason(self.tokenizer.decode)
            if reason is not None:
                results.append(sequence.result(reason))
                ended.append(sequence)
        if ended:
            self.scheduler.remove(ended)
        self._finished += len(results)
        self._release()
        return results

    def _release(self) -> None:
        """Between rollouts the trainer has the memory."""
        if not self.scheduler.active and not self.scheduler.waiting and not self.scheduler.prefix_cache:
            self._forget()

    def _forget(self) -> None:
        self.scheduler.blocks.clear()
        self._pool.free()


def _tokens(work: list[Work]) -> list[int]:
    return [token for part in work for token in part.sequence.tokens(part.start, part.end)]


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    if count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _make_pool(policy: PolicyModel, limits: EngineLimits, longest: int) -> KVPool:
    layers, device = policy.model.config.get_text_config().num_hidden_layers, model_device(policy)
    pool = KVPool(layers, *policy.key_shape, policy.model.get_output_embeddings().weight.dtype, device)
    one = blocks_for(longest, KEY_BLOCK)
    free, total = torch.cuda.mem_get_info(device) if device.type == "cuda" else (free_memory(), total_memory())
    if device.type != "cuda":
        free, total = free // limits.engines, total // limits.engines
    if limits.kv_cache_gb is None:
        pool.blocks = max(one, min(one * limits.max_num_seqs, int(POOL_SHARE * free) // pool.block_bytes))
        return pool
    if limits.kv_cache_gb * 2**30 > total:
        raise EngineError(
            f"rollout.kv_cache_gb is more than the {total / 2**30:.1f} GiB of memory that {device.type} has",
            limits.kv_cache_gb,
            "give less, or leave it out: null is enough for rollout.max_num_seqs responses of the longest kind",
        )
    pool.blocks = int(limits.kv_cache_gb * 2**30) // pool.block_bytes
    if pool.blocks < (one if limits.longest else 1):
        least = math.ceil(one * pool.block_bytes / 2**30 * 1000) / 1000  # rounded up, or it would not do
        raise EngineError(
            f"rollout.kv_cache_gb has no room for one response of {longest if limits.longest else 1} tokens",
            limits.kv_cache_gb,
            f"give at least {least}, or make prompts and responses shorter",
        )
    return pool
