"""A reward tried before a run: on given responses, or on ground truths put in their place."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from verl.config import RewardConfig
from verl.data.rows import FileRows, PromptRow, find_columns, no_column
from verl.data.tables import expand_files, open_tables
from verl.errors import DataError
from verl.protocol import DataProto
from verl.protocol.columns import padded
from verl.rewards.results import Outcome, Score
from verl.rewards.rules import RULES
from verl.rewards.scorer import RuleScorer

RESPONSE_COLUMNS = ("response", "responses", "completion", "completions", "output", "outputs")
AT_ONCE = 256  # responses
MOST_IDS = 4096  # characters of a response that stand for its token ids
SHOWN = 5  # of failures, slowest and disagreements
BINS = 10
MOST_EXCHANGED = 256  # responses that are scored against another row's truth as well
RESPONSES_NEED = "no ground truth alone is a right response to this reward: give responses, or --template"


@dataclass(frozen=True)
class Tried:
    """A response and its row; ``kind``: ``given``, or the row's ``own truth`` that stands in for one."""

    row: PromptRow
    response: str
    kind: str = "given"


@dataclass
class Report:
    """What one reward said of all responses, in their order; ``others``: pairs of scores that some of the responses
    got: with their own row's truth, and with another's."""

    name: str
    tried: Sequence[Tried]
    scores: list[Score] = field(default_factory=list)
    others: list[tuple[float, float]] = field(default_factory=list)
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Figures, and places of what failed and of what was slow."""
        values = [score.value for score in self.scores if score.value is not None]
        counts = Counter(score.outcome for score in self.scores)
        slowest = sorted(range(len(self.scores)), key=lambda i: -self.scores[i].seconds)[:SHOWN]
        return {
            "reward": self.name,
            "responses": len(self.tried),
            **{outcome: counts[outcome] for outcome in get_args(Outcome)},
            "score": {"mean": sum(values) / len(values), "min": min(values), "max": max(values)} if values else None,
            "distribution": distribution(values),
            "by_source": self._means(),
            "other_truth": self._other_truth(),
            "failures": self._failures(),
            "slowest": [{"seconds": self.scores[i].seconds, **self.place(i)} for i in slowest],
            "seconds": self.seconds,
        }

    def place(self, i: int) -> dict[str, Any]:
        row = self.tried[i].row
        return {"where": row.location, "ground_truth": row.ground_truth, "response": self.tried[i].response}

    def _other_truth(self) -> dict[str, Any] | None:
        """What became of scores when the truth was another row's; of the highest apart, which should all fall."""
        if not self.others:
            return None
        best = max(own for own, _ in self.others)
        kept = [own for own, other in self.others if own == other]
        return {
            "compared": len(self.others),
            "unchanged": len(kept),
            "highest": sum(own == best for own, _ in self.others),
            "highest_unchanged": kept.count(best),
            "mean": sum(other for _, other in self.others) / len(self.others),
            "warning": self._ignores_truth(len(kept), best),
        }

    def _ignores_truth(self, kept: int, best: float) -> str | None:
        if kept < len(self.others):
            return None
        if any(own != best for own, _ in self.others):
            return "the reward does not look at the ground truth: right for a rule of form, wrong for one of answers"
        if self.tried[0].kind == "own truth" and best == 0:
            truth = self.tried[0].row.ground_truth
            if isinstance(truth, int | float):
                kind = type(truth).__name__
                return f"ground truths are {kind}, and a text never equals one: does the reward use str(ground_truth)?"
            return RESPONSES_NEED
        return f"all scores are {best:.4g}, whatever the ground truth: it is ignored, or no response is right"

    def _means(self) -> dict[str, float | None]:
        values: dict[str, list[float]] = {}
        for tried, score in zip(self.tried, self.scores, strict=True):
            values.setdefault(tried.row.data_source, []).extend([] if score.value is None else [score.value])
        return {name: sum(own) / len(own) if own else None for name, own in values.items()}

    def _failures(self) -> list[dict[str, Any]]:
        """By reason, the most frequent first, each with its first response."""
        places: dict[str, list[int]] = {}
        for i, score in enumerate(self.scores):
            if score.reason is not None:
                places.setdefault(score.reason, []).append(i)
        ordered = sorted(places.items(), key=lambda item: -len(item[1]))
        return [{"reason": reason, "responses": len(own), **self.place(own[0])} for reason, own in ordered]


def reward_config(
    what: str, name: str | None = None, kwargs: Mapping[str, Any] | None = None, timeout: float | None = None
) -> RewardConfig:
    """The section ``reward`` for a rule's name, or a Python file (whatever looks like one)."""
    settings: dict[str, Any] = {"reward_kwargs": dict(kwargs or {}), "max_failed_fraction": 1.0, "cache": False}
    if what in RULES or what == "auto" or not (what.endswith(".py") or "/" in what or Path(what).exists()):
        settings["rule"] = what
    else:
        settings["custom_reward_function"] = {"path": what} | ({"name": name} if name else {})
    return RewardConfig(**settings | ({"timeout": timeout} if timeout else {}))


def try_reward(
    name: str,
    config: RewardConfig,
    tried: Sequence[Tried],
    told: Callable[[int], None],
    exchanged: Mapping[int, Tried] | None = None,
) -> Report:
    """Score everything; ``told`` gets the number of responses done. ``exchanged``: by their places, responses to score
    with another truth as well: :func:`with_other_truths`. Raises RewardError: as the scorer, except that any share may
    fail."""
    scorer, report = RuleScorer(config, lambda ids: "".join(map(chr, ids))), Report(name, tried)
    try:
        scorer.check_rows([one.row for one in tried])
        start = time.perf_counter()
        for first in range(0, len(tried), AT_ONCE):
            part = tried[first : first + AT_ONCE]
            report.scores += scorer.judge(batch_of(part))
            told(first + len(part))
        report.seconds = time.perf_counter() - start
        if exchanged:
            others = scorer.judge(batch_of(list(exchanged.values())))
            pairs = [(report.scores[i].value, other.value) for i, other in zip(exchanged, others, strict=True)]
            report.others = [(own, other) for own, other in pairs if own is not None and other is not None]
    finally:
        scorer.close()
    return report


def with_other_truths(tried: Sequence[Tried]) -> dict[int, Tried]:
    """Responses from all over ``tried``, by their places, each with all that another row of its source says beside the
    prompt; rows whose source has one truth only are left out."""
    rings: dict[str, dict[str, PromptRow]] = {}
    for one in tried:
        rings.setdefault(one.row.data_source, {}).setdefault(repr(one.row.ground_truth), one.row)
    following = {
        source: dict(zip(ring, [*list(ring.values())[1:], next(iter(ring.values()))], strict=True))
        for source, ring in rings.items()
        if len(ring) > 1
    }
    places = [i for i, one in enumerate(tried) if one.row.data_source in following]
    found = {}
    for i in places[:: -(-len(places) // MOST_EXCHANGED) or 1]:
        row = tried[i].row
        other = following[row.data_source][repr(row.ground_truth)]
        told = {"ground_truth": other.ground_truth, "extra_info": other.extra_info, "columns": other.columns}
        found[i] = replace(tried[i], row=replace(row, **told))
    return found


def disagreements(one: Report, other: Report) -> tuple[int, list[int]]:
    """Responses that both scored, and those of them with unequal scores, the most unequal first."""
    pairs = [(a.value, b.value) for a, b in zip(one.scores, other.scores, strict=True)]
    gaps = {i: abs(a - b) for i, (a, b) in enumerate(pairs) if a is not None and b is not None}
    return len(gaps), sorted((i for i, gap in gaps.items() if gap > 0), key=lambda i: (-gaps[i], i))


def distribution(values: Sequence[float]) -> list[dict[str, float]]:
    """``{"from", "to", "responses"}`` of each value where there are few, else of ten equal parts of the range."""
    counts = Counter(values)
    if len(counts) <= BINS:
        return [{"from": value, "to": value, "responses": counts[value]} for value in sorted(counts)]
    least, width = min(values), (max(values) - min(values)) / BINS
    bins = Counter(min(BINS - 1, int((value - least) / width)) for value in values)
    return [{"from": least + i * width, "to": least + (i + 1) * width, "responses": bins[i]} for i in range(BINS)]


def batch_of(tried: Sequence[Tried]) -> DataProto:
    """As after rollout, but for the token ids: there is no tokenizer, and characters take their place."""
    texts = [one.response for one in tried]
    ids, mask = padded([list(map(ord, text[:MOST_IDS])) or [0] for text in texts])
    rows = [one.row for one in tried]
    return DataProto.from_dict(
        tensors={"responses": ids, "response_mask": mask.bool(), "attention_mask": mask},
        non_tensors={
            "response_text": texts,
            "data_source": [row.data_source for row in rows],
            "ground_truth": [row.ground_truth for row in rows],
            "extra_info": [row.extra_info for row in rows],
            "columns": [row.columns for row in rows],
            "raw_prompt": [row.prompt for row in rows],
            "prompt_ids": [list(map(ord, row.text)) for row in rows],
        },
    )


# --- what is tried -------------------------------------------------------------------------------------------------


def read_tried(
    data: str | None,
    responses: str | None = None,
    response_key: str | None = None,
    template: str = "{truth}",
    limit: int | None = None,
    prompt_key: str | None = None,
    answer_key: str | None = None,
) -> list[Tried]:
    """The responses to try, each with its row. Raises DataError: a file or a column that is not there, rows that cannot
    be used, lines that do not fit the data.

    Args:
        data: a data file as training takes it; None: the lines of ``responses`` say what they answer.
        responses: JSON lines with a response (or a list of them) each, for the data's rows in their order or for the
            row that their ``row`` or a sample's ``uid`` names; or the samples of a run. None: a column of the data
            holds them, or else each row's own ground truth stands in for a response.
        template: what is made of such a ground truth.
    """
    if data is None:
        if responses is None:
            raise DataError("There is nothing to try the reward on.", None, "give --data, --responses or both")
        held = [(record, record.get("ground_truth"), where) for record, where in _records(responses)]
        found = [
            Tried(_row_of(record, truth, where, number), text)
            for number, (record, truth, where) in enumerate(held)
            for text in _texts(record, response_key, where)
        ]
        return found[:limit]
    rows, held_responses = _rows(data, prompt_key, answer_key, response_key, limit)
    if responses is not None:
        return _matched(rows, responses, response_key)
    if held_responses:
        return [Tried(row, text) for row, texts in zip(rows, held_responses, strict=True) for text in texts]
    if "{truth}" not in template:
        raise DataError("--template has no place for the ground truth.", template, "write it as {truth}")
    return [Tried(row, template.replace("{truth}", str(row.ground_truth)), "own truth") for row in rows]


def _rows(
    data: str, prompt_key: str | None, answer_key: str | None, response_key: str | None, limit: int | None
) -> tuple[list[PromptRow], list[list[str]]]:
    tables = open_tables(expand_files([data], "--data"))
    columns = list(dict.fromkeys(name for table in tables for name in table.columns))
    _, _, config = find_columns(columns, prompt_key, answer_key)
    source = FileRows(data, config, "--data")
    rows = [row for row in source.read(0, len(source)) if isinstance(row, PromptRow)][:limit]
    if not rows:
        raise DataError("No row of the data can be used.", data, f"verl data inspect {data} says why")
    response = response_key or next((name for name in RESPONSE_COLUMNS if name in columns), None)
    if response not in columns:
        return rows, []
    return rows, [_texts(row.columns, response, row.location) for row in rows]


def _matched(rows: list[PromptRow], responses: str, response_key: str | None) -> list[Tried]:
    by_index = {row.row_index: row for row in rows}
    records, found = _records(responses), []
    numbers = [_row_number(record) for record, _ in records]
    if all(number is None for number in numbers):
        if len(records) != len(rows):
            raise DataError(
                f"There are {len(records)} lines of responses for {len(rows)} rows of data.",
                responses,
                'give one line for each row that can be used, or name the row in each line: {"row": 0, ...}',
            )
        numbers = [row.row_index for row in rows]
    for (record, where), number in zip(records, numbers, strict=True):
        row = by_index.get(number if number is not None else -1)
        if row is None:
            raise DataError(
                "A line of responses names no row of the data.", f"{where}: row {number}", "rows count from 0"
            )
        found += [Tried(row, text) for text in _texts(record, response_key, where)]
    return found


def _row_number(record: Mapping[str, Any]) -> int | None:
    """``row``, or the last part of a sample's ``uid``."""
    row, uid = record.get("row"), record.get("uid")
    if isinstance(row, int):
        return row
    last = uid.rpartition(":")[2] if isinstance(uid, str) else ""
    return int(last) if last.isdigit() else None


def _row_of(record: Mapping[str, Any], truth: Any, where: str, number: int) -> PromptRow:
    if truth is None:
        raise DataError("A line of responses has no ground_truth.", where, "add it, or name the data with --data")
    extra = record.get("extra_info")
    source = str(record.get("data_source") or "unknown")
    return PromptRow(
        record.get("prompt") or "", source, truth, extra if isinstance(extra, dict) else {}, number, location=where
    )


def _records(path: str) -> list[tuple[dict[str, Any], str]]:
    tables = open_tables(expand_files([path], "--responses"))
    return [(record.values, str(record)) for table in tables for record in table if not record.problem]


def _texts(record: Mapping[str, Any], key: str | None, where: str) -> list[str]:
    names = [key] if key is not None else RESPONSE_COLUMNS
    name = next((name for name in names if record.get(name) is not None), None)
    if name is None:
        if key is not None:
            raise no_column("--response-key", key, list(record))
        fix = f"columns: {', '.join(record)}; name it with --response-key"
        raise DataError("There is no response.", where, fix)
    value = record[name]
    texts = value if isinstance(value, list) else [value]
    if not all(isinstance(text, str) for text in texts):
        raise DataError("A response is no text.", f"{where}: {value!r}"[:200], "give text, or a list of texts")
    return texts
