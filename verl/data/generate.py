"""Makers of data files in the field's row convention.

Held-out problems never coincide with training problems: every row of both files has a question text of its own. The
validation file is filled first, then the training file, both from one seeded stream of problems in which a question
that was seen before is passed over.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

from verl.config.names import did_you_mean
from verl.data.output import check_writable, write_rows
from verl.data.tables import read_rows
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
    """Write problems of a reasoning-gym task to parquet.

    Args:
        task: name of the task, such as ``chain_sum``.
        size, val_size: rows of the training and of the held-out file. All question texts are distinct.
        out, val_out: the files. Without ``val_out`` the held-out rows go to ``<out>_val.parquet`` beside ``out``.
        seed: seed of the problems.
        options: fields of the task's configuration, such as ``{"min_terms": 2}``.
        instruction: a system message before every question.
        data_source: default ``reasoning_gym/<task>``, which selects the library's own scorer as the reward.

    Raises:
        DataError: the library is missing, task or option unknown, not enough distinct problems, unwritable folder.
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
    """Write GSM8K's own jsonl (``question``, ``answer`` ending in ``#### number``) to parquet.

    Args:
        instruction: appended to every question, as the field does; None: the question alone.

    Raises:
        DataError: a row without question, or without a number after ``####``, with its line; unwritable folder.
    """
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
