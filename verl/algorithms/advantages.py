"""Advantage estimators: pure functions with one signature, and the plain dict that names them.

An estimator takes `AdvantageInputs` and the algorithm's configuration and returns `Advantages`, both (B, R). It runs
on the controller over the whole batch, so every statistic is global. What every estimator keeps:

- Nothing at a masked position is ever read, so the **terminal reward belongs on the last trained token**. A response
  that ends in masked tokens (a tool's output, say) has its reward before them; a reward left on the masked tail is
  not seen. `verl.algorithms.masking.place_at_last` puts it right.
- Masked gaps inside a response are closed: the next token is the next *trained* token.
- A row that was not scored, or that has no trained token, enters no statistic and has advantage 0.
- Advantages and returns at masked positions are 0.
"""

from __future__ import annotations

from functools import cache

from verl.algorithms.advantage_inputs import (
    AdvantageInputs,
    Advantages,
    Estimator,
    group_index,
    outcome_scores,
    zero_spread_metric,
)
from verl.algorithms.group_advantages import (
    gdpo,
    gpg,
    grpo,
    grpo_passk,
    maxrl,
    opo,
    reinforce_plus_plus_baseline,
    rloo,
)
from verl.algorithms.masking import select
from verl.algorithms.token_advantages import gae, reinforce_plus_plus, remax
from verl.config.schema_run import AlgorithmConfig
from verl.errors import ConfigError, VerlError
from verl.user_code import describe, load_user_function

__all__ = [
    "ESTIMATORS",
    "AdvantageInputs",
    "Advantages",
    "Estimator",
    "estimate",
    "find_estimator",
    "group_index",
    "outcome_scores",
    "zero_spread_metric",
]

ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "grpo": grpo,
    "grpo_passk": grpo_passk,
    "rloo": rloo,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "gdpo": gdpo,
    "maxrl": maxrl,
}


def estimate(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """Advantages by the configured estimator, the user's own (``algorithm.custom_estimator``) or one of `ESTIMATORS`.

    Raises:
        ConfigError: the user's file or function cannot be loaded.
        VerlError: the user's function failed, or gave something else than `Advantages` of the inputs' shape.
    """
    estimator, own = find_estimator(config), config.custom_estimator
    if own.path is None:
        return estimator(inputs, config)
    name = f"{own.name} in {own.path}"
    try:
        result = estimator(inputs, config)
    except Exception as error:
        raise VerlError("the advantage estimator failed", name, describe(error)) from error
    mask = inputs.response_mask.bool()
    fits = isinstance(result, Advantages) and result.advantages.shape == result.returns.shape == mask.shape
    if not fits:
        fix = f"return verl.algorithms.advantages.Advantages(advantages, returns), both of shape {tuple(mask.shape)}"
        raise VerlError("the advantage estimator returned something else than advantages and returns", name, fix)
    return Advantages(select(result.advantages, mask), select(result.returns, mask))


def find_estimator(config: AlgorithmConfig, reread: bool = False) -> Estimator:
    """``algorithm.custom_estimator``, a function ``(inputs, config) -> Advantages`` of the user's, or the named one.

    Args:
        reread: read the user's file anew, as a new run must.

    Raises:
        ConfigError: no such file, an exception while it is imported, or no such function.
    """
    own = config.custom_estimator
    if reread:
        _user_estimator.cache_clear()
    return ESTIMATORS[config.adv_estimator] if own.path is None else _user_estimator(own.path, own.name)


@cache  # the file is read once a run
def _user_estimator(path: str, name: str) -> Estimator:
    return load_user_function(path, name, "estimator", "algorithm.custom_estimator.path", ConfigError)[0]
