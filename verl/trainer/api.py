"""The Python API: ``Trainer(load_config("my.yaml")).fit()`` in a script or notebook; ``verl train`` is a shell over it.

Importing this loads no torch: :meth:`Trainer.fit` settles threads and numerical modes first, as they must be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from verl.config import Config, LoadedConfig
from verl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from verl.tracking.names import RunSummary

_DISPLAYS = ("auto", "plain", "quiet")


@dataclass(frozen=True)
class RunResult:
    """What a run left; printing it shows the summary and the paths.

    Attributes:
        metrics: every logged step in order, ``{"step": 3, "critic/score/mean": 0.5, ...}``; of a run that was resumed
            also the steps before. ``pandas.DataFrame(result.metrics)`` works as it is.
        summary: reward and validation at the start and at the end.
        folder: the run folder: config.yaml, metrics.jsonl, samples, checkpoints, events.log.
        report: the page with curves and samples.
        checkpoint: the newest checkpoint's folder; None where ``trainer.save_freq`` was -1.
    """

    metrics: list[dict[str, Any]] = field(repr=False)
    summary: RunSummary
    folder: Path
    report: Path
    checkpoint: Path | None

    @classmethod
    def of(cls, folder: str | Path) -> RunResult:
        """Of a run folder, also one that another process wrote."""
        from verl.checkpoint.store import CheckpointStore
        from verl.run_dir import RunDir
        from verl.tracking.names import read_metrics, summarize

        run_dir = RunDir(folder)
        metrics = read_metrics(run_dir)[0]
        checkpoint = CheckpointStore(run_dir.checkpoints).latest()
        return cls(metrics, summarize(metrics), run_dir.path, run_dir.report, checkpoint)

    def export(self, to: str | Path, dtype: str = "bfloat16") -> Path:
        """Write the newest checkpoint's model as a Hugging Face folder, and return the folder. Raises CheckpointError:
        there is no checkpoint, or the folder cannot be written."""
        from verl.checkpoint.export import export_hf
        from verl.checkpoint.store import CheckpointStore

        if self.checkpoint is None:
            raise CheckpointError(
                "the run has no complete checkpoint", str(self.folder), "train with trainer.save_freq above 0"
            )
        return export_hf(CheckpointStore(self.checkpoint.parent).open(self.checkpoint), Path(to), dtype)

    def __str__(self) -> str:
        from verl.diagnostics.checks_health import skipped_updates

        s, lines = self.summary, []
        if s.reward_first is not None:
            first, last = (f"first {s.window} steps", f"last {s.window}") if s.window > 1 else ("first step", "last")
            lines.append(f"reward: {s.reward_first:.3f} ({first}) -> {s.reward_last:.3f} ({last})")
        elif s.steps:
            lines.append("reward: no response was scored, so nothing was trained")
        if s.val_first is not None and s.val_last_step != s.val_first_step:
            ends = f"(step {s.val_first_step}) -> {s.val_last:.3f} (step {s.val_last_step})"
            lines.append(f"held-out: {s.val_first:.3f} {ends}")
        return "\n".join([*lines, *skipped_updates(self.metrics), f"report: {self.report}"])


class Trainer:
    """One training run. Raises ConfigError: ``config`` is something else, or the reward function cannot be used with
    it.

    Args:
        config: what :func:`verl.load_config` returns, or its ``config``.
        reward: a reward function of this program, in any signature that a reward file may have, instead of
            ``reward.custom_reward_function``. Only with ``cluster.backend=inline``: over Ray the rewards are computed
            in another process, which needs a file.
        display: what to show: ``auto`` a live display on a terminal and lines elsewhere, ``plain`` lines, ``quiet``
            nothing. Files of the run and errors are the same.
    """

    def __init__(
        self,
        config: LoadedConfig | Config,
        *,
        reward: Callable[..., Any] | None = None,
        display: Literal["auto", "plain", "quiet"] = "auto",
    ) -> None:
        if not isinstance(config, LoadedConfig | Config):
            raise ConfigError(
                "verl.Trainer takes a loaded configuration", type(config).__name__, "Trainer(load_config(...))"
            )
        self.config: Config = config.config if isinstance(config, LoadedConfig) else config
        self.notices = list(config.notices) if isinstance(config, LoadedConfig) else []
        if reward is not None:
            _check_reward(self.config, reward)
        if display not in _DISPLAYS:
            raise ConfigError("verl.Trainer has no such display", display, f"one of {', '.join(_DISPLAYS)}")
        self._reward, self._display = reward, display

    def fit(self) -> RunResult:
        """Train to the end, or go on from the run folder's last checkpoint; a finished run only gives its result.

        Ctrl-C (KeyboardInterrupt) stops it cleanly; calling it again goes on. Raises VerlError: what is wrong, the
        value, and the fix.
        """
        notices = [*self.notices, *settle_process(self.config)]

        from rich.console import Console

        from verl.models.quiet import without_bars
        from verl.trainer.run import train

        plain = False if self._display == "plain" else None
        console = Console(highlight=False, quiet=self._display == "quiet", force_interactive=plain)
        for notice in notices:
            console.print(f"note: {notice}", soft_wrap=True, markup=False)
        with without_bars():
            train(self.config, console, self._reward)
        result = RunResult.of(self.config.run_dir)
        console.print(str(result), soft_wrap=True, markup=False)
        return result


def _check_reward(config: Config, reward: Callable[..., Any]) -> None:
    name = getattr(reward, "__name__", type(reward).__name__)
    if not callable(reward):
        raise ConfigError("verl.Trainer's reward is no function", name, "give a function, not what it returns")
    if config.cluster.backend != "inline":
        raise ConfigError(
            "a reward function of this program cannot be called from the worker processes of Ray",
            f"{name}, cluster.backend={config.cluster.backend}",
            "set cluster.backend=inline, or put the function into a file and name it with "
            "reward.custom_reward_function.path",
        )
    if config.reward.custom_reward_function.path is not None or config.reward.rule != "auto":
        raise ConfigError(
            "the configuration and the argument reward both say how to score",
            name,
            "leave out reward.rule and reward.custom_reward_function.path, or the argument",
        )


def settle_process(config: Config) -> list[str]:
    """Set threads and numerical modes; what came too late for them, in words.

    Inline this process is the worker, over Ray it only steers. Thread counts are set again inside the worker, so only
    the numerical mode depends on the order.
    """
    from verl.cluster.threads import process_threads, set_environment

    inline = config.cluster.backend == "inline"
    late = inline and "torch" in sys.modules and "MKL_CBWR" not in os.environ
    set_environment(process_threads(config) if inline else 1)
    if not late:
        return []
    return [
        "torch was imported before this run, so MKL's reproducible mode may come too late: results can differ in "
        "their last bits from those of verl train (import torch after the first run, or start Python with "
        "MKL_CBWR=AUTO,STRICT)"
    ]
