"""One token for each row, from its logits and its uniform number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from verl.rollout.protocol import Request, SamplingParams, Slot
from verl.rollout.sampling import CACHED_LOGITS, RowParameters, SampledTokens, Sampler, sample, truncate
from verl.rollout.scheduler import Sequence as Draft

LAST = 1 - 2**-24  # the largest uniform number that is drawn


def draw(logits: Tensor, uniform: float | Tensor, **sampling: Any) -> SampledTokens:
    """Every row with the same parameters."""
    n = len(logits)
    return sample(
        logits,
        torch.as_tensor(uniform, dtype=torch.float32).expand(n),
        rows([SamplingParams(8, **sampling)] * n, logits),
    )


def rows(
    kinds: Sequence[SamplingParams], logits: Tensor, prompt: Sequence[int] = (1, 2), ids: Sequence[int] = ()
) -> RowParameters:
    found = drafts(*kinds, prompt=prompt)
    for draft in found:
        draft.ids += ids
    return RowParameters(found, logits.shape[1], torch.device("cpu"))


LOGITS = torch.tensor([[2.0, 1.0, 0.0]])  # probabilities .665241, .244728, .090031


@pytest.mark.parametrize(
    ("uniform", "token"), [(0.0, 0), (0.6652, 0), (0.6653, 1), (0.9099, 1), (0.9100, 2), (LAST, 2)]
)
def test_inverse_cdf(uniform: float, token: int) -> None:
    drawn = draw(LOGITS, uniform)
    assert drawn.tokens.tolist() == [token]
    assert drawn.log_probs.item() == pytest.approx([-0.407606, -1.407606, -2.407606][token], abs=1e-6)
    assert drawn.kept_log_mass.tolist() == [0.0]


def test_kept_mass_of_top_p() -> None:
    """B042: two of three tokens, S = 0.909969, and the log-prob stays that of the whole vocabulary."""
    drawn = draw(LOGITS, LAST, top_p=0.9)
    assert drawn.tokens.tolist() == [1]
    assert drawn.log_probs.item() == pytest.approx(-1.407606, abs=1e-6)
    assert drawn.kept_log_mass.item() == pytest.approx(math.log(0.909969), abs=1e-6)
    assert drawn.kept_log_mass.item() == pytest.approx(-0.094344, abs=1e-6)


@pytest.mark.parametrize("uniform", [0.0, LAST])
def test_tokens_without_mass_are_never_drawn(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf], [0.0, -500.0, -math.inf, -500.0, -math.inf]])
    drawn = draw(logits, uniform)
    assert drawn.tokens.tolist() == ([1, 0] if uniform == 0.0 else [3, 0])
    assert drawn.log_probs.isfinite().all()


@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
@pytest.mark.parametrize("size", [2, 263, 50257])
def test_edges_stay_in_the_vocabulary(uniform: float, size: int) -> None:
    drawn = draw(torch.zeros(3, size), uniform)
    assert drawn.tokens.tolist() == [min(int(uniform * size), size - 1)] * 3


def test_greedy_is_argmax_and_takes_no_notice_of_the_draw() -> None:
    logits = torch.randn(50, 33)
    for uniform in (0.0, LAST):
        drawn = draw(logits, uniform, temperature=0.0, top_p=0.5)
        assert torch.equal(drawn.tokens, logits.argmax(-1))
        torch.testing.assert_close(drawn.log_probs, logits.log_softmax(-1).amax(-1))
        assert not drawn.kept_log_mass.any()


def test_tiny_temperature_is_finite() -> None:
    """B043."""
    drawn = draw(LOGITS / 1e-6, torch.tensor([0.999]))
    assert drawn.tokens.tolist() == [0] and drawn.log_probs.tolist() == [0.0]


def test_frequencies() -> None:
    """Chi-square over 20,000 draws, with and without truncation."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(1, 30, generator=generator) * 1.5
    uniform = torch.rand(20_000, generator=generator)
    for top_k, top_p in ((-1, 1.0), (5, 1.0), (-1, 0.7)):
        drawn = draw(logits.expand(20_000, -1), uniform, top_k=top_k, top_p=top_p)
        p = logits[0].double().softmax(0)
        kept = kept_set(p.tolist(), top_p, top_k)
        counts = torch.bincount(drawn.tokens, minlength=30).double()
        assert set(counts.nonzero()[:, 0].tolist()) <= kept
        wanted = torch.tensor([p[i] if i in kept else 0.0 for i in range(30)]) * 20_000
        wanted = wanted / sum(p[i] for i in kept)
        there = wanted > 0
        chi = ((counts - wanted)[there] ** 2 / wanted[there]).sum()
        freedom = int(there.sum()) - 1
        assert chi < freedom + 5 * (2 * freedom) ** 0.5


def kept_set(probs: list[float], top_p: float, top_k: int) -> set[int]:
    """In plain Python: the top_k likeliest, of these the smallest set that reaches top_p of their mass."""
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[: top_k if top_k > 0 else None]
    total, reached, kept = sum(probs[i] for i in order), 0.0, set()
    for i in order:
        if reached / total >= top_p:
            break
        kept.add(i)
        reached += probs[i]
    return kept


@examples(max_examples=60)
@given(
    st.lists(st.integers(1, 60), min_size=2, max_size=12),
    st.sampled_from([0.05, 0.3, 0.61, 0.9, 0.999, 1.0]),
    st.integers(-1, 13),
)
def test_kept_sets(weights: list[int], top_p: float, top_k: int) -> None:
    n, probs = len(weights), torch.tensor([weights], dtype=torch.float64)
    probs = probs / probs.sum()
    kept, log_mass = truncate(
        probs.float(), torch.tensor([top_p]), torch.tensor([top_k if 0 < top_k < n else n]), torch.zeros(1)
    )
    expected = kept_set(probs[0].tolist(), top_p, top_k)
    found = set(kept[0].nonzero()[:, 0].tolist())
    if found != expected:  # top-p lies on a border, to float32's precision
        assert len(found ^ expected) == 1
        border = kept_set(probs[0].tolist(), top_p - 1e-6, top_k), kept_set(probs[0].tolist(), top_p + 1e-6, top_k)
        assert border[0] != border[1] and found in border
    assert torch.equal(kept[0][list(found)], probs[0].float()[list(found)])
    assert log_mass.exp().item() == pytest.approx(sum(probs[0][i].item() for i in found), abs=1e-6)


def test_top_k_keeps_its_tokens_however_unlikely() -> None:
    probs = torch.tensor([[0.999999, 1e-10, 1e-11, 1e-12]])
    kept, _ = truncate(probs, torch.tensor([1.0]), torch.tensor([3]), torch.zeros(1))
    assert (kept > 0).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize("top_k", [-1, 0, 100, 1000])
def test_top_k_is_off(top_k: int) -> None:
    """B089: no sentinel makes it greedy, and the whole vocabulary cuts nothing."""
    drawn = draw(torch.zeros(50, 100), torch.rand(50, generator=torch.Generator().manual_seed(0)), top_k=top_k)
    assert len(set(drawn.tokens.tolist())) > 25
    assert not drawn.kept_log_mass.any()


def test_what_parameters_mean() -> None:
    """B089, B090."""
    assert SamplingParams(8, temperature=0.0).greedy and SamplingParams(8, top_k=1).greedy
    for top_k in (-1, 0, None, 50):
        assert not SamplingParams(8, top_k=top_k).greedy
        assert SamplingParams(8, top_k=top_k).truncated == (top_k == 50)
    assert SamplingParams(8, top_p=0.9).truncated
    assert not SamplingParams(8, temperature=0.0, top_p=0.9).truncated


def test_rows_of_all_kinds_side_by_side() -> None:
    """A row's outcome is that of the row alone: tokens, log-probs and mass, to the bit, on any number of threads."""
    generator = torch.Generator().manual_seed(4)
    threads = torch.get_num_threads()
    for size, spread in ((37, 3.0), (50257, 3.0), (50257, 0.01)):  # the last: its kept sets are large
        n = 60
        logits = torch.randn(n, size, generator=generator) * spread
        uniform = torch.rand(n, generator=generator)
        kinds = [
            SamplingParams(
                8,
                float(i % 3 > 0),
                top_p=[1.0, 0.9, 0.4, 1.0][i % 4],
                top_k=[-1, 7, 0, 30, 1][i % 5],
                min_p=0.02 * (i % 7 == 3),
                repetition_penalty=[1.0, 1.3][i % 2],
                frequency_penalty=0.5 * (i % 11 == 0),
                logit_bias={5: 3.0} if i % 13 == 0 else {},
                min_new_tokens=5 * (i % 6 == 1),
            )
            for i in range(n)
        ]
        torch.set_num_threads(2)
        together = sample(logits, uniform, rows(kinds, logits, ids=[3, 3, 9]))
        torch.set_num_threads(1)
        for i in range(n):
            row = slice(i, i + 1)
            alone = sample(logits[row].clone(), uniform[row], rows(kinds[row], logits, ids=[3, 3, 9]))
            for name in ("tokens", "log_probs", "kept_log_mass"):
                assert torch.equal(getattr(alone, name), getattr(together, name)[row]), (size, i, name)
    torch.set_num_threads(threads)


def test_logits_that_are_not_finite_show_in_the_log_prob() -> None:
    drawn = draw(torch.tensor([[math.nan] * 4, [0.0, math.nan, 0.0, 0.0], [0.0] * 4]), 0.9)
    assert drawn.log_probs.isnan().tolist() == [True, True, False]
    assert drawn.tokens[2] == 3 and (drawn.tokens < 4).all()


def test_inputs_are_left_alone() -> None:
    logits = torch.randn(4, 9)
    before = logits.clone()
    first, second = (draw(logits, 0.4, top_p=0.8, top_k=4) for _ in "ab")
    assert torch.equal(logits, before) and torch.equal(first.log_probs, second.log_probs)
    assert np.array_equal(first.tokens.numpy(), second.tokens.numpy())


def test_a_draw_at_the_very_end_is_the_last_token_that_has_mass() -> None:
    """Should rounding ever carry a draw up to the whole mass."""
    logits = torch.tensor([[0.0, 0.0, -math.inf, -math.inf]])
    assert draw(logits, 1.0).tokens.tolist() == [1]


@pytest.mark.parametrize(("top_p", "kept"), [(0.49, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 3), (1e-9, 1)])
def test_top_p_stops_as_soon_as_it_is_reached(top_p: float, kept: int) -> None:
    found, _ = truncate(
        torch.tensor([[0.25, 0.5, 0.125, 0.125]]), torch.tensor([top_p]), torch.tensor([4]), torch.zeros(1)
    )
    assert int((found > 0).sum()) == kept and found[0, 1] == 0.5


def drafts(*kinds: SamplingParams, prompt: Sequence[int] = (1, 2)) -> list[Draft]:
    return [
        Draft(Request(Slot("a", i), list(prompt), p), p.max_new_tokens, frozenset({0})) for i, p in enumerate(kinds)
    ]


def test_parameters_follow_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read once while the rows stay, and again for every row that comes, goes or moves."""
    sampler = Sampler(50, torch.device("cpu"))
    all_rows = drafts(
        SamplingParams(8, 0.5, seed=3), SamplingParams(8, 0.0), SamplingParams(8, 2.0, top_k=4, seed=2**64 - 1)
    )
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(1))
    made: list[int] = []
    original = RowParameters.__init__
    monkeypatch.setattr(
        RowParameters, "__init__", lambda self, p, *more: (made.append(len(p)), original(self, p, *more))[0]
    )
    for chosen in ([0, 1, 2], [2, 1], [1, 0, 2], [0, 1, 2]):
        present = [all_rows[i] for i in chosen]
        for _ in range(3):
            assert sampler.temperatures(present).tolist() == [[0.5, 0.0, 2.0][i] for i in chosen]
            drawn = sampler.draw([logits[chosen]], present)
            for place, i in enumerate(chosen):
                alone = Sampler(50, torch.device("cpu")).draw([logits[[i]]], [all_rows[i]])
                assert alone.tokens[0] == drawn.tokens[place] and alone.log_probs[0] == drawn.log_probs[place]
            for draft, token in zip(present, drawn.tokens.tolist(), strict=True):
                draft.append(token, 0.0, 0, 0.0)
    assert [n for n in made if n > 1] == [3, 2, 3, 3]


def test_rows_that_do_not_fit_the_cache_are_drawn_in_pieces() -> None:
    size = CACHED_LOGITS // 2
    kinds = drafts(*(SamplingParams(8, [1.0, 0.0][i % 2], top_k=[-1, 9, 4][i % 3], seed=i) for i in range(5)))
    logits = torch.randn(5, size, generator=torch.Generator().manual_seed(0))
    sampler = Sampler(size, torch.device("cpu"))
    assert sampler.temperatures(kinds).tolist() == [1.0, 0.0, 1.0, 0.0, 1.0]
    drawn = sampler.draw(logits.split(2), kinds)
    for i, one in enumerate(kinds):
        alone = Sampler(size, torch.device("cpu")).draw([logits[[i]]], [one])
        for name in ("tokens", "log_probs", "kept_log_mass"):
            assert getattr(alone, name)[0] == getattr(drawn, name)[i], (i, name)
