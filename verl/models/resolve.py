"""From what ``model.path`` says to a local folder: an alias, a Hugging Face folder, a GGUF file or a hub id."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from pathlib import Path

from verl.config.names import nearest_path
from verl.errors import ModelError, first_line
from verl.models.gguf_conversion import CONVERSION_VERSION, convert_gguf, is_gguf
from verl.models.model_cache import Report, build_once, file_sha256, report_to_stderr
from verl.models.smollm import ALIAS as SMOLLM
from verl.models.smollm import get_smollm
from verl.models.tiny import ALIAS as TINY
from verl.models.tiny import get_tiny

ALIASES: dict[str, Callable[[Report], Path]] = {SMOLLM: get_smollm, TINY: get_tiny}
HUB_SECONDS = 10  # for one answer of the hub; a download may take as long as it moves
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"]


def resolve_model(path: str | Path, report: Report = report_to_stderr) -> Path:
    """Local Hugging Face folder (``config.json``, weights, tokenizer) of what ``model.path`` says.

    Tried in this order: an alias (``smollm2-135m``, ``tiny-llama``; write ``./name`` for a folder of that name), an
    existing folder, an existing GGUF file (converted once, cached by its content), a hub id ``owner/name``.

    Raises:
        ModelError: nothing of that name, or what is there is no model.
    """
    if str(path) in ALIASES:
        return ALIASES[str(path)](report)
    local = Path(os.path.expandvars(path)).expanduser()
    if local.is_dir():
        return _checked_folder(local)
    if local.is_file():
        return _converted_file(local, report)
    if _HUB_ID.fullmatch(str(path)) and _near_run(local) is None:
        return _hub_snapshot(str(path), report)
    raise ModelError("no such model", value=str(path), fix=_suggestion(str(path)))


def _suggestion(name: str) -> str:
    aliases = difflib.get_close_matches(name.lower().rpartition("/")[2], ALIASES, n=1, cutoff=0.4)
    path = Path(name).expanduser()
    beside = nearest_path(path)
    if beside is not None and not (beside.suffix == ".gguf" or (beside / "config.json").is_file()):
        beside = _near_run(path)
    run = Path("runs") / name
    near = run if name and run.name == name and run.is_dir() else beside or (aliases[0] if aliases else None)
    known = f"did you mean {near}? " if near else ""
    return f"{known}a model is an alias ({', '.join(ALIASES)}), a Hugging Face folder, a GGUF file or a hub id"


def _near_run(missing: Path) -> Path | None:
    """A run beside ``missing`` that is called like it."""
    near = nearest_path(missing) if missing.parent.is_dir() else None
    return near if near is not None and (near / "checkpoints").is_dir() else None


def _checked_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    if (folder / "adapter_config.json").is_file():
        raise ModelError(
            "the folder holds an adapter (LoRA), not a model", value=folder, fix="merge it into its base model first"
        )
    files = sorted(folder.glob("*.gguf"))
    fix = f"give the file itself: {files[0]}" if files else "a Hugging Face folder has config.json, weights, tokenizer"
    raise ModelError("the folder holds no model: config.json is missing", value=folder, fix=fix)


def _converted_file(file: Path, report: Report) -> Path:
    if not is_gguf(file):
        raise ModelError("the file is no GGUF file", value=file, fix="give a .gguf file or the folder of the model")
    sha256 = file_sha256(file)
    source: dict[str, object] = {"gguf_sha256": sha256, "conversion": CONVERSION_VERSION}

    def build(folder: Path) -> None:
        report(f"{file.name}: converting to a Hugging Face folder (once)")
        convert_gguf(file, folder)

    return build_once(f"gguf-{sha256[:16]}", source, build, report)


def _hub_snapshot(hub_id: str, report: Report) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    report(f"{hub_id}: no such folder here, asking the Hugging Face hub")
    try:
        # Without an answer it takes what an earlier call left in the hub's own cache.
        folder = snapshot_download(hub_id, allow_patterns=_HUB_FILES, etag_timeout=HUB_SECONDS)
    except GatedRepoError as error:
        fix = "accept its terms on the hub, then log in with 'hf auth login'"
        raise ModelError("the hub gives this model to approved accounts only", value=hub_id, fix=fix) from error
    except RepositoryNotFoundError as error:
        raise ModelError(
            "neither a folder here nor a model on the hub", value=hub_id, fix=_suggestion(hub_id)
        ) from error
    except Exception as error:
        # Connection, time limit, offline mode, proxy: httpx, requests and the hub's own classes, by version.
        raise ModelError(
            f"no folder of that name, and the hub cannot be reached ({first_line(error)})",
            value=hub_id,
            fix=f"check the path or the network; {_suggestion(hub_id)}",
        ) from error
    return _checked_folder(Path(folder))
