"""Runs and checkpoints where a configuration names a model: ``model.path=runs/sft``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from verl.checkpoint.run_model import find_checkpoint, opened_model
from verl.checkpoint.store import Checkpoint
from verl.config.base import Section
from verl.errors import CheckpointError

KEYS = ("model.path", "model.tokenizer_path", "critic.model.path", "reward.model.path")

SectionT = TypeVar("SectionT", bound=Section)


def pinned(config: SectionT, report: Callable[[str], None]) -> SectionT:
    """The configuration with the newest checkpoint in place of each run, so that a later look finds the same model.

    Raises:
        CheckpointError: a run without a complete checkpoint.
    """
    for key, path in _paths(config):
        checkpoint = find_checkpoint(path)
        if checkpoint is not None and str(checkpoint.path) != path:
            report(f"{key}: {path} is its checkpoint of step {checkpoint.step}")
            config = _with(config, key, str(checkpoint.path))
    return config


@contextmanager
def opened(config: SectionT) -> Iterator[SectionT]:
    """The configuration with folders that can be loaded in place of checkpoints."""
    with ExitStack() as stack:
        for key, path in _paths(config):
            config = _with(config, key, stack.enter_context(opened_model(path)).path)
        yield config


def check_same_start(checkpoint: Checkpoint, config: Section) -> None:
    """Refuse to go on with another reference or reward model than the run began with, where those are checkpoints.

    Raises:
        CheckpointError: they differ.
    """
    now = dict(_paths(config))
    for key, name in (("model.path", "model"), ("reward.model.path", "reward_model")):
        then = str(checkpoint.meta.get(name))
        if then != now.get(key) and "checkpoints/step_" in then:
            raise CheckpointError(
                f"the run began with another checkpoint than {key} names now",
                f"{now.get(key)}, then {then}",
                f"set {key}={then}",
            )


def _paths(config: Section) -> list[tuple[str, str]]:
    found = []
    for key in KEYS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        if value is not None:
            found.append((key, value))
    return found


def _with(section: Any, key: str, value: str) -> Any:
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
