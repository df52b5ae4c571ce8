"""Preference pairs out of scored responses: of each prompt the best one and the worst one."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from verl.config import Config
from verl.data.rows import PromptRow
from verl.data.sources import FileRows
from verl.errors import DataError
from verl.json_lines import read_jsonl
from verl.protocol import DataProto
from verl.rewards.scorer import RuleScorer
from verl.tracking.samples import SampleRow

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

    Args:
        config: its ``data.val_files`` hold the prompts, and ``reward`` says how to score.

    Raises:
        DataError: the file cannot be used, or none of its prompts is in the data.
        RewardError: as :meth:`verl.rewards.scorer.RuleScorer.score`.
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
    asked = [(row, response) for row, responses in found.values() for response in responses]
    starts = range(0, len(asked), SCORED_AT_ONCE)
    try:
        scores = [score for i in starts for score in _scores(asked[i : i + SCORED_AT_ONCE], scorer)]
    finally:
        scorer.close()
    groups: dict[int, list[Answer]] = {}
    for (row, response), score in zip(asked, scores, strict=True):
        groups.setdefault(row.row_index, []).append(Answer(row, response, score))
    return list(groups.values())


def _key(prompt: Any) -> str:
    return json.dumps(prompt, sort_keys=True, default=str)


def _scores(asked: Sequence[tuple[PromptRow, str]], scorer: RuleScorer) -> list[float | None]:
    batch = DataProto.from_dict(
        tensors={"response_mask": torch.ones(len(asked), 1, dtype=torch.bool)},
        non_tensors={
            "response_text": [response for _, response in asked],
            "raw_prompt": [row.prompt for row, _ in asked],
            "data_source": [row.data_source for row, _ in asked],
            "ground_truth": [row.ground_truth for row, _ in asked],
            "extra_info": [dict(row.extra_info) for row, _ in asked],
        },
        meta_info={},
    )
    scores: list[float | None] = scorer.score(batch).non_tensor_batch["score"].tolist()
    return scores
