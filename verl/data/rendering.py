"""Prompts to token ids: the very ids that the engine gets and the trainer trains on.

Every length limit is applied to these ids, chat template and BOS included, so that filter, truncation and engine can
never disagree about how long a prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.data.rows import PromptRow
from verl.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SHOWN_ROWS = 3
CHUNK = 1024  # rows a tokenizer call


@dataclass(frozen=True)
class Rendered:
    """Prompt ids of the rows that are kept.

    Attributes:
        rows, ids: the same length.
        dropped: rows over the limit that ``filter_overlong_prompts`` removed.
        truncated: rows that were cut to the limit.
    """

    rows: list[PromptRow]
    ids: list[list[int]]
    dropped: int = 0
    truncated: int = 0


def special_prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids that the tokenizer puts before any text of its own accord (usually one BOS, or none)."""
    plain = tokenizer.encode("a", add_special_tokens=False)
    full = tokenizer.encode("a", add_special_tokens=True)
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return list(full[:start])
    return []


def one_bos(ids: list[int], prefix: list[int], bos: int | None) -> list[int]:
    """``ids`` with exactly one leading BOS where the tokenizer itself would start with one.

    Only leading repetitions are touched: several chat formats use the BOS token between messages too.
    """
    if bos is None or bos not in prefix:
        return ids
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    return [bos, *ids[start:]]


def without_lone_surrogates(text: str) -> str:
    """Text that any tokenizer can encode: surrogate pairs joined, lone surrogates replaced by U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def render(
    rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of each prompt: messages through the chat template, plain text as it is.

    Raises:
        DataError: message lists on a tokenizer without a chat template, or messages that the template refuses.
    """
    texts = _texts(rows, tokenizer, template_kwargs or {})
    prefix, bos = special_prefix(tokenizer), tokenizer.bos_token_id
    ids: list[list[int]] = []
    for start in range(0, len(texts), CHUNK):
        encoded = tokenizer(texts[start : start + CHUNK], add_special_tokens=False, verbose=False)["input_ids"]
        ids.extend(encoded)
    for i, row in enumerate(rows):
        if isinstance(row.prompt, str):
            # The prefix may already be spelled out in the text.
            starts_with_prefix = bool(prefix) and ids[i][: len(prefix)] == prefix
            ids[i] = ids[i] if starts_with_prefix else [*prefix, *ids[i]]
        ids[i] = one_bos(ids[i], prefix, bos)
    return ids


def _texts(rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> list[str]:
    chats = sum(not isinstance(row.prompt, str) for row in rows)
    if chats and not tokenizer.chat_template:
        raise DataError(
            f"{chats} of {len(rows)} prompts are lists of chat messages, but the tokenizer has no chat template.",
            getattr(tokenizer, "name_or_path", None) or None,
            "use an instruction-tuned model, set model.tokenizer_path to a tokenizer with a chat template, "
            "or give the prompts as plain text",
        )
    return [
        without_lone_surrogates(row.prompt if isinstance(row.prompt, str) else _chat(row, tokenizer, template_kwargs))
        for row in rows
    ]


def _chat(row: PromptRow, tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any]) -> str:
    options = {"add_generation_prompt": True, **template_kwargs, "tokenize": False}
    # Arrow fills keys that other rows have with None; templates would take them for given.
    messages = [
        {k: v for k, v in message.items() if v is not None} for message in row.prompt if isinstance(message, dict)
    ]
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:  # templates are programs of the model's author: they may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"The chat template refuses {row.location}.", reason, "change the row's messages") from error


def fit(
    rows: Sequence[PromptRow], ids: Sequence[list[int]], limit: int, truncation: str = "error", drop: bool = False
) -> Rendered:
    """Apply ``data.max_prompt_length``.

    Args:
        limit: most ids of a prompt.
        truncation: ``error``; ``left`` keeps the last ``limit`` ids, ``right`` the first, ``middle`` the first
            ``limit // 2`` and the last of the rest.
        drop: ``data.filter_overlong_prompts``: remove the rows over the limit, whatever ``truncation`` says.

    Raises:
        DataError: ``error`` and a row is over the limit, or nothing is left.
    """
    over = [i for i, row_ids in enumerate(ids) if len(row_ids) > limit]
    if drop:
        removed = set(over)
        kept = [i for i in range(len(rows)) if i not in removed]
        if not kept:
            what = (
                f"{len(over)} of {len(rows)} prompts were filtered: all are longer than data.max_prompt_length={limit}."
            )
            shortest = min((len(row_ids) for row_ids in ids), default=0)
            raise DataError(what, f"the shortest has {shortest} tokens", "raise data.max_prompt_length")
        return Rendered([rows[i] for i in kept], [ids[i] for i in kept], dropped=len(over))
    if over and truncation == "error":
        named = "; ".join(f"{rows[i].location}: {len(ids[i])} tokens" for i in over[:SHOWN_ROWS])
        raise DataError(
            f"{len(over)} of {len(rows)} prompts are longer than data.max_prompt_length={limit}.",
            named,
            "raise the limit, set data.filter_overlong_prompts=true, or set data.truncation to left, right or middle",
        )
    return Rendered(list(rows), [cut(row_ids, limit, truncation) for row_ids in ids], truncated=len(over))


def cut(ids: list[int], limit: int, truncation: str) -> list[int]:
    """At most ``limit`` of the ids (see :func:`fit`)."""
    if len(ids) <= limit:
        return ids
    if truncation == "left":
        return ids[len(ids) - limit :]
    if truncation == "right":
        return ids[:limit]
    if truncation == "middle":
        head = limit // 2
        return [*ids[:head], *ids[len(ids) - (limit - head) :]]
    raise DataError("data.truncation is not a way to cut a prompt.", truncation, "error, left, right or middle")
