"""Prompts to token ids: the very ids that the engine gets and the trainer trains on.

Every length limit is applied to these ids, chat template and BOS included, so that filter, truncation and engine can
never disagree about how long a prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from verl.data.rows import Messages, PromptRow
from verl.errors import DataError
from verl.json_lines import clean_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


UNTEMPLATED = (
    "prompts that are plain text go to the model without its chat template; verl data convert makes messages of them"
)


def untemplated(rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether there are prompts that miss a chat template that the tokenizer has; ``UNTEMPLATED`` says so."""
    return bool(tokenizer.chat_template) and any(isinstance(row.prompt, str) for row in rows)


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


def render(
    rows: Sequence[PromptRow], tokenizer: PreTrainedTokenizerBase, template_kwargs: dict[str, Any] | None = None
) -> tuple[list[list[int]], dict[int, str]]:
    """Token ids of each prompt: messages through the chat template, plain text as it is.

    Returns:
        The ids, and the reason of every row (by its place) that has none, because the template refuses its messages.

    Raises:
        DataError: message lists on a tokenizer without a chat template.
    """
    texts: list[str] = []
    refused: dict[int, str] = {}
    for place, row in enumerate(rows):
        try:
            text = row.prompt
            if not isinstance(text, str):
                text = render_messages(text, tokenizer, template_kwargs or {}, row.location)
            texts.append(clean_text(text))
        except RefusedByTemplateError as error:
            texts.append("")
            refused[place] = str(error)
    prefix, bos = special_prefix(tokenizer), tokenizer.bos_token_id
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"] if texts else []
    for i, row in enumerate(rows):
        if isinstance(row.prompt, str):
            # The prefix may already be spelled out in the text.
            starts_with_prefix = bool(prefix) and ids[i][: len(prefix)] == prefix
            ids[i] = ids[i] if starts_with_prefix else [*prefix, *ids[i]]
        ids[i] = one_bos(ids[i], prefix, bos)
        if not ids[i]:
            refused.setdefault(i, "the prompt has no tokens")
    return ids, refused


class RefusedByTemplateError(Exception):
    """The chat template refuses messages; its text is the reason."""


def render_messages(
    messages: Messages,
    tokenizer: PreTrainedTokenizerBase,
    template_kwargs: dict[str, Any],
    location: str,
    add_generation_prompt: bool = True,
) -> str:
    """Messages through the chat template.

    Args:
        location: where they stand, for messages.

    Raises:
        DataError: there is no chat template.
        RefusedByTemplateError: the template raises.
    """
    if not tokenizer.chat_template:
        raise DataError(
            f"Prompts are lists of chat messages ({location}), but the tokenizer has no chat template.",
            getattr(tokenizer, "name_or_path", None) or None,
            "use an instruction-tuned model, set model.tokenizer_path to a tokenizer with a chat template, "
            "or give the prompts as plain text",
        )
    options = {"add_generation_prompt": add_generation_prompt, **template_kwargs, "tokenize": False}
    # Arrow fills keys that other rows have with None; templates would take them for given.
    given = [{k: v for k, v in message.items() if v is not None} for message in messages if isinstance(message, dict)]
    try:
        return str(tokenizer.apply_chat_template(given, **options))
    except Exception as error:  # templates are programs of the model's author: they may raise anything
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise RefusedByTemplateError(f"the chat template refuses it: {reason}") from error


def cut(ids: list[int], limit: int, truncation: str) -> list[int]:
    """At most ``limit`` of the ids: ``left`` keeps the last, ``right`` the first, ``middle`` the first ``limit // 2``
    and the last of the rest."""
    if len(ids) <= limit:
        return ids
    if truncation == "left":
        return ids[len(ids) - limit :]
    if truncation == "right":
        return ids[:limit]
    if truncation == "middle":
        head = limit // 2
        return [*ids[:head], *ids[len(ids) - (limit - head) :]]
    raise ValueError(f"no way to cut a prompt: {truncation}")
