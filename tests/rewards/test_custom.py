"""A user's own reward file: loaded, or refused with what is wrong and how to fix it."""

from __future__ import annotations

import inspect
import re
import signal
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.rewards.custom import OPENRLHF, SIGNATURES, TRL, VERL, accepts, check_function, load_function
from verl.rewards.results import check_batch, check_result


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
        "def compute_score(*, data_source, solution_str, ground_truth, weight=2): return 1.0",
        "async def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0",
        "class A:\n def __call__(self, data_source, solution_str, ground_truth): return 1.0\ncompute_score = A()",
    ],
)
def test_functions_that_fit(file_of, text):
    loaded = load_function(file_of(text))
    assert loaded.signature is VERL and loaded.columns == ()
    arguments = {"data_source": "s", "solution_str": "x", "ground_truth": "y", "extra_info": {}}
    arguments = {name: value for name, value in arguments.items() if loaded.takes(name)}
    assert loaded.is_async or loaded.function(**arguments) == 1.0


def test_another_name_and_two_files_of_one_name(file_of, tmp_path):
    first = load_function(file_of(GOOD.replace("compute_score", "mine")), "mine")
    (tmp_path / "b").mkdir()
    second = load_function(file_of(GOOD.replace("1.0", "2.0"), "b/reward.py"))
    arguments = {"data_source": "s", "solution_str": "x", "ground_truth": "y"}
    assert (first.function(**arguments), second.function(**arguments)) == (1.0, 2.0)


def test_a_file_that_hangs_at_import_is_named_and_given_up(file_of, monkeypatch, capfd):
    monkeypatch.setattr("verl.user_code.NOTICE_SECONDS", 0.1)
    monkeypatch.setattr("verl.user_code.IMPORT_SECONDS", 0.35)
    before, timer = signal.getsignal(signal.SIGALRM), signal.getitimer(signal.ITIMER_REAL)[0]
    file = file_of("import time\ntry:\n    time.sleep(60)\nexcept Exception:\n    pass\n" + GOOD)
    start = time.monotonic()
    with pytest.raises(RewardError, match=r"(?s)cannot be imported.*not done within 0.35 s.*\(reward.py:3\)"):
        load_function(file)
    assert time.monotonic() - start < 5
    assert capfd.readouterr().err.count(f"still importing the reward file {file}, for 0 s") == 3
    assert signal.getsignal(signal.SIGALRM) is before and signal.getitimer(signal.ITIMER_REAL)[0] == pytest.approx(
        timer, abs=9
    )


def test_the_file_may_import_its_neighbours_and_define_dataclasses(file_of):
    file_of("VALUE = 0.25\n", "helper_of_reward_test.py")
    imports = "from dataclasses import dataclass\nfrom helper_of_reward_test import VALUE\n"
    text = imports + "@dataclass\nclass A:\n    x: 'int'\n"
    function = load_function(file_of(text + GOOD.replace("1.0", "VALUE"))).function
    assert function(data_source="s", solution_str="x", ground_truth="y") == 0.25
    assert not any("test_the_file_may_import" in entry for entry in sys.path)


def test_missing_file(file_of, tmp_path):
    file_of(GOOD, "my_reward.py")
    with pytest.raises(RewardError, match=r"(?s)my_rewrad\.py.*did you mean my_reward(\.py)?\?.*my_reward\.py"):
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
    assert load_function(path, kwargs=["weight"]).takes("weight")
    with pytest.raises(RewardError, match=r"does not take scale of reward\.reward_kwargs"):
        load_function(path, kwargs=["weight", "scale"])


def test_accepts():
    assert accepts(lambda a, *, b: 0, "b") and not accepts(lambda a, /: 0, "a") and accepts(lambda **k: 0, "x")


# --- three signatures


@pytest.mark.parametrize(
    ("parameters", "signature", "columns"),
    [
        ("prompts, completions, completion_ids, **kwargs", TRL, ()),
        ("completions, **kwargs", TRL, ()),
        ("completion_ids, **kwargs", TRL, ()),
        ("prompts, completions, answer, level, weight=1.0", TRL, ("answer", "level")),
        ("completions, ground_truth, data_source, extra_info", TRL, ("ground_truth", "data_source", "extra_info")),
        ("queries, prompts, labels", OPENRLHF, ()),
        ("queries, prompts, labels, **kwargs", OPENRLHF, ()),
        ("data_source, solution_str, ground_truth, prompts=None", VERL, ()),
    ],
)
def test_signatures_are_told_apart_by_names(file_of, parameters, signature, columns):
    for kind in ("def", "async def"):
        loaded = load_function(file_of(f"{kind} compute_score({parameters}): return 1.0"))
        assert (loaded.signature, loaded.columns, loaded.is_async) == (
            signature,
            columns,
            kind != "def",
        )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def compute_score(completions, solution_str): return 1.0", "several signatures (verl and TRL)"),
        ("def compute_score(queries, completions, **kwargs): return 1.0", "several signatures (TRL and OpenRLHF)"),
        ("def compute_score(**anything): return 1.0", "none of the three signatures"),
        ("def compute_score(*args): return 1.0", "none of the three signatures"),
        ("def compute_score(prompts, responses): return 1.0", "none of the three signatures"),
        ("def compute_score(prompts, completion, **kwargs): return 1.0", "did you mean completions?"),
        ("compute_score = print.__self__.__class__", "none of the three signatures"),
    ],
)
def test_what_fits_none_or_several_is_refused_with_all_three(file_of, text, expected):
    with pytest.raises(RewardError) as caught:
        load_function(file_of(text))
    said = str(caught.value)
    assert expected in said and all(signature.shown in said for signature in SIGNATURES)


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ("queries, prompts", "does not take labels"),
        ("queries, prompts, labels, tokenizer", "nothing is given for tokenizer"),
        ("completions, answer, /, **kwargs", "nothing is given for completions, answer"),
    ],
)
def test_batch_parameters_that_do_not_fit(file_of, parameters, expected):
    with pytest.raises(RewardError, match=expected):
        load_function(file_of(f"def compute_score({parameters}): return 1.0"))


MARKED = {mark: signature for signature in SIGNATURES for mark in signature.marks}
NAMES = sorted({*MARKED, *(name for s in SIGNATURES for name in s.given), "answer", "weight", "prompt"})


@settings(max_examples=150, deadline=None)
@given(names=st.lists(st.sampled_from(NAMES), unique=True), keyword_only=st.booleans(), rest=st.booleans())
def test_the_marks_alone_decide(tmp_path_factory, names, keyword_only, rest):
    parameters = [*(["*"] if keyword_only and names else []), *(f"{n}=None" for n in names), *(["**rest"] * rest)]
    file = tmp_path_factory.mktemp("reward") / "reward.py"
    file.write_text(f"def compute_score({', '.join(parameters)}): return 1.0")
    marked = {MARKED[name].name for name in names if name in MARKED}
    try:
        loaded = load_function(file)
    except RewardError as error:
        fits = len(marked) == 1
        (required,) = [s.required for s in SIGNATURES if {s.name} == marked] or [()]
        assert not fits or any(name not in names for name in required), str(error)
    else:
        assert {loaded.signature.name} == marked


def test_the_examples_of_the_docs_are_what_they_say():
    text = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    examples = re.findall(r"\*\*(\w+)\*\*:.*?```python\n(.*?)```", text, re.DOTALL)
    assert [name for name, _ in examples] == [signature.name for signature in SIGNATURES]
    calls = {
        "verl": {"data_source": "s", "solution_str": " 4\n", "ground_truth": "4"},
        "TRL": {"prompts": ["2 + 2"], "completions": ["it is 4"], "completion_ids": [[7]], "answer": ["4"]},
        "OpenRLHF": {"queries": ["2 + 2 = 4"], "prompts": ["2 + 2 ="], "labels": ["4"]},
    }
    for name, body in examples:
        space: dict = {}
        exec(body, space)
        (function,) = (value for value in space.values() if inspect.isfunction(value))
        assert check_function(function, function.__name__).signature.name == name
        result = function(**calls[name])
        scores = check_batch(result, 1, name) if name != "verl" else [check_result(result)]
        assert [score.value for score in scores] == [1.0]
