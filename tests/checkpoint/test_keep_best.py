"""``trainer.keep_best``: the checkpoint with the best metric stays beside the newest."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from verl.checkpoint.store import CheckpointStore
from verl.config import load_config

NAME = "val-core/gsm8k/acc/mean@1"


def kept(root: Path, values: list[float | None], mode: str, keep_last: int = 1, start: int = 1) -> list[int]:
    """Steps that are left, one save for each value; a store of its own for each, as after a resume."""
    for step, value in enumerate(values, start):
        store = CheckpointStore(root, keep_last, NAME, mode)
        with store.begin(step) as pending:
            pending.write_state("trainer", {"step": step})
            pending.commit({}, {"actor/lr": 1.0} if value is None else {NAME: value})
    return CheckpointStore(root).steps()


@pytest.mark.parametrize(
    ("values", "mode", "steps"),
    [
        ([0.1, 0.9, 0.5], "max", [2, 3]),
        ([0.9, 0.1, 0.5], "min", [2, 3]),
        ([0.5, 0.9, 0.9, 0.1], "max", [2, 4]),  # of equals the earlier one
        ([None, 0.2, None, 0.1, None], "max", [2, 5]),  # no value: no candidate
        ([math.nan, 0.2, math.inf, 0.1, 0.0], "max", [2, 5]),  # nor one that is not finite
        ([None, None, None], "max", [3]),
        ([-5.0, -2.0, -3.0], "max", [2, 3]),
        ([0.1, 0.2, 0.3], "max", [3]),
    ],
)
def test_which_are_kept(tmp_path: Path, values: list[float | None], mode: str, steps: list[int]) -> None:
    assert kept(tmp_path, values, mode) == steps
    best = CheckpointStore(tmp_path, best_by=NAME, best_is=mode).best()
    candidates = [step for step in steps if values[step - 1] is not None]
    assert best is None if not candidates else best == tmp_path / f"step_{candidates[0]:06d}"


def test_the_old_best_goes_only_when_the_new_one_is_safe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(tmp_path, [0.9, 0.1, 0.2], "max") == [1, 3]
    import verl.checkpoint.store as module

    def full(path: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(module, "sync", full)
        with pytest.raises(Exception, match="No space left"):
            kept(tmp_path, [1.0], "max", start=4)
    assert CheckpointStore(tmp_path).steps() == [1, 3]
    assert kept(tmp_path, [1.0], "max", start=4) == [4]


def test_another_metric_starts_anew(tmp_path: Path) -> None:
    kept(tmp_path, [0.9, 0.1], "max", keep_last=2)
    assert CheckpointStore(tmp_path, best_by="other").best() is None


def test_a_name_that_no_step_has_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = CheckpointStore(tmp_path, 1, "val-core/gsm8k/acc/mean@l")
    for step, metrics in ((1, {"actor/lr": 1.0}), (2, {NAME: 0.5}), (3, {NAME: 0.5})):
        with store.begin(step) as pending:
            pending.commit({}, metrics)
    (record,) = caplog.records
    assert f"step 2 has no metric val-core/gsm8k/acc/mean@l. did you mean {NAME}?" in record.getMessage()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["trainer.save_freq=-1"], "no effect: trainer.save_freq=-1"),
        (["trainer.save_freq=5", "data.val_files=[]"], "there is no val-core/gsm8k"),
        (["trainer.save_freq=5"], "only once, at the end"),
        (["trainer.save_freq=4", "trainer.test_freq=6"], "only every 12 steps"),
        (["trainer.save_freq=4", "trainer.test_freq=8"], None),
    ],
)
def test_what_cannot_be_is_said_before_the_run(overrides: list[str], words: str | None) -> None:
    base = ["data.train_files=[a.parquet]", "data.val_files=[b.parquet]", "model.path=tiny"]
    loaded = load_config(overrides=[*base, f"trainer.keep_best.metric={NAME}", *overrides])
    said = [notice for notice in loaded.notices if "keep_best" in notice]
    assert len(said) == (words is not None) and (words is None or words in said[0])
