"""A tracker: one figure of each step in a CSV file. A tracker needs a program of one's own, such as this one.

Run from the repository's root: python examples/extending/tracker.py [key=value ...]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from verl import Trainer, load_config
from verl.tracking.samples import SampleRow, Split
from verl.tracking.trackers import LOGGERS


class CsvTracker:
    """Writes ``step,score`` lines. What a tracker raises is reported once and never stops training."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def start(self) -> None:
        if not self._file.exists():  # a resumed run goes on in it
            self._file.write_text("step,score\n")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if "critic/score/mean" in metrics:  # step 0 has a validation only
            with self._file.open("a") as file:
                file.write(f"{step},{metrics['critic/score/mean']}\n")

    def samples(self, step: int, split: Split, rows: Sequence[SampleRow]) -> None:
        """Responses of a step; this tracker shows none."""

    def close(self) -> None:
        """Nothing is held open."""


def main(overrides: list[str]) -> None:
    LOGGERS["csv"] = lambda context: CsvTracker(context.run_dir.path / "score.csv")
    config = load_config("examples/extending/grpo.yaml", ["trainer.logger=[console,csv]", *overrides])
    Trainer(config).fit()


if __name__ == "__main__":
    main(sys.argv[1:])
