"""Text in, text out: prompts, requests, results in order, and text while it grows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.config import DataConfig
from verl.data.rows import PromptRow
from verl.errors import DataError, EngineError, ModelError
from verl.models.loading import load_tokenizer
from verl.models.tiny import build_tiny
from verl.rollout import offline
from verl.rollout.offline import (
    as_chats,
    in_order,
    load_engine,
    plain_prompt,
    read_prompts,
    requests_for,
    require_room,
    stream,
)
from verl.rollout.protocol import Result, SamplingParams
from verl.rollout.text import TextStream, response_text


def rows_of(*texts: str) -> list[PromptRow]:
    return [plain_prompt(text, i, f"prompt {i}") for i, text in enumerate(texts)]


def answers(model: Path, rows: list[PromptRow], n: int = 1, seed: int = 1, **sampling: Any) -> list[str]:
    tokenizer = load_tokenizer(model)
    params = SamplingParams(**({"max_new_tokens": 12, "temperature": 0.0} | sampling))
    requests = requests_for(rows, tokenizer, params, n, seed)
    engine = load_engine(model, tokenizer, "float32", device="cpu")
    return [decoder(tokenizer)(result.response_ids) for result in in_order(engine, requests)]


def decoder(tokenizer: Any) -> Any:
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)


# --- whole responses


def test_greedy_text_is_transformers_text(tiny_model_dir: Path) -> None:
    prompts = ["2 + 2 =", "a longer one, with more bytes: é"]
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir)
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir)
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    assert answers(tiny_model_dir, rows_of(*prompts)) == expected


def test_samples_side_by_side_and_again(tiny_model_dir: Path) -> None:
    found = answers(tiny_model_dir, rows_of("ab", "cd"), 3, temperature=1.0)
    assert len(found) == 6 and len(set(found)) == 6
    assert answers(tiny_model_dir, rows_of("ab", "cd"), 3, temperature=1.0) == found
    assert answers(tiny_model_dir, rows_of("ab"), 3, temperature=1.0) == found[:3]
    assert not set(answers(tiny_model_dir, rows_of("ab"), 3, seed=2, temperature=1.0)) & set(found)


def test_results_come_in_the_order_of_the_requests_as_soon_as_they_can(tiny_model_dir: Path) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    requests = []
    for number, length in enumerate([6, 2, 4]):
        requests += requests_for(rows_of("a", "b", "c"), tokenizer, SamplingParams(length, ignore_eos=True))[
            number : number + 1
        ]
    engine = load_engine(tiny_model_dir, tokenizer, "float32", device="cpu")
    told: list[int] = []
    seen = [(len(result.response_ids), list(told)) for result in in_order(engine, requests, told.append)]
    assert seen == [(6, [1, 2, 3]), (2, [1, 2, 3]), (4, [1, 2, 3])]
    assert engine.stats().active == engine.stats().waiting == 0


def test_a_chat_template_is_used_or_missed(tiny_model_dir: Path, tmp_path: Path) -> None:
    as_chat = answers(tiny_model_dir, as_chats(rows_of("hello"), "be kind"))
    assert as_chat == answers(tiny_model_dir, rows_of("<|system|>be kind<|user|>hello<|assistant|>"))
    bare = Path(shutil.copytree(tiny_model_dir, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    values = json.loads((bare / "tokenizer_config.json").read_text())
    values.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(values))
    with pytest.raises(ModelError, match="(?s)no chat template.*--raw"):
        answers(bare, as_chats(rows_of("hello")))
    assert answers(bare, rows_of("hello")) == answers(tiny_model_dir, rows_of("hello"))


def test_prompts_that_leave_no_room(tmp_path: Path) -> None:
    folder = build_tiny(tmp_path / "short", hidden_size=16, max_positions=16)
    tokenizer = load_tokenizer(folder)
    requests = requests_for(rows_of("x" * 15, "y" * 16), tokenizer, SamplingParams(12))
    engine = load_engine(folder, tokenizer, "float32", device="cpu")
    fits, full = in_order(engine, requests)
    require_room(fits, requests[0])
    assert len(fits.response_ids) == 1 and len(full.response_ids) == 0
    with pytest.raises(EngineError, match="prompt 2 is as long as all positions") as caught:
        require_room(full, requests[1])
    assert caught.value.value == "16 tokens"
    with pytest.raises(EngineError, match="prompt 2"):
        list(stream(engine, requests[1], decoder(tokenizer)))


def test_the_dtype_is_the_model_s(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    load = offline.load_causal_lm
    monkeypatch.setattr(offline, "load_causal_lm", lambda *a, **k: asked.append(a[1]) or load(*a, **k))
    load_engine(tiny_model_dir, load_tokenizer(tiny_model_dir), device="cpu")
    assert asked == [torch.bfloat16]


# --- prompts


def config_of(key: str) -> DataConfig:
    return DataConfig(train_files=["-"], prompt_key=key, answer_key=key)


def test_prompts_of_files(tmp_path: Path) -> None:
    lines = tmp_path / "a.txt"
    lines.write_bytes("\ufefffirst\r\n\n  \nsécond".encode())
    found = read_prompts(str(lines), config_of("prompt"))
    assert [row.prompt for row in found] == ["first", "sécond"] and found[1].location.endswith("a.txt, line 4")
    table = tmp_path / "b.jsonl"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    table.write_text(json.dumps({"q": "text"}) + "\n" + json.dumps({"q": chat}) + "\n")
    rows = read_prompts(str(table), config_of("q"))
    assert [row.prompt for row in rows] == ["text", chat]
    assert [row.prompt for row in as_chats(rows, "mine")] == [
        [{"role": "system", "content": "mine"}, {"role": "user", "content": "text"}],
        chat,  # has a system message of its own
    ]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.txt", "\n \n", "no line with text"),
        ("a.jsonl", '{"prompt": "x"}\n{"prompt": ""}\n{"prompt": null}\n', "2 of 3 rows have no prompt"),
        ("a.jsonl", '{"promt": "x"}\n', "did you mean"),
        ("a.jsonl", "", "zero bytes"),
    ],
)
def test_files_without_prompts(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError) as caught:
        read_prompts(str(tmp_path / name), config_of("prompt"))
    assert said in str(caught.value)


def test_a_prompt_is_not_empty_and_a_file_is_utf_8(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="(?s)prompt is empty.*prompt 3"):
        plain_prompt("  ", 2, "prompt 3")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match="not UTF-8"):
        read_prompts(str(tmp_path / "latin.txt"), config_of("prompt"))


# --- text that grows


def as_bytes(ids: Sequence[int]) -> str:
    return bytes(list(ids)).decode("utf-8", "replace")


@settings(max_examples=200)
@given(
    st.one_of(st.binary(max_size=30), st.text("aé€😀�\n", max_size=12).map(str.encode)),
    st.lists(st.text("aé€", min_size=1, max_size=3), max_size=2),
)
def test_pieces_are_the_text_and_none_is_taken_back(data: bytes, stop: list[str]) -> None:
    growing = TextStream(as_bytes, stop)
    pieces = [growing.grow(data[:count]) for count in range(1, len(data))]
    whole = as_bytes(data)
    assert "".join([*pieces, growing.finish(whole)]) == whole


def test_half_a_character_and_half_a_stop_string_wait() -> None:
    growing = TextStream(as_bytes, ["END"])
    data = "aé ENé".encode()
    assert [growing.grow(data[: i + 1]) for i in range(len(data))] == ["a", "", "é", " ", "", "", "", "ENé"]
    assert growing.finish("aé ENé") == ""


def test_what_was_given_is_never_taken_back_by_a_decoder_that_closes_up_spaces() -> None:
    texts = {1: "a ", 2: "a ,b", 3: "a, b", 4: "a, b c"}
    growing = TextStream(lambda ids: texts[len(ids)])
    assert [growing.grow([0] * n) for n in (1, 2, 3, 4)] == ["a ", ",b", "", ""]
    assert growing.finish("a, b c") == ", b c"


@pytest.mark.parametrize("stop", [(), ("e",), ("no such",)])
def test_streamed_text_is_the_whole_text(tiny_model_dir: Path, stop: tuple[str, ...]) -> None:
    tokenizer = load_tokenizer(tiny_model_dir)
    sampling = SamplingParams(40, 1.0, top_k=30, stop=stop)
    (request,) = requests_for(rows_of("hello"), tokenizer, sampling)
    engine = load_engine(tiny_model_dir, tokenizer, "float32", device="cpu")
    (result,) = in_order(engine, [request])
    pieces = list(stream(engine, request, decoder(tokenizer)))
    assert "".join(pieces) == response_text(result, decoder(tokenizer), stop)
    assert len([piece for piece in pieces if piece]) > 3
    assert not stop or not "".join(pieces).endswith(stop)


def test_text_is_cut_before_the_first_stop_string_that_ended_it() -> None:
    def result(reason: str) -> Result:
        ids = torch.tensor(list(b"one##two#"), dtype=torch.int32).numpy()
        return Result(None, ids, None, None, None, reason)  # type: ignore[arg-type]

    assert response_text(result("stop"), as_bytes, ["two", "##"]) == "one"
    assert response_text(result("length"), as_bytes, ["##"]) == "one##two#"
    assert response_text(result("stop"), as_bytes, ["absent"]) == "one##two#"
    # A stop text that was complete within the forced length is text; one that goes beyond it ended the response.
    assert response_text(result("stop"), as_bytes, ["##", "two"], min_new_tokens=5) == "one##"
    assert response_text(result("stop"), as_bytes, ["##", "two"], min_new_tokens=4) == "one"
    assert response_text(result("stop"), as_bytes, ["##"], min_new_tokens=5) == "one##two#"
