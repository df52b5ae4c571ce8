"""What a run is made of, read and checked before there is a folder or a worker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from verl.algorithms.advantages import find_estimator
from verl.algorithms.policy_loss import find_policy_loss
from verl.config import Config
from verl.data.dataset import PromptDataset
from verl.data.examples import ExampleDataset
from verl.data.loader import PromptLoader
from verl.data.rows import Tokenizer
from verl.data.samplers import make_sampler
from verl.errors import ConfigError, ModelError
from verl.json_lines import json_line
from verl.models.loading import load_config, load_tokenizer, require_classifier
from verl.rewards.scorer import RuleScorer
from verl.rollout.engines import engine_class
from verl.run_dir import RunDir, write_atomic
from verl.tracking.trackers import check_loggers


@dataclass(frozen=True)
class Inputs:
    """What a run is made of, read and checked before any worker starts."""

    tokenizer: Tokenizer
    loader: PromptLoader
    validation: PromptDataset | None

    @classmethod
    def load(cls, config: Config, reward: Callable[..., Any] | None = None) -> Inputs:
        """Raises VerlError for what is wrong with logger names, engine, policy loss, model, data or reward function."""
        check_loggers(config.trainer.logger)
        engine_class(config.rollout.name)
        find_policy_loss(config.actor.policy_loss)
        find_estimator(config.algorithm, reread=True)
        data = config.data
        check_model_limits(config)
        with naming("model.tokenizer_path" if config.model.tokenizer_path else None):
            tokenizer = load_tokenizer(*config.tokenizer)
        training = PromptDataset.load(data.train_files, data, tokenizer, data.train_max_samples)
        validation = None
        if data.val_files:
            validation = PromptDataset.load(data.val_files, data, tokenizer, data.val_max_samples, "data.val_files")
        if config.reward.model.path is not None:
            with naming("reward.model.path"):
                require_classifier(config.reward.model.path)
                load_config(config.reward.model.path, config.reward.model.trust_remote_code, classifier=True)
                load_tokenizer(config.reward.model.path, config.reward.model.trust_remote_code)
        scorer = RuleScorer(config.reward, function=reward)
        for dataset in filter(None, (training, validation)):
            scorer.check_rows(dataset.exemplars)
        sampler = make_sampler(training, data, config.data_seed)
        loader = PromptLoader(training, data.train_batch_size, sampler, data.drop_last)
        return cls(tokenizer, loader, validation)


def check_model_limits(config: Config) -> None:
    """Refuse sequences longer than the model (or the critic's model) has positions, and token ids that it lacks. Raises
    ConfigError: they are; ModelError: no such model."""
    longest = config.data.max_prompt_length + config.data.max_response_length + config.bootstraps
    models: dict[str, tuple[str | None, bool]] = {config.model.path: (None, config.model.trust_remote_code)}
    if config.uses_critic and config.critic.model.path:
        models[config.critic.model.path] = ("critic.model.path", config.critic.model.trust_remote_code)
    for path, (key, trusted) in models.items():
        with naming(key):
            model = load_config(path, trusted, classifier=key is not None).get_text_config()
        limit = getattr(model, "max_position_embeddings", None)
        if limit is not None and longest > limit:
            raise ConfigError(
                f"data.max_prompt_length + data.max_response_length is more than the {limit} positions of {path}",
                f"{longest} tokens",
                f"lower one of them until their sum is at most {limit}",
            )
    vocabulary = load_config(config.model.path, config.model.trust_remote_code).get_text_config().vocab_size
    rollout = config.rollout
    for key, ids in (
        ("rollout.stop_token_ids", rollout.stop_token_ids),
        ("rollout.val_kwargs.logit_bias", rollout.val_kwargs.logit_bias),
    ):
        if ids and max(ids) >= vocabulary:
            fix = f"its token ids are 0 to {vocabulary - 1}"
            raise ConfigError(f"{key} has an id that is no token of {config.model.path}", max(ids), fix)


@contextmanager
def naming(key: str | None) -> Iterator[None]:
    """Names the key in what is said about a model that is not ``model.path``, and the one that trusts its code."""
    try:
        yield
    except ModelError as error:
        if key is None:
            raise
        fix = error.fix
        if fix and key.endswith(".path"):
            fix = re.sub(r"\b(model|data)\.trust_remote_code", key.removesuffix("path") + "trust_remote_code", fix)
        raise ModelError(f"{key}: {error.what}", error.value, fix) from error


def write_skipped(run_dir: RunDir, datasets: Mapping[str, PromptDataset | ExampleDataset | None]) -> None:
    """Rows of each split that could not be used, one a line; no file where there are none."""
    rows = [
        {"split": split, "file": row.file, "row": row.row, "where": row.where, "reason": row.reason}
        for split, dataset in datasets.items()
        for row in (dataset.skipped if dataset else ())
    ]
    if not rows:
        run_dir.skipped.unlink(missing_ok=True)
        return
    write_atomic(run_dir.skipped, "".join(json_line(row) + "\n" for row in rows))
    run_dir.log_event("skipped", "data", f"{len(rows)} rows that cannot be used: {run_dir.skipped.name}")
