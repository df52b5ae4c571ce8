"""A model evaluated on a data file without a trainer: sampled, scored and summed up; and preference pairs out of scored
responses, of each prompt the best one and the worst one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from verl.cluster.worker import choose_device
from verl.config import Config
from verl.data.dataset import PromptDataset
from verl.data.loader import iterate_once
from verl.data.rows import FileRows, PromptRow
from verl.errors import DataError
from verl.json_lines import read_jsonl
from verl.models.loading import load_tokenizer
from verl.rewards.scorer import RuleScorer
from verl.rewards.trial import Tried, batch_of
from verl.rollout.embedded import EngineLimits
from verl.rollout.offline import in_order, load_engine
from verl.tracking.samples import SampleRow, rows_from_batch
from verl.trainer.group_metrics import KINDS, Estimate, Graded, by_source, estimate, graded_rows, score_estimates
from verl.trainer.inputs import check_model_limits
from verl.trainer.sampling import Sampler
from verl.training.reward_model import load_reward_model

PROMPTS_AT_ONCE = 64  # scored together, where data.val_batch_size does not say
PASSED = 1.0  # accuracy (or reward, where there is no accuracy) from which a response counts as passed


class ModelEvaluation:
    """``config.model`` on ``config.data.val_files``, sampled by ``rollout.val_kwargs``, scored by ``config.reward``.

    Whatever is wrong with model, data or reward is found here, before the weights are read. Raises VerlError.
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
        self.left_out = len(dataset.skipped) + dataset.dropped  # cannot be used, or too long where such are filtered
        self.rows = {row.row_index: row for row in dataset.rows}  # that can be used
        self._batches = list(iterate_once(dataset, data.val_batch_size or PROMPTS_AT_ONCE))
        self.responses = len(dataset) * self.plan.n
        self.graded: list[Graded] = []  # one entry a response, in the order of the data, as of the samples
        self.samples: list[SampleRow] = []

    def run(self, finished: Callable[[int], None]) -> None:
        """Sample and score everything; ``finished`` is told how many responses have been sampled.

        Responses are sampled as the engine has room, and scored in batches of whole prompts in their order, so that a
        reward function that fails is found out early. Raises RewardError: as its scorer.
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


SCORED_AT_ONCE = 1024  # responses


@dataclass(frozen=True)
class Answer:
    """A scored response; None: it could not be scored."""

    row: PromptRow
    response: str
    score: float | None


@dataclass
class PairCounts:
    """What became of the prompts."""

    pairs: int = 0
    equal: int = 0  # all scores of the prompt are the same
    few: int = 0  # fewer than two scored responses


def pairs_of(groups: Iterable[Sequence[Answer]], counts: PairCounts) -> Iterator[dict[str, Any]]:
    """A row for ``verl reward-model train`` from each prompt whose scores differ; of equal scores the first counts."""
    for answers in groups:
        scored = [answer for answer in answers if answer.score is not None]
        if len(scored) < 2:
            counts.few += 1
            continue
        best = max(scored, key=lambda answer: answer.score or 0.0)
        worst = min(scored, key=lambda answer: answer.score or 0.0)
        if best.score == worst.score or best.response == worst.response:
            counts.equal += 1
            continue
        counts.pairs += 1
        yield {
            "prompt": best.row.prompt,
            "chosen": best.response,
            "rejected": worst.response,
            "chosen_score": best.score,
            "rejected_score": worst.score,
            "data_source": best.row.data_source,
        }


def sampled(samples: Sequence[SampleRow], rows: dict[int, PromptRow]) -> list[list[Answer]]:
    """Groups of responses that an evaluation sampled and scored; ``rows`` of its data by their number."""
    groups: dict[str, list[Answer]] = {}
    for sample in samples:
        row = rows[int(sample.uid.rpartition(":")[2])]
        groups.setdefault(sample.uid, []).append(Answer(row, sample.response, sample.score))
    return list(groups.values())


def given(file: str, config: Config) -> list[list[Answer]]:
    """Groups of the responses in a file of ``verl generate``, scored here by what the data say about their prompts.
    ``config``: its ``data.val_files`` hold the prompts, and ``reward`` says how to score. Raises DataError: the file
    cannot be used, or none of its prompts is in the data; RewardError: as :meth:`verl.rewards.scorer.RuleScorer.score`.
    """
    path = Path(file).expanduser()
    if not path.is_file():
        raise DataError("The file of responses does not exist.", path, "write one with verl generate --out")
    lines, _ = read_jsonl(path)
    source = FileRows(config.data.val_files, config.data, "DATA")
    rows = [row for row in source.read(0, len(source)) if isinstance(row, PromptRow)]
    scorer = RuleScorer(config.reward)
    scorer.check_rows(rows)
    by_prompt: dict[str, PromptRow] = {}
    for row in rows:
        by_prompt.setdefault(_key(row.prompt), row)
    found: dict[int, tuple[PromptRow, list[str]]] = {}
    for line in lines:
        known = by_prompt.get(_key(line.get("prompt")))
        if known is not None and isinstance(line.get("response"), str):
            found.setdefault(known.row_index, (known, []))[1].append(line["response"])
    if not found:
        raise DataError(
            "No line of the responses has a prompt of the data.",
            f"{path}: {len(lines)} lines",
            "generate from the same file: verl generate MODEL --input DATA --out FILE -n 8",
        )
    asked = [Tried(row, response) for row, responses in found.values() for response in responses]
    groups: dict[int, list[Answer]] = {}
    with closing(scorer):
        for start in range(0, len(asked), SCORED_AT_ONCE):
            part = asked[start : start + SCORED_AT_ONCE]
            scores = scorer.score(batch_of(part)).non_tensor_batch["score"]
            for one, score in zip(part, scores, strict=True):
                groups.setdefault(one.row.row_index, []).append(Answer(one.row, one.response, score))
    return list(groups.values())


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)
