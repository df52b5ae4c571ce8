"""A tracker: one figure of each step in a CSV file."""

from __future__ import annotations

from verl.tracking.trackers import MetricTracker, TrackerContext


class CsvTracker(MetricTracker):
    """Writes ``step,score`` lines. What a tracker raises is reported once and never stops training."""

    def __init__(self, context: TrackerContext) -> None:
        self._file = context.run_dir.path / "score.csv"

    def start(self) -> None:
        if not self._file.exists():  # a resumed run goes on in it
            self._file.write_text("step,score\n")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        if "critic/score/mean" in metrics:  # step 0 has a validation only
            with self._file.open("a") as file:
                file.write(f"{step},{metrics['critic/score/mean']}\n")
