"""Tracking services behind fake modules that take what the real ones document, and nothing else."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from verl.errors import ConfigError
from verl.run_dir import RunDir
from verl.tracking.samples import SampleRow
from verl.tracking.services import PATIENCE, SERVICES, Wandb
from verl.tracking.trackers import TrackerContext, build_tracker, check_loggers, without_secrets

ROWS = [SampleRow("val", "u", 0, "What is 1 + 1?", "2", ground_truth=2, score=1.0)]


class Fake:
    """Notes every call as (function, positional, named); a call named in ``failing`` raises instead."""

    def __init__(self, name: str) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.failing: set[str] = set()
        self.module = ModuleType(name)
        self.module.__spec__ = ModuleSpec(name, None)

    def does(self, target: Any, name: str, result: Any = None) -> None:
        def call(*given: Any, **named: Any) -> Any:
            if name in self.failing:
                raise ConnectionError("no answer from https://me:hunter22@host/ with s3cr3t-key-of-mine")
            self.calls.append((name, given, named))
            return result

        setattr(target, name, call)

    def named(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(given, named) for called, given, named in self.calls if called == name]


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> dict[str, Fake]:
    made = {name: Fake(name) for name in SERVICES}
    run, wandb = SimpleNamespace(), made["wandb"]
    wandb.does(wandb.module, "init", run)
    wandb.does(run, "log")
    wandb.does(run, "finish")
    wandb.module.Table = lambda columns, data: ("table", columns, data)  # type: ignore[attr-defined]
    mlflow = made["mlflow"]
    mlflow.does(mlflow.module, "start_run", SimpleNamespace(info=SimpleNamespace(run_id="served-id")))
    for name in ("set_experiment", "active_run", "log_dict", "log_metrics", "end_run"):
        mlflow.does(mlflow.module, name)
    for service in ("swanlab", "trackio"):
        for name in ("init", "log", "finish"):
            made[service].does(made[service].module, name)
    made["swanlab"].module.Text = lambda text: ("text", text)  # type: ignore[attr-defined]
    for name, fake in made.items():
        monkeypatch.setitem(sys.modules, name, fake.module)
    return made


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run").create()
    run.config.write_text("trainer: {project_name: sums, experiment_name: first, seed: 3}\n")
    return run


def train(run: RunDir, names: list[str], steps: range, resumed_from: int | None = None) -> None:
    with build_tracker(names, TrackerContext(run, 9, resumed_from)) as tracker:
        for step in steps:
            tracker.samples(step, "val", ROWS)
            tracker.log(step, {"critic/score/mean": step / 10, "val-core/a/acc/mean@1": 0.5, "odd": float("nan")})


def test_all_services_at_once_get_the_run_its_figures_and_its_end(fakes: dict[str, Fake], run: RunDir) -> None:
    train(run, list(SERVICES), range(1, 3))
    config = {"trainer": {"project_name": "sums", "experiment_name": "first", "seed": 3}}
    (begun,) = fakes["wandb"].named("init")
    names = json.loads((run.path / "trackers.json").read_text())
    about = {"project": "sums", "name": "first", "config": config, "dir": str(run.path)}
    assert begun[1] == about | {"id": names["wandb"], "resume": "allow"}
    finite = {"critic/score/mean": 0.2, "val-core/a/acc/mean@1": 0.5}
    assert fakes["wandb"].named("log")[-1] == ((finite,), {"step": 2})
    table = ("table", ["prompt", "response", "ground_truth", "score"], [["What is 1 + 1?", "2", "2", 1.0]])
    assert fakes["wandb"].named("log")[0] == (({"samples": table},), {"step": 1})

    mlflow = fakes["mlflow"]
    assert mlflow.named("set_experiment") == [(("sums",), {})]
    assert mlflow.named("start_run") == [((), {"run_name": "first"})]
    assert mlflow.named("log_dict")[0] == ((config, "config.yaml"), {})
    assert mlflow.named("log_metrics")[1] == (
        ({"critic/score/mean": 0.2, "val-core/a/acc/mean_1": 0.5},),
        {"step": 2},
    )
    assert names["mlflow"] == "served-id"

    (begun,) = fakes["swanlab"].named("init")
    assert (begun[1]["project"], begun[1]["experiment_name"], begun[1]["config"]) == ("sums", "first", config)
    assert len(begun[1]["id"]) == 21 and begun[1]["id"] == names["swanlab"]
    assert fakes["swanlab"].named("log")[-1] == ((finite,), {"step": 2})

    (begun,) = fakes["trackio"].named("init")
    assert begun[1]["project"] == "sums" and begun[1]["name"].startswith("first-") and begun[1]["config"] == config
    assert fakes["trackio"].named("log") == [
        (({**finite, "critic/score/mean": 0.1},), {"step": 1}),
        ((finite,), {"step": 2}),
    ]
    for name, end in (("wandb", "finish"), ("mlflow", "end_run"), ("swanlab", "finish"), ("trackio", "finish")):
        assert len(fakes[name].named(end)) == 1
    assert run.read_events()[0].kind == "metric_not_finite" and len(run.read_events()) == 1


def test_a_resumed_run_goes_on_at_each_service_and_a_fresh_one_does_not(fakes: dict[str, Fake], run: RunDir) -> None:
    train(run, list(SERVICES), range(1, 3))
    train(run, list(SERVICES), range(2, 4), resumed_from=1)
    for name, key in (("wandb", "id"), ("swanlab", "id"), ("trackio", "name")):
        first, second = [named[key] for _, named in fakes[name].named("init")]
        assert first == second
    assert fakes["mlflow"].named("start_run")[1] == ((), {"run_id": "served-id"})
    train(run, list(SERVICES), range(1, 2))
    for name, key in (("wandb", "id"), ("swanlab", "id"), ("trackio", "name")):
        assert len({named[key] for _, named in fakes[name].named("init")}) == 2
    assert fakes["mlflow"].named("start_run")[2] == ((), {"run_name": "first"})


def test_a_service_that_fails_is_reported_once_and_gets_all_it_missed(
    fakes: dict[str, Fake], run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cr3t-key-of-mine")
    wandb = fakes["wandb"]
    with build_tracker(["wandb", "trackio"], TrackerContext(run, 9)) as tracker:
        tracker.log(1, {"x": 1.0})
        wandb.failing = {"log"}
        tracker.log(2, {"x": 2.0})
        tracker.log(3, {"x": 3.0})
        wandb.failing = set()
        tracker.log(4, {"x": 4.0})
    for name in ("wandb", "trackio"):
        assert [(given[0]["x"], named["step"]) for given, named in fakes[name].named("log")] == [
            (1.0, 1), (2.0, 2), (3.0, 3), (4.0, 4)
        ]  # fmt: skip
    (event,) = run.read_events()
    assert (event.kind, event.subject, event.step) == ("tracker_failed", "wandb", 2)
    assert event.detail == "ConnectionError: no answer from https://<log-in>@host/ with <WANDB_API_KEY>"
    left = "".join(path.read_text() for path in run.path.rglob("*") if path.is_file())
    assert "s3cr3t" not in left and "hunter22" not in left


def test_a_service_that_cannot_be_opened_is_asked_again_after_a_while(fakes: dict[str, Fake], run: RunDir) -> None:
    wandb, now = fakes["wandb"], [0.0]
    wandb.failing = {"init"}
    tracker = Wandb(run, clock=lambda: now[0])
    with pytest.raises(ConnectionError):
        tracker.start()
    tracker.log(1, {"x": 1.0})  # not so soon again: opening may take a minute
    assert wandb.calls == []
    wandb.failing, now[0] = set(), PATIENCE
    tracker.log(2, {"x": 2.0})
    assert [named["step"] for _, named in wandb.named("log")] == [1, 2]
    tracker.close()
    assert len(wandb.named("finish")) == 1


def test_a_service_never_opened_is_not_finished_but_tried_at_the_end(fakes: dict[str, Fake], run: RunDir) -> None:
    mlflow = fakes["mlflow"]
    mlflow.failing = {"log_dict"}  # behind the start of its run
    begun = SimpleNamespace(info=SimpleNamespace(run_id="r"))
    mlflow.module.active_run = lambda: begun if mlflow.named("start_run") else None  # type: ignore[attr-defined]
    with build_tracker(["mlflow"], TrackerContext(run, 9)) as tracker:
        tracker.log(1, {"x": 1.0})
        mlflow.failing = set()
    assert len(mlflow.named("start_run")) == 1  # the run that was begun is taken up
    assert mlflow.named("log_metrics") == [(({"x": 1.0},), {"step": 1})]
    assert len(mlflow.named("end_run")) == 1


@pytest.mark.parametrize("name", SERVICES)
def test_a_missing_package_is_named_with_its_extra(name: str) -> None:
    if importlib.util.find_spec(name) is not None:
        pytest.skip("it is installed")
    with pytest.raises(ConfigError, match=rf"pip install 'verl\[{name}\]'"):
        check_loggers(["console", name])
    assert f'{name} = ["{name}>=' in (Path(__file__).parents[2] / "pyproject.toml").read_text()


def test_what_looks_like_a_secret_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_TOKEN", "abcdefgh12")
    monkeypatch.setenv("SHORT_KEY", "a")  # would blank out every a
    assert without_secrets("a abcdefgh12 at http://u:p@h:80/x@y") == "a <SOME_TOKEN> at http://<log-in>@h:80/x@y"
