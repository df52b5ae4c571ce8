"""Every metric that a run can log: what it means, how it is computed, what is healthy, and what to do when it is not.

``docs/metrics.md`` is generated from this table (``verl metrics reference``), the report and ``verl metrics explain``
read it, and a test fails on a logged name that it lacks and on a row that nothing logs.
"""

from __future__ import annotations

import itertools
import re
from functools import cache
from typing import NamedTuple

PARTS_OF = re.compile(r"(\{[^}]*\}|<[^>]*>)")


class Row(NamedTuple):
    """A metric or a family of them.

    Attributes:
        name: ``{a,b}`` stands for a or b, ``<x>`` for any text.
        formula: over what it is a mean or sum, and of what.
        healthy: values that need no thought.
        otherwise: what to do about other values.
    """

    name: str
    meaning: str
    formula: str
    unit: str
    healthy: str = "any"
    otherwise: str = ""

    @property
    def pattern(self) -> re.Pattern[str]:
        return pattern_of(self.name)


@cache
def pattern_of(name: str) -> re.Pattern[str]:
    """What names a row's name stands for."""
    return re.compile("".join(_part(part) for part in PARTS_OF.split(name)), re.DOTALL)


def _part(part: str) -> str:
    if part.startswith("{"):
        return "(?:" + "|".join(map(re.escape, part[1:-1].split(","))) + ")"
    return ".+" if part.startswith("<") else re.escape(part)


def row_of(name: str) -> Row | None:
    """The row of a logged metric, None for a name that no part of VeRL logs."""
    return next((row for rows in TABLE.values() for row in rows if row.pattern.fullmatch(name)), None)


def names() -> list[str]:
    """Every name, ``{a,b}`` written out, ``<x>`` as it is."""
    found = []
    for row in (row for rows in TABLE.values() for row in rows):
        choices = [part[1:-1].split(",") if part.startswith("{") else [part] for part in PARTS_OF.split(row.name)]
        found += ["".join(parts) for parts in itertools.product(*choices)]
    return found


_TRIO = "{mean,max,min}"
_MODEL_PARTS = "{gen,old_log_prob,ref,values,update_critic,update_actor}"
_SCORES = "over the responses that were scored"

REWARDS = (
    Row(f"critic/score/{_TRIO}", "What the reward function said, before any shaping and KL penalty: the curve to watch.",
        f"score, {_SCORES}", "score", "the mean rises, within the reward's range",
        "Flat: look at training/frac_reward_zero_std, actor/lr and actor/grad_norm. Falling: raise the KL coefficient or "
        "lower the learning rate. Rising while val-core does not: read samples, the reward is being gamed."),
    Row("critic/score/std", "Spread of the scores.", f"population standard deviation, {_SCORES}", "score", "above 0",
        "0: all responses got one score and nothing can be learnt; check the reward function with verl reward test."),
    Row(f"critic/rewards/{_TRIO}", "The score after shaping and KL penalty: what the advantages are made of.",
        f"sum of the token rewards of a response, {_SCORES}", "score", "close to critic/score",
        "Far below the score: the KL penalty or the length penalty outweighs the reward; lower its coefficient."),
    Row(f"critic/reward/<reward>/{_TRIO}", "Each of several rewards, before its weight.",
        "over the responses that it scored", "score", "each rises or holds",
        "One rises at another's cost: change reward.functions.*.weight."),
    Row(f"critic/advantages/{_TRIO}", "How much better a token's response was than expected.", "over trained tokens",
        "score (normalised: deviations)", "mean near 0, extremes within about 5",
        "All 0: no group has spread. Extremes far out: check for outlier rewards, set reward.clip."),
    Row(f"critic/returns/{_TRIO}", "What the critic is taught; without a critic, the advantages.", "over trained tokens",
        "score"),
    Row(f"critic/values/{_TRIO}", "What the critic predicted.", "over trained tokens", "score",
        "within the range of the returns", "Outside it: lower critic.optim.lr, or warm the critic up (trainer.critic_warmup)."),
    Row("critic/baseline/mean", "ReMax: score of the greedy response.", f"after shaping, {_SCORES}", "score", "rises", "As critic/score."),
    Row("training/frac_reward_zero_std", "Groups that teach nothing by comparison.",
        "groups whose scores are all equal / groups with a score", "share", "below 0.5",
        "High at the start: prompts too hard or rollout.n too small. High at the end: prompts too easy. Use the preset dapo "
        "(algorithm.filter_groups) or other prompts."),
    Row("training/reward_std_in_group", "How far the rewards of one prompt's responses lie apart.",
        "standard deviation (n - 1) in each group of at least 2, mean over responses", "score", "above 0",
        "Falling to 0 with a low score: exploration is gone; raise the temperature or the entropy bonus."),
    Row("reward/{scored,none,invalid,failed,empty}",
        "What became of the responses: a score, None on purpose, no usable number, an error, nothing to score.",
        "count in the step", "responses", "all scored, invalid and failed 0",
        "The report lists reasons beside the samples; try the function with verl reward test."),
    Row("reward/<reward>/{scored,none,invalid,failed,empty}", "The same for each of several rewards.",
        "count in the step", "responses", "invalid and failed 0", "As above."),
    Row("reward/baseline_unscored", "ReMax: greedy responses that could not be scored; their prompts train nothing.",
        "count in the step", "prompts", "0", "As reward/failed."),
    Row("reward/scale", "What scores are divided by (reward.scaling).", "standard deviation: of the batch, or running",
        "score", "steady", "Near 0: the rewards have no spread, scaling blows noise up; turn it off."),
    Row("reward/clip_ratio", "Scores that reward.clip changed.", f"share, {_SCORES}", "share", "below 0.1",
        "Higher: widen reward.clip."),
    Row("reward/length_factor", "Factor of reward.length_normalization.", f"mean, {_SCORES}", "factor"),
    Row("reward/length_penalty", "Taken off by reward.length_penalty.", f"mean, {_SCORES}", "score", "small beside the score",
        "Lower reward.length_penalty."),
    Row("reward/overlong_penalty", "Taken off by reward.overlong_buffer.", f"mean, {_SCORES}", "score",
        "goes to 0", "Growing: responses run to their limit; raise data.max_response_length or the penalty factor."),
    Row("reward/overlong_ratio", "Responses inside the overlong buffer.", f"share, {_SCORES}", "share", "goes to 0", "As above."),
    Row("filter_groups/{gen_batches,drawn,flat,kept,surplus}",
        "Dynamic sampling: batches sampled, and what became of their groups (drawn = kept + flat + surplus).",
        "count in the step", "batches, groups", "gen_batches of 1 to 3",
        "Many batches: most groups have no spread; prompts are too easy or too hard, or rollout.n is small."),
    Row("filter_groups/score", "Mean score before any group was dropped; critic/score is of the groups kept.",
        "mean over all scored responses", "score", "rises", "As critic/score."),
)  # fmt: skip

POLICY = (
    Row("actor/pg_loss", "Policy loss.", "actor.loss_agg_mode over trained tokens", "loss", "near 0; it need not fall",
        "It is no measure of progress: watch critic/score."),
    Row("actor/ppo_kl", "How far the update has moved from the policy that sampled.",
        "mean of old - current log-prob over trained tokens (k1)", "nats a token",
        "0 with one update a batch, else below 0.05", "Lower the learning rate, ppo_epochs or the number of mini-batches."),
    Row("actor/pg_clipfrac", "Tokens held by the clip (or masked, in the losses that mask).", "share of trained tokens",
        "share", "0 with one update a batch, else below 0.2", "Lower the learning rate, or widen clip_ratio_high."),
    Row("actor/pg_clipfrac_lower", "Tokens held by the dual clip.", "share of trained tokens", "share", "near 0",
        "Large ratios on bad tokens: lower the learning rate."),
    Row("actor/cov_frac", "Losses clip_cov and kl_cov: tokens chosen for their covariance.", "share of trained tokens",
        "share"),
    Row("actor/behave_imp_weight", "Loss decoupled: weight of old over rollout policy.", "mean over trained tokens",
        "ratio", "0.9 to 1.1", "Too stale: lower trainer.max_staleness."),
    Row("actor/entropy", "How open the policy's next-token distribution is.", "mean over trained tokens", "nats a token",
        "falls slowly, stays above about 0.1", "Collapsing: raise actor.entropy_coeff or clip_ratio_high. Exploding: lower "
        "the learning rate."),
    Row("actor/kl_loss", "KL to the reference, as it stands in the loss.",
        "actor.kl_loss_type, aggregated as the loss, before its coefficient", "nats a token", "below about 0.5",
        "Growing fast: raise actor.kl_loss_coef or lower the learning rate. 0 throughout: is the reference the policy "
        "itself?"),
    Row("actor/reward_kl_penalty", "KL to the reference, as it is taken off the reward.",
        "mean over a response's trained tokens (algorithm.kl_penalty), then over responses", "nats a token",
        "near algorithm.kl_ctrl.target_kl where that is adaptive", "Raise algorithm.kl_ctrl.kl_coef."),
    Row("actor/reward_kl_penalty_coeff", "Coefficient of that penalty.", "algorithm.kl_ctrl", "factor"),
    Row("{actor,critic,train}/grad_norm", "Gradient before clipping.", "2-norm, mean over the step's optimizer steps",
        "norm", "steady; rarely above grad_clip", "Spikes: lower the learning rate, look at outlier rewards. 0: no group has "
        "spread, or everything is masked."),
    Row("{actor,critic,train}/grad_norm/{embedding,attention,mlp,head,norms_and_biases}",
        "The part of the gradient in a part of the model.", "squares add up to that of grad_norm", "norm", "no part is all of it",
        "One part alone: is a layer broken, or frozen?"),
    Row("{actor,critic,train}/layer_grad_norm/{min,max}", "Gradient of the layer that has least, and of that which has most.",
        "2-norm over a layer's parameters, mean over the step's optimizer steps", "norm", "within a factor of some ten",
        "min at 0: a layer is frozen or cut off. Far apart: gradients vanish or explode on their way through the layers."),
    Row("{actor,critic,train}/lr", "Learning rate.", "schedule of optim", "rate", "above 0 after warm-up",
        "0: actor.optim.lr, lr_warmup_steps, or the schedule has ended."),
    Row("{actor,critic,train}/skipped_steps", "Optimizer steps left out, the gradient was not finite.", "count in the step",
        "optimizer steps", "0; with float16 a few at the start", "Lower the learning rate; use bfloat16; go on from an earlier "
        "checkpoint."),
    Row("{actor,critic,train}/weights_moved", "How many of the watched weights an optimizer step changed.",
        "share of a sample of weights, mean over optimizer steps", "share", "near 1; less in bfloat16", "0: learning rate 0, gradient 0, or updates below the precision."),
    Row("{actor,critic,train}/loss_scale", "float16: what the loss is multiplied by.", "model.fp16", "factor",
        "settles, stays above 1", "Falling to 1: gradients overflow; use bfloat16."),
    Row("actor/{clip_ratio_low,clip_ratio_high,entropy_coeff,kl_loss_coef}",
        "This step's value of a coefficient that has a schedule.", "actor.*_schedule", "factor"),
)  # fmt: skip

CRITIC = (
    Row("critic/vf_loss", "Loss of the critic.", "half the squared error, clipped, over trained tokens", "score squared",
        "falls, then follows the reward", "Growing: lower critic.optim.lr."),
    Row("critic/vf_clipfrac", "Values that moved farther than critic.cliprange_value.", "share of trained tokens", "share",
        "below 0.2", "Widen cliprange_value or lower critic.optim.lr."),
    Row("critic/vpred_mean", "Mean prediction during the update.", "mean over trained tokens", "score", "near critic/returns/mean", "As critic/values."),
    Row("critic/vf_explained_var", "How much of the returns' spread the critic explains.",
        "1 - Var(return - value) / Var(return), before the update", "share", "rises above 0",
        "Below 0 for long: warm the critic up (trainer.critic_warmup), raise critic.optim.lr."),
)  # fmt: skip

ENGINE = (
    Row("training/rollout_probs_diff_{mean,max,std}",
        "Distance of the engine's probabilities of the sampled tokens from the trainer's, before the first update.",
        "absolute difference of the probabilities, over trained tokens", "probability", "0 on a CPU, mean below 0.01 elsewhere",
        "Above it engine and trainer are two policies: same dtype? Use algorithm.rollout_correction."),
    Row("training/rollout_actor_probs_pearson_corr", "The same as a correlation.",
        "Pearson's, of both probabilities, over trained tokens", "correlation", "above 0.99", "As above."),
    Row("training/{rollout,first,ref}_ratio_diff_mean",
        "Distance from 1 of the ratio of the trainer's probability to the engine's, the old policy's and the reference's, before "
        "the first update.", "mean of |ratio - 1| over trained tokens", "ratio",
        "rollout: 0 on a CPU; first: 0 unless stale; ref: 0 at the first step, then growing slowly",
        "first above 0 in sync: old log-probs are not those of the policy. ref at 0 for ever: the reference moves along."),
    Row("training/ref_checksum", "Sum of a sample of the reference's weights.", "up to 16 numbers of each parameter", "sum",
        "the same in every step, also after a restart", "It changes: something trains or replaces the reference."),
    Row("rollout_corr/{kl,k3_kl}", "KL of the rollout policy from the trainer's.", "k1 and k3, mean over trained tokens",
        "nats a token", "below 0.01", "Lower trainer.max_staleness, or correct by importance weights."),
    Row("rollout_corr/rollout_is/{mean,max,min}", "Importance weights.", "over trained tokens, before rejection", "ratio",
        "mean 0.9 to 1.1", "Far from 1: too stale, or the engine differs."),
    Row("rollout_corr/rollout_is_eff_sample_size", "Tokens that the weights leave, so to say.",
        "(sum w)^2 / (n sum w^2) (Kish)", "share", "above 0.5", "Lower: few tokens decide; reduce staleness."),
    Row("rollout_corr/rollout_is_{clipped,masked}_frac", "Weights cut at, or masked beyond, the threshold.",
        "share of trained tokens", "share", "below 0.05", "Reduce staleness, or raise rollout_is_threshold."),
    Row("rollout_corr/{rollout_rs_masked_frac,rollout_rs_seq_masked_frac}",
        "Tokens, and responses with a token, that rejection took out.", "share of trained tokens; of responses", "share",
        "below 0.1", "Reduce staleness, or raise rollout_rs_threshold."),
    Row("training/staleness/{requeued,dropped}", "async: groups sampled again for being too old, and groups given up.",
        "count since the batch before", "groups", "a small share of the batch", "Lower trainer.max_staleness no further; speed "
        "training up, or take rollout workers away."),
    Row("training/staleness/dropped_tokens", "async: tokens sampled and not trained for being too old.",
        "count since the batch before", "tokens", "a small share of perf/total_num_tokens", "As above."),
    Row("training/lost_groups", "async: groups all of whose responses were lost with their workers.",
        "count since the batch before", "groups", "0", "events.log says which worker died and why."),
    Row("training/staleness/{mean,max}", "Updates between a response's oldest token and its training.", "over responses",
        "weight versions", "0 in sync, at most 1 in one_step_off, max_staleness in async", "Lower trainer.max_staleness."),
    Row("perf/prefix_sharing/{actor,critic}",
        "Gain of computing a group's prompt once in the update.",
        "tokens of all rows, each whole / tokens computed", "factor", "at least 1; near rollout.n for long prompts",
        "1 with rollout.n above 1: actor.prefix_sharing, or micro-batches too small to hold a group."),
    Row("rollout/{waiting,active}", "Requests queued and decoding in the engines, at the end of the step.", "count",
        "requests", "0 unless sampling goes on beside training",
        "waiting grows beside training: rollout is ahead; give training more, or lower trainer.max_staleness."),
    Row("rollout/workers", "Rollout workers at work.", "count at the end of the step", "workers", "as many as asked for",
        "events.log says who died and why."),
    Row("rollout/idle_share", "Share of the time in which a rollout worker had nothing to do.", "mean over workers", "share",
        "below 0.2", "Train faster, or take workers away (verl scale)."),
    Row("rollout/queue_wait", "Longest wait of a request in the queue.", "since the step before", "seconds", "steady",
        "Growing: more rollout workers (verl scale, rollout.max_workers)."),
    Row("rollout/{retried,late,lost}", "Attempts repeated, answers that came too late, responses given up.",
        "count in the step", "responses", "0", "events.log says which worker died or hung; rollout.worker_timeout."),
    Row("rollout/prefix_reuse", "Prompt tokens whose keys and values were there already: of the same group, or cached.",
        "share of all prompt tokens sampled from, validation included", "share", "near 1 - 1 / rollout.n",
        "0 with rollout.n above 1: groups are torn apart; raise rollout.max_num_seqs."),
    Row("rollout/preemptions", "Responses that gave their memory back and were computed again.", "count in the step",
        "responses", "0", "Raise rollout.kv_cache_gb or lower rollout.max_num_seqs."),
    Row("rollout/kv_blocks_used", "Key-value memory in use at the end of the step.", "blocks used / blocks", "share"),
)  # fmt: skip

LENGTHS = (
    Row(f"response_length/{_TRIO}", "Tokens of a response.", "over responses", "tokens", "no sudden change",
        "Growing without score: add a length penalty. Collapsing: the reward favours short answers; read samples."),
    Row("response_length/clip_ratio", "Responses cut at their limit.", "share of responses", "share", "below 0.1",
        "Raise data.max_response_length, or punish overlong responses (reward.overlong_buffer)."),
    Row("training/trained_share", "Tokens that train.", "share of the scored responses' tokens", "share",
        "1 without tools and masks", "Lower than meant: the response mask leaves tokens out."),
    Row("training/last_token_trained", "Responses whose last token trains.", "share of scored responses", "share", "1",
        "Below 1: the mask is shifted, and the model never learns to end."),
    Row("response_length/cap", "Longest response allowed in this step (rollout.response_length).", "tokens", "tokens"),
    Row(f"prompt_length/{_TRIO}", "Tokens of a prompt.", "over responses", "tokens"),
    Row("prompt_length/clip_ratio", "Prompts that fill data.max_prompt_length.", "share of responses", "share", "0",
        "They may be cut: raise data.max_prompt_length or set data.truncation=error."),
)  # fmt: skip

VALIDATION = (
    Row("val-core/<source>/{acc,reward}/mean@<n>", "Held-out score of a data source: the mean of n responses a prompt.",
        "over scored responses", "score", "rises with critic/score",
        "Falls while critic/score rises: overfitting or a gamed reward; read samples, stop earlier."),
    Row("val-core/<source>/{acc,reward}/best@<n>", "Expected best of n.", "pass@k estimator, mean over prompts", "score",
        "above mean@n", "Falls while mean@n rises: diversity is lost."),
    Row("val-core/<source>/{acc,reward}/maj@<n>", "Score of the most frequent answer of n.", "mean over prompts", "score"),
)  # fmt: skip

SUPERVISED = (
    Row("{train,val}/loss", "sft: negative log-prob. reward model: Bradley-Terry loss.",
        "mean over trained tokens; over pairs", "nats; loss", "falls; val follows train",
        "val rises while train falls: overfitting; fewer epochs."),
    Row("{train,val}/accuracy", "reward model: pairs whose chosen answer scores higher.", "share of pairs, a tie half",
        "share", "0.6 to 0.95", "0.5: nothing learnt. 1.0: the pairs give themselves away (length?)."),
    Row("{train,val}/{score_chosen,score_rejected}", "reward model: scores of better and worse answers.",
        "mean over pairs", "score", "the gap grows, both stay bounded", "Both drift: lower optim.lr."),
)  # fmt: skip

COSTS = (
    Row("timing_s/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor,update_weights,save_checkpoint,testing,"
        "step}", "Seconds of a part of the step; step is the whole without testing and saving.",
        "wall clock of the controller; save_checkpoint is that of the step before", "seconds",
        "gen is the largest part", "verl report shows the shares; docs/troubleshooting.md, slow."),
    Row("timing_s/wait_rollout", "Seconds in which training waited for responses.", "wall clock", "seconds", "near 0",
        "More rollout workers, or fewer training ranks."),
    Row("timing_s/update", "Supervised: seconds of the optimizer step.", "wall clock", "seconds"),
    Row("timing_per_token_ms/{gen,reward,old_log_prob,ref,values,adv,update_critic,update_actor}",
        "The same by token.", "gen: by response token, else by token of prompt and response", "milliseconds"),
    Row("perf/total_num_tokens", "Tokens of the step's batch.", "prompts and responses, padding not counted", "tokens"),
    Row("perf/time_per_step", "Seconds of the step.", "timing_s/step", "seconds"),
    Row("perf/throughput", "Tokens of the batch by second of the step.", "total_num_tokens / time_per_step", "tokens a second",
        "steady", "Falling with growing lengths is natural; else verl profile, or perf/memory_gb near the machine's."),
    Row(f"perf/throughput/{_MODEL_PARTS}", "The same of each role while it works.",
        "tokens as in timing_per_token_ms / seconds of the part", "tokens a second", "steady", "As perf/throughput."),
    Row("perf/mfu/{actor,critic}", "Model-FLOPs use of the update.",
        "3 forwards of whole rows (6 N a token and attention) / (seconds x what a large matrix product reaches here)", "share",
        "0.2 to 1; prefix sharing can lift it above 1", "Small: larger micro-batches (ppo_max_token_len_per_gpu)."),
    Row("perf/idle/<worker>", "Share of the step in which a process with models had nothing to compute: the trainer, and each "
        "rollout worker.",
        "1 - seconds of its parts / seconds of the step", "share", "below 0.2",
        "trainer: slow rewards or waiting for rollout. Rollout workers: train on fewer, or raise trainer.max_staleness."),
    Row("perf/padding_waste", "Padding in the batch's columns; it is moved, no model computes it.",
        "1 - tokens / columns", "share", "any", "High: lower data.max_response_length."),
    Row("perf/max_memory_gb", "Most memory that a process with models ever had.", "GPU memory on one, else main memory", "GiB",
        "below what there is", "docs/troubleshooting.md, out of memory."),
    Row("perf/memory_gb/{controller,rewards}",
        "Main memory that the controller holds; rewards: all reward processes together.",
        "resident pages", "GiB", "level after a few steps", "Growing: a leak, in the reward function more often than not."),
    Row("perf/memory_gb/<process>_<number>", "The same of each process of a pool, and of each rollout worker.",
        "resident pages", "GiB", "level after a few steps", "Growing: please report it, with verl run show."),
    Row("training/global_step", "The step.", "count", "steps"),
    Row("training/epoch", "Passes over the prompts that are complete.", "count", "passes"),
    Row("training/restarts", "Restarts after a training process died, within this command.", "count", "restarts"),
    Row("<metric>/skipped", "Values of that metric that were not finite and are in none of its figures.", "count", "values",
        "absent", "Find where it begins: rewards, log-probs or advantages in the newest samples."),
)  # fmt: skip

TABLE: dict[str, tuple[Row, ...]] = {
    "Rewards and advantages": REWARDS,
    "Policy and optimizer": POLICY,
    "Critic": CRITIC,
    "Engine against trainer": ENGINE,
    "Lengths": LENGTHS,
    "Validation": VALIDATION,
    "Supervised training": SUPERVISED,
    "Time, speed, memory": COSTS,
}

_HEAD = """\
# Metrics

Every metric that a run can log, generated from `verl/tracking/metric_table.py` (`make docs`). `{a,b}` stands for a or b,
`<x>` for any text. `verl metrics explain NAME` says the same about one name.

Means, sums and extremes are formed once, over the whole step: how a batch was split over micro-batches and ranks does not
change them (costs apart). Values that are not finite are left out and counted as `<metric>/skipped`. A metric that has
no value in a step is absent from it, never 0.

A *group* is the responses to one prompt, its *spread* how far their scores lie apart. *Trained tokens* are the sampled ones
that the loss counts. A *share* lies between 0 and 1. A *nat* is the unit of log-probs: one less makes a token 2.7 times
less likely. *Old*, *rollout* and *reference* policy: before this batch's updates, as the engine sampled, as training began.
"""


def reference() -> str:
    """The table as Markdown."""
    parts = [_HEAD]
    for title, rows in TABLE.items():
        parts += [
            f"\n## {title}\n",
            "| metric | meaning | formula | unit | healthy | otherwise |",
            "|---|---|---|---|---|---|",
        ]
        for row in rows:
            cells = [f"`{row.name}`", *(cell.replace("|", "\\|").replace("<", "&lt;") for cell in row[1:])]
            parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"
