"""Options of the commands that sample: ``verl generate`` and ``verl eval``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from verl.cli.arguments import not_negative, number, positive

DTYPES = ("bfloat16", "float16", "float32")


def add_sampling(parser: argparse.ArgumentParser) -> None:
    def add(name: str, type: Any, default: Any, help: str, **more: Any) -> None:
        parser.add_argument(name, type=type, default=default, help=help, **more)

    add("-n", positive, 1, "responses a prompt (default 1)")
    add("--temperature", number(0), None, "0 is greedy (default: 0 for one response a prompt, 1 for several)")
    add("--top-p", number(0, 1, above=True), 1.0, "likeliest tokens up to this mass (default 1: all)")
    add("--top-k", int, -1, "so many of the likeliest tokens (default -1: all)")
    add("--min-p", number(), 0.0, "tokens at least this share as likely as the likeliest (default 0: all)")
    add("--repetition-penalty", number(), 1.0, "above 1: against tokens that are there (default 1: off)")
    add("--presence-penalty", number(), 0.0, "against tokens that the response has (default 0: off)")
    add("--frequency-penalty", number(), 0.0, "the same, as often as it has them (default 0: off)")
    add("--logit-bias", _biases, {}, 'added to logits by token id: {"11": -5}', metavar="JSON")
    add("--min-new-tokens", not_negative, 0, "responses are not shorter (default 0)")
    add("--seed", int, 1, "the same seed gives the same responses (default 1)")
    add("--chat-template-kwargs", _json_object, {}, 'such as {"enable_thinking": false}', metavar="JSON")
    add("--max-num-seqs", positive, None, "responses at once (default 64)")
    add("--dtype", str, None, "default bfloat16, or the run's", choices=DTYPES)
    code = "run code that comes with the model or its tokenizer"
    parser.add_argument("--trust-remote-code", action="store_true", help=code)


def sampling_choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the options above, by the names that sampling parameters and ``rollout.val_kwargs`` share."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    temperature = arguments.temperature
    if temperature is None:
        temperature = 0.0 if arguments.n == 1 else 1.0
    return {"temperature": temperature} | {name: getattr(arguments, name) for name in (*names, "min_new_tokens")}


def _biases(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in _json_object(text).items()}
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} does not give numbers by token id") from None


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
