"""Is the data what it should be?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from verl.diagnostics.evidence import Evidence, Finding, finding, mean

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
