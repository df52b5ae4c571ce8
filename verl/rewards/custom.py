"""A reward function in the user's own Python file (the verl signature).

``compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs) -> float | dict``, called by
keyword, plain or ``async``. A dict has ``"score"``; its other keys are logged. None means: cannot be scored.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from verl.config.names import did_you_mean
from verl.errors import RewardError

RewardFunction = Callable[..., Any]

REQUIRED = ("data_source", "solution_str", "ground_truth")
OPTIONAL = ("extra_info",)
SIGNATURE = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs)"


def load_function(path: str | Path, name: str = "compute_score", kwargs: Iterable[str] = ()) -> RewardFunction:
    """The function ``name`` of the Python file ``path``, checked before a run depends on it.

    Args:
        kwargs: names of ``reward.reward_kwargs``, which the function must accept.

    Raises:
        RewardError: no such file, an exception while it is imported, no such function, or parameters that do not fit.
    """
    file = _existing(Path(path).expanduser())
    module = _import(file)
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        what = "The reward file has no such function." if function is None else "The reward file's name is no function."
        listed = ", ".join(names) or "none"
        fix = f"{did_you_mean(name, names)}functions in the file: {listed} (reward.custom_reward_function.name)"
        raise RewardError(what, f"{name} in {file}", fix)
    _check_parameters(function, name, file, tuple(kwargs))
    return function


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``name`` can be given to ``function`` by keyword."""
    parameters = _parameters(function)
    if parameters is None:
        return True
    given = parameters.get(name)
    if given is not None and given.kind in (given.POSITIONAL_OR_KEYWORD, given.KEYWORD_ONLY):
        return True
    return any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter] | None:
    try:
        return dict(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # some builtins have none to show
        return None


def _existing(path: Path) -> Path:
    if path.is_file():
        return path.resolve()
    fix = f"check the folder {path.parent}"
    if path.is_dir():
        fix = "this is a folder: name the Python file in it"
    elif path.parent.is_dir():
        names = sorted(p.stem for p in path.parent.iterdir() if p.suffix == ".py")
        fix = f"{did_you_mean(path.stem, names)}Python files there: {', '.join(f'{n}.py' for n in names) or 'none'}"
    raise RewardError("The file of reward.custom_reward_function.path does not exist.", path, fix)


def _import(file: Path) -> ModuleType:
    # A name of its own by full path: two files called reward.py are two modules.
    module_name = "verl_user_reward_" + hashlib.sha256(str(file).encode()).hexdigest()[:12]
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise RewardError("The reward file is not a Python file.", file, "its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses and typing look their module up
    sys.path.insert(0, str(file.parent))  # the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        sys.modules.pop(module_name, None)
        raise RewardError("The reward file cannot be imported.", file, describe(error, file)) from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def _check_parameters(function: RewardFunction, name: str, file: Path, kwargs: tuple[str, ...]) -> None:
    parameters = _parameters(function)
    if parameters is None:
        return
    shown = f"{name}{inspect.signature(function)} in {file}"
    refused = [k for k in REQUIRED if not accepts(function, k)]
    known = {*REQUIRED, *OPTIONAL, *kwargs}
    extra = [
        p.name
        for p in parameters.values()
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.name not in known or p.kind is p.POSITIONAL_ONLY)
    ]
    if refused or extra:
        reasons = [f"it does not take {', '.join(refused)}"] if refused else []
        reasons += [f"nothing is given for {', '.join(extra)}"] if extra else []
        fix = f"{' and '.join(reasons)}; it is called by keyword as {SIGNATURE}"
        raise RewardError("The reward function's parameters do not fit.", shown, fix)
    unknown = [k for k in kwargs if not accepts(function, k)]
    if unknown:
        raise RewardError(
            f"The reward function does not take {', '.join(unknown)} of reward.reward_kwargs.",
            shown,
            "add the parameter or **kwargs to the function, or remove the key",
        )


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
