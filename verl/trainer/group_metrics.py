"""Figures over groups (the responses of one prompt): mean@N, best@k, maj@N, and how sure they are.

Responses that could not be scored are nowhere counted. Prompts are independent of each other, the responses of one
prompt are not; so every interval here is over prompts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any

from verl.protocol import DataProto
from verl.protocol.keys import REWARD_EXTRA_PREFIX

CONFIDENCE = 0.95
KINDS = ("acc", "reward")


@dataclass(frozen=True)
class Graded:
    """What came of one response.

    Attributes:
        uid: of its prompt.
        reward, acc: None where there is none; ``acc`` is the reward function's own key of that name.
        answer: what majorities are counted by, None where the response has none.
        length: tokens.
        cut: ended by the length limit.
        parts: of several rewards, what each gave, before its weight.
    """

    source: str
    uid: str
    reward: float | None
    acc: float | None = None
    answer: str | None = None
    length: int = 0
    cut: bool = False
    parts: dict[str, float] = field(default_factory=dict)


def reward_names(batch: DataProto) -> list[str]:
    """Of a scored batch: the rewards that were added, none where there was one only."""
    counts = batch.meta_info.get("metrics", {})
    return [key.split("/")[1] for key in counts if key.endswith("/scored") and key.count("/") == 2]


def graded_rows(batch: DataProto) -> list[Graded]:
    """One :class:`Graded` a row of a scored batch. The answer is the result's ``pred``, else its ``answer``."""
    columns, size = batch.non_tensor_batch, len(batch)

    def extra(name: str) -> list[Any]:
        key = REWARD_EXTRA_PREFIX + name
        return columns[key].tolist() if key in columns else [None] * size

    width = batch.batch["responses"].shape[1]
    lengths = batch.batch["attention_mask"][:, -width:].sum(1).tolist()
    named = zip(columns["data_source"], columns["uid"], columns["score"], extra("acc"), strict=True)
    answers = [
        _text(answer if pred is None else pred) for pred, answer in zip(extra("pred"), extra("answer"), strict=True)
    ]
    names = reward_names(batch)
    said = zip(*map(extra, names), strict=True) if names else [()] * size
    parts = [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in said]
    return [
        Graded(str(source), str(uid), score, _accuracy(acc), answer, length, finish == "length", own)
        for (source, uid, score, acc), answer, length, finish, own in zip(
            named, answers, lengths, columns["finish_reason"], parts, strict=True
        )
    ]


def _accuracy(acc: Any) -> float | None:
    """What the function put under ``acc``, where that is a number."""
    return float(acc) if isinstance(acc, int | float) and math.isfinite(acc) else None


def _text(answer: Any) -> str | None:
    """Answers are the same if they read the same, white space at their ends aside; a blank one is none."""
    return None if answer is None else str(answer).strip() or None


# --- one group -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """The scored responses of one prompt: at least one."""

    values: list[float]
    answers: list[str | None]

    def best(self, k: int) -> float:
        """Expected best of ``k`` of these n responses, drawn without replacement: unbiased for best-of-k sampling.

        Sum over the sorted values x_1 <= ... <= x_n of x_i * C(i-1, k-1) / C(n, k). For values 0 and 1 this is the
        pass@k estimator of Chen et al. 2021 (arXiv:2107.03374). With fewer than ``k`` responses: the best of them.
        """
        n = len(self.values)
        k = min(k, n)
        ordered = sorted(self.values)
        return math.fsum(value * (math.comb(i, k - 1) / math.comb(n, k)) for i, value in enumerate(ordered))

    def majority(self) -> float:
        """Mean value of the responses with the most frequent answer.

        Answers that are equally frequent share alike. Responses without an answer have no vote; where none has one,
        the mean of all.
        """
        votes: dict[str, list[float]] = defaultdict(list)
        for value, answer in zip(self.values, self.answers, strict=True):
            if answer is not None:
                votes[answer].append(value)
        most = max(map(len, votes.values()), default=0)
        return fmean([fmean(values) for values in votes.values() if len(values) == most] or self.values)


def groups_of(rows: Iterable[Graded], kind: str) -> list[Group]:
    """Groups by prompt, of the responses that have a value of this kind ("acc" or "reward")."""
    groups: dict[str, Group] = {}
    for row in rows:
        value = getattr(row, kind)
        if value is not None:
            group = groups.setdefault(row.uid, Group([], []))
            group.values.append(value)
            group.answers.append(row.answer)
    return list(groups.values())


def by_source(rows: Iterable[Graded]) -> dict[str, list[Graded]]:
    """Rows by data source, in alphabetical order."""
    found: dict[str, list[Graded]] = defaultdict(list)
    for row in rows:
        found[row.source].append(row)
    return dict(sorted(found.items()))


# --- many groups ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% interval, None where there is none (fewer than two prompts)."""

    value: float
    low: float | None = None
    high: float | None = None


def estimate(sums: Sequence[float], counts: Sequence[float] | None = None) -> Estimate:
    """``sum(sums) / sum(counts)`` over prompts, with an interval for other prompts like these.

    Where every prompt's mean is 0 or 1: Wilson's score interval, which does not shrink to nothing where all are 0. Else
    the t-interval over prompts; with unequal ``counts`` (some responses could not be scored), of the ratio's
    linearisation (Cochran, Sampling Techniques, 1977, section 6.3). It ends at 0 and 1 where all values are between.

    Args:
        sums: of each prompt, the sum over its responses.
        counts: of each prompt, how many those are; None: one each.
    """
    counts = counts or [1] * len(sums)
    value = math.fsum(sums) / sum(counts)
    n = len(sums)
    if n < 2:
        return Estimate(value)
    pairs = list(zip(sums, counts, strict=True))
    if all(total in (0, count) for total, count in pairs) and (len(set(counts)) == 1 or value in (0, 1)):
        return Estimate(value, *_wilson(value, n))
    mean_count = sum(counts) / n
    spread = stdev((total - value * count) / mean_count for total, count in pairs)
    half = student_t(n - 1) * spread / math.sqrt(n)
    is_share = all(0 <= total <= count for total, count in pairs)
    low, high = (0.0, 1.0) if is_share else (-math.inf, math.inf)
    return Estimate(value, max(low, value - half), min(high, value + half))


def _wilson(share: float, n: int) -> tuple[float, float]:
    z = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    middle, scale = share + z * z / (2 * n), 1 + z * z / n
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, round((middle - half) / scale, 12)), min(1.0, round((middle + half) / scale, 12))


def student_t(degrees: int) -> float:
    """Two-sided 95% quantile of Student's t: exact for 1 and 2 degrees of freedom, else within 0.2% by the expansion
    26.7.5 of Abramowitz and Stegun."""
    p = (1 + CONFIDENCE) / 2
    if degrees == 1:
        return math.tan(math.pi * (p - 0.5))
    if degrees == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z, v = NormalDist().inv_cdf(p), degrees
    return z + sum(
        (
            (z**3 + z) / (4 * v),
            (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2),
            (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3),
            (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * v**4),
        )
    )


def score_estimates(rows: Sequence[Graded], n: int, kind: str, ks: Iterable[int]) -> dict[str, Estimate]:
    """``mean@n``, and with several responses a prompt ``best@k`` for each k and, if any has an answer, ``maj@n``.

    ``mean@n`` is over all responses that have a value, the others over prompts. Empty where none has one.
    """
    groups = groups_of(rows, kind)
    if not groups:
        return {}
    found = {f"mean@{n}": estimate([math.fsum(g.values) for g in groups], [len(g.values) for g in groups])}
    if n > 1:
        found |= {f"best@{k}": estimate([g.best(k) for g in groups]) for k in ks}
        if any(answer is not None for g in groups for answer in g.answers):
            found[f"maj@{n}"] = estimate([g.majority() for g in groups])
    return found


def validation_metrics(rows: Iterable[Graded], n: int) -> dict[str, float]:
    """``val-core/{source}/{acc|reward}/{mean@N, best@N, maj@N}`` of the responses that could be scored.

    Of several rewards also ``val-aux/{source}/{name}/mean@N``, before their weights and each over the responses that it
    scored; and where responses could not be scored, how many: ``val-aux/{source}/unscored``.

    Args:
        n: responses a prompt.
    """
    metrics: dict[str, float] = {}
    for source, own in by_source(rows).items():
        for kind in KINDS:
            found = score_estimates(own, n, kind, [n])
            metrics |= {f"val-core/{source}/{kind}/{name}": figure.value for name, figure in found.items()}
        for name in sorted({name for row in own for name in row.parts}):
            values = [row.parts[name] for row in own if name in row.parts]
            metrics[f"val-aux/{source}/{name}/mean@{n}"] = fmean(values)
        if unscored := sum(row.reward is None for row in own):
            metrics[f"val-aux/{source}/unscored"] = unscored
    return metrics
