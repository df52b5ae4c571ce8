"""Text in, text out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.errors import EngineError, ModelError
from verl.models.tiny import build_tiny
from verl.rollout.offline import generate_text

ARGUMENTS = {"raw": True, "max_new_tokens": 12, "dtype": "float32"}


def test_greedy_text_is_transformers_text(tiny_model_dir: Path) -> None:
    prompts = ["2 + 2 =", "a longer one, with more bytes: é"]
    found = generate_text(str(tiny_model_dir), prompts, **ARGUMENTS)
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        AutoTokenizer.from_pretrained(tiny_model_dir),
    )
    expected = []
    for prompt in prompts:
        ids = tokenizer(prompt, return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=12, do_sample=False)
        expected.append(tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True))
    assert found == expected


def test_samples_side_by_side_and_again(tiny_model_dir: Path) -> None:
    more = ARGUMENTS | {"n": 3, "temperature": 1.0}
    found = generate_text(str(tiny_model_dir), ["ab", "cd"], **more)
    assert len(found) == 6 and len(set(found)) == 6
    assert generate_text(str(tiny_model_dir), ["ab", "cd"], **more) == found
    assert generate_text(str(tiny_model_dir), ["ab"], **more) == found[:3]
    assert not set(generate_text(str(tiny_model_dir), ["ab"], **more, seed=2)) & set(found)


def test_a_chat_template_is_used_or_missed(tiny_model_dir: Path, tmp_path: Path) -> None:
    chat = ARGUMENTS | {"raw": False}
    as_chat = generate_text(str(tiny_model_dir), ["hello"], **chat)
    assert as_chat == generate_text(str(tiny_model_dir), ["<|user|>hello<|assistant|>"], **ARGUMENTS)
    bare = Path(shutil.copytree(tiny_model_dir, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (bare / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(ModelError, match="no chat template") as caught:
        generate_text(str(bare), ["hello"], **chat)
    assert caught.value.value == str(bare)
    assert generate_text(str(bare), ["hello"], **ARGUMENTS) == generate_text(
        str(tiny_model_dir), ["hello"], **ARGUMENTS
    )


def test_prompts_that_cannot_be_answered(tmp_path: Path) -> None:
    folder = str(build_tiny(tmp_path / "short", hidden_size=16, max_positions=16))
    assert len(generate_text(folder, ["x" * 15], **ARGUMENTS)) == 1
    with pytest.raises(EngineError, match="prompt 1 is as long as all positions") as caught:
        generate_text(folder, ["x", "x" * 16], **ARGUMENTS)
    assert caught.value.value == "16 tokens"
    with pytest.raises(EngineError, match="empty prompt"):
        generate_text(folder, [""], **ARGUMENTS)
    with pytest.raises(ModelError, match="no such model"):
        generate_text("nowhere", ["x"], **ARGUMENTS)


def test_the_dtype_is_the_model_s(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from verl.rollout import offline

    asked = []
    load = offline.load_causal_lm
    monkeypatch.setattr(offline, "load_causal_lm", lambda *a, **k: asked.append(a[1]) or load(*a, **k))
    generate_text(str(tiny_model_dir), ["x"], raw=True, max_new_tokens=1)
    assert asked == [torch.bfloat16]
