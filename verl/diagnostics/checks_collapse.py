"""Is the policy still a language model: entropy, length, repetition?"""

from __future__ import annotations

from collections.abc import Iterator

from verl.diagnostics.evidence import Evidence, Finding, course, mean, steps_text
from verl.tracking import names

NGRAM = 4


def entropy(evidence: Evidence) -> Iterator[Finding]:
    """The alarm ``trainer.alarms.entropy``."""
    limit, found = evidence.limits.entropy, evidence.series(names.ENTROPY)
    low = [step for step, value in found.items() if limit is not None and value < limit]
    if low:
        yield Finding(
            "entropy_collapsed",
            "error",
            "The policy has collapsed: it always says the same",
            f"entropy {course(found)} nats a token, below {limit:g} at {steps_text(low)}",
            "a learning rate that is too high, clipping that favours what is likely already, too little data",
            "lower actor.optim.lr, raise actor.clip_ratio_high or actor.entropy_coeff, use a KL term",
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
        yield Finding(
            "length_runaway",
            "warning",
            f"Responses became {'much longer' if grew else 'much shorter'} than they were",
            f"mean length {course(found)} tokens, more than a factor {limit:g} from the start at {steps_text(off)}",
            "the reward pays length, or the policy no longer ends" if grew else "the reward pays brevity, or collapse",
            "look at the samples; mask or penalise length (reward.overlong_buffer, algorithm.mask_truncated)",
        )


def cut(evidence: Evidence) -> Iterator[Finding]:
    shares = evidence.series("response_length/clip_ratio")
    late = list(shares.values())[-10:]
    if late and mean(late) > 0.9:
        yield Finding(
            "responses_cut",
            "warning",
            "Nearly all responses are cut at the length limit",
            f"{mean(late):.0%} in the last {len(late)} steps",
            "data.max_response_length too short, a model that does not end (a base model, a wrong end token)",
            "raise data.max_response_length, or name the end with rollout.stop or rollout.stop_token_ids",
        )


def repetition(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.samples:
        return
    texts = [row.response for row in evidence.samples[max(evidence.samples)]]
    long = [text for text in texts if len(text) >= 8 * NGRAM]
    looping = [text for text in long if _distinct(text) < 0.2]
    if len(looping) >= max(4, 0.3 * len(texts)):
        yield Finding(
            "repetition",
            "warning",
            "Responses repeat themselves",
            f"{len(looping)} of {len(texts)} responses of step {max(evidence.samples)}: {looping[0][-40:]!r}",
            "collapse, or a reward that pays it",
            "go on from an earlier checkpoint; pay repetition off in the reward (rule repetition)",
        )


def _distinct(text: str) -> float:
    """Share of the text's runs of NGRAM characters that are different ones."""
    runs = [text[i : i + NGRAM] for i in range(len(text) - NGRAM + 1)]
    return len(set(runs)) / len(runs)


CHECKS = (entropy, length, cut, repetition)
