"""Validation: every held-out prompt once, with its own sampling parameters."""

from __future__ import annotations

from verl.cluster.roles import Roles
from verl.data.dataset import PromptDataset
from verl.data.loader import iterate_once
from verl.protocol import DataProto
from verl.trainer.group_metrics import graded_rows, validation_metrics
from verl.trainer.sampling import Sampler


def evaluate(
    dataset: PromptDataset, batch_size: int | None, roles: Roles, sampler: Sampler, pass_number: int
) -> tuple[dict[str, float], list[DataProto]]:
    """Sample and score the validation prompts.

    Returns:
        The figures of :func:`~verl.trainer.group_metrics.validation_metrics`, and the scored batches for the sample
        files.
    """
    batches = []
    for prompts in iterate_once(dataset, batch_size, "val", pass_number):
        batch = sampler.assemble(prompts, roles.rollout.generate(sampler.requests(prompts), prompts))
        batches.append(batch.union(roles.scorer.score(batch)))
    return validation_metrics([row for batch in batches for row in graded_rows(batch)], sampler.plan.n), batches
