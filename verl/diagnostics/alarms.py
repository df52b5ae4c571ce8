"""``trainer.alarms``: the doctor's checks of a few signals, after every training step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from verl.config import Config
from verl.diagnostics import checks_collapse, checks_reward, checks_update
from verl.diagnostics.doctor import examine
from verl.diagnostics.evidence import Evidence
from verl.errors import VerlError
from verl.run_dir import RunDir
from verl.tracking.summary import read_metrics

logger = logging.getLogger(__name__)

SIGNALS = (
    checks_update.kl_exploded,
    checks_collapse.entropy,
    checks_collapse.length,
    checks_update.gradient_exploded,
    checks_reward.collapsed,
)
FIRST, LAST = 5, 200  # steps that are looked at: a run's first ones and the last ones


class AlarmRaised(VerlError):
    """A signal left its range, and ``trainer.alarms.action`` is to end the run."""

    bad_input = False


class Alarms:
    """Looks at each step. A signal is told once in a run, also where the run is resumed: who goes on has read it."""

    def __init__(self, config: Config, run_dir: RunDir) -> None:
        self._config, self._run_dir = config, run_dir
        self._steps: list[dict[str, Any]] = read_metrics(run_dir)[0]
        self._told = {event.subject for event in run_dir.read_events() if event.kind == "alarm"}

    def heed(self, step: int, metrics: Mapping[str, float], save: Callable[[], None]) -> None:
        """Note what is new in ``events.log``, and do what the configuration says.

        Args:
            save: writes a checkpoint of this step.

        Raises:
            AlarmRaised: the run is to end.
        """
        self._steps.append({"step": step, **metrics})
        if len(self._steps) > FIRST + LAST:
            del self._steps[FIRST]
        found = examine(Evidence(config=self._config, steps=self._steps), SIGNALS)
        found = [finding for finding in found if finding.name not in self._told]
        for finding in found:
            self._told.add(finding.name)
            self._run_dir.log_event("alarm", finding.name, finding.text, step)
            logger.warning("alarm at step %d: %s (told once; %s)", step, finding.text, finding.fix)
        action = self._config.trainer.alarms.action
        if not found or action == "warn":
            return
        if action == "pause":
            save()
        look = f"verl doctor {self._run_dir.path} and {self._run_dir.report} say more"
        saved = f"the same command, with other settings if need be, goes on from the checkpoint of step {step}"
        raise AlarmRaised(
            f"trainer.alarms.action={action}: {found[0].what}",
            found[0].evidence,
            f"{saved if action == 'pause' else found[0].fix}; {look}",
        )
