"""Types of command-line arguments, and what every command takes."""

from __future__ import annotations

import argparse

Commands = argparse._SubParsersAction  # what ``add_subparsers`` returns


def common() -> argparse.ArgumentParser:
    """Options of every command: ``parents=[common()]``."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--debug", action="store_true", default=False, help="show the traceback of an error")
    return parser


def group(commands: Commands, name: str, help: str) -> Commands:
    """A command that holds others, such as ``verl data``."""
    parser: argparse.ArgumentParser = commands.add_parser(name, help=help)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def not_negative(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def temperature(text: str) -> float:
    value = float(text)
    if not 0.0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not at least 0")
    return value
