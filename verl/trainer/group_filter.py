"""DAPO's dynamic sampling: groups that teach nothing are dropped, and further prompts take their place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms.advantage_inputs import group_index, group_statistics, outcome_scores
from verl.config import Config
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.trainer.advantages import reward_values
from verl.trainer.sampling import Sampler, join


def filtered_rollout(sample: Callable[[int], DataProto], sampler: Sampler, config: Config) -> DataProto:
    """A scored batch of ``data.train_batch_size`` groups with spread (Yu et al. 2025, arXiv:2503.14476, section 3.2).

    A group is kept when ``algorithm.filter_groups.metric`` differs among its responses that were scored, by more than
    rounding. Batches of prompts are sampled until there are enough; groups beyond that are dropped too. Everything that
    was sampled is counted: the scorer's counts are those of all batches, and ``filter_groups/*`` says what became of
    the groups (drawn = kept + flat + surplus) and what the mean score was before any were dropped.

    Args:
        sample: a scored batch of further prompts; it is told how many groups are still wanted.

    Raises:
        VerlError: not enough groups after as many as ``max_num_gen_batches`` batches have.
    """
    settings, wanted, n = config.algorithm.filter_groups, config.data.train_batch_size, sampler.plan.n
    kept: list[DataProto] = []
    counts: Counter[str] = Counter()
    seen: list[Tensor] = []  # all scores
    while counts["kept"] < wanted:
        if settings.max_num_gen_batches and counts["drawn"] >= settings.max_num_gen_batches * wanted:
            raise _not_filled(counts, wanted, settings.metric)
        batch = sample(wanted - counts["kept"])
        scores = outcome_scores(batch.tensors["token_level_scores"], batch.tensors["response_mask"])
        seen.append(scores[batch.tensors["scored"]])
        keep = rows_with_spread(batch, settings.metric)
        kept.append(batch.select_idxs(keep))
        groups, found = len(batch) // n, int(keep.sum()) // n
        counts.update(gen_batches=1, drawn=groups, flat=groups - found, kept=found)
    counts["surplus"] = counts["kept"] - wanted
    counts["kept"] = wanted
    joined = join(kept, sampler.tokenizer.pad_token_id).slice(0, wanted * n)
    filter_counts = {f"filter_groups/{name}": count for name, count in counts.items()}
    mean = {"filter_groups/score": float(torch.cat(seen).mean())}
    joined.meta_info["metrics"] |= filter_counts | mean
    return joined


def rows_with_spread(batch: DataProto, metric: str) -> Tensor:
    """(B,) bool: all rows of the groups in which the metric differs."""
    values = reward_values(batch, metric, "algorithm.filter_groups.metric")
    group_ids = group_index(batch.non_tensor_batch["uid"].tolist())
    statistics = group_statistics(values, batch.tensors["scored"] & ~values.isnan(), group_ids)
    return statistics.total(statistics.spread) > 0


def _not_filled(counts: Counter[str], wanted: int, metric: str) -> VerlError:
    batches = counts["drawn"] // wanted
    return VerlError(
        f"algorithm.filter_groups: after {batches} batch{'es' if batches > 1 else ''} of prompts "
        f"(algorithm.filter_groups.max_num_gen_batches) there are not enough groups whose {metric} differs",
        f"{counts['drawn']} groups drawn, {counts['flat']} without spread, {counts['kept']} of {wanted} found",
        "raise max_num_gen_batches or rollout.n, lower data.train_batch_size, or give prompts that are neither too "
        "easy nor too hard",
    )
