"""Log-probs and entropy from hidden states, without the (tokens, vocabulary) matrix in memory at once.

Trainer and rollout engine share :func:`project` and ``torch.log_softmax`` so that both see the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.models.attention import wide_dtype
from verl.models.native.training import compiled
from verl.models.rows import RowRule, linear_rows, transposed

# Tokens that the forward pass projects together, where the row rule does not say.
CHUNK = 1024
# Numbers of the projection's gradient that exist at once; it comes in slices of the vocabulary.
SLICED = 2**23
NARROWEST = 1024  # tokens of the vocabulary in a slice: narrower products take longer
# Float32 logits that are looked at together stay in a core's own cache: 4 tokens of 49,152 make 0.8 MB.
CACHED = 2**18
ANY_ROWS = RowRule(multiple=1, least=1)


@dataclass(frozen=True)
class LogitRule:
    """What a model does between its vocabulary projection and the softmax: x becomes softcap * tanh(scale x / softcap).

    Computed in float32 here, whatever the model's dtype.
    """

    scale: float = 1.0
    softcap: float | None = None  # None: scale * x

    def apply(self, logits: Tensor) -> Tensor:
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def slope(self, tempered: Tensor, temperature: float) -> Tensor | float:
        """The derivative of the tempered logits by x, from their values."""
        if self.softcap is None:
            return self.scale / temperature
        return (1 - (tempered * (temperature / self.softcap)) ** 2) * (self.scale / temperature)


def logit_rule(config: Any) -> LogitRule:
    """The rule of a transformers model, by the names that Cohere, Granite and Gemma gave its parts."""
    config = config.get_text_config()
    scale = (getattr(config, "logit_scale", None) or 1.0) / (getattr(config, "logits_scaling", None) or 1.0)
    return LogitRule(float(scale), getattr(config, "final_logit_softcapping", None))


PLAIN = LogitRule()


def project(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    temperature: float | Tensor,
    rule: RowRule,
    logits_of: LogitRule = PLAIN,
) -> Tensor:
    """Tempered logits (N, V), at least float32, a tensor of its own.

    Args:
        hidden: (N, H).
        weight: (V, H) projection in the same dtype.
        temperature: see :func:`temper`.
        rule: row rule of the model.
        logits_of: what the model does with its logits, before the temperature.
    """
    return temper(project_rows(hidden, weight, bias, rule), temperature, logits_of)


def project_rows(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: RowRule) -> Tensor:
    """(N, H) -> (N, V) in the model's dtype, for any N."""
    rows = hidden.shape[0]
    fill = rule.padded(rows) - rows
    if fill:
        hidden = torch.cat([hidden, hidden.new_zeros(fill, hidden.shape[1])])
    return linear_rows(hidden, weight, bias, rule)[:rows]


def temper(projected: Tensor, temperature: float | Tensor, logits_of: LogitRule) -> Tensor:
    """Projections (N, V) to tempered logits, at least float32.

    Args:
        temperature: divides the logits, one number or (N,); 0 (greedy) leaves them as they are.
    """
    rows = projected.shape[0]
    logits = logits_of.apply(projected.to(wide_dtype(projected.dtype)))
    if isinstance(temperature, float | int):
        if temperature in (0, 1):
            return logits
        temperature = logits.new_full((rows,), temperature)  # one division kernel for both forms, one result
    elif bool((temperature == 1).all()):
        return logits
    return logits / torch.where(temperature == 0, 1.0, temperature)[:, None].to(logits.dtype)


class _ResponseLogProbs(torch.autograd.Function):
    """Projection, log-softmax, gather and entropy; the backward projects again.

    The forward goes by tokens, since a softmax needs the whole vocabulary. The backward knows each token's normaliser
    and goes by slices of the vocabulary: each weight's gradient is one product over all tokens.

    With p = softmax(z), z the tempered logits:  d log p_y / dz = onehot(y) - p,  dH / dz = -p (log p + H),
    and dz / d(projection) is the slope of the logit rule over the temperature.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        temperature: float,
        rule: RowRule,
        logits_of: LogitRule,
    ) -> tuple[Tensor, Tensor]:
        log_probs = hidden.new_empty(targets.shape, dtype=wide_dtype(weight.dtype))
        entropy, normaliser = torch.empty_like(log_probs), torch.empty_like(log_probs)
        rows = _rows_at_once(weight, rule)
        for start in range(0, len(targets), rows):
            chunk = project_rows(hidden[start : start + rows], weight, bias, rule)
            if logits_of == PLAIN and (kernels := compiled(chunk)) is not None:
                part = slice(start, start + rows)
                found = kernels.log_probs(chunk, targets[part], temperature or 1.0)
                log_probs[part], normaliser[part], entropy[part] = found
                continue
            for part, projected in _cached(chunk, start):
                logits, own = temper(projected, temperature, logits_of), targets[part, None]
                log_p = torch.log_softmax(logits, -1)
                log_probs[part] = log_p.gather(1, own)[:, 0]
                normaliser[part] = logits.gather(1, own)[:, 0] - log_probs[part]
                entropy[part] = _entropy(log_p, logits.softmax(-1))
        ctx.save_for_backward(hidden, weight, bias, targets, entropy, normaliser)
        ctx.temperature, ctx.logits_of = temperature, logits_of
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, _, normaliser = ctx.saved_tensors
        grad_hidden = torch.zeros_like(hidden, dtype=normaliser.dtype)  # slices add up in float32
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        grad_bias = torch.empty_like(bias) if bias is not None and ctx.needs_input_grad[2] else None
        hidden_t, with_entropy = transposed(hidden), bool(grads[1].any())
        width = max(NARROWEST, SLICED // max(1, len(targets)) // 64 * 64)
        for start in range(0, len(weight), width):
            some = slice(start, start + width)
            grad = project_rows(hidden, weight[some], None if bias is None else bias[some], ANY_ROWS)
            kernels = compiled(grad) if ctx.logits_of == PLAIN and not with_entropy else None
            for part, logits in _cached(grad):
                if kernels is None:
                    logits.copy_(_logit_grad(ctx, part, start, logits, with_entropy, *grads))
                    continue
                given = normaliser[part], grads[0][part].contiguous(), targets[part] - start
                kernels.logit_gradients(logits, *given, ctx.temperature or 1.0, 1.0 / (ctx.temperature or 1.0))
            grad_hidden += grad @ weight[some]
            if grad_weight is not None:
                grad_weight[some] = (hidden_t @ grad).T
            if grad_bias is not None:
                grad_bias[some] = grad.sum(0)
        return grad_hidden.to(hidden.dtype), grad_weight, grad_bias, None, None, None, None


def _rows_at_once(weight: Tensor, rule: RowRule) -> int:
    """Tokens that the forward pass projects together: those of one call, whose results need not be joined."""
    return CHUNK if rule.block is None else rule.large.get(weight.shape, rule.block)


def _cached(logits: Tensor, start: int = 0) -> Iterator[tuple[slice, Tensor]]:
    """Views of some rows, and which they are of all, ``start`` being the first row's place."""
    size = logits.shape[0] or 1
    if logits.device.type == "cpu":
        size = max(1, CACHED // logits.shape[1]) * torch.get_num_threads()
    for first in range(0, logits.shape[0], size):
        part = logits[first : first + size]
        yield slice(start + first, start + first + part.shape[0]), part


def _logit_grad(
    ctx: Any,
    part: slice,
    first: int,
    projected: Tensor,
    with_entropy: bool,
    grad_log_probs: Tensor,
    grad_entropy: Tensor,
) -> Tensor:
    """Gradient by the projection's results (rows, v) of these tokens and v words from ``first`` on, in float32."""
    *_, targets, entropy, normaliser = ctx.saved_tensors
    logits = temper(projected, ctx.temperature, ctx.logits_of)
    slope = ctx.logits_of.slope(logits, ctx.temperature or 1.0)
    log_p = logits.sub_(normaliser[part, None])  # a tensor of its own, or what the gradient will overwrite
    own, of_entropy = grad_log_probs[part, None], grad_entropy[part, None]
    if with_entropy:
        p = log_p.exp()
        inner = torch.where(p > 0, log_p.add_(entropy[part, None]), 0.0)  # 0 * -inf would be NaN
        grad = p.mul_(inner.mul_(of_entropy).add_(own)).neg_()
    else:
        grad = log_p.exp_().mul_(-own)
    places = targets[part, None] - first
    here = (places >= 0) & (places < logits.shape[1])
    grad.scatter_add_(1, places.where(here, 0), own.to(grad.dtype).where(here, 0.0))
    return grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)


def _entropy(log_p: Tensor, p: Tensor) -> Tensor:
    """(N, V) log-probs and probabilities -> (N,) entropy in nats; impossible tokens (-inf) add 0, a NaN stays one."""
    entropy = -(p * log_p).sum(-1)
    if bool(entropy.isnan().any()):  # 0 * -inf, or a NaN: told apart only where there is one, as it takes longer
        entropy = -torch.where(log_p == float("-inf"), 0.0, p * log_p).sum(-1)
    return entropy


def response_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float,
    rule: RowRule,
    logits_of: LogitRule = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Log-probs of the target tokens and the entropy of their distributions under the tempered model.

    Args:
        hidden: (M, H) hidden states that predict the targets.
        weight, bias: (V, H) and (V,) vocabulary projection.
        targets: (M,) int64 token ids.
        temperature: sampling temperature; 0 means greedy sampling, whose log-probs are untempered.
        rule: row rule of the model.
        logits_of: what the model does with its logits, before the temperature.

    Returns:
        log_probs (M,) and entropy (M,), float32 (float64 for a float64 model).
    """
    return _ResponseLogProbs.apply(hidden, weight, bias, targets, temperature, rule, logits_of)  # type: ignore[no-any-return]
