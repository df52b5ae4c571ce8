"""What a processed batch says about itself, as field-standard metrics."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from verl.algorithms.advantages import outcome_scores
from verl.algorithms.metric import Metric, max_metric, mean_metric, spread_metrics, std_metrics
from verl.protocol import DataProto
from verl.protocol.keys import REWARD_EXTRA_PREFIX
from verl.trainer.advantages import cut_rows
from verl.trainer.group_metrics import reward_names

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
    return {
        "training/staleness/mean": mean_metric(staleness),
        "training/staleness/max": max_metric(staleness),
    }


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
