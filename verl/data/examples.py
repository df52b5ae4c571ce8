"""Examples of supervised training: conversations to imitate, and preference pairs, as rows of token ids.

An example is one row of the model (a conversation) or two (chosen, rejected). A row is split where its first trained
token stands: ``prompts`` before, ``responses`` from there on, and ``response_mask`` says which of those count. So the
packing, sharing and batching of RL training serve here as they are. The rows of a pair share what they begin with; the
score of a row is read behind its last token, for which a place is kept at the end of its response.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.config.names import did_you_mean
from verl.config.schema_supervised import PairDataConfig, SftDataConfig, SupervisedDataConfig
from verl.data.dataset import TokenRows, TokenStore
from verl.data.rendering import Conversation, Renderer, UnusableError
from verl.data.rows import SHOWN_ROWS, BadRow, Tokenizer, prompt_problem, too_many_bad
from verl.data.tables import expand_files, open_tables
from verl.errors import DataError
from verl.protocol import DataProto
from verl.protocol.columns import padded

MESSAGES = ("messages", "conversation", "conversations")
PROMPTS = ("prompt", "question", "instruction", "input", "query", "problem")
RESPONSES = ("response", "completion", "answer", "output", "solution")
PAIR_PROMPTS = ("prompt", "question")


@dataclass(frozen=True)
class Row:
    """What the model reads: ``trained`` says which tokens of the response count."""

    prompt: list[int]
    response: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class Example:
    rows: list[Row]
    margin: float = 0.0
    over: bool = False  # it was longer than data.max_length


@dataclass(frozen=True)
class ExampleDataset:
    """Examples that can be drawn, and what was left out on the way; a :class:`verl.data.loader.PromptLoader` draws."""

    prompts: TokenRows  # of the model's rows, ``per_example`` side by side for each example
    responses: TokenRows
    trained: TokenRows
    margins: np.ndarray  # (N,) float32, of preference pairs
    per_example: int
    dropped: int = 0  # examples over ``data.max_length`` that were left out
    truncated: int = 0  # or cut
    skipped: Sequence[BadRow] = ()  # rows that could not be used
    content_hash: str = ""  # of all ids and masks

    def __len__(self) -> int:
        return len(self.margins)

    def batch(self, places: Sequence[int], split: str, draws: Sequence[int]) -> DataProto:
        """The model's rows of the examples at ``places``: tensors, and ``uid``, the same for the rows of a pair."""
        n = self.per_example
        rows = [place * n + i for place in places for i in range(n)]
        prompts, prompt_mask = padded([self.prompts[i] for i in rows], left=True)
        responses, mask = padded([self.responses[i] for i in rows])
        trained, _ = padded([self.trained[i] for i in rows])
        uids = [f"{split}:{draw}:example:{place}" for place, draw in zip(places, draws, strict=True)]
        return DataProto.from_dict(
            tensors={
                "prompts": prompts,
                "responses": responses,
                "attention_mask": torch.cat([prompt_mask, mask], 1),
                "response_mask": trained.bool(),
                "margins": torch.tensor(self.margins[list(places)]).repeat_interleave(n),
            },
            non_tensors={"uid": [uid for uid in uids for _ in range(n)]},
        )


Make = Callable[[dict[str, Any], str], Example]  # of a row's values and its location; raises UnusableError


def load_conversations(
    files: Sequence[str],
    config: SftDataConfig,
    tokenizer: Tokenizer,
    ends: Sequence[int],
    key: str = "data.train_files",
) -> ExampleDataset:
    """Conversations to imitate. ``ends``: token ids that end a response. ``key``: the configuration key that named the
    files, for messages. Raises DataError: a file that cannot be read, columns that are not there, more unusable rows
    than allowed, examples over ``data.max_length`` with ``data.truncation=error``, or no example."""
    renderer = Renderer(tokenizer, ends, config.chat_template_kwargs)

    def of_columns(columns: Sequence[str], path: Path) -> Make:
        pair_named = config.prompt_key is not None or config.response_key is not None
        messages = _column(config.messages_key, "data.messages_key", () if pair_named else MESSAGES, columns, path)
        if messages is not None:
            return lambda values, location: sft_example(
                renderer.conversation(_checked(values.get(messages), messages), location), config
            )
        prompt = _column(config.prompt_key, "data.prompt_key", PROMPTS, columns, path)
        response = _column(config.response_key, "data.response_key", RESPONSES, columns, path)
        if prompt is None or response is None:
            raise DataError(
                "A data file has neither a column of messages nor a prompt and a response.",
                path,
                f"it has the columns {', '.join(columns)}; set data.messages_key, or data.prompt_key and "
                "data.response_key",
            )
        return lambda values, location: sft_example(
            renderer.answer(
                _checked(values.get(prompt), prompt, True), _checked(values.get(response), response, True), location
            ),
            config,
        )

    return _load(files, config, of_columns, per_example=1, key=key)


def load_pairs(
    files: Sequence[str],
    config: PairDataConfig,
    tokenizer: Tokenizer,
    ends: Sequence[int],
    key: str = "data.train_files",
) -> ExampleDataset:
    """Preference pairs; arguments and errors as :func:`load_conversations`."""
    renderer = Renderer(tokenizer, ends, config.chat_template_kwargs)

    def of_columns(columns: Sequence[str], path: Path) -> Make:
        for name in ("chosen_key", "rejected_key", "margin_key"):
            _column(getattr(config, name), f"data.{name}", (), columns, path)
        prompt_key = _column(config.prompt_key, "data.prompt_key", PAIR_PROMPTS, columns, path)

        def make(values: dict[str, Any], location: str) -> Example:
            prompt = None if prompt_key is None else _checked(values.get(prompt_key), prompt_key, True)
            texts = [_checked(values.get(name), name, True) for name in (config.chosen_key, config.rejected_key)]
            sides = [_side(renderer, prompt, text, location) for text in texts]
            if prompt is None and len({str(_opening(text)) for text in texts}) == 2:
                raise UnusableError("chosen and rejected do not begin with the same prompt")
            return pair_example(sides[0], sides[1], _margin(values, config.margin_key), config)

        return make

    return _load(files, config, of_columns, per_example=2, key=key)


def _opening(conversation: Any) -> list[Any] | None:
    """What a list of messages says before the assistant does; a chat template makes the first tokens equal anyway."""
    if isinstance(conversation, str):
        return None
    return [(m.get("role"), m.get("content")) for m in takewhile(lambda m: m.get("role") != "assistant", conversation)]


def sft_example(conversation: Conversation, config: SupervisedDataConfig) -> Example:
    """One row: everything before the first trained token is its prompt."""
    ids, written, limit = conversation.ids, conversation.written, config.max_length
    over = len(ids) > limit
    if over and config.truncation in ("left", "right"):
        part = slice(len(ids) - limit, None) if config.truncation == "left" else slice(0, limit)
        ids, written = ids[part], written[part]
    if not any(written):
        raise UnusableError("nothing of its response is left after cutting it to data.max_length")
    start = max(written.index(True), 1)  # the first token of all is predicted by nothing
    if start == len(ids) or not any(written[start:]):
        raise UnusableError("no token of its response has one before it")
    return Example([Row(ids[:start], ids[start:], written[start:])], over=over)


def pair_example(chosen: Conversation, rejected: Conversation, margin: float, config: SupervisedDataConfig) -> Example:
    """Two rows that share what they begin with; what counts is the place behind the last token of each."""
    sides, limit = [chosen.ids, rejected.ids], config.max_length
    longest = max(map(len, sides))
    if longest > limit and config.truncation == "left":
        sides = [ids[longest - limit :] for ids in sides]
    elif longest > limit and config.truncation == "right":
        sides = [ids[:limit] for ids in sides]
    if sides[0] == sides[1]:
        raise UnusableError("chosen and rejected are the same" + (" after cutting" if longest > limit else ""))
    shared = next((i for i, (a, b) in enumerate(zip(*sides, strict=False)) if a != b), min(map(len, sides)))
    if not shared:
        raise UnusableError("chosen and rejected do not begin with the same prompt")
    # A further response token keeps the place of the value, which is read behind the last one.
    rows = [Row(ids[:shared], [*ids[shared:], 0], [False] * (len(ids) - shared) + [True]) for ids in sides]
    return Example(rows, margin, over=longest > limit)


def _side(renderer: Renderer, prompt: Any, answer: Any, location: str) -> Conversation:
    if isinstance(answer, list):
        if answer[-1]["role"] != "assistant":
            raise UnusableError("an answer does not end with a message of the assistant")
        if prompt is None or answer[0]["role"] != "assistant":  # it brings its own prompt
            return renderer.conversation(answer, location)
    return renderer.text(answer) if prompt is None else renderer.answer(prompt, answer, location)


def _margin(values: dict[str, Any], key: str | None) -> float:
    if key is None:
        return 0.0
    try:
        margin = float(values.get(key))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        margin = float("nan")
    if not np.isfinite(margin):
        raise UnusableError(f"the margin in column {key!r} is {values.get(key)!r}, not a number")
    return margin


def _column(named: str | None, key: str, usual: Sequence[str], columns: Sequence[str], path: Path) -> str | None:
    """The column that ``key`` names, or the first of the usual ones that the file has."""
    if named is None:
        return next((name for name in usual if name in columns), None)
    if named not in columns:
        fix = f"{did_you_mean(named, columns)}the file has the columns {', '.join(columns)}"
        raise DataError(f"{key} names a column that {path} does not have.", named, fix)
    return named


def _checked(value: Any, column: str, text: bool = False) -> Any:
    """Messages, or text where ``text`` is allowed."""
    problem = prompt_problem(value, column)
    if problem is None and isinstance(value, str) and not text:
        problem = f"the prompt in column {column!r} is text, not a list of messages"
    if problem:
        raise UnusableError(problem.replace("prompt in column", "value in column"))
    return value


def _load(
    files: Sequence[str],
    config: SupervisedDataConfig,
    of_columns: Callable[[Sequence[str], Path], Make],
    per_example: int,
    key: str,
) -> ExampleDataset:
    """All rows of the files, made into examples."""
    stores = [TokenStore() for _ in range(3)]
    lengths: list[list[int]] = [[], [], []]
    margins: list[float] = []
    hashed, bad, over = hashlib.sha256(), list[BadRow](), list[str]()
    wanted = config.max_samples if key == "data.train_files" else None
    read = 0
    for made in _examples(files, of_columns, key):
        if len(margins) == wanted:
            break
        read += 1
        if isinstance(made, BadRow):
            bad.append(made)
            continue
        example, location = made
        if example.over:
            over.append(location)
            if config.truncation in ("drop", "error"):
                continue
        for row in example.rows:
            kept: list[Sequence[int]] = [row.prompt, row.response, row.trained]
            for store, sizes, ids in zip(stores, lengths, kept, strict=True):
                part = np.array(ids, np.int32)
                store.add(part)
                sizes.append(len(ids))
                hashed.update(len(ids).to_bytes(4, "little") + part.tobytes())
        margins.append(example.margin)
    _check(config, key, read, bad, over, len(margins))
    margin_column = np.array(margins, np.float32)
    hashed.update(margin_column.tobytes())
    prompts, responses, trained = (store.finish(np.array(n)) for store, n in zip(stores, lengths, strict=True))
    cut = config.truncation != "drop"
    return ExampleDataset(
        prompts,
        responses,
        trained,
        margin_column,
        per_example,
        dropped=0 if cut else len(over),
        truncated=len(over) if cut else 0,
        skipped=bad,
        content_hash=hashed.hexdigest(),
    )


def _examples(
    files: Sequence[str], of_columns: Callable[[Sequence[str], Path], Make], key: str
) -> Iterator[tuple[Example, str] | BadRow]:
    index = 0
    for table in open_tables(expand_files(files, key)):
        make = of_columns(table.columns, table.path) if table.columns else None
        for number, record in enumerate(table):
            try:
                if record.problem or make is None:
                    raise UnusableError(record.problem or "it has no columns")
                yield make(record.values, str(record)), str(record)
            except UnusableError as error:
                yield BadRow(record.file, number, record.where, index, str(error))
            index += 1


def _check(config: SupervisedDataConfig, key: str, read: int, bad: list[BadRow], over: list[str], count: int) -> None:
    if len(bad) > config.max_skipped_fraction * read:
        raise too_many_bad(bad, read, key, f"data.max_skipped_fraction (now {config.max_skipped_fraction:g})")
    if over and config.truncation == "error":
        raise DataError(
            f"{len(over)} of {read} examples in {key} are longer than data.max_length={config.max_length} tokens.",
            "; ".join(over[:SHOWN_ROWS]),
            "raise data.max_length, or set data.truncation to left, right or drop",
        )
    if not count:
        raise DataError(
            f"{key} holds no example that can be used.",
            f"{read} rows read, {len(over)} longer than data.max_length={config.max_length}",
            "give files with usable rows",
        )
