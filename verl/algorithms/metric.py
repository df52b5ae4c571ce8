"""A metric is a numerator and a denominator until the very end.

Means of means overweight small micro-batches, and a mean that was rounded once cannot be merged exactly. So every
function of this package reports `Metric`s; micro-batches, ranks and steps are merged by adding, and the division
happens once, in `Metric.value`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from verl.algorithms.masking import select

Reduce = Literal["mean", "sum", "max", "min"]
Number = float | Tensor  # a 0-dim tensor keeps a GPU busy until the end; `Metric.to_floats` waits for it

_IDENTITY: dict[str, float] = {"mean": 0.0, "sum": 0.0, "max": -math.inf, "min": math.inf}


@dataclass(frozen=True)
class Metric:
    """One number in the making."""

    numerator: Number  # the sum of the values (mean, sum) or their extreme (max, min)
    denominator: Number  # how many values it stands for, or their weight. 0: empty.
    reduce: Reduce = "mean"  # how the value is formed and two metrics are merged
    skipped: Number = 0.0  # how many values were NaN or inf and were left out of both

    def __post_init__(self) -> None:
        if self.reduce not in get_args(Reduce):
            raise ValueError(f"metric reduction {self.reduce!r}, expected one of {get_args(Reduce)}")

    def value(self) -> float:
        """The number to log. An empty metric is NaN, except that an empty sum is 0."""
        numerator, denominator = float(self.numerator), float(self.denominator)
        if self.reduce == "sum":
            return numerator
        if denominator == 0:
            return math.nan
        return numerator / denominator if self.reduce == "mean" else numerator

    def to_floats(self) -> Metric:
        """The same metric without tensors: cheap to send to another process."""
        return Metric(float(self.numerator), float(self.denominator), self.reduce, float(self.skipped))


def merge(a: Metric, b: Metric) -> Metric:
    """The metric of both sets of values together. Associative and commutative (up to float64 rounding). Raises
    ValueError: the two reduce differently."""
    if a.reduce != b.reduce:
        raise ValueError(f"cannot merge a {a.reduce!r} metric with a {b.reduce!r} metric")
    if a.reduce in ("mean", "sum"):
        numerator = a.numerator + b.numerator
    else:
        numerator = _extreme(a.numerator, b.numerator, a.reduce)
    return Metric(numerator, a.denominator + b.denominator, a.reduce, a.skipped + b.skipped)


def merge_all(parts: Iterable[Mapping[str, Metric]]) -> dict[str, Metric]:
    """Merge the metrics of micro-batches, ranks or steps name by name; a name may be missing from some parts."""
    merged: dict[str, Metric] = {}
    for part in parts:
        for name, metric in part.items():
            merged[name] = merge(merged[name], metric) if name in merged else metric
    return merged


def reduce_metrics(metrics: Mapping[str, Metric]) -> dict[str, float]:
    """The numbers to log.

    Empty metrics are left out. Where values were skipped, ``<name>/skipped`` says how many. The parts of a formed
    statistic (names ``<name>#<part>``, from `std_metrics` and `explained_variance_metrics`) become ``<name>``; one
    that is undefined (no values, no spread to explain) is left out.
    """
    numbers: dict[str, float] = {}
    formed: dict[str, dict[str, Metric]] = {}
    for name, metric in metrics.items():
        base, _, part = name.partition("#")
        if part:
            formed.setdefault(base, {})[part] = metric
            continue
        if float(metric.denominator) != 0 or metric.reduce == "sum":
            numbers[name] = metric.value()
        if float(metric.skipped) > 0:
            numbers[f"{name}/skipped"] = float(metric.skipped)
    for base, parts in formed.items():
        value = _FORMULAS[frozenset(parts)]({part: metric.value() for part, metric in parts.items()})
        if not math.isnan(value):
            numbers[base] = value
        skipped = max(float(metric.skipped) for metric in parts.values())
        if skipped > 0:
            numbers[f"{base}/skipped"] = skipped
    return numbers


def mean_metric(values: Tensor, mask: Tensor | None = None) -> Metric:
    """Mean of ``values`` (any shape) over ``mask``; NaN and inf are skipped and counted. Sums in float64."""
    return _over(values, mask, "mean")


def sum_metric(values: Tensor, mask: Tensor | None = None) -> Metric:
    """Their sum, as :func:`mean_metric`."""
    return _over(values, mask, "sum")


def max_metric(values: Tensor, mask: Tensor | None = None) -> Metric:
    """The largest, as :func:`mean_metric`."""
    return _over(values, mask, "max")


def min_metric(values: Tensor, mask: Tensor | None = None) -> Metric:
    """The smallest, as :func:`mean_metric`."""
    return _over(values, mask, "min")


def _over(values: Tensor, mask: Tensor | None, reduce: Reduce) -> Metric:
    values = values.detach()
    chosen = torch.ones_like(values, dtype=torch.bool) if mask is None else mask.bool()
    if chosen.shape != values.shape:
        raise ValueError(f"mask of shape {tuple(chosen.shape)} for values of shape {tuple(values.shape)}")
    usable = chosen & torch.isfinite(values)
    if reduce in ("mean", "sum"):
        numerator = torch.where(usable, values, 0.0).sum(dtype=torch.float64)
    else:
        identity = torch.tensor([_IDENTITY[reduce]], dtype=torch.float64, device=values.device)
        candidates = torch.cat([torch.where(usable, values.double(), identity).flatten(), identity])
        numerator = candidates.amax() if reduce == "max" else candidates.amin()
    return Metric(numerator, usable.sum().double(), reduce, (chosen & ~usable).sum().double())


def spread_metrics(name: str, values: Tensor, mask: Tensor | None = None) -> dict[str, Metric]:
    """``<name>/mean``, ``<name>/max`` and ``<name>/min``, the trio that the field logs for scores and lengths."""
    return {
        f"{name}/mean": mean_metric(values, mask),
        f"{name}/max": max_metric(values, mask),
        f"{name}/min": min_metric(values, mask),
    }


def std_metrics(name: str, values: Tensor, mask: Tensor | None = None) -> dict[str, Metric]:
    """Sums from which `reduce_metrics` forms the population standard deviation of all values, as ``name``."""
    exact = values.detach().double()
    return {f"{name}#x": mean_metric(exact, mask), f"{name}#x2": mean_metric(exact.square(), mask)}


def explained_variance_metrics(name: str, predictions: Tensor, targets: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Sums from which `reduce_metrics` forms ``1 - Var(targets - predictions) / Var(targets)``, as ``name``.

    1: perfect; 0: no better than the mean; below 0: worse. Targets without spread: undefined, left out.
    """
    target = select(targets.detach(), mask).double()
    error = target - select(predictions.detach(), mask).double()
    parts = {"error": error, "error2": error.square(), "target": target, "target2": target.square()}
    return {f"{name}#{part}": mean_metric(values, mask) for part, values in parts.items()}


def effective_sample_size_metrics(name: str, weights: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Sums from which `reduce_metrics` forms Kish's effective sample size over the number of samples, as ``name``.

    ``(sum w)^2 / (n sum w^2)``: 1 for equal weights, 1 / n where one weight is all. All weights 0: undefined, left out.
    """
    exact = weights.detach().double()
    return {f"{name}#w": mean_metric(exact, mask), f"{name}#w2": mean_metric(exact.square(), mask)}


def correlation_metrics(name: str, one: Tensor, other: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Sums from which `reduce_metrics` forms Pearson's correlation, as ``name``; without spread: left out."""
    x, y = select(one.detach(), mask).double(), select(other.detach(), mask).double()
    parts = {"cx": x, "cx2": x.square(), "cy": y, "cy2": y.square(), "cxy": x * y}
    return {f"{name}#{part}": mean_metric(values, mask) for part, values in parts.items()}


def _extreme(a: Number, b: Number, reduce: Reduce) -> Number:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        pair = [torch.as_tensor(a, dtype=torch.float64), torch.as_tensor(b, dtype=torch.float64)]
        return torch.maximum(*pair) if reduce == "max" else torch.minimum(*pair)
    if math.isnan(a) or math.isnan(b):
        return math.nan  # Python's max would drop it or keep it by position
    return max(a, b) if reduce == "max" else min(a, b)


def _variance(mean: float, mean_square: float) -> float:
    """E[x^2] - E[x]^2, exactly 0 where the difference is float64 rounding."""
    variance = mean_square - mean * mean
    return variance if math.isnan(variance) or variance > 1e-14 * mean_square else 0.0


def _explained_variance(parts: dict[str, float]) -> float:
    spread = _variance(parts["target"], parts["target2"])
    if math.isnan(parts["error"]) or spread == 0.0:
        return math.nan
    return 1.0 - _variance(parts["error"], parts["error2"]) / spread


def _correlation(parts: dict[str, float]) -> float:
    spread = _variance(parts["cx"], parts["cx2"]) * _variance(parts["cy"], parts["cy2"])
    return (parts["cxy"] - parts["cx"] * parts["cy"]) / math.sqrt(spread) if spread > 0 else math.nan


_FORMULAS: dict[frozenset[str], Callable[[dict[str, float]], float]] = {
    frozenset({"x", "x2"}): lambda parts: math.sqrt(_variance(parts["x"], parts["x2"])),
    frozenset({"w", "w2"}): lambda parts: parts["w"] ** 2 / parts["w2"] if parts["w2"] else math.nan,
    frozenset({"cx", "cx2", "cy", "cy2", "cxy"}): _correlation,
    frozenset({"error", "error2", "target", "target2"}): _explained_variance,
}
