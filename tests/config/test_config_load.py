"""Reading YAML and overrides, references between keys, and unknown keys."""

from __future__ import annotations

import textwrap

import pytest

from verl.config import LoadedConfig, build_config, did_you_mean, load_config, nearest
from verl.errors import ConfigError

BASE = ["data.train_files=[train.parquet]", "model.path=tiny"]


@pytest.fixture
def written(tmp_path):
    def write(text: str):
        path = tmp_path / "run.yaml"
        path.write_text(textwrap.dedent(text))
        return path

    return write


def load(*overrides: str) -> LoadedConfig:
    return load_config(None, [*BASE, *overrides])


def refused(*overrides: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    return caught.value


def test_a_file_and_overrides(written):
    path = written("""
        data: {train_files: [a.parquet], train_batch_size: 64}
        model: {path: tiny}
        actor:
          ppo_mini_batch_size: 32
          optim: {lr: 1e-6, betas: [0.9, 0.95]}
        rollout:          # left empty: all defaults
    """)
    config = load_config(path, ["actor.optim.lr=3e-5", "data.train_batch_size=32"]).config
    assert config.actor.optim.lr == 3e-5
    assert config.actor.optim.betas == (0.9, 0.95)
    assert config.data.train_batch_size == 32
    assert load_config(str(path)).config.actor.optim.lr == 1e-6


def test_dotted_keys_in_a_file(written):
    path = written("""
        data.train_files: a.parquet
        actor_rollout_ref.model.path: tiny
        actor_rollout_ref: {rollout: {n: 3}}
        actor_rollout_ref.actor: {clip_ratio: 0.1}
    """)
    config = load_config(path).config
    assert (config.data.train_files, config.model.path) == (["a.parquet"], "tiny")
    assert (config.rollout.n, config.actor.clip_ratio) == (3, 0.1)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("actor.optim.lr=1e-6", 1e-6),
        ("actor.optim.lr=1E-6", 1e-6),
        ("actor.optim.betas=[0.9, 0.95]", (0.9, 0.95)),
        ("data.train_files=[a.parquet,b.parquet]", ["a.parquet", "b.parquet"]),
        ("data.train_files=['a b.parquet', \"c.parquet\"]", ["a b.parquet", "c.parquet"]),
        ("data.train_files=a=b.parquet", ["a=b.parquet"]),
        ("data.train_files=/with space/a.parquet", ["/with space/a.parquet"]),
        ("data.val_files=null", []),
        ("data.answer_key=null", None),
        ("data.answer_key=", None),
        ("data.answer_key='null'", "null"),
        ("trainer.experiment_name=0010", "0010"),
        ("trainer.experiment_name=1e-6", "1e-6"),
        ("trainer.experiment_name=2024-05-01", "2024-05-01"),
        ("trainer.experiment_name=true", "true"),
        ("trainer.experiment_name='a: b'", "a: b"),
        ("trainer.default_local_dir=~/runs/x", "~/runs/x"),
        ("rollout.stop=</answer>", ["</answer>"]),
        ("rollout.stop=#", ["#"]),
        ('rollout.stop="\\n\\n"', ["\n\n"]),
        ("rollout.stop=['\\n', \" \"]", ["\\n", " "]),
        ("rollout.stop_token_ids=[1, 2]", [1, 2]),
        ("actor.prefix_sharing=off", "off"),
        ("actor.prefix_sharing=on", "on"),
        ("reward.reward_kwargs={a: [1, 2], b: {c: null}}", {"a": [1, 2], "b": {"c": None}}),
        ("trainer.n_gpus_per_node=8", 8),
        ("trainer.n_gpus_per_node=auto", "auto"),
        ("+rollout.n=4", 4),
        ("++rollout.n=4", 4),
        (" rollout.n = 4 ", 4),
        ("actor_rollout_ref.rollout.n=4", 4),
        ("+actor_rollout_ref.rollout.n=4", 4),
    ],
)
def test_override_values(override, expected):
    key = override.partition("=")[0].strip().lstrip("+").removeprefix("actor_rollout_ref.")
    place: object = load(override).config
    for part in key.split("."):
        place = getattr(place, part)
    assert place == expected
    assert type(place) is type(expected)


@pytest.mark.parametrize("word", ["on", "off"])
def test_on_and_off_in_a_file(written, word):
    path = written(f"data: {{train_files: a}}\nmodel: {{path: m}}\nactor: {{prefix_sharing: {word}}}\n")
    assert load_config(path).config.actor.prefix_sharing == word


def test_parts_of_a_free_mapping_can_be_set_alone(written):
    path = written("""
        data: {train_files: a, chat_template_kwargs: {a: 1, b: {c: 2}}}
        model: {path: m}
    """)
    overrides = ["+data.chat_template_kwargs.b.d=3", "data.apply_chat_template_kwargs.e=x"]
    assert load_config(path, overrides).config.data.chat_template_kwargs == {"a": 1, "b": {"c": 2, "d": 3}, "e": "x"}


@pytest.mark.parametrize(
    ("override", "nearest_key"),
    [
        ("actor.learnign_rate=1", "actor.optim.lr"),
        ("+actor.learnign_rate=1", "actor.optim.lr"),
        ("++actor.learnign_rate=1", "actor.optim.lr"),
        ("actor_rollout_ref.actor.learnign_rate=1", "actor.optim.lr"),
        ("learning_rate=1", "actor.optim.lr"),
        ("rollout.temprature=1", "rollout.temperature"),
        ("rollout.val_kwargs.temprature=1", "rollout.val_kwargs.temperature"),
        ("actor.optim.weigth_decay=1", "actor.optim.weight_decay"),
        ("actr.clip_ratio=1", "actor.clip_ratio"),
        ("actor.clip_ratio.low=1", "actor.clip_ratio_low"),
        ("actor.policy_loss.loss_mod=vanilla", "actor.policy_loss.loss_mode"),
        ("data.train_file=a", "data.train_files"),
        ("trainer.totl_epochs=1", "trainer.total_epochs"),
        ("critic.model.pth=x", "critic.model.path"),
        ("actor_rollout_reff.rollout.n=4", "rollout.n"),
    ],
)
def test_an_unknown_key_names_the_nearest(override, nearest_key):
    """B149"""
    error = refused(override)
    spelled = override.partition("=")[0].lstrip("+")
    assert error.what.startswith("unknown key ") and spelled.startswith(error.what.split()[2])
    assert error.what.endswith("(on the command line)")
    assert error.value == f"{spelled}={override.partition('=')[2]}"
    assert error.fix == f"did you mean {nearest_key}?"


def test_unknown_keys_in_a_file_at_any_depth(written):
    """B149"""
    path = written("""
        data: {train_files: a}
        model: {path: m}
        actor: {optim: {learning_rate: 1, adam: {beta: 1}}}
        rolout: {n: 1, temperature: 2}
        actor_rollout_ref: {rollout: {val_kwargs: {temp: 1}}}
    """)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    text = str(caught.value)
    assert text.startswith("the configuration has 4 problems:")
    for name in (
        "actor.optim.learning_rate",
        "actor.optim.adam",
        "rolout",
        "actor_rollout_ref.rollout.val_kwargs.temp",
    ):
        assert f"unknown key {name} (in {path}:" in text
    assert "did you mean rollout.n?" in text and "did you mean rollout.val_kwargs.temperature?" in text


def test_a_section_takes_no_value(written):
    error = refused("actor.optim=3")
    assert error.what.startswith("actor.optim is a section of keys") and error.value == 3
    assert "actor.optim.lr" in error.fix
    assert load("actor.optim=null", "actor_rollout_ref={}").config == load().config


def test_references(written):
    path = written("""
        data: {train_files: a, max_prompt_length: 100, max_response_length: '${data.max_prompt_length}'}
        model: {path: tiny}
        actor:
          ppo_max_token_len_per_gpu: ${actor_rollout_ref.ref.log_prob_max_token_len_per_gpu}
          ppo_mini_batch_size: ${data.train_batch_size}
        ref: {log_prob_max_token_len_per_gpu: 4096}
        reward: {reward_kwargs: {limits: ['${data.max_response_length}', 'x ${trainer.seed}']}}
        trainer: {experiment_name: "${model.path}-n${rollout.n}"}
    """)
    config = load_config(path, ["rollout.n=4", "data.max_prompt_length=64"]).config
    assert config.data.max_response_length == 64
    assert config.actor.ppo_max_token_len_per_gpu == 4096
    assert config.actor.ppo_mini_batch_size == 1024  # the default of data.train_batch_size
    assert config.reward.reward_kwargs == {"limits": [64, "x 1"]}
    assert config.trainer.experiment_name == "tiny-n4"


def test_references_on_the_command_line():
    assert (
        load("trainer.default_local_dir=out/${trainer.experiment_name}").config.trainer.default_local_dir == "out/run"
    )


@pytest.mark.parametrize(
    "text",
    [
        "${oc.env:HOME}",
        "a ${oc.env:HOME,x}",
        "${oc.decode:1}",
        "${eval:1+1}",
        "${a.${b}}",
        "${",
        "${ }",
        "${.n}",
        "${}",
    ],
)
def test_nothing_but_keys_is_resolved(text, written, monkeypatch):
    monkeypatch.setenv("HOME", "/secret")
    error = refused(f"trainer.project_name={text}")
    assert "trainer.project_name" in error.what and "${section.key}" in error.what + error.fix
    assert "/secret" not in str(error)
    path = written(f"data: {{train_files: a}}\nmodel: {{path: m}}\ntrainer: {{project_name: '{text}'}}\n")
    with pytest.raises(ConfigError, match=r"\$\{section.key\}"):
        load_config(path)


def test_references_that_lead_nowhere():
    error = refused("trainer.project_name=${trainer.experimnt_name}")
    assert error.what == "trainer.project_name: ${trainer.experimnt_name} is no key"
    assert error.fix == "did you mean ${trainer.experiment_name}?"
    with pytest.raises(ConfigError, match=r"\$\{model.path\} is not set and has no default"):
        load_config(None, ["data.train_files=a", "trainer.project_name=${model.path}"])
    circle = refused(
        "trainer.project_name=${trainer.experiment_name}", "trainer.experiment_name=${trainer.project_name}"
    )
    assert "cannot be resolved" in circle.what and "refers to itself" in circle.fix


def test_a_value_left_open(written):
    path = written("data: {train_files: a}\nmodel:\n  path: ???\n")
    with pytest.raises(ConfigError, match=r"model\.path is left open") as caught:
        load_config(path)
    assert caught.value.fix == "set model.path=... on the command line"
    assert load_config(path, ["model.path=m"]).config.model.path == "m"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("data: [", "is not valid YAML: line"),
        ("a: b: c", "is not valid YAML: line 1, column 5"),
        ("data: {train_files: a}\ndata: {}", "duplicate key data"),
        ("- a\n- b", "is not a mapping"),
        ("hello", "is not a mapping"),
        ("42", "is not a mapping"),
        ("a: !!python/object/apply:os.system ['true']", "is not valid YAML"),
        ("a: &x {b: *x}", "is not valid YAML"),
        ("data: !!set {a}", "not a supported"),
        ("data: !!int", "cannot be read"),
        ("data: !!timestamp x", "cannot be read"),
    ],
)
def test_bad_files(text, complaint, written):
    path = written(text)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert complaint in caught.value.what and str(path) in caught.value.what
    assert caught.value.fix


def test_missing_and_unreadable_files(tmp_path):
    with pytest.raises(ConfigError, match="does not exist") as caught:
        load_config(tmp_path / "no.yaml")
    assert caught.value.value == str(tmp_path / "no.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path)
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "bad.yaml")


def test_an_empty_file_is_all_defaults(written):
    assert load_config(written(""), BASE).config == load().config


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("rollout.n", "needs the form key=value"),
        ("", "needs the form key=value"),
        ("=3", "needs a key before the ="),
        ("+=3", "needs a key before the ="),
        ("rollout..n=3", "needs a key before the ="),
        ("~rollout.n=3", "cannot be deleted"),
        ("reward.reward_kwargs=!!int", "cannot be read"),
        ("reward.reward_kwargs=!!timestamp x", "cannot be read"),
        ("rollout.stop=[a", "the value of rollout.stop is not valid YAML"),
        ("reward.reward_kwargs={a: b: c}", "the value of reward.reward_kwargs is not valid YAML"),
    ],
)
def test_bad_overrides(word, complaint):
    error = refused(word)
    assert complaint in error.what
    assert error.value == word and error.fix


def test_an_override_that_is_no_text():
    error = refused("trainer.project_name=\udcff")
    assert error.what == "an override is not valid UTF-8 text" and "\\udcff" in error.value


def test_the_last_of_two_equal_overrides_wins():
    assert load("rollout.n=2", "+rollout.n=3").config.rollout.n == 3


def test_two_spellings_must_agree(written):
    error = refused("ppo_mini_batch_size=64", "actor.ppo_mini_batch_size=32")
    assert error.what.startswith("ppo_mini_batch_size and actor.ppo_mini_batch_size are the same key")
    assert error.value == "64 and 32"
    assert error.fix == "keep one of them, best actor.ppo_mini_batch_size"
    assert load("ppo_mini_batch_size=64", "actor.ppo_mini_batch_size=64").config.actor.ppo_mini_batch_size == 64
    # The command line overrides the file, whichever spelling each of them uses.
    path = written("data: {train_files: a}\nmodel: {path: m}\nactor_rollout_ref: {rollout: {n: 2}}\n")
    assert load_config(path, ["rollout.n=3"]).config.rollout.n == 3
    path = written("data: {train_files: a}\nmodel: {path: m}\nactor_rollout_ref: {rollout: {n: 2}}\nrollout: {n: 3}\n")
    with pytest.raises(ConfigError, match=r"actor_rollout_ref.rollout.n and rollout.n are the same key"):
        load_config(path)


def test_build_config_reports_like_load_config():
    with pytest.raises(ConfigError) as caught:
        build_config({"data": {"train_files": ["a"]}, "model": {"path": "m"}, "rollout": {"nn": 3}})
    assert caught.value.what == "unknown key rollout.nn"
    assert caught.value.fix == "did you mean rollout.n?"


def test_nearest():
    assert nearest("grop", ["gae", "grpo", "rloo"]) == "grpo"
    assert nearest("GRPO", ["gae", "grpo"]) == "grpo"
    assert nearest("xyz", ["gae", "grpo"], cutoff=0.5) is None
    assert nearest("xyz", []) is None
    assert nearest("temperature", ["actor.x", "rollout.temperature"]) == "rollout.temperature"
    assert did_you_mean("grop", ["gae", "grpo"]) == "did you mean grpo? "
    assert did_you_mean("xyz", ["gae", "grpo"]) == ""
