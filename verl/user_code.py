"""Functions and classes in the user's own Python files: rewards, advantage estimators, policy losses, data."""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.names import did_you_mean, nearest_path
from verl.errors import VerlError

LOADED: dict[str, str] = {}
"""Files of the user's own that this process has run: path and SHA-256."""
NOTICE_SECONDS, IMPORT_SECONDS = 10.0, 120.0


def load_user_function(
    path: str | Path, name: str, kind: str, key: str, error: type[VerlError], is_class: bool = False
) -> tuple[Callable[..., Any], Path]:
    """The function (or other callable) ``name`` of a Python file, and the file.

    Args:
        kind: what such a file is called in messages, for example ``reward``.
        key: that names the file; ``name`` has one like it, with ``name`` for ``path``.
        error: what to raise.
        is_class: a class is wanted.

    Raises:
        VerlError: no such file, an exception while it is imported, or no such function.
    """
    word, words, fits = ("class", "classes", inspect.isclass) if is_class else ("function", "functions", callable)
    file = _existing(Path(os.path.expandvars(path)).expanduser(), key, error)
    module = _import(file, kind, error)
    function = getattr(module, name, None)
    if function is None or not fits(function):
        listable = inspect.isclass if is_class else inspect.isfunction
        names = [n for n, v in vars(module).items() if listable(v) and v.__module__ == module.__name__]
        what = f"The {kind} file has no such {word}."
        if function is not None:
            what = f"The {kind} file's name is no {word}."
        listed = ", ".join(names) or "none"
        fix = f"{did_you_mean(name, names)}{words} in the file: {listed} ({key.replace('path', 'name')})"
        raise error(what, f"{name} in {file}", fix)
    return function, file


def describe(error: BaseException, file: Path | None = None) -> str:
    """``Type: message (file:line)``, the line being the innermost one in the user's file."""
    message = " ".join(str(error).split())
    text = f"{type(error).__name__}: {message}" if message else type(error).__name__
    if isinstance(error, SyntaxError):
        return text  # its message has file and line already
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if file is not None and Path(frame.filename) == file]
    frame = own[-1] if own else (frames[-1] if frames else None)
    return f"{text} ({Path(frame.filename).name}:{frame.lineno})" if frame else text


def _existing(path: Path, key: str, error: type[VerlError]) -> Path:
    if path.is_file():
        return path.resolve()
    near = nearest_path(path)
    fix = f"did you mean {near}?" if near else f"check the folder {path.parent}"
    if path.is_dir():
        fix = "this is a folder: name the Python file in it"
    elif path.parent.is_dir():
        names = sorted(p.name for p in path.parent.iterdir() if p.suffix == ".py")
        fix = f"{did_you_mean(path.name, names)}Python files there: {', '.join(names) or 'none'}"
    raise error(f"The file of {key} does not exist.", path, fix)


def _import(file: Path, kind: str, error_class: type[VerlError]) -> ModuleType:
    # A name of its own by full path: two files called reward.py are two modules.
    module_name = "verl_user_" + hashlib.sha256(str(file).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise error_class(f"The {kind} file is not a Python file.", file, "its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and typing look their module up
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    LOADED[str(file)] = hashlib.sha256(file.read_bytes()).hexdigest()
    try:
        with _timed(f"importing the {kind} file {file}"):
            spec.loader.exec_module(module)
    except (Exception, SystemExit, ImportTimeout) as error:
        sys.modules.pop(module_name, None)
        raise error_class(f"The {kind} file cannot be imported.", file, describe(error, file)) from error
    finally:
        sys.path.remove(str(file.parent))
    return module


class ImportTimeout(BaseException):  # no Exception, which a file may catch
    """An import has not ended in time."""


@contextmanager
def _timed(what: str) -> Iterator[None]:
    """Says what is waited for every ``NOTICE_SECONDS``, and raises after ``IMPORT_SECONDS``.

    Only a main thread can be interrupted; in others nothing is said.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    start = time.monotonic()

    def look(*_: object) -> None:
        waited = time.monotonic() - start
        if waited >= IMPORT_SECONDS:
            raise ImportTimeout(f"not done within {IMPORT_SECONDS:g} s; load what takes longer in the first call")
        print(f"still {what}, for {waited:.0f} s", file=sys.stderr, flush=True)

    handler = signal.signal(signal.SIGALRM, look)
    timer = signal.setitimer(signal.ITIMER_REAL, NOTICE_SECONDS, NOTICE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)
