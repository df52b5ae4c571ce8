"""``verl completion``: what each shell is told, asked through the shell itself where it is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl.cli import entry
from verl.cli.entry import SCRIPTS, candidates
from verl.errors import ConfigError

ROOT = Path(__file__).parents[2]


def names(line: str) -> list[str]:
    """Of what the last word can become; a blank behind the others begins an empty one."""
    return [name for name, _ in candidates(entry.build_parser(), line.split(" "))]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("pl", ["plan"]),
        ("run ", ["list", "show"]),
        ("--debug run sh", ["show"]),
        ("train --pl", ["--plain"]),
        ("train --preset rl", ["rloo"]),
        ("train my.yaml --preset dapo --preset gs", ["gspo"]),
        ("export --dtype f", ["float16", "float32"]),
        ("train algo", ["algorithm."]),
        ("train trainer.save_f", ["trainer.save_freq="]),
        ("train model.path=m actor.optim.weight", ["actor.optim.weight_decay="]),
        ("train trainer.mode=", ["trainer.mode=sync", "trainer.mode=one_step_off", "trainer.mode=async"]),
        ("train actor.shuffle=t", ["actor.shuffle=true"]),
        ("train actor.optim.lr=", []),
        ("sft data.respo", ["data.response_key="]),  # keys of its own
        ("train data.respo", []),
        ("config explain rollout.temp", ["rollout.temperature"]),  # a key, not a setting
        ("generate tr", []),  # takes no settings: the shell goes on with files
        ("train trainer.mode.", []),
    ],
)
def test_candidates(line: str, found: list[str]) -> None:
    assert names(line) == found


def test_every_command_is_a_candidate() -> None:
    assert set(names("")) == {name for group in entry.GROUPS.values() for name in group}


def test_configuration_files_and_folders_stand_beside_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name in ("mo.yaml", "mo.txt", "model/a.yml"):
        Path(name).touch()
    assert names("train mo") == ["model.", "mo.yaml", "model/"]
    assert names("train model/") == ["model/a.yml"]


def test_candidates_carry_a_line_of_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.main(["completion", "words", "train", "--pl"]) == 0
    assert capsys.readouterr().out == "--plain\tplain lines, also on a terminal\n"
    assert entry.main(["completion", "words"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(names(""))
    for line in ("", "train actor.", "config explain data.", "plan --"):
        assert not any("\n" in help or "\t" in help for _, help in candidates(entry.build_parser(), line.split(" ")))


def test_an_unknown_shell() -> None:
    arguments = entry.build_parser().parse_args(["completion", "tcsh"])
    with pytest.raises(ConfigError, match="no completion for this shell"):
        arguments.command(arguments)


# What a person types, and what the shell then offers: verl is the program of this tree.
IN_SHELL = {
    "bash": """
        try() {{ COMP_LINE=$1 COMP_POINT=${{#1}}; _verl 2>/dev/null; echo "${{COMPREPLY[*]}}"; }}
        . {script}; try 'verl config d'; try 'verl train trainer.mode=a'; try 'verl run '
    """,
    "zsh": "",  # its completion needs a terminal: the syntax only
    "fish": """
        . {script}
        complete -C 'verl config d'; complete -C 'verl train trainer.mode=a'; complete -C 'verl run '
    """,
}
OFFERED = {
    "bash": ["diff", "async", "list show"],
    "zsh": [],
    "fish": ["diff", "trainer.mode=async", "list", "show"],
}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_in_the_shell(shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    binary = shutil.which(shell)
    if binary is None:
        pytest.skip(f"{shell} is not installed")
    assert entry.main(["completion", shell]) == 0
    script = tmp_path / "verl.script"
    script.write_text(capsys.readouterr().out)
    assert subprocess.run([binary, "-n", script]).returncode == 0
    program = tmp_path / "verl"
    program.write_text(f'#!/bin/sh\ncd {ROOT} && exec {sys.executable} -m verl.cli "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    command = [binary, "-c", IN_SHELL[shell].format(script=script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == OFFERED[shell], done.stderr
