"""Which samples the report shows: evenly chosen, and never more than the page can carry.

A run of 200 steps with 128 responses each leaves tens of megabytes in ``samples/``; the page has room for a few. What
is shown is chosen in this order, each choice evenly spread with first and last among them, until all fits into
``SAMPLE_BUDGET``: steps (half of them validated ones), then whole groups (all responses to one prompt) of a step's
training and validation split. Long texts are cut in their middle. The page says how much of how much it shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.json_lines import json_line
from verl.run_dir import RunDir
from verl.tracking.samples import SampleRow, pick_groups, read_samples, spread

SAMPLE_BUDGET = 3_200_000  # bytes of all samples as they stand in the page
READ_BUDGET = 40_000_000  # bytes of sample files read for it: about a second
MAX_STEPS = 100
FEWEST_STEPS = 25  # before groups are torn apart and texts cut short
MAX_ROWS = 32  # a step and split, where all there is would not fit
GROUP_ROWS = 8  # as many rows a step and split are kept before steps are left out
TOKEN_STEPS = 20  # steps whose samples keep their tokens one by one
MAX_TEXT = 6000  # characters of one prompt or response


@dataclass(frozen=True)
class ShownSamples:
    """What the page gets; a text of ``groups`` is JSON, safe inside a data block: ``{step, split, uid, of, prompt,
    ground_truth?, data_source?, rows: [{index, response, score?, shaped?, reward?, reason?, advantage?,
    response_length?, finish_reason?, versions?, extras?, tokens?}]}``; ``of``: responses that the file has."""

    groups: list[str]  # a prompt each
    rows: int  # shown
    of_rows: int  # that the shown steps have
    steps: int  # shown
    of_steps: int  # that have samples
    torn: int  # unreadable lines met


@dataclass(frozen=True)
class _Group:
    head: str  # JSON without its closing brace
    rows: list[str]

    def text(self, limit: int) -> str:
        return f'{self.head}, "rows": [{", ".join(self.rows[:limit])}]}}'


@dataclass(frozen=True)
class _File:
    step: int
    total: int
    splits: list[list[SampleRow]]  # training and validation
    sizes: dict[tuple[str, str], int]  # (split, uid) -> responses of that group in the file


def data_block(value: Any) -> str:
    """JSON that stays inside a script element: only ``<`` could end it or begin a comment."""
    return json_line(value).replace("<", "\\u003c")


def shown_samples(run_dir: RunDir, validated: set[int]) -> ShownSamples:
    """Chooses; ``validated``: steps with a validation, which are preferred."""
    available = run_dir.sample_steps()
    chosen, size = _readable(run_dir, available, validated)
    most = MAX_ROWS if size > 2 * SAMPLE_BUDGET else MAX_ROWS * 16  # a prompt stands in a file once a response
    files, torn = [], 0
    with_tokens = {chosen[i] for i in spread(len(chosen), TOKEN_STEPS)}
    for step in chosen:
        rows, skipped = read_samples(run_dir.samples(step))
        if step not in with_tokens:
            rows = [row if row.tokens is None else replace(row, tokens=None) for row in rows]
        torn += skipped
        files.append(_file(step, rows, most))
    kept, limit, groups = _within_budget(files, validated, most)
    return ShownSamples(
        groups=[group.text(limit) for group in groups],
        rows=sum(min(limit, len(group.rows)) for group in groups),
        of_rows=sum(file.total for file in kept),
        steps=len(kept),
        of_steps=len(available),
        torn=torn,
    )


def _readable(run_dir: RunDir, available: Sequence[int], validated: set[int]) -> tuple[list[int], int]:
    """The steps whose files are read, at most ``MAX_STEPS``, fewer where they are large; and their bytes."""
    limit = MAX_STEPS
    while True:
        chosen = _choose_steps(available, validated, limit)
        size = sum(run_dir.samples(step).stat().st_size for step in chosen)
        if limit <= FEWEST_STEPS or size <= READ_BUDGET:
            return chosen, size
        limit //= 2


def _choose_steps(available: Sequence[int], validated: set[int], limit: int) -> list[int]:
    """At most ``limit``: half of them validated ones, the rest evenly spread; first and last among them."""
    if len(available) <= limit:
        return list(available)
    with_validation = [step for step in available if step in validated]
    chosen = {with_validation[i] for i in spread(len(with_validation), limit // 2)}
    chosen |= {available[i] for i in spread(len(available), limit - len(chosen))}
    return sorted(chosen)


def _file(step: int, rows: Sequence[SampleRow], most: int) -> _File:
    sizes: dict[tuple[str, str], int] = {}
    for row in rows:
        sizes[row.split, row.uid] = sizes.get((row.split, row.uid), 0) + 1
    splits = [pick_groups([row for row in rows if row.split == split], most) for split in ("train", "val")]
    return _File(step, len(rows), splits, sizes)


def _limits(most: int) -> Iterator[tuple[int, int, int]]:
    """(steps, rows a step and split, characters a text), each tighter than the one before."""
    steps, rows, text = MAX_STEPS, most, MAX_TEXT
    while True:
        yield steps, rows, text
        if rows > GROUP_ROWS:
            rows //= 2
        elif steps > FEWEST_STEPS:
            steps //= 2
        elif rows > 1:
            rows //= 2
        else:
            text //= 2


def _within_budget(files: Sequence[_File], validated: set[int], most: int) -> tuple[list[_File], int, list[_Group]]:
    """The files kept, the most rows a group may have, and the groups."""
    by_file: dict[int, list[list[_Group]]] = {}
    written_with = 0
    for steps, rows, text in _limits(most):
        if text != written_with:
            by_file = {file.step: _groups(file, text) for file in files}
            written_with = text
        chosen = set(_choose_steps([file.step for file in files], validated, steps))
        splits = [split for step, own in by_file.items() if step in chosen for split in own]
        groups = [group for split in splits for group in _few(split, rows)]
        size = sum(len(group.head.encode()) + sum(len(row.encode()) for row in group.rows[:rows]) for group in groups)
        if size <= SAMPLE_BUDGET or text <= 1:
            return [file for file in files if file.step in chosen], rows, groups
    raise AssertionError("the limits have no end")


def _few(groups: list[_Group], limit: int) -> list[_Group]:
    """Evenly spread groups with at most ``limit`` rows together, at least one."""
    largest = max((len(group.rows) for group in groups), default=1)
    return [groups[i] for i in spread(len(groups), max(1, limit // largest))]


def _groups(file: _File, text: int) -> list[list[_Group]]:
    """Of each split, its groups in their order."""
    result = []
    for rows in file.splits:
        members: dict[tuple[str, str], list[SampleRow]] = {}
        for row in rows:
            members.setdefault((row.uid, row.prompt), []).append(row)
        result.append([_group(file, group, text) for group in members.values()])
    return result


def _group(file: _File, rows: Sequence[SampleRow], text: int) -> _Group:
    first = rows[0]
    truth = first.ground_truth
    head = {
        "step": file.step,
        "split": first.split,
        "uid": _cut(first.uid, 200),
        "of": file.sizes[first.split, first.uid],
        "prompt": _cut(first.prompt, text),
        "ground_truth": None if truth is None else _cut(truth if isinstance(truth, str) else json_line(truth), 500),
        "data_source": _cut(first.data_source, 200),
    }
    return _Group(data_block(_present(head))[:-1], [data_block(_row(row, text)) for row in rows])


def _row(row: SampleRow, text: int) -> dict[str, Any]:
    extras = {
        _cut(str(name), 60): value if isinstance(value, bool | int | float) else _cut(str(value), 300)
        for name, value in list(row.extras.items())[:20]
        if value is not None
    }
    return {"index": row.index, "response": _cut(row.response, text)} | _present(
        {
            "score": short(row.score),
            "shaped": short(row.shaped),
            "reward": short(row.reward if row.reward != (row.score if row.shaped is None else row.shaped) else None),
            "reason": None if row.reason is None else _cut(row.reason, 500),
            "advantage": short(row.advantage),
            "response_length": row.response_length,
            "finish_reason": _cut(row.finish_reason, 60),
            "versions": row.versions,
            "extras": extras,
            "tokens": None if row.tokens is None or text < MAX_TEXT else row.tokens,
        }
    )


def _present(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None and value != "" and value != {}}


def _cut(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    return f"{text[: limit * 3 // 4]}\n[… {len(text) - limit} characters left out …]\n{text[len(text) - limit // 4 :]}"


def short(value: float | None) -> float | None:
    """Six digits: more are not seen and cost room."""
    return None if value is None else float(f"{value:.6g}")
