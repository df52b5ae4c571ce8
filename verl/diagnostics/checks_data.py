"""Is the data what it should be?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from verl.diagnostics.evidence import Evidence, Finding, mean

SHORT_TRUTH = 4  # characters; a shorter ground truth stands in a prompt by chance, as verl data inspect has it
_INSPECT = "verl data inspect shows the rows"


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
        yield Finding(
            "truth_empty",
            "error",
            "Rows without a ground truth",
            f"{sum(empty.values())} rows: {max(empty, key=empty.__getitem__)}",
            "the answers are in another column, or were lost in a conversion",
            f"set data.answer_key; {_INSPECT}",
        )
    if other:
        yield Finding(
            "rows_unusable",
            "warning",
            "Rows that cannot be used",
            f"{sum(other.values())} rows: {max(other, key=other.__getitem__)}",
            "damaged or foreign rows",
            _INSPECT,
        )


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
        yield Finding(
            "prompts_too_long",
            "warning",
            "Many prompts do not fit the limit: they are left out or cut",
            f"{share:.0%} {of}{limit}",
            "a limit that is too short for this data",
            "raise data.max_prompt_length, or data.filter_overlong_prompts=true to leave them out on purpose",
        )


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
        yield Finding(
            "duplicates",
            "warning",
            "The same prompt stands in several rows",
            f"{found} of {total} rows repeat another ({where})",
            "files that were joined twice, or a template without its question",
            f"remove them; {_INSPECT}",
        )
    if evidence.data is not None and evidence.data.conflicting:
        yield Finding(
            "truths_conflict",
            "warning",
            "The same prompt has different ground truths",
            f"{evidence.data.conflicting} rows",
            "a question with several answers, or a mistake of the labels",
            _INSPECT,
        )
    if evidence.overlap:
        yield Finding(
            "validation_in_training",
            "warning",
            "Validation prompts stand in the training data, so validation does not measure what is new",
            f"{evidence.overlap} prompts",
            "a split made after duplicates were made, or the same file twice",
            "remove them from data.train_files",
        )


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
        yield Finding(
            "answer_in_prompt",
            "error" if found > 0.5 * total else "warning",
            "The ground truth stands in the prompt, so copying is enough",
            f"{found} of {total} prompts{where}",
            "a template that shows the answer, or a few-shot example of the same row",
            f"take it out of the prompt; {_INSPECT}",
        )


CHECKS = (unusable, too_long, duplicates, leaked)
