"""What a run is beside its models: step, data position and KL coefficient; saved and restored with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from verl.algorithms.kl import KL_CONTROLLERS, KLController
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.cluster.roles import Roles
from verl.config import Config
from verl.data.loader import PromptLoader

STATE_NAME = "trainer"


@dataclass
class TrainerState:
    """Advanced by the loop.

    Attributes:
        step: finished training steps; also the version of the current weights.
        loader: the stream of training prompts.
        kl_controller: coefficient of the KL penalty in the reward.
    """

    step: int
    loader: PromptLoader
    kl_controller: KLController

    @classmethod
    def fresh(cls, config: Config, loader: PromptLoader) -> TrainerState:
        return cls(0, loader, KL_CONTROLLERS[config.algorithm.kl_ctrl.type](config.algorithm.kl_ctrl))

    def save(self, store: CheckpointStore, roles: Roles, config: Config) -> None:
        """Write ``checkpoints/step_…`` with models, optimizers and this state: complete, or not there at all."""
        with store.begin(self.step) as pending:
            roles.save(str(pending.path.absolute()))  # a worker may stand in another folder
            tree: dict[str, Any] = {
                "step": self.step,
                "loader": self.loader.state_dict(),
                "kl_controller": self.kl_controller.state_dict(),
            }
            pending.write_state(STATE_NAME, tree)
            pending.commit({"model": config.model.path, "reference": config.model.path})

    def restore(self, checkpoint: Checkpoint, roles: Roles) -> None:
        """Go on where the checkpoint was."""
        checkpoint.verify()
        roles.load(str(checkpoint.path.absolute()))
        tree = cast(dict[str, Any], checkpoint.read_state(STATE_NAME))
        self.step = tree["step"]
        self.loader.load_state_dict(tree["loader"])
        self.kl_controller.load_state_dict(tree["kl_controller"])
