"""The command line. Commands import what they need when they run, so that ``verl --help`` is immediate."""

from __future__ import annotations

from verl.cli.entry import main

__all__ = ["main"]
