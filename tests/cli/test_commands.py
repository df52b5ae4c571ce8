"""What the commands say about themselves, and the codes they end with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from verl import __version__
from verl.cli import entry, runs, train

COMMANDS = [
    [],
    ["train"],
    ["generate"],
    ["export"],
    ["report"],
    ["model"],
    ["model", "get"],
    ["data"],
    ["data", "reasoning-gym"],
    ["data", "gsm8k"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "verl")
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        entry.main([*command, "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: verl") and len(said.splitlines()) > 3


def test_every_command_is_tested_here() -> None:
    import argparse

    def walk(parser: argparse.ArgumentParser, words: list[str]) -> list[list[str]]:
        found = [words]
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for name, child in action.choices.items():
                    found += walk(child, [*words, name])
        return found

    assert sorted(walk(entry._parser(), [])) == sorted(COMMANDS)


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == entry.EXIT_BAD_INPUT
    assert "verl train examples/quickstart.yaml" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        entry.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"verl {__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["trian"],
        ["generate", "m"],
        ["generate", "m", "--prompt", "x", "-n", "0"],
        ["generate", "m", "--prompt", "x", "--temperature", "-1"],
        ["generate", "m", "--prompt", "x", "--temperature", "nan"],
        ["export", "run"],
        ["export", "run", "--to", "x", "--dtype", "int8"],
        ["data", "reasoning-gym", "--task", "t", "--size", "0", "--out", "x"],
        ["train", "--nonsense"],
    ],
    ids=" ".join,
)
def test_wrong_use(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        entry.main(arguments)
    assert stop.value.code == 2
    assert "usage: verl" in capsys.readouterr().err


class Interrupt(Exception):
    pass


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; start the same command again"),
        (entry._Terminated(), 143, "terminated; start the same command again"),
        (ValueError("odd\nsecond line"), 1, "error: ValueError: odd\n  this is a defect of VeRL or of user code"),
        (ZeroDivisionError(), 1, "error: ZeroDivisionError: \n"),
    ],
    ids=["Ctrl-C", "SIGTERM", "defect", "defect-without-words"],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal

    def fails(arguments: Any) -> None:
        raise error

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(runs, "_report", fails)
    try:
        assert entry.main(["report", "x"]) == code
        err = capsys.readouterr().err
        assert said in err and "Traceback" not in err
        assert entry.main(["report", "x", "--debug"]) == code
        assert ("Traceback" in capsys.readouterr().err) == (code == 1)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_settings_may_stand_behind_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    import signal

    seen: list[list[str]] = []
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(train, "_train", lambda arguments: seen.append(arguments.words))
    try:
        assert entry.main(["train", "a.yaml", "x=1", "--debug", "y=2", "z=3"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert seen == [["a.yaml", "x=1", "y=2", "z=3"]]


def test_model_get_prints_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_model_dir: Path) -> None:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    try:
        assert entry.main(["model", "get", str(tiny_model_dir)]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().out.strip() == str(tiny_model_dir)
