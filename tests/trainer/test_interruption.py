"""``trainer.save_on_interrupt``: the step is finished and saved, and the run goes on as if it had not been stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from rich.console import Console
from stage_cases import tiny_config
from verl_process import checkpoint_bytes, computed

from verl.checkpoint.store import CheckpointStore
from verl.trainer.resume import TOLD, held
from verl.trainer.run import train


class Ended(BaseException):
    """As the command line makes it of a SIGTERM."""


@pytest.fixture(autouse=True)
def own_sigterm() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, Ended)])
def test_the_first_signal_waits_and_the_second_does_not(
    number: int, error: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    did, handler = [], signal.getsignal(number)
    with pytest.raises(error), held(True) as interrupted:
        did.append(interrupted())
        signal.raise_signal(number)
        did.append(interrupted())
    assert did == [False, True] and signal.getsignal(number) is handler
    assert capfd.readouterr().err == TOLD.decode()
    with pytest.raises(error), held(True):
        signal.raise_signal(number)
        signal.raise_signal(number)
        did.append("not reached")
    with pytest.raises(error), held(False) as interrupted:
        signal.raise_signal(number)
        did.append("not reached")
    assert len(did) == 2 and not interrupted() and signal.getsignal(number) is handler
    with pytest.raises(error), held(True):  # a worker that dies meanwhile does not keep the run from ending
        signal.raise_signal(number)
        raise RuntimeError


def test_what_is_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held(True) as interrupted:
            signal.raise_signal(signal.SIGINT)
        assert not interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("mode", "number"),
    [({"mode": "sync", "async_save": True}, signal.SIGTERM), ({"mode": "one_step_off"}, signal.SIGINT)],
)
def test_a_step_is_saved_and_gone_on_from(
    tmp_path: Path, tiny_model_dir: Path, mode: dict[str, Any], number: int
) -> None:
    trainer = mode | {"total_training_steps": 3, "save_freq": 3, "save_on_interrupt": True}
    calls: list[str] = []

    def run(name: str, stop: int | None = None) -> Path:
        def score(data_source: str, solution_str: str, ground_truth: Any) -> float:
            calls.append(solution_str)
            if len(calls) == stop:
                signal.raise_signal(number)
            return len(set(solution_str))

        own = {"trainer": trainer | {"default_local_dir": str(tmp_path / name)}, "cluster": {"threads": 1}}
        own["reward"] = {"custom_reward_function": {"path": None}}
        calls.clear()
        train(tiny_config(tmp_path, tiny_model_dir, own), Console(quiet=True), score)
        return tmp_path / name

    whole = run("whole")
    with pytest.raises((KeyboardInterrupt, Ended)):
        run("stopped", stop=2 * 12 - 3)  # of 12 responses a step
    done = 1 if mode["mode"] == "one_step_off" else 2
    assert CheckpointStore(tmp_path / "stopped" / "checkpoints").steps() == [done]
    stopped = run("stopped")
    assert computed(stopped) == computed(whole)
    assert checkpoint_bytes(stopped, 3) == checkpoint_bytes(whole, 3)
