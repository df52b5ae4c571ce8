"""What the tests of an engine share: requests, a toy tokenizer, and comparison of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from toy_models import same_numbers

from verl.models.policy import PolicyModel
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.parity import trainer_forward
from verl.rollout.protocol import Request, Result, RolloutEngine, SamplingParams, Slot
from verl.rollout.seeds import slot_seed


class PieceTokenizer:
    """Decodes each id to its piece of text; has nothing else of a tokenizer but an end token."""

    def __init__(self, pieces: Sequence[str] = (), eos_token_id: int | None = None) -> None:
        self.pieces, self.eos_token_id = pieces, eos_token_id

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return "".join(self.pieces[i] if i < len(self.pieces) else f"<{i}>" for i in ids)


def make_engine(
    policy: PolicyModel, max_num_seqs: int = 8, max_num_batched_tokens: int = 8192, tokenizer: Any = None, **more: Any
) -> EmbeddedEngine:
    tokenizer = tokenizer or PieceTokenizer()
    ends = {tokenizer.eos_token_id, policy.model.config.eos_token_id} - {None}  # toy models have no files to ask
    return EmbeddedEngine(policy, tokenizer, EngineLimits(max_num_seqs, max_num_batched_tokens, **more), ends)


def request(
    uid: str, index: int, prompt: Sequence[int], new: int, temperature: float = 1.0, run_seed: int = 1, **sampling: Any
) -> Request:
    params = SamplingParams(new, temperature, seed=slot_seed(run_seed, uid, index), **sampling)
    return Request(Slot(uid, index), list(prompt), params)


def groups(
    prompts: Sequence[Sequence[int]], n: int, new: Callable[[int], int], temperature: float = 1.0, **sampling: Any
) -> list[Request]:
    """``n`` requests for each prompt; ``new`` gives each its own limit, by its number in the batch."""
    return [
        request(f"p{i}", k, prompt, new(i * n + k), temperature, **sampling)
        for i, prompt in enumerate(prompts)
        for k in range(n)
    ]


def random_prompts(lengths: Sequence[int], vocabulary: int = 38, seed: int = 0) -> list[list[int]]:
    generator = np.random.default_rng(seed)
    return [generator.integers(0, vocabulary, length).tolist() for length in lengths]


def run(engine: RolloutEngine, most_steps: int = 10_000) -> dict[Slot, Result]:
    """Step to the end; every slot comes out once."""
    results: dict[Slot, Result] = {}
    for _ in range(most_steps):
        for result in engine.step():
            assert result.slot not in results
            results[result.slot] = result
        stats = engine.stats()
        if not stats.waiting and not stats.active and not getattr(engine, "_refused", None):
            return results
    raise AssertionError("the engine never came to an end")


def run_all(engine: RolloutEngine, requests: Sequence[Request]) -> dict[Slot, Result]:
    engine.submit(list(requests))
    return run(engine)


def log_probs_of(results: Iterable[Result]) -> Tensor:
    return torch.from_numpy(np.concatenate([result.log_probs for result in results]))


def same_results(a: dict[Slot, Result], b: dict[Slot, Result], policy: PolicyModel) -> None:
    """The same ids, and the same bits of their log-probs; without a proven row rule, as far as the ids agree."""
    assert a.keys() == b.keys()
    for slot, result in a.items():
        ids, others = result.response_ids, b[slot].response_ids
        length = len(ids)
        if policy.rows.proven:
            assert ids.tolist() == others.tolist(), slot
            assert result.finish_reason == b[slot].finish_reason, slot
        else:
            shorter = min(len(ids), len(others))
            differing = np.flatnonzero(ids[:shorter] != others[:shorter])
            length = int(differing[0]) if differing.size else shorter
        same_numbers(log_probs_of([result])[:length], log_probs_of([b[slot]])[:length], policy)


def assert_parity(
    policy: PolicyModel, requests: Sequence[Request], results: dict[Slot, Result], temperature: float
) -> None:
    """Law 3: the trainer's packed forward, sharing prompts or not, gives the engine's log-probs."""
    ordered = [results[r.slot] for r in requests]
    for share in (True, False):
        trainer = trainer_forward(policy, list(requests), ordered, temperature, share)
        same_numbers(log_probs_of(ordered), trainer, policy)


def assert_idle(engine: EmbeddedEngine) -> None:
    """Nothing waits, runs or keeps memory."""
    stats = engine.stats()
    assert (stats.waiting, stats.active) == (0, 0)
    scheduler = engine.scheduler
    assert not scheduler._slots and not scheduler._waiting_for
    scheduler.blocks.free_unused()  # what a prefix cache keeps
    assert scheduler.blocks.used == 0 and not scheduler.blocks._key
    assert scheduler.prefix_cache or not engine._pool.keys
