"""The tiny model and its byte tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl.errors import ModelError
from verl.models.tiny import EOS_ID, FAMILIES, PAD_ID, SPECIAL_TOKENS, VOCABULARY, build_tiny, byte_tokenizer

TOKENIZER = byte_tokenizer()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_ids_are_the_bytes(text: str) -> None:
    ids = TOKENIZER(text).input_ids
    if not any(token in text for token in SPECIAL_TOKENS):
        assert ids == list(text.encode())
    assert TOKENIZER.decode(ids) == text


def test_special_tokens() -> None:
    assert (PAD_ID, EOS_ID, VOCABULARY, len(TOKENIZER)) == (256, 257, 264, 264)
    assert (TOKENIZER.pad_token_id, TOKENIZER.eos_token_id, TOKENIZER.bos_token_id) == (256, 257, None)
    assert TOKENIZER("a<eos>b").input_ids == [97, 257, 98]
    assert TOKENIZER.decode([97, 257, 256], skip_special_tokens=True) == "a"


def test_chat_template() -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "?"},
    ]
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == [258, 115, 259, 104, 105, 260, 121, 111, 257, 259, 63, 260]


def test_folder_loads_by_itself(tiny_model_dir: Path) -> None:
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tiny_model_dir),
        AutoTokenizer.from_pretrained(tiny_model_dir),
    )
    config = model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (2, 4, 2)
    assert config.vocab_size == len(tokenizer)
    assert config.eos_token_id == model.generation_config.eos_token_id == tokenizer.eos_token_id == 257
    assert config.pad_token_id == tokenizer.pad_token_id == 256
    assert tokenizer.chat_template == TOKENIZER.chat_template
    assert model.dtype == torch.float32


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    state = torch.get_rng_state()
    first, again, other = (build_tiny(tmp_path / name, seed) for name, seed in [("a", 3), ("b", 3), ("c", 4)])
    assert torch.equal(torch.get_rng_state(), state)
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    weights, others = load_file(first / "model.safetensors"), load_file(other / "model.safetensors")
    assert not torch.equal(weights["model.embed_tokens.weight"], others["model.embed_tokens.weight"])


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_are_causal(family: str, tied: bool, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(build_tiny(tmp_path, family=family, tie_embeddings=tied)).eval()
    assert model.config.model_type == family
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    with torch.no_grad():
        logits = model(torch.tensor([[1, 2, 3, 4], [1, 2, 9, 4]])).logits
    assert logits.shape == (2, 4, VOCABULARY)
    torch.testing.assert_close(logits[0, :2], logits[1, :2])
    assert not torch.allclose(logits[0, 3], logits[1, 3])


@pytest.mark.parametrize("wrong", [{"family": "t5"}, {"hidden_size": 60}, {"heads": 4, "kv_heads": 3}])
def test_sizes_that_do_not_fit(wrong: dict, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        build_tiny(tmp_path, **wrong)
    assert not any(tmp_path.iterdir())
