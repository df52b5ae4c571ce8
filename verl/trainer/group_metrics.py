"""Figures of a batch of responses, and over groups (the responses of one prompt): mean@N, best@k, maj@N."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, fmean, stdev
from typing import Any

import torch

from verl.algorithms.advantage_inputs import outcome_scores
from verl.algorithms.metric import Metric, max_metric, mean_metric, spread_metrics, std_metrics
from verl.protocol import DataProto
from verl.protocol.keys import REWARD_EXTRA_PREFIX
from verl.trainer.advantages import cut_rows

CONFIDENCE = 0.95
KINDS = ("acc", "reward")


@dataclass(frozen=True)
class Graded:
    """What came of one response."""

    source: str
    uid: str  # of its prompt
    reward: float | None
    acc: float | None = None  # the reward function's own key of that name
    answer: str | None = None  # what majorities are counted by
    length: int = 0  # tokens
    cut: bool = False  # ended by the length limit
    parts: dict[str, float] = field(default_factory=dict)  # of several rewards, what each gave, before its weight


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
    named = zip(columns["data_source"], columns["uid"], columns["score"], strict=True)
    answers = [
        _text(answer if pred is None else pred) for pred, answer in zip(extra("pred"), extra("answer"), strict=True)
    ]
    accuracies = [float(x) if isinstance(x, int | float) and math.isfinite(x) else None for x in extra("acc")]
    names = reward_names(batch)
    said = zip(*map(extra, names), strict=True) if names else [()] * size
    parts = [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in said]
    cut = [finish == "length" for finish in columns["finish_reason"]]
    rows = zip(named, accuracies, answers, lengths, cut, parts, strict=True)
    return [Graded(str(source), str(uid), score, *rest) for (source, uid, score), *rest in rows]


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
    ``sums, counts``: of each prompt, the sum over its responses, and how many those are (None: one each).
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
    scored; and where responses could not be scored, how many: ``val-aux/{source}/unscored``. ``n``: responses a prompt.
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


# Parts of a step whose time is also given by token, and as throughput where a model computes.
PER_TOKEN = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
MODEL_PARTS = tuple(name for name in PER_TOKEN if name not in ("reward", "adv"))


def batch_metrics(batch: DataProto, max_prompt_length: int) -> dict[str, Metric]:
    """Scores and rewards by row, advantages, returns and values by trained token, lengths by row.

    ``response_length/clip_ratio`` is the share of responses cut at their limit, ``prompt_length/clip_ratio`` that of
    prompts that fill theirs (cut or not). ``training/trained_share`` is the share of the scored responses' tokens that
    train, ``training/last_token_trained`` that of their last ones. Of several rewards each is logged as
    ``critic/reward/<name>``, before its weight and over the rows that it scored.
    """
    columns = batch.tensors
    mask, scored = columns["response_mask"].bool(), columns["scored"].bool()
    prompt_width = columns["prompts"].shape[1]
    attention = columns["attention_mask"]
    response_length = attention[:, prompt_width:].sum(1).double()
    prompt_length = attention[:, :prompt_width].sum(1).double()
    cut = cut_rows(batch)
    sampled = attention[:, prompt_width:].bool() & scored[:, None]
    last = sampled & (sampled.cumsum(1) == sampled.sum(1, keepdim=True))
    scores = outcome_scores(columns["token_level_scores"], mask)
    metrics = {
        **spread_metrics("critic/score", scores, scored),
        **std_metrics("critic/score/std", scores, scored),
        **spread_metrics("critic/rewards", outcome_scores(columns["token_level_rewards"], mask), scored),
        **spread_metrics("critic/advantages", columns["advantages"], mask),
        **spread_metrics("critic/returns", columns["returns"], mask),
        **spread_metrics("response_length", response_length),
        **spread_metrics("prompt_length", prompt_length),
        "response_length/clip_ratio": mean_metric(cut.double()),
        "prompt_length/clip_ratio": mean_metric((prompt_length >= max_prompt_length).double()),
        "training/trained_share": mean_metric(mask.double(), sampled),
        "training/last_token_trained": mean_metric(mask.double(), last),
    }
    if "values" in columns:
        metrics |= spread_metrics("critic/values", columns["values"], mask)
    for name in reward_names(batch):
        values: Iterable[float | None] = batch.non_tensor_batch.get(REWARD_EXTRA_PREFIX + name, [])
        known = torch.tensor([value for value in values if value is not None], dtype=torch.float64)
        metrics |= spread_metrics(f"critic/reward/{name}", known)
    for name, count in batch.meta_info.get("metrics", {}).items():
        metrics[name] = Metric(float(count), 1.0, "sum")
    return metrics


def staleness_metrics(batch: DataProto, version: int) -> dict[str, Metric]:
    """``training/staleness/{mean, max}``: updates since the oldest token of each response, when its training began."""
    staleness = (version - batch.tensors["policy_version"]).double()
    return {"training/staleness/mean": mean_metric(staleness), "training/staleness/max": max_metric(staleness)}


def cost_metrics(
    batch: DataProto, timings: dict[str, float], memory_gb: dict[str, float], apart: bool
) -> dict[str, float]:
    """Throughput of a step, its time per token by part, the trainer's idle share, and memory.

    Generation counts response tokens, every other part prompts and responses. ``perf/padding_waste`` is the share of
    the batch's columns that is padding, which is stored and moved; no model computes it.

    Args:
        memory_gb: GiB by process, and ``peak``.
        apart: the rollout has processes of its own.
    """
    columns = batch.tensors
    total = int(columns["attention_mask"].sum())
    responses = int(columns["attention_mask"][:, columns["prompts"].shape[1] :].sum())
    seconds = timings["timing_s/step"]
    metrics = {
        "perf/total_num_tokens": float(total),
        "perf/padding_waste": 1 - total / columns["attention_mask"].numel(),
        "perf/time_per_step": seconds,
        "perf/throughput": total / seconds if seconds else 0.0,
        "perf/max_memory_gb": memory_gb["peak"],
        **{f"perf/memory_gb/{name}": value for name, value in memory_gb.items() if name != "peak"},
    }
    for name in PER_TOKEN:
        tokens, spent = responses if name == "gen" else total, timings.get(f"timing_s/{name}")
        if spent and tokens:
            metrics[f"timing_per_token_ms/{name}"] = spent * 1000 / tokens
            if name in MODEL_PARTS and spent > 0.001:  # old log-probs may be the engine's, and nothing is computed
                metrics[f"perf/throughput/{name}"] = tokens / spent
    parts = [name for name in (*MODEL_PARTS, "update_weights") if not (apart and name == "gen")]
    busy = sum(timings.get(f"timing_s/{name}", 0.0) for name in parts)
    metrics["perf/idle/trainer"] = max(0.0, 1 - busy / seconds) if seconds else 0.0
    return metrics
