"""Prompts to token ids: the very ids that the engine gets and the trainer trains on.

Every length limit is applied to these ids, chat template and BOS included, so that filter, truncation and engine can
never disagree about how long a prompt is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from verl.data.rows import Messages, PromptRow, Tokenizer
from verl.errors import DataError
from verl.json_lines import clean_text

UNTEMPLATED = (
    "prompts that are plain text go to the model without its chat template; verl data convert makes messages of them"
)


def untemplated(rows: Sequence[PromptRow], tokenizer: Tokenizer) -> bool:
    """Whether there are prompts that miss a chat template that the tokenizer has; ``UNTEMPLATED`` says so."""
    return bool(tokenizer.chat_template) and any(isinstance(row.prompt, str) for row in rows)


def special_prefix(tokenizer: Tokenizer) -> list[int]:
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
    rows: Sequence[PromptRow], tokenizer: Tokenizer, template_kwargs: dict[str, Any] | None = None
) -> tuple[list[list[int]], dict[int, str]]:
    """Token ids of each prompt: messages through the chat template, plain text as it is. Returns the ids, and the
    reason of every row (by its place) that has none, because the template refuses its messages. Raises DataError:
    message lists on a tokenizer without a chat template."""
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
    tokenizer: Tokenizer,
    template_kwargs: dict[str, Any],
    location: str,
    add_generation_prompt: bool = True,
) -> str:
    """Messages through the chat template. ``location``: where they stand, for messages. Raises DataError: there is no
    chat template; RefusedByTemplateError: the template raises."""
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


Text = str | Messages  # plain text, or messages


class UnusableError(Exception):
    """A conversation that cannot be rendered exactly; its text is the reason."""


@dataclass(frozen=True)
class Conversation:
    """Token ids (T,) and which of them the assistant wrote (T,)."""

    ids: list[int]
    written: list[bool]


class Renderer:
    """Conversations to ids, for one tokenizer. ``ends``: token ids that end a response; the tokenizer's EOS token is
    set behind a response that the chat template (or plain text) leaves without one.

    The ids before an assistant's turn are those of the prompt that the engine would get there, checked by rendering
    prefix by prefix; the turn's own reach up to its end token, which is trained too. What a template writes behind the
    last end token (a line break) is no part of it: nothing samples it.
    """

    def __init__(self, tokenizer: Tokenizer, ends: Sequence[int], template_kwargs: dict[str, Any]):
        self._tokenizer, self._ends, self._kwargs = tokenizer, frozenset(ends), template_kwargs
        self._prefix = special_prefix(tokenizer)

    def conversation(self, messages: Messages, location: str) -> Conversation:
        """A message list, cut behind the last turn of the assistant. Raises UnusableError: no turn of the assistant, or
        one whose prompt is no prefix of the whole; DataError: the tokenizer has no chat template."""
        turns = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
        if not turns:
            raise UnusableError("no message of it has the role assistant")
        if turns[0] == 0:
            raise UnusableError("it begins with the assistant: there is no prompt")
        ids: list[int] = []
        written: list[bool] = []
        for turn in turns:
            before = self._chat(messages[:turn], location, generation=True)
            after = self._chat(messages[: turn + 1], location, generation=False)
            if after[: len(before)] != before or after[: len(ids)] != ids:
                raise UnusableError(
                    f"the chat template renders what comes before message {turn} differently with and without it, so "
                    "that the model would never see this prompt"
                )
            # Up to the last end token; all of it where there is none.
            end = next((i for i in range(len(after), len(before), -1) if after[i - 1] in self._ends), len(after))
            written += [False] * (len(before) - len(ids)) + [True] * (end - len(before))
            ids = after[:end]
        if ids[-1] not in self._ends:
            ids.append(self._tokenizer.eos_token_id)
            written.append(True)
        return Conversation(ids, written)

    def answer(self, prompt: Text, response: Text, location: str) -> Conversation:
        """A prompt and its response. Text becomes a message where there is a chat template, else it stays as it is."""
        if self._tokenizer.chat_template or not (isinstance(prompt, str) and isinstance(response, str)):
            return self.conversation([*_messages(prompt, "user"), *_messages(response, "assistant")], location)
        before = self._plain(prompt)
        after = [*self._tokenizer.encode(clean_text(response), add_special_tokens=False), self._tokenizer.eos_token_id]
        return Conversation([*before, *after], [False] * len(before) + [True] * len(after))

    def text(self, text: str) -> Conversation:
        """A conversation that is text already; all of it counts as written."""
        ids = [*self._plain(text), self._tokenizer.eos_token_id]
        return Conversation(ids, [True] * len(ids))

    def _plain(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(clean_text(text), add_special_tokens=False)
        return one_bos([*self._prefix, *ids], self._prefix, self._tokenizer.bos_token_id)

    def _chat(self, messages: Messages, location: str, generation: bool) -> list[int]:
        try:
            text = render_messages(messages, self._tokenizer, self._kwargs, location, generation)
        except RefusedByTemplateError as error:
            raise UnusableError(str(error)) from error
        ids: list[int] = self._tokenizer.encode(clean_text(text), add_special_tokens=False)
        return one_bos(ids, self._prefix, self._tokenizer.bos_token_id)


def _messages(text: Text, role: str) -> Messages:
    return [{"role": role, "content": text}] if isinstance(text, str) else text
