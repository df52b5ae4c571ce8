"""Makers of data files in the row format: of reasoning-gym's problems, of GSM8K, and of any data file by a mapping.

Held-out problems never coincide with training problems: every row of both files has a question text of its own. The
validation file is filled first, then the training file, both from one seeded stream of problems in which a question
that was seen before is passed over.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.names import did_you_mean
from verl.data.output import check_writable, refuse_inputs, write_rows
from verl.data.rows import DEFAULT_SOURCE, PROMPT_COLUMNS, TRUTH_COLUMNS, BadRow, prompt_problem, truth_problem
from verl.data.tables import RawRow, RowTable, expand_files, open_tables, read_rows
from verl.data.typed_json import dump_typed
from verl.errors import DataError

# Draws allowed before a generator counts as exhausted: seeing all of N problems takes about N ln N draws.
DRAWS_PER_ROW, EXTRA_DRAWS = 20, 2000
GSM8K_SOURCE = "openai/gsm8k"
GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
ANY_ANSWER = "(any valid answer)"  # ground truth of tasks that accept more than one; the scorer reads the metadata


@dataclasses.dataclass(frozen=True)
class Made:
    """What was written: file and number of rows."""

    path: Path
    rows: int


def make_reasoning_gym(
    task: str,
    size: int,
    out: str | Path,
    seed: int = 0,
    options: dict[str, Any] | None = None,
    val_size: int = 0,
    val_out: str | Path | None = None,
    instruction: str | None = None,
    data_source: str | None = None,
) -> list[Made]:
    """Write problems of a reasoning-gym task to parquet. Raises DataError: the library is missing, task or option
    unknown, not enough distinct problems, unwritable folder.

    Args:
        task: name of the task, such as ``chain_sum``.
        size, val_size: rows of the training and of the held-out file. All question texts are distinct.
        out, val_out: the files. Without ``val_out`` the held-out rows go to ``<out>_val.parquet`` beside ``out``.
        seed: seed of the problems.
        options: fields of the task's configuration, such as ``{"min_terms": 2}``.
        instruction: a system message before every question.
        data_source: default ``reasoning_gym/<task>``, which selects the library's own scorer as the reward.
    """
    if size < 1 or val_size < 0:
        raise DataError("The number of rows is not positive.", f"size={size}, val_size={val_size}", "use size >= 1")
    options = dict(options or {})
    out = Path(out)
    val_path = Path(val_out) if val_out is not None else out.with_name(f"{out.stem}_val{out.suffix}")
    if val_size and val_path.resolve() == out.resolve():
        raise DataError("Training and held-out problems would go to one file.", out, "give two names")
    check_writable([out, val_path] if val_size else [out])
    problems = _distinct_problems(task, size + val_size, seed, options)

    def row(split: str, index: int, problem: dict[str, Any]) -> dict[str, Any]:
        answer = None if problem["answer"] is None else str(problem["answer"])
        return {
            "data_source": data_source or f"reasoning_gym/{task}",
            "prompt": _messages(problem["question"], instruction),
            "ability": "reasoning",
            "reward_model": {"style": "rule", "ground_truth": ANY_ANSWER if answer is None else answer},
            # All that the library's scorer may look at, so that a response can be scored from this row alone.
            "extra_info": {
                "split": split,
                "index": index,
                "task": task,
                "question": problem["question"],
                "answer": answer,
                "metadata": dump_typed(problem.get("metadata", {})),
                "options": dump_typed(options),
            },
        }

    parts = ((out, "train", problems[val_size:]), (val_path, "val", problems[:val_size]))
    made = {path: [row(split, *problem) for problem in part] for path, split, part in parts if part}
    return [Made(path, write_rows(partial(iter, rows), path)) for path, rows in made.items()]


def reasoning_gym_dataset(task: str, options: dict[str, Any], size: int, seed: int) -> Any:
    """A reasoning-gym dataset. Raises DataError: reasoning-gym is not installed; a task or option is unknown (with the
    nearest), or an option is refused."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        fix = "pip install reasoning-gym"
        raise DataError("The package reasoning-gym is not installed.", str(error), fix) from error
    if task not in DATASETS:
        fix = did_you_mean(task, DATASETS, 0.6).strip() or f"one of: {', '.join(sorted(DATASETS))}"
        raise DataError("reasoning-gym has no such task.", task, fix)
    dataset_class, config_class = DATASETS[task]
    valid = [f.name for f in dataclasses.fields(config_class) if f.name not in ("seed", "size")]
    for name in options:
        if name not in valid:
            fix = f"{did_you_mean(name, valid, 0.6)}the task has the options {', '.join(valid)}"
            raise DataError(f"The reasoning-gym task {task} has no such option.", name, fix)
    try:
        return dataset_class(config=config_class(**options, seed=seed, size=size))
    except Exception as error:  # the library checks with assertions, and not only at one place
        reason = str(error) or type(error).__name__
        raise DataError(f"The reasoning-gym task {task} refuses its options.", options or None, reason) from error


def _distinct_problems(task: str, count: int, seed: int, options: dict[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    """(index in the stream, problem) of the first ``count`` problems with a question not seen before."""
    draws = count * DRAWS_PER_ROW + EXTRA_DRAWS
    stream = reasoning_gym_dataset(task, options, size=draws, seed=seed)
    found: dict[str, tuple[int, dict[str, Any]]] = {}
    for index in range(draws):
        try:
            problem = stream[index]
        except Exception as error:
            what = f"The reasoning-gym task {task} failed to make a problem."
            raise DataError(what, f"index {index}, options {options}", str(error) or type(error).__name__) from error
        found.setdefault(problem["question"], (index, problem))
        if len(found) == count:
            return list(found.values())
    raise DataError(
        f"The reasoning-gym task {task} has too few distinct problems with these options.",
        f"{len(found)} found in {draws} draws, {count} asked for (training and held-out together)",
        "ask for fewer rows, or widen the options",
    )


def make_gsm8k(
    source: str | Path, out: str | Path, instruction: str | None = GSM8K_INSTRUCTION, split: str = "train"
) -> Made:
    """Write GSM8K's own jsonl (``question``, ``answer`` ending in ``#### number``) to parquet. ``instruction``:
    appended to every question, as the field does; None: the question alone. Raises DataError: a row without question,
    or without a number after ``####``, with its line; unwritable folder."""
    out = Path(out)
    check_writable([out])
    rows = []
    for index, raw in enumerate(read_rows(source)):
        question, answer = raw.values.get("question"), raw.values.get("answer")
        if not isinstance(question, str) or not isinstance(answer, str):
            found = ", ".join(raw.values) or "none"
            raise DataError(
                f"{raw} is not a GSM8K row.", f"columns: {found}", "it needs the columns question and answer"
            )
        _, marker, truth = answer.rpartition("####")
        truth = truth.strip().replace(",", "")
        if not marker or not truth:
            raise DataError(f"{raw} has no answer after ####.", answer[-60:], "correct or remove the row")
        content = f"{question} {instruction}" if instruction else question
        rows.append(
            {
                "data_source": GSM8K_SOURCE,
                "prompt": _messages(content, None),
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": truth},
                "extra_info": {"split": split, "index": index, "question": question, "answer": answer},
            }
        )
    if not rows:
        raise DataError("The GSM8K file holds no rows.", source, "give the jsonl file of a GSM8K split")
    return Made(out, write_rows(partial(iter, rows), out))


def _messages(question: str, instruction: str | None) -> list[dict[str, str]]:
    system = [{"role": "system", "content": instruction}] if instruction else []
    return [*system, {"role": "user", "content": question}]


PLACES = ("prompt", "ground_truth", "data_source", "ability")  # any other target is a key of extra_info
# A place for a column in a template. Other braces are text, as in \boxed{}; {{ and }} are single ones.
_FIELD = re.compile(r"\{\{|\}\}|\{([^\W\d][\w.]*)\}")


@dataclass(frozen=True)
class Mapping:
    """How rows are made. Targets are ``prompt``, ``ground_truth``, ``data_source``, ``ability`` and any name, which
    becomes a key of ``extra_info``. Prompt and ground truth are looked for under the usual names where not given."""

    columns: dict[str, str] = field(default_factory=dict)  # for each target its column (``a.b``: key b of column a)
    constants: dict[str, Any] = field(default_factory=dict)  # for each target its value
    system: str | None = None  # a system message before every prompt
    template: str | None = None  # the prompt, with columns in braces: "Solve: {question}"
    plain: bool = False  # the prompt stays plain text instead of a list of one user message


@dataclass(frozen=True)
class Converted:
    """What was written: file and number of rows, rows left out, and where each part of a row came from."""

    path: Path
    rows: int
    skipped: list[BadRow]
    origins: dict[str, str]


def convert(files: str | Sequence[str], out: str | Path, mapping: Mapping) -> Converted:
    """Write the rows of ``files`` to ``out``, parquet or JSON lines by its ending.

    Rows without prompt or ground truth, and rows that cannot be read, are left out. Columns that are mapped nowhere go
    into ``extra_info``; ground truths that are numbers become text. Raises DataError: a file that cannot be read; an
    unknown column, with the nearest; no prompt or ground truth to be found; no row left; ``out`` cannot be written.
    """
    out = Path(out)
    check_writable([out])
    tables = open_tables(expand_files(files, "IN"))
    refuse_inputs(out, (table.path for table in tables))
    for table in tables:
        if len(table) and not table.columns:
            bad = table.read(0, 1)[0]
            raise DataError("A file has no row that can be used.", f"{bad.file}, {bad.where}: {bad.problem}")
    makers = [_Maker(table, mapping) for table in tables if len(table)]
    if not makers:
        raise DataError("The files hold no rows.", ", ".join(str(table.path) for table in tables))
    skipped: list[BadRow] = []

    def rows() -> Iterator[dict[str, Any]]:
        skipped.clear()
        index = 0
        for maker in makers:
            for number, record in enumerate(maker.table):
                row = maker.row(record, number, index)
                if isinstance(row, BadRow):
                    skipped.append(row)
                else:
                    yield row
                    index += 1

    if next(iter(rows()), None) is None:
        raise DataError("No row can be converted.", str(skipped[0]), "see --map, --set and --template")
    return Converted(out, write_rows(rows, out), skipped, makers[0].origins)


def _place(target: str) -> str:
    """Where a target stands in the row: a misspelled one is seen to be a key of ``extra_info``."""
    return target if target in PLACES else f"extra_info.{target}"


class _Maker:
    """Makes the rows of one file."""

    def __init__(self, table: RowTable, mapping: Mapping) -> None:
        self.table, self.mapping = table, mapping
        double = sorted(set(mapping.columns) & set(mapping.constants))
        if double:
            raise DataError("A target is both mapped and set.", ", ".join(double), "give --map or --set, not both")
        self.columns = {target: self._checked(name) for target, name in mapping.columns.items()}
        fields = [found.group(1) for found in _FIELD.finditer(mapping.template or "") if found.group(1)]
        self.fields = [self._checked(name) for name in fields]
        if mapping.template is not None:
            if "prompt" in {**self.columns, **mapping.constants}:
                raise DataError("The prompt is mapped, and there is a template for it.", None, "give one of them")
            if not fields:
                raise DataError("The template names no column.", mapping.template, 'for example "Solve: {question}"')
        elif "prompt" not in mapping.constants:
            self._find("prompt", PROMPT_COLUMNS)
        if "ground_truth" not in mapping.constants:
            usual = ["reward_model.ground_truth"] if "reward_model" in table.columns else []
            self._find("ground_truth", (*usual, *TRUTH_COLUMNS))
        for target in ("data_source", "ability"):
            if target in table.columns and target not in mapping.constants:
                self.columns.setdefault(target, target)
        # What the prompt is made of stays at hand for rewards; other mapped columns have their place.
        placed = {name.split(".")[0] for name in self.columns.values()} | {"extra_info", "reward_model"}
        self.others = [name for name in table.columns if name not in placed]
        self.origins = {_place(target): f"column {name}" for target, name in self.columns.items()}
        self.origins |= {_place(target): f"always {json.dumps(value)}" for target, value in mapping.constants.items()}
        if mapping.template is not None:
            self.origins["prompt"] = f"template with {', '.join(dict.fromkeys(self.fields))}"
        self.origins.setdefault("data_source", f"always {json.dumps(DEFAULT_SOURCE)}")

    def _checked(self, name: str) -> str:
        columns = self.table.columns
        if name in columns or name.split(".")[0] in columns:
            return name
        fix = f"{did_you_mean(name, columns)}the file has the columns {', '.join(columns) or 'none'}"
        raise DataError(f"There is no such column in {self.table.path}.", name, fix)

    def _find(self, target: str, usual: Sequence[str]) -> None:
        if target in self.columns:
            return
        found = next((name for name in usual if name.split(".")[0] in self.table.columns), None)
        if found is None:
            columns = ", ".join(self.table.columns)
            template = ", or --template" if target == "prompt" else f", or --set {target}=VALUE"
            fix = f"add --map {target}=COLUMN{template}; the file has the columns {columns}"
            raise DataError(
                f"No column of {self.table.path} looks like the {target}.", f"looked for {', '.join(usual)}", fix
            )
        self.columns[target] = found

    def row(self, record: RawRow, number: int, index: int) -> dict[str, Any] | BadRow:
        """The row in the row format, or why there is none. ``number``: of the record in its file. ``index``: of the row
        among those written."""

        def bad(reason: str) -> BadRow:
            return BadRow(record.file, number, record.where, index, reason)

        if record.problem:
            return bad(record.problem)
        values = record.values
        made = {target: _lookup(values, name) for target, name in self.columns.items()} | self.mapping.constants
        if self.mapping.template is not None:
            missing = [name for name in self.fields if _lookup(values, name) in (None, "")]
            if missing:
                return bad(f"nothing in column {missing[0]!r} for the template")
            made["prompt"] = _FIELD.sub(lambda found: _filled(found, values), self.mapping.template)
        prompt, truth = made.pop("prompt"), made.pop("ground_truth")
        problem = prompt_problem(prompt, self.columns.get("prompt", "prompt"))
        problem = problem or truth_problem(truth, self.columns.get("ground_truth", "ground_truth"))
        if problem:
            return bad(problem)
        source, ability = made.pop("data_source", None), made.pop("ability", None)
        held = values.get("extra_info")
        others = {name: values[name] for name in self.others if name in values}
        extra = {"index": index, **others, **(held if isinstance(held, dict) else {}), **made}
        row = {
            "data_source": DEFAULT_SOURCE if source in (None, "") else str(source),
            "prompt": self._messages(prompt),
            "reward_model": {"style": "rule", "ground_truth": _truth(truth)},
            "extra_info": extra,
        }
        return row if ability is None else row | {"ability": str(ability)}

    def _messages(self, prompt: Any) -> Any:
        system = [] if self.mapping.system is None else [{"role": "system", "content": self.mapping.system}]
        if isinstance(prompt, str):
            return prompt if self.mapping.plain else [*system, {"role": "user", "content": prompt}]
        # A system message of the row's own gives way.
        return [*system, *(message for message in prompt if not system or message["role"] != "system")]


def _lookup(values: dict[str, Any], name: str) -> Any:
    """The column, or what ``a.b`` stands for inside it."""
    if name in values:
        return values[name]
    place: Any = values
    for part in name.split("."):
        place = place.get(part) if isinstance(place, dict) else None
    return place


def _filled(found: re.Match[str], values: dict[str, Any]) -> str:
    if found.group(1) is None:
        return found.group()[0]
    value = _lookup(values, found.group(1))
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _truth(value: Any) -> Any:
    """Text as it is, numbers as text (3.0 as "3"), lists of these, anything else as JSON."""
    if isinstance(value, list):
        return [_truth(item) for item in value]
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str)
