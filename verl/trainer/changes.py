"""What is another than when a run last started: settings, and code of the user's own. It is said, never refused."""

from __future__ import annotations

from rich.console import Console

from verl import user_code
from verl.config import Config, SupervisedConfig, load_config, load_supervised
from verl.config.explain import difference
from verl.config.keys import one_line, using
from verl.errors import VerlError
from verl.run_dir import RunDir

SHOWN = 6  # settings
WIDEST = 40  # characters of a value


def say_changed_settings(config: Config | SupervisedConfig, run_dir: RunDir, console: Console) -> None:
    """Against the configuration in the folder; nothing where there is none, or one that this version cannot read."""
    try:
        if isinstance(config, Config):
            before: Config | SupervisedConfig = load_config(run_dir.config).config
        else:
            before = load_supervised(type(config), run_dir.config)[0]
    except VerlError:
        return
    with using(type(config)):
        found = difference(before, config)
    if found:
        texts = [f"{key} {_short(then)} -> {_short(now)}" for key, (then, now) in found.items()]
        more = f", and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
        text = f"note: since this run last started: {', '.join(texts[:SHOWN])}{more}"
        console.print(text, soft_wrap=True, markup=False)


def note_user_code(run_dir: RunDir, step: int, console: Console) -> None:
    """Write the files that were loaded into the events, and say which have changed."""
    before = {event.subject: event.detail for event in run_dir.read_events() if event.kind == "user_code"}
    for file, digest in user_code.LOADED.items():
        if before.get(file, f"sha256 {digest}") != f"sha256 {digest}":
            console.print(f"note: since this run last started {file} has changed", soft_wrap=True, markup=False)
        run_dir.log_event("user_code", file, f"sha256 {digest}", step)
    user_code.LOADED.clear()  # a later run of this process may have others


def _short(value: object) -> str:
    text = one_line(value)
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."
