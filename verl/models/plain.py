"""The layers of Llama and its kin without their modules: the same bits in half the operations.

While a response is generated the model sees a few rows at a time, and what its modules do around the arithmetic takes
as long as the arithmetic. Here queries and keys are turned together and sums overwrite what nobody reads again. Where
there are gradients, the turning of each is one autograd node.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from verl.models.attention import AttentionContext, AttentionRule
from verl.models.fused import ROWS, gated_mlp, rms_norm
from verl.models.native.training import compiled
from verl.models.packed import decoder_states, pack_rows
from verl.models.rows import RowLinear, RowRule, linear_rows
from verl.models.support import PROBE, NotingContext, probe_rows


class PlainDecoder:
    """A decoder's forward over its own parameters, wherever they lie by then.

    Args:
        rules: what each layer asks of its attention.
    """

    def __init__(self, decoder: Any, rule: RowRule, rules: dict[int, AttentionRule]) -> None:
        self.decoder, self.rule = decoder, rule
        self.layers = [(layer, rules[i]) for i, layer in enumerate(decoder.layers)]
        self._kind = type(self.layers[0][0])

    @property
    def whole(self) -> bool:
        """Whether the layers are still what they were: those that are sharded work inside their modules only."""
        return type(self.decoder.layers[0]) is self._kind

    def __call__(self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states (T, H) of packed tokens (T,)."""
        decoder, rule = self.decoder, self.rule
        x = decoder.embed_tokens(input_ids)
        turn = self.turn(x, position_ids)
        for number, (layer, attention_rule) in enumerate(self.layers):
            attention, mlp = layer.self_attn, layer.mlp
            normed = _norm(layer.input_layernorm, x)
            query, key, value = (
                linear_rows(normed, part.weight, part.bias, rule).view(len(x), -1, attention.head_dim)
                for part in (attention.q_proj, attention.k_proj, attention.v_proj)
            )
            if hasattr(attention, "q_norm"):
                query, key = _norm(attention.q_norm, query), _norm(attention.k_norm, key)
            if torch.is_grad_enabled():
                query, key = (_Turn.apply(part, *turn).transpose(0, 1) for part in (query, key))  # type: ignore[no-untyped-call]
            else:
                turned = _turned(torch.cat([query, key], 1), *turn).transpose(0, 1)
                query, key = turned[: query.shape[1]], turned[query.shape[1] :]
            seen = context.attend(number, query, key, value.transpose(0, 1), attention_rule).reshape(len(x), -1)
            x = _sum(linear_rows(seen, attention.o_proj.weight, attention.o_proj.bias, rule), x)
            normed = _norm(layer.post_attention_layernorm, x)
            x = _sum(gated_mlp(normed, *((part.weight, part.bias) for part in _gated(mlp)), rule), x)  # type: ignore[call-arg,arg-type]
        return self.last_norm(x)

    def last_norm(self, x: Tensor) -> Tensor:
        return _norm(self.decoder.norm, x)

    def turn(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (T, 1, D) by which queries and keys at these positions are turned; see :func:`_turned`."""
        return _turn(*self.decoder.rotary_emb(x[None], position_ids=position_ids[None]))


def _norm(module: Any, x: Tensor) -> Tensor:
    return rms_norm(x, module.weight, module.variance_epsilon)


def _sum(new: Tensor, x: Tensor) -> Tensor:
    return new + x if torch.is_grad_enabled() else new.add_(x)


def _gated(mlp: Any) -> tuple[Any, Any, Any]:
    return mlp.gate_proj, mlp.up_proj, mlp.down_proj


def _turn(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """(1, T, D) each -> (T, 1, D); the sine's first half negative instead of the half that it is multiplied with."""
    half = sin.shape[-1] // 2
    return cos[0, :, None], torch.cat([-sin[0, :, None, :half], sin[0, :, None, half:]], -1)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(T, heads, D) with each head's halves as the two coordinates of D / 2 points turned (Su et al., 2021: RoPE)."""
    half = x.shape[-1] // 2
    other = torch.cat([x[..., half:], x[..., :half]], -1)
    return x.mul_(cos).add_(other.mul_(sin))


class _Turn(torch.autograd.Function):
    """:func:`_turned` of a copy; the gradient is turned back. Keeps nothing but the angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        if (kernels := compiled(x, cos, sin)) is not None:
            return kernels.turn(x, cos, sin)
        out = torch.empty_like(x)
        for part, c, s, into in _parts(x, cos, sin, out):
            _turned(into.copy_(part), c, s)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        if (kernels := compiled(grads[0], cos, sin)) is not None:
            return kernels.turn(grads[0], cos, sin, back=True), None, None
        half = cos.shape[-1] // 2
        out = torch.empty_like(grads[0])
        for grad, c, s, into in _parts(grads[0], cos, sin, out):
            other = grad * s
            torch.mul(grad, c, out=into)
            into[..., :half].add_(other[..., half:])
            into[..., half:].add_(other[..., :half])
        return out, None, None


def _parts(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Rows that stay in a core's cache."""
    rows = ROWS * torch.get_num_threads() if tensors[0].device.type == "cpu" else 2**31
    return zip(*(tensor.split(rows) for tensor in tensors), strict=True)


@torch.no_grad()
def plain_decoder(decoder: nn.Module, rule: RowRule) -> PlainDecoder | None:
    """The decoder without its modules, if it is of this kind and gives the same bits; else None."""
    modules = list(decoder.modules())
    if any(module._forward_hooks or module._forward_pre_hooks for module in modules):
        return None  # sharded layers gather their weights there
    if any(type(module) is not RowLinear for module in modules if hasattr(module, "in_features")):
        return None  # its weight is not all that it computes with
    device = next(decoder.parameters()).device
    vocabulary = decoder.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    packed = pack_rows(probe_rows(vocabulary), [[] for _ in PROBE], 0).to(device).filled(rule.padded)
    context = NotingContext(packed)
    inputs = packed.input_ids, packed.position_ids, context
    expected = decoder_states(decoder, *inputs)
    try:
        plain = PlainDecoder(decoder, rule, context.rules)
        return plain if torch.equal(plain(*inputs), expected) else None
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return None
