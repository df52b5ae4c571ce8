"""verl config explain: our keys with all there is to say, other spellings, verl's keys, typing errors."""

from __future__ import annotations

import pytest

from verl.config.aliases import ALIASES, GLOBAL_MICRO_BATCH, MISNOMERS, PREFIXES, VERL_DEFAULTS, canonical, spellings
from verl.config.base import plain_types
from verl.config.explain import explain, overview
from verl.config.keys import facts, leaves, one_line, owner, sections
from verl.config.translate import NO_MEANING, NOT_YET
from verl.errors import ConfigError


@pytest.mark.parametrize("key", list(leaves()))
def test_every_key_has_a_unit_where_it_counts_and_a_place_where_it_acts(key: str) -> None:
    """A number's unit is in its type (``Prompts``, ``Number``, ... of verl/config/base.py)."""
    fact = facts(key)
    numbers = plain_types(leaves()[key].annotation) & {int, float}
    assert (fact.unit is not None) == bool(numbers)
    assert len(fact.acts_in) > 5 and fact.takes
    said = explain(key)
    for part in (fact.meaning.split()[0], fact.takes.split()[0], fact.default.split()[0], fact.acts_in.split()[0]):
        assert part in said


def test_sections_say_where_they_act_themselves() -> None:
    silent = [key for key in leaves() if not any("acts_in" in cls.__dict__ for cls in owner(key).__mro__[:2])]
    assert silent == []


@pytest.mark.parametrize(
    ("key", "takes", "unit", "acts_in"),
    [
        ("rollout.n", "whole number, at least 1", "responses", "rollout: the engine"),
        ("rollout.val_kwargs.n", "whole number, at least 1", "responses", "validation: the engine"),
        ("actor.clip_ratio_low", "number, above 0, at most 1, or null", "plain number", "update: the actor"),
        ("actor.optim.betas", "list of 2 numbers", "plain number", "update: the optimizer"),
        ("data.train_files", "text or list of texts", None, "start: reading the data files"),
        ("trainer.n_gpus_per_node", "whole number or auto", "GPUs", "start: the workers"),
        ("trainer.save_freq", "-1, or a whole number from 1 up", "training steps", "checkpoints"),
        ("actor.prefix_sharing", "one of auto, on, off", None, "update: the actor"),
        ("reward.reward_kwargs", "mapping", None, "rollout: the scorer"),
        ("cluster.start_timeout", "number, above 0", "seconds", "start: the workers"),
    ],
)
def test_what_a_key_takes(key: str, takes: str, unit: str | None, acts_in: str) -> None:
    fact = facts(key)
    assert (fact.takes, fact.unit, fact.acts_in) == (takes, unit, acts_in)


def test_a_key() -> None:
    assert explain("actor.optim.lr").splitlines() == [
        "actor.optim.lr",
        "  Peak learning rate.",
        "  takes    number, at least 0",
        "  unit     plain number",
        "  default  1.0e-06",
        "  acts in  update: the optimizer",
        "  also     actor_rollout_ref.actor.optim.lr, training.optimizer.params.lr",
    ]
    assert "  default  required\n" in explain("model.path")
    assert "  in verl  8\n" in explain("trainer.n_gpus_per_node")
    assert "win" in explain("actor.clip_ratio")


def test_other_spellings() -> None:
    for key in leaves():
        for name in spellings(key):
            assert canonical(name) == key or GLOBAL_MICRO_BATCH[canonical(name)] == key
            assert f"\n{key}\n" in explain(name)
    said = {name for key in [*leaves(), *sections()] for name in spellings(key)}
    ours = [old for old, new in (ALIASES | PREFIXES).items() if new in leaves() or new in sections()]
    assert said >= {*ours, *GLOBAL_MICRO_BATCH}
    assert explain("+ppo_mini_batch_size=3").startswith("ppo_mini_batch_size is another spelling of actor.ppo_mini")
    assert "divided by the number" in explain("actor_rollout_ref.actor.ppo_micro_batch_size")
    assert explain("reward.reward_kwargs.weight").startswith("reward.reward_kwargs.weight is an entry of the mapping")


def test_sections() -> None:
    lines = explain("actor.optim").splitlines()
    assert lines[0] == "actor.optim: AdamW and its learning-rate schedule."
    assert [line.split()[0] for line in lines if line.startswith("  actor.optim.")] == [
        key for key in leaves() if key.startswith("actor.optim.")
    ]
    assert any(line.startswith("  actor.optim  ") for line in explain("actor_rollout_ref.actor").splitlines())
    assert all(f"  {key} " in overview() for key in sections())


def test_a_last_part_alone() -> None:
    said = explain("lr")
    assert said.startswith("lr alone is no key; it may stand for:")
    assert "\nactor.optim.lr\n" in said and "\ncritic.optim.lr\n" in said
    assert "\nactor.optim: " in explain("optim") and "\ncritic.optim: " in explain("optim")


@pytest.mark.parametrize("wrong", list(MISNOMERS))
def test_names_that_other_programs_use(wrong: str) -> None:
    assert f"\n{MISNOMERS[wrong]}\n" in explain(wrong)
    assert MISNOMERS[wrong] in leaves()


@pytest.mark.parametrize("row", NO_MEANING, ids=lambda row: row.patterns[0])
def test_keys_without_meaning_say_why(row) -> None:
    for pattern in row.patterns:
        name = pattern.replace("*", "x")
        said = " ".join(explain(name).split())
        assert row.reason in said or any(later.what in said for later in NOT_YET), name


@pytest.mark.parametrize("row", NOT_YET, ids=lambda row: row.pattern)
def test_keys_that_are_not_built_say_what_is_accepted(row) -> None:
    said = explain(row.pattern.replace("*", "x"))
    assert row.what in said and " ".join(row.fix.split()) in " ".join(said.split())
    assert all(one_line(value) in said for value in row.harmless)


def test_sections_of_verls() -> None:
    said = explain("training")
    assert "training.optimizer.params" in said and "another spelling of actor.optim" in said
    assert "training.fp16.enabled" in said
    assert "no meaning here" in explain("actor_rollout_ref.actor.megatron")
    assert "actor_rollout_ref.rollout" in explain("actor_rollout_ref")


@pytest.mark.parametrize(
    ("word", "fix"),
    [
        ("actor.optim.lrr", "did you mean actor.optim.lr?"),
        ("actr.optim", "did you mean actor.optim?"),
        ("train_batch_sise", "did you mean data.train_batch_size?"),
        ("rollout.gpu_memory_utilisation", "did you mean rollout.gpu_memory_utilization? (which has no meaning here)"),
        ("zzzz", "verl config explain lists the sections"),
    ],
)
def test_typing_errors_name_the_nearest(word: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        explain(word)
    assert caught.value.what.startswith("unknown key ") and fix in caught.value.fix


def test_verls_defaults_are_others() -> None:
    for key, there in VERL_DEFAULTS.items():
        assert facts(key).default != there
