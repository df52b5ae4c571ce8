"""From sampled ids to text, whole or while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from verl.rollout.protocol import Result

Decode = Callable[[Sequence[int] | NDArray[np.int32]], str]
"""Token ids to text, special tokens left out."""

UNFINISHED = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


def response_text(result: Result, decode: Decode, stop: Sequence[str] = (), min_new_tokens: int = 0) -> str:
    """The response's text, cut before the stop string that ended it, which the first ``min_new_tokens`` do not hold."""
    text = decode(result.response_ids)
    if result.finish_reason != "stop":
        return text
    forced = len(decode(result.response_ids[:min_new_tokens]).rstrip(UNFINISHED)) if min_new_tokens else 0
    found = [text.find(string, max(forced - len(string) + 1, 0)) for string in stop]
    return text[: min((place for place in found if place >= 0), default=len(text))]


class TextStream:
    """The text of a growing response in pieces that no later token can change.

    Held back are bytes that are not yet a character, and an end that may turn out to be the start of a stop string.
    The pieces of :meth:`grow`, then that of :meth:`finish`, are together the text that ``finish`` is given.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode, self._stop = decode, stop
        self._given = ""

    def grow(self, ids: Sequence[int]) -> str:
        """What can be said for certain now and was not before; ``ids``: all that are sampled so far."""
        text = self._decode(ids).rstrip(UNFINISHED)
        longest = max((n for s in self._stop for n in range(1, len(s) + 1) if text.endswith(s[:n])), default=0)
        text = text[: len(text) - longest]
        # A decoder may change what it gave before (some close up spaces); then nothing is said until it fits again.
        if not text.startswith(self._given):
            return ""
        piece = text[len(self._given) :]
        self._given = text
        return piece

    def finish(self, text: str) -> str:
        """The rest of the whole ``text``."""
        pairs = zip(text, self._given, strict=False)
        shared = next((i for i, (new, old) in enumerate(pairs) if new != old), min(len(text), len(self._given)))
        return text[shared:]
