"""``verl eval`` from end to end on the tiny model: figures, files, runs, reward functions, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from verl.checkpoint.store import CheckpointStore
from verl.cli import entry
from verl.config import build_config, dump_yaml
from verl.models.loading import save_hf_files
from verl.models.tiny import build_tiny
from verl.tracking.samples import read_samples

pytestmark = pytest.mark.usefixtures("in_this_process")

WORDS = ["stone", "river", "cloud", "apple", "grass", "night"]
# Half a point where the first character of the response is a letter, and whether it is one is the answer; what starts
# with a byte that is no character cannot be scored.
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    first = solution_str[:1]
    if first == "\\ufffd":
        return None
    return {"score": first.isalpha() / 2, "acc": first.isalpha(), "pred": first.isalpha()}
"""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = [
        {"data_source": f"s{i % 2}", "prompt": f"say {word}", "label": "a", "level": i} for i, word in enumerate(WORDS)
    ]
    return written(tmp_path / "val.jsonl", "".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    return written(tmp_path / "reward.py", REWARD)


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def evaluate(model: Path, data: Path, *options: Any, out: str = "out") -> dict[str, Any]:
    fixed = ["--dtype", "float32", "--max-response-length", "5", "--out", out]
    assert entry.main(["eval", *map(str, [model, data, *options, *fixed])]) == 0
    found: dict[str, Any] = json.loads(Path(out, "results.json").read_text())
    return found


def test_figures_files_and_tables(
    tiny_model_dir: Path, data: Path, reward: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = evaluate(tiny_model_dir, data, "--reward", reward, "-n", 4)
    printed = capsys.readouterr().out
    samples, skipped = read_samples(Path("out/samples.jsonl"))
    assert skipped == 0 and [(s.uid, s.index) for s in samples] == [
        (f"val:0:s{i % 2}:{i}", index) for i in range(6) for index in range(4)
    ]
    assert list(results["sources"]) == ["s0", "s1"] and results["temperature"] == 1.0
    for name, figures in [*results["sources"].items(), ("overall", results["overall"])]:
        own = [s for s in samples if name in ("overall", s.data_source)]
        scored = [s for s in own if s.score is not None]
        assert (figures["responses"], figures["unscored"]) == (len(own), len(own) - len(scored))
        assert figures["prompts"] == len({s.uid for s in own})
        assert figures["reward"]["mean@4"]["value"] == pytest.approx(fmean(s.score for s in scored))
        assert figures["acc"]["mean@4"]["value"] == pytest.approx(figures["reward"]["mean@4"]["value"] * 2)
        assert figures["pass_rate"] == figures["acc"]["mean@4"]
        assert figures["length"]["value"] == fmean(s.response_length for s in own)
        assert figures["cut"]["value"] == fmean(s.finish_reason == "length" for s in own)
        groups = [[s.extras["acc"] for s in scored if s.uid == uid] for uid in dict.fromkeys(s.uid for s in scored)]
        majorities = [0.5 if 2 * sum(g) == len(g) else float(2 * sum(g) > len(g)) for g in groups]
        assert list(figures["acc"]) == ["mean@4", "best@2", "best@4", "maj@4"]
        assert figures["acc"]["best@4"]["value"] == pytest.approx(fmean(map(max, groups)))
        assert figures["acc"]["maj@4"]["value"] == pytest.approx(fmean(majorities))
        assert f"{name}: {figures['prompts']} prompts x 4" in printed
    assert 0 < results["overall"]["unscored"] < 24 and 0 < results["overall"]["acc"]["mean@4"]["value"] < 1
    for label in ("acc mean@4", "acc best@2", "reward maj@4", "pass rate", "tokens", "cut by length", "unscored"):
        assert printed.count(label) == 3, label
    assert "out/results.json" in printed


def test_the_same_seed_gives_the_same_and_another_does_not(tiny_model_dir: Path, data: Path, reward: Path) -> None:
    options = ["--reward", reward, "-n", 2, "--limit", 3]
    first = evaluate(tiny_model_dir, data, *options, out="a")
    again = evaluate(tiny_model_dir, data, *options, "--max-num-seqs", 2, out="b")
    assert first == again and first["overall"]["prompts"] == 3
    assert Path("a/samples.jsonl").read_bytes() == Path("b/samples.jsonl").read_bytes()
    evaluate(tiny_model_dir, data, *options, "--seed", 2, out="c")
    assert Path("a/samples.jsonl").read_bytes() != Path("c/samples.jsonl").read_bytes()


def test_one_response_is_greedy_and_json_is_all_that_is_printed(
    tiny_model_dir: Path, data: Path, reward: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = evaluate(tiny_model_dir, data, "--reward", reward, "--json")
    assert json.loads(capsys.readouterr().out) == results
    assert (results["temperature"], results["n"]) == (0.0, 1)
    assert list(results["overall"]["acc"]) == ["mean@1"]
    bias = ["--logit-bias", '{"97": 100}', "--frequency-penalty", 2, "--min-new-tokens", 5]
    biased = evaluate(tiny_model_dir, data, "--reward", reward, *bias, out="biased")
    assert (biased["logit_bias"], biased["frequency_penalty"], biased["min_new_tokens"]) == ({"97": 100.0}, 2.0, 5)
    assert {row.response for row in read_samples(Path("biased/samples.jsonl"))[0]} == {"aaaaa"}


def test_a_prompt_may_be_as_long_as_the_model_has_room_for(tiny_model_dir: Path, tmp_path: Path) -> None:
    row = {"data_source": "s", "prompt": "x" * 2043, "label": "a"}
    data = written(tmp_path / "long.jsonl", json.dumps(row) + "\n")
    assert evaluate(tiny_model_dir, data, "--rule", "exact_match")["max_prompt_length"] == 2048 - 5
    with pytest.raises(AssertionError):
        evaluate(tiny_model_dir, data, "--rule", "exact_match", "data.max_prompt_length=2042", out="refused")


def test_rows_left_out_are_told(
    tiny_model_dir: Path, data: Path, reward: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(data, data.read_text() + '{"prompt": ""}\n' + json.dumps({"prompt": "x" * 60, "data_source": "s0"}) + "\n")
    words = ["data.max_skipped_fraction=0.5", "data.filter_overlong_prompts=true", "data.max_prompt_length=40"]
    results = evaluate(tiny_model_dir, data, "--reward", reward, *words)
    assert results["left_out"] == 2 and results["overall"]["prompts"] == len(WORDS)
    assert "note: 2 rows cannot be used and are left out" in capsys.readouterr().err


def test_results_have_a_folder_of_their_own(
    tiny_model_dir: Path, data: Path, reward: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["eval", str(tiny_model_dir), str(data), "--reward", str(reward), "--limit", "1", "--dtype", "float32"]
    for _ in range(2):
        assert entry.main([*arguments, "data.max_response_length=2", "--plain"]) == 0
    name = f"{tiny_model_dir.name}-val-n1"
    assert sorted(path.name for path in Path("evaluations").iterdir()) == [name, f"{name}-2"]
    assert entry.main([*arguments, "--out", f"evaluations/{name}"]) == 2
    assert "--out holds results already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "body",
    [
        "def reward(completions, level, **columns):\n    return [float(x) for x in level]\n",
        "async def reward(queries, prompts, labels):\n"
        "    assert all(q.startswith(p) and l == 'a' for q, p, l in zip(queries, prompts, labels))\n"
        "    return {'rewards': [float(WORDS.index(p.split()[-1])) for p in prompts]}\n"
        f"WORDS = {WORDS}\n",
    ],
    ids=["TRL", "OpenRLHF"],
)
def test_functions_of_other_signatures(tiny_model_dir: Path, data: Path, tmp_path: Path, body: str) -> None:
    file = written(tmp_path / "other.py", body)
    results = evaluate(tiny_model_dir, data, "--reward", file, "--reward-name", "reward", "-n", 2)
    samples, _ = read_samples(Path("out/samples.jsonl"))
    assert [s.score for s in samples if s.response_length] == [
        float(s.uid.split(":")[-1]) for s in samples if s.response_length
    ]
    assert results["sources"]["s1"]["reward"]["mean@2"]["value"] == 3.0


def test_ctrl_c_leaves_nothing_half_written(
    tiny_model_dir: Path, data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = written(
        tmp_path / "r.py", "def compute_score(data_source, solution_str, ground_truth):\n    raise KeyboardInterrupt\n"
    )
    assert (
        entry.main(
            [
                "eval",
                str(tiny_model_dir),
                str(data),
                "--reward",
                str(file),
                "--out",
                "out",
                "data.max_response_length=5",
                "reward.num_workers=0",  # here, where Ctrl-C arrives
            ]
        )
        == 130
    )
    assert capsys.readouterr().err == "interrupted\n"
    assert not Path("out").exists()


# --- runs


@pytest.fixture
def run(tmp_path: Path, data: Path, reward: Path) -> Path:
    """A run with checkpoints of steps 1 and 2, whose weights are of other seeds than its first model's."""
    base = build_tiny(tmp_path / "base", seed=0)
    folder = tmp_path / "runs" / "mine"
    store = CheckpointStore(folder / "checkpoints")
    for step in (1, 2):
        weights = load_file(build_tiny(tmp_path / f"seed{step}", seed=step) / "model.safetensors")
        with store.begin(step) as pending:
            save_file(weights, pending.file("actor/model.safetensors"), {"format": "pt"})
            save_hf_files(base, pending.file("actor/hf/config.json").parent)
            pending.commit()
    tree = {
        "data": {"train_files": ["gone.jsonl"], "max_response_length": 3, "reward_fn_key": "level"},
        "model": {"path": str(base), "dtype": "float32"},
        "reward": {"custom_reward_function": {"path": str(reward)}},
    }
    written(folder / "config.yaml", dump_yaml(build_config(tree)))
    return folder


def test_a_run_is_its_newest_checkpoint_under_its_own_configuration(run: Path, data: Path, tmp_path: Path) -> None:
    def samples(*words: Any) -> tuple[dict[str, Any], list[tuple[str, str]]]:
        out = str(tmp_path / f"out{len(list(tmp_path.iterdir()))}")
        assert entry.main(["eval", *map(str, words), "--out", out]) == 0
        rows, _ = read_samples(Path(out, "samples.jsonl"))
        return json.loads(Path(out, "results.json").read_text()), [(row.response, row.data_source) for row in rows]

    newest, found = samples(run, data)
    assert (newest["step"], newest["dtype"], newest["max_response_length"]) == (2, "float32", 3)
    assert newest["model"] == str(run) and newest["reward"].startswith("compute_score in ")
    assert list(newest["sources"]) == ["0", "1", "2", "3", "4", "5"]  # by the run's reward_fn_key
    same = ["--dtype", "float32", "--max-response-length", 3, "--rule", "exact_match", "data.reward_fn_key=level"]
    assert samples(tmp_path / "seed2", data, *same)[1] == found
    first, other = samples(run / "checkpoints" / "step_000001", data, "--max-response-length", 2)
    assert (first["step"], first["max_response_length"]) == (1, 2) and other != found
    ruled, _ = samples(run, data, "--rule", "exact_match")
    assert ruled["reward"] == "exact_match"


def test_a_run_without_a_checkpoint(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    assert entry.main(["eval", str(tmp_path / "empty"), str(data)]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err


# --- what is refused


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--rule", "exact_matc"], ["did you mean exact_match?"]),
        (["--reward", "rewrad.py"], ["did you mean reward"]),
        (["--reward", "reward.py", "--rule", "boxed"], ["not allowed with"]),
        (["--reward", "reward.py", "--reward-name", "compute"], ["no such function", "compute_score"]),
        (["--rule", "exact_match", "--prompt-key", "promt"], ["promt", "prompt"]),
        (["--rule", "exact_match", "--answer-key", "lable"], ["lable", "label"]),
        (["--rule", "exact_match", "rollout.val_kwargs.n=2"], ["give -n instead"]),
        (["--rule", "exact_match", "data.max_respons_length=2"], ["did you mean data.max_response_length?"]),
        (["--rule", "exact_match", "another.jsonl"], ["takes one data file"]),
        (["--rule", "exact_match", "--max-response-length", "4000"], ["2048 positions"]),
        (["--rule", "exact_match", "--top-p", "2"], ["at most 1"]),
        (["--rule", "exact_match", "--min-p", "2"], ["rollout.val_kwargs.min_p", "at most 1"]),
        (["--rule", "exact_match", "--logit-bias", '{"77777": 1}'], ["rollout.val_kwargs.logit_bias", "77777"]),
        (["--rule", "exact_match", "rollout.stop_token_ids=[77777]"], ["rollout.stop_token_ids", "0 to 263"]),
        (["--rule", "exact_match", "--min-new-tokens", "600"], ["min_new_tokens is more than", "512"]),
        (["--rule", "exact_match", "rollout.val_kwargs.min_p=0.1"], ["an option such as --temperature"]),
        (["--rule", "exact_match", "--chat-template-kwargs", "[1]"], ["not a JSON object"]),
        ([], ["No built-in reward rule belongs to this data source"]),
    ],
)
def test_wrong_words(
    tiny_model_dir: Path,
    data: Path,
    reward: Path,
    options: list[str],
    words: list[str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert entry.main(["eval", str(tiny_model_dir), str(data), *options, "--out", "out"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "\n  fix:   " in err and "Traceback" not in err
    assert all(word in err for word in words), err
    assert not Path("out").exists()
