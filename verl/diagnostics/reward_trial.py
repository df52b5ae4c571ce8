"""The reward of a configuration on answers that are known to be right and wrong: before a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl.config import RewardConfig
from verl.data.rows import PromptRow
from verl.rewards.trial import Tried, try_reward

# How rewards of the field want an answer written.
FORMS = (
    "{truth}",
    "#### {truth}",
    "\\boxed{{truth}}",
    "<think></think><answer>{truth}</answer>",
    "The answer is {truth}.",
)
ROWS = 24


@dataclass(frozen=True)
class Trial:
    """What came of it.

    Attributes:
        means: by form, the mean score of the rows' own ground truths and of other rows'; None where none was scored.
        slowest: seconds.
        reason: of the first failure.
    """

    means: dict[str, tuple[float | None, float | None]]
    tried: int
    failed: int
    slowest: float
    reason: str


def try_known_answers(config: RewardConfig, rows: Sequence[PromptRow]) -> Trial | None:
    """None where nothing is known: fewer than two different ground truths, or a model that judges.

    Raises:
        RewardError: the reward cannot be loaded, or does not fit the rows.
    """
    rows = rows[:: max(1, len(rows) // ROWS)][:ROWS]
    truths = [str(row.ground_truth) for row in rows]
    if len(set(truths)) < 2 or config.model.path is not None or config.judge.base_url is not None:
        return None
    others = [next(t for t in truths[i + 1 :] + truths[:i] if t != truth) for i, truth in enumerate(truths)]
    tried = [
        Tried(row, form.replace("{truth}", text), kind)
        for form in FORMS
        for kind, texts in (("own", truths), ("other", others))
        for row, text in zip(rows, texts, strict=True)
    ]
    settings = config.model_copy(update={"max_failed_fraction": 1.0, "cache": False})
    report = try_reward("reward", settings, tried, lambda done: None)
    values: dict[tuple[str, str], list[float]] = {}
    for i, score in enumerate(report.scores):
        if score.value is not None:
            values.setdefault((FORMS[i // (2 * len(rows))], tried[i].kind), []).append(score.value)

    def mean_of(form: str, kind: str) -> float | None:
        found = values.get((form, kind))
        return sum(found) / len(found) if found else None

    failed = [score.reason for score in report.scores if score.reason is not None]
    return Trial(
        means={form: (mean_of(form, "own"), mean_of(form, "other")) for form in FORMS},
        tried=len(tried),
        failed=len(failed),
        slowest=max(score.seconds for score in report.scores),
        reason=failed[0] if failed else "",
    )
