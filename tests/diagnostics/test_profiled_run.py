"""A run that is profiled: traces by role, and a timeline with every stage and process."""

from __future__ import annotations

import json
from pathlib import Path

from faulty import build_letters, config_of, trained

from verl.tracking.timeline import profile_run


def test_a_profiled_run_leaves_traces_and_a_whole_timeline(tmp_path: Path) -> None:
    settings = {"actor__use_kl_loss": True, "profiler__tool": "torch", "profiler__roles": ["actor", "reference"]}
    run = trained(config_of(tmp_path, build_letters(tmp_path / "model"), **settings, trainer__total_training_steps=4))
    assert [folder.name for folder in run.profile_dir.iterdir()] == ["step_000002"]
    kinds = {path.name.partition(".")[0] for path in run.profile(2).iterdir()}
    assert kinds == {"actor", "reference"}
    found = profile_run(run)
    assert {operators.role for operators in found.operators} == kinds and found.usage.steps == [4]
    assert 0 < found.usage.busy["main_0"] <= 1 and found.usage.shares["rollout"] > found.usage.shares["idle"]
    events = json.loads(Path(found.timeline).read_text())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["ph"] == "M"} == {"controller", "main_0"}
    for step in (1, 2, 3, 4):
        parts = {(event["pid"], event["cat"]) for event in events if event["args"].get("step") == step}
        assert {stage for pid, stage in parts if pid == 0} >= {"rollout", "process", "update", "transfer"}
        assert {stage for pid, stage in parts if pid == 1} >= {"rollout", "process", "update"}
