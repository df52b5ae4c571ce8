"""Every kind of trouble that a check can find: how grave it is, what it says, what it usually comes from, what to do.

A check gives the name and the evidence, and fills what a text leaves open in braces.
"""

from __future__ import annotations

from typing import NamedTuple

from verl.diagnostics.evidence import Finding, Severity

TRY = "verl reward test shows what the function gives to which response"
INSPECT = "verl data inspect shows the rows"
REPLAY = "keep a step with trainer.dump_steps and look at it with verl replay"
FROM_LENGTHS = "make masks from lengths, never from token ids"
NOT_AS_CONFIGURED = "Advantages are not normalised as configured: {what}"
OWN_ESTIMATOR = "an estimator of one's own under a built-in name, or a changed batch after the advantages"
COMPARE = "compare with docs/algorithms.md; name an estimator of your own in algorithm.custom_estimator"


class Kind(NamedTuple):
    """Of findings, see :class:`verl.diagnostics.evidence.Finding`."""

    severity: Severity
    what: str
    cause: str
    fix: str


# fmt: off
KINDS = {
    "reward_inverted": Kind("error", "Wrong answers score higher than right ones",
        "the sign is wrong, or the comparison with the ground truth is turned round",
        f"{TRY}; negate the score"),
    "reward_format_only": Kind("warning",
        "Right and wrong answers score the same: the reward looks at something else than the answer",
        "a reward for the format, or one that does not get the ground truth it expects",
        f"{TRY}; check data.answer_key and reward.reward_kwargs"),
    "reward_constant": Kind("error", "Every response gets the same score, so nothing is learnt",
        "the reward ignores the response, never finds the answer, or the task is far too hard or too easy",
        f"{TRY}; look at the samples"),
    "groups_without_spread": Kind("warning",
        "In most groups all responses have the same score, so they teach nothing",
        "prompts that the model always or never solves, or groups that are too small",
        "algorithm.filter_groups.enable=true, a larger rollout.n, or a data.sampler that prefers others"),
    "reward_timed_out": Kind("warning",
        "The reward function did not answer in time, so these responses train nothing",
        "the function loops or waits on some responses, or reward.timeout is too short",
        "bound what the function does, or raise reward.timeout and reward.num_workers"),
    "reward_follows_length": Kind("warning",
        "The score hardly depends on anything but the length: {longer} responses score higher",
        "the reward counts words or steps, or penalises length more than it pays answers",
        "score the answer; limit length with reward.overlong_buffer or reward.length_normalization"),
    "reward_collapsed": Kind("error", "The reward fell far below what it had reached",
        "the policy moved too far: a high learning rate, too many updates a batch, no KL term, stale responses",
        "go on from an earlier checkpoint with a lower actor.optim.lr, or with actor.use_kl_loss=true"),
    "one_pattern": Kind("note",
        "All of the best responses share a text that the others lack: a format that is wanted, or a trick",
        "the reward pays a pattern whatever the answer",
        f"read some of them; {TRY}"),
    "reward_failed": Kind("warning", "The reward function raised an error for known answers",
        "a mistake in the function, or a ground truth that it does not understand",
        TRY),
    "reward_slow": Kind("warning", "The reward function is slow",
        "",
        "raise reward.num_workers, and check reward.timeout"),
    "reward_untested": Kind("note",
        "No known way to write an answer makes a difference to the reward, so it could not be tested",
        "it wants another form, or does not compare with the ground truth",
        f"{TRY} (--template says how an answer is written)"),
    "advantages_not_centred": Kind("error", NOT_AS_CONFIGURED, OWN_ESTIMATOR, COMPARE),
    "advantages_not_normalised": Kind("error", NOT_AS_CONFIGURED, OWN_ESTIMATOR, COMPARE),
    "advantages_large": Kind("warning", "Advantages are large, so one response can decide an update",
        "scores of a large scale, without a division by their spread",
        "scale the reward to about 1, or algorithm.norm_adv_by_std_in_grpo=true"),
    "reference_not_base": Kind("error", "The reference is not the model that training started from",
        "the reference was loaded from elsewhere, in another dtype, or computes at another temperature",
        "compare what was loaded with model.path"),
    "reference_moves": Kind("error", "The reference moves with the policy, so the KL term is always zero",
        "the reference shares its weights with the policy, or is loaded again from it",
        "give the reference weights of its own"),
    "reference_changes": Kind("error",
        "The reference's weights change, so the KL term is not to the model that training started from",
        "the reference is trained, copied from the policy now and then, or loaded from elsewhere after a restart",
        "freeze it, and give it weights of its own; to move the anchor, start a run from a checkpoint"),
    "kl_exploded": Kind("error", "The policy is far from where it started",
        "a learning rate that is too high, a KL coefficient that is too low, or too many updates a batch",
        "lower actor.optim.lr, or raise actor.kl_loss_coef (or algorithm.kl_ctrl.kl_coef)"),
    "kl_dominates": Kind("warning", "The KL term outweighs the reward, so the policy is held where it is",
        "a coefficient that is too high for rewards of this scale",
        "lower algorithm.kl_ctrl.kl_coef (or actor.kl_loss_coef)"),
    "lr_zero": Kind("error", "The learning rate is zero, so nothing is learnt",
        "actor.optim.lr=0, or a warm-up as long as the run",
        "set actor.optim.lr; actor.optim.lr_warmup_steps well below the steps of the run"),
    "no_gradient": Kind("error", "The gradient is zero, so nothing is learnt",
        "no group has responses with different scores, or nothing of the model is trained",
        "look at training/frac_reward_zero_std and at the samples"),
    "layer_without_gradient": Kind("error", "A layer of the model gets no gradient",
        "its parameters are frozen (requires_grad), or cut off from the loss",
        "train all of the model, or ignore this where it is meant"),
    "weights_unmoved": Kind("error",
        "The weights do not change, although there is a gradient and a learning rate",
        "the optimizer holds other tensors than the model, or steps are below the precision of the weights",
        "raise actor.optim.lr; do not replace parameters after the start"),
    "gradient_clipped_away": Kind("warning", "Clipping cuts every gradient to a small part",
        "actor.grad_clip far below the usual norm, or a loss of a large scale",
        "set actor.grad_clip near the usual norm (1.0), or scale the reward"),
    "gradient_exploded": Kind("warning", "The gradient norm jumped",
        "an unusual batch, or weights on their way to diverge",
        "lower actor.optim.lr or actor.grad_clip; look at that step's samples"),
    "policy_clipped": Kind("warning", "Most of what a step could teach is clipped away",
        "the policy moves too far within one batch: many mini-batches or passes at a high learning rate",
        "lower actor.optim.lr or actor.ppo_epochs, or widen actor.clip_ratio"),
    "ratio_not_one": Kind("error", "The policy ratio is not 1 at the first mini-batch of a step",
        "old log-probs of other weights or another temperature, or dropout in training",
        f"turn dropout off in the model's configuration; {REPLAY}"),
    "part_without_gradient": Kind("error", "A part of the model gets no gradient: {part}",
        "its parameters are frozen (requires_grad), or cut off from the loss",
        "train all of the model, or ignore this where it is meant"),
    "layers_uneven": Kind("warning", "Gradients vanish or explode on their way through the layers",
        "a layer that saturates, broken initial weights, or a precision that is too low",
        "look at the weights of the model; model.dtype=bfloat16 in place of float16"),
    "engine_weights_stale": Kind("error", "The rollout engine samples with old weights",
        "new weights do not reach the engine after an update", f"publish them after every update; {REPLAY}"),
    "tokens_misaligned": Kind("error", "Engine and trainer speak of different tokens",
        "log-probs or masks shifted against the responses, or text encoded again",
        f"keep the sampled ids, their log-probs and the mask in step; {REPLAY}"),
    "engine_differs": Kind("error", "Engine and trainer compute different probabilities for the same tokens",
        "a temperature, a dtype or an adjustment of the logits on one side only",
        "same rollout.temperature and model.dtype on both; or correct it with algorithm.rollout_correction; "
        f"{REPLAY}"),
    "eos_not_trained": Kind("error", "The last tokens of responses do not train, so the policy does not learn to end",
        "a mask that leaves out the end token, as when it is compared with the padding", FROM_LENGTHS),
    "tokens_not_trained": Kind("error", "Sampled tokens are masked out", "a mask that is shifted or cut", FROM_LENGTHS),
    "entropy_collapsed": Kind("error", "The policy has collapsed: it always says the same",
        "a learning rate that is too high, clipping that favours what is likely already, too little data",
        "lower actor.optim.lr, raise actor.clip_ratio_high or actor.entropy_coeff, use a KL term"),
    "length_runaway": Kind("warning", "Responses became much {how} than they were", "{cause}",
        "look at the samples; mask or penalise length (reward.overlong_buffer, algorithm.mask_truncated)"),
    "responses_cut": Kind("warning", "Nearly all responses are cut at the length limit",
        "data.max_response_length too short, a model that does not end (a base model, a wrong end token)",
        "raise data.max_response_length, or name the end with rollout.stop or rollout.stop_token_ids"),
    "repetition": Kind("warning", "Responses repeat themselves",
        "collapse, or a reward that pays it",
        "go on from an earlier checkpoint; pay repetition off in the reward (rule repetition)"),
    "truth_empty": Kind("error", "Rows without a ground truth",
        "the answers are in another column, or were lost in a conversion",
        f"set data.answer_key; {INSPECT}"),
    "rows_unusable": Kind("warning", "Rows that cannot be used",
        "damaged or foreign rows",
        INSPECT),
    "prompts_too_long": Kind("warning", "Many prompts do not fit the limit: they are left out or cut",
        "a limit that is too short for this data",
        "raise data.max_prompt_length, or data.filter_overlong_prompts=true to leave them out on purpose"),
    "duplicates": Kind("warning", "The same prompt stands in several rows",
        "files that were joined twice, or a template without its question",
        f"remove them; {INSPECT}"),
    "truths_conflict": Kind("warning", "The same prompt has different ground truths",
        "a question with several answers, or a mistake of the labels",
        INSPECT),
    "validation_in_training": Kind("warning",
        "Validation prompts stand in the training data, so validation does not measure what is new",
        "a split made after duplicates were made, or the same file twice",
        "remove them from data.train_files"),
    "answer_in_prompt": Kind("warning", "The ground truth stands in the prompt, so copying is enough",
        "a template that shows the answer, or a few-shot example of the same row",
        f"take it out of the prompt; {INSPECT}"),
    "threads_over_subscribed": Kind("warning", "More threads than cores: they fight for them",
        "OMP_NUM_THREADS or cluster.threads set for another machine",
        "at most {most} threads a rank, or leave both unset"),
    "machine_busy": Kind("warning", "The machine is busy with more work than it has cores",
        "other programs, or another run",
        "wait for them, or give each run its own cores (taskset)"),
    "swapping": Kind("warning", "The machine swaps, which makes training crawl",
        "too little memory for what runs",
        "end other programs; smaller actor.ppo_max_token_len_per_gpu and rollout.max_num_seqs"),
    "disk_full": Kind("warning", "Little room on the disk of the run folder",
        "checkpoints hold weights and optimizer: 12 bytes a parameter each",
        "free space, lower trainer.keep_last, or another trainer.default_local_dir"),
    "shared_memory_small": Kind("warning", "Little shared memory for Ray's objects",
        "a container with the default of 64 MB",
        "start the container with --shm-size=8g, or cluster.backend=inline"),
    "versions": Kind("warning", "Packages in other versions than VeRL asks for",
        "another program's requirements in the same environment",
        "pip install --upgrade verl in an environment of its own"),
    "stopped": Kind("warning", "The run stopped{after}",
        "Ctrl-C, a kill, or the error that verl train told",
        "the same command goes on from the last checkpoint"),
    "died": Kind("warning", "The run does not go on, and did not say why",
        "killed from outside, or by the kernel when memory ran out (dmesg tells), or the machine went down",
        "the same command goes on from the last checkpoint; verl plan says how much memory it needs"),
    "not_finite": Kind("warning", "Not a finite number",
        "an overflow, a division by zero, or rewards that are not finite",
        "look at the samples of the first such step; lower the learning rate"),
}
# fmt: on


def finding(name: str, evidence: str, severity: Severity | None = None, **words: object) -> Finding:
    """What was found.

    Args:
        severity: where it depends on how much there is of it.
        words: for the braces of the kind's texts.
    """
    kind = KINDS[name]
    what, cause, fix = (text.format(**words) for text in kind[1:])
    return Finding(name, severity or kind.severity, what, evidence, cause, fix)
