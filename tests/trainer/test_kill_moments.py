"""Law 4 with SIGKILL: killed at any moment and started again, a run ends as if it had never been disturbed."""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from verl_process import (
    GRPO,
    PPO,
    WarmVerl,
    assert_same_run,
    metric_lines,
    reached,
    steps,
    train,
    verl,
    verl_started,
)

from verl.checkpoint.store import CheckpointStore
from verl.run_dir import RunDir
from verl.tracking.samples import read_samples

STEPS = 4
MODES = {
    "sync": (PPO,),
    "one_step_off": (GRPO, "trainer.mode=one_step_off"),
    "async": (GRPO, "trainer.mode=async", "trainer.max_staleness=0", "trainer.async_save=true"),
    "stale": (GRPO, "trainer.mode=async", "trainer.max_staleness=1"),  # every law but that of equal bits
}
SETTINGS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=2",
    "data.train_batch_size=4",
    "actor.ppo_mini_batch_size=2",
    "data.val_max_samples=2",
    "trainer.keep_last=1",
    "trainer.keep_best.metric=critic/score/mean",
    "trainer.keep_best.mode=min",
)

# Where a run is when it dies, and how long after that at the most, in seconds.
MOMENTS = {
    "start": ("verl.trainer.run:_train", 1.5),  # anywhere in the first seconds
    "clean-up": ("verl.trainer.run:take_up", 0.02),
    "restoring": ("verl.trainer.state:TrainerState.restore", 0.05),
    "rollout": ("verl.cluster.worker:Worker.generate", 0.2),
    "scoring": ("verl.cluster.worker:Worker.score", 0.02),
    "process": ("verl.trainer.loop:process", 0.05),
    "update": ("verl.trainer.loop:update", 0.1),
    "publication": ("verl.cluster.worker:Worker.publish", 0.005),
    "samples": ("verl.trainer.loop:TrainingLoop.write_samples", 0.01),
    "validation": ("verl.trainer.loop:evaluate", 0.1),
    "metrics": ("verl.tracking.trackers:append_line", 0.0005),
    "save": ("verl.trainer.saving:Saver.save", 0.03),
    "commit": ("verl.checkpoint.store:PendingCheckpoint.commit", 0.01),
    "rename": ("verl.checkpoint.store:CheckpointStore._put_in_place", 0.001),
    "pruning": ("verl.checkpoint.store:CheckpointStore._prune", 0.002),
    "report": ("verl.trainer.loop:write_report", 0.05),
}


def arguments(mode: str, folder: Path, *more: str) -> tuple[str, ...]:
    config, *settings = MODES[mode]
    return train(config, folder, *SETTINGS, *settings, *more)


def moment(name: str, random_: random.Random, call: int) -> dict[str, object]:
    place, longest = MOMENTS[name]
    once = name in ("start", "clean-up", "restoring")
    return {"place": place, "call": 1 if once else call, "delay": random_.choice((0.0, random_.uniform(0, longest)))}


def drill(warm: WarmVerl, mode: str, folder: Path, names: list[str], seed: int) -> int:
    """Die once for each name, in runs that go on where the last one died; every run that ends is compared. Deaths."""
    random_ = random.Random(seed)
    whole, died, number = folder / "whole", 0, 0
    assert warm(*arguments(mode, whole), log=folder / "whole").code == 0
    said: list[str] = []
    for name in [*names, None]:
        run = folder / f"run-{number}"
        when = name and moment(name, random_, random_.randint(1, 3))
        done = warm(*arguments(mode, run), log=folder / "log", moment=when or None)
        said.append(f"{when}: {done.code}")
        assert done.code in (0, -signal.SIGKILL) if name else done.code == 0, (said, done.err)
        died += done.code != 0
        if done.code == 0:
            assert_laws(run) if mode == "stale" else assert_undisturbed(whole, run, said)
            number += 1
    return died


def assert_undisturbed(whole: Path, run: Path, said: list[str]) -> None:
    try:
        assert_same_run(whole, run, STEPS)
        best = [CheckpointStore(r / "checkpoints", None, "critic/score/mean", "min").best() for r in (whole, run)]
        assert best[0] and best[1] and best[0].name == best[1].name
        samples = [[file.read_text() for file in sorted(RunDir(r).samples_dir.iterdir())] for r in (whole, run)]
        assert samples[0] == samples[1]
        assert f'"val_last_step": {STEPS}' in RunDir(run).report.read_text()
        assert RunDir(run).read_events()[-1].kind == "finished"
        left = sorted(path.name for path in run.rglob("*") if ".partial-" in path.name or path.suffix == ".tmp")
        assert not left
    except AssertionError as error:
        raise AssertionError(f"after {said}") from error


def assert_laws(run: Path) -> None:
    """Every step once, of whole batches and groups; no slot twice; nothing older than the bound; a whole checkpoint."""
    assert steps(run) == list(range(STEPS + 1))
    assert all(line.get("training/staleness/max", 0) <= 1 for line in metric_lines(run))
    trained = []
    for step in range(1, STEPS + 1):
        rows = [row for row in read_samples(RunDir(run).samples(step))[0] if row.split == "train"]
        assert len(rows) == 32 and set(Counter(row.uid for row in rows).values()) == {8}
        assert all(step - 2 <= version < step for row in rows for version in row.versions or ())
        trained += [(row.uid, row.index) for row in rows]
    assert len(set(trained)) == len(trained)
    CheckpointStore(run / "checkpoints").open(STEPS).verify()
    assert RunDir(run).read_events()[-1].kind == "finished"


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmVerl]:
    runner = WarmVerl()
    yield runner
    runner.close()


@pytest.mark.parametrize(
    ("mode", "names"),
    [("sync", ["update", "commit"]), ("one_step_off", ["save", "publication"]), ("async", ["rollout", "rename"])],
)
def test_law_4_killed(warm: WarmVerl, tmp_path: Path, mode: str, names: list[str]) -> None:
    assert drill(warm, mode, tmp_path, names, seed=3) == 2


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", MODES)
def test_law_4_killed_at_thirty_moments(warm: WarmVerl, tmp_path: Path, mode: str) -> None:
    seed = time.time_ns() % 100_000
    print("seed", seed)
    names = random.Random(seed).sample([*MOMENTS, *MOMENTS], 30)
    assert drill(warm, mode, tmp_path, names, seed) >= 20  # a moment may never come, or come after the end


@pytest.mark.drill
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mode", ["one_step_off", "async", "stale"])
def test_law_4_killed_over_ray(warm: WarmVerl, tmp_path: Path, mode: str) -> None:
    """With rollout processes of their own, which sample while the step trains: the run is the one in one process."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert warm(*arguments(mode, whole), log=tmp_path / "whole").code == 0
    pools = (
        "cluster.pools.rollout.processes=2",
        "cluster.pools.rollout.threads=1",
        "cluster.placement.rollout=rollout",
    )
    over_ray = arguments(mode, run, "cluster.backend=ray", *pools)
    random_ = random.Random(time.time_ns())
    for step in (1, 2, 3):
        with verl_started(*over_ray, log=tmp_path / "log") as command:
            command.wait_until(reached(run, step))
            time.sleep(random_.uniform(0.0, 0.5))
            command.signal(signal.SIGKILL)
            command.wait(10)
            command.wait_for_nothing_left(30)
    assert verl(*over_ray, log=tmp_path / "last").code == 0
    if mode == "stale":
        assert_laws(run)
    else:
        assert_same_run(whole, run, STEPS)
