"""The embedded engine: generation in the training process, on the trainer's own tensors.

A step either admits waiting requests and prefills their prompts (each distinct prompt once), or decodes one token of
every running response. Attention, projection and log-softmax are the trainer's own functions, so that the log-probs
are the trainer's to the bit (design: parity law).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.errors import EngineError
from verl.models.packed import PackedContext, pack_rows
from verl.models.policy import PolicyModel, model_device
from verl.rollout.kv_cache import DecodeContext, KVCache
from verl.rollout.protocol import BIT_PARITY, SHARED_WEIGHTS, EngineStats, Request, Result, Slot
from verl.rollout.sampling import Sampler
from verl.rollout.scheduler import Scheduler, Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DIVERGED_FIX = "train with a lower learning rate, from an earlier checkpoint"


class EmbeddedEngine:
    """A :class:`~verl.rollout.protocol.RolloutEngine` over a :class:`~verl.models.policy.PolicyModel`.

    Args:
        policy: the trainer's model; it is read, never written, unless ``load_weights`` is given tensors.
        tokenizer: decodes for stop strings.
        max_num_seqs: responses that run at once.
        max_num_batched_tokens: prompt tokens of one prefill.
        end_tokens: the model's own end tokens, as :func:`verl.models.loading.stop_ids` reads them from its files (a
            loaded configuration fills in its family's default, which may be any other token); None: the tokenizer's.
    """

    capabilities = frozenset({BIT_PARITY, SHARED_WEIGHTS})

    def __init__(
        self,
        policy: PolicyModel,
        tokenizer: PreTrainedTokenizerBase,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 8192,
        end_tokens: Iterable[int] | None = None,
    ) -> None:
        self.policy, self.tokenizer = policy, tokenizer
        config = policy.model.config.get_text_config()
        weight = policy.model.get_output_embeddings().weight
        self.scheduler = Scheduler(
            max_num_seqs,
            max_num_batched_tokens,
            getattr(config, "max_position_embeddings", None) or 2**31,
            [tokenizer.eos_token_id] if end_tokens is None else end_tokens,
        )
        self._cache = KVCache(
            config.num_hidden_layers,
            *policy.key_shape,
            policy.rows.padded(max_num_seqs),
            weight.dtype,
            model_device(policy),
        )
        self._sampler = Sampler(weight.shape[0], model_device(policy))
        self._version = 0
        self._paused = False
        self._refused: list[Result] = []
        self._prefilled = self._decoded = self._finished = 0

    def submit(self, requests: list[Request]) -> None:
        for request in requests:
            request.sampling.check_ids(self._sampler.vocabulary)
        self._refused += self.scheduler.submit(requests)

    @torch.no_grad()
    def step(self) -> list[Result]:
        if self._refused:
            refused, self._refused = self._refused, []
            return refused
        if self._paused:
            return []
        admitted = self.scheduler.admit()
        if admitted:
            return self._advance(admitted, self._prefill(admitted))
        if self.scheduler.active:
            return self._advance(self.scheduler.active, self._decode())
        return []

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        results, sources, targets = self.scheduler.abort(None if slots is None else set(slots))
        self._cache.move(sources, targets)
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
        self._release()
        self._version = version

    def stats(self) -> EngineStats:
        return EngineStats(
            waiting=len(self.scheduler.waiting),
            active=len(self.scheduler.active),
            version=self._version,
            prefill_tokens=self._prefilled,
            decode_tokens=self._decoded,
            finished=self._finished,
        )

    def _prefill(self, admitted: list[Sequence]) -> Tensor:
        """Fill the cache rows of the admitted sequences; hidden states (N, H) behind their last tokens."""
        prompts: dict[tuple[int, ...], list[int]] = {}
        for place, sequence in enumerate(admitted):
            prompts.setdefault(tuple(sequence.tokens), []).append(place)
        self._cache.reserve(max(sequence.full_length for sequence in admitted))
        first_row = len(self.scheduler.active) - len(admitted)
        device = model_device(self.policy)
        packed = pack_rows(list(prompts), [[] for _ in prompts], 0).filled(self.policy.rows.multiple).to(device)
        bounds = packed.cu_seqlens.tolist()
        rows = [torch.tensor(places, device=device) + first_row for places in prompts.values()]

        def fill_cache(layer: int, key: Tensor, value: Tensor) -> None:
            for row, start, end in zip(rows, bounds[:-1], bounds[1:], strict=True):
                self._cache.write_prompt(layer, row, key[:, start:end], value[:, start:end])

        hidden = self.policy.hidden_states(packed.input_ids, packed.position_ids, PackedContext(packed, fill_cache))
        self._prefilled += bounds[-1]
        last = torch.empty(len(admitted), dtype=torch.int64)
        for places, end in zip(prompts.values(), bounds[1:], strict=True):
            last[places] = end - 1
        return hidden.index_select(0, last.to(device))

    def _decode(self) -> Tensor:
        """Feed every running response its last token; hidden states (N, H)."""
        active = self.scheduler.active
        fill = self.policy.rows.padded(len(active)) - len(active)  # rows beyond the active ones are scratch
        device = model_device(self.policy)
        tokens = torch.tensor([s.ids[-1] for s in active] + [0] * fill, device=device)
        positions = torch.tensor([s.length - 1 for s in active] + [0] * fill, device=device)
        hidden = self.policy.hidden_states(tokens, positions, DecodeContext(self._cache, positions))
        self._decoded += len(active)
        return hidden[: len(active)]

    def _advance(self, sequences: list[Sequence], hidden: Tensor) -> list[Result]:
        """Sample the next token of these sequences, the last active rows; the responses that end with it."""
        logits = self.policy.logits(hidden, self._sampler.temperatures(sequences))
        drawn = self._sampler.draw(logits, sequences)
        for sequence, token, log_prob, mass in zip(
            sequences, drawn.tokens.tolist(), drawn.log_probs.tolist(), drawn.kept_log_mass.tolist(), strict=True
        ):
            if not math.isfinite(log_prob):
                raise EngineError(
                    "the model gives no finite log-probs: its weights are broken", sequence.request.slot, DIVERGED_FIX
                )
            sequence.append(token, log_prob, self._version, mass)
        first_row = len(self.scheduler.active) - len(sequences)
        results, ended = [], []
        for place, sequence in enumerate(sequences):
            reason = sequence.finish_reason(self.tokenizer.decode)
            if reason is not None:
                results.append(sequence.result(reason))
                ended.append(first_row + place)
        self._cache.move(*self.scheduler.remove(ended))
        self._finished += len(results)
        self._release()
        return results

    def _release(self) -> None:
        """Between rollouts the trainer has the memory."""
        if not self.scheduler.active and not self.scheduler.waiting:
            self._cache.free()
