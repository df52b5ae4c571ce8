"""The Python API as a notebook uses it: results, twice in one process, inside an event loop, with Ctrl-C."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import verl
from verl import Trainer, load_config
from verl.errors import CheckpointError, ConfigError, EngineError, RewardError, VerlError
from verl.run_dir import RunDir
from verl.tracking.names import summarize
from verl.tracking.runs import overview
from verl.trainer import api

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def where_and_how(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the repository, whose example's paths are relative; environment and threads as they were afterwards."""
    import torch

    monkeypatch.chdir(ROOT)
    before, threads = dict(os.environ), torch.get_num_threads()
    yield
    os.environ.clear()
    os.environ.update(before)
    torch.set_num_threads(threads)


def tiny(folder: Path, **overrides: Any) -> Any:
    """The tiny example, two steps of four responses each."""
    small = {
        "trainer.default_local_dir": str(folder),
        "trainer.total_training_steps": 2,
        "trainer.val_before_train": False,
        "trainer.save_freq": -1,
        "data.val_files": [],
        "data.train_batch_size": 2,
        "actor.ppo_mini_batch_size": 2,
        "data.max_response_length": 4,
        "rollout.n": 2,
        "cluster.threads": 1,
        "trainer.device": "cpu",
    }
    return load_config("examples/tiny/grpo.yaml", small | overrides)


def test_a_run_gives_its_metrics_summary_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = tiny(tmp_path / "run", **{"trainer.save_freq": 1})
    result = Trainer(loaded).fit()

    on_disk = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.metrics == on_disk and [line["step"] for line in result.metrics] == [1, 2]
    assert all(isinstance(line["critic/score/mean"], float) for line in result.metrics)
    assert result.summary.trained_steps == 2
    assert result.summary.reward_last == pytest.approx(result.metrics[-1]["critic/score/mean"])
    assert (result.folder, result.report) == (tmp_path / "run", tmp_path / "run" / "report.html")
    assert result.report.is_file()
    assert result.checkpoint == tmp_path / "run" / "checkpoints" / "step_000002" and result.checkpoint.is_dir()
    said = capsys.readouterr().out
    assert str(result) in said and f"report: {result.report}" in said.replace("\n", "")
    assert "critic/score/mean" not in repr(result)  # what a notebook shows of a result stays short

    exported = result.export(tmp_path / "model")
    assert exported == tmp_path / "model" and (exported / "config.json").is_file()

    again = Trainer(loaded.config, display="quiet").fit()  # finished: nothing is trained, the result is the same
    assert again == result and capsys.readouterr().out == ""


def test_quiet_twice_in_one_process_and_in_an_event_loop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def cell() -> api.RunResult:
        return Trainer(tiny(tmp_path / "second"), display="quiet").fit()

    first = Trainer(tiny(tmp_path / "first"), display="quiet").fit()
    second = asyncio.run(cell())
    assert capsys.readouterr() == ("", "")
    scores = [[line["critic/score/mean"] for line in result.metrics] for result in (first, second)]
    assert scores[0] == scores[1]
    assert first.checkpoint is None
    with pytest.raises(CheckpointError, match="trainer.save_freq above 0"):
        first.export(tmp_path / "model")


def test_a_function_of_the_program_is_the_reward(tmp_path: Path) -> None:
    asked = []

    async def score(completions: list[Any], **columns: Any) -> list[float]:
        asked.extend(completions)
        return [0.25] * len(completions)

    loaded = tiny(tmp_path / "run", **{"reward.custom_reward_function.path": None})

    async def cell() -> api.RunResult:  # an async function, called while the notebook's own loop runs
        return Trainer(loaded, reward=score, display="quiet").fit()

    result = asyncio.run(cell())
    assert len(asked) == 8
    assert [line["critic/score/mean"] for line in result.metrics] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("overrides", "reward", "error", "words"),
    [
        (
            {"cluster.backend": "ray"},
            len,
            ConfigError,
            ["len", "cluster.backend=inline", "custom_reward_function.path"],
        ),
        ({}, len, ConfigError, ["both say how to score"]),
        ({"reward.custom_reward_function.path": None}, 3, ConfigError, ["no function"]),
        ({"reward.custom_reward_function.path": None}, lambda text: 1.0, RewardError, ["solution_str", "completions"]),
    ],
    ids=["ray", "two rewards", "no function", "parameters"],
)
def test_a_reward_that_cannot_be_used(
    tmp_path: Path, overrides: dict[str, Any], reward: Any, error: type[Exception], words: list[str]
) -> None:
    loaded = tiny(tmp_path / "run", **overrides)
    with pytest.raises(error) as caught:
        Trainer(loaded, reward=reward, display="quiet").fit()
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_ctrl_c_stops_and_the_next_call_goes_on(tmp_path: Path) -> None:
    calls = []

    def score(data_source: str, solution_str: str, ground_truth: Any) -> float:
        calls.append(solution_str)
        if len(calls) == 7:  # in the second step
            raise KeyboardInterrupt
        return 0.5

    overrides = {"reward.custom_reward_function.path": None, "trainer.save_freq": 1, "trainer.total_training_steps": 3}
    trainer = Trainer(tiny(tmp_path / "run", **overrides), reward=score, display="quiet")
    with pytest.raises(KeyboardInterrupt):
        trainer.fit()
    assert [line["step"] for line in api.RunResult.of(tmp_path / "run").metrics] == [1]
    assert [line["step"] for line in trainer.fit().metrics] == [1, 2, 3]
    assert len(calls) == 7 + 8


def test_a_reader_that_has_gone_is_named_as_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``verl train ... | head``: the console makes an exit of the broken pipe, which is no SIGTERM."""

    def closed(*_: Any, **__: Any) -> None:
        try:
            raise BrokenPipeError
        except BrokenPipeError:
            raise SystemExit(1) from None

    monkeypatch.setattr("verl.trainer.loop.TrainingLoop.fit", closed)
    with pytest.raises(SystemExit):
        Trainer(tiny(tmp_path / "run"), display="quiet").fit()
    run = overview(RunDir(tmp_path / "run"))
    assert (run.status, run.reason) == ("stopped", "the reader of its output was gone")


def test_the_summary_in_words(tmp_path: Path) -> None:
    def said(*rewards: float | None) -> str:
        metrics = [{"step": i + 1} | ({} if r is None else {"critic/score/mean": r}) for i, r in enumerate(rewards)]
        return str(api.RunResult(metrics, summarize(metrics), tmp_path, tmp_path / "r.html", None)).splitlines()[0]

    assert said(0.25) == "reward: 0.250 (first step) -> 0.250 (last)"
    assert said(0.0, 0.0, 1.0, 0.5) == "reward: 0.000 (first 2 steps) -> 0.750 (last 2)"
    assert said(None, None) == "reward: no response was scored, so nothing was trained"
    assert said() == f"report: {tmp_path / 'r.html'}"
    left_out = [{"step": 1, "critic/score/mean": 0.0, "actor/skipped_steps": 2.0}]
    words = str(api.RunResult(left_out, summarize(left_out), tmp_path, tmp_path / "r.html", None))
    assert "Optimizer steps of the actor skipped, the gradient was not finite: 2 (step 1)" in words


def test_what_fails_in_training_is_no_bad_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The inputs had been found good, so that the exit code is 1; but not where the user's function is to blame."""
    from verl.trainer.loop import TrainingLoop

    for error, bad_input in ((EngineError("broken"), False), (RewardError("always fails"), True)):

        def fails(loop: TrainingLoop, error: VerlError = error) -> None:
            raise error

        monkeypatch.setattr(TrainingLoop, "fit", fails)
        with pytest.raises(type(error)) as caught:
            Trainer(tiny(tmp_path / "run"), display="quiet").fit()
        assert caught.value.bad_input is bad_input
    assert VerlError("unreadable").bad_input


def test_what_is_no_configuration_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Trainer\(load_config"):
        Trainer("examples/tiny/grpo.yaml")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="one of auto, plain, quiet"):
        Trainer(tiny(Path("nowhere")), display="silent")  # type: ignore[arg-type]


def test_notices_are_told_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loaded = tiny(tmp_path / "run", **{"rollout.name": "vllm", "model.path": "no-such-model"})
    with pytest.raises(verl.errors.ModelError):
        Trainer(loaded).fit()
    assert capsys.readouterr().out.startswith("note: rollout.name=vllm")


@pytest.mark.parametrize(
    ("backend", "loaded", "set_before", "told"),
    [
        ("inline", True, False, True),
        ("inline", True, True, False),
        ("inline", False, False, False),
        ("ray", True, False, False),
    ],
)
def test_torch_imported_too_early_is_told(
    backend: str, loaded: bool, set_before: bool, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MKL_CBWR", "AUTO,STRICT") if set_before else monkeypatch.delenv("MKL_CBWR", raising=False)
    modules = dict(sys.modules) if loaded else {name: m for name, m in sys.modules.items() if name != "torch"}
    monkeypatch.setattr(api.sys, "modules", modules)
    config = tiny(tmp_path, **{"cluster.backend": backend}).config
    notices = api.settle_process(config)
    assert [("torch was imported before" in notice) for notice in notices] == [True] * told
    assert os.environ["OMP_NUM_THREADS"] == "1" and os.environ["MKL_CBWR"] == "AUTO,STRICT"
    assert api.settle_process(config) == []  # once is enough


def test_the_public_names_are_lazy() -> None:
    code = (
        "import sys, verl\n"
        "assert {'Trainer', 'load_config', 'DataProto'} <= set(dir(verl))\n"
        "from verl import Trainer, load_config\n"
        "Trainer(load_config('examples/tiny/grpo.yaml'))\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    with pytest.raises(AttributeError, match="Trainr"):
        verl.Trainr  # noqa: B018


def test_a_configuration_of_file_mapping_presets_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text("data: {train_files: a.jsonl}\nmodel: {path: m}\nrollout: {n: 3}\n")
    from_file = load_config(file, ["rollout.n=5"], ["grpo"]).config
    tree = {"data": {"train_files": "a.jsonl"}, "model.path": "m", "rollout": {"n": 3}}
    assert load_config(tree, {"rollout": {"n": 5}}, ["grpo"]).config == from_file
    assert from_file.algorithm.adv_estimator == "grpo" and from_file.rollout.n == 5
    assert load_config(tree, presets=["grpo"]).config.rollout.n == 3  # a preset lies below the file
    assert load_config({"data": tree["data"], "model.path": "m"}, presets=["grpo"]).config.rollout.n == 8
    both = load_config({"data": tree["data"], "model.path": "m"}, presets=["rloo", "dr_grpo"]).config
    assert (both.algorithm.adv_estimator, both.actor.loss_agg_mode) == ("grpo", "seq-mean-token-sum-norm")
    assert inspect.signature(load_config).parameters["source"].default is None
    for wrong, words in ((["gropo"], "did you mean grpo"), (["nothing at all"], "presets: ")):
        with pytest.raises(ConfigError, match="unknown preset") as caught:
            load_config(tree, presets=wrong)
        assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"unknown key rollout.nn"):
        load_config(tree, {"rollout": {"nn": 5}})
