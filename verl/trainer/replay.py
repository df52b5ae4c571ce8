"""``verl replay``: process and update of one step again, from its kept batch and the checkpoint before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

from verl.algorithms.metric import reduce_metrics
from verl.algorithms.schedules import moving_values
from verl.checkpoint.export import opened
from verl.checkpoint.store import CheckpointStore
from verl.cluster.start import start_workers
from verl.config import Config
from verl.data.loader import PromptLoader
from verl.errors import CheckpointError, DataError
from verl.protocol import DataProto
from verl.run_dir import RunDir
from verl.tracking.facts import planned_steps
from verl.tracking.names import read_metrics
from verl.trainer.group_metrics import batch_metrics, staleness_metrics
from verl.trainer.stages import process, update
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer


@dataclass(frozen=True)
class Replayed:
    """Metrics of a step: as the run logged them (empty where it did not come so far), and now."""

    step: int
    then: Mapping[str, float | None]
    now: Mapping[str, float]

    @property
    def compared(self) -> dict[str, tuple[float | None, float | None]]:
        """Metrics of processing and update that either has; times, memory and validation are not among them."""
        names = [
            *(name for name in self.now if not name.startswith("perf/")),
            *(name for name in self.then if name.startswith(("actor/", "critic/")) and name not in self.now),
        ]
        return {name: (self.then.get(name), self.now.get(name)) for name in names}

    @property
    def differing(self) -> dict[str, tuple[float | None, float | None]]:
        return {name: pair for name, pair in self.compared.items() if pair[0] != pair[1]}


class _NoPrompts:
    """Stands in for the loader: a replay draws no prompts."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def replay(config: Config, run_dir: RunDir, step: int, report: Callable[[str], None]) -> Replayed:
    """Train on the kept batch of a step again; nothing in the run's folder changes. ``config``: the run's, perhaps with
    other settings. One rank trains in this process. ``report``: gets a line about what is being started. Raises
    DataError: the step's batch was not kept; CheckpointError: the checkpoint before the step is not there."""
    batch = _batch_of(run_dir, step)
    store = CheckpointStore(run_dir.checkpoints)
    if step > 1 and step - 1 not in store.steps():
        there = ", ".join(map(str, store.steps())) or "none"
        raise CheckpointError(
            f"a replay of step {step} needs the checkpoint of step {step - 1}",
            f"{run_dir.checkpoints} (steps: {there})",
            "replay a step behind one of them; train with a trainer.save_freq that saves before it, and with "
            "trainer.keep_last=null",
        )
    total_steps = planned_steps(run_dir.read_events()) or config.trainer.total_training_steps or step
    if (config.ranks or 1) == 1:
        config = config.model_copy(update={"cluster": config.cluster.model_copy(update={"backend": "inline"})})
    with opened(config) as placed, start_workers(placed, report) as roles:
        state = TrainerState.fresh(config, cast(PromptLoader, _NoPrompts()))
        if step > 1:
            state.restore(store.open(step - 1), roles)
        now, timer = state.scheduled(config, total_steps), StepTimer()
        batch, found = process(batch, roles, now, state.kl_coef.value(state.step, total_steps), timer, state.shaper)
        trained = update(batch, roles, now, state.learning_rates(config, total_steps), state.step, timer)
    found |= staleness_metrics(batch, state.step)
    numbers = reduce_metrics(batch_metrics(batch, config.data.max_prompt_length) | found | trained)
    logged = next((line for line in read_metrics(run_dir)[0] if line["step"] == step), {})
    return Replayed(step, logged, numbers | moving_values(now.actor))


def _batch_of(run_dir: RunDir, step: int) -> DataProto:
    path = run_dir.dump(step)
    if not path.is_file():
        kept = sorted(int(file.stem.removeprefix("step_")) for file in path.parent.glob("step_*.dataproto"))
        raise DataError(
            f"the batch of step {step} was not kept",
            f"{path.parent} (steps: {', '.join(map(str, kept)) or 'none'})",
            f"train with trainer.dump_steps=[{step}]",
        )
    return DataProto.load_from_disk(path)
