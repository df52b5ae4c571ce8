"""Packing: which token predicts which, and attention that stays within a row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from torch import Tensor

from verl.models.attention import AttentionRule
from verl.models.packed import PackedContext, pack_rows
from verl.models.rows import ALL_ROWS


def as_lists(packed: Any) -> dict[str, list[int]]:
    return {name: value.tolist() for name, value in packed.__dict__.items() if isinstance(value, Tensor)}


PROMPTS, RESPONSES = [[3, 4], [3, 4], [9, 8, 7]], [[5, 6, 7], [5], [1, 2]]


def test_whole_rows() -> None:
    packed = pack_rows(PROMPTS, RESPONSES, 4)
    assert as_lists(packed) == {
        "input_ids": [3, 4, 5, 6, 3, 4, 9, 8, 7, 1],
        "position_ids": [0, 1, 2, 3, 0, 1, 0, 1, 2, 3],
        "cu_seqlens": [0, 4, 6, 10],
        "prefix_of": [-1, -1, -1],
        "response_index": [1, 2, 3, 5, 8, 9],
        "targets": [5, 6, 7, 5, 1, 2],
        "rows": [0, 0, 0, 1, 2, 2],
        "columns": [0, 1, 2, 0, 0, 1],
    }
    assert packed.shape == (3, 4)


def test_shared_prompts() -> None:
    packed = pack_rows(PROMPTS, RESPONSES, 3, groups=[11, 11, 4])
    assert as_lists(packed) == {
        "input_ids": [3, 4, 5, 6, 9, 8, 7, 1],
        "position_ids": [0, 1, 2, 3, 0, 1, 2, 3],
        "cu_seqlens": [0, 2, 4, 7, 8],
        "prefix_of": [-1, 0, -1, 2],
        "response_index": [1, 2, 3, 1, 6, 7],
        "targets": [5, 6, 7, 5, 1, 2],
        "rows": [0, 0, 0, 1, 2, 2],
        "columns": [0, 1, 2, 0, 0, 1],
    }


@pytest.mark.parametrize("groups", [None, [0]])
def test_b045_every_response_token_is_a_target_the_first_included(groups: list[int] | None) -> None:
    """Prompt of two, response of three: exactly three terms, targets at positions 2, 3 and 4."""
    packed = pack_rows([[8, 9]], [[5, 6, 7]], 3, groups)
    assert packed.targets.tolist() == [5, 6, 7]
    assert (packed.position_ids[packed.response_index] + 1).tolist() == [2, 3, 4]


@pytest.mark.parametrize("groups", [None, [0, 0]])
def test_an_empty_response_has_no_place(groups: list[int] | None) -> None:
    packed = pack_rows([[1, 2], [1, 2]], [[], [7]], 2, groups)
    assert packed.targets.tolist() == [7] and packed.rows.tolist() == [1]
    assert packed.input_ids[packed.response_index].tolist() == [2]


def test_scatter_puts_values_back_and_lets_gradients_through() -> None:
    packed = pack_rows(PROMPTS, RESPONSES, 4)
    values = torch.arange(1.0, 7.0, requires_grad=True)
    columns = packed.scatter(values, fill=-9.0)
    assert columns.tolist() == [[1, 2, 3, -9], [4, -9, -9, -9], [5, 6, -9, -9]]
    (columns * torch.arange(12.0).view(3, 4)).sum().backward()
    assert values.grad is not None and values.grad.tolist() == [0, 1, 2, 4, 8, 9]


def test_filling_up_adds_tokens_that_nobody_reads() -> None:
    packed = pack_rows(PROMPTS, RESPONSES, 4)
    filled = packed.filled(ALL_ROWS.padded)
    assert filled.input_ids.shape == filled.position_ids.shape == (16,)
    assert torch.equal(filled.cu_seqlens, packed.cu_seqlens) and torch.equal(filled.input_ids[:10], packed.input_ids)
    assert filled.filled(ALL_ROWS.padded) is filled
    assert packed.to("cpu").shape == packed.shape


rows_of_groups = st.lists(
    st.tuples(st.integers(1, 40), st.lists(st.integers(0, 12), min_size=1, max_size=3)), min_size=1, max_size=4
)


def make_rows(sizes: list[tuple[int, list[int]]]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    """Prompts, responses and groups of these lengths; every token id of the batch is another one."""
    prompts, responses, groups, fresh = [], [], [], 0
    for group, (prompt_length, lengths) in enumerate(sizes):
        prompt = list(range(fresh, fresh + prompt_length))
        fresh += prompt_length
        for length in lengths:
            prompts.append(prompt)
            responses.append(list(range(fresh, fresh + length)))
            groups.append(group)
            fresh += length
    return prompts, responses, groups


@given(rows_of_groups, st.booleans())
def test_every_response_token_is_predicted_by_the_token_before_it(
    sizes: list[tuple[int, list[int]]], share: bool
) -> None:
    prompts, responses, groups = make_rows(sizes)
    packed = pack_rows(prompts, responses, 12, groups if share else None)
    read = packed.response_index
    assert packed.targets.tolist() == [token for response in responses for token in response]
    for row, column, target, token, position in zip(
        packed.rows.tolist(),
        packed.columns.tolist(),
        packed.targets.tolist(),
        packed.input_ids[read].tolist(),
        packed.position_ids[read].tolist(),
        strict=True,
    ):
        whole = prompts[row] + responses[row]
        place = len(prompts[row]) + column
        assert (target, token, position) == (whole[place], whole[place - 1], place - 1)
    if share:  # each prompt once, and of each response all but the last token
        tokens = {tuple(prompt) for prompt in prompts}
        expected = sum(map(len, tokens)) + sum(max(len(r) - 1, 0) for r in responses)
        assert packed.input_ids.shape[0] == expected


def attention_by_token(
    packed: Any, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
) -> Tensor:
    """The same, one token at a time: its prefix and what came before it in its segment, itself included."""
    group = query.shape[0] // key.shape[0]
    out = torch.zeros(query.shape[1], query.shape[0], query.shape[2], dtype=query.dtype)
    bounds = packed.cu_seqlens.tolist()
    for segment, prefix in enumerate(packed.prefix_of.tolist()):
        before = list(range(bounds[prefix], bounds[prefix + 1])) if prefix >= 0 else []
        for token in range(bounds[segment], bounds[segment + 1]):
            seen = [*before, *range(bounds[segment], token + 1)]
            if window is not None:
                seen = seen[-window:]
            for head in range(query.shape[0]):
                weights = (key[head // group, seen] @ query[head, token] * scale).softmax(0)
                out[token, head] = weights @ value[head // group, seen]
    return out


@examples(max_examples=25)
@given(rows_of_groups, st.booleans(), st.sampled_from([None, 1, 5, 64]))
def test_attention_within_a_row(sizes: list[tuple[int, list[int]]], share: bool, window: int | None) -> None:
    prompts, responses, groups = make_rows(sizes)
    packed = pack_rows(prompts, responses, 12, groups if share else None).filled(ALL_ROWS.padded)
    tokens, used = packed.input_ids.shape[0], int(packed.cu_seqlens[-1])
    generator = torch.Generator().manual_seed(tokens)
    leaves = [
        torch.randn(n, tokens, 4, generator=generator, dtype=torch.float64, requires_grad=True) for n in (4, 2, 2)
    ]
    out = PackedContext(packed).attend(0, *leaves, AttentionRule(0.7, window))
    expected = attention_by_token(packed, *leaves, 0.7, window)
    torch.testing.assert_close(out[:used], expected[:used], atol=1e-12, rtol=0)
    assert out.isfinite().all()
    factor = torch.randn(used, 4, 4, generator=generator, dtype=torch.float64)
    ours, theirs = (torch.autograd.grad((x[:used] * factor).sum(), leaves) for x in (out, expected))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, atol=1e-12, rtol=0)


def test_nothing_of_another_row_comes_near() -> None:
    """Not even as 0 times NaN (padding law)."""
    packed = pack_rows([[1, 2, 3], [4, 5]], [[6, 7], [8, 9, 10]], 3)
    query, key, value = torch.randn(4, 8, 4), torch.randn(2, 8, 4), torch.randn(2, 8, 4)
    clean = PackedContext(packed).attend(0, query, key, value, AttentionRule(1.0))
    for tensor in (query, key, value):
        tensor[:, :4] = math.nan
    dirty = PackedContext(packed).attend(0, query, key, value, AttentionRule(1.0))
    assert dirty[:4].isnan().all() and torch.equal(dirty[4:], clean[4:])
