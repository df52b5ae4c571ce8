"""Options of the commands that sample: ``verl generate`` and ``verl eval``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from verl.cli.arguments import not_negative, positive, temperature


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=positive, default=1, help="responses a prompt (default 1)")
    parser.add_argument(
        "--temperature", type=temperature, help="0 is greedy (default: 0 for one response a prompt, 1 for several)"
    )
    parser.add_argument("--top-p", type=_share, default=1.0, help="likeliest tokens up to this mass (default 1: all)")
    parser.add_argument("--top-k", type=int, default=-1, help="so many of the likeliest tokens (default -1: all)")
    parser.add_argument(
        "--min-p",
        type=_number,
        default=0.0,
        help="tokens at least this share as likely as the likeliest (default 0: all)",
    )
    parser.add_argument(
        "--repetition-penalty",
        type=_number,
        default=1.0,
        help="above 1: against tokens that are there (default 1: off)",
    )
    parser.add_argument(
        "--presence-penalty", type=_number, default=0.0, help="against tokens that the response has (default 0: off)"
    )
    parser.add_argument(
        "--frequency-penalty", type=_number, default=0.0, help="the same, as often as it has them (default 0: off)"
    )
    parser.add_argument(
        "--logit-bias", type=_biases, default={}, metavar="JSON", help='added to logits by token id: {"11": -5}'
    )
    parser.add_argument("--min-new-tokens", type=not_negative, default=0, help="responses are not shorter (default 0)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same responses (default 1)")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help='such as {"enable_thinking": false}',
    )
    parser.add_argument(
        "--trust-remote-code", action="store_true", help="run code that comes with the model or its tokenizer"
    )


def sampling_choices(arguments: argparse.Namespace) -> dict[str, Any]:
    """The values of the options above, by the names that sampling parameters and ``rollout.val_kwargs`` share."""
    names = ("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias")
    chosen = {name: getattr(arguments, name) for name in (*names, "min_new_tokens")}
    return {"temperature": chosen_temperature(arguments), **chosen}


def chosen_temperature(arguments: argparse.Namespace) -> float:
    if arguments.temperature is not None:
        return float(arguments.temperature)
    return 0.0 if arguments.n == 1 else 1.0


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def _biases(text: str) -> dict[int, float]:
    try:
        return {int(token): float(bias) for token, bias in _json_object(text).items()}
    except (TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} does not give numbers by token id") from None


def _share(text: str) -> float:
    value = _number(text)
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"{text} is not above 0 and at most 1")
    return value


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
