"""Profiles of chosen roles, and what happens where the machine has no GPU to ask."""

from __future__ import annotations

import gzip
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.cluster import profiling
from verl.cluster.profiling import Recorder, joined, nsight_options, recorded
from verl.cluster.start import require_machine
from verl.config import build_config
from verl.config.schema_cluster import ProfilerConfig
from verl.errors import ClusterError, ConfigError


class Worker:
    def __init__(self, **settings: Any) -> None:
        self.recorder = Recorder(ProfilerConfig(**settings), "main_0")

    @recorded("actor")
    def update(self, x: torch.Tensor) -> torch.Tensor:
        return x @ x

    @recorded("critic")
    def values(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


def test_only_the_wanted_role_is_profiled_and_only_meanwhile(tmp_path: Path) -> None:
    worker, x = Worker(tool="torch", roles=["actor"]), torch.ones(4, 4)
    worker.update(x)
    worker.recorder.profile(str(tmp_path / "step_000002"))
    assert torch.equal(worker.update(x), x @ x)
    worker.values(x)
    worker.update(x)
    worker.recorder.profile(None)
    worker.update(x)
    files = sorted(path.name for path in (tmp_path / "step_000002").glob("*.json.gz"))
    assert files == ["actor.main_0.1.update.json.gz", "actor.main_0.2.update.json.gz"]
    with gzip.open(tmp_path / "step_000002" / files[0], "rt") as file:
        events = json.load(file)["traceEvents"]
    assert "aten::mm" in {event.get("name") for event in events}
    found = json.loads((tmp_path / "step_000002" / "actor.main_0.1.update.operators.json").read_text())
    assert found["role"] == "actor" and {name: calls for name, calls, _ in found["operators"]}["aten::mm"] == 1
    assert 0 < sum(seconds for *_, seconds in found["operators"]) <= found["seconds"] * 1.001


def test_a_process_of_many_short_calls_has_one_profile(tmp_path: Path) -> None:
    recorder = Recorder(ProfilerConfig(tool="torch"), "rollout_worker_1", whole="rollout")
    recorder.profile(str(tmp_path))
    for _ in range(3):
        with recorder.call("rollout", "advance"):
            torch.ones(3).sum()
    recorder.profile(None)
    assert [path.name for path in tmp_path.glob("*.json.gz")] == ["rollout.rollout_worker_1.1.step.json.gz"]
    ((_, calls, _),) = [
        row
        for row in json.loads(next(tmp_path.glob("*.operators.json")).read_text())["operators"]
        if row[0] == "aten::sum"
    ]
    assert calls == 3


def test_off_nothing_of_the_profiler_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.profiler", None)  # an import of it would fail
    worker = Worker()
    worker.update(torch.ones(2, 2))
    ((name, began, ended),) = worker.recorder.take()
    assert name == "update" and 0 <= ended - began < 60 and worker.recorder.take() == []


def test_a_failed_call_is_noted_and_closes_its_profile(tmp_path: Path) -> None:
    worker = Worker(tool="torch")
    worker.recorder.profile(str(tmp_path))
    with pytest.raises(RuntimeError):
        worker.update(torch.ones(2, 3))
    worker.update(torch.ones(2, 2))  # another profile can be begun
    assert len(list(tmp_path.glob("*.json.gz"))) >= 1


def test_neighbours_of_one_name_are_joined() -> None:
    spans = [("a", 0.0, 1.0), ("a", 1.005, 2.0), ("a", 2.5, 3.0), ("b", 3.0, 4.0)]
    assert joined(spans) == [("a", 0.0, 2.0), ("a", 2.5, 3.0), ("b", 3.0, 4.0)]


def test_a_gpu_memory_page_is_written_with_each_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU here: that CUDA's recorder is turned on, asked, and turned off again."""
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **given: asked.append(given))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"segments": [], "device_traces": []})
    with profiling._memory_history(tmp_path / "memory.html"):
        pass
    assert asked == [{"max_entries": profiling.MEMORY_EVENTS}, {"enabled": None}]
    assert "<script" in (tmp_path / "memory.html").read_text()


def test_nsight_starts_the_processes_of_the_wanted_roles(tmp_path: Path) -> None:
    config = ProfilerConfig(tool="nsys", roles=["actor"], steps=[2, 5])
    options = nsight_options(config, frozenset({"actor", "critic"}), tmp_path, "main")
    assert options["capture-range"] == "cudaProfilerApi" and options["capture-range-end"] == "repeat-shutdown:2"
    assert options["o"] == str(tmp_path / "nsight_main_%p")
    assert nsight_options(config, frozenset({"rollout"}), tmp_path, "rollout") == {}
    assert nsight_options(ProfilerConfig(tool="torch"), frozenset({"actor"}), tmp_path, "main") == {}


def test_nsight_marks_calls_and_captures_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda.profiler, "start", lambda: seen.append("start"))
    monkeypatch.setattr(torch.cuda.profiler, "stop", lambda: seen.append("stop"))
    monkeypatch.setattr(torch.cuda.nvtx, "range", lambda name: (seen.append(name), nullcontext())[1])
    worker = Worker(tool="nsight", roles=["actor"])
    worker.recorder.profile("somewhere")
    worker.update(torch.ones(2, 2))
    worker.values(torch.ones(2, 2))
    worker.recorder.profile(None)
    assert seen == ["start", "actor: update", "stop"]


def test_nsight_needs_ray_and_nsys(monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(backend: str) -> dict[str, Any]:
        return {
            "data": {"train_files": "x"},
            "model": {"path": "x"},
            "cluster": {"backend": backend},
            "profiler": {"tool": "nsight"},
        }

    with pytest.raises(ConfigError, match="inline has none"):
        build_config(tree("inline"))
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(ClusterError, match="no nsys"):
        require_machine(build_config(tree("ray")))
