"""``verl doctor``: every check over all that is known of a run; ``trainer.alarms``: a few of them after every step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import isfunction, signature
from typing import Any

from verl.config import Config, build_config
from verl.config.schema_supervised import schema_of
from verl.diagnostics import checks_health, checks_machine, checks_reward, checks_update
from verl.diagnostics.checks_machine import Machine
from verl.diagnostics.evidence import SEVERITIES, Evidence, Finding
from verl.errors import VerlError
from verl.json_lines import read_jsonl
from verl.run_dir import EventRecord, RunDir
from verl.tracking.facts import last_of_life, read_config
from verl.tracking.names import read_metrics, summarize
from verl.tracking.runs import overview_of
from verl.tracking.samples import read_samples

Check = Callable[[Evidence], Iterator[Finding]]
SAMPLED_STEPS = 6  # read from a run: the first two and the last ones

# Every public function of these modules that takes evidence alone.
CHECKS: list[Check] = [
    check
    for module in (checks_health, checks_reward, checks_update, checks_machine)
    for name, check in vars(module).items()
    if name[0] != "_" and isfunction(check) and list(signature(check).parameters) == ["evidence"]
]


def examine(evidence: Evidence, checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """All findings, the worst first."""
    found = [finding for check in checks for finding in check(evidence)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


def warnings(run_dir: RunDir, steps: Sequence[dict[str, Any]], events: Sequence[EventRecord]) -> list[Finding]:
    """What is wrong with a run by its folder alone; for its report."""
    return [finding for finding in examine(of_folder(run_dir, steps, events)) if finding.severity != "note"]


def of_run(run_dir: RunDir) -> Evidence:
    """What a run's folder tells, and the machine while the run is under way on it."""
    machine = Machine.here(run_dir.path) if run_dir.is_locked() else None
    steps, events = read_metrics(run_dir)[0], run_dir.read_events()
    seen, last = overview_of(run_dir, steps, summarize(steps), events), last_of_life(events)
    found = of_folder(run_dir, steps, events, machine)
    silent = seen.status == "crashed" and last is not None and last.kind != "stopped"
    return replace(found, died=seen.reason) if silent else found


def of_folder(
    run_dir: RunDir, steps: Sequence[dict[str, Any]], events: Sequence[EventRecord], machine: Machine | None = None
) -> Evidence:
    sampled = [step for step in run_dir.sample_steps() if step]
    chosen = sorted({*sampled[:2], *sampled[2 - SAMPLED_STEPS :]})
    found = {step: [row for row in read_samples(run_dir.samples(step))[0] if row.split == "train"] for step in chosen}
    samples = {step: rows for step, rows in found.items() if rows}
    skipped = [row for row in read_jsonl(run_dir.skipped)[0] if row.get("split") == "train"]
    return Evidence(config_of(run_dir), steps, events, samples, skipped, machine=machine)


def config_of(run_dir: RunDir) -> Config | None:
    """None of a run of another kind, or where another version wrote what this one cannot read."""
    tree = read_config(run_dir)[1]
    if tree is None or schema_of(tree) is not None:
        return None
    try:
        return build_config(tree)
    except VerlError:
        return None


def of_config(config: Config) -> Evidence:
    """What can be known before a run: data files, the reward on known answers, the machine. ``config`` names models by
    folders or hub ids that can be loaded. Takes one or two passes over the data. Raises VerlError: data, tokenizer or
    reward cannot be loaded, as ``verl train`` would say."""
    from verl.data.dataset import PromptDataset
    from verl.data.inspection import inspect_files
    from verl.diagnostics.checks_reward import try_known_answers
    from verl.models.loading import load_tokenizer

    data = config.data
    tokenizer = load_tokenizer(*config.tokenizer)
    lenient = {"truncation": "right", "on_bad_row": "skip", "max_skipped_fraction": 1.0}
    rows = PromptDataset.load(data.train_files, data.model_copy(update=lenient), tokenizer, 256).rows

    def inspected(files: list[str]) -> Any:
        return inspect_files(files, tokenizer, data.max_prompt_length, data.prompt_key, data.answer_key)

    own_class = data.custom_cls.path is not None
    found, overlap = None if own_class else inspected(data.train_files), 0
    same = [file for file in data.val_files if file in data.train_files]
    others = [file for file in data.val_files if file not in same]
    if same and found is not None:
        overlap = inspected(same).usable
    if others and found is not None:
        overlap += inspected([*data.train_files, *others]).duplicates - found.duplicates - inspected(others).duplicates
    trial = try_known_answers(config.reward, [rows[i] for i in range(len(rows))])
    return Evidence(config, data=found, overlap=overlap, trial=trial, machine=Machine.here(config.run_dir))


logger = logging.getLogger(__name__)

SIGNALS = (
    checks_update.kl_exploded,
    checks_update.entropy,
    checks_update.length,
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
        """Note what is new in ``events.log``, and do what the configuration says. ``save``: writes a checkpoint of this
        step. Raises AlarmRaised: the run is to end."""
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
        fix = f"{saved if action == 'pause' else found[0].fix}; {look}"
        raise AlarmRaised(f"trainer.alarms.action={action}: {found[0].what}", found[0].evidence, fix)
