"""What the commands say about themselves, and the codes they end with."""

from __future__ import annotations

import argparse
import io
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from verl import __version__
from verl.cli import entry, runs, train
from verl.errors import WorkerDiedError


def walk(parser: argparse.ArgumentParser, words: list[str]) -> Iterator[list[str]]:
    """Every command, as the words that call it."""
    yield words
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from walk(child, [*words, name])


def parser_of(command: list[str]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = entry.build_parser()
    for word in command:
        commands = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
        parser = commands.choices[word]
    return parser


COMMANDS = list(walk(entry.build_parser(), []))
LEAVES = [words for words in COMMANDS if words and not any(other[:-1] == words for other in COMMANDS)]


@pytest.fixture(autouse=True)
def own_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_there_are_commands() -> None:
    assert {("train",), ("init",), ("presets",), ("model", "get"), ("export",)} <= set(map(tuple, COMMANDS))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "verl")
def test_help(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        entry.main([*command, "--help"])
    assert stop.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith("usage: verl") and len(said.splitlines()) > 3


@pytest.mark.parametrize("command", LEAVES, ids=" ".join)
def test_every_command_is_described_and_its_examples_are_understood(command: list[str]) -> None:
    root, parser = entry.build_parser(), parser_of(command)
    assert parser.description and len(parser.description.split()) > 2
    examples = re.findall(rf"^  (verl {' '.join(command)}\b.*)", parser.epilog or "", re.MULTILINE)
    assert examples
    for example in examples:
        words = shlex.split(re.split(r"\s{2,}", example)[0])[1:]
        found, rest = root.parse_known_args(words)  # raises for what it does not understand
        assert found.command and (not rest or "words" in found)


def test_help_lists_each_command_under_what_it_is_for(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        entry.main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: verl [-h] [--version] [--debug] COMMAND ...\n")
    parts = dict(re.findall(r"^(\w+):\n((?:  .*\n)+)", said, re.MULTILINE))
    listed = {title: tuple(re.findall(r"^  ([\w-]+)", parts[title], re.MULTILINE)) for title in entry.GROUPS}
    assert listed == entry.GROUPS
    assert sorted(sum(listed.values(), ())) == sorted({words[0] for words in COMMANDS if words})


def test_a_command_in_no_group_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(entry.GROUPS, "fix")
    with pytest.raises(ValueError, match="doctor"):
        entry.build_parser()


def test_without_arguments_it_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main([]) == entry.EXIT_BAD_INPUT
    assert "verl train examples/quickstart.yaml" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        entry.main(["--version"])
    assert stop.value.code == 0 and capsys.readouterr().out == f"verl {__version__}\n"


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What ``verl`` says about wrong use: one message in the common style, exit code 2."""
    assert entry.main(arguments) == entry.EXIT_BAD_INPUT
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("error: ") == 1 and "\n  fix:   " in err
    return err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("trian", "did you mean train? commands: "),
        ("model got", "verl model has no such command"),
        ("model", "verl model needs a command"),
        ("train x.yaml --presett grpo", "did you mean --preset?"),
        ("train x.yaml --trainer.seed=3", "settings are written without dashes: trainer.seed=3"),
        ("train x.yaml --pre grpo", "verl train has no such option"),
        ("train", "neither a configuration file nor a setting"),
        ("train one.yaml rollout.n=2 two.yaml", "more than one configuration file"),
        ("train one.yaml rollout.n", "a setting needs the form key=value"),
        ("train nothing.yaml", "the configuration file does not exist"),
        ("train examples/quickstart", "did you mean examples/quickstart.yaml?"),
        ("train exmples/tiny/grop.yaml", "did you mean examples/tiny/grpo.yaml?"),
        ("train examples", "the folder holds no config.yaml"),
        ("train --preset gropo x=1", "did you mean grpo? presets: "),
        ("generate m", "--prompt"),
        ("generate m --prompt x -n 0", "0 is not at least 1"),
        ("generate m --prompt x -n many", "'many' is not a whole number"),
        ("generate m --prompt x --temperature -1", "-1 is not at least 0"),
        ("generate m --prompt x --temperature nan", "nan is not at least 0"),
        ("generate m --prompt x --temperature warm", "'warm' is not a number"),
        ("export run", "verl export: the following arguments are required: --to"),
        ("eval", "arguments are required: model, data\n"),  # and no settings
        ("eval", "usage: verl eval [options] model data [key=value ...]; for example: verl eval smollm2-135m"),
        ("generate x", "usage: verl generate [options] (--prompt TEXT | --input FILE) model; for example: verl gen"),
        ("export run --to x --dtype bfloat", "did you mean bfloat16? possible: "),
        ("export run more --to x", "value: more"),
        ("data reasoning-gym --task t --size 0 --out x", "0 is not at least 1"),
        ("train --nonsense", "verl train has no such option"),
        ("--nonsense", "verl has no such option"),
    ],
)
def test_wrong_use(line: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parents[2])
    assert said in complaint(capsys, *line.split())


def test_a_backslash_with_a_space_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ends in a backslash and a space" in complaint(capsys, "train", "rollout.n=2", " ", "trainer.seed=2")


def test_train_help_and_presets_list_every_preset(capsys: pytest.CaptureFixture[str]) -> None:
    from verl.config.settings import presets

    with pytest.raises(SystemExit):
        entry.main(["train", "--help"])
    in_help = capsys.readouterr().out
    assert entry.main(["presets"]) == 0
    listed = capsys.readouterr().out
    for name, line in presets().items():
        assert any(row.split(maxsplit=1) == [name, line] for row in in_help.splitlines())
        assert any(row.split(maxsplit=1) == [name, line] for row in listed.splitlines())


AGAIN = "; start the same command again to go on from the last checkpoint\n"


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted" + AGAIN),
        (entry._Terminated(), 143, "terminated" + AGAIN),
        (ValueError("odd\nsecond line"), 1, "error: ValueError: odd\n  this is a defect of VeRL or of user code"),
        (ZeroDivisionError(), 1, "error: ZeroDivisionError: \n"),
        (WorkerDiedError("the worker died", "signal 9", "start again"), 1, "error: the worker died\n  value: signal 9"),
    ],
    ids=["Ctrl-C", "SIGTERM", "defect", "defect-without-words", "dead-worker"],
)
def test_exit_codes(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*arguments: Any, **options: Any) -> None:
        raise error

    monkeypatch.setattr(train, "run_training", fails)
    assert entry.main(["train", "x=1"]) == code
    err = capsys.readouterr().err
    assert said in err and "Traceback" not in err
    for arguments in (["train", "x=1", "--debug"], ["--debug", "train", "x=1"]):
        assert entry.main(arguments) == code
        assert ("Traceback" in capsys.readouterr().err) == (code == 1)


def test_only_a_run_is_said_to_go_on(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runs, "_report", interrupted)
    assert entry.main(["report", "x"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_reader_that_went_away_is_no_defect(tmp_path: Path) -> None:
    """``verl presets | head -0``: silence, not an error message."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "verl.cli", "presets"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60, cwd=Path(__file__).parents[2])
    os.close(write)
    assert done.stderr == b"" and done.returncode == 1


def test_settings_may_stand_behind_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(train, "run_training", lambda *arguments, **options: seen.append((*arguments, options)))
    words = ["train", "x=1", "--debug", "y=2", "a.yaml", "z=3", "--preset", "grpo", "--preset", "ppo", "--plain"]
    assert entry.main(words) == 0
    assert seen == [("a.yaml", ["x=1", "y=2", "z=3"], ["grpo", "ppo"], {"plain": True})]


def test_model_get_prints_the_folder(capsys: pytest.CaptureFixture[str], tiny_model_dir: Path) -> None:
    assert entry.main(["model", "get", str(tiny_model_dir)]) == 0
    assert capsys.readouterr().out.strip() == str(tiny_model_dir)


def test_the_page_about_the_commands_names_them_all_and_the_exit_codes() -> None:
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
    for command in COMMANDS:
        if command and not any(other[:-1] == command for other in COMMANDS):  # a group is named by its commands
            group = next(title for title, names in entry.GROUPS.items() if command[0] in names)
            part = re.search(rf"^## {group}$.*?(?=^[#`])", page, re.MULTILINE | re.DOTALL | re.IGNORECASE)
            assert part and f"`verl {' '.join(command)}`" in part[0]
    json = {" ".join(words) for words in LEAVES if "--json" in parser_of(words)._option_string_actions}
    said = re.search(r"^## For programs\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert said and set(re.findall(r"`([a-z ]+)`", said[1])) == json
    codes = {entry.EXIT_OK, entry.EXIT_FAILED, entry.EXIT_BAD_INPUT, entry.EXIT_INTERRUPTED, entry.EXIT_TERMINATED}
    assert set(map(int, re.findall(r"^\| (\d+) \|", page, re.MULTILINE))) == codes
    assert all(f"{code} " in entry.EXAMPLES for code in codes)


def test_a_signal_within_compiled_code_is_that_signal(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Ray's core makes a SystemError of what a signal's handler raised in it."""
    from verl.cli.entry import guarded
    from verl.run_dir import RunDir
    from verl.trainer.run import stop_noted

    run_dir = RunDir(tmp_path / "run").create()

    def interrupted(cause: BaseException) -> int:
        with stop_noted(run_dir, SimpleNamespace(step=3)):
            raise SystemError("wait returned a result with an exception set") from cause

    assert guarded(lambda: interrupted(KeyboardInterrupt()), debug=False) == 130
    assert capsys.readouterr().err.startswith("interrupted")
    assert guarded(lambda: interrupted(ValueError()), debug=False) == 1
    assert capsys.readouterr().err.startswith("error: SystemError")
    assert [event.detail for event in run_dir.read_events()] == ["KeyboardInterrupt", "SystemError"]


def test_a_pipe_that_knows_ascii_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setattr(entry, "_run", lambda words: print("0.2 \N{RIGHTWARDS ARROW} 0.5") or 0)
    assert entry.main([]) == 0
    pipe.flush()
    assert pipe.buffer.getvalue() == b"0.2 \\u2192 0.5\n"  # type: ignore[attr-defined]
