from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verl.run_dir import RunDir
from verl.tracking.samples import SampleRow, pick_groups, read_samples, rows_from_batch, spread, write_samples


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run").create()


def row(split: str = "train", uid: str = "u", index: int = 0, response: str = "r") -> SampleRow:
    return SampleRow(split, uid, index, "p", response)


def test_rows_come_back_as_written(run: RunDir) -> None:
    rows = [
        SampleRow(
            "train",
            "train:0:sums:4",
            1,
            "1+1?",
            "2",
            "2",
            1.0,
            0.5,
            "sums",
            "stop",
            3,
            [4, 5],
            {"format": 1.0, "why": "ok"},
        ),
        SampleRow("train", "train:1:sums:5", 0, "", "", {"a": [1]}, None),
    ]
    path = write_samples(run, 10, "train", rows)
    assert path == run.samples(10)
    assert read_samples(path) == (rows, 0)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [10, 10]


def test_train_and_validation_share_a_file_and_a_step_done_twice_is_there_once(run: RunDir) -> None:
    write_samples(run, 5, "val", [row("val", response="v")])
    write_samples(run, 5, "train", [row(response="first")])
    write_samples(run, 5, "train", [row(response="again"), row(index=1, response="more")])
    found, _ = read_samples(run.samples(5))
    assert [(r.split, r.response) for r in found] == [("val", "v"), ("train", "again"), ("train", "more")]
    assert list(run.samples_dir.iterdir()) == [run.samples(5)]


@given(st.text(st.characters(categories=None)))
def test_any_model_output_is_one_valid_line_and_harms_no_other(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run = RunDir(folder).create()
        path = write_samples(run, 1, "train", [row(response=text), row(index=1)])
        path.read_text(encoding="utf-8")
        found, skipped = read_samples(path)
    assert len(found) == 2 and skipped == 0
    if not any(0xD800 <= ord(c) < 0xE000 for c in text):
        assert found[0].response == text


def test_figures_that_are_not_finite_or_foreign_are_written_as_valid_json(run: RunDir) -> None:
    odd = SampleRow(
        "val", "u", 0, "p", "r", np.int64(4), math.nan, math.inf, extras={"x": np.float32(0.5), "n": math.nan}
    )
    path = write_samples(run, 1, "val", [odd])
    record = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert (record["score"], record["advantage"], record["ground_truth"]) == (None, None, 4)
    assert record["extras"] == {"x": 0.5, "n": None}


def test_reader_skips_and_counts_torn_and_foreign_lines(run: RunDir) -> None:
    path = write_samples(run, 1, "train", [row()])
    with open(path, "a") as file:
        file.write(
            '{"split": "train"}\n[]\n{"split": "train", "uid": "x", "prompt": "p", "response": 7, "index": 0}\n{"sp'
        )
    assert read_samples(path) == ([row()], 4)


def test_many_rows_are_thinned_to_whole_groups_over_the_batch(run: RunDir) -> None:
    rows = [row(uid=f"u{g}", index=i) for g in range(10) for i in range(8)]
    kept = pick_groups(rows, 24)
    assert [r.uid for r in kept] == ["u0"] * 8 + [f"u{round(4.5)}"] * 8 + ["u9"] * 8
    assert pick_groups(rows, 80) == rows
    assert len(pick_groups(rows, 3)) == 3  # a group larger than the limit is cut
    path = write_samples(run, 1, "train", rows, max_rows=24)
    assert read_samples(path)[0] == kept


@given(st.integers(0, 200), st.integers(0, 50))
def test_spread_is_even_ordered_and_has_both_ends(count: int, k: int) -> None:
    chosen = spread(count, k)
    assert len(chosen) == min(count, k) and chosen == sorted(set(chosen))
    assert all(0 <= i < count for i in chosen)
    if 2 <= k <= count:
        assert chosen[0] == 0 and chosen[-1] == count - 1
        gaps = [b - a for a, b in itertools.pairwise(chosen)]
        assert max(gaps) - min(gaps) <= 1


def batch_of_two() -> SimpleNamespace:
    nan = math.nan
    tensors = {
        "response_mask": torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool),
        "token_level_scores": torch.tensor([[0.0, 1.0, nan], [0.0, 0.0, 0.5]]),
        "advantages": torch.tensor([[0.5, 1.5, nan], [-1.0, -1.0, -1.0]]),
        "scored": torch.tensor([True, False]),
        "versions": torch.tensor([[3, 4, -1], [4, 4, 4]], dtype=torch.int32),
    }
    prompts = np.empty(2, dtype=object)
    prompts[:] = [[1, 2], [3]]
    columns = {
        "uid": np.array(["a", "a"], dtype=object),
        "index": np.array([0, 1], dtype=object),
        "prompt_ids": prompts,
        "response_text": np.array(["x", "y"], dtype=object),
        "ground_truth": np.array(["7", None], dtype=object),
        "data_source": np.array(["s", "s"], dtype=object),
        "finish_reason": np.array(["stop", "length"], dtype=object),
        "reward_extra/format": np.array([1.0, None], dtype=object),
    }
    return SimpleNamespace(batch=tensors, non_tensor_batch=columns, meta_info={})


def test_rows_of_a_batch_ignore_masked_positions_and_keep_unscored_rows_apart() -> None:
    rows = rows_from_batch(batch_of_two(), "train", lambda ids: " ".join(map(str, ids)))
    assert rows == [
        SampleRow("train", "a", 0, "1 2", "x", "7", 1.0, 1.0, "s", "stop", 2, [3, 4], {"format": 1.0}),
        SampleRow("train", "a", 1, "3", "y", None, None, -1.0, "s", "length", 3, [4, 4], {"format": None}),
    ]


def test_the_best_and_the_worst_of_the_first_prompt_keep_their_tokens() -> None:
    batch = batch_of_two()
    nan = math.nan
    batch.batch |= {
        "responses": torch.tensor([[5, 6, 0], [7, 8, 9]]),
        "rollout_log_probs": torch.tensor([[-1.0, -2.0, nan], [-1.0, -1.0, -1.0]]),
        "old_log_probs": torch.tensor([[-1.5, -1.75, nan], [-1.0, -1.0, -1.0]]),
        "scored": torch.tensor([True, True]),
    }
    best, worst = rows_from_batch(batch, "train", lambda ids: f"<{ids[0]}>" if len(ids) == 1 else "")
    assert best.tokens == {
        "text": ["<5>", "<6>"], "advantage": [0.5, 1.5], "log_prob": [-1.5, -1.75], "change": [-0.5, 0.25],
        "change_from": "the engine", "version": [3.0, 4.0],
    }  # fmt: skip
    assert worst.tokens is not None and worst.tokens["advantage"] == -1.0 and worst.tokens["change"] == 0.0
    batch.batch["ref_log_probs"] = torch.tensor([[-2.0, -2.0, nan], [-1.0, -1.0, -1.0]])
    first = rows_from_batch(batch, "train", str)[0]
    assert first.tokens is not None
    assert (first.tokens["change"], first.tokens["change_from"]) == ([0.5, 0.25], "the reference")


def test_only_rows_with_tokens_write_them(tmp_path: Path) -> None:
    run = RunDir(tmp_path).create()
    rows = [SampleRow("train", "u", 0, "p", "r", tokens={"text": ["r"]}), SampleRow("train", "u", 1, "p", "r")]
    path = write_samples(run, 1, "train", rows)
    assert ["tokens" in json.loads(line) for line in path.read_text().splitlines()] == [True, False]
    assert read_samples(path)[0] == rows
    path.write_text(path.read_text().replace('{"text": ["r"]}', "7"))
    assert read_samples(path)[0][0].tokens is None


def test_rows_say_what_a_score_became_and_why_there_is_none() -> None:
    batch = batch_of_two()
    batch.batch |= {
        "shaped_scores": torch.tensor([0.75, 0.0]),
        "token_level_rewards": torch.tensor([[-0.25, 0.5, 9.0], [0.0, 0.0, 0.0]]),
    }
    batch.non_tensor_batch["reward_reason"] = np.array([None, "ValueError: no"], dtype=object)
    scored, unscored = rows_from_batch(batch, "train", str)
    assert (scored.score, scored.shaped, scored.reward, scored.reason) == (1.0, 0.75, 0.25, None)
    assert (unscored.score, unscored.shaped, unscored.reason) == (None, None, "ValueError: no")


def test_rows_of_a_batch_without_optional_columns() -> None:
    batch = batch_of_two()
    batch.batch = {"response_mask": batch.batch["response_mask"]}
    batch.meta_info["policy_version"] = 6
    for name in ("index", "ground_truth", "data_source", "finish_reason", "reward_extra/format"):
        del batch.non_tensor_batch[name]
    first = rows_from_batch(batch, "val", str)[0]
    assert first == SampleRow("val", "a", 0, "[1, 2]", "x", response_length=2, versions=[6, 6])
