"""B163: Python code that comes with a model or tokenizer runs only where its own flag says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from stage_cases import tiny_config

from verl.cluster.worker import Worker
from verl.config import Config, load_config
from verl.errors import ModelError
from verl.models.tiny import build_tiny
from verl.trainer.inputs import Inputs

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast
Path({marker!r}).touch()
class MyConfig(LlamaConfig):
    model_type = "my-own"
class MyModel(LlamaForCausalLM):
    config_class = MyConfig
class MyScores(LlamaForSequenceClassification):
    config_class = MyConfig
class MyTokenizer(PreTrainedTokenizerFast):
    pass
"""
ROLES = {
    "model.path": "model.trust_remote_code",
    "model.tokenizer_path": "data.trust_remote_code",
    "critic.model.path": "critic.model.trust_remote_code",
    "reward.model.path": "reward.model.trust_remote_code",
}


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A model with code of its own for everything, and the file that this code makes when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, marker = build_tiny(tmp_path / "stranger", hidden_size=32), tmp_path / "executed"
    (folder / "custom.py").write_text(CODE.format(marker=str(marker)))
    return folder, marker


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def with_code(folder: Path, key: str) -> None:
    if key == "model.tokenizer_path":
        auto_map: Any = {"AutoTokenizer": [None, "custom.MyTokenizer"]}
        edit(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="MyTokenizer")
        return
    auto_map = {
        "AutoConfig": "custom.MyConfig",
        "AutoModelForCausalLM": "custom.MyModel",
        "AutoModelForSequenceClassification": "custom.MyScores",
    }
    kind = "MyForSequenceClassification" if key == "reward.model.path" else "MyForCausalLM"
    edit(folder / "config.json", auto_map=auto_map, model_type="my-own", architectures=[kind])


def config_with(tmp_path: Path, tiny_model_dir: Path, key: str, folder: Path, trusted: set[str]) -> Config:
    base = tiny_config(tmp_path, tiny_model_dir, {"algorithm": {"adv_estimator": "gae"}})
    overrides = [f"{key}={folder}", *(f"{flag}=true" for flag in sorted(trusted))]
    return load_config(base.model_dump(mode="json"), overrides).config


@pytest.mark.parametrize("key", ROLES)
def test_b163_each_has_a_flag_of_its_own(
    tmp_path: Path, tiny_model_dir: Path, stranger: tuple[Path, Path], key: str
) -> None:
    folder, marker = stranger
    with_code(folder, key)
    others = set(ROLES.values()) - {ROLES[key]}
    with pytest.raises(ModelError, match="that code is not executed") as error:
        Inputs.load(config_with(tmp_path, tiny_model_dir, key, folder, others))
    assert f"set {ROLES[key]}=true" in str(error.value.fix)
    assert not marker.exists()
    Inputs.load(config_with(tmp_path, tiny_model_dir, key, folder, {ROLES[key]}))
    assert marker.exists(), "the trap itself must work"


def test_b163_a_critic_with_code_of_its_own(tmp_path: Path, tiny_model_dir: Path, stranger: tuple[Path, Path]) -> None:
    folder, marker = stranger
    with_code(folder, "critic.model.path")
    config = config_with(tmp_path, tiny_model_dir, "critic.model.path", folder, {"critic.model.trust_remote_code"})
    worker = Worker(config)
    worker.setup()
    worker.close()
    assert marker.exists()
