"""A model evaluated on a data file: sampled, scored and summed up without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from typing import Any

from verl.cluster.worker import choose_device
from verl.config import Config
from verl.data.dataset import PromptDataset
from verl.data.loader import iterate_once
from verl.models.loading import load_tokenizer
from verl.rewards.scorer import RuleScorer
from verl.rollout.embedded import EngineLimits
from verl.rollout.offline import in_order, load_engine
from verl.tracking.samples import SampleRow, rows_from_batch
from verl.trainer.group_metrics import (
    KINDS,
    Estimate,
    Graded,
    by_source,
    estimate,
    graded_rows,
    score_estimates,
)
from verl.trainer.inputs import check_model_limits
from verl.trainer.sampling import Sampler
from verl.training.reward_model import load_reward_model

PROMPTS_AT_ONCE = 64  # scored together, where data.val_batch_size does not say
PASSED = 1.0  # accuracy (or reward, where there is no accuracy) from which a response counts as passed


class ModelEvaluation:
    """``config.model`` on ``config.data.val_files``, sampled by ``rollout.val_kwargs``, scored by ``config.reward``.

    Whatever is wrong with model, data or reward is found here, before the weights are read.

    Attributes:
        left_out: rows of the data that cannot be used, and prompts too long where such are filtered.
        rows: of the data that can be used, by their number.
        graded, samples: one entry a response, in the order of the data; filled by :meth:`run`.

    Raises:
        VerlError: what, value and fix.
    """

    def __init__(self, config: Config) -> None:
        check_model_limits(config)
        self.config, self.plan = config, config.validation_sampling
        data = config.data
        self._tokenizer = load_tokenizer(*config.tokenizer)
        dataset = PromptDataset.load(data.val_files, data, self._tokenizer, data.val_max_samples, "DATA")
        judge = load_reward_model(config, choose_device(config), self._tokenizer)
        self._scorer = RuleScorer(config.reward, self._tokenizer.decode, model=judge)
        self._scorer.check_rows(dataset.exemplars)
        self.left_out = len(dataset.skipped) + dataset.dropped
        self.rows = {row.row_index: row for row in dataset.rows}
        self._batches = list(iterate_once(dataset, data.val_batch_size or PROMPTS_AT_ONCE))
        self.responses = len(dataset) * self.plan.n
        self.graded: list[Graded] = []
        self.samples: list[SampleRow] = []

    def run(self, finished: Callable[[int], None]) -> None:
        """Sample and score everything.

        Responses are sampled as the engine has room, and scored in batches of whole prompts in their order, so
        that a reward function that fails is found out early.

        Args:
            finished: told how many responses have been sampled.

        Raises:
            RewardError: as :meth:`verl.rewards.scorer.RuleScorer.score`.
        """
        config, tokenizer = self.config, self._tokenizer
        engine = load_engine(
            config.model.path,
            tokenizer,
            config.model.dtype,
            config.model.trust_remote_code,
            EngineLimits.of_run(config.rollout, config.data),
            str(choose_device(config)),
        )
        sampler = Sampler(self.plan, config, tokenizer)
        requests = [sampler.requests(batch) for batch in self._batches]
        results = in_order(engine, [request for batch in requests for request in batch], finished)
        with closing(self._scorer):
            for prompts, asked in zip(self._batches, requests, strict=True):
                batch = sampler.assemble(prompts, list(islice(results, len(asked))))
                batch = batch.union(self._scorer.score(batch))
                self.graded += graded_rows(batch)
                self.samples += rows_from_batch(batch, "val", tokenizer.decode)

    def results(self) -> dict[str, Any]:
        """``{"sources": {source: figures}, "overall": figures}``, figures as :func:`figures` gives them.

        Overall is over all prompts as if they were of one source.
        """
        sources = {name: figures(rows, self.plan.n) for name, rows in by_source(self.graded).items()}
        return {"sources": sources, "overall": figures(self.graded, self.plan.n)}


def figures(rows: Sequence[Graded], n: int) -> dict[str, Any]:
    """What a table shows of these rows, as JSON values.

    Returns:
        Counts ``prompts, responses, unscored``; and estimates ``{"value", "low", "high"}``: by kind (``acc``,
        ``reward``) those of :func:`score_estimates` with k = 2, 4, 8, ... up to ``n``; ``pass_rate`` (of the scored
        responses), ``length`` (tokens) and ``cut`` (share ended by the length limit; both of all responses).
    """
    ks = sorted({*(2**i for i in range(1, n.bit_length()) if 2**i <= n), n})
    by_prompt: dict[str, list[Graded]] = {}
    for row in rows:
        by_prompt.setdefault(row.uid, []).append(row)
    groups = list(by_prompt.values())
    found: dict[str, Any] = {
        "prompts": len(groups),
        "responses": len(rows),
        "unscored": sum(row.reward is None for row in rows),
    }
    for kind in KINDS:
        estimates = score_estimates(rows, n, kind, ks)
        if estimates:
            found[kind] = {name: asdict(value) for name, value in estimates.items()}
    found["pass_rate"] = _share(groups, lambda row: None if row.reward is None else _passed(row))
    found["length"] = _share(groups, lambda row: row.length)
    found["cut"] = _share(groups, lambda row: row.cut)
    return found


def _passed(row: Graded) -> bool:
    value = row.reward if row.acc is None else row.acc
    return value is not None and value >= PASSED


def _share(groups: Sequence[Sequence[Graded]], value_of: Callable[[Graded], float | None]) -> dict[str, Any] | None:
    """Mean over responses that have a value, with its interval over prompts; None where none has one."""
    values = [[v for row in group if (v := value_of(row)) is not None] for group in groups]
    values = [group for group in values if group]
    if not values:
        return None
    found: Estimate = estimate([float(sum(group)) for group in values], [len(group) for group in values])
    return asdict(found)
