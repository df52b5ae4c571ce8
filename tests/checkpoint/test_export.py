"""Export to a plain Hugging Face directory."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from verl.checkpoint.export import export_hf
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.errors import CheckpointError
from verl.protocol.files import write_safetensors

EMBED = torch.linspace(-3, 3, 40).view(8, 5)
WEIGHTS = {"model.embed_tokens.weight": EMBED, "lm_head.weight": EMBED, "count": torch.tensor([3])}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    with CheckpointStore(tmp_path / "checkpoints").begin(7) as pending:
        write_safetensors(pending.file("actor/model.safetensors"), WEIGHTS, {"format": "pt"})
        config = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "float16", "name": "é"}
        pending.file("actor/hf/config.json").write_text(json.dumps(config))
        pending.file("actor/hf/tokenizer.json").write_text('{"version": "1.0"}')
        return pending.commit()


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_export(checkpoint: Checkpoint, tmp_path: Path, dtype: str) -> None:
    target = export_hf(checkpoint, tmp_path / "new" / "model", dtype)
    assert {path.name for path in target.iterdir()} == {"config.json", "tokenizer.json", "model.safetensors"}
    assert [path.name for path in target.parent.iterdir()] == ["model"]
    weights = load_file(target / "model.safetensors")
    assert weights.keys() == WEIGHTS.keys() and torch.equal(weights["count"], WEIGHTS["count"])
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(weights[name], EMBED.to(getattr(torch, dtype)))
    with safe_open(str(target / "model.safetensors"), framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    config = json.loads((target / "config.json").read_text("utf-8"))
    assert config == {"architectures": ["LlamaForCausalLM"], "dtype": dtype, "name": "é"}
    assert (target / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_source_directory_and_path(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = tmp_path / "hf"
    source.mkdir()
    for name in ("config.json", "generation_config.json", "old.safetensors", "pytorch_model.bin", "m.index.json"):
        (source / name).write_text("{}")
    (tmp_path / "empty").mkdir()
    target = export_hf(checkpoint.path, tmp_path / "empty", source_hf_dir=source)
    assert {path.name for path in target.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_targets_in_use_and_wrong_input(checkpoint: Checkpoint, tmp_path: Path) -> None:
    for used in (checkpoint.path, checkpoint.path / "manifest.json"):
        before = {path: path.stat().st_mtime_ns for path in checkpoint.path.rglob("*")}
        with pytest.raises(CheckpointError, match="already there"):
            export_hf(checkpoint, used)
        assert {path: path.stat().st_mtime_ns for path in checkpoint.path.rglob("*")} == before
    with pytest.raises(CheckpointError, match="int4"):
        export_hf(checkpoint, tmp_path / "x", "int4")
    (tmp_path / "bare").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        export_hf(checkpoint, tmp_path / "x", source_hf_dir=tmp_path / "bare")
    (tmp_path / "bare" / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match="not a JSON object"):
        export_hf(checkpoint, tmp_path / "x", source_hf_dir=tmp_path / "bare")
    with CheckpointStore(tmp_path / "other").begin(1) as pending:
        other = pending.commit()
    with pytest.raises(CheckpointError, match=r"actor/model\.safetensors"):
        export_hf(other, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_a_full_disk_leaves_nothing(checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(CheckpointError, match="No space left"):
        export_hf(checkpoint, tmp_path / "model")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}


def test_a_damaged_weight_file_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = checkpoint.path / "actor/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 4
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        export_hf(checkpoint.path, tmp_path / "model")
