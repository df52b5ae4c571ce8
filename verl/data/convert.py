"""Any data file into the row format: columns mapped to their places, constants, a prompt made by a template."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verl.config.names import did_you_mean
from verl.data.files import expand_files
from verl.data.output import check_writable, refuse_inputs, write_rows
from verl.data.rows import DEFAULT_SOURCE, PROMPT_COLUMNS, TRUTH_COLUMNS, BadRow, prompt_problem, truth_problem
from verl.data.tables import RawRow, RowTable, open_tables
from verl.errors import DataError

PLACES = ("prompt", "ground_truth", "data_source", "ability")  # any other target is a key of extra_info
# A place for a column in a template. Other braces are text, as in \boxed{}; {{ and }} are single ones.
_FIELD = re.compile(r"\{\{|\}\}|\{([^\W\d][\w.]*)\}")


@dataclass(frozen=True)
class Mapping:
    """How rows are made.

    Attributes:
        columns: for each target its column (``a.b``: key b of column a). Targets are ``prompt``, ``ground_truth``,
            ``data_source``, ``ability`` and any name, which becomes a key of ``extra_info``. Prompt and ground truth
            are looked for under the usual names where they are not given.
        constants: for each target its value.
        system: a system message before every prompt.
        template: the prompt, with columns in braces: ``"Solve: {question}"``.
        plain: the prompt stays plain text instead of a list of one user message.
    """

    columns: dict[str, str] = field(default_factory=dict)
    constants: dict[str, Any] = field(default_factory=dict)
    system: str | None = None
    template: str | None = None
    plain: bool = False


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
    into ``extra_info``; ground truths that are numbers become text.

    Raises:
        DataError: a file that cannot be read; an unknown column, with the nearest; no prompt or ground truth to be
            found; no row left; ``out`` cannot be written.
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
        """The row in the row format, or why there is none.

        Args:
            number: of the record in its file.
            index: of the row among those written.
        """

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
