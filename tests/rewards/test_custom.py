"""A user's own reward file: loaded, or refused with what is wrong and how to fix it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from verl.errors import RewardError
from verl.rewards.custom import accepts, load_function


@pytest.fixture
def file_of(tmp_path: Path):
    def write(text: str, name: str = "reward.py") -> Path:
        (tmp_path / name).write_text(text)
        return tmp_path / name

    return write


GOOD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):\n    return 1.0\n"


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        "def compute_score(solution_str, ground_truth, data_source, extra_info): return 1.0",
        "def compute_score(data_source, solution_str, ground_truth): return 1.0",
        "def compute_score(**anything): return 1.0",
        "def compute_score(*, data_source, solution_str, ground_truth, weight=2): return 1.0",
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0",
        "class A:\n def __call__(self, data_source, solution_str, ground_truth): return 1.0\ncompute_score = A()",
    ],
)
def test_functions_that_fit(file_of, text):
    assert callable(load_function(file_of(text)))


def test_another_name_and_two_files_of_one_name(file_of, tmp_path):
    first = load_function(file_of(GOOD.replace("compute_score", "mine")), "mine")
    (tmp_path / "b").mkdir()
    second = load_function(file_of(GOOD.replace("1.0", "2.0"), "b/reward.py"))
    arguments = {"data_source": "s", "solution_str": "x", "ground_truth": "y"}
    assert (first(**arguments), second(**arguments)) == (1.0, 2.0)


def test_the_file_may_import_its_neighbours_and_define_dataclasses(file_of):
    file_of("VALUE = 0.25\n", "helper_of_reward_test.py")
    imports = "from dataclasses import dataclass\nfrom helper_of_reward_test import VALUE\n"
    text = imports + "@dataclass\nclass A:\n    x: 'int'\n"
    function = load_function(file_of(text + GOOD.replace("1.0", "VALUE")))
    assert function(data_source="s", solution_str="x", ground_truth="y") == 0.25
    assert not any("test_the_file_may_import" in entry for entry in sys.path)


def test_missing_file(file_of, tmp_path):
    file_of(GOOD, "my_reward.py")
    with pytest.raises(RewardError, match=r"(?s)my_rewrad\.py.*did you mean my_reward\?.*my_reward\.py"):
        load_function(tmp_path / "my_rewrad.py")
    with pytest.raises(RewardError, match="this is a folder"):
        load_function(tmp_path)
    with pytest.raises(RewardError, match="check the folder"):
        load_function(tmp_path / "nowhere" / "a.py")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import math\nraise RuntimeError('no licence')\n", r"RuntimeError: no licence \(reward\.py:2\)"),
        ("import a_package_that_is_not_there\n", r"ModuleNotFoundError.*a_package_that_is_not_there.*\(reward\.py:1\)"),
        ("def broken(:\n", r"SyntaxError.*reward\.py, line 1"),
        ("import sys\nsys.exit(3)\n", r"SystemExit: 3 \(reward\.py:2\)"),
    ],
)
def test_raising_at_import(file_of, text, expected):
    with pytest.raises(RewardError, match="(?s)cannot be imported.*" + expected):
        load_function(file_of(text))


def test_missing_function(file_of):
    with pytest.raises(RewardError, match=r"(?s)compute_score in .*reward\.py.*did you mean compute_scores\?"):
        load_function(file_of(GOOD.replace("compute_score", "compute_scores")))
    with pytest.raises(RewardError, match="is no function"):
        load_function(file_of("compute_score = 3\n"))


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("solution_str, ground_truth", "does not take data_source"),
        ("prompts, completions, **kwargs", "nothing is given for prompts, completions"),
        ("queries, prompts, labels", "nothing is given for queries, prompts, labels"),
        ("data_source, solution_str, ground_truth, /", "does not take data_source, solution_str, ground_truth"),
        ("data_source, solution_str, ground_truth, tokenizer", "nothing is given for tokenizer"),
    ],
)
def test_parameters_that_do_not_fit(file_of, parameters, expected):
    with pytest.raises(RewardError) as caught:
        load_function(file_of(f"def compute_score({parameters}): return 1.0"))
    assert expected in str(caught.value) and f"compute_score({parameters})" in str(caught.value)


def test_reward_kwargs_must_be_taken(file_of):
    path = file_of("def compute_score(data_source, solution_str, ground_truth, weight): return weight")
    assert callable(load_function(path, kwargs=["weight"]))
    with pytest.raises(RewardError, match=r"does not take scale of reward\.reward_kwargs"):
        load_function(path, kwargs=["weight", "scale"])


def test_accepts():
    assert accepts(lambda a, *, b: 0, "b") and not accepts(lambda a, /: 0, "a") and accepts(lambda **k: 0, "x")
