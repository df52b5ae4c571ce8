"""Scores of a batch: the reward role.

A score is placed on the last trained token of its response. A response that cannot be scored is marked so
(``scored`` false, zeros in ``token_level_scores``) and leaves every statistic; it never becomes a reward of zero.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_args

import torch

from verl.algorithms.masking import place_at_last
from verl.config import RewardConfig, SandboxConfig
from verl.config.names import matches
from verl.config.schema_reward import RewardFunctionConfig
from verl.data.rows import PromptRow
from verl.errors import RewardError
from verl.models.memory import available_cores
from verl.protocol import DataProto, check_columns
from verl.protocol.keys import REWARD_EXTRA_PREFIX
from verl.rewards.custom import check_function, load_function
from verl.rewards.functions import ROW_COLUMNS, Decode, FunctionReward, Judge, Pending, Reward, RuleReward
from verl.rewards.pool import Pool
from verl.rewards.pool_worker import Target
from verl.rewards.results import MEANINGFUL, Outcome, Score, check_result
from verl.rewards.rules import rule_named

RETRIES = 2  # further tries with reward.on_error=retry


@dataclass(frozen=True)
class Part:
    """One reward of a sum."""

    name: str  # "" where it is the only one, whose extras keep their names
    reward: Reward
    weight: float = 1.0
    data_sources: Sequence[str] = ()  # patterns of those that it is for; empty: all

    def is_for(self, data_source: str) -> bool:
        return not self.data_sources or any(matches(pattern, data_source) for pattern in self.data_sources)


class RuleScorer:
    """Scores responses by what section ``reward`` says: a built-in rule, the user's function, or several of them.
    Raises RewardError: a function cannot be loaded, or a rule is unknown or refuses its keyword arguments.

    Args:
        decode: token ids to text, special tokens included; functions in OpenRLHF's signature get the prompt from it.
        function: a function of this program, in place of what ``config`` says.
        model: the reward model of ``reward.model``; None: it is not loaded here, and rows can only be checked.
    """

    def __init__(
        self,
        config: RewardConfig,
        decode: Decode | None = None,
        function: Callable[..., Any] | None = None,
        model: Reward | None = None,
    ) -> None:
        self.config = config
        most = available_cores() if config.num_workers is None else config.num_workers
        memory = None if config.worker_memory_gb is None else int(config.worker_memory_gb * 2**30)
        least = min(config.min_workers, most)
        self._pool = Pool(most, least, config.timeout, config.cache, memory) if config.num_workers != 0 else None
        if function is not None:
            name, kwargs = getattr(function, "__name__", type(function).__name__), config.reward_kwargs
            checked = check_function(function, name, kwargs=kwargs)
            own = FunctionReward(checked, Target(name), kwargs, decode, None)  # no other process has it
            self._parts = [Part("", own)]
        else:
            self._parts = [
                Part(name, _reward(entry, decode, config.sandbox, self._pool), entry.weight, entry.data_sources)
                for name, entry in config.parts.items()
            ]
        judges = []
        if config.model.path is not None:
            judges.append(Part("model", model or Reward(), config.model.weight))
        if config.judge.base_url is not None:
            judges.append(Part("judge", Judge(config.judge), config.judge.weight))
        if judges:
            alone = function is None and not config.names_rewards  # no rule was asked for: the usual one is not added
            others = [] if alone else [replace(part, name=part.name or "function") for part in self._parts]
            self._parts = [*others, *judges]
            if len(self._parts) == 1:
                self._parts = [Part("", judges[0].reward)]
        self._begun: dict[Hashable, tuple[Pending, int]] = {}
        self._turn = threading.Lock()  # groups are submitted while a batch is scored

    def close(self) -> None:
        """End the worker processes, if there are any, and give up what was begun."""
        for part in self._parts:
            part.reward.close()
        if self._pool is not None:
            self._pool.close()

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        """Refuse, before the run starts, rows of a dataset that cannot be scored. Raises RewardError: no reward belongs
        to a data source, or no row has a column that a user's function asks for."""
        for part in self._parts:
            own = [row for row in rows if part.is_for(row.data_source)]
            if own:
                part.reward.check_rows(own)
        for source in sorted({row.data_source for row in rows}):
            if not any(part.is_for(source) for part in self._parts):
                shown = ", ".join(f"{part.name}: {', '.join(part.data_sources)}" for part in self._parts)
                fix = f"add it to data_sources of one of them ({shown})"
                raise RewardError("No entry of reward.functions is for this data source.", source, fix)

    def submit(self, rows: DataProto) -> None:
        """Begin to score rows of a batch whose others are still being generated; :meth:`score` finds what came of it.

        Rewards that look at a batch as a whole wait for it, as does whoever would take time from the generation.

        Args:
            rows: as :meth:`verl.rewards.functions.Reward.begin` says, and columns ``uid`` and ``index``, which the
                batch must have as well.
        """
        for part, _, own in self._shares(rows):
            with self._turn:
                pending = part.reward.begin(own)
            if pending is not None:
                pending = cache(pending)
                self._begun |= {key: (pending, i) for i, key in enumerate(_keys(part, own))}

    def score(self, batch: DataProto) -> DataProto:
        """Score every response of ``batch``.

        Args:
            batch: tensor ``response_mask`` (B, R); columns ``response_text, data_source, ground_truth, extra_info``;
                for functions that take a batch also tensors ``responses`` (B, R) and ``attention_mask`` (B, P+R) and
                columns ``prompt_ids, raw_prompt, columns``. Rows without a response token are not asked about.

        Returns:
            Tensors ``token_level_scores`` (B, R) float32 and ``scored`` (B,) bool; columns ``score`` (float or None),
            ``reward_reason`` (why a row failed or is invalid, else None) and ``reward_extra/<key>`` for every key that
            any result had (None where a row has none); ``meta_info["metrics"]`` with the counts
            ``reward/{scored, none, invalid, failed, empty}``, and of several rewards those of each.

        Raises:
            RewardError: the share of asked rows that failed or came back invalid is over
                ``reward.max_failed_fraction``, or there is one with ``reward.on_error=stop``; the first reason is
                quoted. Or a function that takes a batch did not return one value for each of its responses.
        """
        check_columns(batch, "response_mask", *ROW_COLUMNS)
        mask = batch.batch["response_mask"].bool()
        asked = mask.any(dim=1)
        scores = [Score(None, "empty")] * len(batch)
        counts: Counter[str] = Counter()
        if asked.any():
            found = self.judge(batch[asked], counts)
            for place, score in zip(asked.nonzero().flatten().tolist(), found, strict=True):
                scores[place] = score
        for key in (key for part in self._parts for key in _keys(part, batch)) if self._begun else ():
            self._begun.pop(key, None)
        reasons = [score.reason for score in scores if score.reason is not None]
        self._check_share(len(reasons), int(asked.sum()), reasons)
        counts.update(_counts("", scores))
        return DataProto.from_dict(
            tensors={
                "token_level_scores": place_scores([score.value for score in scores], mask),
                "scored": torch.tensor([score.value is not None for score in scores], dtype=torch.bool),
            },
            non_tensors=_columns(scores),
            meta_info={"metrics": dict(counts)},
        )

    def judge(self, rows: DataProto, counts: Counter[str] | None = None) -> list[Score]:
        """One :class:`Score` a row, in order, whatever its mask; ``counts``: gets how many responses each of several
        rewards scored, failed for, and so on."""
        found: list[dict[str, Score]] = [{} for _ in range(len(rows))]
        begun = [(*share, self._begin(share[0], share[2])) for share in self._shares(rows)]  # they work side by side
        for part, places, own, wait in begun:
            scores = self._retried(part.reward, own, wait())
            for i, score in zip(places, scores, strict=True):
                found[i][part.name] = score
            if part.name and counts is not None:
                counts.update(_counts(f"{part.name}/", scores))
        if not self._parts[0].name:
            return [scores[""] for scores in found]
        weights = {part.name: part.weight for part in self._parts}
        return [combined(scores, weights) for scores in found]

    def _shares(self, rows: DataProto) -> Iterator[tuple[Part, list[int], DataProto]]:
        """Of each part that has any: the places of the rows that it is for, and these rows."""
        sources = rows.non_tensor_batch["data_source"].tolist()
        for part in self._parts:
            places = [i for i, source in enumerate(sources) if part.is_for(source)]
            if places:
                yield part, places, rows if len(places) == len(rows) else rows.select_idxs(places)

    def _begin(self, part: Part, rows: DataProto) -> Pending:
        """What :meth:`submit` has not begun of these rows; waits for them all."""
        begun = [self._begun.get(key) for key in _keys(part, rows)] if self._begun else [None] * len(rows)
        late = [i for i, found in enumerate(begun) if found is None]
        rest = rows if len(late) == len(rows) else rows.select_idxs(late)
        with self._turn:
            pending = (part.reward.begin(rest) if late else list) or (lambda: part.reward.score(rest))

        def wait() -> list[Score]:
            fresh = iter(pending())
            return [next(fresh) if found is None else found[0]()[found[1]] for found in begun]

        return wait

    def _retried(self, reward: Reward, rows: DataProto, scores: list[Score]) -> list[Score]:
        for _ in range(RETRIES * (self.config.on_error == "retry")):
            failed = [i for i, score in enumerate(scores) if score.outcome == "failed"]
            if failed:
                for i, score in zip(failed, reward.score(rows.select_idxs(failed)), strict=True):
                    scores[i] = score
        return scores

    def _check_share(self, bad: int, asked: int, reasons: Sequence[str]) -> None:
        limit = 0.0 if self.config.on_error == "stop" else self.config.max_failed_fraction
        if bad and bad > limit * asked:
            why = f"reward.max_failed_fraction={limit:g}" if self.config.on_error != "stop" else "reward.on_error=stop"
            raise RewardError(
                f"The reward function failed for {bad} of {asked} responses ({why}).",
                f"the first: {reasons[0]}",
                "correct the function; a response that cannot be scored may return None",
            )


def _reward(entry: RewardFunctionConfig, decode: Decode | None, sandbox: SandboxConfig, pool: Pool | None) -> Reward:
    if entry.path is not None:
        function = load_function(entry.path, entry.name, entry.kwargs)
        return FunctionReward(function, Target(entry.name, str(function.file)), entry.kwargs, decode, pool)
    assert entry.rule is not None
    return RuleReward(None if entry.rule == "auto" else rule_named(entry.rule), entry.kwargs, sandbox, pool)


def combined(scores: Mapping[str, Score], weights: Mapping[str, float]) -> Score:
    """One score of several: the weighted sum of those that are numbers.

    A reward that said None does not count, nor one of weight 0. Where another failed or is invalid the sum is unknown,
    and the row unscored. Extras are each score under its reward's name and what else it said under ``<name>/<key>``;
    ``acc, pred, answer`` also under these names, from the first reward that has them.
    """
    extras: dict[str, Any] = {}
    for name, score in scores.items():
        extras[name] = score.value
        extras |= {f"{name}/{key}": value for key, value in score.extras.items()}
    for key in MEANINGFUL:
        own = [score.extras[key] for score in scores.values() if score.extras.get(key) is not None]
        extras |= {key: own[0]} if own else {}
    for name, score in scores.items():
        if score.reason is not None and weights[name]:
            return Score(None, score.outcome, extras, f"{name}: {score.reason}")
    values = [weights[name] * one.value for name, one in scores.items() if one.value is not None and weights[name]]
    seconds = sum(score.seconds for score in scores.values())
    return replace(check_result(sum(values) if values else None), extras=extras, seconds=seconds)


def place_scores(values: Sequence[float | None], response_mask: torch.Tensor) -> torch.Tensor:
    """``(B, R)`` float32: each value on the last True position of its row, zero elsewhere and for None.

    A row without a True position must have None: there is no token that could bear its score.
    """
    for row, (value, bears) in enumerate(zip(values, response_mask.any(dim=1).tolist(), strict=True)):
        if value is not None and not bears:
            raise ValueError(f"row {row} has score {value} but no response token")
    return place_at_last(torch.tensor([value or 0.0 for value in values], dtype=torch.float32), response_mask)


def _keys(part: Part, rows: DataProto) -> list[Hashable]:
    """What tells a response from all others, for one of the rewards."""
    uids, indices = (rows.non_tensor_batch[name].tolist() for name in ("uid", "index"))
    return [(part.name, *row) for row in zip(uids, indices, part.reward.told(rows), strict=True)]


def _counts(prefix: str, scores: Sequence[Score]) -> dict[str, int]:
    counts = Counter(score.outcome for score in scores)
    return {f"reward/{prefix}{outcome}": counts[outcome] for outcome in get_args(Outcome)}


def _columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    # The union of all keys, sorted: neither the first sample nor their order decides what is kept.
    keys = sorted({key for score in scores for key in score.extras})
    columns: dict[str, list[Any]] = {
        "score": [score.value for score in scores],
        "reward_reason": [score.reason for score in scores],
    }
    columns |= {REWARD_EXTRA_PREFIX + key: [score.extras.get(key) for score in scores] for key in keys}
    return columns
