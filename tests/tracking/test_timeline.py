"""Where a step's time goes, against sums by hand."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from verl.errors import VerlError
from verl.run_dir import RunDir
from verl.tracking.timeline import profile_run, read_timeline, rows_of, trace, usage, usual, words

# A step of 10 s: sampled for 4 s, of which its worker computes 3.5; reference 1 s; update 3 s (the worker: 2.8) with a
# look-ahead of 3 s behind it; weights 0.5 s; 0.5 s between the stages; validation 1 s.
STEP: dict[str, Any] = {
    "step": 2,
    "began": 100.0,
    "parts": [
        ("step", 0.0, 9.0),
        ("gen", 0.0, 4.0),
        ("ref", 4.0, 5.0),
        ("gen", 5.0, 8.0),
        ("update_actor", 5.0, 8.0),
        ("update_weights", 8.5, 9.0),
        ("testing", 9.0, 10.0),
    ],
    "workers": {
        "main_0": [("reference_log_probs", 4.0, 5.0), ("update_actor", 5.2, 8.0)],
        "rollout_1": [("advance", -1.0, 0.5), ("advance", 1.0, 4.0), ("advance", 5.2, 7.0), ("advance", 9.0, 10.5)],
    },
}


def test_shares_add_up_and_are_those_of_hand() -> None:
    found = usage([STEP])
    assert found.seconds == 10.0 and sum(found.shares.values()) == pytest.approx(1)
    expected = {"rollout": 0.35, "process": 0.1, "update": 0.28, "transfer": 0.05 + 0.02 + 0.05}
    expected |= {"validation": 0.1, "saving": 0.0, "idle": 0.05}
    assert found.shares == pytest.approx(expected)
    assert found.busy == pytest.approx({"main_0": 0.38, "rollout_1": (0.5 + 3.0 + 1.8 + 1.0) / 10})


def test_without_workers_in_the_file_nothing_is_taken_for_transfer() -> None:
    found = usage([{"step": 1, "parts": [("step", 0.0, 2.0), ("gen", 0.0, 2.0)]}])
    assert found.shares["rollout"] == 1.0 and found.busy == {}


def test_what_was_sampled_ahead_is_no_part_of_the_step() -> None:
    parts = [("gen", -4.0, -1.0), *STEP["parts"]]
    assert usage([STEP | {"parts": parts}]) == usage([STEP])


def test_the_trace_has_every_stage_and_worker_at_its_time() -> None:
    later = STEP | {"step": 3, "began": 112.0}
    events = trace([STEP, later])["traceEvents"]
    assert all({"ph", "ts", "pid", "tid"} <= event.keys() for event in events)
    names = {event["args"]["name"]: event["pid"] for event in events if event["ph"] == "M"}
    assert list(names) == ["controller", "main_0", "rollout_1"]
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 2 * (7 + 2 + 4)
    (update,) = [e for e in spans if e["pid"] == names["main_0"] and e["cat"] == "update" and e["args"]["step"] == 3]
    assert (update["ts"], update["dur"]) == (17_200_000, 2_800_000)
    rows = {}
    for event in spans:  # no two in one row overlap
        rows.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
    for row in rows.values():
        ordered = sorted(row)
        assert all(one[1] <= other[0] for one, other in pairwise(ordered))


def test_what_overlaps_is_beside_each_other() -> None:
    assert [row for row, _ in rows_of([("b", 1.0, 2.0), ("a", 0.0, 3.0), ("c", 2.0, 3.0)])] == [0, 1, 1]


def test_the_first_and_profiled_steps_are_left_out_where_others_are_left() -> None:
    lines = [STEP | {"step": step} for step in (1, 2, 3)]
    assert [line["step"] for line in usual([*lines, STEP | {"step": 4}], [2])] == [4]
    assert [line["step"] for line in usual(lines, [2])] == [1, 2, 3]  # a worker may still be writing in step 3


def test_words_name_the_bottleneck_and_the_operators(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run").create()
    with pytest.raises(VerlError, match="no step of this run has a timeline"):
        profile_run(run)
    lines = [STEP | {"step": step} for step in (1, 2, 2, 3, 4)]
    run.timeline.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 5, "pa')
    assert [line["step"] for line in read_timeline(run)] == [1, 2, 3, 4]
    run.profile(2).mkdir(parents=True)
    for number, seconds in ((1, 3.0), (2, 1.0)):
        body = {"role": "actor", "seconds": seconds, "operators": [["aten::mm", 2, seconds / 2], ["aten::add", 1, 0.1]]}
        (run.profile(2) / f"actor.main_0.{number}.update_actor.operators.json").write_text(json.dumps(body))
    text = "\n".join(words(profile_run(run)))
    assert (
        text.startswith("step 4: 10 s each") and "most of the time is rollout (35%): raise rollout.max_num_seqs" in text
    )
    assert "operators of actor, 4 s in all: aten::mm 50% (4 calls), aten::add 5% (2 calls)" in text
    assert json.loads((run.profile_dir / "timeline.json").read_text())["traceEvents"]
