"""What went wrong on the way: the run stopped, responses unscored, workers died; and is the data what it should be?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from verl.diagnostics.evidence import MAX_LISTED, Evidence, Finding, few, finding, mean, steps_text
from verl.json_lines import json_line
from verl.run_dir import EventRecord
from verl.tracking import names
from verl.tracking.facts import LIFE, last_of_life, why_stopped, words

# Counters of a step that should be zero, by finding: what it means and what it usually comes from.
_COUNTERS = {
    "reward/failed": ("reward_failed", "Responses not scored, the reward function raised an error"),
    "reward/invalid": ("reward_invalid", "Responses not scored, the reward function returned no usable number"),
    "actor/skipped_steps": ("steps_skipped", "Optimizer steps of the actor skipped, the gradient was not finite"),
    "critic/skipped_steps": ("steps_skipped", "Optimizer steps of the critic skipped, the gradient was not finite"),
    "train/skipped_steps": ("steps_skipped", "Optimizer steps skipped, the gradient was not finite"),
}
_ADVICE = {
    "reward_failed": ("an exception or a time-out in the reward", "verl reward test shows which responses and why"),
    "reward_invalid": ("the function returns NaN, text or nothing", "return a number, a dict with score, or None"),
    "steps_skipped": ("a learning rate too high, or broken inputs", "lower the learning rate, see docs/training.md"),
}


def stopped(evidence: Evidence) -> Iterator[Finding]:
    last = last_of_life(evidence.events)
    if last is None or last.kind != "stopped":
        return
    after = f" after step {last.step}" if last.step is not None else ""
    yield finding("stopped", why_stopped(last) if last.detail else "no reason noted", after=after)


def died(evidence: Evidence) -> Iterator[Finding]:
    if evidence.died:
        yield finding("died", evidence.died)


def counters(evidence: Evidence) -> Iterator[Finding]:
    yield from _counted(evidence.steps, _COUNTERS)


def skipped_updates(steps: Sequence[dict[str, Any]]) -> list[str]:
    """A sentence for each role that left out optimizer steps; without one, what the run learnt is not in doubt."""
    found = _counted(steps, [name for name in _COUNTERS if name.endswith("/skipped_steps")])
    return [finding.text for finding in found]


def _counted(steps: Sequence[dict[str, Any]], counters: Iterable[str]) -> Iterator[Finding]:
    for counter in counters:
        counts = {line["step"]: value for line in steps if (value := names.number(line, counter))}
        if counts:
            name, what = _COUNTERS[counter]
            evidence = f"{sum(counts.values()):g} ({steps_text(list(counts))})"
            yield Finding(name, "warning", what, evidence, *_ADVICE[name])


def not_finite(evidence: Evidence) -> Iterator[Finding]:
    """``metrics.jsonl`` holds null for a number that was not finite."""
    nulls: dict[str, list[int]] = {}
    for line in evidence.steps:
        for name, value in line.items():
            if value is None:
                nulls.setdefault(name, []).append(line["step"])
    by_steps: dict[tuple[int, ...], list[str]] = {}
    for name, where in nulls.items():
        by_steps.setdefault(tuple(where), []).append(name)
    for steps, found in by_steps.items():
        yield finding("not_finite", f"{few(found, MAX_LISTED)} ({steps_text(steps)})")


def trouble(evidence: Evidence) -> Iterator[Finding]:
    """Events of every other kind that tell of trouble; what an alarm was raised for, its own check finds."""
    seen_in_metrics = {name for line in evidence.steps for name, value in line.items() if value is None}
    by_kind: dict[str, list[EventRecord]] = {}
    for event in evidence.events:
        if event.kind in (*LIFE, "alarm", "skipped", "user_code"):
            continue
        if not (event.kind == "metric_not_finite" and event.subject in seen_in_metrics):
            by_kind.setdefault(event.kind, []).append(event)
    for kind, group in by_kind.items():
        where = [event.step for event in group if event.step is not None]
        times = f" {len(group)} times" if len(group) > 1 else ""
        subjects = few(list(dict.fromkeys(event.subject for event in group if event.subject)), 3)
        detail = group[0].detail if len(group) == 1 else ""
        detail = f", {detail if isinstance(detail, str) else json_line(detail)}"[:202] if detail else ""
        what = f"{words(kind).capitalize()}{times}" + (f" ({steps_text(where)})" if where else "")
        yield Finding(kind, "warning", what, subjects + detail, "", "events.log has all of it, with times")


SHORT_TRUTH = 4  # characters; a shorter ground truth stands in a prompt by chance, as verl data inspect has it


def unusable(evidence: Evidence) -> Iterator[Finding]:
    """Rows that training leaves out, by what is wrong with them."""
    reasons: Counter[str] = Counter()
    for row in evidence.skipped:
        reasons[str(row.get("reason"))] += 1
    if not evidence.skipped and evidence.data is not None:
        reasons.update({reason: count.rows for reason, count in evidence.data.bad.items()})
    empty = {reason: count for reason, count in reasons.items() if "ground truth" in reason}
    other = {reason: count for reason, count in reasons.items() if reason not in empty}
    if empty:
        yield finding("truth_empty", f"{sum(empty.values())} rows: {max(empty, key=empty.__getitem__)}")
    if other:
        yield finding("rows_unusable", f"{sum(other.values())} rows: {max(other, key=other.__getitem__)}")


def too_long(evidence: Evidence) -> Iterator[Finding]:
    found, config = evidence.data, evidence.config
    shares = list(evidence.series("prompt_length/clip_ratio").values())
    if found is not None and found.lengths is not None and found.lengths.over and found.usable:
        share, of = found.lengths.over / found.usable, f"of {found.usable} prompts"
    elif shares:
        share, of = mean(shares), f"of the prompts of {len(shares)} steps fill the limit"
    else:
        return
    if share > 0.05:
        limit = f" (data.max_prompt_length={config.data.max_prompt_length})" if config else ""
        yield finding("prompts_too_long", f"{share:.0%} {of}{limit}")


def duplicates(evidence: Evidence) -> Iterator[Finding]:
    if evidence.data is not None:
        found, total = evidence.data.duplicates, evidence.data.usable
        where = " and ".join(evidence.data.duplicate_places[0]) if evidence.data.duplicate_places else ""
    else:
        prompts: dict[str, str] = {}  # of each row of the data
        for rows in evidence.samples.values():
            prompts |= {":".join(row.uid.split(":")[2:]): row.prompt for row in rows}
        found, total, where = len(prompts) - len(set(prompts.values())), len(prompts), "among the sampled prompts"
    if found > 0.02 * total:
        yield finding("duplicates", f"{found} of {total} rows repeat another ({where})")
    if evidence.data is not None and evidence.data.conflicting:
        yield finding("truths_conflict", f"{evidence.data.conflicting} rows")
    if evidence.overlap:
        yield finding("validation_in_training", f"{evidence.overlap} prompts")


def leaked(evidence: Evidence) -> Iterator[Finding]:
    if evidence.data is not None:
        count = evidence.data.suspicious.get("the ground truth stands in the prompt")
        found, total = (count.rows if count else 0), evidence.data.usable
        where = f", first {count.places[0]}" if count else ""
    else:
        rows = [row for found in evidence.samples.values() for row in found if row.index == 0]
        held = [row for row in rows if isinstance(row.ground_truth, str) and len(row.ground_truth) >= SHORT_TRUTH]
        inside = [row for row in held if re.search(rf"(?<!\w){re.escape(row.ground_truth.strip())}(?!\w)", row.prompt)]
        found, total, where = len(inside), len(rows), " among the sampled ones"
    if total and found > 0.05 * total:
        figures = f"{found} of {total} prompts{where}"
        yield finding("answer_in_prompt", figures, severity="error" if found > 0.5 * total else "warning")
