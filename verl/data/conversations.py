"""Whole conversations as token ids: which of them the assistant wrote, and where its answer ends.

The ids before an assistant's turn are those of the prompt that the engine would get there (chat template with
generation prompt), checked by rendering prefix by prefix; the turn's own ids reach up to its end token, which is
trained too. What a template writes behind the last end token (a line break) is no part of it: nothing samples it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from verl.data.rendering import RefusedByTemplateError, one_bos, render_messages, special_prefix
from verl.data.rows import Messages
from verl.json_lines import clean_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Text = str | Messages  # plain text, or messages


class UnusableError(Exception):
    """A conversation that cannot be rendered exactly; its text is the reason."""


@dataclass(frozen=True)
class Conversation:
    """Token ids (T,) and which of them the assistant wrote (T,)."""

    ids: list[int]
    written: list[bool]


class Renderer:
    """Conversations to ids, for one tokenizer.

    Args:
        ends: token ids that end a response; the tokenizer's EOS token is set behind a response that the chat template
            (or plain text) leaves without one.
        template_kwargs: passed on to the chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], template_kwargs: dict[str, Any]):
        self._tokenizer, self._ends, self._kwargs = tokenizer, frozenset(ends), template_kwargs
        self._prefix = special_prefix(tokenizer)

    def conversation(self, messages: Messages, location: str) -> Conversation:
        """A message list, cut behind the last turn of the assistant.

        Raises:
            UnusableError: no turn of the assistant, or one whose prompt is no prefix of the whole.
            DataError: the tokenizer has no chat template.
        """
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
