"""Is the reward what was meant, in a run and, before it, on answers that are known to be right and wrong?"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import stdev
from typing import TYPE_CHECKING, Any

from verl.diagnostics.evidence import Evidence, Finding, finding, mean
from verl.tracking import names
from verl.tracking.samples import SampleRow

if TYPE_CHECKING:
    from verl.config import RewardConfig
    from verl.data.rows import PromptRow


LEAST_ROWS = 8  # responses on each side of a comparison


def constant(evidence: Evidence) -> Iterator[Finding]:
    """Every response of every step has one score: nothing can be learnt."""
    least, most = evidence.series("critic/score/min"), evidence.series("critic/score/max")
    values = {*least.values(), *most.values()}
    responses = sum(evidence.series("reward/scored").values())
    if len(least) >= 2 and len(values) == 1:
        yield finding("reward_constant", f"{values.pop():g} for all {responses:g} responses of {len(least)} steps")


def zero_spread(evidence: Evidence) -> Iterator[Finding]:
    shares = evidence.series("training/frac_reward_zero_std")
    compares = evidence.config is None or evidence.config.algorithm.compares_group
    late = list(shares.values())[-10:]
    if compares and late and mean(late) > 0.7 and not next(constant(evidence), None):
        yield finding("groups_without_spread", f"{mean(late):.0%} of the groups of the last {len(late)} steps")


def against_truth(evidence: Evidence) -> Iterator[Finding]:
    """Of sampled responses: those in which the ground truth stands as a word should have the higher scores."""
    rows = [row for row in evidence.rows if _truth_of(row)]
    right = [row.score for row in rows if row.score is not None and _is_right(row)]
    wrong = [row.score for row in rows if row.score is not None and not _is_right(row)]
    if len({_truth_of(row) for row in rows}) < 2 or min(len(right), len(wrong)) < LEAST_ROWS:
        return
    spread = 2 * stdev(right + wrong)  # 1 where half of the scores are 0 and half are 1
    gain = mean(right) - mean(wrong)
    error = (stdev(right) ** 2 / len(right) + stdev(wrong) ** 2 / len(wrong)) ** 0.5
    figures = (
        f"mean score {mean(right):.4g} of {len(right)} responses that contain the ground truth, "
        f"{mean(wrong):.4g} of {len(wrong)} that do not"
    )
    if gain < 0 and -gain > max(3 * error, 0.05 * spread):
        yield finding("reward_inverted", figures)
    elif spread and abs(gain) < 0.2 * spread and error < 0.12 * spread:
        yield finding("reward_format_only", figures)


def _truth_of(row: SampleRow) -> str:
    truth = row.ground_truth
    return str(truth).strip() if isinstance(truth, str | int | float) else ""


def _is_right(row: SampleRow) -> bool:
    return re.search(rf"(?<!\w){re.escape(_truth_of(row))}(?!\w)", row.response) is not None


def timed_out(evidence: Evidence) -> Iterator[Finding]:
    rows = [row for found in evidence.samples.values() for row in found]
    late = [row for row in rows if row.reason and re.search(r"time.?(d.)?out|seconds", row.reason, re.IGNORECASE)]
    if late:
        figures = f"{len(late)} of {len(rows)} sampled responses: {str(late[0].reason)[:120]}"
        yield finding("reward_timed_out", figures, severity="error" if len(late) > 0.2 * len(rows) else "warning")


def follows_length(evidence: Evidence) -> Iterator[Finding]:
    pairs = [(row.score, row.response_length) for row in evidence.rows if row.response_length]
    if len(pairs) < 2 * LEAST_ROWS or len({score for score, _ in pairs}) < 4:
        return
    found = correlation([float(score or 0) for score, _ in pairs], [float(length or 0) for _, length in pairs])
    if abs(found) > 0.9:
        longer = "longer" if found > 0 else "shorter"
        yield finding("reward_follows_length", f"correlation {found:.2f} over {len(pairs)} responses", longer=longer)


def collapsed(evidence: Evidence) -> Iterator[Finding]:
    """The alarm ``trainer.alarms.reward``; means of three steps."""
    limit, scores = evidence.limits.reward, evidence.series(names.REWARD)
    lows, highs = evidence.series("critic/score/min").values(), evidence.series("critic/score/max").values()
    if limit is None or len(scores) < 6 or not lows or not highs:
        return
    floor, span = min(lows), max(highs) - min(lows)
    steps = sorted(scores)
    means = {steps[i + 2]: mean([scores[step] for step in steps[i : i + 3]]) for i in range(len(steps) - 2)}
    best = max(means, key=means.__getitem__)
    least = min(floor + (1 - limit) * (means[best] - floor), means[best] - 0.15 * span)
    fallen = [step for step, value in means.items() if step > best and value < least]
    if fallen:
        figures = f"{means[best]:.4g} around step {best}, {means[fallen[-1]]:.4g} around step {fallen[-1]}"
        yield finding("reward_collapsed", figures)


def one_pattern(evidence: Evidence) -> Iterator[Finding]:
    """A text that all of the best responses share and the others mostly lack."""
    rows = evidence.rows
    scores = {row.score for row in rows if row.score is not None}
    if len(scores) < 2:
        return
    best = [row for row in rows if row.score == max(scores)]
    rest = [row for row in rows if row.score != max(scores)]
    if len({row.prompt for row in best}) < 4 or len(rest) < LEAST_ROWS:
        return
    shared = _shared([row.response for row in best])
    having = sum(shared in row.response for row in rest)
    if len(shared.strip()) >= 4 and having < 0.2 * len(rest) and not any(shared in row.prompt for row in best):
        yield finding(
            "one_pattern",
            f"{shared[:60]!r} in {len(best)} responses to {len({row.prompt for row in best})} prompts "
            f"with the score {max(scores):g}, and in {having} of {len(rest)} others",
        )


def _shared(texts: Sequence[str]) -> str:
    """The longest text that stands in all of them, of the first 400 characters of the shortest."""
    shortest = min(texts, key=len)[:400]
    low, high = 0, len(shortest)
    best = ""
    while low < high:  # if one of length k is shared, so is one of every smaller length
        size = (low + high + 1) // 2
        parts = {shortest[i : i + size] for i in range(len(shortest) - size + 1)}
        found = sorted(part for part in parts if all(part in text for text in texts))
        low, high, best = (size, high, found[0]) if found else (low, size - 1, best)
    return best


def correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Pearson's; 0 where one has no spread."""
    a, b = mean(one), mean(other)
    spread = (sum((x - a) ** 2 for x in one) * sum((y - b) ** 2 for y in other)) ** 0.5
    return sum((x - a) * (y - b) for x, y in zip(one, other, strict=True)) / spread if spread > 0 else 0.0


def of_trial(evidence: Evidence) -> Iterator[Finding]:
    """Before a run: the reward on each row's own truth and on another row's, written in the usual ways."""
    trial = evidence.trial
    if trial is None:
        return
    if trial.failed:
        figures = f"{trial.failed} of {trial.tried}: {trial.reason[:160]}"
        yield finding("reward_failed", figures, severity="error" if trial.failed == trial.tried else "warning")
    if trial.slowest > 1.0:
        yield finding("reward_slow", f"up to {trial.slowest:.1f} s for one response")
    told = {form: own - other for form, (own, other) in trial.means.items() if own is not None and other is not None}
    best, worst = max(told, key=told.__getitem__, default=""), min(told, key=told.__getitem__, default="")
    if told and told[best] <= 0 and told[worst] < 0:
        yield finding("reward_inverted", _means(trial, worst))
    elif told and told[best] <= 0:
        seen = sorted({value for pair in trial.means.values() for value in pair if value is not None})
        if len(seen) > 1:
            best = max(trial.means, key=lambda form: trial.means[form][0] or 0.0)
            yield finding("reward_format_only", _means(trial, best), severity="error")
        else:
            yield finding("reward_untested", f"{seen[0]:g} for right and wrong answers alike")


def _means(trial: Any, form: str) -> str:
    own, other = trial.means[form]
    return f"written as {form!r}: mean score {own:.4g} of right answers, {other:.4g} of wrong ones"


# How rewards of the field want an answer written.
FORMS = ["{truth}", "#### {truth}", "\\boxed{{truth}}", "<think></think><answer>{truth}</answer>"]
FORMS += ["The answer is {truth}."]
ROWS = 24


@dataclass(frozen=True)
class Trial:
    """What came of it. ``means``: by form, the mean score of own ground truths and of other rows'; None: not scored."""

    means: dict[str, tuple[float | None, float | None]]
    tried: int
    failed: int
    slowest: float  # seconds
    reason: str  # of the first failure


def try_known_answers(config: RewardConfig, rows: Sequence[PromptRow]) -> Trial | None:
    """None where nothing is known: fewer than two different ground truths, or a model that judges. Raises RewardError:
    the reward cannot be loaded, or does not fit the rows."""
    from verl.rewards.trial import Tried, try_reward

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
    scores = iter(report.scores)

    def next_mean() -> float | None:
        values = [score.value for score in islice(scores, len(rows)) if score.value is not None]
        return mean(values) if values else None

    means = {form: (next_mean(), next_mean()) for form in FORMS}
    failed = [score.reason for score in report.scores if score.reason is not None]
    slowest = max(score.seconds for score in report.scores)
    return Trial(means, len(tried), len(failed), slowest, failed[0] if failed else "")
