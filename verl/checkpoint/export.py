"""A trained model for others: as a plain Hugging Face directory, or in place, wherever a configuration names a run."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from verl.atomic import atomic_write, partial_name, sync
from verl.checkpoint.manifest import MANIFEST, checkpoint_errors
from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.config.base import Section
from verl.errors import CheckpointError
from verl.protocol.files import write_safetensors_lazily
from verl.run_dir import RunDir

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
    """Write a directory that ``AutoModelForCausalLM.from_pretrained`` loads, complete or not at all. Raises
    CheckpointError: no such weights or config, a damaged file, or a target that is in use or cannot be written.

    Args:
        checkpoint: a complete one with ``actor/model.safetensors`` (Hugging Face names, tied tensors too).
        to: the new directory; may exist when empty.
        dtype: a key of ``EXPORT_DTYPES``, for floating-point weights; others are kept.
        source_hf_dir: of config and tokenizer; None: ``actor/hf`` of the checkpoint.
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


@dataclass(frozen=True)
class ModelSource:
    """A model that a command was given."""

    path: str  # what ``model.path`` takes
    run: RunDir | None = None  # the folder of the run that trained it, None where it is not of a run
    step: int | None = None  # of its checkpoint


def find_checkpoint(path: str) -> Checkpoint | None:
    """The checkpoint that ``path`` is, or the newest one of the run that it is; None where it is neither. Raises
    CheckpointError: a run without a complete checkpoint, or a damaged checkpoint."""
    folder = Path(path).expanduser()
    if (folder / MANIFEST).is_file():
        return Checkpoint(folder)
    run = RunDir(folder)
    if not run.checkpoints.is_dir() or (folder / "config.json").is_file():
        return None
    latest = CheckpointStore(run.checkpoints).latest()
    if latest is None:
        raise CheckpointError("the run has no complete checkpoint", path, "train with trainer.save_freq above 0")
    return Checkpoint(latest)


@contextmanager
def opened_model(path: str) -> Iterator[ModelSource]:
    """What ``model.path`` takes, for a run or a checkpoint as well: those as a folder of links, for the duration.
    Raises CheckpointError: as :func:`find_checkpoint`, or a file of the checkpoint is damaged."""
    checkpoint = find_checkpoint(path)
    if checkpoint is None:
        yield ModelSource(path)
        return
    with tempfile.TemporaryDirectory(prefix="verl-model-") as folder:
        for name in [WEIGHTS, *(name for name in checkpoint.files if name.startswith(f"{HF_FOLDER}/"))]:
            link = Path(folder) / (Path(name).name if name == WEIGHTS else name.removeprefix(f"{HF_FOLDER}/"))
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(checkpoint.file(name).resolve())
        yield ModelSource(folder, RunDir(checkpoint.path.resolve().parents[1]), checkpoint.step)


KEYS = ("model.path", "model.tokenizer_path", "critic.model.path", "reward.model.path")

SectionT = TypeVar("SectionT", bound=Section)


def pinned(config: SectionT, report: Callable[[str], None]) -> SectionT:
    """The configuration with the newest checkpoint in place of each run, so that a later look finds the same model.
    Raises CheckpointError: a run without a complete checkpoint."""
    for key, path in _paths(config):
        checkpoint = find_checkpoint(path)
        if checkpoint is not None and str(checkpoint.path) != path:
            report(f"{key}: {path} is its checkpoint of step {checkpoint.step}")
            config = _with(config, key, str(checkpoint.path))
    return config


@contextmanager
def opened(config: SectionT) -> Iterator[SectionT]:
    """The configuration with folders that can be loaded in place of checkpoints."""
    with ExitStack() as stack:
        for key, path in _paths(config):
            config = _with(config, key, stack.enter_context(opened_model(path)).path)
        yield config


def check_same_start(checkpoint: Checkpoint, config: Section) -> None:
    """Refuse to go on with another reference or reward model than the run began with, where those are checkpoints.
    Raises CheckpointError: they differ."""
    now = dict(_paths(config))
    for key, name in (("model.path", "model"), ("reward.model.path", "reward_model")):
        then = str(checkpoint.meta.get(name))
        if then != now.get(key) and "checkpoints/step_" in then:
            raise CheckpointError(
                f"the run began with another checkpoint than {key} names now",
                f"{now.get(key)}, then {then}",
                f"set {key}={then}",
            )


def _paths(config: Section) -> list[tuple[str, str]]:
    found = []
    for key in KEYS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        if value is not None:
            found.append((key, value))
    return found


def _with(section: Any, key: str, value: str) -> Any:
    name, _, rest = key.partition(".")
    return section.model_copy(update={name: _with(getattr(section, name), rest, value) if rest else value})
