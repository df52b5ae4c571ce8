"""Options of the commands that sample: ``verl generate`` and ``verl eval``."""

from __future__ import annotations

import argparse
import json
from typing import Any

from verl.cli.arguments import positive, temperature


def add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", type=positive, default=1, help="responses a prompt (default 1)")
    parser.add_argument(
        "--temperature", type=temperature, help="0 is greedy (default: 0 for one response a prompt, 1 for several)"
    )
    parser.add_argument("--top-p", type=_share, default=1.0, help="likeliest tokens up to this mass (default 1: all)")
    parser.add_argument("--top-k", type=int, default=-1, help="so many of the likeliest tokens (default -1: all)")
    parser.add_argument("--seed", type=int, default=1, help="the same seed gives the same responses (default 1)")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        default={},
        metavar="JSON",
        help='such as {"enable_thinking": false}',
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")


def chosen_temperature(arguments: argparse.Namespace) -> float:
    if arguments.temperature is not None:
        return float(arguments.temperature)
    return 0.0 if arguments.n == 1 else 1.0


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
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
