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
from collections.abc import Callable, Coroutine, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import torch

from verl.errors import RewardError
from verl.protocol import DataProto, check_columns
from verl.protocol.keys import REWARD_EXTRA_PREFIX
from verl.rewards.custom import accepts, describe, load_function
from verl.rewards.results import Outcome, Score, check_result
from verl.rewards.rules import Rule, by_source, rule_named

if TYPE_CHECKING:
    from verl.config import RewardConfig

ASYNC_LIMIT = 64  # async calls in flight at once


class RuleScorer:
    """Scores responses with a built-in rule (``reward.rule``) or the user's function, which wins if it is given.

    Raises:
        RewardError: the function cannot be loaded, or the rule is unknown or refuses ``reward.reward_kwargs``.
    """

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self._kwargs = dict(config.reward_kwargs)
        self._file: Path | None = None
        self._custom: Callable[..., Any] | None = None
        self._rule: Rule | None = None
        path = config.custom_reward_function.path
        if path is not None:
            self._file = Path(path).expanduser().resolve()
            self._custom = load_function(path, config.custom_reward_function.name, self._kwargs)
            self._with_extra_info = accepts(self._custom, "extra_info")
        elif config.rule != "auto":
            self._rule = self._checked(rule_named(config.rule))

    def check_sources(self, sources: Iterable[str]) -> None:
        """Refuse, before the run starts, data sources that no rule belongs to.

        Raises:
            RewardError: as :func:`by_source`.
        """
        if self._custom is None and self._rule is None:
            for source in sorted(set(sources)):
                self._checked(by_source(source))

    def score(self, batch: DataProto) -> DataProto:
        """Score every response of ``batch``.

        Args:
            batch: tensor ``response_mask`` (B, R); columns ``response_text, data_source, ground_truth, extra_info``.

        Returns:
            Tensors ``token_level_scores`` (B, R) float32 and ``scored`` (B,) bool; columns ``score`` (float or None),
            ``reward_reason`` (why a row failed or is invalid, else None) and ``reward_extra/<key>`` for every key that
            any result had (None where a row has none); ``meta_info["metrics"]`` with the counts
            ``reward/{scored, none, invalid, failed, empty}``.

        Raises:
            RewardError: the share of asked rows that failed or came back invalid is over
                ``reward.max_failed_fraction``; the first reason is quoted.
        """
        check_columns(batch, "response_mask", "response_text", "data_source", "ground_truth", "extra_info")
        mask = batch.batch["response_mask"].bool()
        scores = self.score_rows(
            has_tokens=mask.any(dim=1).tolist(),
            texts=batch.non_tensor_batch["response_text"].tolist(),
            sources=batch.non_tensor_batch["data_source"].tolist(),
            truths=batch.non_tensor_batch["ground_truth"].tolist(),
            extra_infos=batch.non_tensor_batch["extra_info"].tolist(),
        )
        counts = Counter(score.outcome for score in scores)
        reasons = [score.reason for score in scores if score.reason is not None]
        self._check_share(len(reasons), asked=len(scores) - counts["empty"], reasons=reasons)
        return DataProto.from_dict(
            tensors={
                "token_level_scores": place_scores([score.value for score in scores], mask),
                "scored": torch.tensor([score.value is not None for score in scores], dtype=torch.bool),
            },
            non_tensors=_columns(scores),
            meta_info={"metrics": {f"reward/{outcome}": counts[outcome] for outcome in get_args(Outcome)}},
        )

    def score_rows(
        self,
        has_tokens: Sequence[bool],
        texts: Sequence[str],
        sources: Sequence[str],
        truths: Sequence[Any],
        extra_infos: Sequence[dict[str, Any] | None],
    ) -> list[Score]:
        """One :class:`Score` a row, in order. Rows without a response token are not asked about."""
        calls = [
            self._call(text, source, truth, extra) if asked else None
            for asked, text, source, truth, extra in zip(has_tokens, texts, sources, truths, extra_infos, strict=True)
        ]
        if self._custom is not None and inspect.iscoroutinefunction(self._custom):
            return _run_coroutine(_gather(calls, self._file))
        return [Score(None, "empty") if call is None else self._ask(call) for call in calls]

    def _call(self, text: str, source: str, truth: Any, extra: dict[str, Any] | None) -> Callable[[], Any]:
        # A copy: what the function does to it must not reach the dataset or the other responses of the group.
        extra = copy.deepcopy(extra) if extra is not None else {}
        if self._custom is None:
            rule = self._rule or self._checked(by_source(source))
            return lambda: rule(text, truth, extra, **self._kwargs)
        arguments = {"data_source": source, "solution_str": text, "ground_truth": truth, **self._kwargs}
        if self._with_extra_info:
            arguments["extra_info"] = extra
        custom = self._custom
        return lambda: custom(**arguments)

    def _ask(self, call: Callable[[], Any]) -> Score:
        try:
            result = call()
            if inspect.isawaitable(result):  # a callable object whose call is async, or a function returning one
                result = _run_coroutine(_awaited(result))
            return check_result(result)
        except (Exception, SystemExit) as error:
            return Score(None, "failed", reason=describe(error, self._file))

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


async def _gather(calls: Sequence[Callable[[], Any] | None], file: Path | None) -> list[Score]:
    slots = asyncio.Semaphore(ASYNC_LIMIT)

    async def ask(call: Callable[[], Any] | None) -> Score:
        if call is None:
            return Score(None, "empty")
        async with slots:
            try:
                return check_result(await call())
            except (Exception, SystemExit) as error:
                return Score(None, "failed", reason=describe(error, file))

    return list(await asyncio.gather(*(ask(call) for call in calls)))


async def _awaited(result: Any) -> Any:
    return await result


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
