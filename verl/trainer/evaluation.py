"""Validation: every held-out prompt once, with its own sampling parameters."""

from __future__ import annotations

from collections import defaultdict

from verl.cluster.roles import Roles
from verl.data.loader import PromptDataset, iterate_once
from verl.protocol import DataProto
from verl.protocol.keys import REWARD_EXTRA_PREFIX
from verl.trainer.sampling import Sampler

ACCURACY = REWARD_EXTRA_PREFIX + "acc"


def evaluate(
    dataset: PromptDataset, batch_size: int | None, roles: Roles, sampler: Sampler, pass_number: int
) -> tuple[dict[str, float], list[DataProto]]:
    """Sample and score the validation prompts.

    Returns:
        ``val-core/{source}/{acc|reward}/{mean@N, best@N}`` by data source, N the responses a prompt, and the
        scored batches for the sample files.
    """
    batches = []
    for prompts in iterate_once(dataset, batch_size, "val", pass_number):
        batch = sampler.assemble(prompts, roles.rollout.generate(sampler.requests(prompts)))
        batches.append(batch.union(roles.scorer.score(batch)))
    scored = [_score_columns(batch) for batch in batches]
    return validation_metrics([row for rows in scored for row in rows], sampler.plan.n), batches


def _score_columns(batch: DataProto) -> list[tuple[str, str, float | None, float | None]]:
    """(data source, uid, reward, accuracy) of each row; None where it has none."""
    columns = batch.non_tensor_batch
    accuracy = columns[ACCURACY].tolist() if ACCURACY in columns else [None] * len(batch)
    rows = zip(columns["data_source"], columns["uid"], columns["score"], accuracy, strict=True)
    return [(str(source), str(uid), score, None if acc is None else float(acc)) for source, uid, score, acc in rows]


def validation_metrics(rows: list[tuple[str, str, float | None, float | None]], n: int) -> dict[str, float]:
    """Mean and, with several responses a prompt, mean of the best, of the rows that could be scored.

    Args:
        rows: (data source, uid, reward, accuracy).
        n: responses a prompt.
    """
    by_name: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for source, uid, reward, accuracy in rows:
        for kind, value in (("reward", reward), ("acc", accuracy)):
            if value is not None:
                by_name[f"val-core/{source}/{kind}"][uid].append(value)
    metrics = {}
    for name, groups in sorted(by_name.items()):
        values = [value for group in groups.values() for value in group]
        metrics[f"{name}/mean@{n}"] = sum(values) / len(values)
        if n > 1:
            metrics[f"{name}/best@{n}"] = sum(map(max, groups.values())) / len(groups)
    return metrics
