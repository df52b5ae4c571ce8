"""Bias, penalties and forced length, against transformers' processors and against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from contract import PieceTokenizer, make_engine, request, run_all
from torch import Tensor
from toy_models import markov_policy, successor_logits
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from verl.errors import EngineError
from verl.rollout.adjustments import Adjustments
from verl.rollout.protocol import Request, SamplingParams, Slot
from verl.rollout.sampling import Sampler, truncate
from verl.rollout.scheduler import Sequence as Draft

CPU = torch.device("cpu")
ENDS = frozenset({0, 6, 999})  # one that the model lacks


def draft(prompt: Sequence[int], ids: Sequence[int], temperature: float = 1.0, **sampling: Any) -> Draft:
    params = SamplingParams(100, temperature, **sampling)
    return Draft(Request(Slot("a", 0), list(prompt), params), 100, ENDS, ids=list(ids))


def adjusted(logits: Tensor, *drafts: Draft) -> Tensor:
    """What (S, V) tempered logits become."""
    found = logits.clone()
    Adjustments(drafts, logits.shape[1], CPU).apply(found)
    return found


Z = torch.tensor([[2.0, -1.0, 0.5, 4.0, 0.0, -3.0, 1.0]])


def test_by_hand() -> None:
    """Prompt 0 1, response 3 3 5; every change alone, then in their order, at temperatures 1, 2 and 0."""
    cases: list[tuple[dict[str, Any], list[float]]] = [
        ({"repetition_penalty": 2.0}, [1.0, -2.0, 0.5, 2.0, 0.0, -6.0, 1.0]),
        ({"presence_penalty": 0.5}, [2.0, -1.0, 0.5, 3.5, 0.0, -3.5, 1.0]),
        ({"frequency_penalty": 0.5}, [2.0, -1.0, 0.5, 3.0, 0.0, -3.5, 1.0]),
        ({"presence_penalty": -1.0, "frequency_penalty": 2.0}, [2.0, -1.0, 0.5, 1.0, 0.0, -4.0, 1.0]),
        ({"logit_bias": {2: 10.0, 5: -1.5}}, [2.0, -1.0, 10.5, 4.0, 0.0, -4.5, 1.0]),
        ({"min_new_tokens": 4}, [-math.inf, -1.0, 0.5, 4.0, 0.0, -3.0, -math.inf]),
        ({"min_new_tokens": 3}, Z[0].tolist()),
        # The bias makes 5 positive, so that the repetition penalty halves it; then 0.5 and 1 x 0.25 are taken off.
        (
            {
                "logit_bias": {5: 7.0},
                "repetition_penalty": 2.0,
                "presence_penalty": 0.5,
                "frequency_penalty": 0.25,
                "min_new_tokens": 9,
            },
            [-math.inf, -2.0, 0.5, 1.0, 0.0, 1.25, -math.inf],
        ),
    ]
    for sampling, expected in cases:
        for temperature in (1.0, 2.0, 0.0):
            divisor = temperature or 1.0
            found = adjusted(Z / divisor, draft([0, 1], [3, 3, 5], temperature, **sampling))
            assert found[0].tolist() == [value / divisor for value in expected], (sampling, temperature)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.5])
def test_transformers_processors_do_the_same(temperature: float) -> None:
    """Repetition penalty and forced length before the temperature; top-k, top-p, min-p after it."""
    generator = torch.Generator().manual_seed(1)
    for trial in range(12):
        raw = torch.randn(1, 900, generator=generator) * 2  # wide enough that not all tokens are put in order
        prompt, ids = (torch.randint(0, 900, (30,), generator=generator).tolist() for _ in "ab")
        penalty, least = 0.5 + 0.1 * trial, 25 + trial
        top_k, top_p, min_p = (-1, 50, 400, 300)[trial % 4], (0.8, 1.0, 0.3)[trial % 3], (0.05, 0.0, 0.001)[trial % 3]
        so_far = torch.tensor([prompt + ids])
        theirs = RepetitionPenaltyLogitsProcessor(penalty)(so_far, raw.clone())
        theirs = MinNewTokensLengthLogitsProcessor(len(prompt), least, [0, 6])(so_far, theirs) / temperature
        one = draft(prompt, ids, temperature, repetition_penalty=penalty, min_new_tokens=least)
        ours = adjusted(raw / temperature, one)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
        assert bool((ours == -math.inf).any()) == (least > 30)
        first = [TopKLogitsWarper(top_k)] if top_k > 0 else []
        for warper in [*first, TopPLogitsWarper(top_p), MinPLogitsWarper(min_p)]:
            theirs = warper(so_far, theirs)
        probs = ours.softmax(-1)
        kept, mass = truncate(
            probs, torch.tensor([top_p]), torch.tensor([top_k if top_k > 0 else 900]), torch.tensor([min_p])
        )
        torch.testing.assert_close(kept / kept.sum(), theirs.softmax(-1), rtol=1e-5, atol=1e-7)
        assert mass.exp().item() == pytest.approx(probs[theirs > -math.inf].sum().item(), abs=1e-6)


def test_frequencies_with_everything_on() -> None:
    """Chi-square of 4,000 draws against the distribution as transformers and plain arithmetic make it."""
    logits = torch.randn(1, 60, generator=torch.Generator().manual_seed(5)) * 1.5
    prompt, ids, n = [7, 8, 9], [20, 20, 21, 8, 20], 4000
    sampling = {
        "repetition_penalty": 1.4,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {30: 1.0, 31: -50.0},
        "min_new_tokens": 10,
        "top_p": 0.9,
        "min_p": 0.02,
    }
    z = logits.clone()
    z[0, 30] += 1.0
    z[0, 31] -= 50.0
    z = RepetitionPenaltyLogitsProcessor(1.4)(torch.tensor([prompt + ids]), z)
    for token in set(ids):
        z[0, token] -= 0.3 + 0.2 * ids.count(token)
    z[0, [0, 6]] = -math.inf
    z = z / 0.8
    for warper in (TopPLogitsWarper(0.9), MinPLogitsWarper(0.02)):
        z = warper(torch.tensor([prompt + ids]), z)
    expected = z[0].double().softmax(0) * n
    drafts = [draft(prompt, ids, 0.8, seed=seed, **sampling) for seed in range(n)]
    sampler = Sampler(60, CPU)
    drawn = sampler.draw((logits / 0.8).expand(n, -1).contiguous().split(sampler.rows_at_once), drafts)
    counts = torch.bincount(drawn.tokens, minlength=60).double()
    there = expected > 0
    assert not counts[~there].any() and 10 < there.sum() < 50
    assert ((counts - expected)[there] ** 2 / expected[there]).sum() < 49 + 5 * 98**0.5
    # What is reported is the model's own, whatever was done to it.
    plain = (logits / 0.8).log_softmax(-1)[0]
    torch.testing.assert_close(drawn.log_probs, plain[drawn.tokens])


def test_what_is_counted_grows_with_the_response() -> None:
    """Step by step as anew: one token at a time, several, none; rows without penalties beside them."""
    generator = torch.Generator().manual_seed(2)
    kinds: list[dict[str, Any]] = [
        {"frequency_penalty": 0.7, "presence_penalty": 0.1},
        {},
        {"repetition_penalty": 1.7},
        {"logit_bias": {4: 2.0}},
        {"min_new_tokens": 3},
    ]
    kept = [draft([1, 2, 3], [], **kind) for kind in kinds]
    lasting = Adjustments(kept, 12, CPU)
    for count in (0, 1, 1, 0, 3, 1):
        for one in kept:
            one.ids += torch.randint(0, 12, (count,), generator=generator).tolist()
        logits = torch.randn(5, 12, generator=generator)
        found = logits.clone()
        lasting.apply(found)
        alone = torch.cat([adjusted(logits[i : i + 1], one) for i, one in enumerate(kept)])
        assert torch.equal(found, alone)
        assert torch.equal(found[1], logits[1]) and not torch.equal(found[3], logits[3])


def test_they_cost_other_rows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the rows that ask are copied and changed; none asks: nothing is made at all."""
    shapes: list[tuple[int, ...]] = []
    monkeypatch.setattr(Adjustments, "apply", lambda self, logits: shapes.append(tuple(logits.shape)))
    sampler, logits = Sampler(9, CPU), torch.zeros(3, 9)
    plain, penalised = draft([1], [2], top_p=0.5), draft([1], [2], frequency_penalty=1.0)
    sampler.draw([logits], [plain, penalised, plain])
    sampler.draw([logits], [plain, plain, plain])
    assert shapes == [(1, 9)]


# --- in the engine ------------------------------------------------------------------------------------------------


def test_greedy_with_penalties_takes_the_best_that_is_left() -> None:
    """A chain that would repeat 0 1 2 3 0 1 2 3: each token a second time only when nothing better is left."""
    policy = markov_policy(successor_logits(4, 0.6))
    loop = run_all(make_engine(policy), [request("a", 0, [0], 8, 0.0)])
    assert loop[Slot("a", 0)].response_ids.tolist() == [1, 2, 3, 0, 1, 2, 3, 0]
    kinds = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "repetition_penalty": 9.0}
    for name, value in kinds.items():
        result = run_all(make_engine(policy), [request("a", 0, [0], 4, 0.0, **{name: value})])[Slot("a", 0)]
        assert sorted(result.response_ids.tolist()) == [0, 1, 2, 3]
    assert result.log_probs.tolist() == pytest.approx([math.log(0.6)] * 4, abs=1e-5)


def test_a_forced_length_holds_back_every_end() -> None:
    """The model's end token, a stop id and a stop string at every minimum up to the limit."""
    policy = markov_policy(successor_logits(16, 0.9))
    text = PieceTokenizer(["a", "EN", "D!", "b", "c", "d"], eos_token_id=6)
    for kind in ({}, {"stop_token_ids": (6,), "ignore_eos": True}):
        for least in range(6):
            one = request("a", 0, [3], 6, 0.0, min_new_tokens=least, logit_bias={6: 40.0}, **kind)
            result = run_all(make_engine(policy, tokenizer=text), [one])[one.slot]
            assert (len(result.response_ids), result.finish_reason) == (min(least + 1, 6), "stop")
            assert (result.response_ids == 6).tolist() == [False] * least + [True]
        one = request("a", 0, [3], 6, 0.0, min_new_tokens=6, logit_bias={6: 40.0}, **kind)
        result = run_all(make_engine(policy, tokenizer=text), [one])[one.slot]
        assert (len(result.response_ids), result.finish_reason) == (6, "length")
    # "END" is whole with token 3 and 19: an early one is text, and does not end the response later either.
    for least, length in ((0, 3), (2, 3), (3, 19), (5, 19), (18, 19), (19, 25)):
        one = request("a", 0, [15], 25, 0.0, min_new_tokens=least, stop=("END",), ignore_eos=True)
        result = run_all(make_engine(policy, tokenizer=text), [one])[one.slot]
        assert (len(result.response_ids), result.finish_reason) == (length, "stop" if length < 25 else "length")


@pytest.mark.parametrize(
    ("sampling", "said", "value"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be at least 1", 0),
        ({"temperature": -0.1}, "temperature must be at least 0", -0.1),
        ({"temperature": math.nan}, "temperature must be at least 0", math.nan),
        ({"top_p": 0.0}, "top_p must be above 0", 0.0),
        ({"top_k": -2}, "top_k must be -1", -2),
        ({"seed": -1}, "seed must be from 0", -1),
        ({"stop": "END"}, "stop must be texts", "END"),
        ({"stop": ("",)}, "stop must be texts", ("",)),
        ({"stop_token_ids": (3, -1)}, "stop_token_ids must be ids of at least 0", (3, -1)),
        ({"min_p": 1.5}, "min_p must be from 0 to 1", 1.5),
        ({"min_p": math.nan}, "min_p must be from 0", math.nan),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0", 0.0),
        ({"repetition_penalty": -1.2}, "repetition_penalty must be above 0", -1.2),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be above 0 and finite", math.inf),
        ({"presence_penalty": 2.1}, "presence_penalty must be from -2 to 2", 2.1),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be from -2 to 2", math.nan),
        ({"logit_bias": {3: math.nan}}, "logit_bias must be finite", {3: math.nan}),
        ({"logit_bias": {-3: 1.0}}, "logit_bias must be by ids of at least 0", {-3: 1.0}),
        ({"min_new_tokens": 9}, "min_new_tokens must be from 0 to 8", 9),
        ({"min_new_tokens": -1}, "min_new_tokens must be from 0 to 8", -1),
    ],
)
def test_values_out_of_range(sampling: dict[str, Any], said: str, value: object) -> None:
    name, _, rule = said.partition(" must be ")
    with pytest.raises(EngineError, match=f"the sampling parameter {name} is out of range") as caught:
        SamplingParams(**({"max_new_tokens": 8} | sampling))
    assert str(caught.value.value) == str(value)
    assert str(caught.value.fix).startswith(f"it must be {rule}")


@pytest.mark.parametrize("sampling", [{"logit_bias": {3: 1.0, 16: 1.0}}, {"stop_token_ids": (16,)}])
def test_ids_that_the_model_lacks(sampling: dict[str, Any]) -> None:
    engine = make_engine(markov_policy(successor_logits(16, 0.9)))
    with pytest.raises(EngineError, match="no token of the model") as caught:
        engine.submit([request("ok", 0, [1], 4), request("a", 0, [1], 4, **sampling)])
    assert caught.value.value == 16 and "0 to 15" in str(caught.value.fix)
    assert engine.stats().waiting == 0  # nor is the good one queued
