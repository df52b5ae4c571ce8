"""``trainer.alarms`` in real runs that diverge: told once, and the run goes on, pauses or stops."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from faulty import build_letters, config_of, found, trained

from verl.diagnostics.doctor import AlarmRaised
from verl.run_dir import RunDir
from verl.tracking.runs import overview

DIVERGES = {
    "actor__use_kl_loss": True,
    "actor__optim__lr": 0.3,
    "trainer__total_training_steps": 5,
    "trainer__alarms__kl": 1e-3,
}


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_letters(tmp_path_factory.mktemp("letters"))


def alarms_of(run_dir: RunDir) -> list[tuple[str, int | None]]:
    return [(event.subject, event.step) for event in run_dir.read_events() if event.kind == "alarm"]


def test_warn_tells_once_and_goes_on(tmp_path: Path, letters: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = trained(config_of(tmp_path, letters, **DIVERGES))
    assert overview(run).status == "finished" and overview(run).steps == 5
    assert len({name for name, _ in alarms_of(run)}) == len(alarms_of(run))
    assert ("kl_exploded", 2) in alarms_of(run)
    assert "alarm at step 2: The policy is far from where it started" in caplog.text
    assert "kl_exploded" in found(run)


@pytest.mark.parametrize(("action", "saved"), [("pause", [2]), ("stop", [])])
def test_the_run_ends_and_goes_on_when_asked(tmp_path: Path, letters: Path, action: str, saved: list[int]) -> None:
    settings: dict[str, Any] = {**DIVERGES, "trainer__alarms__action": action, "trainer__alarms__entropy": None}
    settings |= {"trainer__alarms__length": None, "trainer__alarms__reward": None, "trainer__keep_last": None}
    config = config_of(tmp_path, letters, **settings)
    with pytest.raises(AlarmRaised, match=f"trainer.alarms.action={action}") as raised:
        trained(config)
    assert not raised.value.bad_input
    run = RunDir(config.run_dir)
    assert sorted(int(path.name[5:]) for path in run.checkpoints.iterdir()) == saved
    assert alarms_of(run) == [("kl_exploded", 2)]
    assert str(run.path) in raised.value.fix and "an alarm, see trainer.alarms" in run.report.read_text()
    assert ("goes on from the checkpoint of step 2" in raised.value.fix) == (action == "pause")
    seen = overview(run)
    assert (seen.status, seen.reason, seen.steps) == ("stopped", "an alarm, see trainer.alarms", 2)
    if action == "pause":
        trained(config)
        assert overview(run).status == "finished" and alarms_of(run) == [("kl_exploded", 2)]


def test_null_turns_a_signal_off(tmp_path: Path, letters: Path) -> None:
    off = {f"trainer__alarms__{name}": None for name in ("kl", "entropy", "length", "grad_norm", "reward")}
    run = trained(config_of(tmp_path, letters, **DIVERGES | off))
    assert alarms_of(run) == [] and "kl_exploded" not in found(run)
