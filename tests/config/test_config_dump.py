"""Writing a configuration back, and random text against the reader."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from verl.config import LoadedConfig, build_config, dump_yaml, load_config
from verl.config.explain import select, tree
from verl.config.interpolate import escape
from verl.config.keys import leaves, one_line
from verl.config.load import Origin
from verl.errors import ConfigError

BASE = ["data.train_files=[train.parquet]", "model.path=tiny"]


def load(*overrides: str) -> LoadedConfig:
    return load_config(None, [*BASE, *overrides])


@pytest.fixture(scope="module")
def dump_folder(tmp_path_factory):
    return tmp_path_factory.mktemp("dump")


def reload(folder, config):
    path = folder / "config.yaml"
    path.write_text(dump_yaml(config), encoding="utf-8")
    return load_config(path)


def test_dump_is_complete_and_rerunnable(tmp_path):
    config = load("rollout.n=4", "algorithm.adv_estimator=grpo", "actor.optim.lr=3e-5", "trainer.keep_last=null").config
    text = dump_yaml(config)
    assert "ppo_max_token_len_per_gpu: 16384" in text and text.startswith("data:\n")
    again = reload(tmp_path, config)
    assert again.config == config and again.notices == []
    assert all(key.rpartition(".")[2] + ":" in text for key in leaves())


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="/\\\0"), min_size=1).filter(
    lambda text: text not in ("???", ".", "..")
)
HARD = st.sampled_from(
    ["1e-6", "null", "true", "0010", "${x}", "\\${x}", "\\\\${a.b}", "${", "on", "1:30", " ", "a: b", "#"]
)


@settings(max_examples=50, deadline=None)
@given(TEXT | HARD, st.lists(TEXT | HARD), st.floats(0, 1), st.dictionaries(TEXT | HARD, TEXT | HARD | st.integers()))
@example("x", ["\x85", "\u2028", "\ufeff"], 1e-300, {})
def test_any_configuration_survives_being_written(dump_folder, name, stop, gamma, kwargs):
    config = build_config(
        {
            "data": {"train_files": [name], "chat_template_kwargs": kwargs},
            "model": {"path": name},
            "rollout": {"stop": stop},
            "algorithm": {"gamma": gamma},
        }
    )
    assert reload(dump_folder, config).config == config
    # And what verl config show prints, origins and all.
    loaded = LoadedConfig(config, [], dict.fromkeys(leaves(), Origin("file", "# a: 'b'", name)))
    path = dump_folder / "shown.yaml"
    path.write_text("\n".join(map("".join, tree(loaded, select(loaded, changed=True)))), encoding="utf-8")
    assert load_config(path).config == config


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT | HARD,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT | HARD, inner),
    max_leaves=8,
)


@given(JSON)
@example({"a": ["1e-6", "0x1f", "1_000", ".5", "=", "<<", "~", "", "é", "\ufeff", "\U0001f600", "\x7f", "- a", "a #b"]})
@example([1e-07, 1e22, -0.0, 5e-324])
def test_a_value_on_one_line_is_read_back_by_any_yaml_reader(value):
    line = one_line(value)
    assert "\n" not in line
    assert yaml.safe_load(line) == value
    assert yaml.safe_load(f"k: {line}  # comment") == {"k": value}


@given(st.text())
def test_escape_leaves_plain_text_alone(text):
    assert ("${" in text) or escape(text) == text


KEYS = st.sampled_from([*leaves(), "reward.reward_kwargs.x", "actor_rollout_ref.actor.optim", "training.fp16"])
VALUES = st.text() | st.text("[]{}:,'\"\\$#&*!|>%@`-? \t\n~0e1.ax=", max_size=12)


@settings(max_examples=400, deadline=None)
@given(st.one_of(st.text(), st.builds("{}={}".format, KEYS, VALUES), st.builds("{}={}".format, st.text(), VALUES)))
@example("reward.reward_kwargs=" + "[" * 5000)
@example("reward.reward_kwargs={1: 2, [a]: b}")
@example("reward.reward_kwargs=!!binary /w==")
@example("reward.reward_kwargs=!!set {a}")
@example("reward.reward_kwargs=&a [*a]")
@example("rollout.n=" + "9" * 5000)
@example("data.train_batch_size=" + "9" * 30)
@example("critic.ppo_micro_batch_size_per_gpu=" + "9" * 30)
@example("reward.reward_kwargs=!!float")
@example("actor.optim.lr=1e999")
@example("trainer.seed=99999999999999999999")
@example("rollout.n=1:30:00")
@example("trainer.n_gpus_per_node=1e400")
@example("actor.ppo_micro_batch_size=.inf")
def test_an_override_gives_a_configuration_or_a_config_error(word):
    try:
        loaded = load(word)
    except ConfigError as error:
        assert str(error)
    else:
        dump_yaml(loaded.config)
