"""``verl replay``: one step of a run again."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from verl.cli.arguments import Commands, command, positive, print_json, settings, tell, terminal
from verl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from verl.trainer.replay import Replayed


def add(commands: Commands) -> None:
    replay = command(commands, "replay", _replay)
    replay.add_argument("run", help="name of a run in runs/, or a path")
    replay.add_argument("words", nargs="*", default=[], metavar="key=value", help="settings in place of the run's")
    replay.add_argument("--step", type=positive, required=True, help="the step")
    replay.add_argument("--all", action="store_true", help="also show what does not differ")
    replay.add_argument("--json", action="store_true", help="{metric: [then, now]}")


def _replay(arguments: argparse.Namespace) -> None:
    """Train on a kept step again, with other settings if asked.

    verl replay my-run --step 40
    verl replay my-run --step 40 actor.optim.lr=1e-6 actor.clip_ratio=0.1

    The step's batch must have been kept (trainer.dump_steps), and the checkpoint before it (trainer.save_freq,
    trainer.keep_last); step 1 needs none. Responses and their scores are those of the run, whatever settings say of
    data, rollout and reward functions. With the run's own settings every figure is the same to the bit (on a CPU).
    """
    from verl.config import load_config
    from verl.tracking.runs import find_run
    from verl.trainer.api import settle_process

    source, overrides = settings(arguments.words)
    if source is not None:
        raise ConfigError("a setting needs the form key=value", source, f"write it as {source}=VALUE, or remove it")
    run_dir = find_run(arguments.run)
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
        _print(terminal(), replayed, arguments.all)


def _print(console: Console, replayed: Replayed, everything: bool) -> None:
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
