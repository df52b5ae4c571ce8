"""Every shipped configuration is valid as it stands, and says what it seems to say."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from verl.config import load_config, load_supervised
from verl.config.schema_supervised import SupervisedConfig, schema_of

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").rglob("*.yaml"))


def test_there_are_examples() -> None:
    names = {path.relative_to(ROOT / "examples").as_posix() for path in EXAMPLES}
    assert {"quickstart.yaml", "tiny/grpo.yaml", "tiny/ppo.yaml"} <= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(ROOT / "examples").as_posix())
def test_b148_an_example_is_valid(path: Path) -> None:
    """Its files need not exist; nothing in it is without effect."""
    schema = schema_of(yaml.safe_load(path.read_text()))
    if schema is not None:
        config, notices = load_supervised(schema, path)
        assert isinstance(config, SupervisedConfig) and notices == []
        return
    loaded = load_config(path)
    assert loaded.notices == []
    plan = loaded.config.actor_batch(1)
    assert loaded.config.data.train_batch_size % plan.mini_batch_prompts == 0
    if loaded.config.uses_critic:
        loaded.config.critic_batch(1)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_files_of_the_tiny_examples_are_there(name: str) -> None:
    config = load_config(ROOT / "examples" / "tiny" / f"{name}.yaml").config
    assert config.reward.custom_reward_function.path is not None
    for file in (*config.data.train_files, *config.data.val_files, config.reward.custom_reward_function.path):
        assert (ROOT / file).is_file()
