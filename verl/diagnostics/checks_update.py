"""Advantages, KL and updates: is what trains what was configured, and the policy still a language model?"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median, stdev

from verl.diagnostics.evidence import Evidence, Finding, course, finding, mean, steps_text
from verl.tracking import names

UNEVEN = 1000.0  # times that one layer's gradient may be another's
MISMATCH = 0.02  # mean |p / q - 1| of two probabilities of one token that should be the same


def not_normalised(evidence: Evidence) -> Iterator[Finding]:
    """grpo: in each group the advantages have mean 0 and standard deviation 1; rloo: mean 0; gae: mean 0 by token."""
    algorithm = evidence.config.algorithm if evidence.config else None
    if algorithm is None:
        return
    groups = [[row.advantage for row in group if row.advantage is not None] for group in evidence.groups()]
    spread = [group for group in groups if len(group) > 1 and stdev(group) > 0]
    centred = algorithm.uses("grpo") or algorithm.uses("rloo")
    if centred and spread and median(abs(mean(group)) / stdev(group) for group in spread) > 0.05:
        off = median(mean(group) for group in spread)
        yield finding("advantages_not_centred", f"{off:.4g} in the median group", what="their mean in a group is not 0")
    normed = algorithm.uses("grpo") and algorithm.norm_adv_by_std_in_grpo
    if normed and spread and abs(median(map(stdev, spread)) - 1) > 0.05:
        what = "their standard deviation in a group is not 1"
        yield finding("advantages_not_normalised", f"{median(map(stdev, spread)):.4g} in the median group", what=what)
    means = evidence.series("critic/advantages/mean")
    if algorithm.uses("gae") and algorithm.whiten_advantages and means and max(map(abs, means.values())) > 1e-2:
        yield finding("advantages_not_normalised", course(means), what="their mean over tokens is not 0")


def scale(evidence: Evidence) -> Iterator[Finding]:
    largest = evidence.series("critic/advantages/max")
    if largest and median(largest.values()) > 20:
        yield finding("advantages_large", f"largest: {course(largest)}")


def reference_is_base(evidence: Evidence) -> Iterator[Finding]:
    """At the first step the policy is the reference, bit for bit on a CPU."""
    ratio = evidence.series("training/ref_ratio_diff_mean")
    started_here = any(event.kind == "started" for event in evidence.events)
    if started_here and ratio.get(1, 0.0) > MISMATCH:
        yield finding("reference_not_base", f"probabilities differ by {ratio[1]:.1%} on average at step 1")


def reference_is_frozen(evidence: Evidence) -> Iterator[Finding]:
    moved = evidence.series("actor/weights_moved")  # a KL over the whole vocabulary leaves no ratio
    ratio = evidence.series("training/ref_ratio_diff_mean") or evidence.series("actor/kl_loss")
    first = next((step for step, share in moved.items() if share > 0), None)
    later = {step: value for step, value in ratio.items() if first is not None and step > first}
    if later and max(later.values()) == 0:
        figures = f"no probability differs at {steps_text(list(later))}, although weights changed from step {first} on"
        yield finding("reference_moves", figures)


def reference_is_the_same(evidence: Evidence) -> Iterator[Finding]:
    """By the checksum of a sample of its weights: also where it lags behind the policy, so that a KL is left."""
    sums = evidence.series("training/ref_checksum")
    changed = [step for (_, before), (step, now) in pairwise(sums.items()) if now != before]
    if changed:
        yield finding("reference_changes", f"their checksum is another one in {steps_text(changed)}: {course(sums)}")


def kl_exploded(evidence: Evidence) -> Iterator[Finding]:
    """The alarm ``trainer.alarms.kl``."""
    limit = evidence.limits.kl
    found = {line["step"]: kl for line in evidence.steps if line["step"] and (kl := names.kl(line)) is not None}
    over = [step for step, (_, value) in found.items() if limit is not None and value > limit]
    if over:
        label, value = max((found[step] for step in over), key=lambda pair: pair[1])
        figures = f"{label} up to {value:.3g} nats a token, more than {limit:g} ({steps_text(over)})"
        yield finding("kl_exploded", figures)


def kl_dominates(evidence: Evidence) -> Iterator[Finding]:
    """The KL term against what the reward has to say."""
    low, high = evidence.series("critic/score/min"), evidence.series("critic/score/max")
    spread = {step: high[step] - low[step] for step in low.keys() & high.keys()}
    scores, rewards = evidence.series(names.REWARD), evidence.series("critic/rewards/mean")
    shaped = evidence.config is not None and evidence.config.reward.shapes
    in_reward = {} if shaped else {step: scores[step] - rewards[step] for step in scores.keys() & rewards.keys()}
    penalised = "actor/reward_kl_penalty" in {name for line in evidence.steps for name in line}
    heavy = [step for step, size in in_reward.items() if penalised and spread.get(step) and size > spread[step]]
    loss, config = evidence.series("actor/kl_loss"), evidence.config
    coefficient = config.actor.kl_loss_coef if config is not None and config.actor.use_kl_loss else 0.0
    heavy += [step for step, value in loss.items() if coefficient * value > 1.0]
    if len(heavy) > 0.3 * max(len(scores), 1):
        yield finding(
            "kl_dominates",
            f"penalty a response {course(in_reward)}, spread of the scores {course(spread)}"
            if penalised
            else f"coefficient x KL: {coefficient * max(loss.values()):.3g}, advantages are about 1",
        )


def learning_rate(evidence: Evidence) -> Iterator[Finding]:
    rates = evidence.series("actor/lr")
    if len(rates) >= 2 and max(rates.values()) == 0:
        yield finding("lr_zero", f"in all of {steps_text(list(rates))}")


def no_gradient(evidence: Evidence) -> Iterator[Finding]:
    total = evidence.series(names.GRAD_NORM)
    trained = [step for step, value in total.items() if value > 0]
    if total and not trained and len(total) >= 2:
        yield finding("no_gradient", f"in all of {steps_text(list(total))}")
    prefix = f"{names.GRAD_NORM}/"
    parts = {name for line in evidence.steps for name in line if name.startswith(prefix)}
    for name in sorted(parts):
        if trained and not any(evidence.series(name).get(step, 0.0) > 0 for step in trained):
            figures = f"{name} is 0 in {steps_text(trained)}, the whole norm {course(total)}"
            yield finding("part_without_gradient", figures, part=name.removeprefix(prefix))
    least, most = (evidence.series(f"actor/layer_grad_norm/{end}") for end in ("min", "max"))
    known = [step for step in trained if step in least and most.get(step)]
    if known and not any(least[step] for step in known):
        figures = f"the least of the layers' norms is 0 in {steps_text(known)}, the largest {course(most)}"
        yield finding("layer_without_gradient", figures)
    elif known and (apart := median(most[step] / max(least[step], 1e-30) for step in known)) > UNEVEN:
        figures = f"the largest of the layers' norms is {apart:.3g} times the least in the median step"
        yield finding("layers_uneven", figures)


def weights_move(evidence: Evidence) -> Iterator[Finding]:
    moved, rates = evidence.series("actor/weights_moved"), evidence.series("actor/lr")
    meant = {step: share for step, share in moved.items() if rates.get(step, 0.0) > 0}
    if meant and mean(list(meant.values())) < 0.1:
        figures = f"{mean(list(meant.values())):.1%} of the watched weights changed in {steps_text(list(meant))}"
        yield finding("weights_unmoved", figures)


def clipped_away(evidence: Evidence) -> Iterator[Finding]:
    norms, config = [value for value in evidence.series(names.GRAD_NORM).values() if value > 0], evidence.config
    if norms and config is not None and median(norms) > 20 * config.actor.grad_clip:
        figures = f"gradient norm {median(norms):.3g} in the median, actor.grad_clip={config.actor.grad_clip:g}"
        yield finding("gradient_clipped_away", figures)


def gradient_exploded(evidence: Evidence) -> Iterator[Finding]:
    """The alarm ``trainer.alarms.grad_norm``."""
    limit, norms = evidence.limits.grad_norm, evidence.series(names.GRAD_NORM)
    values, steps = list(norms.values()), list(norms)
    over = [
        i
        for i in range(3, len(values))
        if limit is not None and values[i] > limit * (usual := median(values[:i])) and usual > 0
    ]
    if over:
        yield finding(
            "gradient_exploded",
            f"{values[over[0]]:.3g} at step {steps[over[0]]}, {median(values[: over[0]]):.3g} in the median before",
        )


def clip_fraction(evidence: Evidence) -> Iterator[Finding]:
    late = list(evidence.series("actor/pg_clipfrac").values())[-10:]
    if late and mean(late) > 0.3:
        yield finding("policy_clipped", f"actor/pg_clipfrac {mean(late):.0%} in the last {len(late)} steps")


def ratio_one(evidence: Evidence) -> Iterator[Finding]:
    """Old log-probs are those of the weights at the first mini-batch, unless the engine's stand in for them."""
    config = evidence.config
    ratio = evidence.series("training/first_ratio_diff_mean")
    if not ratio or next(engine_mismatch(evidence), None):
        return  # the same trouble, seen closer there
    if config is not None and config.engine_log_probs:
        return
    if mean(list(ratio.values())) > MISMATCH:
        yield finding("ratio_not_one", f"off by {mean(list(ratio.values())):.1%} on average ({course(ratio)})")


def engine_mismatch(evidence: Evidence) -> Iterator[Finding]:
    """Engine and trainer on the same tokens and weights: by when and how they differ, what differs."""
    ratio = evidence.series("training/rollout_ratio_diff_mean")
    stale = evidence.series("training/staleness/max")
    fresh = {step: value for step, value in ratio.items() if not stale.get(step)}
    if not fresh or max(fresh.values()) <= MISMATCH:
        return
    alike = list(evidence.series("training/rollout_actor_probs_pearson_corr").values())
    figures = f"probabilities of the sampled tokens differ by {course(fresh)} on average"
    figures += f", correlation {mean(alike):.2f}" if alike else ""
    first = min(fresh)
    if fresh[first] <= MISMATCH:
        yield finding("engine_weights_stale", figures)
    else:
        yield finding("tokens_misaligned" if alike and mean(alike) < 0.5 else "engine_differs", figures)


def untrained_tokens(evidence: Evidence) -> Iterator[Finding]:
    share, last = evidence.series("training/trained_share"), evidence.series("training/last_token_trained")
    if not share or max(share.values()) > 0.9999:
        return
    lengths = evidence.series(names.RESPONSE_LENGTH)
    lost = (1 - mean(list(share.values()))) * mean(list(lengths.values()) or [0.0])  # tokens a response
    at_the_end = last and 1 - mean(list(last.values())) > 0.9 * lost
    yield finding(
        "eos_not_trained" if at_the_end else "tokens_not_trained",
        f"{mean(list(share.values())):.1%} of the sampled tokens train"
        + (f", {mean(list(last.values())):.1%} of the last ones" if last else ""),
    )


NGRAM = 4


def entropy(evidence: Evidence) -> Iterator[Finding]:
    """The alarm ``trainer.alarms.entropy``."""
    limit, found = evidence.limits.entropy, evidence.series(names.ENTROPY)
    low = [step for step, value in found.items() if limit is not None and value < limit]
    if low:
        figures = f"entropy {course(found)} nats a token, below {limit:g} at {steps_text(low)}"
        yield finding("entropy_collapsed", figures)


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
    late = list(evidence.series("response_length/clip_ratio").values())[-10:]
    if late and mean(late) > 0.9:
        yield finding("responses_cut", f"{mean(late):.0%} in the last {len(late)} steps")


def repetition(evidence: Evidence) -> Iterator[Finding]:
    if not evidence.samples:
        return
    texts = [row.response for row in evidence.samples[max(evidence.samples)]]
    long = [text for text in texts if len(text) >= 8 * NGRAM]
    looping = [text for text in long if _distinct(text) < 0.2]
    if len(looping) >= max(4, 0.3 * len(texts)):
        figures = f"{len(looping)} of {len(texts)} responses of step {max(evidence.samples)}: {looping[0][-40:]!r}"
        yield finding("repetition", figures)


def _distinct(text: str) -> float:
    """Share of the text's runs of NGRAM characters that are different ones."""
    runs = [text[i : i + NGRAM] for i in range(len(text) - NGRAM + 1)]
    return len(set(runs)) / len(runs)
