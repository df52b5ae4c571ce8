"""``verl run list``, ``verl run show`` and finding a run by name, on folders of every kind."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from verl.checkpoint.store import CheckpointStore
from verl.cli import entry
from verl.cli.runs import print_run, print_runs
from verl.errors import VerlError
from verl.run_dir import RunDir
from verl.tracking.runs import RunOverview, describe, find_run, overview
from verl.tracking.samples import SampleRow, write_samples
from verl.tracking.trackers import JsonlTracker

CONFIG = """\
model: {path: tiny-llama, dtype: float32}
algorithm: {adv_estimator: grpo}
data: {train_files: [train.jsonl], val_files: [val.jsonl], train_batch_size: 8}
rollout: {n: 4}
trainer: {seed: 7}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder to work in; the handler of SIGTERM is put back afterwards."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    yield tmp_path
    signal.signal(signal.SIGTERM, before)


def make(
    name: str, steps: int = 4, last: tuple[str, str] | None = ("finished", "step 4"), start: float = 1.7e9
) -> RunDir:
    """A run of four steps whose reward rises from 0.1 by 0.1, with validation at 0 and 4."""
    run = RunDir(Path("runs") / name).create()
    run.config.write_text(CONFIG)
    run.log_event("started", "run", "step 0 of 4", 0)
    tracker = JsonlTracker(run)
    for step in range(steps + 1):
        line: dict[str, Any] = {"val-core/sums/acc/mean@1": 0.25 + step / 8} if step in (0, 4) else {}
        if step:
            line |= {"critic/score/mean": step / 10, "timing_s/gen": 3.0, "timing_s/update_actor": 1.0}
        tracker.log(step, line)
    if last is not None:
        run.log_event(last[0], "run", last[1], steps)
    # The clocks of what was just written, set to what the test says.
    for file in (run.metrics, run.events):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        moved = [line | {"time": start + 4 * line["step"]} for line in lines]
        file.write_text("".join(json.dumps(line) + "\n" for line in moved))
    return run


def say(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = entry.main(list(words))
    return code, *capsys.readouterr()


# --- list -----------------------------------------------------------------------------------------------------------


def test_every_state_in_one_list_the_newest_first(capsys: pytest.CaptureFixture[str]) -> None:
    make("finished", start=1.7e9)
    make("interrupted", 2, ("stopped", "KeyboardInterrupt"), start=1.7e9 + 1000)
    make("terminated", 2, ("stopped", "_Terminated"), start=1.7e9 + 2000)
    make("failed", 3, ("stopped", "RewardError"), start=1.7e9 + 3000)
    make("killed", 1, None, start=1.7e9 + 4000)
    running = make("running", 2, None, start=1.7e9 + 5000)
    (Path("runs") / "notes").mkdir()
    with running.lock():
        code, out, _ = say("run", "list", "--json", capsys=capsys)
        again = say("run", "list", capsys=capsys)[1]
    listed = {run["name"]: run for run in json.loads(out)}
    assert code == 0
    assert list(listed) == ["running", "killed", "failed", "terminated", "interrupted", "finished"]
    assert {name: (run["status"], run["steps"]) for name, run in listed.items()} == {
        "running": ("running", 2),
        "killed": ("crashed", 1),
        "failed": ("crashed", 3),
        "terminated": ("stopped", 2),
        "interrupted": ("stopped", 2),
        "finished": ("finished", 4),
    }
    assert [listed[name]["reason"] for name in ("failed", "terminated", "interrupted")] == [
        "RewardError",
        "SIGTERM",
        "Ctrl-C",
    ]
    finished = listed["finished"]
    assert finished["planned_steps"] == 4 and finished["path"] == "runs/finished"
    assert (finished["val_first"], finished["val_last"], finished["started"]) == (0.25, 0.75, 1.7e9)
    assert finished["reward_last"] == pytest.approx(0.35) and finished["seconds"] == 16.0
    lines = again.splitlines()
    assert lines[0].split() == ["NAME", "STATUS", "STEPS", "REWARD", "HELD-OUT", "STARTED", "TOOK"]
    assert lines[-1].split()[:6] == ["finished", "finished", "4/4", "0.3500", "0.2500", "->"]
    assert lines[-1].endswith("16.0s")
    assert not running.is_locked() and overview(running).status == "crashed"


def test_no_runs_and_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = say("run", "list", capsys=capsys)
    assert code == 2 and "no folder of runs there" in err and "runs" in err
    Path("runs").mkdir()
    assert say("run", "list", capsys=capsys)[:2] == (0, "no runs in runs\n")
    assert json.loads(say("run", "list", "--json", capsys=capsys)[1]) == []


def test_runs_below_a_project_are_found_and_a_run_lists_itself(capsys: pytest.CaptureFixture[str]) -> None:
    make("project/one")
    make("two")
    assert {run["name"] for run in json.loads(say("run", "list", "--json", capsys=capsys)[1])} == {"one", "two"}
    assert len(json.loads(say("run", "list", "runs/two", "--json", capsys=capsys)[1])) == 1


@pytest.mark.parametrize(("width", "shown"), [(25, 3), (40, 4), (60, 5), (100, 7)])
def test_a_narrow_terminal_gets_fewer_columns(width: int, shown: int, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunOverview("a-run", "runs/a-run", "finished", "", 4, 4, 0.35, 0.25, 0.75, 1.7e9, 16.0)
    print_runs(Console(force_terminal=True, color_system=None, width=width), [run])
    head, line = capsys.readouterr().out.splitlines()
    assert len(head.split()) == shown and max(len(head), len(line)) <= width


# --- show -----------------------------------------------------------------------------------------------------------


def test_show_tells_everything(capsys: pytest.CaptureFixture[str]) -> None:
    run = make("mine")
    for step in (2, 4):
        with CheckpointStore(run.checkpoints).begin(step) as pending:
            pending.write_state("trainer", {"step": step})
            pending.commit()
    rows = [SampleRow("train", "u", i, "1 + 1?", f"\x1b[2Janswer {i}", score=float(i)) for i in range(5)]
    write_samples(run, 4, "train", rows)
    run.log_event("tracker_failed", "tensorboard", "OSError: full", 3)
    code, out, _ = say("run", "show", "mine", capsys=capsys)
    assert code == 0 and "\x1b" not in out
    assert out.startswith("mine  finished: 4 of 4 steps, 16.0s of work\n")
    for line in (
        "model       tiny-llama (float32)",
        "algorithm   grpo, 8 prompts x 4 responses a step, seed 7",
        "data        train.jsonl",
        "held-out    val.jsonl",
        "time        gen 75%, update 25%",
        "checkpoint  step 4 (also 2)",
    ):
        assert line in out
    assert "▁▃▆█" in out and "0.1000 to 0.4000" in out and "0.2500 to 0.7500" in out
    assert "warning     Tracker failed (step 3): tensorboard" in out
    assert "tracker_failed tensorboard (step 3): OSError: full" in out
    assert "answer 4" in out and "answer 0" in out and "answer 2" not in out
    assert "runs/mine/checkpoints/step_000004" in out

    data = json.loads(say("run", "show", "runs/mine", "--json", capsys=capsys)[1])
    assert data["status"] == "finished" and data["checkpoints"] == [2, 4]
    assert data["curves"]["reward"] == [0.1, 0.2, 0.3, 0.4] and data["curves"]["held-out"] == [0.25, 0.75]
    assert data["stages"] == {"gen": 12.0, "update": 4.0}
    assert data["facts"]["algorithm"] == "grpo" and data["files"]["config"] == "runs/mine/config.yaml"
    assert [row["score"] for row in data["samples"]] == [4.0, 0.0]


def damage_torn(run: RunDir) -> None:
    with open(run.metrics, "a") as file:
        file.write('{"step": 5, "cri')
    write_samples(run, 4, "val", [SampleRow("val", "u", 0, "p", "r")])
    with open(run.samples(4), "a") as file:
        file.write("torn")


def damage_config(run: RunDir) -> None:
    run.config.write_text("a: [b")


def damage_copied(run: RunDir) -> None:
    for file in (run.config, run.events, run.lock_file):
        file.unlink(missing_ok=True)
    shutil.rmtree(run.checkpoints)


def damage_checkpoint(run: RunDir) -> None:
    (run.checkpoints / "step_000004").mkdir()


def damage_started(run: RunDir) -> None:
    run.metrics.unlink()
    run.events.unlink()
    run.config.unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (damage_torn, ["1 unreadable line in metrics.jsonl", "1 unreadable line in the newest samples", "finished: 4"]),
        (damage_config, ["config.yaml cannot be read", "finished: 4 of 4"]),
        (damage_copied, ["there is no config.yaml", "unknown (events.log says nothing about its end): 4 steps"]),
        (damage_checkpoint, ["step_000004 is no complete checkpoint", "finished"]),
        (damage_started, ["empty (nothing was trained): 0 steps"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_show_of_a_damaged_run_says_what_is_wrong_with_it(
    damage: Callable[[RunDir], None], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    damage(make("mine"))
    code, out, err = say("run", "show", "mine", capsys=capsys)
    assert code == 0 and not err
    for word in words:
        assert word in out
    assert say("run", "list", capsys=capsys)[0] == 0
    json.loads(say("run", "show", "mine", "--json", capsys=capsys)[1])


@pytest.mark.parametrize("width", [40, 200])
def test_curves_of_show_fit_the_terminal(width: int, capsys: pytest.CaptureFixture[str]) -> None:
    description = describe(make("mine"))
    print_run(Console(force_terminal=True, color_system=None, width=width), description)
    curves = [line for line in capsys.readouterr().out.splitlines() if "█" in line]
    assert len(curves) == 2 and all(len(line) <= width for line in curves)


# --- finding --------------------------------------------------------------------------------------------------------


def test_a_run_is_found_by_name_by_path_and_from_inside(here: Path) -> None:
    run = make("mine")
    other = shutil.copytree(run.path, here / "elsewhere" / "copy")
    for name in ("mine", "runs/mine", "runs/mine/", str(run.path.absolute()), "runs/mine/metrics.jsonl"):
        assert find_run(name).path.resolve() == run.path.resolve(), name
    for name in ("mine/samples", "runs/mine/checkpoints"):
        assert find_run(name).path.resolve() == run.path.resolve(), name
    assert find_run("elsewhere/copy").path.resolve() == other.resolve()
    (here / "mine").mkdir()  # a folder of that name that is no run does not hide the run
    assert find_run("mine").path == Path("runs/mine")


@pytest.mark.parametrize(
    ("name", "what", "fix"),
    [
        ("mnie", "no such run folder", "did you mean mine\\? runs in runs: mine, other"),
        ("runs/mnie", "no such run folder", "did you mean mine"),
        ("zzzz", "no such run folder", "fix:   runs in runs: mine, other"),
        ("foreign", "not a run folder", "runs in runs: mine, other"),
        ("nowhere/mine", "no such run folder", "there are no runs in nowhere"),
        ("", "not a run folder", "runs in runs"),
    ],
)
def test_what_is_no_run(name: str, what: str, fix: str, here: Path) -> None:
    make("mine")
    make("other")
    (here / "foreign").mkdir()
    (here / "foreign" / "model.safetensors").write_bytes(b"x")
    with pytest.raises(VerlError, match=what) as caught:
        find_run(name)
    assert re.search(fix, str(caught.value))


@pytest.mark.parametrize("command", [["report"], ["run", "show"], ["export", "--to", "model"]], ids=" ".join)
def test_every_command_finds_runs_alike(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    make("mine")
    code, _, err = say(*command, "mnie", capsys=capsys)
    assert code == 2 and "did you mean mine?" in err
    code, out, err = say(*command, "mine", capsys=capsys)
    assert (code, "no complete checkpoint" in err) == ((2, True) if command[0] == "export" else (0, False))
    assert command[0] != "report" or out == "runs/mine/report.html\n"


@pytest.mark.parametrize(
    ("line", "holds"),
    [
        ("watch runs/a --json", lambda told: (told["metrics"]["critic/score/mean"], told["planned_steps"]) == (0.4, 4)),
        ("watch runs/a --json", lambda told: told["status"] == "finished" and told["events"][0]["kind"] == "started"),
        ("report runs/a --json", lambda told: Path(told["report"]).read_text().startswith("<!")),
        ("report runs/a runs/b --json", lambda told: told == {"report": "runs/a/compare.html"}),
        ("serve runs/a --port 0 --json", lambda told: told["url"].startswith("http://127.0.0.1:")),
        ("presets --json", lambda told: "group advantages" in told["cispo"]),
        ("metrics explain actor/lr --json", lambda told: (told[0]["name"], told[0]["unit"]) == ("actor/lr", "rate")),
        ("metrics reference --json", lambda told: told["Critic"][0]["name"] == "critic/vf_loss"),
        ("config explain lr --json", lambda told: {"actor.optim.lr", "critic.optim.lr"} <= _keys(told)),
        ("config explain actor.optim --json", lambda told: all(key.startswith("actor.optim.") for key in _keys(told))),
        ("config explain --json", lambda told: "data.seed" in _keys(told)),
    ],
)  # fmt: skip
def test_what_machines_read(
    line: str, holds: Callable[[Any], bool], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        make(name)
    monkeypatch.setattr("verl.tracking.serve.serve", lambda server: server.server_close())
    assert entry.main(line.split()) == 0
    assert holds(json.loads(capsys.readouterr().out))


def _keys(told: list[dict[str, Any]]) -> set[str]:
    return {fact["key"] for entry in told for fact in entry["keys"]}
