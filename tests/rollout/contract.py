"""What the tests of an engine share: requests, a toy tokenizer, and comparison of results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from toy_models import same_numbers

from verl.errors import EngineError
from verl.models.policy import PolicyModel
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.parity import trainer_forward
from verl.rollout.protocol import BIT_PARITY, Request, Result, RolloutEngine, SamplingParams, Slot
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
    assert scheduler.blocks.used == 0
    assert scheduler.prefix_cache or not scheduler.blocks._key
    assert scheduler.prefix_cache or not engine._pool.keys


def assert_contract(make: Callable[[], RolloutEngine], policy: PolicyModel, prompts: Sequence[Sequence[int]]) -> None:
    """What every engine promises, whatever it can do besides; ``make`` gives a fresh one over the policy's weights."""
    engine, exact = make(), BIT_PARITY in make().capabilities and policy.rows.proven
    requests = groups(prompts, 3, lambda i: 2 + i % 7, ignore_eos=True)
    engine.load_weights(3)
    results = run_all(engine, requests)
    for r in requests:
        result, new = results[r.slot], r.sampling.max_new_tokens
        assert (len(result.response_ids), result.finish_reason) == (new, "length")
        assert (result.response_ids.dtype, result.log_probs.dtype, result.versions.dtype) == (
            "int32",
            "float32",
            "int32",
        )
        assert result.loss_mask.tolist() == [True] * new and result.versions.tolist() == [3] * new
        assert (result.log_probs <= 0).all()
    if exact:
        assert_parity(policy, requests, results, 1.0)
    else:
        ordered = [results[r.slot] for r in requests]
        assert torch.allclose(log_probs_of(ordered), trainer_forward(policy, requests, ordered, 1.0), atol=0.05)
    again = run_all(make(), requests[::-1])  # another engine, another order
    assert not exact or all(again[slot].response_ids.tolist() == r.response_ids.tolist() for slot, r in results.items())

    engine.submit(requests)
    with pytest.raises(EngineError):
        engine.submit(requests[:1])  # still here
    found = {r.slot: r for r in engine.step()}
    engine.pause()
    assert engine.step() == []
    gone = {r.slot: r for r in engine.abort([requests[-1].slot, Slot("nobody", 0)])}
    assert {slot: r.finish_reason for slot, r in gone.items()} == {requests[-1].slot: "abort"}
    engine.load_weights(4)
    engine.resume()
    found |= gone | run(engine)
    assert found.keys() == results.keys()
    for slot, result in found.items():
        length = len(result.response_ids)
        assert len(result.log_probs) == len(result.versions) == len(result.loss_mask) == length
        assert result.versions.tolist() == sorted(result.versions.tolist()) and set(result.versions.tolist()) <= {3, 4}
        assert not exact or result.response_ids.tolist() == results[slot].response_ids[:length].tolist()
    engine.submit(requests)
    assert {r.slot for r in engine.abort()} == results.keys() and engine.step() == []
    stats = engine.stats()
    assert (stats.waiting, stats.active, stats.version, stats.blocks_used) == (0, 0, 4, 0)
