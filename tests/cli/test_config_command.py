"""verl config show, explain, diff and reference, as typed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from verl.cli import entry
from verl.config import load_config
from verl.config.keys import leaves

ROOT = Path(__file__).parents[2]
TINY = str(ROOT / "examples" / "tiny" / "grpo.yaml")


class Said(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture
def verl(capsys: pytest.CaptureFixture[str]):
    def run(*words: str) -> Said:
        code = entry.main(["config", *words])
        return Said(code, *capsys.readouterr())

    return run


def test_show_is_yaml_that_loads_to_the_same_configuration(verl, tmp_path: Path) -> None:
    said = verl("show", TINY, "rollout.n=4", "--preset", "grpo")
    assert said.code == 0 and said.err == ""
    path = tmp_path / "again.yaml"
    path.write_text(said.out)
    assert load_config(path).config == load_config(TINY, ["rollout.n=4"], ["grpo"]).config
    lines = [line for line in said.out.splitlines() if "# " in line]
    assert len(lines) == len(leaves())
    assert any(line.endswith("# command line") and line.split()[:2] == ["n:", "4"] for line in lines)
    bare = verl("show", TINY, "rollout.n=4", "--preset", "grpo", "--no-origins").out
    assert "#" not in bare and yaml.safe_load(bare) == yaml.safe_load(said.out)


def test_show_aligns_the_origins(verl) -> None:
    columns = {line.index(" # ") for line in verl("show", "rollout").out.splitlines() if " # " in line}
    assert len(columns) == 1


def test_show_without_what_is_required(verl) -> None:
    said = verl("show", "model.path=m")
    assert said.code == 0
    tree = yaml.safe_load(said.out)
    assert tree["data"]["train_files"] == "???" and tree["model"]["path"] == "m" and tree["rollout"]["n"] == 1
    assert said.err == "note: data.train_files is required and not given\n"


def test_show_changed_and_parts(verl) -> None:
    said = verl("show", TINY, "actor.optim.lr=1e-6", "--changed", "actor", "trainer.seed")
    assert yaml.safe_load(said.out) == {"actor": {"ppo_mini_batch_size": 8}}
    assert set(yaml.safe_load(verl("show", "actor_rollout_ref.actor.optim").out)["actor"]) == {"optim"}
    assert set(yaml.safe_load(verl("show", "lr").out)) == {"actor", "critic"}
    nothing = verl("show", TINY, "critic", "--changed")
    assert nothing.out == "" and "nothing differs from the defaults" in nothing.err


def test_show_json(verl) -> None:
    shown = json.loads(verl("show", TINY, "ppo_mini_batch_size=4", "--json").out)
    assert list(shown) == list(leaves())
    assert shown["actor.ppo_mini_batch_size"] == {
        "value": 4,
        "default": 256,
        "origin": {"kind": "command line", "place": "command line", "written": "ppo_mini_batch_size"},
    }
    assert json.loads(verl("show", "model.path", "--json").out)["model.path"]["value"] is None


def test_show_names_a_folder_or_a_preset(verl, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(verl("show", TINY).out)
    assert yaml.safe_load(verl("show", str(tmp_path), "--no-origins").out) == yaml.safe_load(verl("show", TINY).out)
    assert yaml.safe_load(verl("show", "grpo", "algorithm").out)["algorithm"]["adv_estimator"] == "grpo"


def test_notices_go_to_standard_error(verl) -> None:
    said = verl("show", TINY, "rollout.name=vllm", "data.image_key=images")
    assert yaml.safe_load(said.out)["rollout"]["name"] == "embedded"
    assert said.err.count("note: ") == 2 and "data.image_key" in said.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["show", "actr.optim"], ["no file, run folder, preset, section or key", "did you mean actor.optim?"]),
        (["show", "examples/tiny/gpro.yaml"], ["does not exist", "grpo.yaml"]),
        (["show", TINY, "examples/tiny/ppo.yaml"], ["one configuration is shown at a time"]),
        (["show", TINY, "rollout.nn=3"], ["unknown key rollout.nn", "did you mean rollout.n?"]),
        (["show", "rollout.name=vlm", "data.train_files=a", "model.path=m"], ["did you mean vllm?"]),
        (["show", "--preset", "gppo"], ["unknown preset", "did you mean"]),
        (["explain", "actor.optim.lrr"], ["unknown key actor.optim.lrr", "did you mean actor.optim.lr?"]),
        (["show", "actor.megatron"], ["verl config explain actor.megatron says more"]),
        (["diff", TINY, "nowhere/a.yaml"], ["does not exist", "nowhere"]),
        (["diff", TINY, "grppo"], ["no file, run folder or preset", "did you mean grpo?"]),
        (["diff", TINY, "tests"], ["config.yaml"]),
    ],
)
def test_typing_errors(verl, words: list[str], expected: list[str]) -> None:
    said = verl(*words)
    assert said.code == 2 and said.err.startswith("error: ") and "  fix:   " in said.err
    for part in expected:
        assert part in said.err


def test_explain(verl) -> None:
    assert verl("explain", "lr").out.count("Peak learning rate.") == 2
    assert verl("explain", "rollout.n", "trainer.seed").out.startswith("rollout.n\n")
    assert "cluster " in verl("explain").out


def test_diff(verl, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(verl("show", TINY, "rollout.n=4", "trainer.logger=[]").out)
    said = verl("diff", TINY, str(other))
    assert said.code == 0
    head, *rows = said.out.splitlines()
    assert head.split() == [TINY, str(other)]
    assert [row.split() for row in rows] == [["rollout.n", "8", "4"], ["trainer.logger", "[console]", "[]"]]
    assert json.loads(verl("diff", TINY, str(other), "--json").out) == {
        "rollout.n": [8, 4],
        "trainer.logger": [["console"], []],
    }
    same = verl("diff", TINY, TINY)
    assert same.code == 0 and same.out.startswith("no difference")
    assert "(required)" in verl("diff", TINY, "grpo").out
    assert ["algorithm.adv_estimator", "grpo", "gae"] in [
        row.split() for row in verl("diff", "grpo", "ppo").out.splitlines()
    ]


def test_reference(verl, tmp_path: Path) -> None:
    printed = verl("reference").out
    assert printed.startswith("# Configuration\n")
    verl("reference", "--out", str(tmp_path / "page.md"))
    assert (tmp_path / "page.md").read_text() == printed
