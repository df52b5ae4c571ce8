"""Is the policy still a language model: entropy, length, repetition?"""

from __future__ import annotations

from collections.abc import Iterator

from verl.diagnostics.evidence import Evidence, Finding, course, finding, mean, steps_text
from verl.tracking import names

NGRAM = 4


def entropy(evidence: Evidence) -> Iterator[Finding]:
    """The alarm ``trainer.alarms.entropy``."""
    limit, found = evidence.limits.entropy, evidence.series(names.ENTROPY)
    low = [step for step, value in found.items() if limit is not None and value < limit]
    if low:
        yield finding(
            "entropy_collapsed", f"entropy {course(found)} nats a token, below {limit:g} at {steps_text(low)}"
        )


def length(evidence: Evidence) -> Iterator[Finding]:
    """The alarm ``trainer.alarms.length``."""
    limit, found = evidence.limits.length, evidence.series(names.RESPONSE_LENGTH)
    start = list(found.values())[:3]
    if limit is None or len(found) < 4 or mean(start) <= 0:
        return
    usual = mean(start)
    off = [step for step, value in list(found.items())[3:] if value > limit * usual or value * limit < usual]
    if off:
        grew = found[off[-1]] > usual
        yield finding(
            "length_runaway",
            f"mean length {course(found)} tokens, more than a factor {limit:g} from the start at {steps_text(off)}",
            how="longer" if grew else "shorter",
            cause="the reward pays length, or the policy no longer ends"
            if grew
            else "the reward pays brevity, or collapse",
        )


def cut(evidence: Evidence) -> Iterator[Finding]:
    shares = evidence.series("response_length/clip_ratio")
    late = list(shares.values())[-10:]
    if late and mean(late) > 0.9:
        yield finding("responses_cut", f"{mean(late):.0%} in the last {len(late)} steps")


def repetition(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.samples:
        return
    texts = [row.response for row in evidence.samples[max(evidence.samples)]]
    long = [text for text in texts if len(text) >= 8 * NGRAM]
    looping = [text for text in long if _distinct(text) < 0.2]
    if len(looping) >= max(4, 0.3 * len(texts)):
        yield finding(
            "repetition",
            f"{len(looping)} of {len(texts)} responses of step {max(evidence.samples)}: {looping[0][-40:]!r}",
        )


def _distinct(text: str) -> float:
    """Share of the text's runs of NGRAM characters that are different ones."""
    runs = [text[i : i + NGRAM] for i in range(len(text) - NGRAM + 1)]
    return len(set(runs)) / len(runs)


CHECKS = (entropy, length, cut, repetition)
