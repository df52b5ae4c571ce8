"""What a row of a data file means: prompt, ground truth, source and the rest, under the field's names.

Accepted layouts (``conventions``: a dataset row):

- ``{"prompt": [messages] | str, "data_source": ..., "reward_model": {"ground_truth": ...}, "extra_info": {...}}``
- ``{"prompt": ..., <columns>}`` with the ground truth in the column ``data.answer_key``, or, when that is not set, in
  the first of ``ground_truth, label, answer, solution`` that the file has. The other columns are kept and are handed
  to the reward function inside ``extra_info``, where they never replace a key that is already there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.names import nearest
from verl.data.readers import RawRow, expand_files, read_rows
from verl.errors import DataError

if TYPE_CHECKING:
    from verl.config import DataConfig

Messages = list[dict[str, Any]]

TRUTH_COLUMNS = ("ground_truth", "label", "answer", "solution")
PROMPT_COLUMNS = ("prompt", "question", "input", "messages", "query", "instruction", "problem")
CONVENTION_COLUMNS = frozenset({"prompt", "data_source", "reward_model", "extra_info", "ability"})
DEFAULT_SOURCE = "unknown"  # of a row that names no source
SHOWN_BAD_ROWS = 5


@dataclass(frozen=True)
class PromptRow:
    """One prompt of a dataset.

    Attributes:
        prompt: a message list, or plain text.
        data_source: what the reward is chosen by and validation is reported by.
        ground_truth: what the reward compares with; never None and never blank.
        extra_info: handed to the reward function.
        row_index: number of the row in the whole dataset (all files in order, before any filter).
        columns: the file's further columns, as they are.
        location: file and row, for messages.
    """

    prompt: str | Messages
    data_source: str
    ground_truth: Any
    extra_info: dict[str, Any]
    row_index: int
    columns: dict[str, Any] = field(default_factory=dict)
    location: str = ""


def read_prompt_rows(files: str | Iterable[str], config: DataConfig, key: str = "data.train_files") -> list[PromptRow]:
    """Rows of all files, in order.

    Raises:
        DataError: a file that cannot be read, a column that is not there, rows without prompt or ground truth (all of
            them counted, the first few named), or no row at all.
    """
    rows: list[PromptRow] = []
    bad: list[str] = []
    paths = expand_files(files, key)
    for path in paths:
        raw = read_rows(path)
        columns = _columns(raw)
        if raw:
            _check_columns(path, columns, config)
        for record in raw:
            row, reason = _prompt_row(record, columns, config, index=len(rows) + len(bad))
            if row is None:
                bad.append(f"{record}: {reason}")
            else:
                rows.append(row)
    if bad:
        shown = "".join(f"\n    {line}" for line in bad[:SHOWN_BAD_ROWS])
        more = f"\n    and {len(bad) - SHOWN_BAD_ROWS} more" if len(bad) > SHOWN_BAD_ROWS else ""
        what = f"{len(bad)} of {len(bad) + len(rows)} rows in {key} cannot be used."
        raise DataError(what, shown + more, "correct or remove these rows")
    if not rows:
        raise DataError(f"{key} holds no rows.", ", ".join(map(str, paths)), "give a file with at least one row")
    return rows


def _columns(rows: Sequence[RawRow]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row.values))


def _check_columns(path: Path, columns: list[str], config: DataConfig) -> None:
    for name, key in ((config.prompt_key, "data.prompt_key"), (config.answer_key, "data.answer_key")):
        if name is not None and name not in columns:
            usual = PROMPT_COLUMNS if key == "data.prompt_key" else TRUTH_COLUMNS
            close = nearest(name, columns, 0.6) or next((c for c in usual if c in columns), None)
            fix = f"the file has the columns {', '.join(columns) or 'none'}"
            if close:
                fix += f"; did you mean {key}={close}?"
            raise DataError(f"{key} names a column that {path} does not have.", name, fix)
    if config.answer_key is None and "reward_model" not in columns and not any(c in columns for c in TRUTH_COLUMNS):
        fix = (
            f"the file has the columns {', '.join(columns)}; set data.answer_key to the one with the answers "
            "(or to any column if the reward needs none)"
        )
        raise DataError("A data file has no column with the ground truth.", path, fix)
    if config.reward_fn_key != "data_source" and config.reward_fn_key not in columns:
        fix = f"the file has the columns {', '.join(columns)}"
        raise DataError(f"data.reward_fn_key names a column that {path} does not have.", config.reward_fn_key, fix)


def _prompt_row(
    record: RawRow, columns: list[str], config: DataConfig, index: int
) -> tuple[PromptRow | None, str | None]:
    """The row, or None and what is wrong with it."""
    values = record.values
    prompt: Any = values.get(config.prompt_key)
    problem = _prompt_problem(prompt, config.prompt_key)
    if problem:
        return None, problem
    truth, truth_column = _truth(values, columns, config)
    if truth is None:
        return None, f"no ground truth in column {truth_column!r}"
    if isinstance(truth, str) and not truth.strip():
        return None, f"the ground truth in column {truth_column!r} is empty"
    extra = values.get("extra_info")
    if extra is not None and not isinstance(extra, dict):
        return None, f"extra_info is {type(extra).__name__}, not an object"
    used = CONVENTION_COLUMNS | {config.prompt_key, config.reward_fn_key}
    others = {name: value for name, value in values.items() if name not in used}
    source = values.get(config.reward_fn_key)
    row = PromptRow(
        prompt=prompt,
        data_source=DEFAULT_SOURCE if source is None or source == "" else str(source),
        ground_truth=truth,
        extra_info={**{k: v for k, v in others.items() if k != truth_column}, **(extra or {})},
        row_index=index,
        columns=others,
        location=str(record),
    )
    return row, None


def _truth(values: dict[str, Any], columns: list[str], config: DataConfig) -> tuple[Any, str]:
    if config.answer_key is not None:
        return values.get(config.answer_key), config.answer_key
    if "reward_model" in columns:
        holder = values.get("reward_model")
        return (holder.get("ground_truth") if isinstance(holder, dict) else None), "reward_model.ground_truth"
    column = next(c for c in TRUTH_COLUMNS if c in columns)
    return values.get(column), column


def _prompt_problem(prompt: Any, key: str) -> str | None:
    if prompt is None:
        return f"no prompt in column {key!r}"
    if isinstance(prompt, str):
        return None if prompt.strip() else f"the prompt in column {key!r} is empty"
    if not isinstance(prompt, list):
        return f"the prompt in column {key!r} is {type(prompt).__name__}, neither text nor a list of messages"
    if not prompt:
        return f"the prompt in column {key!r} is an empty list of messages"
    for number, message in enumerate(prompt):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return f"message {number} of the prompt has no role"
        if message.get("content") is None:
            return f"message {number} of the prompt ({message['role']}) has no content"
    contents = [message["content"] for message in prompt]
    if not any(content.strip() if isinstance(content, str) else content for content in contents):
        return f"every message of the prompt in column {key!r} is empty"
    return None
