"""DAPO's dynamic sampling: what is kept, what is counted, when it stops; and whole runs with it."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from stage_cases import hand_batch, tiny_config, write_reward
from verl_process import assert_same_run, metric_lines

from verl.config import Config
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.run_dir import RunDir
from verl.trainer import loop
from verl.trainer.run import train
from verl.trainer.sampling import join
from verl.trainer.sources import filtered_rollout, rows_with_spread

PAD = 258


def generated(scores: list[float | None], number: int, width: int = 4, **extras: list[Any]) -> DataProto:
    """A scored batch of groups of two; uids are of draw ``number``."""
    batch = hand_batch(scores, [1 + row % width for row in range(len(scores))], n=2, width=width)
    rows = len(scores)
    padding = ~batch.batch["attention_mask"][:, 2:].bool()
    batch.batch["responses"] = batch.batch["responses"].masked_fill(padding, PAD)
    batch.batch["input_ids"] = torch.cat([batch.batch["prompts"], batch.batch["responses"]], 1)
    columns: dict[str, list[Any]] = {
        "uid": [f"train:{number}:tiny:{row // 2}" for row in range(rows)],
        "index": [row % 2 for row in range(rows)],
        "score": list(scores),
    }
    columns |= {f"reward_extra/{name}": values for name, values in extras.items()}
    counts = {"reward/scored": rows - scores.count(None), "reward/none": scores.count(None)}
    return DataProto.from_dict(batch.tensors, columns, {"metrics": counts})


def run_filter(batches: list[DataProto], wanted: int, limit: int = 0, metric: str = "score") -> DataProto:
    waiting = iter(batches)
    sampler: Any = SimpleNamespace(plan=SimpleNamespace(n=2), tokenizer=SimpleNamespace(pad_token_id=PAD))
    settings = SimpleNamespace(metric=metric, max_num_gen_batches=limit)
    config: Any = SimpleNamespace(
        algorithm=SimpleNamespace(filter_groups=settings), data=SimpleNamespace(train_batch_size=wanted)
    )
    return filtered_rollout(lambda _: next(waiting), sampler, config)


def test_groups_without_spread_are_refilled_and_counted() -> None:
    batches = [
        generated([1.0, 1.0, 1.0, 0.0], 0),
        generated([0.0, 0.0, None, 1.0], 1),  # a lone survivor has nothing to differ from
        generated([0.5, 0.0, 0.0, 0.25], 2),
    ]
    batch = run_filter(batches, wanted=2)
    assert batch.non_tensor_batch["uid"].tolist() == ["train:0:tiny:1"] * 2 + ["train:2:tiny:0"] * 2
    assert batch.meta_info["metrics"] == {
        "reward/scored": 11,
        "reward/none": 1,
        "filter_groups/gen_batches": 3,
        "filter_groups/drawn": 6,
        "filter_groups/flat": 3,
        "filter_groups/kept": 2,
        "filter_groups/surplus": 1,
        "filter_groups/score": pytest.approx(4.75 / 11),
    }


def test_b107_a_clear_stop_with_counts_when_nothing_fills() -> None:
    flat = [generated([1.0] * 4, number) for number in range(4)]
    with pytest.raises(VerlError, match="after 3 batches of prompts") as caught:
        run_filter(flat, wanted=2, limit=3)
    assert caught.value.value == "6 groups drawn, 6 without spread, 0 of 2 found"
    with pytest.raises(StopIteration):  # limit 0: on and on, here until there are no more prompts
        run_filter(flat, wanted=2)
    mixed = [generated([1.0, 0.0, 1.0, 1.0], 0), generated([1.0] * 4, 1)]
    with pytest.raises(VerlError, match="after 2 batches") as caught:
        run_filter(mixed, wanted=2, limit=2)
    assert caught.value.value == "4 groups drawn, 3 without spread, 1 of 2 found"
    assert len(run_filter([mixed[0].select(deepcopy=True)], wanted=1, limit=1)) == 2


def test_another_metric_decides() -> None:
    batch = generated([1.0, 0.0, 1.0, 0.0, 1.0, 0.0], 0, acc=[True, True, False, True, None, True])
    assert rows_with_spread(batch, "acc").tolist() == [False, False, True, True, False, False]
    assert rows_with_spread(batch, "score").tolist() == [True] * 6


def test_b087_batches_of_different_widths_and_columns_become_one() -> None:
    narrow, wide = generated([1.0, 0.0], 0, width=2, pred=["a", "b"]), generated([2.0, 3.0], 1, width=4, acc=[1, 0])
    wide.batch["prompts"] = torch.nn.functional.pad(wide.batch["prompts"], (1, 0), value=PAD)
    for name in ("input_ids", "attention_mask"):
        wide.batch[name] = torch.nn.functional.pad(wide.batch[name], (1, 0), value=PAD if name == "input_ids" else 0)
    for batch in (narrow, wide):
        batch.meta_info.pop("metrics")
    joined = join([narrow, wide], PAD)
    tensors, columns = joined.tensors, joined.non_tensor_batch
    assert tensors["prompts"].tolist() == [[PAD, 1, 1]] * 4
    assert tensors["responses"][:2].tolist() == [[0, PAD, PAD, PAD], [2, 3, PAD, PAD]]
    assert torch.equal(torch.cat([tensors["prompts"], tensors["responses"]], 1), tensors["input_ids"])
    assert tensors["attention_mask"][:2].tolist() == [[0, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 0, 0]]
    assert not bool(tensors["response_mask"][:2, 2:].any())
    assert columns["reward_extra/pred"].tolist() == ["a", "b", None, None]
    assert columns["reward_extra/acc"].tolist() == [None, None, 1, 0]


# --- whole runs ----------------------------------------------------------------------------------------------------

# Prompts with an even number get 1 whatever is answered; of the others, about every second response does.
SOME = "return float(len(set(solution_str)) % 2) if extra_info['number'] % 2 else 1.0"


def filtered_config(folder: Path, model: Path, run: str, body: str, **filtering: Any) -> Config:
    reward = write_reward(folder / "reward_of_filter.py", body)
    config = tiny_config(
        folder,
        model,
        {
            "algorithm": {"filter_groups": {"enable": True, **filtering}},
            "reward": {"custom_reward_function": {"path": str(reward)}, "scaling": "running"},
            "actor": {"ppo_mini_batch_size": 2, "shuffle": True},
            "data": {"val_files": str(folder / "train.jsonl")},
            "trainer": {
                "default_local_dir": str(folder / run),
                "total_training_steps": 4,
                "save_freq": 1,
                "val_before_train": True,
            },
            "cluster": {"threads": 1},
        },
    )
    rows = [line.removesuffix("}") for line in (folder / "train.jsonl").read_text().splitlines()]
    numbered = [f'{row}, "extra_info": {{"number": {number}}}}}' for number, row in enumerate(rows)]
    (folder / "train.jsonl").write_text("\n".join(numbered) + "\n")
    return config


def go(config: Config) -> None:
    train(config, Console(file=io.StringIO()))


class Killed(BaseException):
    """Stands in for a death at a chosen place."""


def test_law_4_and_5_a_filtered_run_is_whole_and_resumes(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(filtered_config(tmp_path, tiny_model_dir, "whole", SOME))
    lines = [line for line in metric_lines(tmp_path / "whole") if line["step"] > 0]
    assert {line["filter_groups/kept"] for line in lines} == {4}
    assert {line["training/frac_reward_zero_std"] for line in lines} == {0.0}
    for line in lines:
        drawn = line["filter_groups/drawn"]
        assert drawn == 4 * line["filter_groups/gen_batches"] > 4
        assert drawn == 4 + line["filter_groups/flat"] + line["filter_groups/surplus"]
        assert line["reward/scored"] == 3 * drawn
        assert 0 < line["critic/score/mean"] < line["filter_groups/score"]
    assert len({line["reward/scale"] for line in lines}) == 4

    real, calls = loop.process, iter(range(9))

    def dying(*arguments: Any) -> Any:
        if next(calls) == 2:
            raise Killed
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "process", dying)
        with pytest.raises(Killed):
            go(filtered_config(tmp_path, tiny_model_dir, "killed", SOME))
    go(filtered_config(tmp_path, tiny_model_dir, "killed", SOME))
    assert_same_run(tmp_path / "whole", tmp_path / "killed", 4)


def test_an_async_run_gets_further_groups_in_place_of_those_that_are_dropped(
    tmp_path: Path, tiny_model_dir: Path
) -> None:
    """Half of the prompts are always dropped; none that is kept is too old, and each is trained once."""
    config = filtered_config(tmp_path, tiny_model_dir, "run", SOME)
    update = {"mode": "async", "max_staleness": 1}
    go(config.model_copy(update={"trainer": config.trainer.model_copy(update=update)}))
    lines = [line for line in metric_lines(tmp_path / "run") if line["step"] > 0]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert {(line["filter_groups/kept"], line["filter_groups/surplus"]) for line in lines} == {(4, 0)}
    assert sum(line["filter_groups/flat"] for line in lines) >= 16
    assert max(line["training/staleness/max"] for line in lines) == 1
    files = sorted(RunDir(tmp_path / "run").samples_dir.iterdir())
    rows = [json.loads(row) for file in files for row in file.read_text().splitlines()]
    trained = [row["uid"] for row in rows if row["uid"].startswith("train")]
    assert len(trained) == 3 * len(set(trained)) == 48


def test_b107_a_run_in_which_nothing_differs_stops(tmp_path: Path, tiny_model_dir: Path) -> None:
    with pytest.raises(VerlError, match="after 3 batches of prompts") as caught:
        go(filtered_config(tmp_path, tiny_model_dir, "run", "return 0.5", max_num_gen_batches=3))
    assert caught.value.value == "12 groups drawn, 12 without spread, 0 of 4 found"
