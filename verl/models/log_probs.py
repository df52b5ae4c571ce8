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
from verl.models.rows import RowRule, linear_rows

# Tokens whose logits are looked at together: 64 x 49,152 float32 numbers, 12 MB, stay in a CPU's cache.
PIECE = 64
# Tokens whose gradients by the logits (in the model's dtype) are multiplied together: the whole projection's gradient
# is read and written for each chunk.
CHUNK = 1024


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
    """Projection, log-softmax, gather and entropy, chunk by chunk; the backward projects each chunk again.

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
        entropy = torch.empty_like(log_probs)
        for part in _slices(0, targets.shape[0], PIECE):
            log_p = torch.log_softmax(project(hidden[part], weight, bias, temperature, rule, logits_of), -1)
            log_probs[part] = log_p.gather(1, targets[part, None])[:, 0]
            entropy[part] = _entropy(log_p)
        ctx.save_for_backward(hidden, weight, bias, targets, entropy)
        ctx.temperature, ctx.rule, ctx.logits_of = temperature, rule, logits_of
        return log_probs, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, _ = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden)
        wide = wide_dtype(weight.dtype)  # chunks add up in float32
        grad_weight = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and ctx.needs_input_grad[2] else None
        for chunk in _slices(0, targets.shape[0], CHUNK):
            grad = hidden.new_empty(chunk.stop - chunk.start, weight.shape[0])
            for part in _slices(chunk.start, chunk.stop, PIECE):
                grad[part.start - chunk.start : part.stop - chunk.start] = _logit_grad(ctx, part, *grads)
            grad_hidden[chunk] = grad @ weight
            if grad_weight is not None:
                grad_weight += grad.T @ hidden[chunk]
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=wide)
        return (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(weight.dtype),
            None,
            None,
            None,
            None,
        )


def _slices(start: int, stop: int, size: int) -> Iterator[slice]:
    return (slice(first, min(first + size, stop)) for first in range(start, stop, size))


def _logit_grad(ctx: Any, part: slice, grad_log_probs: Tensor, grad_entropy: Tensor) -> Tensor:
    """Gradient by the projection's results (rows, V) of these tokens, in float32."""
    hidden, weight, bias, targets, entropy = ctx.saved_tensors
    logits = project(hidden[part], weight, bias, ctx.temperature, ctx.rule, ctx.logits_of)
    slope = ctx.logits_of.slope(logits, ctx.temperature or 1.0)
    log_p = torch.log_softmax(logits, -1)
    del logits
    own, of_entropy = grad_log_probs[part, None], grad_entropy[part, None]
    if bool(of_entropy.any()):
        p = log_p.exp()
        inner = torch.where(p > 0, log_p.add_(entropy[part, None]), 0.0)  # 0 * -inf would be NaN
        grad = p.mul_(inner.mul_(of_entropy).add_(own)).neg_()
    else:
        grad = log_p.exp_().mul_(-own)
    grad.scatter_add_(1, targets[part, None], own.to(grad.dtype))
    return grad if isinstance(slope, float) and slope == 1.0 else grad.mul_(slope)


def _entropy(log_p: Tensor) -> Tensor:
    """(N, V) log-probs -> (N,) entropy in nats; impossible tokens (-inf) add 0, a NaN stays one."""
    entropy = -log_p.exp().mul_(log_p).sum(-1)
    if bool(entropy.isnan().any()):  # 0 * -inf, or a NaN: told apart only where there is one, as it takes longer
        entropy = -torch.where(log_p == float("-inf"), 0.0, log_p.exp() * log_p).sum(-1)
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
