"""What ``model.path`` may say, what is refused, and that nothing that came with a model runs (B062, B158, B163)."""

from __future__ import annotations

import json
import logging
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from verl.errors import ModelError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import (
    load_causal_lm,
    load_config,
    load_tokenizer,
    save_hf_files,
    stop_ids,
)
from verl.models.resolve import resolve_model

SILENT = lambda line: None  # noqa: E731


@pytest.fixture
def model_dir(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def edit(file: Path, **values: Any) -> None:
    """Set values in a JSON file; None removes a key."""
    content = json.loads(file.read_text()) | values
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


# --- names ------------------------------------------------------------------------------------------------------


def test_a_folder_is_itself(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(model_dir) == model_dir
    monkeypatch.setenv("HOME", str(model_dir.parent))
    assert resolve_model("~/model") == model_dir


def test_tiny_alias_is_built_into_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    folder = resolve_model("tiny-llama")
    assert folder == tmp_path / "models" / "tiny-llama"
    assert load_causal_lm("tiny-llama", torch.float32).config.vocab_size == 264


@pytest.mark.parametrize("name", ["smollm2-135", "SmolLM2-135M", "smolm2-135m", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_the_nearest_alias_is_named(name: str) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model(name, SILENT)
    assert caught.value.value == name
    assert "did you mean smollm2-135m?" in str(caught.value)


def test_the_name_of_a_run_gets_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    with pytest.raises(ModelError, match="did you mean runs/first"):
        resolve_model("first", SILENT)
    with pytest.raises(ModelError) as caught:
        resolve_model("", SILENT)
    assert "did you mean" not in str(caught.value)
    (tmp_path / "runs" / "first" / "checkpoints").mkdir()
    with pytest.raises(ModelError, match="no such model") as caught:  # the hub is not asked
        resolve_model("runs/frist", SILENT)
    assert "did you mean runs/first?" in str(caught.value)


@pytest.mark.parametrize("name", ["/nowhere/model", "xyzzy", "a/b/c", "", "../x", "./tiny-llama"])
def test_no_such_model(name: str) -> None:
    with pytest.raises(ModelError, match=r"no such model|holds no model"):
        resolve_model(name, SILENT)


def test_hub_id_without_a_hub() -> None:
    with pytest.raises(ModelError, match="the hub cannot be reached") as caught:
        resolve_model("someone/some-model", SILENT)
    assert caught.value.value == "someone/some-model"


def test_folders_and_files_that_are_no_model(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve_model(tmp_path)
    (tmp_path / "x.gguf").write_bytes(b"GGML")
    with pytest.raises(ModelError) as caught:
        resolve_model(tmp_path)
    assert "x.gguf" in str(caught.value.fix)
    with pytest.raises(ModelError, match="no GGUF file"):
        resolve_model(tmp_path / "x.gguf")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelError, match="adapter"):
        resolve_model(tmp_path)


# --- loading ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_those_of_the_file(model_dir: Path, dtype: torch.dtype) -> None:
    model = load_causal_lm(model_dir, dtype)
    assert not model.training
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    state = model.state_dict()
    for name, value in load_file(model_dir / "model.safetensors").items():
        assert state[name].dtype == dtype
        assert torch.equal(state[name], value.to(dtype)), name
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_the_attention_asked_for(model_dir: Path) -> None:
    assert load_causal_lm(model_dir, torch.float32, attn_implementation="eager").config._attn_implementation == "eager"


def test_a_missing_weight_is_not_made_up(model_dir: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, model_dir / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match="1 weights are not in the model's files") as caught:
        load_causal_lm(model_dir, torch.float32)
    assert caught.value.value == "model.layers.1.mlp.up_proj.weight"


def test_damaged_or_absent_weights(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_causal_lm(model_dir, torch.float32)
    edit(model_dir / "config.json", hidden_size=32)
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_causal_lm(model_dir, torch.float32)
    file.unlink()
    with pytest.raises(ModelError, match="holds no weights"):
        load_causal_lm(model_dir, torch.float32)


def test_wrong_shapes_are_refused(model_dir: Path) -> None:
    edit(model_dir / "config.json", intermediate_size=96)
    with pytest.raises(ModelError):
        load_causal_lm(model_dir, torch.float32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "bert", "architectures": None}, "bert"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "T5ForConditionalGeneration"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"model_type": "unheard-of", "architectures": None}, "unheard-of"),
        ({"model_type": None, "architectures": None}, "no model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    ],
)
def test_no_decoder(model_dir: Path, changes: dict[str, Any], named: str) -> None:
    edit(model_dir / "config.json", **changes)
    for load in (load_config, lambda path: load_causal_lm(path, torch.float32)):
        with pytest.raises(ModelError) as caught:
            load(model_dir)
        assert named in caught.value.what and caught.value.value == model_dir


@pytest.mark.parametrize("content", ["{", "[]", ""])
def test_unreadable_config(model_dir: Path, content: str) -> None:
    (model_dir / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        load_config(model_dir)


# --- nothing runs -----------------------------------------------------------------------------------------------

CUSTOM_CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
(Path({marker!r}) / __name__.rsplit(".", 1)[-1]).touch()
class MyConfig(LlamaConfig):
    model_type = "my-own"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture
def markers(model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give the model its own code, which leaves one marker file a module in the returned folder when it runs."""
    marker = tmp_path / "markers"
    marker.mkdir()
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    for module in ("configuration_my", "modeling_my", "tokenization_my"):
        (model_dir / f"{module}.py").write_text(CUSTOM_CODE.format(marker=str(marker)))
    auto_map = {"AutoConfig": "configuration_my.MyConfig", "AutoModelForCausalLM": "modeling_my.MyModel"}
    edit(model_dir / "config.json", auto_map=auto_map, model_type="my-own", architectures=["MyForCausalLM"])
    edit(
        model_dir / "tokenizer_config.json",
        auto_map={"AutoTokenizer": [None, "tokenization_my.MyTokenizer"]},
        tokenizer_class="MyTokenizer",
    )
    return marker


def test_custom_code_does_not_run(model_dir: Path, markers: Path, caplog: pytest.LogCaptureFixture) -> None:
    for load in (load_config, lambda path: load_causal_lm(path, torch.float32)):
        with pytest.raises(ModelError, match="that code is not executed") as caught:
            load(model_dir)
        assert "trust_remote_code" in str(caught.value.fix)
    try:
        # transformers may fall back to its own fast tokenizer; what must not happen is that the code runs.
        load_tokenizer(model_dir)
    except ModelError as error:
        assert "that code is not executed" in error.what
    assert not any(markers.iterdir())


def test_own_class_stands_in_for_code_of_a_known_type(
    model_dir: Path, markers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    edit(model_dir / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    with caplog.at_level(logging.WARNING):
        model = load_causal_lm(model_dir, torch.float32)
    assert type(model).__module__.startswith("transformers.models.llama")
    assert "brings its own code" in caplog.text
    assert not any(markers.iterdir())


def test_custom_code_runs_when_asked_for_and_is_logged(
    model_dir: Path, markers: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = load_causal_lm(model_dir, torch.float32, trust_remote_code=True)
    assert type(model).__name__ == "MyModel"
    assert "executing the model code" in caplog.text
    ran = {file.name for file in markers.iterdir()}
    assert ran == {"configuration_my", "modeling_my"}, "the flag of the model must not spread to the tokenizer"


def test_a_model_with_an_attention_of_its_own_is_refused_by_name(tmp_path: Path) -> None:
    config = AutoConfig.for_model("falcon", vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="brings an attention of its own") as caught:
        load_causal_lm(tmp_path, torch.float32, attn_implementation=ATTENTION_NAME)
    assert caught.value.value == "falcon"


def test_pickled_weights_run_no_code(model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "model.safetensors").unlink()
    marker = tmp_path / "marker"
    (model_dir / "pytorch_model.bin").write_bytes(pickle.dumps(Touch(marker)))
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_causal_lm(model_dir, torch.float32)
    torch.save({"model.norm.weight": Touch(marker)}, model_dir / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_causal_lm(model_dir, torch.float32)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Touch(marker)))
    assert marker.exists(), "the trap itself must work"


class Touch:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_torch_files_of_tensors_load(model_dir: Path) -> None:
    weights = load_file(model_dir / "model.safetensors")
    (model_dir / "model.safetensors").unlink()
    torch.save(weights, model_dir / "pytorch_model.bin")
    state = load_causal_lm(model_dir, torch.float32).state_dict()
    assert all(torch.equal(state[name], value) for name, value in weights.items())


# --- tokenizer --------------------------------------------------------------------------------------------------


def test_pad_token_falls_back_to_eos(model_dir: Path) -> None:
    assert load_tokenizer(model_dir).pad_token_id == 256
    edit(model_dir / "tokenizer_config.json", pad_token=None)
    assert load_tokenizer(model_dir).pad_token_id == 257


def test_tokenizer_without_eos_or_files(model_dir: Path) -> None:
    edit(model_dir / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ModelError, match="no EOS token"):
        load_tokenizer(model_dir)
    (model_dir / "tokenizer.json").unlink()
    (model_dir / "tokenizer_config.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer can be loaded"):
        load_tokenizer(model_dir)


@pytest.mark.parametrize(
    ("generation", "config", "expected"), [(None, None, [257]), (5, 257, [5, 257]), ([7, 5], [9], [5, 7, 9, 257])]
)
def test_stop_ids_are_those_of_all_files(model_dir: Path, generation: Any, config: Any, expected: list[int]) -> None:
    edit(model_dir / "generation_config.json", eos_token_id=generation)
    edit(model_dir / "config.json", eos_token_id=config)
    assert stop_ids(model_dir, load_tokenizer(model_dir)) == expected


# --- export -----------------------------------------------------------------------------------------------------


def test_saved_files_complete_a_model(model_dir: Path, tmp_path: Path) -> None:
    target = tmp_path / "export"
    (model_dir / "training_args.bin").touch()
    (model_dir / "evil.py").touch()
    save_hf_files(model_dir, target, dtype=torch.bfloat16)
    assert sorted(path.name for path in target.iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    model = load_causal_lm(model_dir, torch.bfloat16)
    weights = {name: value for name, value in model.state_dict().items() if name != "lm_head.weight"}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    exported, tokenizer = AutoModelForCausalLM.from_pretrained(target), AutoTokenizer.from_pretrained(target)
    assert exported.dtype == torch.bfloat16
    assert all(torch.equal(value, exported.state_dict()[name]) for name, value in model.state_dict().items())
    messages = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == "<|user|>hi"


def test_saved_files_of_linked_and_of_custom_models(model_dir: Path, markers: Path, tmp_path: Path) -> None:
    blob = (model_dir / "tokenizer.json").rename(tmp_path / "blob")
    (model_dir / "tokenizer.json").symlink_to(blob)
    save_hf_files(model_dir, tmp_path / "export")
    copied = {path.name: path for path in (tmp_path / "export").iterdir()}
    assert not copied["tokenizer.json"].is_symlink()
    assert copied["tokenizer.json"].read_bytes() == blob.read_bytes()
    assert {"configuration_my.py", "modeling_my.py", "tokenization_my.py"} <= copied.keys()
    assert "model.safetensors" not in copied
