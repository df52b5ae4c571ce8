"""Attention over scattered blocks: against the sum written out, and bit by bit against the trainer's."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from contract import request
from torch import Tensor
from toy_models import random_policy

from verl.models.attention import AttentionRule
from verl.models.packed import PackedContext, pack_rows
from verl.rollout import paged
from verl.rollout.blocks import blocks_for
from verl.rollout.paged import KVPool, PagedContext
from verl.rollout.scheduler import Sequence, Work

S, D, KV = 128, 8, 2
CPU = torch.device("cpu")
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@dataclass
class Row:
    """Tokens ``start .. end - 1`` of a sequence of ``end`` tokens, whose first blocks may be another row's."""

    start: int
    end: int
    shares: int | None = None  # row whose full blocks before this one's ``start`` it uses
    keys: Tensor = field(default_factory=Tensor)  # (K, end, D)
    values: Tensor = field(default_factory=Tensor)
    queries: Tensor = field(default_factory=Tensor)  # (A, end - start, D)


def noise(generator: torch.Generator, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator).to(dtype)


def case(
    rows: list[Row], group: int, dtype: torch.dtype, order: str = "dense", junk: float = 1e4
) -> tuple[KVPool, list[Work]]:
    """The rows' past in a pool whose other places hold junk; blocks as they come, shuffled, or with wide gaps."""
    generator = torch.Generator().manual_seed(len(rows))
    needed = sum(blocks_for(row.end, S) for row in rows)
    count = needed * 4 if order == "sparse" else needed + 3
    pool = KVPool(2, KV, D, dtype, CPU, count)
    pool.acquire()
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(noise(generator, dtype, *tensor.shape) * junk)
    ids = list(range(count)) if order == "dense" else torch.randperm(count, generator=generator).tolist()
    work = []
    for number, row in enumerate(rows):
        row.keys, row.values = (noise(generator, dtype, KV, row.end, D) for _ in "kv")
        row.queries = noise(generator, dtype, KV * group, row.end - row.start, D)
        blocks = [ids.pop(0) for _ in range(blocks_for(row.end, S))]
        if row.shares is not None:
            other = rows[row.shares]
            full = min(other.end // S, row.start // S)
            assert full
            row.keys[:, : full * S], row.values[:, : full * S] = (t[:, : full * S] for t in (other.keys, other.values))
            blocks[:full] = work[row.shares].sequence.blocks[:full]
        for place in range(0, row.start, S):
            end = min(place + S, row.start)
            pool.keys[1][blocks[place // S], :, : end - place] = row.keys[:, place:end]
            pool.values[1][blocks[place // S], :, : end - place] = row.values[:, place:end]
        sequence = Sequence(request("a", number, [1], 1), 1, frozenset(), blocks=blocks)
        work.append(Work(sequence, row.start, row.end))
    return pool, work


def attend(rows: list[Row], pool: KVPool, work: list[Work], rule: AttentionRule, fill: int = 0) -> Tensor:
    """(T, A, D), twice: the second time from buffers and biases that are there already."""
    query, key, value = (
        torch.cat([*parts, torch.full_like(parts[0][:, :1], 7.0).expand(-1, fill, -1)], 1)
        for parts in (
            [row.queries for row in rows],
            [row.keys[:, row.start :] for row in rows],
            [row.values[:, row.start :] for row in rows],
        )
    )
    before = [tensor.clone() for tensor in (pool.keys[0], pool.values[0])]
    context = PagedContext(pool, work, CPU)
    assert context.positions.tolist() == [place for part in work for place in range(part.start, part.end)]
    out = context.attend(1, query, key, value, rule)
    assert torch.equal(context.attend(1, query, key, value, rule), out)
    assert torch.equal(pool.keys[0], before[0]) and torch.equal(pool.values[0], before[1])  # the other layer
    assert out.shape == (query.shape[1], query.shape[0], D) and out.dtype == query.dtype
    return out[: out.shape[0] - fill]


def plain(row: Row, rule: AttentionRule) -> Tensor:
    """(t, A, D) in float64, head by head."""
    heads, group = row.queries.shape[0], row.queries.shape[0] // KV
    out = torch.zeros(row.end - row.start, heads, D, dtype=torch.float64)
    place, query = torch.arange(row.end), torch.arange(row.start, row.end)[:, None]
    keep = place <= query
    if rule.window is not None:
        keep &= query - place < rule.window
    for head in range(heads):
        keys, values = row.keys[head // group].double(), row.values[head // group].double()
        scores = row.queries[head].double() @ keys.T * rule.scale
        if rule.softcap is not None:
            scores = rule.softcap * (scores / rule.softcap).tanh()
        scores = scores.masked_fill(~keep, -torch.inf)
        if rule.sinks is not None:
            scores = torch.cat([rule.sinks[head].double().expand(len(scores), 1), scores], 1)
        weights = scores.softmax(1)[:, -row.end :]
        out[:, head] = weights @ values
    return out


def check(
    rows: list[Row],
    group: int = 2,
    rule: AttentionRule = AttentionRule(0.3),  # noqa: B008
    dtype: torch.dtype = torch.float64,
    order: str = "shuffled",
    fill: int = 0,
) -> None:
    pool, work = case(rows, group, dtype, order, 100.0)
    out = attend(rows, pool, work, rule, fill)
    expected = torch.cat([plain(row, rule) for row in rows])
    torch.testing.assert_close(out.double(), expected, atol=WITHIN[dtype], rtol=0)
    for row, part in zip(rows, work, strict=True):  # what was fed is in the pool
        for place in range(row.start, row.end):
            block = part.sequence.blocks[place // S]
            assert torch.equal(pool.keys[1][block, :, place % S], row.keys[:, place])
            assert torch.equal(pool.values[1][block, :, place % S], row.values[:, place])


def decoding(*lengths: int) -> list[Row]:
    return [Row(length - 1, length) for length in lengths]


def rules(heads: int) -> list[AttentionRule]:
    sinks = torch.linspace(-2, 4, heads)
    return [
        AttentionRule(0.3),
        AttentionRule(0.3, window=5),
        AttentionRule(0.3, window=200, softcap=0.5),
        AttentionRule(0.3, softcap=2.0, sinks=sinks),
        AttentionRule(0.3, window=1, sinks=sinks),
    ]


LENGTHS = (1, 2, 127, 128, 129, 255, 256, 257, 384, 385, 600)


@pytest.mark.parametrize("order", ["dense", "shuffled", "sparse"])
@pytest.mark.parametrize("group", [1, 2, 3, 8])
def test_one_token_of_each_row(group: int, order: str) -> None:
    for rule in rules(KV * group):
        check(decoding(*LENGTHS), group, rule, order=order)
    check(decoding(3), group, order=order)
    check(decoding(5, 9, 128, 1), group, order=order)  # one block each


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    for rule in rules(KV * 3):
        check([*decoding(*LENGTHS), Row(100, 140), Row(0, 300)], 3, rule, dtype)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("readers", [1, 2, 3, 4, 5, 8, 9])
def test_blocks_that_many_rows_read(readers: int, group: int) -> None:
    """Two shared prompts of two blocks and one, and rows of their own between them."""
    rows = [Row(299, 300), Row(9, 10), Row(199, 200)]
    for k in range(readers - 1):
        rows += [Row(260 + 9 * k, 261 + 9 * k, shares=0), *decoding(4 + k)]
        rows += [Row(130 + k, 131 + k, shares=2)]
    for order in ("dense", "sparse"):
        check(rows, group, rules(KV * group)[2], order=order)


@pytest.mark.parametrize("group", [1, 2, 4, 8])
@pytest.mark.parametrize("readers", [2, 3, 4, 8])
def test_rows_whose_only_block_is_shared(readers: int, group: int) -> None:
    """Responses that begin at the end of a prompt of exactly one block: the last prompt token again, in each."""
    for others in ([], decoding(7), decoding(7, 129)):
        rows = [*decoding(128), *others]
        pool, work = case(rows, group, torch.float64)
        rows += [Row(127, 128, None, rows[0].keys, rows[0].values, rows[0].queries * k) for k in range(1, readers)]
        work += [Work(work[0].sequence, 127, 128)] * (readers - 1)
        out = attend(rows, pool, work, AttentionRule(0.3))
        expected = torch.cat([plain(row, AttentionRule(0.3)) for row in rows])
        torch.testing.assert_close(out, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("group", [1, 3])
def test_chunks_of_prompts(group: int) -> None:
    rows = [Row(0, 2), Row(0, 128), Row(0, 129), Row(120, 137), Row(128, 256), Row(0, 600), Row(300, 301 + 256)]
    rows.append(Row(400, 560, shares=5))
    for rule in rules(KV * group):
        check(rows, group, rule)


def test_rows_chunks_and_fill_in_one_forward() -> None:
    rows = [*decoding(3, 300, 128), Row(399, 400, shares=1), Row(0, 40), Row(290, 560, shares=1), Row(33, 35)]
    for fill in (0, 5):
        for rule in rules(KV * 2):
            check(rows, 2, rule, fill=fill)


def test_heads_as_wide_as_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then queries and probabilities have the same shape, and may lie in the same buffer."""
    monkeypatch.setitem(globals(), "D", 128)
    for rule in rules(KV * 3):
        check([*decoding(3, 300, 128), Row(399, 400, shares=1), Row(0, 40)], 3, rule)


def test_pieces_in_many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "MOST_SCORES", 1)
    check([Row(0, 40), Row(0, 50), Row(100, 150), Row(0, 600)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_bits_are_those_of_a_packed_forward(group: int, dtype: torch.dtype) -> None:
    """Token by token or in chunks, in whatever blocks and beside whatever junk: what the trainer computes at once."""
    if not random_policy("llama", dtype).rows.proven:
        pytest.skip("this machine's matmuls do not keep their bits")
    lengths = [1, 100, 129, 257, 600]
    for rule in rules(KV * group):
        rows = [Row(0, length) for length in lengths]
        pool, work = case(rows, group, dtype)
        packed = pack_rows([[1] * length for length in lengths], [[] for _ in lengths], 0)
        inputs = (torch.cat([getattr(row, name) for row in rows], 1) for name in ("queries", "keys", "values"))
        query, key, value = inputs
        expected = PackedContext(packed).attend(1, query, key, value, rule).split(lengths)
        for row, part, whole in zip(attend(rows, pool, work, rule).split(lengths), work, expected, strict=True):
            assert torch.equal(row, whole), (part.end, rule)
        last = [Row(row.end - 1, row.end, None, row.keys, row.values, row.queries[:, -1:]) for row in rows]
        singles = [Work(part.sequence, part.end - 1, part.end) for part in work]
        out = attend(last, pool, singles, rule)
        assert torch.equal(out, torch.stack([whole[-1] for whole in expected]))
        for start, end in ((560, 561), (300, 310), (5, 280)):  # of the longest, beside the others' last ones
            chunk = Row(
                start, end, None, rows[-1].keys[:, :end], rows[-1].values[:, :end], rows[-1].queries[:, start:end]
            )
            mixed = [*singles[:-1], Work(work[-1].sequence, start, end)]
            out = attend([*last[:-1], chunk], pool, mixed, rule)
            assert torch.equal(out[len(last) - 1 :], expected[-1][start:end]), (start, rule)
            assert torch.equal(out[: len(last) - 1], torch.stack([whole[-1] for whole in expected[:-1]]))


# --- the pool -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pool(dtype: torch.dtype) -> None:
    pool = KVPool(2, 3, 4, dtype, CPU, 5)
    assert pool.block_bytes == 2 * 2 * 3 * 4 * 128 * dtype.itemsize
    assert not pool.keys
    pool.acquire()
    tensors = [*pool.keys, *pool.values]
    assert [tuple(t.shape) for t in tensors] == [(5, 3, 128, 4)] * 4 and not any(t.any() for t in tensors)
    assert {t.dtype for t in tensors} == {dtype} and len({t.data_ptr() for t in tensors}) == 4
    for layer, tensor in enumerate(tensors):
        tensor.copy_((torch.arange(5.0) + 10 * layer)[:, None, None, None].expand(tensor.shape))
    pool.acquire()  # what is there stays
    assert pool.keys[0] is tensors[0]
    pool.copy([])
    pool.copy([(0, 3), (3, 1), (0, 4)])  # a block may be read and written at once: it is read first
    for layer, tensor in enumerate(tensors):
        assert tensor[:, 2, 127, 3].tolist() == [10 * layer + block for block in (0, 3, 2, 0, 0)]
        assert (tensor == tensor[:, :1, :1, :1]).all()
    pool.free()
    assert not pool.keys and not pool.values
    pool.acquire()
    assert not any(t.any() for t in (*pool.keys, *pool.values))
