"""Scores of a batch by rule or by the user's function: the reward role.

A score is placed on the last trained token of its response. A response that cannot be scored is marked so
(``scored`` false, zeros in ``token_level_scores``) and leaves every statistic; it never becomes a reward of zero.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from verl.errors import RewardError
from verl.protocol import DataProto, check_columns
from verl.protocol.keys import REWARD_EXTRA_PREFIX
from verl.rewards import batched
from verl.rewards.custom import VERL, UserFunction, accepts, check_function, load_function
from verl.rewards.results import Outcome, Score, check_batch, check_result
from verl.rewards.rules import Rule, by_source, rule_named
from verl.user_code import describe

if TYPE_CHECKING:
    from verl.config import RewardConfig
    from verl.data.rows import PromptRow

ASYNC_LIMIT = 64  # async calls in flight at once

_ROW_COLUMNS = ("response_text", "data_source", "ground_truth", "extra_info")  # what a reward is told of a response


class RuleScorer:
    """Scores responses with a built-in rule (``reward.rule``) or the user's function, which wins if it is given.

    Args:
        decode: token ids to text, special tokens included; functions in OpenRLHF's signature get the prompt from it.
        function: a function of this program, in place of what ``config`` says.

    Raises:
        RewardError: the function cannot be loaded, or the rule is unknown or refuses ``reward.reward_kwargs``.
    """

    def __init__(
        self,
        config: RewardConfig,
        decode: batched.Decode | None = None,
        function: Callable[..., Any] | None = None,
    ) -> None:
        self.config = config
        self._decode = decode
        self._kwargs = dict(config.reward_kwargs)
        self._custom: UserFunction | None = None
        self._rule: Rule | None = None
        path = config.custom_reward_function.path
        if function is not None:
            name = getattr(function, "__name__", type(function).__name__)
            self._custom = check_function(function, name, kwargs=self._kwargs)
        elif path is not None:
            self._custom = load_function(path, config.custom_reward_function.name, self._kwargs)
        elif config.rule != "auto":
            self._rule = self._checked(rule_named(config.rule))

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        """Refuse, before the run starts, rows of a dataset that cannot be scored.

        Raises:
            RewardError: no rule belongs to a data source, or no row has a column that the user's function asks for.
        """
        if self._custom is not None:
            held = {*batched.ALWAYS, *(name for row in rows for name in {**row.extra_info, **row.columns})}
            missing = [name for name in self._custom.columns if name not in held]
            if missing:
                raise RewardError(
                    f"The reward function asks for {', '.join(missing)}, and the data has no such column.",
                    self._custom.name,
                    f"columns: {', '.join(sorted(held))}; rename the parameter, or give it a default",
                )
        elif self._rule is None:
            for source in sorted({row.data_source for row in rows}):
                self._checked(by_source(source))

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
            ``reward/{scored, none, invalid, failed, empty}``.

        Raises:
            RewardError: the share of asked rows that failed or came back invalid is over
                ``reward.max_failed_fraction``; the first reason is quoted. Or a function that takes a batch did not
                return one value for each of its responses.
        """
        check_columns(batch, "response_mask", *_ROW_COLUMNS)
        mask = batch.batch["response_mask"].bool()
        asked = mask.any(dim=1)
        scores = [Score(None, "empty")] * len(batch)
        if asked.any():
            for place, score in zip(asked.nonzero().flatten().tolist(), self._ask(batch[asked]), strict=True):
                scores[place] = score
        reasons = [score.reason for score in scores if score.reason is not None]
        self._check_share(len(reasons), int(asked.sum()), reasons)
        counts = Counter(score.outcome for score in scores)
        return DataProto.from_dict(
            tensors={
                "token_level_scores": place_scores([score.value for score in scores], mask),
                "scored": torch.tensor([score.value is not None for score in scores], dtype=torch.bool),
            },
            non_tensors=_columns(scores),
            meta_info={"metrics": {f"reward/{outcome}": counts[outcome] for outcome in get_args(Outcome)}},
        )

    def _ask(self, rows: DataProto) -> list[Score]:
        """One :class:`Score` a row, in order."""
        custom = self._custom
        if custom is not None and custom.signature is not VERL:
            check_columns(rows, *batched.COLUMNS)
            return self._ask_for_all(custom, rows)
        told = [rows.non_tensor_batch[name].tolist() for name in _ROW_COLUMNS]
        calls = [self._call(*row) for row in zip(*told, strict=True)]
        if custom is not None and custom.is_async:
            return _run_coroutine(_gather(calls, custom.file))
        return [self._score_of(call) for call in calls]

    def _call(self, text: str, source: str, truth: Any, extra: dict[str, Any] | None) -> Callable[[], Any]:
        # A copy: what the function does to it must not reach the dataset or the other responses of the group.
        extra = copy.deepcopy(extra) if extra is not None else {}
        if self._custom is None:
            rule = self._rule or self._checked(by_source(source))
            return lambda: rule(text, truth, extra, **self._kwargs)
        arguments = {"data_source": source, "solution_str": text, "ground_truth": truth, **self._kwargs}
        if self._custom.takes("extra_info"):
            arguments["extra_info"] = extra
        function = self._custom.function
        return lambda: function(**arguments)

    def _score_of(self, call: Callable[[], Any]) -> Score:
        try:
            return check_result(_finished(call()))
        except (Exception, SystemExit) as error:
            return self._failure(error)

    def _ask_for_all(self, custom: UserFunction, rows: DataProto) -> list[Score]:
        given = batched.arguments(custom, rows, self._decode)
        try:
            result = _finished(custom.function(**{**given, **self._kwargs}))
        except (Exception, SystemExit) as error:
            return [self._failure(error)] * len(rows)
        return check_batch(result, len(rows), custom.name)

    def _failure(self, error: BaseException) -> Score:
        return Score(None, "failed", reason=describe(error, self._custom.file if self._custom else None))

    def _checked(self, rule: Rule) -> Rule:
        refused = [name for name in self._kwargs if not accepts(rule, name)]
        if refused:
            what = f"The reward rule {rule.__name__} does not take {', '.join(refused)} of reward.reward_kwargs."
            raise RewardError(what, self._kwargs, "remove the key, or choose another rule")
        return rule

    def _check_share(self, bad: int, asked: int, reasons: Sequence[str]) -> None:
        if bad and bad > self.config.max_failed_fraction * asked:
            raise RewardError(
                f"The reward function failed for {bad} of {asked} responses "
                f"(reward.max_failed_fraction={self.config.max_failed_fraction:g}).",
                f"the first: {reasons[0]}",
                "correct the function; a response that cannot be scored may return None",
            )


def place_scores(values: Sequence[float | None], response_mask: torch.Tensor) -> torch.Tensor:
    """``(B, R)`` float32: each value on the last True position of its row, zero elsewhere and for None.

    A row without a True position must have None: there is no token that could bear its score.
    """
    scores = torch.zeros(response_mask.shape, dtype=torch.float32)
    for i, value in enumerate(values):
        if value is not None:
            positions = response_mask[i].nonzero()
            if not len(positions):
                raise ValueError(f"row {i} has score {value} but no response token")
            scores[i, int(positions[-1])] = value
    return scores


def _columns(scores: Sequence[Score]) -> dict[str, list[Any]]:
    # The union of all keys, sorted: neither the first sample nor their order decides what is kept.
    keys = sorted({key for score in scores for key in score.extras})
    columns: dict[str, list[Any]] = {
        "score": [score.value for score in scores],
        "reward_reason": [score.reason for score in scores],
    }
    columns |= {REWARD_EXTRA_PREFIX + key: [score.extras.get(key) for score in scores] for key in keys}
    return columns


async def _gather(calls: Sequence[Callable[[], Any]], file: Path) -> list[Score]:
    slots = asyncio.Semaphore(ASYNC_LIMIT)

    async def ask(call: Callable[[], Any]) -> Score:
        async with slots:
            try:
                return check_result(await call())
            except (Exception, SystemExit) as error:
                return Score(None, "failed", reason=describe(error, file))

    return list(await asyncio.gather(*(ask(call) for call in calls)))


def _finished(result: Any) -> Any:
    """The result, awaited where it must be: an async function, or one that returns what another has to await."""

    async def awaited() -> Any:
        return await result

    return _run_coroutine(awaited()) if inspect.isawaitable(result) else result


def _run_coroutine(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, also where this thread already runs an event loop (a notebook, an async worker)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    outcome: list[Any] = []

    def work() -> None:
        try:
            outcome.append((asyncio.run(coroutine), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=work, name="reward-async")
    thread.start()
    thread.join()
    result, error = outcome[0]
    if error is not None:
        raise error
    return result
