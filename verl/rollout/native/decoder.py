"""Decode steps in compiled code, for bfloat16 models of Llama's kin."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from verl.models.attention import KEY_BLOCK, AttentionRule
from verl.models.native.build import MULTIPLE, Product, Space, Unavailable, address, find_product, laid_out, library
from verl.models.policy import PolicyModel
from verl.rollout.paged import KVPool, PagedContext
from verl.rollout.scheduler import Work

LARGEST_HEAD, LARGEST_GROUP = 256, 16  # that decode.c has room for
PROBE_ROWS = (72, 40, 20, 6, 1)  # of one call each
PROBE_LENGTHS = (1, 33, 100, 128, 129, 300)


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("norm", "q", "q_bias", "k", "k_bias", "v", "v_bias", "q_norm")),
        *((name, ctypes.c_void_p) for name in ("k_norm", "o", "o_bias", "mlp_norm", "gate", "gate_bias", "up")),
        *((name, ctypes.c_void_p) for name in ("up_bias", "down", "down_bias", "keys", "values")),
        ("window", ctypes.c_int64),
    )


class _Sizes(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("layers", "T", "H", "A", "K", "D", "F", "most_blocks")),
        *((name, Product) for name in ("q", "kv", "o", "gate", "down")),
        ("scale", ctypes.c_double),
        ("eps", ctypes.c_double),
    )


@dataclass(frozen=True)
class _Part:
    """A layer's tensors by their names in ``decode.c``; weights of products as the model holds them."""

    vectors: dict[str, Tensor | None]
    weights: dict[str, Tensor]
    rule: AttentionRule


def _part(layer: Any, rule: AttentionRule) -> _Part:
    attention, mlp = layer.self_attn, layer.mlp
    linears = {name: getattr(attention, f"{name}_proj") for name in "qkvo"}
    linears |= {name: getattr(mlp, f"{name}_proj") for name in ("gate", "up", "down")}
    norms = {"norm": layer.input_layernorm, "mlp_norm": layer.post_attention_layernorm}
    norms |= {f"{name}_norm": getattr(attention, f"{name}_norm", None) for name in "qk"}
    vectors = {name: getattr(norm, "weight", None) for name, norm in norms.items()}
    vectors |= {f"{name}_bias": linear.bias for name, linear in linears.items()}
    return _Part(vectors, {name: linear.weight for name, linear in linears.items()}, rule)


class NativeDecoder:
    """Decode steps of one model.

    Raises:
        Unavailable: it would not give the bits of torch's operators, or not here.
    """

    def __init__(self, policy: PolicyModel) -> None:
        plain, weight = policy.plain, policy.model.get_input_embeddings().weight
        if weight.device.type != "cpu" or weight.dtype != torch.bfloat16:
            raise Unavailable("the model is not in bfloat16 on a CPU")
        if plain is None or not plain.whole or not plain.rule.packed:
            raise Unavailable("the model is of another kind than Llama")
        self._plain, self._space = plain, Space()
        self._parts = [_part(layer, rule) for layer, rule in plain.layers]
        self._sizes = self._measure()
        self._library = library()
        self._layers = (_Layer * len(self._parts))()
        self._stamps: list[tuple[int, int]] = []
        self._held: list[Tensor] = []
        self._probe()

    def __call__(self, tokens: list[int], work: list[Work], pool: KVPool) -> Tensor:
        """Last hidden states (T, H) of the work's tokens, whose keys and values are written into the pool."""
        lengths = [part.end - part.start for part in work]
        blocks = [part.sequence.blocks[: (part.end - 1) // KEY_BLOCK + 1] for part in work]
        table = np.zeros((len(work), max(map(len, blocks))), dtype=np.int32)
        for row, some in enumerate(blocks):
            table[row, : len(some)] = some
        table = np.repeat(table, lengths, axis=0)
        self._point(pool)
        sizes, threads, rows = self._sizes, torch.get_num_threads(), len(tokens)
        sizes.T, sizes.most_blocks = table.shape
        places = torch.from_numpy(np.concatenate([np.arange(part.start, part.end) for part in work]))
        fill = -rows % 16
        x = self._plain.decoder.embed_tokens(torch.tensor(tokens + [0] * fill))
        cos, sin = (part.contiguous() for part in self._plain.turn(x, places))
        seen = (places + 1).to(torch.int32)
        width = 2 * (sizes.H + sizes.A * sizes.D + sizes.K * sizes.D + sizes.F)
        space = self._space.take("rows", (rows + fill) * width, x.dtype)
        keys, group = sizes.most_blocks * KEY_BLOCK, sizes.A // sizes.K
        floats = max(sizes.H, sizes.D) + group * sizes.D + group * keys + 8 * keys
        scratch = self._space.take("scratch", threads * floats, torch.float32)
        tensors = self._plain.decoder.norm.weight, x, cos, sin, torch.from_numpy(table), seen, space, scratch
        self._library.decode(
            ctypes.byref(sizes), self._layers, *map(address, tensors), ctypes.c_int64(floats), ctypes.c_int(threads)
        )
        return x[:rows]

    def rest(self) -> None:
        self._stamps, self._held = [], []

    def _point(self, pool: KVPool) -> None:
        """Take the addresses of tensors that are new, and lay out weights that have changed."""
        tensors = [x for part in self._parts for x in (*part.weights.values(), *part.vectors.values()) if x is not None]
        stamps = [(x.data_ptr(), x._version) for x in tensors] + [(x.data_ptr(), 0) for x in pool.keys]
        if stamps == self._stamps:
            return
        self._held = []
        for layer, part, keys, values in zip(self._layers, self._parts, pool.keys, pool.values, strict=True):
            for name, vector in part.vectors.items():
                setattr(layer, name, address(vector))
            for name, weight in part.weights.items():
                held, place = laid_out(weight, self._plain.rule)
                self._held.append(held)
                setattr(layer, name, place)
            layer.keys, layer.values, layer.window = address(keys), address(values), part.rule.window or 0
        self._stamps = stamps

    def _measure(self) -> _Sizes:
        first, decoder = self._parts[0], self._plain.decoder
        shapes = {name: tuple(weight.shape) for name, weight in first.weights.items()}
        head = self._plain.layers[0][0].self_attn.head_dim
        (inner, hidden), heads, kv_heads = shapes["gate"], shapes["q"][0] // head, shapes["k"][0] // head
        eps = {module.variance_epsilon for module in decoder.modules() if hasattr(module, "variance_epsilon")}
        scales = {part.rule.scale for part in self._parts}
        same = all({name: tuple(w.shape) for name, w in part.weights.items()} == shapes for part in self._parts)
        other = any(part.rule.softcap is not None or part.rule.sinks is not None for part in self._parts)
        if not same or len(eps) != 1 or len(scales) != 1 or other:
            raise Unavailable("its layers differ, or its attention is of another kind")
        if head % MULTIPLE or head > LARGEST_HEAD or heads // kv_heads > LARGEST_GROUP:
            raise Unavailable("its heads are too wide, or too many share their keys")
        sizes = len(self._parts), 0, hidden, heads, kv_heads, head, inner, 0
        products = [
            find_product(first.weights[name].shape, self._plain.rule) for name in ("q", "k", "o", "gate", "down")
        ]
        return _Sizes(*sizes, *products, scales.pop(), eps.pop())

    def _probe(self) -> None:
        """The same hidden states as torch's operators, over random keys and values; all layers share their memory."""
        generator = torch.Generator().manual_seed(0)
        lengths = [PROBE_LENGTHS[row % len(PROBE_LENGTHS)] for row in range(max(PROBE_ROWS))]
        needed = [-(-length // KEY_BLOCK) for length in lengths]
        pool = KVPool(1, self._sizes.K, self._sizes.D, torch.bfloat16, torch.device("cpu"), sum(needed))
        pool.acquire()
        pool.joined[0].copy_(torch.randn(pool.joined[0].shape, generator=generator))
        for tensors in (pool.joined, pool.keys, pool.values):
            tensors *= len(self._parts)
        order = iter(torch.randperm(sum(needed), generator=generator).tolist())
        sequences: list[Any] = [SimpleNamespace(blocks=[next(order) for _ in range(count)]) for count in needed]
        work = [Work(one, length - 1, length) for one, length in zip(sequences, lengths, strict=True)]
        vocabulary = self._plain.decoder.embed_tokens.weight.shape[0]
        tokens = torch.randint(vocabulary, (len(work),), generator=generator).tolist()
        for rows in PROBE_ROWS:
            context = PagedContext(pool, work[-rows:], torch.device("cpu"))
            fill = self._plain.rule.padded(rows) - rows
            ids = torch.tensor(tokens[-rows:] + [0] * fill)
            expected = self._plain(ids, F.pad(context.positions, (0, fill)), context)[:rows]
            if not torch.equal(self(tokens[-rows:], work[-rows:], pool), expected):
                raise Unavailable("its bits differ from those of torch's operators here")
