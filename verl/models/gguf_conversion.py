"""Conversion of a GGUF file (one file of quantised weights) into a plain Hugging Face folder with fp32 weights.

transformers dequantises the weights and rebuilds the tokenizer; this module writes them as a clean folder, since what
transformers loads from GGUF it does not save again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ModelError, VerlError
from verl.models.quiet import silenced

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

GGUF_MAGIC = b"GGUF"
# Raised when the conversion itself changes, so that cached results of the old one are not used.
CONVERSION_VERSION = 1
# Vocabularies whose training split digits off before the byte-level words ("smollm" in llama.cpp's list of
# pre-tokenizers: first \p{N}, then the GPT-2 pattern). transformers restores the GPT-2 pattern only.
_DIGIT_SPLITTING = frozenset({"smollm", "starcoder"})


def is_gguf(path: Path) -> bool:
    """Whether the file starts as a GGUF file does (its name does not matter)."""
    with path.open("rb") as file:
        return file.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def convert_gguf(gguf: Path, to: Path) -> None:
    """Write ``config.json``, fp32 ``model.safetensors``, ``generation_config.json`` and the tokenizer into ``to``.

    fp32, because a dequantised value (scale times integer plus offset) has more bits than bf16 or fp16 hold.

    Raises:
        ModelError: the file is no GGUF file, is cut, or has an architecture that transformers cannot rebuild.
    """
    if not is_gguf(gguf):
        raise ModelError("not a GGUF file (wrong first bytes)", value=gguf, fix="give a complete .gguf file")
    try:
        with silenced():
            _convert(gguf, to)
    except (VerlError, OSError, MemoryError):
        raise
    except Exception as error:
        # The GGUF reader raises whatever its arrays raise on a damaged file; all of it means the same to a user.
        raise ModelError(
            f"the GGUF file cannot be converted: {error}",
            value=gguf,
            fix="check that the file is complete, or use a Hugging Face folder of the same model",
        ) from error


def _convert(gguf: Path, to: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = _clean_config(loaded.config)
    # A model that came from GGUF stays marked as quantised; a fresh one of the same class takes over its tensors.
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict(), strict=True)
    model.generation_config = loaded.generation_config
    model.save_pretrained(to)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    if _pre_tokenizer_name(gguf) in _DIGIT_SPLITTING:
        _split_digits(tokenizer)
    limit = getattr(config, "max_position_embeddings", None)
    if limit:
        tokenizer.model_max_length = limit
    tokenizer.save_pretrained(to)
    _name_portable_tokenizer_class(to / "tokenizer_config.json")


def _clean_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """The configuration without traces of the file, its fp32 numbers in their shortest decimal form."""
    import numpy as np

    values = config.to_dict()
    for key in ("_name_or_path", "_model_name_or_path", "quantization_config"):
        values.pop(key, None)
    for key, value in values.items():
        if isinstance(value, float):
            # GGUF stores 1e-5 as fp32, which reads back as 9.999999747378752e-06.
            values[key] = float(str(np.float32(value)))
    return type(config).from_dict(values)


def _pre_tokenizer_name(gguf: Path) -> str | None:
    from gguf import GGUFReader

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return field.contents() if field is not None else None


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    from tokenizers import pre_tokenizers

    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


def _name_portable_tokenizer_class(file: Path) -> None:
    """Name the generic fast tokenizer, which every release of transformers knows, and drop what described the load."""
    values = json.loads(file.read_text(encoding="utf-8"))
    values["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("backend", "is_local", "local_files_only"):
        values.pop(key, None)
    file.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
