"""What a check looks at, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from verl.config.schema_run import AlarmsConfig
from verl.run_dir import EventRecord
from verl.tracking import names
from verl.tracking.metric_table import tables
from verl.tracking.samples import SampleRow

if TYPE_CHECKING:
    from verl.config import Config
    from verl.data.inspection import Inspection
    from verl.diagnostics.checks_machine import Machine
    from verl.diagnostics.checks_reward import Trial

Severity = Literal["error", "warning", "note"]
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")
MAX_LISTED = 5  # steps or subjects named in one finding


@dataclass(frozen=True)
class Finding:
    """Something that is, or may be, wrong with a run."""

    name: str  # of the kind of trouble, for programs
    severity: Severity  # error: not what was meant is learnt, or nothing; warning: likely trouble; note: worth a look
    what: str  # one sentence without a full stop
    evidence: str = ""  # figures
    cause: str = ""  # what it usually comes from
    fix: str = ""  # what to do

    @property
    def text(self) -> str:
        """In one line, without cause and fix."""
        return f"{self.what}: {self.evidence}" if self.evidence else self.what

    @property
    def advice(self) -> str:
        """In one line, with the fix."""
        return f"{self.text} → {self.fix}" if self.fix else self.text


# Of every kind of finding: severity, what, cause, fix; a check fills their braces.
KINDS = {name: texts for name, *texts in tables(Path(__file__).with_name("findings.md"))["Findings"]}


def finding(name: str, evidence: str, severity: Severity | None = None, **words: object) -> Finding:
    """One of the kinds of findings.md; ``severity`` where it depends on how much there is of it."""
    grave, *texts = KINDS[name]
    what, cause, fix = (text.format(**words) for text in texts)
    return Finding(name, severity or cast(Severity, grave), what, evidence, cause, fix)


@dataclass(frozen=True)
class Evidence:
    """All that is known; what is not known is empty or None, and checks that need it find nothing."""

    config: Config | None = None
    steps: Sequence[dict[str, Any]] = ()  # lines of metrics.jsonl in order
    events: Sequence[EventRecord] = ()
    samples: Mapping[int, Sequence[SampleRow]] = field(default_factory=dict)  # training responses of some steps
    skipped: Sequence[Mapping[str, Any]] = ()  # lines of skipped.jsonl
    data: Inspection | None = None  # the training files
    overlap: int = 0  # validation prompts that they hold
    trial: Trial | None = None  # the reward on known right and wrong answers
    machine: Machine | None = None  # the one that runs, or is to run, this
    died: str = ""  # in words, where the run ended without a word of its own

    @property
    def rows(self) -> list[SampleRow]:
        return [row for step in sorted(self.samples) for row in self.samples[step] if row.score is not None]

    @property
    def limits(self) -> AlarmsConfig:
        return AlarmsConfig() if self.config is None else self.config.trainer.alarms

    def series(self, name: str) -> dict[int, float]:
        """The finite values of a metric by step, the validation before training left out."""
        steps = [line for line in self.steps if line["step"]]
        return {line["step"]: value for line in steps if (value := names.number(line, name)) is not None}

    def groups(self) -> list[list[SampleRow]]:
        """The sampled responses with a score, by prompt."""
        found: dict[tuple[int, str], list[SampleRow]] = {}
        for step, row in ((step, row) for step, rows in self.samples.items() for row in rows if row.score is not None):
            found.setdefault((step, row.uid), []).append(row)
        return list(found.values())


def steps_text(where: Sequence[int]) -> str:
    """``step 4``; ``steps 4, 7 to 9``."""
    spans: list[list[int]] = []
    for step in sorted(set(where)):
        if spans and step == spans[-1][1] + 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    texts = [str(first) if first == last else f"{first} to {last}" for first, last in spans]
    return ("step " if len(set(where)) == 1 else "steps ") + few(texts)


def few(items: Sequence[str], limit: int = MAX_LISTED) -> str:
    more = len(items) - limit
    return ", ".join(items[:limit]) + (f" and {more} more" if more > 0 else "")


def course(values: Mapping[int, float]) -> str:
    """``0.5 (step 1), 0.1 (step 9)``: a metric's first and last value."""
    ends = sorted(values)[:1] + sorted(values)[1:][-1:]
    return ", ".join(f"{values[step]:.4g} (step {step})" for step in ends)


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
