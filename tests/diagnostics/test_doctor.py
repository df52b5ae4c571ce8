"""Checks on evidence that no short run gives, and ``verl doctor`` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from faulty import build_letters, config_of, right, row, trained

from verl.cli import main
from verl.config import dump_yaml
from verl.diagnostics import checks_machine, doctor
from verl.diagnostics.checks_machine import GIB, Machine
from verl.diagnostics.doctor import examine
from verl.diagnostics.evidence import KINDS, Evidence, steps_text
from verl.run_dir import RunDir
from verl.tracking.samples import SampleRow

FIT = Machine(cores=4, load=1.0, memory=16 * GIB, swap_used=0, disk_free=100 * GIB, shared_free=8 * GIB)


def names_of(evidence: Evidence) -> set[str]:
    return {finding.name for finding in examine(evidence)}


# --- checks ---------------------------------------------------------------------------------------------------------


def test_a_text_that_all_of_the_best_share() -> None:
    def sample(i: int, response: str, score: float) -> SampleRow:
        return SampleRow("train", f"train:{i}:x:{i}", 0, f"question {i}", response, f"truth {i}", score)

    best = [sample(i, f"{'abcdefgh'[i]} because I am sure {i}", 1.0) for i in range(5)]
    rest = [sample(i, f"it may be {i}", 0.0) for i in range(5, 15)]
    (finding,) = examine(Evidence(samples={1: best + rest}))
    assert finding.name == "one_pattern" and "' because I am sure '" in finding.evidence
    assert not names_of(
        Evidence(samples={1: best + [sample(i, f"x because I am sure {i}", 0.0) for i in range(5, 15)]})
    )


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"threads": "8"}, "threads_over_subscribed"),
        ({"load": 9.0}, "machine_busy"),
        ({"swap_used": 4 * GIB}, "swapping"),
        ({"disk_free": GIB}, "disk_full"),
        ({"wrong_versions": ["torch 1.0, wanted >=2.6"]}, "versions"),
    ],
)
def test_a_machine_that_is_not_fit(change: dict[str, Any], name: str) -> None:
    assert not names_of(Evidence(machine=FIT))
    assert names_of(Evidence(machine=Machine(**{**vars(FIT), **change}))) == {name}


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    here = Machine.here(tmp_path / "not" / "there")
    assert here.cores >= 1 and here.memory > GIB / 2 and here.disk_free > 0


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.log_event("started", "run", "step 0 of 9", 0)
    (finding,) = examine(doctor.of_run(run))
    assert finding.name == "died" and "killed" in finding.evidence
    with run.lock():  # it runs
        assert "died" not in names_of(doctor.of_run(run))
    run.log_event("finished", "run", "step 9", 9)
    assert names_of(doctor.of_run(run)) == set()


def test_every_kind_of_finding_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert [name for name in KINDS if f"`{name}`" not in page] == []


def test_steps_in_words() -> None:
    assert steps_text([4]) == "step 4" and steps_text([9, 4, 7, 8, 9]) == "steps 4, 7 to 9"


# --- the command ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_letters(tmp_path_factory.mktemp("letters"))


@pytest.fixture(autouse=True)
def fit_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks_machine.Machine, "here", lambda folder: FIT)


def written(folder: Path, letters: Path, reward: str, rows: list[dict[str, Any]] | None = None) -> str:
    (folder / "reward.py").write_text(f"def compute_score(data_source, solution_str, ground_truth):\n    {reward}\n")
    config = config_of(folder, letters, rows, reward__custom_reward_function__path=str(folder / "reward.py"))
    (folder / "my.yaml").write_text(dump_yaml(config))
    return str(folder / "my.yaml")


def findings(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *words, "--json"])
    return code, {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)["findings"]}


@pytest.mark.parametrize(
    ("reward", "code", "name"),
    [
        ("return float(ground_truth in solution_str.split())", 0, None),
        ("return float('####' in solution_str and ground_truth in solution_str[-2:])", 0, None),
        ("return -float(ground_truth in solution_str)", 1, "reward_inverted"),
        ("return float('answer' in solution_str)", 1, "reward_format_only"),
        ("return 0.5", 0, "reward_untested"),
        ("raise KeyError('answer')", 1, "reward_failed"),
    ],
)
def test_the_reward_on_known_answers(
    tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str], reward: str, code: int, name: str | None
) -> None:
    found = findings(capsys, written(tmp_path, letters, reward))
    assert (found[0], set(found[1])) == (code, {name} if name else set())


def test_data_before_a_run(tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(i % 12, prompt=f"what? {i % 12} river", answer="river") for i in range(15)] + [row(15, answer="")]
    path = written(tmp_path, letters, "return 0.0", rows)
    settings = ("data.max_skipped_fraction=0.5", "data.max_prompt_length=12")
    code, found = findings(capsys, path, *settings, f"data.val_files={tmp_path / 'train.jsonl'}")
    wanted = {"duplicates", "answer_in_prompt", "truth_empty", "validation_in_training", "prompts_too_long"}
    assert code == 1 and set(found) == wanted
    assert found["duplicates"]["evidence"].startswith("3 of 15 rows")


def test_a_run_for_people_and_for_programs(tmp_path: Path, letters: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(config_of(tmp_path, letters, actor__optim__lr=0.0), right)
    assert findings(capsys, str(run.path))[1].keys() == {"lr_zero"}
    assert main(["doctor", str(run.path)]) == 1
    said = capsys.readouterr().out
    assert "looked at 3 steps, 96 sampled responses" in said and "1 error" in said
    scores = [row.score for row in doctor.of_run(run).rows]
    assert f"their scores: from {min(scores):g} to {max(scores):g}, {len(set(scores))} different, quartiles" in said
    assert "error lr_zero" in said and "fix      set actor.optim.lr" in said
    assert [finding.name for finding in doctor.warnings(run, [], [])] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "neither a configuration nor a run is given"),
        (["no-such-run"], "no such run folder"),
        (["nothing.yaml"], "the configuration file does not exist"),
    ],
)
def test_wrong_use(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    assert said in capsys.readouterr().err
