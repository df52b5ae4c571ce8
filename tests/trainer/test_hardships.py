"""What a machine does to a run of days: a full disk, a kill, thousands of steps; and that no secret stays behind."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from verl_process import GRPO, ROOT, WarmVerl, listening, metric_lines, reached, train, verl_started

from verl.checkpoint.store import CheckpointStore

SHORT = ("data.val_files=[]", "trainer.save_freq=1", "data.train_batch_size=2", "actor.ppo_mini_batch_size=2")
POOLS = (
    "cluster.pools.rollout.processes=1",
    "cluster.pools.rollout.threads=1",
    "cluster.placement.rollout=rollout",
)
SECRETS = ("WANDB_API_KEY", "OPENAI_API_KEY", "HF_TOKEN", "RAY_AUTH_TOKEN", "MLFLOW_TRACKING_PASSWORD")


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmVerl]:
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, f"geheim-{name}")
        runner = WarmVerl()
    yield runner
    runner.close()


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A file system of that size."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "none", str(folder)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("no right to mount a file system here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("small_disk", "saved"), [("1m", []), ("2m", [1])], indirect=["small_disk"])
def test_b145_disk_full(warm: WarmVerl, tmp_path: Path, small_disk: Path, saved: list[int]) -> None:
    """A checkpoint of the tiny model takes 1.1 MB: there is no room, or none for the next one beside the first."""
    arguments = train(GRPO, small_disk / "run", *SHORT, "trainer.total_training_steps=30", "trainer.keep_last=1")
    for _ in range(1 + len(saved)):  # and once more from what is left
        done = warm(*arguments, log=tmp_path / "log")
        assert done.code == 1 and "No space left on device" in done.err and "Traceback" not in done.err, done.err
        assert "free space on that disk" in done.err
        store = CheckpointStore(small_disk / "run" / "checkpoints")
        assert store.steps() == saved
        for step in saved:
            store.open(step).verify()
        assert [path.name for path in store.root.iterdir() if path.name.startswith(".")] == []


def test_secrets_stay_in_the_environment_and_own_code_is_noted(warm: WarmVerl, tmp_path: Path) -> None:
    run, reward = tmp_path / "run", tmp_path / "reward.py"
    reward.write_bytes((ROOT / "examples/tiny/reward.py").read_bytes())
    words = train(GRPO, run, *SHORT, f"reward.custom_reward_function.path={reward}", "trainer.save_freq=1")
    done = warm(*words, "trainer.total_training_steps=1", log=tmp_path / "log")
    assert done.code == 0 and "has changed" not in done.out, done.err
    left = [path for path in run.rglob("*") if path.is_file()]
    assert len(left) > 5
    for text in (done.out.encode(), done.err.encode(), *(path.read_bytes() for path in left)):
        assert b"geheim-" not in text
    digests = [hashlib.sha256(reward.read_bytes()).hexdigest()]
    reward.write_text(reward.read_text() + "\n")
    digests.append(hashlib.sha256(reward.read_bytes()).hexdigest())
    done = warm(*words, "trainer.total_training_steps=2", log=tmp_path / "log")
    assert done.code == 0 and f"note: since this run last started {reward} has changed" in done.out, done.err
    events = [json.loads(line) for line in (run / "events.log").read_text().splitlines()]
    noted = [(event["step"], event["subject"], event["detail"]) for event in events if event["kind"] == "user_code"]
    assert noted == [(step, str(reward), f"sha256 {digest}") for step, digest in enumerate(digests)]


def leftovers() -> set[str]:
    """Shared memory, and temporary files of ours."""
    temporary = Path(tempfile.gettempdir())
    return {str(path) for path in (*Path("/dev/shm").iterdir(), *temporary.glob("verl-*"))}


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL, None], ids=str)
def test_nothing_is_left(tmp_path: Path, number: int | None) -> None:
    """Over Ray: processes, shared memory and temporary files after a run's end, whatever it is."""
    before = leftovers()
    steps = 3 if number is None else 100000
    arguments = train(GRPO, tmp_path / "run", *SHORT, *POOLS, "cluster.backend=ray")
    with verl_started(*arguments, f"trainer.total_training_steps={steps}", log=tmp_path / "log") as command:
        command.wait_until(reached(tmp_path / "run", 2))
        if number is not None:
            command.signal(number)
        command.wait(60)
        command.wait_for_nothing_left(30)
    deadline = time.monotonic() + 30
    while left := leftovers() - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)


# A run with a tracker that looks at all its processes at every tenth step.
WATCHED = """
import json, os, sys
from pathlib import Path
sys.path.append("tests")
from verl_process import MARK, living
from verl.cli import main
from verl.tracking.trackers import LOGGERS, MetricTracker

class Watcher(MetricTracker):
    def __init__(self, file):
        self._file = file

    def log(self, step, metrics):
        if step % 10:
            return
        held = {}
        for process, name in living(os.getpid(), os.environ[MARK]).items():
            try:
                status = Path(f"/proc/{process}/status").read_text()
                anonymous = int(status.partition("RssAnon:")[2].split()[0]) / 1024
                held[f"{name} {process}"] = [len(os.listdir(f"/proc/{process}/fd")), anonymous]
            except (OSError, IndexError):
                continue  # it ended
        store = 0.0
        if "ray" in sys.modules and sys.modules["ray"].is_initialized():
            ray = sys.modules["ray"]
            name = "object_store_memory"
            store = (ray.cluster_resources()[name] - ray.available_resources().get(name, 0.0)) / 2**20
        with self._file.open("a") as file:
            file.write(json.dumps({"step": step, "held": held, "store": store}) + "\\n")

LOGGERS["watcher"] = lambda context: Watcher(context.run_dir.path / "held.jsonl")
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.drill
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_two_thousand_steps(tmp_path: Path, backend: str) -> None:
    """Processes, file handles, memory and object store of the second half are what they were in the first.

    A run in one process listens nowhere.
    """
    steps = int(os.environ.get("VERL_DRILL_STEPS", "2000"))
    run = tmp_path / "run"
    more = (f"trainer.total_training_steps={steps}", "trainer.save_freq=50", "rollout.n=2")
    more += ("data.max_response_length=4", "trainer.logger=[console,watcher]", f"cluster.backend={backend}")
    arguments = train(GRPO, run, *SHORT[:1], *SHORT[2:], *more, *(POOLS if backend == "ray" else ()))
    with verl_started(*arguments, log=tmp_path / "log", program=("-c", WATCHED)) as command:
        while command.process.poll() is None:
            time.sleep(0.5)
            if backend == "inline" and metric_lines(run):
                assert listening(command.running()) == {}
        assert command.process.returncode == 0, command.wait(1)
        command.wait_for_nothing_left(30)
    assert len(metric_lines(run)) == steps
    looks = [json.loads(line) for line in (run / "held.jsonl").read_text().splitlines()]
    early, late = looks[len(looks) // 4 : len(looks) // 2], looks[len(looks) // 2 :]
    # None is new; one that waits in vain for rewards to compute may have ended.
    assert {name for look in late for name in look["held"]} <= {name for look in early for name in look["held"]}
    for name in looks[-1]["held"]:
        (handles, memory), (handles_late, memory_late) = (
            [max(look["held"][name][i] for look in part if name in look["held"]) for i in (0, 1)]
            for part in (early, late)
        )
        print(f"{name}: {handles} -> {handles_late} handles, {memory:.1f} -> {memory_late:.1f} MiB")
        assert handles_late <= handles + 2, name
        assert memory_late < 1.05 * memory + 2, name
    store = [max(look["store"] for look in part) for part in (early, late)]
    print(f"object store: {store[0]:.1f} -> {store[1]:.1f} MiB")
    assert store[1] < 1.05 * store[0] + 1
