"""Built-in rules about the form of a response: choices, patterns, JSON, tags, length, repetition. See `rules`."""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from verl.errors import RewardError

BOX = re.compile(r"\\f?boxed\s*|\\fbox\s*")
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
_FENCE = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_LETTER = re.compile(r"[\s(\[*]*([A-Za-z])\s*(?:[)\].:,*]|$)")
_SAID = re.compile(  # a small letter may be a word: "the answer is a surprise"
    r"(?i:answer|option|choice)\s*(?:(?i:is|would be)\b|:|=)?[\s:*(\[$]*+([A-Z](?![\w'])|[a-z](?=\s*+(?:[).:*\]]|$)))"
)


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{...}``, ``\fbox{...}`` or ``\boxed x``, nested braces kept; None if unclosed."""
    box = None
    for match in BOX.finditer(text):
        box = match
    if box is None:
        return None
    start = box.end()
    if text[start : start + 1] != "{":
        bare = re.match(r"[^\s$]+", text[start:]) if box.group().endswith((" ", "\t", "\n")) else None
        return bare.group() if bare else None
    depth, escaped = 0, False
    for at in range(start, len(text)):
        char = text[at]
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif char == "{":
            depth += 1
        elif char == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : at].strip()
    return None


def multiple_choice(response_text: str, ground_truth: Any, choices: int = 10) -> dict[str, Any]:
    r"""1 if the letter that the response chooses is the ground truth's, else 0; case does not count.

    The choice is the letter in the last ``\boxed{}``, else in the last ``<answer>``, else behind the last "answer is",
    "Answer:", "option" or "choice", else the one that the response consists of or starts with ("B", "(B) Paris", "B.").
    A letter that is only mentioned is no choice.

    Args:
        choices: how many there are, from A.
    """
    truth = _LETTER.match(str(ground_truth))
    if truth is None:
        raise RewardError("The ground truth is no letter.", ground_truth, "correct the row, or choose another rule")
    places = [last_boxed(response_text), *(text for text in ANSWER_TAG.findall(response_text)[-1:])]
    boxed = next((text for text in places if text is not None), None)
    if boxed is not None:
        found = _LETTER.match(re.sub(r"\\text[a-z]*\{([^{}]*)\}", r"\1", boxed))
    else:
        found = next(iter(deque(_SAID.finditer(response_text), maxlen=1)), None) or _LETTER.match(response_text)
    letter = found[1].upper() if found else None
    if letter is not None and ord(letter) - ord("A") >= choices:
        letter = None
    return {"score": float(letter == truth[1].upper()), "pred": letter}


def regex(response_text: str, ground_truth: Any, pattern: str | None = None) -> dict[str, Any]:
    """1 if ``pattern`` is found in the response, else 0; with a group: if the last match's group is the ground truth.

    Args:
        pattern: of Python's ``re``; None: the ground truth is the pattern.
    """
    compiled = _compiled(str(ground_truth) if pattern is None else pattern)
    last = next(iter(deque(compiled.finditer(response_text), maxlen=1)), None)
    if last is None:
        return {"score": 0.0, "pred": None}
    if pattern is None or not compiled.groups:
        return {"score": 1.0, "pred": last[0]}
    found = (last[1] or "").strip()
    return {"score": float(found == str(ground_truth).strip()), "pred": found}


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        raise RewardError(f"The regular expression cannot be read: {error}", pattern, "correct it") from error


def json_schema(response_text: str, ground_truth: Any, schema: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """1 if the response is JSON that the schema allows, else 0, with the first ``error``.

    The JSON is the content of the last ``<answer>``, else of the last fenced block, else the whole response.

    Args:
        schema: a JSON Schema; None: the ground truth is one (a mapping, or its JSON). ``$ref`` may name what is in it
            and the specification's own schemas.
    """
    text = next((found[-1] for part in (ANSWER_TAG, _FENCE) if (found := part.findall(response_text))), response_text)
    wanted = schema if schema is not None else ground_truth
    validator = _validator(wanted if isinstance(wanted, str) else json.dumps(wanted))
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        return {"score": 0.0, "error": f"not JSON: {error}"}
    from referencing.exceptions import Unresolvable

    try:
        fault = next(iter(validator.iter_errors(value)), None)
    except Unresolvable as error:
        fix = "write what it refers to under $defs; nothing is fetched"
        raise RewardError("The JSON Schema refers to what it does not hold.", error.ref, fix) from error
    if fault is None:
        return {"score": 1.0, "error": None}
    return {"score": 0.0, "error": f"{fault.json_path}: {fault.message[:200]}"}


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    import jsonschema
    import jsonschema_specifications

    try:
        parsed = json.loads(schema)
        kind = jsonschema.validators.validator_for(parsed, jsonschema.Draft202012Validator)
        kind.check_schema(parsed)
    except (ValueError, jsonschema.SchemaError) as error:
        raise RewardError("The ground truth is no JSON Schema.", str(error).splitlines()[0], "correct it") from error
    return kind(parsed, registry=jsonschema_specifications.REGISTRY)  # its default fetches what a $ref names


def format_tags(response_text: str, ground_truth: Any, tags: Sequence[str] = ("think", "answer")) -> dict[str, Any]:
    """1 if the response is ``<think>...</think><answer>...</answer>`` and nothing else, each tag once, else 0."""
    at, text = 0, response_text.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1 or not text[at:].lstrip().startswith(opening):
            return {"score": 0.0}
        at = text.index(closing) + len(closing)
        if not text[text.index(opening) + len(opening) : at - len(closing)].strip():
            return {"score": 0.0}
    return {"score": float(not text[at:].strip())}


def length(
    response_text: str, ground_truth: Any, least: int = 0, most: int | None = None, slack: int = 0
) -> dict[str, Any]:
    """1 for ``least`` to ``most`` words, else 0; with ``slack`` the score falls to 0 over so many words beyond."""
    words = len(response_text.split())
    outside = max(least - words, words - most if most is not None else 0, 0)
    return {"score": 1.0 if not outside else max(0.0, 1 - outside / (slack + 1)), "words": words}


def repetition(response_text: str, ground_truth: Any, n: int = 3) -> dict[str, Any]:
    """Minus the share of the response's ``n``-word sequences that occurred before in it: 0 (none) to almost -1."""
    words = response_text.casefold().split()
    total = len(words) - n + 1
    if n < 1 or total < 1:
        return {"score": 0.0}
    return {"score": len({tuple(words[i : i + n]) for i in range(total)}) / total - 1}
