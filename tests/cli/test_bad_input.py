"""Bad input through the real command line: one clear message, exit code 2, no traceback, nothing left running."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from verl_process import GRPO, Done, WarmVerl, train, verl

from verl.models.loading import load_tokenizer
from verl.models.tiny import build_tiny


@pytest.fixture(scope="module")
def warm() -> Iterator[WarmVerl]:
    runner = WarmVerl()
    yield runner
    runner.close()


def complains(done: Done, *words: str) -> None:
    """Exactly one message on standard error that says what, the value and the fix, and nothing like a crash."""
    assert done.code == 2, (done.out, done.err)
    assert done.err.count("error: ") == 1 and done.err.startswith("error: ")
    assert "Traceback" not in done.err + done.out
    assert re.search(r"^\s+fix: ", done.err, re.MULTILINE), done.err
    for word in words:
        assert word in done.err, (word, done.err)


def rows_file(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROW = {"data_source": "tiny", "prompt": "hello", "reward_model": {"ground_truth": "a"}}


# What is said about each: the override that is wrong, and words of the message.
CASES: dict[str, tuple[list[str], list[str]]] = {
    "missing data file": (["data.train_files=examples/tiny/trian.jsonl"], ["trian.jsonl", "train.jsonl"]),
    "missing validation file": (["data.val_files=nowhere/val.jsonl"], ["data.val_files", "nowhere"]),
    "wrong column": (["data.prompt_key=question"], ["question", "prompt"]),
    "larger batch than data": (
        ["data.train_batch_size=32", "actor.ppo_mini_batch_size=32"],
        ["24 prompts", "train_batch_size=32"],
    ),
    "mini-batches do not divide": (["actor.ppo_mini_batch_size=3"], ["8 prompts / 3 prompts", "both count prompts"]),
    "micro-batches do not divide": (["actor.ppo_micro_batch_size_per_gpu=5"], ["64 responses / (5 responses"]),
    "unknown estimator": (["algorithm.adv_estimator=grop"], ["grop", "grpo"]),
    "unknown key": (["actor.optim.learnign_rate=1"], ["actor.optim.learnign_rate", "did you mean"]),
    "unknown key with a plus": (["+actor.lerning=1"], ["actor.lerning"]),
    "missing reward file": (
        ["reward.custom_reward_function.path=examples/tiny/rewards.py"],
        ["does not exist", "did you mean reward"],
    ),
    "wrong function name": (
        ["reward.custom_reward_function.name=compute_scor"],
        ["compute_scor", "did you mean compute_score"],
    ),
    "model path typo": (["model.path=tiny-lama"], ["tiny-lama", "did you mean tiny-llama"]),
    "model path that is no folder": (["model.path=/no/such/model"], ["/no/such/model", "a model is an alias"]),
    "too long for the model": (["data.max_prompt_length=2040"], ["2048 positions", "2056 tokens"]),
    "missing data folder": (["data.train_files=exmples/tiny/train.jsonl"], ["did you mean examples/tiny/train.jsonl?"]),
    "folder of a model": (["model.path=./exmples"], ["no such model", "./exmples"]),
    "tokenizer": (
        ["model.tokenizer_path=tiny-lama"],
        ["model.tokenizer_path: no such model", "did you mean tiny-llama"],
    ),
    "critic": (
        ["critic.model.path=tiny-lama", "algorithm.adv_estimator=gae"],
        ["critic.model.path: no such model", "did you mean tiny-llama"],
    ),
    "column of the data source": (["data.reward_fn_key=data_sorce"], ["did you mean data_source?"]),
    "checkpoint": (
        ["trainer.resume_mode=resume_path", "trainer.resume_from_path=examples/tny"],
        ["trainer.resume_from_path names no folder", "did you mean examples/tiny?"],
    ),
    "value": (["trainer.resume_mode=atuo"], ["trainer.resume_mode", "did you mean auto?"]),
    "built-in rule": (
        ["reward.custom_reward_function.path=null", "reward.rule=nmber"],
        ["nmber", "did you mean number?"],
    ),
    "preset": (["--preset", "gropo"], ["unknown preset", "did you mean grpo?"]),
    "option": (["--plian"], ["--plian", "did you mean --plain?"]),
    "GPU by another name": (["trainer.device=gpu"], ["wanted 1 GPU, available 0", "set trainer.device=cpu"]),
    "GPUs by number": (
        ["trainer.device=auto", "trainer.n_gpus_per_node=8"],
        ["8 ranks", "one process", "set cluster.backend=ray"],
    ),
    "no score for the data": (["reward.custom_reward_function.path=null"], ["tiny/vowels"]),
    "unknown logger": (["trainer.logger=[consol]"], ["consol", "console"]),
    "GPU where there is none": (["trainer.device=cuda"], ["set trainer.device=cpu"]),
    "more threads than cores": (["cluster.threads=4096"], ["wanted 4096 CPU, available"]),
    "several machines": (["trainer.nnodes=2"], ["trainer.nnodes=2"]),
    "not a setting": (["no-setting"], ["no-setting"]),
}


@pytest.mark.parametrize("case", CASES)
def test_settings(warm: WarmVerl, tmp_path: Path, case: str) -> None:
    overrides, words = CASES[case]
    if case.startswith("GPU"):
        import torch

        if torch.cuda.is_available():
            pytest.skip("this machine has a GPU")
    complains(warm(*train(GRPO, tmp_path / "run", *overrides), log=tmp_path / "log"), *words)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("override", "words"),
    [("actor.lerning=1", ["actor.lerning"]), ("model.path=/no/such", ["no such model"])],
    ids=["configuration", "model"],
)
def test_in_an_interpreter_of_its_own(tmp_path: Path, override: str, words: list[str]) -> None:
    """As a person runs it; the other cases share their imports."""
    complains(verl(*train(GRPO, tmp_path / "run", override), log=tmp_path / "log"), *words)


def test_missing_configuration(warm: WarmVerl, tmp_path: Path) -> None:
    done = warm("train", "examples/tiny/grop.yaml", log=tmp_path / "log")
    complains(done, "examples/tiny/grop.yaml")


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([], ["zero bytes"]),
        ([ROW, {**ROW, "prompt": None}], ["line 2"]),
        ([ROW, {**ROW, "prompt": ""}], ["line 2"]),
        ([ROW, {"data_source": "tiny", "prompt": "x"}], ["line 2", "ground"]),
    ],
    ids=["empty", "null-prompt", "blank-prompt", "no-truth"],
)
def test_b065_rows(warm: WarmVerl, tmp_path: Path, rows: list[dict[str, object]], words: list[str]) -> None:
    file = rows_file(tmp_path / "bad.jsonl", rows)
    done = warm(*train(GRPO, tmp_path / "run", f"data.train_files={file}"), log=tmp_path / "log")
    complains(done, "bad.jsonl", *words)


def test_reward_file_that_raises_at_import(warm: WarmVerl, tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("import json\n\nLIMIT = json.loads('{')\n")
    done = warm(*train(GRPO, tmp_path / "run", f"reward.custom_reward_function.path={file}"), log=tmp_path / "log")
    complains(done, "cannot be imported", "JSONDecodeError", "reward.py:3")


def test_b062_chat_rows_for_a_model_without_a_chat_template(warm: WarmVerl, tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model", hidden_size=32)
    for file in model.glob("chat_template*"):
        file.unlink()
    settings = json.loads((model / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    assert not load_tokenizer(model).chat_template
    chat = {**ROW, "prompt": [{"role": "user", "content": "hello"}]}
    file = rows_file(tmp_path / "chat.jsonl", [chat] * 8)
    overrides = [f"data.train_files={file}", "data.val_files=[]", f"model.path={model}"]
    done = warm(*train(GRPO, tmp_path / "run", *overrides), log=tmp_path / "log")
    complains(done, "no chat template")


def test_a_folder_that_cannot_be_written(warm: WarmVerl, tmp_path: Path) -> None:
    """Below a regular file: permissions would not stop root."""
    (tmp_path / "file").write_text("x")
    done = warm(*train(GRPO, tmp_path / "file" / "run"), log=tmp_path / "log")
    complains(done, "the run folder cannot be written", str(tmp_path / "file" / "run"), "trainer.default_local_dir")


def test_export_of_a_run_without_a_checkpoint(warm: WarmVerl, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    target = tmp_path / "model"
    complains(warm("export", str(run), "--to", str(target), log=tmp_path / "log"), "no complete checkpoint", str(run))
    complains(warm("export", str(tmp_path / "no"), "--to", str(target), log=tmp_path / "log"), "no such run folder")
    assert not target.exists()


def test_generate_and_report_with_nothing_there(warm: WarmVerl, tmp_path: Path) -> None:
    complains(warm("generate", str(tmp_path / "no"), "--prompt", "x", log=tmp_path / "log"), "no such model")
    done = warm("report", str(tmp_path / "no"), log=tmp_path / "log")
    complains(done, str(tmp_path / "no"))


def test_over_ray_an_error_of_the_set_up_comes_out_as_it_is(tmp_path: Path) -> None:
    """The weights are found damaged inside the worker process; nothing of Ray stays behind."""
    model = build_tiny(tmp_path / "model", hidden_size=32)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    overrides = [f"model.path={model}", "cluster.backend=ray"]
    done = verl(*train(GRPO, tmp_path / "run", *overrides), log=tmp_path / "log")
    complains(done, "the model cannot be loaded", str(model))


def test_over_ray_a_gpu_that_is_not_there_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    overrides = ["cluster.backend=ray", "trainer.device=cuda", "cluster.start_timeout=110"]
    done = verl(*train(GRPO, tmp_path / "run", *overrides), log=tmp_path / "log", seconds=60)
    complains(done, "wanted 1 GPU, available 0", "set trainer.device=cpu")


def test_a_cluster_address_where_nobody_answers(warm: WarmVerl, tmp_path: Path) -> None:
    overrides = ["cluster.backend=ray", "cluster.address=127.0.0.1:1"]
    done = warm(*train(GRPO, tmp_path / "run", *overrides), log=tmp_path / "log")
    complains(done, "cluster.address", "127.0.0.1:1")


def test_debug_shows_the_traceback(warm: WarmVerl, tmp_path: Path) -> None:
    done = warm(*train(GRPO, tmp_path / "run", "model.path=/no/such/model"), "--debug", log=tmp_path / "log")
    assert done.code == 2 and "Traceback" in done.err and "error: no such model" in done.err


def test_a_reward_function_that_always_fails_stops_the_run(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text("def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1 / 0\n")
    done = verl(*train(GRPO, tmp_path / "run", f"reward.custom_reward_function.path={file}"), log=tmp_path / "log")
    complains(done, "The reward function failed for 32 of 32 responses", "ZeroDivisionError", "reward.py:2")


def test_b163_a_models_own_code_is_not_run(warm: WarmVerl, tmp_path: Path) -> None:
    model = build_tiny(tmp_path / "model", hidden_size=32)
    marker = tmp_path / "executed"
    (model / "custom.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    config = json.loads((model / "config.json").read_text())
    config |= {"model_type": "unheard_of", "auto_map": {"AutoConfig": "custom.C", "AutoModelForCausalLM": "custom.M"}}
    (model / "config.json").write_text(json.dumps(config))
    done = warm(*train(GRPO, tmp_path / "run", f"model.path={model}"), log=tmp_path / "log")
    complains(done, "model.trust_remote_code=true")
    assert not marker.exists()


def test_b158_a_checkpoint_with_a_pickle_in_it_runs_nothing(tmp_path: Path) -> None:
    """A run whose checkpoint was exchanged for one that executes code when it is unpickled: refused, nothing ran."""
    folder = tmp_path / "run"
    arguments = train(GRPO, folder, "trainer.total_training_steps=2", "trainer.save_freq=1", "data.val_files=[]")
    assert verl(*arguments, log=tmp_path / "log").code == 0
    marker = tmp_path / "executed"
    payload = f"cposix\nsystem\n(S'touch {marker}'\ntR.".encode()
    shutil.rmtree(folder / "checkpoints" / "step_000001")
    for file in (folder / "checkpoints" / "step_000002").rglob("*.safetensors"):
        file.write_bytes(payload.ljust(file.stat().st_size, b"\0"))
    done = verl(*arguments[:-3], "trainer.total_training_steps=3", *arguments[-2:], log=tmp_path / "again")
    complains(done, "step_000002")
    assert not marker.exists()
