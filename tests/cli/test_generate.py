"""``verl generate``: prompts from the command line and from files, lines in order, text that appears as it grows."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from verl.checkpoint.store import CheckpointStore
from verl.cli import entry
from verl.config import build_config, dump_yaml
from verl.models.loading import load_tokenizer, save_hf_files
from verl.models.tiny import build_tiny

pytestmark = pytest.mark.usefixtures("in_this_process")


def generate(model: Path, *options: Any) -> int:
    fixed = ["--dtype", "float32", "--max-new-tokens", 6]
    return entry.main(["generate", *map(str, [model, *fixed, *options])])


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.split("\n") if line]


def test_a_file_of_prompts(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.txt").write_text("first\n\nsecond\n")
    chat = [{"role": "user", "content": "first"}]
    Path("p.jsonl").write_text(json.dumps({"q": "second"}) + "\n" + json.dumps({"q": chat}) + "\n")
    assert generate(tiny_model_dir, "--input", "p.txt", "-n", 2, "--out", "a.jsonl", "--ids") == 0
    assert capsys.readouterr().out == ""
    found = lines(Path("a.jsonl").read_text())
    assert [(row["prompt"], row["index"]) for row in found] == [
        ("first", 0),
        ("first", 1),
        ("second", 0),
        ("second", 1),
    ]
    assert len({row["response"] for row in found}) == 4  # several: sampled
    tokenizer = load_tokenizer(tiny_model_dir)
    for row in found:
        assert list(row) == ["prompt", "index", "response", "finish_reason", "tokens", "prompt_ids", "response_ids"]
        assert tokenizer.decode(row["prompt_ids"]) == f"<|user|>{row['prompt']}<|assistant|>"
        assert tokenizer.decode(row["response_ids"], skip_special_tokens=True) == row["response"]
        assert row["tokens"] == len(row["response_ids"]) and row["finish_reason"] in ("stop", "length")
    assert generate(tiny_model_dir, "--input", "p.jsonl", "--prompt-key", "q") == 0
    greedy = lines(capsys.readouterr().out)
    assert [row["prompt"] for row in greedy] == ["second", chat]
    assert generate(tiny_model_dir, "--prompt", "second", "--prompt", "first") == 0
    assert capsys.readouterr().out == "".join(f"{row['response']}\n" for row in greedy)


def test_a_run_is_prompted_as_it_was_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base, folder = build_tiny(tmp_path / "base"), tmp_path / "runs" / "mine"
    with CheckpointStore(folder / "checkpoints").begin(1) as pending:
        shutil.copy(base / "model.safetensors", pending.file("actor/model.safetensors"))
        save_hf_files(base, pending.file("actor/hf/config.json").parent)
        pending.commit()
    data = {"train_files": [str(tmp_path / "train.jsonl")]}
    (folder / "config.yaml").write_text(dump_yaml(build_config({"data": data, "model": {"path": str(base)}})))
    chat = [{"role": "user", "content": "hi"}]

    def asked(*options: str) -> tuple[str, str]:
        assert generate(folder, "--prompt", "hi", "--out", "a.jsonl", "--ids", *options) == 0
        (row,) = lines(Path("a.jsonl").read_text())
        return load_tokenizer(base).decode(row["prompt_ids"]), capsys.readouterr().err

    text, said = asked()
    assert text == "<|user|>hi<|assistant|>" and "does not say how its prompts looked" in said
    for prompt, expected in (("2+2=", "hi"), (chat, "<|user|>hi<|assistant|>")):
        (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": prompt, "answer": "4"}) + "\n")
        text, said = asked()
        assert text == expected and ("prompts of plain text" in said) == (prompt != chat)
    (tmp_path / "train.jsonl").write_text(json.dumps({"prompt": "2+2=", "answer": "4"}) + "\n")
    assert asked("--system", "s")[0] == "<|system|>s<|user|>hi<|assistant|>"


def test_the_file_of_prompts_is_not_written_over(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("p.jsonl").write_text('{"prompt": "first"}\n')
    assert generate(tiny_model_dir, "--input", "p.jsonl", "--out", "./p.jsonl") != 0
    assert "one of the inputs" in capsys.readouterr().err
    assert Path("p.jsonl").read_text() == '{"prompt": "first"}\n'


def test_float16_and_the_other_name_of_the_limit(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["generate", str(tiny_model_dir), "--prompt", "x", "--dtype", "float16", "--max-response-length", "3"]
    assert entry.main([*words, "--out", "a.jsonl"]) == 0
    assert [row["tokens"] <= 3 for row in lines(Path("a.jsonl").read_text())] == [True]


def test_system_message_stop_text_and_raw(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*options: Any) -> str:
        assert generate(tiny_model_dir, "--temperature", 1, "--top-k", 40, *options) == 0
        return capsys.readouterr().out.removesuffix("\n")

    plain = said("--prompt", "hi", "--system", "be kind")
    assert said("--prompt", "<|system|>be kind<|user|>hi<|assistant|>", "--raw") == plain
    assert said("--prompt", "hi") != plain
    stop = plain[2:4]
    assert said("--prompt", "hi", "--system", "be kind", "--stop", stop) == plain[: plain.index(stop)]


def test_on_a_terminal_the_text_appears_as_it_grows(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["--prompt", "hello", "--temperature", 1, "--max-new-tokens", 30, "--top-k", 20]
    assert generate(tiny_model_dir, *options) == 0
    from verl.tracking.console import printable

    whole = printable(capsys.readouterr().out)
    pieces: list[str] = []
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys.stdout, "write", lambda text: pieces.append(text) or len(text))
    assert generate(tiny_model_dir, *options) == 0
    assert "".join(pieces) == whole and len([piece for piece in pieces if piece]) > 5


def test_every_sampling_option_reaches_the_engine(tiny_model_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each by what it makes of the same seeds: a banned token, no repetition, no early end, one token left."""

    def said(*options: Any) -> list[list[int]]:
        assert generate(tiny_model_dir, "--input", "p.txt", "--ids", "--temperature", 1, "-n", 8, *options) == 0
        return [row["response_ids"] for row in lines(capsys.readouterr().out)]

    Path("p.txt").write_text("hello\n")
    plain = said()
    often = Counter(token for ids in plain for token in ids).most_common(1)[0][0]
    assert all(often not in ids for ids in said("--logit-bias", json.dumps({often: -100})))
    assert said("--logit-bias", json.dumps({often: 100})) == [[often] * 6] * 8
    bias = ["--logit-bias", json.dumps(dict.fromkeys(range(40, 46), 20))]
    assert any(len(set(ids)) < len(ids) for ids in said(*bias))
    for option, value in (("frequency", 2), ("presence", 2), ("repetition", 9)):
        with_penalty = said(*bias, f"--{option}-penalty", value)
        assert with_penalty != said(*bias), option
    end = json.dumps({load_tokenizer(tiny_model_dir).eos_token_id: 20})
    assert said("--logit-bias", end) == [[load_tokenizer(tiny_model_dir).eos_token_id]] * 8
    assert {len(ids) for ids in said("--logit-bias", end, "--min-new-tokens", 3)} == {4}
    assert len({tuple(ids) for ids in said("--min-p", 1)}) == 1 < len({tuple(ids) for ids in plain})


def test_a_prompt_without_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_tiny(tmp_path / "short", hidden_size=16, max_positions=16)
    Path("p.txt").write_text("ok\n" + "x" * 16 + "\nfine\n")
    assert generate(model, "--input", "p.txt", "--raw") == 0
    out, err = capsys.readouterr()
    assert [row["finish_reason"] == "refused" for row in lines(out)] == [False, True, False]
    assert lines(out)[1]["response"] is None and "1 responses refused" in err
    assert generate(model, "--raw", "--prompt", "ok", "--prompt", "x" * 16) == 2
    assert "prompt 2 is as long as all positions" in capsys.readouterr().err


def test_ctrl_c_keeps_what_is_done(
    tiny_model_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from verl.rollout.embedded import EmbeddedEngine

    step = EmbeddedEngine.step
    count = iter(range(20))
    monkeypatch.setattr(
        EmbeddedEngine, "step", lambda self: step(self) if next(count) < 9 else (_ for _ in ()).throw(KeyboardInterrupt)
    )
    Path("p.txt").write_text("a\nb\nc\n")
    assert generate(tiny_model_dir, "--input", "p.txt", "--out", "o.jsonl", "--max-num-seqs", 1) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert [row["prompt"] for row in lines(Path("o.jsonl").read_text())] == ["a"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], ["--prompt --input is required"]),
        (["--prompt", "x", "--input", "p.txt"], ["not allowed with"]),
        (["--prompt", " "], ["prompt is empty", "--prompt 1"]),
        (["--input", "pp.txt"], ["does not exist", "did you mean"]),
        (["--input", "p.jsonl", "--prompt-key", "promt"], ["--prompt-key", "did you mean --prompt-key prompt?"]),
        (["--input", "chat.jsonl", "--raw"], ["list of chat messages", "line 1"]),
        (["--prompt", "x", "--raw", "--system", "s"], ["no place for a system message"]),
        (["--prompt", "x", "--out", "no/such/file"], ["the folder of --out does not exist"]),
        (["--prompt", "x", "--out", "."], ["--out names a folder"]),
        (["--prompt", "x", "--min-new-tokens", "7"], ["min_new_tokens", "from 0 to 6"]),
        (["--prompt", "x", "--min-p", "nan"], ["min_p", "from 0 to 1"]),
        (["--prompt", "x", "--repetition-penalty", "-1"], ["repetition_penalty", "above 0"]),
        (["--prompt", "x", "--presence-penalty", "x"], ["'x' is not a number"]),
        (["--prompt", "x", "--top-k", "-3"], ["top_k", "-1 (off)"]),
        (["--prompt", "x", "--logit-bias", "[5]"], ["not a JSON object"]),
        (["--prompt", "x", "--logit-bias", '{"a": 1}'], ["does not give numbers by token id"]),
        (["--prompt", "x", "--logit-bias", '{"5": NaN}'], ["logit_bias", "finite"]),
        (["--prompt", "x", "--logit-bias", '{"99999": 1}'], ["99999", "no token of the model"]),
    ],
)
def test_wrong_words(
    tiny_model_dir: Path, options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    Path("p.txt").write_text("x\n")
    Path("p.jsonl").write_text('{"prompt": "x"}\n')
    Path("chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "x"}]}) + "\n")
    assert generate(tiny_model_dir, *options) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and "\n  fix:   " in err
    assert all(word in err for word in words), err
