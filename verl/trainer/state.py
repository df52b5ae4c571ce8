"""What a run is beside its models: step, data position and schedules; saved and restored with them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from verl.algorithms.reward_shaping import RewardShaper, new_shaper
from verl.algorithms.schedules import Schedule, actor_schedules, kl_schedule, learning_rate, scheduled_actor
from verl.checkpoint.store import Checkpoint
from verl.cluster.roles import Roles
from verl.config import Config
from verl.data.loader import PromptLoader
from verl.errors import CheckpointError
from verl.protocol import DataProto
from verl.trainer.advantages import cut_rows, response_lengths


class ResponseCap:
    """``rollout.response_length``: always the longest, or following the lengths that there are.

    Adaptive: the smallest length that a share ``quantile`` of the last ``window`` steps' responses do not exceed, times
    ``margin``, within [``min``, the longest]. A response that was cut says only that it wanted to be longer, so where
    more than ``max_cut_share`` of a step's responses were cut, these lengths are forgotten and the cap opens to the
    longest at once; the next step then shows what lengths there are. ``value``: tokens, for the step to come.
    """

    def __init__(self, config: Config) -> None:
        self._settings, self._longest = config.rollout.response_length, config.data.max_response_length
        self.value = self._longest
        self._recent: list[list[int]] = []  # lengths by step, newest last
        self._lengths: list[int] = []  # of the step under way, which may sample several batches
        self._cut = 0

    def learn(self, batch: DataProto) -> None:
        """Note a sampled batch."""
        self._lengths += response_lengths(batch).tolist()
        self._cut += int(cut_rows(batch).sum())

    def advance(self) -> dict[str, float]:
        """A step is over: find the cap of the next. Returns the metric of the one that is over; fixed: none."""
        settings, used, lengths = self._settings, self.value, self._lengths
        too_many = self._cut > settings.max_cut_share * len(lengths)
        self._lengths, self._cut = [], 0
        if settings.mode == "fixed":
            return {}
        if too_many and used < self._longest:
            self._recent, self.value = [], self._longest
        else:
            self._recent = [*self._recent, lengths][-settings.window :]
            known = sorted(length for step in self._recent for length in step)
            at = known[max(math.ceil(settings.quantile * len(known) - 1e-9), 1) - 1]
            least = settings.min or max(self._longest // 8, 1)
            self.value = min(max(math.ceil(settings.margin * at - 1e-9), least), self._longest)
        return {"response_length/cap": used}

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "recent": self._recent}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with the lengths; where the user has changed the mode or the longest since, that counts."""
        self._recent = state["recent"]
        if self._settings.mode == "adaptive":
            self.value = min(state["value"], self._longest)


STATE_NAME = "trainer"


def learnt_nothing(numbers: Mapping[str, float], role: str) -> bool:
    """Whether none of a training step's gradients was finite; learning-rate schedules do not count such a step."""
    return numbers.get(f"{role}/skipped_steps", 0) > 0 and f"{role}/grad_norm" not in numbers


@dataclass
class TrainerState:
    """Advanced by the loop. ``held``: training steps, by role, that :func:`learnt_nothing`."""

    step: int  # finished training steps; also the version of the current weights
    loader: PromptLoader
    kl_coef: Schedule  # of the KL penalty in the reward
    actor_schedules: dict[str, Schedule]  # the actor's coefficients, by the field that they set
    shaper: RewardShaper  # of scores, with the statistics of all scores so far
    cap: ResponseCap
    held: dict[str, int] = field(default_factory=lambda: {"actor": 0, "critic": 0})

    @classmethod
    def fresh(cls, config: Config, loader: PromptLoader) -> TrainerState:
        kl_coef, coefficients = kl_schedule(config.algorithm.kl_ctrl), actor_schedules(config.actor)
        return cls(0, loader, kl_coef, coefficients, new_shaper(config), ResponseCap(config))

    @property
    def schedules(self) -> dict[str, Schedule]:
        return {"kl_coef": self.kl_coef, **self.actor_schedules}

    def scheduled(self, config: Config, total_steps: int) -> Config:
        """The run's configuration with this step's values of the actor's coefficients."""
        actor = scheduled_actor(config.actor, self.actor_schedules, self.step, total_steps)
        return config.model_copy(update={"actor": actor})

    def learning_rates(self, config: Config, total_steps: int) -> dict[str, float]:
        """Of the step to come, by role: schedules count training steps with a finite gradient."""
        optimizers = {"actor": config.actor.optim, "critic": config.critic.optim}
        return {
            role: learning_rate(self.step - self.held[role], total_steps, optim) for role, optim in optimizers.items()
        }

    def learn(self, batch: DataProto) -> None:
        """Tell whoever chooses prompts and lengths what a batch of responses was like."""
        self.loader.learn(batch)
        self.cap.learn(batch)

    def observe(self, numbers: Mapping[str, float], samples: int) -> None:
        """Tell adaptive schedules the step's metrics, and its number of responses; note roles that learnt nothing."""
        for role in self.held:
            self.held[role] += learnt_nothing(numbers, role)
        for schedule in self.schedules.values():
            if schedule.metric is not None and schedule.metric in numbers:
                schedule.update(numbers[schedule.metric], samples)

    def tree(self, config: Config, source: dict[str, Any]) -> dict[str, Any]:
        """All of it, for a checkpoint. ``source``: what is sampled ahead."""
        return {
            "step": self.step,
            "loader": self.loader.state_dict(),
            "shaper": self.shaper.state_dict(),
            "cap": self.cap.state_dict(),
            "held": self.held,
            "source": {"mode": config.trainer.mode, "ahead": source},
            "schedules": {name: schedule.state_dict() for name, schedule in self.schedules.items()},
        }

    def restore(self, checkpoint: Checkpoint, roles: Roles, mode: str | None = None) -> dict[str, Any]:
        """Go on where the checkpoint was; parts that were not invented when it was written start fresh. ``mode``:
        ``trainer.mode`` of now; None: nothing is to be trained, and what was sampled ahead does not matter. Returns
        what was sampled ahead. Raises CheckpointError: it lacks what nothing can stand in for."""
        checkpoint.verify()
        tree = cast(dict[str, Any], checkpoint.read_state(STATE_NAME))
        missing = sorted({"step", "loader", "shaper", "schedules"} - tree.keys())
        if missing:
            raise CheckpointError(
                f"the checkpoint's trainer state lacks {', '.join(missing)}",
                checkpoint.path,
                "another version of VeRL wrote it: go on with that one, or start anew (trainer.resume_mode=disable)",
            )
        roles.load(str(checkpoint.path.absolute()))
        self.step = tree["step"]
        self.loader.load_state_dict(tree["loader"])
        self.shaper.load_state_dict(tree["shaper"])
        self.held |= tree.get("held", {})
        if "cap" in tree:
            self.cap.load_state_dict(tree["cap"])
        for name, schedule in self.schedules.items():
            if name in tree["schedules"]:
                schedule.load_state_dict(tree["schedules"][name])
        source = tree.get("source", {"mode": "sync", "ahead": {}})
        if mode is not None and source["ahead"] and source["mode"] != mode:
            raise CheckpointError(
                "the checkpoint holds what was sampled ahead in another trainer.mode, and it would be lost",
                f"then {source['mode']}, now {mode}",
                f"go on with trainer.mode={source['mode']}",
            )
        return cast(dict[str, Any], source["ahead"])
