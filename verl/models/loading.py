"""From a model's folder to its configuration, tokenizer and weights.

Nothing here executes code that came with a model unless ``trust_remote_code`` says so for that very call, and
weights are read as data only: safetensors, or torch files restricted to tensors.
"""

from __future__ import annotations

import json
import logging
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ModelError, first_line
from verl.models.quiet import silenced, without_bars
from verl.models.resolve import resolve_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
# What a folder needs beside its weights to be loaded: configuration, tokenizer and chat template.
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
)


# --- from a folder to configuration, tokenizer, model ------------------------------------------------------------


def is_classifier(path: str | Path) -> bool:
    """Whether a model folder holds a sequence-classification model, such as a reward model."""
    return _is_classifier(_read_json(resolve_model(path) / "config.json"))


def require_classifier(path: str | Path) -> None:
    """Raise ModelError where ``path`` is no sequence-classification model."""
    if not is_classifier(path):
        raise ModelError(
            "not a sequence-classification model, so it gives no scores",
            value=path,
            fix="train one from it with verl reward-model train",
        )


def _is_classifier(raw: dict[str, Any]) -> bool:
    return any(str(name).endswith("ForSequenceClassification") for name in raw.get("architectures") or [])


def load_config(path: str | Path, trust_remote_code: bool = False, classifier: bool = False) -> PreTrainedConfig:
    """Configuration of a decoder language model.

    Args:
        classifier: one with a head for sequence classification will do, too.

    Raises:
        ModelError: unreadable, unknown to transformers, custom code without ``trust_remote_code``, or no decoder.
    """
    from transformers import AutoConfig

    folder = resolve_model(path)
    raw = _read_json(folder / "config.json")
    _check_decoder(folder, raw, trust_remote_code, classifier)
    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise ModelError(f"the model's config.json cannot be used: {first_line(error)}", value=folder) from error


def load_tokenizer(path: str | Path, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Tokenizer of a model folder. Without a pad token it pads with its EOS token (masks never compare with it).

    Raises:
        ModelError: no tokenizer there, custom code without ``trust_remote_code``, or no EOS token.
    """
    from transformers import AutoTokenizer

    folder = resolve_model(path)
    file = folder / "tokenizer_config.json"
    custom = _custom_code(_read_json(file) if file.is_file() else {}, "AutoTokenizer")
    if custom and trust_remote_code:
        log.warning("trust_remote_code: executing the tokenizer code of %s (%s)", folder, custom)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:
        if custom and not trust_remote_code:
            raise _refused_code("tokenizer", folder, custom) from error
        raise ModelError(
            f"no tokenizer can be loaded: {first_line(error)}",
            value=folder,
            fix="the folder needs tokenizer.json and tokenizer_config.json, or set model.tokenizer_path",
        ) from error
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no EOS token", value=folder, fix="set eos_token in tokenizer_config.json")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def stop_ids(path: str | Path, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Sorted ids that end a response: the EOS ids of ``generation_config.json``, ``config.json`` and the tokenizer."""
    folder = resolve_model(path)
    found = {tokenizer.eos_token_id}
    for name in ("generation_config.json", "config.json"):
        if (folder / name).is_file():
            ids = _read_json(folder / name).get("eos_token_id")
            found.update(ids if isinstance(ids, list) else [ids])
    return sorted(i for i in found if i is not None)


def load_causal_lm(
    path: str | Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """The decoder on CPU in eval mode, all floating-point weights in ``dtype``, every one of them read from the folder.

    Args:
        path: anything that :func:`verl.models.resolve.resolve_model` takes.
        attn_implementation: name in transformers' attention interface; None leaves the choice to transformers.

    Raises:
        ModelError: not a decoder, custom code without ``trust_remote_code``, weights missing, damaged, or a file that
            holds more than tensors.
    """
    from transformers import AutoModelForCausalLM

    folder = resolve_model(path)
    config = load_config(folder, trust_remote_code)
    model, missing = _load(AutoModelForCausalLM, folder, config, dtype, trust_remote_code, attn_implementation)
    _refuse_missing(missing, folder)
    return model


def load_classifier(
    path: str | Path,
    dtype: torch.dtype,
    trust_remote_code: bool = False,
    attn_implementation: str | None = None,
    new_head: bool = False,
) -> PreTrainedModel:
    """A decoder with a head that gives one score (``AutoModelForSequenceClassification``); as :func:`load_causal_lm`.

    Args:
        new_head: a causal language model will do, too: its score head starts at zero.

    Raises:
        ModelError: as :func:`load_causal_lm`, or its head does not give one score.
    """
    from transformers import AutoModelForSequenceClassification

    folder = resolve_model(path)
    fresh = not is_classifier(folder)
    if not new_head:
        require_classifier(folder)
    config = load_config(folder, trust_remote_code, classifier=True)
    if fresh:
        config.num_labels = 1
    elif config.num_labels != 1:
        raise ModelError(f"the model gives {config.num_labels} scores, not one", value=folder, fix="use a reward model")
    with silenced() if fresh else nullcontext():  # a report that the head is new
        model, missing = _load(
            AutoModelForSequenceClassification, folder, config, dtype, trust_remote_code, attn_implementation
        )
    if not hasattr(getattr(model, "score", None), "in_features"):
        raise ModelError(
            f"{type(model).__name__} has no linear score head", value=folder, fix="use a Llama or Qwen one"
        )
    if fresh:
        model.score.weight.data.zero_()
        missing = [name for name in missing if name != "score.weight"]
    _refuse_missing(missing, folder)
    return model


def _load(
    auto: Any,
    folder: Path,
    config: PreTrainedConfig,
    dtype: torch.dtype,
    trust_remote_code: bool,
    attn_implementation: str | None,
) -> tuple[PreTrainedModel, list[str]]:
    """The model, and the names of the weights that its files lack."""
    if not any(any(folder.glob(pattern)) for pattern in _WEIGHTS):
        raise ModelError("the folder holds no weights", value=folder, fix="it needs model.safetensors")
    arguments: dict[str, Any] = {"config": config, "dtype": dtype, "trust_remote_code": trust_remote_code}
    if attn_implementation is not None:
        arguments["attn_implementation"] = attn_implementation
    try:
        with without_bars():
            model, report = auto.from_pretrained(folder, **arguments, local_files_only=True, output_loading_info=True)
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (attn_implementation,):
            from verl.models.support import FIX

            what = "the model brings an attention of its own, which VeRL cannot replace"
            raise ModelError(what, config.model_type, FIX) from error
        raise ModelError(
            f"the model cannot be loaded: {first_line(error)}",
            value=folder,
            fix="check that the folder is complete and its weights are safetensors",
        ) from error
    return model.eval(), sorted(report["missing_keys"])


def _refuse_missing(missing: list[str], folder: Path) -> None:
    if missing:
        raise ModelError(
            f"{len(missing)} weights are not in the model's files (they would have been random)",
            value=", ".join(missing[:3]),
            fix=f"check that {folder} is complete and of the type that its config.json names",
        )


def save_hf_files(source_dir: str | Path, to: str | Path, dtype: torch.dtype | None = None) -> None:
    """Copy everything but the weights that ``from_pretrained`` needs: configuration, tokenizer, chat template.

    A model with custom code keeps its Python files, as without them its copy could not be loaded.

    Args:
        source_dir: a resolved model folder.
        to: the folder to write, made if missing; files of the same name are replaced.
        dtype: what the weights beside it are saved in, written into ``config.json`` (transformers loads in it).
    """
    source, target = Path(source_dir), Path(to)
    patterns = [*_TEXT_FILES]
    if _custom_code(_read_json(source / "config.json"), None):
        patterns.append("*.py")
    for pattern in patterns:
        for file in source.glob(pattern):
            copy = target / file.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            # Content only: entries of the hub's cache are links, and cached files may be read-only.
            copy.write_bytes(file.read_bytes())
    if dtype is not None:
        config = _read_json(target / "config.json")
        config.pop("torch_dtype", None)
        config["dtype"] = str(dtype).removeprefix("torch.")
        (target / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


# --- checks -----------------------------------------------------------------------------------------------------


def _check_decoder(folder: Path, raw: dict[str, Any], trust_remote_code: bool, classifier: bool = False) -> None:
    """Refuse what is not a plain decoder (``classifier``: with whatever head), by name, before it is loaded."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES as MASKED

    kind, custom = str(raw.get("model_type", "")), _custom_code(raw, "AutoModelForCausalLM")
    if raw.get("quantization_config"):
        raise ModelError(
            "a quantised model cannot be trained", value=folder, fix="use the unquantised folder, or a GGUF file of it"
        )
    if custom and trust_remote_code:
        log.warning("trust_remote_code: executing the model code of %s (%s)", folder, custom)
        return
    if custom and kind not in CAUSAL:
        raise _refused_code("model", folder, custom)
    if custom:
        log.warning("%s brings its own code (%s); transformers' own %s is used instead", folder, custom, kind)
    named = [str(name) for name in raw.get("architectures") or []]
    decoder = not named or any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in named)
    decoder = decoder or (classifier and _is_classifier(raw))
    if not decoder or kind not in CAUSAL or kind in MASKED or raw.get("is_encoder_decoder"):
        raise ModelError(
            f"not a decoder language model: {', '.join(named) or kind or 'config.json names no model_type'}",
            value=folder,
            fix="use a causal language model such as Llama, Qwen or Mistral",
        )


def _custom_code(raw: dict[str, Any], auto_class: str | None) -> str | None:
    """The class in the folder's own Python files that would stand in for an Auto class; None: there is no such code."""
    references = raw.get("auto_map")
    if not references:
        return None
    if not isinstance(references, dict):
        references = {"AutoTokenizer": references}
    reference = references.get(auto_class) or references.get("AutoConfig") or next(iter(references.values()), None)
    return str(reference)


def _refused_code(role: str, folder: Path, reference: str) -> ModelError:
    key = {"model": "model", "tokenizer": "data"}[role]
    return ModelError(
        f"the {role} needs Python code that comes with it ({reference}), and that code is not executed",
        value=folder,
        fix=f"read the code; if you trust it, set {key}.trust_remote_code=true (of a command: --trust-remote-code)",
    )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read: {first_line(error)}", value=file) from error
    if not isinstance(values, dict):
        raise ModelError(f"{file.name} holds no JSON object", value=file)
    return values
