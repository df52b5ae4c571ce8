"""Estimators that look at single tokens: GAE, REINFORCE++ and ReMax.

All three need sums over the later trained tokens of a row, discounted by the number of trained tokens in between
(masked gaps are closed). `_later` forms them with two small matrix products a chunk instead of a loop over columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from verl.algorithms.advantage_inputs import AdvantageInputs, Advantages
from verl.algorithms.masking import at_least_float32, mask_bits, masked_whiten, place_at_last, row_blocks, zero_outside
from verl.config.schema_run import AlgorithmConfig

_CHUNK = 64  # tokens summed by one matrix product
_CHUNK_DECAY = 1e-15  # least decay within a chunk: far from float32's smallest numbers


def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Generalised advantage estimation (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

    ``delta_t = r_t + gamma V_{t+1} - V_t``, ``A_t = delta_t + gamma lam A_{t+1}``, return ``A_t + V_t``; t counts
    trained tokens. After the last one the value is 0, or ``bootstrap_values`` for a response cut by the length limit.
    With ``config.whiten_advantages`` the advantages are then whitened over the trained tokens of all scored rows
    (n - 1; one token alone: 0); the returns are not. An unscored row has advantage 0 and returns equal to its values.
    Raises ValueError: no values were given.
    """
    if inputs.values is None:
        raise ValueError("the estimator 'gae' needs values: it runs with a critic")
    result = _returns(inputs, config.gamma, config.lam, inputs.values)
    if not config.whiten_advantages:
        return result
    return Advantages(masked_whiten(result.advantages, _counted_tokens(inputs), out=result.advantages), result.returns)


def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Discounted return to go of the token rewards (KL penalty included), whitened over all trained tokens.

    Hu et al. 2025, arXiv:2501.03262. Only trained tokens of scored rows count (variance by n - 1; one alone: 0). The
    returns are not whitened.
    """
    returns = _returns(inputs, config.gamma).returns
    return Advantages(masked_whiten(returns, _counted_tokens(inputs)), returns)


def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Return to go, undiscounted, less that of the greedy response to the prompt (Li et al. 2023, arXiv:2310.10505).
    Raises ValueError: no baselines were given."""
    if inputs.baselines is None:
        raise ValueError("the estimator 'remax' needs baselines: the returns of greedy responses")
    returns = _returns(inputs, 1.0).returns
    baselines = at_least_float32(inputs.baselines).to(returns.dtype).unsqueeze(1)
    advantages = returns - baselines
    return Advantages(zero_outside(advantages, _counted_tokens(inputs), out=advantages), returns)


def _counted_tokens(inputs: AdvantageInputs) -> Tensor:  # (B, R)
    mask = inputs.response_mask.bool()
    return mask if bool(inputs.scored.all()) else mask & inputs.scored.bool().unsqueeze(1)


def _returns(inputs: AdvantageInputs, gamma: float, lam: float = 1.0, values: Tensor | None = None) -> Advantages:
    """Lambda returns ``G_t = r_t + gamma S_{t+1}`` with ``S_t = lam G_t + (1 - lam) V_t``, and ``A_t = G_t - V_t``.

    This is GAE: S is a single decayed sum over later tokens, of ``lam r + (1 - lam) V`` by gamma lam. Without values
    V is 0, and advantages and returns are one tensor.
    """
    mask = inputs.response_mask.bool()
    counted = _counted_tokens(inputs)
    dtype = at_least_float32(inputs.token_level_rewards).dtype
    returns = torch.empty(mask.shape, dtype=dtype, device=mask.device)
    advantages = returns if values is None else torch.empty_like(returns)
    for block in row_blocks(mask.shape):
        trained = mask_bits(mask[block], dtype)
        kept = trained if counted is mask else mask_bits(counted[block], dtype)
        rewards = zero_outside(at_least_float32(inputs.token_level_rewards[block]), kept)  # (b, R)
        terms = rewards
        if values is not None:
            value = zero_outside(values[block].to(dtype), trained)
            if inputs.bootstrap_values is not None:
                # The value after the end enters only the last return: there it is a reward of gamma times its size.
                rewards += place_at_last(gamma * inputs.bootstrap_values[block], mask[block])
            terms = torch.lerp(value, rewards, lam)
        later = _later(terms, mask[block], gamma * lam)
        zero_outside(later.mul_(gamma).add_(rewards), kept, out=returns[block])
        if values is not None:
            own = torch.sub(returns[block], value, out=advantages[block])
            if counted is not mask:
                zero_outside(own, kept, out=own)
                torch.add(own, value, out=returns[block])
    return Advantages(advantages, returns)


def _later(terms: Tensor, mask: Tensor, decay: float) -> Tensor:
    """For each trained token t the sum over later ones k of ``decay^(trained tokens between t and k) terms_k``, (b, R).
    ``terms`` are 0 where ``mask`` is false; what stands there in the result means nothing."""
    decay = max(decay, 1e-20)  # 0 would divide by 0, and this is as good: it rounds away
    width = _CHUNK if decay == 1 else max(1, min(_CHUNK, int(math.log(_CHUNK_DECAY) / math.log(decay))))
    rows, tokens = terms.shape
    chunks = -(-tokens // width)
    shape, fill = (rows, chunks, width), (0, chunks * width - tokens)
    ones = torch.ones(width, width, dtype=terms.dtype, device=terms.device)
    weights: Tensor | None = None
    if decay == 1:
        whole = torch.ones(rows, chunks, dtype=terms.dtype, device=terms.device)
    elif bool((mask[:, 1:] & ~mask[:, :-1]).any()):  # some row is no run of trained tokens from column 0 on
        trained = pad(mask, fill).view(shape).to(terms.dtype)
        earlier = trained @ ones.triu(1)  # trained tokens of the chunk before each
        whole = decay ** (earlier[..., -1] + trained[..., -1])  # (b, chunks), decay over the chunk
        weights = earlier.mul_(math.log(decay)).exp_()  # (b, chunks, width)
    else:
        weights = decay ** torch.arange(width, dtype=terms.dtype, device=terms.device)
        whole = torch.full((rows, chunks), decay**width, dtype=terms.dtype, device=terms.device)
    weighted = pad(terms, fill).view(shape)
    if weights is not None:
        weighted = weighted * weights
    later = weighted @ ones.tril(-1)
    first = (later[..., 0] + weighted[..., 0]).t().contiguous()  # (chunks, b), sum over the chunk seen from its start
    after = torch.zeros_like(first)  # the same sum over everything behind the chunk, seen from its end
    decays = whole.t()
    for chunk in range(chunks - 1, 0, -1):
        torch.addcmul(first[chunk], decays[chunk], after[chunk], out=after[chunk - 1])
    later += (whole * after.t()).unsqueeze(2)
    if weights is not None:
        later /= weights.mul_(decay)
    return later.view(rows, -1)[:, :tokens]
