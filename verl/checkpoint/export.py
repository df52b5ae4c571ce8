"""A trained model as a plain Hugging Face directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from verl.atomic import atomic_write, partial_name, sync
from verl.checkpoint.manifest import checkpoint_errors
from verl.checkpoint.store import Checkpoint
from verl.errors import CheckpointError
from verl.protocol.files import write_safetensors_lazily

WEIGHTS = "actor/model.safetensors"
HF_FOLDER = "actor/hf"
EXPORT_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

_CONFIG = "config.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".index.json", ".pkl")


def export_hf(
    checkpoint: Checkpoint | str | Path,
    to: str | Path,
    dtype: str = "bfloat16",
    source_hf_dir: str | Path | None = None,
) -> Path:
    """Write a directory that ``AutoModelForCausalLM.from_pretrained`` loads, complete or not at all.

    Args:
        checkpoint: a complete checkpoint with the file ``actor/model.safetensors`` (Hugging Face
            parameter names; every tensor in it is written, tied ones too).
        to: the new directory; may exist when empty.
        dtype: "bfloat16", "float32" or "float16" for floating-point weights; others are kept.
        source_hf_dir: where config, generation config and tokenizer are copied from; by default
            ``actor/hf`` of the checkpoint.

    Raises:
        CheckpointError: no such weights or config, a damaged file, or a target that is in use or
            cannot be written.
    """
    if dtype not in EXPORT_DTYPES:
        raise CheckpointError("unknown dtype for an export", dtype, f"one of {', '.join(EXPORT_DTYPES)}")
    if not isinstance(checkpoint, Checkpoint):
        checkpoint = Checkpoint(Path(checkpoint))
    target = Path(to).absolute()
    _require_free(target)
    weights = checkpoint.file(WEIGHTS)
    sources = _hf_files(checkpoint, source_hf_dir)
    partial = partial_name(target)
    try:
        with checkpoint_errors("write the export", target):
            partial.mkdir(parents=True)
            for source in sources:
                if source.name == _CONFIG:
                    _write_config(source, partial / _CONFIG, dtype)
                else:
                    shutil.copyfile(source, partial / source.name)
                    sync(partial / source.name)
            _write_weights(weights, partial / "model.safetensors", EXPORT_DTYPES[dtype])
            sync(partial)
            partial.rename(target)
            sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return target


def _require_free(target: Path) -> None:
    with checkpoint_errors("look at the export's target", target):
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise CheckpointError(
                "the export's target is already there", str(target), "choose a new directory, or remove this one"
            )


def _hf_files(checkpoint: Checkpoint, source_hf_dir: str | Path | None) -> list[Path]:
    if source_hf_dir is None:
        prefix = HF_FOLDER + "/"
        names = [name for name in checkpoint.files if name.startswith(prefix) and "/" not in name[len(prefix) :]]
        files, where = [checkpoint.file(name) for name in names], checkpoint.path / HF_FOLDER
    else:
        where = Path(source_hf_dir)
        with checkpoint_errors("read the model's directory", where):
            files = sorted(path for path in where.iterdir() if path.is_file())
    files = [path for path in files if not path.name.endswith(_WEIGHT_SUFFIXES) and not path.name.startswith(".")]
    if _CONFIG not in {path.name for path in files}:
        raise CheckpointError(f"no {_CONFIG} to export with", str(where), "give the directory of the original model")
    return files


def _write_config(source: Path, target: Path, dtype: str) -> None:
    try:
        config = json.loads(source.read_text("utf-8"))
        config.pop("torch_dtype", None)  # the older name of the same thing
        config["dtype"] = dtype
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"the model's config is not a JSON object: {error}", str(source)) from error
    with atomic_write(target) as file:
        file.write(json.dumps(config, indent=2, ensure_ascii=False).encode("utf-8") + b"\n")


def _write_weights(source: Path, target: Path, dtype: torch.dtype) -> None:
    """Cast tensor by tensor, so that the model is never in memory as a whole."""
    try:
        with safe_open(str(source), framework="pt") as file:
            names = file.keys()

            def cast(name: str) -> torch.Tensor:
                tensor = file.get_tensor(name)
                return tensor.to(dtype) if tensor.is_floating_point() else tensor

            # only shapes and dtypes are kept: reading a tensor maps it, casting one at a time bounds memory
            specs = {name: _spec(file.get_tensor(name), dtype) for name in names}
            write_safetensors_lazily(target, specs, cast, {"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"the weights of the checkpoint cannot be read: {error}", str(source)) from error


def _spec(tensor: torch.Tensor, dtype: torch.dtype) -> tuple[torch.dtype, tuple[int, ...]]:
    return (dtype if tensor.is_floating_point() else tensor.dtype), tuple(tensor.shape)
