"""An advantage estimator: the score against its group's mean, softly divided by the group's deviation."""

from __future__ import annotations

from verl.algorithms.advantage_inputs import AdvantageInputs, Advantages, spread_over_tokens
from verl.config.schema_run import AlgorithmConfig


def soft_group(inputs: AdvantageInputs, config: AlgorithmConfig) -> Advantages:
    """``(r - m) / (1 + s)`` on each trained token; responses without a score are left out of m and s."""
    group = inputs.groups  # scores, mean, std, count, spread of each row's group: (B,)
    return spread_over_tokens(inputs, group.relative / (1 + group.std))
