"""How responses are sampled, how advantages are formed, and how a run is driven."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator

from verl.config.base import FieldProblem, NeverOrPositive, Section, StringList, TopK
from verl.config.schema_roles import KlType


class ValSamplingConfig(Section):
    """Sampling in validation: its own, never the training values."""

    temperature: float = Field(0.0, ge=0, description="0: greedy; above 0: sampling at that temperature.")
    top_p: float = Field(1.0, gt=0, le=1, description="Keep the likeliest tokens up to this mass; 1: all.")
    top_k: TopK = Field(-1, description="Keep so many of the likeliest tokens; -1 (or 0, or null): all; 1: greedy.")
    n: int = Field(1, ge=1, description="Responses for each validation prompt.")
    do_sample: bool | None = Field(
        None, description="false: greedy whatever the temperature; null: sample when the temperature is above 0."
    )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0 or self.do_sample is False


class RolloutConfig(Section):
    """The engine that samples responses, and its training sampling."""

    name: Literal["embedded"] = Field("embedded", description="Rollout engine.")
    n: int = Field(1, ge=1, description="Responses for each training prompt: the size of a group.")
    temperature: float = Field(1.0, ge=0, description="Training temperature; log-probs are of the tempered model.")
    top_p: float = Field(
        1.0, gt=0, le=1, description="Must be 1 in training: less changes the distribution behind the trainer's back."
    )
    top_k: TopK = Field(-1, description="Must be off (-1, 0 or null) in training, for the same reason.")
    max_num_seqs: int = Field(64, ge=1, description="Most sequences that the engine decodes at once.")
    max_num_batched_tokens: int = Field(8192, ge=1, description="Most tokens that the engine feeds the model at once.")
    stop: StringList = Field(default_factory=list, description="Texts after which a response ends.")
    stop_token_ids: list[int] = Field(
        default_factory=list, description="Token ids that end a response, beside the model's own end tokens."
    )
    ignore_eos: bool = Field(False, description="Go on after the model's end token, up to max_response_length.")
    val_kwargs: ValSamplingConfig = Field(default_factory=ValSamplingConfig, description="Sampling in validation.")

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, value: list[str]) -> list[str]:
        if "" in value:
            raise FieldProblem("an empty stop text would end every response at once", "leave the empty text out")
        return value

    @field_validator("stop_token_ids")
    @classmethod
    def _token_ids(cls, value: list[int]) -> list[int]:
        if any(token < 0 for token in value):
            raise FieldProblem("a token id is never negative", "leave the negative id out")
        return value


class KlControlConfig(Section):
    """Coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = Field(
        "fixed", description="fixed: always kl_coef; adaptive: steered so that the KL stays near target_kl."
    )
    kl_coef: float = Field(0.001, ge=0, description="The coefficient, or where the adaptive one starts.")
    target_kl: float = Field(0.1, gt=0, description="KL per response that the adaptive coefficient aims at, in nats.")
    horizon: int = Field(10000, ge=1, description="Responses over which the adaptive coefficient reacts.")


class AlgorithmConfig(Section):
    """Advantages and the KL penalty in the reward."""

    adv_estimator: Literal["gae", "grpo", "rloo"] = Field(
        "gae", description="Advantage estimator: gae (PPO, with a critic), grpo and rloo (by group, without)."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount from one token to the next.")
    lam: float = Field(1.0, ge=0, le=1, description="GAE's lambda: 1 trusts returns only, 0 the critic only.")
    whiten_advantages: bool = Field(
        True, description="gae: shift and scale the batch's advantages to mean 0 and deviation 1."
    )
    use_kl_in_reward: bool = Field(False, description="Subtract the KL against the reference from token rewards.")
    kl_penalty: KlType = Field("kl", description="Estimator of that KL; names as actor.kl_loss_type.")
    kl_ctrl: KlControlConfig = Field(default_factory=KlControlConfig, description="Its coefficient.")
    norm_adv_by_std_in_grpo: bool = Field(
        True, description="grpo: divide by the group's deviation; false: Dr.GRPO's advantages."
    )


class TrainerConfig(Section):
    """The run: its length, rhythm, machines, folder and name."""

    logger: StringList = Field(
        default_factory=lambda: ["console"], description="Where metrics go, beside the run's own files."
    )
    project_name: str = Field("verl", min_length=1, description="Project under which trackers file the run.")
    experiment_name: str = Field("run", min_length=1, description="Name of the run, and of its folder under runs/.")
    total_epochs: int = Field(1, ge=1, description="Passes over the training prompts.")
    total_training_steps: int | None = Field(
        None, ge=1, description="Training steps, whatever total_epochs says; null: total_epochs decides."
    )
    nnodes: int = Field(1, ge=1, description="Machines that train.")
    n_gpus_per_node: int | Literal["auto"] = Field(
        "auto", description="GPUs used on each machine, 0 included; auto: those that it has."
    )
    save_freq: NeverOrPositive = Field(-1, description="Training steps between checkpoints; -1: none.")
    test_freq: NeverOrPositive = Field(-1, description="Training steps between validations; -1: none.")
    val_before_train: bool = Field(True, description="Validate once before the first step.")
    critic_warmup: int = Field(0, ge=0, description="First training steps in which only the critic learns.")
    resume_mode: Literal["auto", "disable", "resume_path"] = Field(
        "auto",
        description="auto: go on from the run folder's latest checkpoint, if any; disable: start anew; "
        "resume_path: from resume_from_path.",
    )
    resume_from_path: str | None = Field(None, description="Checkpoint folder for resume_mode=resume_path.")
    default_local_dir: str | None = Field(
        None, min_length=1, description="The run folder itself; null: runs/<experiment_name>."
    )
    log_val_generations: int = Field(3, ge=0, description="Sampled responses shown at each validation.")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="Where models compute; auto: GPUs if the machine has any."
    )
    seed: int = Field(1, ge=0, lt=2**63, description="Seed of everything random in the run.")
    keep_last: int | None = Field(2, ge=1, description="Checkpoints kept, newest first; null: all.")

    @field_validator("n_gpus_per_node")
    @classmethod
    def _gpu_count(cls, value: int | str) -> int | str:
        if isinstance(value, int) and value < 0:
            raise FieldProblem("must be auto or at least 0", "use auto, 0 for no GPU, or the number of GPUs")
        return value

    @field_validator("resume_mode", mode="before")
    @classmethod
    def _disable_is_not_false(cls, value: Any) -> Any:
        return "disable" if value is False else value


class ClusterConfig(Section):
    """Where the roles run."""

    backend: Literal["ray", "inline"] = Field(
        "ray", description="ray: workers as Ray actors; inline: the same workers in this process, without Ray."
    )
    address: str | None = Field(
        None, description="Address of a running Ray cluster; null: a local one, started and stopped by the run."
    )
    threads: int | None = Field(None, ge=1, description="CPU threads of one worker; null: all cores.")
    start_timeout: float = Field(120.0, gt=0, description="Seconds to wait until all workers have started.")
