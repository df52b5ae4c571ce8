"""Policy losses whose ratio belongs to a whole response; always aggregated as ``seq-mean-token-mean``.

The mean over a response is of its trained tokens' log-ratios, each held within [-20, 20]: a token outside gives its
response a finite ratio, and no gradient of its own.
"""

from __future__ import annotations

import torch

from verl.algorithms.aggregation import Denominators
from verl.algorithms.loss_inputs import LossInputs, LossResult, finished
from verl.algorithms.masking import masked_mean
from verl.config.schema_roles import ActorConfig

SEQUENCE_MODE = "seq-mean-token-mean"


def gspo(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Group sequence policy optimisation (Zheng et al. 2025, arXiv:2507.18071, section 4.3, GSPO-token).

    ``s = exp(mean over a response of log rho)``; a token's log-ratio is ``sg(log s) + log pi - sg(log pi)``: the
    value of the response's, the gradient of its own. Then PPO's clipped term per token, without dual clip. The
    paper's ranges are far narrower than PPO's: ``clip_ratio_low`` 3e-4, ``clip_ratio_high`` 4e-4.

    Config: ``clip_low``, ``clip_high``.
    Metrics: `finished`'s; ``actor/pg_clipfrac``, share of tokens (all of a response together) where the clip won.
    """
    t = inputs.tokens
    sequence = masked_mean(t.held.detach(), t.mask, dim=-1)[:, None]  # (B, 1): log s
    ratio = (sequence + (t.held - t.held.detach())).exp()  # the bracket is exactly 0: one ratio for the response
    plain = -t.advantages * ratio
    clipped = -t.advantages * ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    token_loss = torch.maximum(plain, clipped)
    return finished(token_loss, inputs, denominators, SEQUENCE_MODE, pg_clipfrac=clipped > plain)


def geo_mean(inputs: LossInputs, config: ActorConfig, denominators: Denominators) -> LossResult:
    """Geometric-mean policy optimisation (Zhao et al. 2025, arXiv:2507.20673, eq. 4).

    Per token ``g = min(log rho, clip_high)`` for A > 0 and ``max(log rho, -clip_low)`` for A < 0 (ranges of the
    log-ratio; the paper's are 0.4 both); one loss a response, ``-A exp(mean of g)`` with A the mean of its tokens'.

    It is written as token losses of this value and this gradient, so that importance weights act on each token.

    Config: ``clip_low``, ``clip_high``.
    Metrics: `finished`'s; ``actor/pg_clipfrac``, share of tokens whose log-ratio was cut.
    """
    t = inputs.tokens
    held = torch.where(t.advantages > 0, t.held.clamp(max=config.clip_high), t.held)
    held = torch.where(t.advantages < 0, t.held.clamp(min=-config.clip_low), held)
    sequence = masked_mean(held.detach(), t.mask, dim=-1).exp()[:, None]  # (B, 1)
    advantage = masked_mean(t.advantages, t.mask, dim=-1)[:, None]
    token_loss = -advantage * sequence * (1.0 + held - held.detach())
    return finished(token_loss, inputs, denominators, SEQUENCE_MODE, pg_clipfrac=held != t.held)
