"""``verl run list``, ``verl run show``, ``verl report`` and ``verl scale``: looking at runs and after them."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from verl.cli.arguments import Commands, a_run, command, group, natural, print_json
from verl.errors import ConfigError, VerlError
from verl.json_lines import json_line
from verl.run_dir import RunDir, write_atomic

if TYPE_CHECKING:
    from rich.console import Console

    from verl.tracking.runs import RunDescription, RunOverview


def add(commands: Commands) -> None:
    run = group(commands, "run", "look at runs")
    listing, show = command(run, "list", _list, json="as JSON"), command(run, "show", _show, json="as JSON")
    watch = command(commands, "watch", _watch, json="one picture as JSON")
    profile, scale = command(commands, "profile", _profile, json="as JSON"), command(commands, "scale", _scale)
    serve = command(commands, "serve", _serve, json="the address as JSON")
    report = command(commands, "report", _report, json="the path as JSON")
    for one in (show, scale, watch, profile):
        one.add_argument("run", help="name of a run in runs/, or a path")
    for several in (serve, report):
        several.add_argument("run", nargs="+", help="name of a run in runs/, or a path; several are compared")
    listing.add_argument("root", nargs="?", default="runs", help="default runs/")
    scale.add_argument("--rollout-workers", type=int, required=True, metavar="N", help="how many there shall be")
    watch.add_argument("--once", action="store_true", help="one picture, as where there is no terminal")
    serve.add_argument("--host", default="127.0.0.1", help="address to listen at; any but this machine's gets a token")
    serve.add_argument("--port", type=natural, default=8266, help="default 8266; 0: any that is free")
    report.add_argument("--out", type=Path, help="file to write (default: report.html or compare.html in the run)")


def _watch(arguments: argparse.Namespace) -> None:
    """A run on the terminal, drawn again while it grows.

    verl watch runs/first --once
    """
    from rich.console import Console

    from verl.tracking.watch import Watcher, watch

    if arguments.json:
        print_json(Watcher(a_run(arguments.run)).snapshot())
    else:
        watch(a_run(arguments.run), Console(highlight=False), arguments.once)


def _profile(arguments: argparse.Namespace) -> None:
    """What a run spends its time on; writes a timeline of all its processes.

    verl profile runs/first
    """
    from verl.tracking.timeline import profile_run, words

    profile = profile_run(a_run(arguments.run))
    if arguments.json:
        print_json(asdict(profile))
    else:
        print("\n".join(words(profile)))


def _serve(arguments: argparse.Namespace) -> None:
    """The report of runs live in a browser.

    verl serve runs/first runs/second
    """
    from verl.tracking.serve import ReportServer, serve

    server = ReportServer(_distinct(arguments.run), arguments.host, arguments.port)
    print(json_line({"url": server.url}) if arguments.json else f"{server.url}  (Ctrl-C ends it)", flush=True)
    serve(server)


def _distinct(names: list[str]) -> list[RunDir]:
    return list({run.path.resolve(): run for run in map(a_run, names)}.values())


def _report(arguments: argparse.Namespace) -> None:
    """Write a run's page, or one of several runs; prints its path.

    verl report runs/first runs/second --out both.html
    """
    from verl.tracking.report import write_comparison, write_report

    runs = _distinct(arguments.run)
    if len(runs) == 1:
        page = write_report(runs[0], arguments.out)
    else:
        page = write_comparison(runs, arguments.out or runs[0].path / "compare.html")
    print(json_line({"report": str(page)}) if arguments.json else page)


def _scale(arguments: argparse.Namespace) -> None:
    """Change the number of rollout workers of a run while it runs.

    verl scale runs/first --rollout-workers 4
    """
    from verl.config import load_config

    run, wanted = a_run(arguments.run), arguments.rollout_workers
    config = load_config(str(run.config), []).config
    least, most = config.rollout.min_workers, config.rollout.max_workers
    if not run.is_locked():
        raise VerlError("the run is not running on this machine", str(run.path), "start it with verl train first")
    if not config.rollout_apart:
        fix = "start it with cluster.placement.rollout=rollout and rollout.max_workers"
        raise ConfigError("the run has no rollout workers of its own", str(run.path), fix)
    if not (least or 1) <= wanted <= (most or wanted):
        limits = f"rollout.min_workers={least or 1}, rollout.max_workers={most}"
        raise ConfigError(f"--rollout-workers is outside the run's limits ({limits})", wanted, "ask for one within")
    write_atomic(run.wishes, json_line({"rollout_workers": wanted}) + "\n")
    print(f"asked {run.path} for {wanted} rollout workers; its events.log tells when they come and go")


def _list(arguments: argparse.Namespace) -> None:
    """All runs of a folder, the newest first.

    verl run list --json
    """
    from rich.console import Console

    from verl.tracking.runs import overview, runs_under

    root = Path(arguments.root)
    runs = sorted(map(overview, runs_under(root)), key=lambda run: -(run.started or 0.0))
    if arguments.json:
        print_json([asdict(run) for run in runs])
    elif not runs:
        print(f"no runs in {root}")
    else:
        print_runs(Console(highlight=False), runs)


def print_runs(console: Console, runs: list[RunOverview]) -> None:
    """A line a run; on a narrow terminal the last columns are left out, in a pipe none."""
    from rich.text import Text

    from verl.tracking.console import printable
    from verl.tracking.runs import STYLES

    head = ("NAME", "STATUS", "STEPS", "REWARD", "HELD-OUT", "STARTED", "TOOK")
    rows = [head, *map(_cells, runs)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    while console.is_terminal and len(widths) > 2 and sum(widths) + 2 * len(widths) > console.width:
        widths.pop()
    for row in rows:
        line = Text()
        for column, width in enumerate(widths):
            style = "dim" if row is head else STYLES.get(row[1], "") if column == 1 else ""
            line.append(printable(row[column]).ljust(width) + "  ", style)
        line.rstrip()
        console.print(line, soft_wrap=True)


def _cells(run: RunOverview) -> tuple[str, ...]:
    from verl.tracking.console import duration, figure

    steps = str(run.steps) if run.planned_steps is None else f"{run.steps}/{run.planned_steps}"
    held_out = "-" if run.val_first is None else f"{figure(run.val_first)} -> {figure(run.val_last)}"
    return (run.name, run.status, steps, figure(run.reward_last), held_out, _when(run.started), duration(run.seconds))


def _when(seconds: float | None) -> str:
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _show(arguments: argparse.Namespace) -> None:
    """Everything about one run; it may still be running.

    verl run show runs/first
    """
    from rich.console import Console

    from verl.tracking.runs import describe

    run = describe(a_run(arguments.run))
    if arguments.json:
        parts = asdict(run)
        print_json(parts.pop("overview") | parts)
    else:
        print_run(Console(highlight=False), run)


def print_run(console: Console, run: RunDescription) -> None:
    """Head, curves, times, trouble, samples and paths, each where there is something to tell."""
    from rich.text import Text

    from verl.tracking.console import print_samples, printable
    from verl.tracking.live import curve_line, shares
    from verl.tracking.runs import STYLES

    def say(label: str, text: str, style: str = "") -> None:
        line = Text().append(f"{label:<12}", "dim").append(printable(text).replace("\n", " "), style)
        console.print(line, soft_wrap=True)

    seen, facts = run.overview, run.facts
    head = Text().append(printable(seen.name), "bold").append(f"  {_progress(seen)}", STYLES.get(seen.status, ""))
    console.print(head, soft_wrap=True)
    if facts.get("model"):
        say("model", f"{facts['model']} ({facts.get('dtype', '?')})")
        size = f"{facts.get('prompts_a_step', '?')} prompts x {facts.get('responses_a_prompt', '?')} responses a step"
        if "examples_a_step" in facts:
            size = f"{facts['examples_a_step']} examples a step"
        say("algorithm", f"{facts.get('algorithm', '?')}, {size}, seed {facts.get('seed', '?')}")
    for label, key in (("data", "train_files"), ("held-out", "val_files")):
        if facts.get(key):
            files = facts[key]
            say(label, ", ".join(map(str, files)) if isinstance(files, list) else str(files))
    if seen.started is not None:
        say("started", _when(seen.started))
    if run.curves:
        console.print()
    width = console.width if console.is_terminal else 100
    for label, values in run.curves.items():
        console.print(curve_line(label, values, width), soft_wrap=True)
    if run.stages:
        console.print()
        say("time", shares(run.stages))
    if run.checkpoints:
        *others, newest = map(str, run.checkpoints)
        say("checkpoint", f"step {newest}" + (f" (also {', '.join(others)})" if others else ""))
    for warning in run.warnings:
        say("warning", warning, "yellow")
    for event in run.events:
        where = f" (step {event.step})" if event.step is not None else ""
        say("event", f"{_when(event.time)} {event.kind} {event.subject}{where}: {event.detail}")
    if run.samples:
        console.print()
        console.print(Text(f"samples of step {run.samples_step}", style="dim"))
        print_samples(console, run.samples, len(run.samples))
    console.print()
    for name, path in run.files.items():
        say(name, path)


def _progress(run: RunOverview) -> str:
    from verl.tracking.console import duration

    of = f" of {run.planned_steps}" if run.planned_steps is not None else ""
    took = f", {duration(run.seconds)} of work" if run.seconds is not None else ""
    reason = f" ({run.reason})" if run.reason else ""
    return f"{run.status}{reason}: {run.steps}{of} steps{took}"
