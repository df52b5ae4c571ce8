"""Rewards as the scorer sees them: each scores a batch of rows, by a built-in rule or by a function of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.config import SandboxConfig
from verl.data.rows import PromptRow
from verl.errors import RewardError
from verl.models.memory import available_cores
from verl.protocol import DataProto, check_columns
from verl.rewards import batched, calls
from verl.rewards.code import check_sandbox, code
from verl.rewards.custom import VERL, UserFunction, accepts
from verl.rewards.pool import Pool
from verl.rewards.pool_worker import Target
from verl.rewards.results import Score
from verl.rewards.rules import IN_POOL, Rule, by_source

ROW_COLUMNS = ("response_text", "data_source", "ground_truth", "extra_info")  # what a reward is told of a response


Pending = Callable[[], list[Score]]
"""Waits for the scores of the rows that were begun: one a row, in order."""


class Reward:
    """Something that scores a batch of rows. This one stands for a reward model where none is loaded: in the checks
    before a run."""

    _threads: ThreadPoolExecutor | None = None  # that work on what was begun

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        """Refuse, before a run starts, rows of a dataset that cannot be scored. Raises RewardError."""

    def score(self, rows: DataProto) -> list[Score]:
        """One :class:`Score` a row, in order.

        Args:
            rows: columns ``ROW_COLUMNS``, and whatever else a batch has after rollout; every row has a response token.
        """
        pending = self.begin(rows)
        if pending is None:
            raise RewardError("The reward model is not loaded here.", fix="score in the worker of a run")
        return pending()

    def begin(self, rows: DataProto) -> Pending | None:
        """Begin to score some rows of a batch, and return at once.

        None: it looks at a batch as a whole, or has nothing that could work meanwhile.

        Args:
            rows: columns ``ROW_COLUMNS, raw_prompt, prompt_ids``; tensors ``responses`` and their ``attention_mask``.
        """
        return None

    def told(self, rows: DataProto) -> list[Hashable]:
        """What it reads of each response: the score of another that is the same there is the same."""
        return rows.non_tensor_batch["response_text"].tolist()

    def close(self) -> None:
        """Give up what was begun."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None


class RuleReward(Reward):
    """A built-in rule.

    Args:
        rule: None: chosen by the row's data source.
        sandbox: where the rule ``code`` runs programs.
        pool: for rules whose time no input bounds; None: they are called here, too.
    """

    def __init__(self, rule: Rule | None, kwargs: Mapping[str, Any], sandbox: SandboxConfig, pool: Pool | None) -> None:
        self._rule, self._kwargs, self._sandbox, self._pool = rule, dict(kwargs), sandbox, pool
        if rule is not None:
            self._checked(rule)

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        rules = {self._rule or self._checked(by_source(source)) for source in sorted({row.data_source for row in rows})}
        if code in rules:
            check_sandbox(self._sandbox)

    def begin(self, rows: DataProto) -> Pending:
        told = list(_told(rows))
        places: dict[Rule, list[int]] = {}
        for i, (_, source, _, _) in enumerate(told):
            places.setdefault(self._rule or self._checked(by_source(source)), []).append(i)
        pending = [self._begun(rule, [told[i] for i in own]) for rule, own in places.items()]

        def wait() -> list[Score]:
            scores: dict[int, Score] = {}
            for own, found in zip(places.values(), pending, strict=True):
                scores.update(zip(own, found(), strict=True))
            return [scores[i] for i in range(len(told))]

        return wait

    def _begun(self, rule: Rule, told: Sequence[tuple[str, str, Any, dict[str, Any]]]) -> Pending:
        options = {**self._kwargs, "sandbox": self._sandbox} if rule is code else self._kwargs
        asks = accepts(rule, "extra_info")
        made = [
            calls.Call(
                {"response_text": text, "ground_truth": truth, **({"extra_info": extra} if asks else {}), **options}
            )
            for text, _, truth, extra in told
        ]
        name = rule.__name__
        callee = calls.Callee(rule, name)
        if rule is not code:
            return _begin(self._pool if name in IN_POOL else None, Target(name), callee, made)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._sandbox.workers or min(available_cores(), 64), "reward-code")
        futures = [self._threads.submit(calls.answers, callee, [call]) for call in made]
        return lambda: [score for future in futures for score in future.result()]

    def _checked(self, rule: Rule) -> Rule:
        refused = [name for name in self._kwargs if not accepts(rule, name)]
        if refused:
            what = f"The reward rule {rule.__name__} does not take {', '.join(refused)} of reward.reward_kwargs."
            raise RewardError(what, self._kwargs, "remove the key, or choose another rule")
        return rule


class FunctionReward(Reward):
    """A user's function in any of the three signatures.

    Args:
        target: how a worker finds it.
        decode: token ids to text, special tokens included; OpenRLHF's signature needs it.
        pool: None: it is called here.
    """

    def __init__(
        self,
        function: UserFunction,
        target: Target,
        kwargs: Mapping[str, Any],
        decode: batched.Decode | None,
        pool: Pool | None,
    ) -> None:
        self._function, self._kwargs, self._decode = function, dict(kwargs), decode
        self._target, self._pool = target, pool

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        held = {*batched.ALWAYS, *(name for row in rows for name in {**row.extra_info, **row.columns})}
        missing = [name for name in self._function.columns if name not in held]
        if missing:
            raise RewardError(
                f"The reward function asks for {', '.join(missing)}, and the data has no such column.",
                self._function.name,
                f"columns: {', '.join(sorted(held))}; rename the parameter, or give it a default",
            )

    def score(self, rows: DataProto) -> list[Score]:
        return _begin(self._pool, self._target, self._function, self._calls(rows))()

    def begin(self, rows: DataProto) -> Pending | None:
        # What is called here would only be in the way of what goes on meanwhile.
        if self._pool is None or self._function.signature is not VERL:
            return None
        return _begin(self._pool, self._target, self._function, self._calls(rows))

    def _calls(self, rows: DataProto) -> list[calls.Call]:
        if self._function.signature is VERL:
            return [calls.Call(self._arguments(*row)) for row in _told(rows)]
        check_columns(rows, *batched.COLUMNS)
        arguments = {**batched.arguments(self._function, rows, self._decode), **self._kwargs}
        return [calls.Call(arguments, count=len(rows))]

    def _arguments(self, text: str, source: str, truth: Any, extra: dict[str, Any]) -> dict[str, Any]:
        arguments = {"data_source": source, "solution_str": text, "ground_truth": truth, **self._kwargs}
        if self._function.takes("extra_info"):
            # A copy (a worker's is one): what the function does to it must not reach the dataset or the group's others.
            arguments["extra_info"] = copy.deepcopy(extra) if self._pool is None else extra
        return arguments


def _begin(pool: Pool | None, target: Target, callee: calls.Callee, made: Sequence[calls.Call]) -> Pending:
    if pool is None:
        return lambda: calls.answers(callee, made)
    jobs = pool.submit(target, made, callee.is_async)
    return lambda: [score for found in pool.gather(jobs) for score in found]


def _told(rows: DataProto) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Of each row: response, data source, ground truth, extra_info."""
    columns = (rows.non_tensor_batch[name].tolist() for name in ROW_COLUMNS)
    for text, source, truth, extra in zip(*columns, strict=True):
        yield text, source, truth, extra if extra is not None else {}
