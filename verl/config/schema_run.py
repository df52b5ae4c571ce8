"""How responses are sampled, how advantages are formed, and how a run is driven."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm
from os.path import expandvars
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, field_validator

from verl.config.aliases import OTHER_VALUES
from verl.config.base import FieldProblem, Section, Takes, Unit, also, field, in_stage, part
from verl.config.names import did_you_mean
from verl.config.problems import Problem
from verl.config.schema_roles import KlType, RolloutCorrectionConfig
from verl.config.units import (
    Every,
    Number,
    Passes,
    Responses,
    Seconds,
    Seed,
    Share,
    Steps,
    StringList,
    Tokens,
    TopK,
    must,
)

WORKERS = in_stage("start: the workers")
VALIDATION = in_stage("validation")
CHECKPOINTS = in_stage("checkpoints")
TRACKING = in_stage("tracking")
FOLDER = in_stage("start: the run folder")
RESUMING = in_stage("start: the checkpoint to go on from")
KL_IN_REWARD = in_stage("process: the KL penalty in the reward")

TokenId = Annotated[int, Field(ge=0), Unit("token ids")]


def _engine_name(value: str) -> str:
    path, _, name = value.rpartition(":")
    if value == "embedded" or (path.endswith(".py") and name.isidentifier()):
        return value
    hint = did_you_mean(value, ["embedded", *OTHER_VALUES["rollout.name"]])
    raise FieldProblem("names no engine", f"{hint}use embedded, or FILE.py:CLASS for a class of your own")


_EMPTY = "an empty stop text would end every response at once"
_NO_EMPTY = must(lambda texts: "" not in texts, _EMPTY, "leave the empty text out")


class ValSamplingConfig(Section):
    """Sampling in validation: its own, never the training values."""

    acts_in: ClassVar[str] = "validation: the engine"

    temperature: Number = field(0.0, "0: greedy; above 0: sampling at that temperature.", ge=0)
    top_p: Share = field(1.0, "Keep the likeliest tokens up to this mass; 1: all.", gt=0, le=1)
    top_k: TopK = field(-1, "Keep so many of the likeliest tokens; -1 (or 0, or null): all; 1: greedy.")
    n: Responses = field(1, "Responses for each validation prompt.", ge=1)
    min_p: Share = field(0.0, "Keep tokens at least this share as likely as the likeliest; 0: all.", ge=0, le=1)
    repetition_penalty: Number = Field(1.0, gt=0)
    """Above 1: tokens that prompt or response have become less likely (CTRL); 1: off."""
    presence_penalty: Number = field(0.0, "Taken from the logits of tokens that the response has; 0: off.", ge=-2, le=2)
    frequency_penalty: Number = field(0.0, "As presence_penalty, once for each time it is there; 0: off.", ge=-2, le=2)
    logit_bias: dict[TokenId, Number] = field({}, "Added to the logits, by token id, such as {11: -5}.")
    min_new_tokens: Tokens = field(0, "Responses do not end before so many tokens, by end token or stop.", ge=0)
    do_sample: bool | None = field(None, "false: greedy whatever the temperature; null: sample where it is above 0.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0 or self.do_sample is False


class ResponseLengthConfig(Section):
    """How long training responses may become; validation always has data.max_response_length."""

    acts_in: ClassVar[str] = "rollout: the longest response of a training step"

    mode: Literal["fixed", "adaptive"] = "fixed"
    """fixed: data.max_response_length; adaptive: a little more than most recent responses needed."""
    quantile: Share = field(0.95, "The cap is what this share of recent responses do not exceed, ...", gt=0, le=1)
    margin: Number = field(1.2, "... times this factor.", ge=1)
    window: Steps = field(4, "Training steps whose responses are recent.", ge=1)
    min: Tokens | None = field(None, "The cap is never lower; null: an eighth of data.max_response_length.", ge=1)
    max_cut_share: Share = Field(0.1, ge=0, le=1)
    """Where a greater share of a step's responses was cut, the cap opens to data.max_response_length."""


class RolloutConfig(Section):
    """The engine that samples responses, and its training sampling."""

    acts_in: ClassVar[str] = "rollout: the engine"

    name: Annotated[str, AfterValidator(_engine_name), Takes("embedded, or FILE.py:CLASS")] = "embedded"
    """The built-in engine, or a class of your own (docs/extending.md); vllm, sglang, hf and trtllm of other scripts are
    read as embedded."""
    n: Responses = field(1, "Responses for each training prompt: the size of a group.", ge=1)
    temperature: Number = field(1.0, "Training temperature; log-probs are of the tempered model.", ge=0)
    top_p: Share = field(1.0, "Must be 1 in training: less changes the distribution unseen by the trainer.", gt=0, le=1)
    top_k: TopK = field(-1, "Must be off (-1, 0 or null) in training, for the same reason.")
    max_num_seqs: Annotated[int, Unit("sequences")] = field(64, "Most sequences that the engine decodes at once.", ge=1)
    max_num_batched_tokens: Tokens = Field(8192, ge=1)
    """Most tokens that the engine feeds the model at once; longer prompts go in chunks."""
    kv_cache_gb: Annotated[float, Unit("GiB")] | None = Field(None, gt=0)
    """Memory of the keys and values of running responses; null: enough for max_num_seqs of the longest kind, but no
    more than half of what is free. Where it is full, the youngest response waits and is computed again."""
    partial: bool = True
    """trainer.mode=async: responses under way when weights change go on under the new ones; false: a worker takes new
    weights when those that it has begun are finished."""
    worker_timeout: Seconds = Field(300.0, gt=0)
    """Rollout workers of their own: seconds of silence after which one counts as hanging, is ended and replaced."""
    response_timeout: Seconds | None = Field(None, gt=0)
    """Rollout workers of their own: seconds after which a response that was asked for is given up, whatever became of
    its workers; it is counted and trains nothing. null: no limit."""
    min_workers: Annotated[int, Unit("workers")] | None = Field(None, ge=1)
    """Rollout workers of their own: never fewer; null: as many as at the start, unless verl scale asks for others."""
    max_workers: Annotated[int, Unit("workers")] | None = Field(None, ge=1)
    """Rollout workers of their own: never more; null: as many as at the start, unless verl scale asks for others."""
    weight_sync: Literal["shared_memory", "disk", "broadcast"] = "shared_memory"
    """Rollout workers of their own: how new weights reach them. shared_memory: once for each machine, over Ray, mapped
    by its workers; disk: as a file in the run's folder, which all machines must share; broadcast: straight from the
    actor's memory into that of each worker (NCCL between GPUs, else gloo), beside whatever it computes."""
    compress_results: bool = False
    """Rollout workers of their own: compress what they sample on its way to the trainer, without loss (zstd), for a
    slow network between machines."""
    enforce_eager: bool = False
    """Decode with torch's operators alone. false: on CPUs with AMX or AVX512-BF16 and a C compiler, models of
    Llama's kin in bfloat16 decode in compiled code, with the same bits."""
    enable_prefix_caching: bool = False
    """Keep the keys and values of prompts for later prompts with the same beginning, until the weights change.
    Responses to one prompt share it anyway."""
    stop: Annotated[StringList, _NO_EMPTY] = field([], "Texts after which a response ends.")
    stop_token_ids: list[TokenId] = field([], "Token ids that end a response, beside the model's own end tokens.")
    ignore_eos: bool = field(False, "Go on after the model's end token, up to max_response_length.")
    response_length: ResponseLengthConfig = part(ResponseLengthConfig)
    val_kwargs: ValSamplingConfig = part(ValSamplingConfig)


class KlControlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    acts_in: ClassVar[str] = "process: the KL penalty in the reward"

    type: Literal["fixed", "adaptive", "linear", "cosine"] = "fixed"
    """fixed: always kl_coef; adaptive: steered so that the KL stays near target_kl; linear, cosine: from kl_coef to
    kl_coef_end after the last step."""
    kl_coef: Number = field(0.001, "The coefficient, or where a moving one starts.", ge=0)
    kl_coef_end: Number = field(0.0, "Where linear and cosine courses end.", ge=0)
    target_kl: Annotated[float, Unit("nats a token")] = Field(0.1, gt=0)
    """KL that the adaptive coefficient aims at, in nats a token: mean of each response, then over responses."""
    horizon: Responses = field(10000, "Responses over which the adaptive coefficient reacts.", ge=1)


class CustomEstimatorConfig(Section):
    """An advantage estimator in the user's own Python file, instead of adv_estimator."""

    acts_in: ClassVar[str] = "process: advantages"

    path: str | None = field(None, "Python file that holds the estimator; null: use adv_estimator.")
    name: str = field("estimator", "Its function in that file.", min_length=1)
    critic: bool = field(False, "It needs values: train a critic.")


class FilterGroupsConfig(Section):
    """DAPO's dynamic sampling: groups with the same metric in all responses are dropped, others take their place."""

    acts_in: ClassVar[str] = "rollout: which groups are kept"

    enable: bool = field(False, "Whether to filter.")
    metric: str = Field("score", min_length=1)
    """What must differ within a group: score (or seq_reward), or a key of the reward function's dict, such as acc."""
    max_num_gen_batches: Annotated[int, Unit("batches")] = Field(0, ge=0)
    """Batches of prompts sampled at most for one training step, after which the run stops; 0: no limit."""

    @field_validator("metric", mode="before")
    @classmethod
    def _metric_names(cls, value: Any) -> Any:
        if value == "seq_final_reward":
            raise FieldProblem("rewards after KL are not known when groups are filtered", "use seq_reward")
        return "score" if value in (None, "seq_reward") else value


class AlgorithmConfig(Section):
    """Advantages and the KL penalty in the reward."""

    acts_in: ClassVar[str] = "process: advantages"

    adv_estimator: Literal[
        "gae", "grpo", "grpo_passk", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "opo",
        "gpg", "gdpo", "maxrl",
    ] = "gae"  # fmt: skip
    """Advantage estimator; gae: PPO's, with a critic. All: docs/algorithms.md."""
    custom_estimator: CustomEstimatorConfig = part(CustomEstimatorConfig)
    gamma: Number = field(1.0, "Discount from one token to the next.", ge=0, le=1)
    lam: Number = field(1.0, "GAE's lambda: 1 trusts returns only, 0 the critic only.", ge=0, le=1)
    whiten_advantages: bool = field(True, "gae: shift and scale the batch's advantages to mean 0 and deviation 1.")
    bootstrap_truncated: bool = False
    """gae: a response cut at its limit goes on with the critic's value of its end; false: it counts as finished."""
    mask_truncated: bool = Field(False, **in_stage("update: actor and critic"))
    """Overlong filtering: responses cut at their limit count in their group, and train nothing."""
    use_kl_in_reward: bool = field(False, "Subtract the KL against the reference from token rewards.", **KL_IN_REWARD)
    kl_penalty: KlType = field("kl", "Estimator of that KL; names as actor.kl_loss_type.", **KL_IN_REWARD)
    kl_ctrl: KlControlConfig = part(KlControlConfig)
    rollout_correction: RolloutCorrectionConfig = part(RolloutCorrectionConfig)
    norm_adv_by_std_in_grpo: bool = True
    """grpo, grpo_passk: divide by the group's deviation; false: Dr.GRPO's advantages."""
    gdpo_reward_keys: StringList = Field(default_factory=list)
    """gdpo: keys of the reward function's dict that are normalised apart; score is the score itself."""
    gdpo_reward_weights: list[Number] | None = field(None, "gdpo: weight of each of them, in order; null: 1 each.")
    filter_groups: FilterGroupsConfig = part(FilterGroupsConfig)

    @property
    def estimator(self) -> str:
        return self.adv_estimator if self.custom_estimator.path is None else self.custom_estimator.name

    @property
    def uses_critic(self) -> bool:
        return self.uses("gae") or (self.custom_estimator.path is not None and self.custom_estimator.critic)

    @property
    def compares_group(self) -> bool:
        """Whether the estimator gives 0 to a prompt's only response."""
        alone = ("gae", "reinforce_plus_plus", "remax")
        return self.custom_estimator.path is None and self.adv_estimator not in alone

    def uses(self, estimator: str) -> bool:
        return self.custom_estimator.path is None and self.adv_estimator == estimator


class AlarmsConfig(Section):
    """What to look out for while a run trains. A signal is told once; null turns it off."""

    acts_in: ClassVar[str] = "the training loop, and verl doctor"

    action: Literal["warn", "pause", "stop"] = "warn"
    """warn: note it in events.log and go on; pause: save a checkpoint and end the run, which goes on with the same
    command; stop: end it without."""
    kl: Annotated[float, Unit("nats a token")] | None = Field(1.0, gt=0)
    """Most KL to the reference, or else to the policy before the update."""
    entropy: Annotated[float, Unit("nats a token")] | None = field(0.02, "Least entropy of the policy.", gt=0)
    length: Number | None = field(4.0, "Most factor by which responses may grow or shrink from the first steps.", gt=1)
    grad_norm: Number | None = Field(30.0, gt=1)
    """Most gradient norm of the actor, as a multiple of the median of the steps before."""
    reward: Share | None = Field(0.5, gt=0, le=1)
    """Share of the best reward so far, above the lowest score, that may be lost again."""


class KeepBestConfig(Section):
    """One checkpoint that is kept beside the newest: the best so far by a metric of its own step."""

    acts_in: ClassVar[str] = "checkpoints"

    metric: str | None = Field(None, min_length=1)
    """Name of the metric, such as val-core/gsm8k/acc/mean@1; of equals the earlier one stays, and a step without it is
    no candidate; null: none is kept."""
    mode: Literal["max", "min"] = field("max", "Whether the largest or the smallest value is the best.")


class TrainerConfig(Section):
    """The run: its length, rhythm, machines, folder and name."""

    acts_in: ClassVar[str] = "the training loop"

    mode: Literal["sync", "one_step_off", "async"] = "sync"
    """sync: rollout, process and update take turns; one_step_off: the next step's responses are sampled while this step
    trains; async: sampling never stops, and no response older than max_staleness trains."""
    max_staleness: Annotated[int, Unit("weight versions")] = Field(1, ge=0)
    """async: most updates between a response's oldest token and its training; 0: as sync."""
    staleness_unit: Literal["sample", "token"] = "sample"
    """async: sample: a response with a token over max_staleness is dropped, and its prompt sampled again with the
    others of its group; token: only such tokens are masked."""
    stream_minibatches: bool = False
    """sync: a mini-batch is processed and trained as soon as so many groups are complete, while the others of the batch
    are still being sampled; which groups it is made of then depends on time."""
    logger: StringList = Field(default_factory=lambda: ["console"], **TRACKING)
    """Where metrics go, beside the run's own files: console, tensorboard, wandb, mlflow, swanlab, trackio (the last
    four need their package: pip install 'verl[wandb]'), or a class of your own, my_tracker.py:MyTracker."""
    project_name: str = Field("verl", min_length=1, **TRACKING)
    """Name of the project, in the run's config.yaml and report and at tracking services."""
    experiment_name: str = field("run", "Name of the run, and of its folder under runs/.", min_length=1, **FOLDER)
    total_epochs: Passes = field(1, "Passes over the training prompts.", ge=1)
    total_training_steps: Steps | None = Field(None, ge=1)
    """Training steps, whatever total_epochs says; null: total_epochs decides."""
    nnodes: Annotated[int, Unit("machines")] = field(1, "Machines that train.", ge=1, **WORKERS)
    n_gpus_per_node: Annotated[int, Field(ge=0), Unit("GPUs")] | Literal["auto"] = Field("auto", **WORKERS)
    """GPUs used on each machine, 0 included; auto: those that it has."""
    save_freq: Every = field(-1, "Training steps between checkpoints; -1: none.", **CHECKPOINTS)
    test_freq: Every = field(-1, "Training steps between validations; -1: none.", **VALIDATION)
    val_before_train: bool = field(True, "Validate once before the first step.", **VALIDATION)
    balance_batch: bool = Field(True, **in_stage("update and process: the rows of each rank"))
    """Spread rows over ranks by their tokens; false: in order, the same number on each rank."""
    critic_warmup: Steps = Field(0, ge=0, **in_stage("update: the actor"))
    """First training steps in which only the critic learns."""
    resume_mode: Annotated[Literal["auto", "disable", "resume_path"], also(disable=False)] = Field("auto", **RESUMING)
    """auto: go on from the folder's latest checkpoint, if any; disable: start anew; resume_path: resume_from_path."""
    max_restarts: Annotated[int, Unit("restarts")] = Field(1, ge=0, **in_stage("after a worker's death"))
    """When a process of actor, critic, reference or reward dies, the run goes on from its last checkpoint by itself, at
    most so many times within one command."""
    memory_save_freq: Every = Field(-1, **in_stage("after a worker's death"))
    """Training steps between states that are kept in main memory (/dev/shm, up to 24 bytes a parameter), for a restart
    within the command (trainer.max_restarts); 1: no more than one step is done again; -1: none."""
    resume_from_path: str | None = field(None, "Checkpoint folder for resume_mode=resume_path.", **RESUMING)
    default_local_dir: str | None = field(None, "The run folder; null: runs/<experiment_name>.", min_length=1, **FOLDER)
    log_val_generations: Responses = field(3, "Sampled responses shown at each validation.", ge=0, **VALIDATION)
    device: Annotated[Literal["auto", "cpu", "cuda"], also(cuda="gpu")] = Field("auto", **WORKERS)
    """Where models compute; auto: GPUs if the machine has any."""
    seed: Seed = Field(1, ge=0, lt=2**63, **in_stage("everything random: data order, sampling, initial values"))
    """Seed of everything random in the run."""
    keep_last: Annotated[int, Unit("checkpoints")] | None = Field(2, ge=1, **CHECKPOINTS)
    """Checkpoints kept, newest first; null: all."""
    async_save: bool = Field(False, **CHECKPOINTS)
    """Write checkpoints while training goes on, from a copy in main memory (12 bytes a parameter); false: it waits."""
    save_on_interrupt: bool = Field(False, **in_stage("after Ctrl-C or SIGTERM"))
    """After Ctrl-C or SIGTERM finish the step and save a checkpoint of it, then stop (a second one: stop at once);
    false: stop at once, and go on from the last checkpoint."""
    keep_best: KeepBestConfig = part(KeepBestConfig)
    dump_steps: Every | list[Annotated[int, Field(ge=1), Unit("training steps")]] = -1
    """Steps whose batch of responses is kept in dumps/, for verl replay: a list, or every so many steps; -1: none."""
    alarms: AlarmsConfig = part(AlarmsConfig)

    @property
    def folder(self) -> Path:
        """The folder that holds every file of the run."""
        return Path(expandvars(self.default_local_dir or f"runs/{self.experiment_name}")).expanduser()

    def problems(self) -> Iterator[Problem]:
        if self.resume_mode == "resume_path" and not self.resume_from_path:
            fix = "set trainer.resume_from_path to a checkpoint folder, or trainer.resume_mode=auto"
            yield Problem("trainer.resume_mode=resume_path needs trainer.resume_from_path", self.resume_from_path, fix)
        name = self.experiment_name
        if self.default_local_dir is None and (name in (".", "..") or any(c in "/\\\0" for c in name)):
            what = "trainer.experiment_name names the run's folder under runs/, so it must be a plain folder name"
            yield Problem(what, name, "leave out slashes, or set trainer.default_local_dir to the folder you want")

    def checkpoint_notices(self, validates: bool) -> Iterator[str]:
        """What ``keep_best`` cannot do. ``validates``: there are held-out data."""
        metric, test, save = self.keep_best.metric, self.test_freq, self.save_freq
        if metric is None:
            return
        if save <= 0:
            yield f"trainer.keep_best has no effect: trainer.save_freq={save}"
        elif metric.startswith("val") and not validates:
            yield f"trainer.keep_best has no effect: data.val_files is empty, so there is no {metric}"
        elif metric.startswith("val") and (test <= 0 or (test % save and save % test)):
            rare = f"every {lcm(test, save)} steps" if test > 0 else "once, at the end"
            yield (
                f"trainer.keep_best: a step has both a checkpoint (trainer.save_freq={save}) and {metric} "
                f"(trainer.test_freq={test}) only {rare}"
            )
