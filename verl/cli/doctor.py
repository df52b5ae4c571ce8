"""``verl doctor``: what is wrong with a configuration or a run; ``verl replay``: one step of a run again."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from verl.cli.arguments import Commands, a_run, command, positive, print_json, screen, settings, tell
from verl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from verl.diagnostics.evidence import Evidence, Finding
    from verl.trainer.replay import Replayed


STYLES = {"error": "bold red", "warning": "yellow", "note": "cyan"}


def add(commands: Commands) -> None:
    doctor = command(commands, "doctor", _doctor, json="findings as JSON")
    doctor.add_argument("words", nargs="*", metavar="CONFIG | RUN | key=value", help="a YAML file, or a run; settings")
    doctor.add_argument("--preset", action="append", default=[], metavar="NAME", help="under the file; may be repeated")

    replay = command(commands, "replay", _replay, json="{metric: [then, now]}")
    replay.add_argument("run", help="name of a run in runs/, or a path")
    replay.add_argument("words", nargs="*", default=[], metavar="key=value", help="settings in place of the run's")
    replay.add_argument("--step", type=positive, required=True, help="the step")
    replay.add_argument("--all", action="store_true", help="also show what does not differ")


def _doctor(arguments: argparse.Namespace) -> int:
    """What is wrong with a configuration or a run.

    verl doctor my.yaml actor.optim.lr=1e-5     before a run: data, the reward on known answers, the machine
    verl doctor runs/my-run                     during or after it: its metrics, samples and events

    The exit code is 1 where there is an error among the findings, else 0. See docs/troubleshooting.md.
    """
    from verl.diagnostics.doctor import examine

    evidence, subject = _evidence(arguments.words, arguments.preset)
    findings = examine(evidence)
    if arguments.json:
        print_json({"subject": subject, "findings": [asdict(finding) for finding in findings]})
    else:
        _print_findings(screen(), subject, evidence, findings)
    return int(any(finding.severity == "error" for finding in findings))


def _evidence(words: Sequence[str], presets: Sequence[str]) -> tuple[Evidence, str]:
    """Of a run where the words name one; else of a configuration."""
    from verl.config import load_config
    from verl.config.settings import presets as preset_names
    from verl.diagnostics.doctor import of_config, of_run
    from verl.tracking.runs import find_run

    source, overrides = settings(words)
    if source is None and not overrides:
        fix = "verl doctor my.yaml, or verl doctor runs/my-run"
        raise ConfigError("there is nothing to look at: neither a configuration nor a run is given", None, fix)
    if source in preset_names():
        presets, source = [*presets, source], None
    if source is not None and (Path(source).is_dir() or Path(source).suffix not in (".yaml", ".yml")):
        run_dir = find_run(source)
        if overrides:
            raise ConfigError("settings belong to a configuration, not to a run", overrides[0], "leave them out")
        return of_run(run_dir), str(run_dir.path)
    from verl.checkpoint.export import opened
    from verl.cluster.start import require_machine
    from verl.models.quiet import without_bars
    from verl.trainer.inputs import check_model_limits

    loaded = load_config(source, overrides, presets)
    tell(loaded.notices)
    with without_bars(), opened(loaded.config) as config:
        require_machine(config)
        check_model_limits(config)
        return of_config(config), source or "the given settings"


def _print_findings(console: Console, subject: str, evidence: Evidence, findings: Sequence[Finding]) -> None:
    from rich.text import Text

    from verl.tracking.console import one_line, printable

    looked = [f"{len(evidence.steps)} steps" if evidence.steps else ""]
    looked += [f"{sum(map(len, evidence.samples.values()))} sampled responses" if evidence.samples else ""]
    looked += [f"{evidence.data.rows} rows of data" if evidence.data else ""]
    looked += [f"the reward on {evidence.trial.tried} known answers" if evidence.trial else ""]
    looked += ["the machine" if evidence.machine else ""]
    console.print(Text(f"{printable(subject)}: looked at {', '.join(filter(None, looked)) or 'nothing: it is empty'}"))
    scores = sorted(row.score for row in evidence.rows if row.score is not None)
    if scores:
        quarters = ", ".join(f"{scores[i * (len(scores) - 1) // 4]:.4g}" for i in (1, 2, 3))
        many = f"{len(set(scores))} different, quartiles {quarters}"
        console.print(Text(f"their scores: from {scores[0]:.4g} to {scores[-1]:.4g}, {many}", "dim"))
    for finding in findings:
        head = Text(f"\n{finding.severity}", STYLES[finding.severity]).append(f" {finding.name}\n", "dim")
        console.print(head.append(f"  {printable(finding.what)}", "bold"))
        for label, text in (("evidence", finding.evidence), ("cause", finding.cause), ("fix", finding.fix)):
            if text:
                console.print(Text(f"  {label:<9}", "dim").append(one_line(text)))
    counts = {severity: sum(finding.severity == severity for finding in findings) for severity in STYLES}
    said = [f"{count} {severity}{'s'[: count > 1]}" for severity, count in counts.items() if count]
    console.print(Text("\n" + (", ".join(said) or "nothing wrong was found")))


def _replay(arguments: argparse.Namespace) -> None:
    """Train on a kept step again, with other settings if asked.

    verl replay my-run --step 40
    verl replay my-run --step 40 actor.optim.lr=1e-6 actor.clip_ratio=0.1

    The step's batch must have been kept (trainer.dump_steps), and the checkpoint before it (trainer.save_freq,
    trainer.keep_last); step 1 needs none. Responses and their scores are those of the run, whatever settings say of
    data, rollout and reward functions. With the run's own settings every figure is the same to the bit (on a CPU).
    """
    from verl.config import load_config
    from verl.trainer.api import settle_process

    source, overrides = settings(arguments.words)
    if source is not None:
        raise ConfigError("a setting needs the form key=value", source, f"write it as {source}=VALUE, or remove it")
    run_dir = a_run(arguments.run)
    loaded, own = load_config(run_dir.path, overrides), load_config(run_dir.path).config
    if (loaded.config.rollout.n, loaded.config.data.train_batch_size) != (own.rollout.n, own.data.train_batch_size):
        what = f"rollout.n={own.rollout.n}, data.train_batch_size={own.data.train_batch_size}"
        raise ConfigError("a replay has the responses that the run had", what, "leave these two as they were")
    tell([*loaded.notices, *settle_process(loaded.config)])

    from verl.models.quiet import without_bars
    from verl.trainer.replay import replay

    with without_bars():
        replayed = replay(loaded.config, run_dir, arguments.step, lambda line: None)
    if arguments.json:
        print_json(replayed.compared)
    else:
        _print_replayed(screen(), replayed, arguments.all)


def _print_replayed(console: Console, replayed: Replayed, everything: bool) -> None:
    same = len(replayed.compared) - len(replayed.differing)
    if not replayed.then:
        console.print(f"the run has no metrics of step {replayed.step}: it did not finish it")
    shown = replayed.compared if everything or not replayed.then else replayed.differing
    if shown:
        width = max(map(len, shown))
        console.print(f"{'':{width}}  {'then':>12}  {'now':>12}  {'difference':>12}", style="dim")
    for name, (then, now) in shown.items():
        difference = "" if then is None or now is None or then == now else f"{now - then:+.4g}"
        console.print(f"{name:{width}}  {_figure(then):>12}  {_figure(now):>12}  {difference:>12}".rstrip())
    if replayed.then:
        console.print(f"step {replayed.step}: {same} of {len(replayed.compared)} metrics are the same to the bit")


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"
