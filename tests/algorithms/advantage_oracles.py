"""Every advantage estimator once more: float64 numpy, row by row, as its paper writes it."""

from __future__ import annotations

import numpy as np

from verl.algorithms.advantage_inputs import AdvantageInputs
from verl.config.schema_run import AlgorithmConfig


def trained(inputs: AdvantageInputs, row: int) -> np.ndarray:
    return np.flatnonzero(inputs.response_mask[row].numpy())


def counted(inputs: AdvantageInputs) -> list[int]:
    return [row for row in range(len(inputs.scored)) if inputs.scored[row] and len(trained(inputs, row))]


def score(inputs: AdvantageInputs, row: int) -> float:
    return float(inputs.token_level_rewards[row].numpy()[trained(inputs, row)].sum())


def groups(inputs: AdvantageInputs, rows: list[int]) -> list[list[int]]:
    ids = inputs.group_ids.tolist()
    return [[row for row in rows if ids[row] == group] for group in sorted({ids[row] for row in rows})]


def flat(values: list[float]) -> bool:
    return len(values) < 2 or np.ptp(values) < 1e-9


def over_tokens(inputs: AdvantageInputs, by_row: dict[int, float]) -> np.ndarray:
    out = np.zeros(inputs.response_mask.shape)
    for row, value in by_row.items():
        out[row, trained(inputs, row)] = value
    return out


def whitened(inputs: AdvantageInputs, values: np.ndarray) -> np.ndarray:
    """Over the trained tokens of counted rows, variance by n - 1."""
    places = np.zeros(values.shape, dtype=bool)
    for row in counted(inputs):
        places[row, trained(inputs, row)] = True
    kept = values[places]
    out = np.zeros(values.shape)
    if len(kept) > 1 and np.ptp(kept) > 1e-12 * np.abs(kept).max():
        out[places] = (kept - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8)
    return out


def by_group(inputs: AdvantageInputs, rule) -> np.ndarray:
    """``rule(scores, lengths) -> advantages`` of every group with spread; 0 elsewhere."""
    by_row = {}
    for members in groups(inputs, counted(inputs)):
        scores = [score(inputs, row) for row in members]
        if not flat(scores):
            lengths = [len(trained(inputs, row)) for row in members]
            by_row |= dict(zip(members, rule(np.array(scores), np.array(lengths)), strict=True))
    return over_tokens(inputs, by_row)


def returns_to_go(inputs: AdvantageInputs, gamma: float) -> np.ndarray:
    out = np.zeros(inputs.response_mask.shape)
    for row in counted(inputs):
        places = trained(inputs, row)
        rewards = inputs.token_level_rewards[row].numpy()[places]
        for t, place in enumerate(places):
            out[row, place] = sum(gamma ** (k - t) * rewards[k] for k in range(t, len(places)))
    return out


def gae(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    out = np.zeros(inputs.response_mask.shape)
    for row in counted(inputs):
        places = trained(inputs, row)
        rewards = inputs.token_level_rewards[row].numpy()[places]
        end = 0.0 if inputs.bootstrap_values is None else float(inputs.bootstrap_values[row])
        values = np.append(inputs.values[row].numpy()[places], end)
        deltas = rewards + config.gamma * values[1:] - values[:-1]
        for t, place in enumerate(places):
            out[row, place] = sum((config.gamma * config.lam) ** (k - t) * deltas[k] for k in range(t, len(places)))
    return whitened(inputs, out) if config.whiten_advantages else out


def grpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    by_std = config.norm_adv_by_std_in_grpo
    return by_group(inputs, lambda r, _: (r - r.mean()) / (r.std(ddof=1) + 1e-6 if by_std else 1.0))


def grpo_passk(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    def rule(r: np.ndarray, _: np.ndarray) -> np.ndarray:
        second, best = np.sort(r)[-2:]
        scale = r.std(ddof=1) if config.norm_adv_by_std_in_grpo else 1.0
        return np.where(np.arange(len(r)) == r.argmax(), (best - second) / scale, 0.0)

    return by_group(inputs, rule)


def rloo(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    return by_group(inputs, lambda r, _: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]))


def opo(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    return by_group(inputs, lambda r, lengths: r - (lengths * r).sum() / lengths.sum())


def gpg(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    scores = [[score(inputs, row) for row in members] for members in groups(inputs, counted(inputs))]
    alpha = len(scores) / max(sum(not flat(group) for group in scores), 1)
    return by_group(inputs, lambda r, _: alpha * (r - r.mean()))


def maxrl(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    return by_group(inputs, lambda r, _: (r - r.mean()) / r.mean() if r.mean() > 0 else 0 * r)


def gdpo(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    rows = counted(inputs)
    total = dict.fromkeys(rows, 0.0)
    components = inputs.reward_components.numpy()
    for k, weight in enumerate(config.gdpo_reward_weights or [1.0] * components.shape[1]):
        for members in groups(inputs, [row for row in rows if not np.isnan(components[row, k])]):
            own = components[members, k]
            if not flat(own.tolist()):
                for row, value in zip(members, (own - own.mean()) / (own.std(ddof=1) + 1e-6), strict=True):
                    total[row] += weight * value
    values = np.array(list(total.values()))
    if len(values) < 2 or np.abs(values).max() < 1e-12:
        return over_tokens(inputs, dict.fromkeys(rows, 0.0))
    values = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return over_tokens(inputs, dict(zip(rows, values, strict=True)))


def reinforce_plus_plus(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    return whitened(inputs, returns_to_go(inputs, config.gamma))


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    return whitened(inputs, by_group(inputs, lambda r, _: r - r.mean()))


def remax(inputs: AdvantageInputs, config: AlgorithmConfig) -> np.ndarray:
    out = returns_to_go(inputs, 1.0)
    for row in counted(inputs):
        out[row, trained(inputs, row)] -= float(inputs.baselines[row])
    return out


ORACLES = {
    rule.__name__: rule
    for rule in (
        gae,
        grpo,
        grpo_passk,
        rloo,
        reinforce_plus_plus,
        reinforce_plus_plus_baseline,
        remax,
        opo,
        gpg,
        gdpo,
        maxrl,
    )
}
