"""Rewards as the scorer sees them: each scores a batch of rows, by a built-in rule, a function of the user's, or a
language model that is asked to judge."""

from __future__ import annotations

import copy
import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.config import SandboxConfig
from verl.config.schema_reward import JudgeConfig
from verl.data.rows import PromptRow
from verl.errors import RewardError
from verl.models.memory import available_cores
from verl.protocol import DataProto, check_columns
from verl.rewards.code import check_sandbox, code
from verl.rewards.custom import OPENRLHF, TRL, VERL, UserFunction, accepts
from verl.rewards.pool import Pool
from verl.rewards.pool_worker import Target
from verl.rewards.results import Call, Callee, Score, answers, check_result
from verl.rewards.rules import IN_POOL, Rule, by_source

ROW_COLUMNS = ("response_text", "data_source", "ground_truth", "extra_info")  # what a reward is told of a response
BATCH_COLUMNS = ("responses", "attention_mask", "prompt_ids", "raw_prompt", "columns")  # and one that takes a batch
ALWAYS = ROW_COLUMNS[1:]  # what a function in TRL's signature finds whatever its file has

Decode = Callable[[list[int]], str]
Pending = Callable[[], list[Score]]  # waits for the scores of the rows that were begun: one a row, in order


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
    """A built-in rule; ``rule`` None: chosen by the row's data source. ``pool``: for rules whose time no input bounds;
    None: they are called here, too."""

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
            Call({"response_text": text, "ground_truth": truth, **({"extra_info": extra} if asks else {}), **options})
            for text, _, truth, extra in told
        ]
        name = rule.__name__
        callee = Callee(rule, name)
        if rule is not code:
            return _begin(self._pool if name in IN_POOL else None, Target(name), callee, made)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._sandbox.workers or min(available_cores(), 64), "reward-code")
        futures = [self._threads.submit(answers, callee, [call]) for call in made]
        return lambda: [score for future in futures for score in future.result()]

    def _checked(self, rule: Rule) -> Rule:
        refused = [name for name in self._kwargs if not accepts(rule, name)]
        if refused:
            what = f"The reward rule {rule.__name__} does not take {', '.join(refused)} of reward.reward_kwargs."
            raise RewardError(what, self._kwargs, "remove the key, or choose another rule")
        return rule


class FunctionReward(Reward):
    """A user's function in any of the three signatures, called in the ``pool`` (None: here), where ``target`` names it.
    ``decode``: token ids to text, special tokens included; OpenRLHF's signature needs it."""

    def __init__(
        self,
        function: UserFunction,
        target: Target,
        kwargs: Mapping[str, Any],
        decode: Decode | None,
        pool: Pool | None,
    ) -> None:
        self._function, self._kwargs, self._decode = function, dict(kwargs), decode
        self._target, self._pool = target, pool

    def check_rows(self, rows: Sequence[PromptRow]) -> None:
        held = {*ALWAYS, *(name for row in rows for name in {**row.extra_info, **row.columns})}
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

    def _calls(self, rows: DataProto) -> list[Call]:
        if self._function.signature is VERL:
            return [Call(self._arguments(*row)) for row in _told(rows)]
        check_columns(rows, *BATCH_COLUMNS)
        arguments = {**_batch_arguments(self._function, rows, self._decode), **self._kwargs}
        return [Call(arguments, count=len(rows))]

    def _arguments(self, text: str, source: str, truth: Any, extra: dict[str, Any]) -> dict[str, Any]:
        arguments = {"data_source": source, "solution_str": text, "ground_truth": truth, **self._kwargs}
        if self._function.takes("extra_info"):
            # A copy (a worker's is one): what the function does to it must not reach the dataset or the group's others.
            arguments["extra_info"] = copy.deepcopy(extra) if self._pool is None else extra
        return arguments


def _begin(pool: Pool | None, target: Target, callee: Callee, made: Sequence[Call]) -> Pending:
    if pool is None:
        return lambda: answers(callee, made)
    jobs = pool.submit(target, made, callee.is_async)
    return lambda: [score for found in pool.gather(jobs) for score in found]


def _told(rows: DataProto) -> Iterator[tuple[str, str, Any, dict[str, Any]]]:
    """Of each row: response, data source, ground truth, extra_info."""
    columns = (rows.non_tensor_batch[name].tolist() for name in ROW_COLUMNS)
    for text, source, truth, extra in zip(*columns, strict=True):
        yield text, source, truth, extra if extra is not None else {}


def _batch_arguments(function: UserFunction, rows: DataProto, decode: Decode | None) -> dict[str, list[Any]]:
    """Keyword arguments of one call for all rows: lists, aligned with the rows; ``decode``: token ids to text, special
    tokens included; OpenRLHF's signature needs it."""
    told = _trl(rows) if function.signature is TRL else _openrlhf(rows, decode)
    # Only what it takes is copied, and each row by itself: what the function does to a value must not reach the dataset
    # or the other responses of the group.
    return {name: [copy.deepcopy(value) for value in told[name]] for name in told if function.takes(name)}


def _trl(rows: DataProto) -> dict[str, list[Any]]:
    columns, tensors = rows.non_tensor_batch, rows.batch
    prompts, texts = columns["raw_prompt"].tolist(), columns["response_text"].tolist()
    responses = tensors["responses"]
    lengths = tensors["attention_mask"][:, -responses.shape[1] :].sum(1).tolist()
    always = {name: columns[name].tolist() for name in ALWAYS}
    own = [
        {**(extra or {}), **dict(zip(always, row, strict=True)), **further}
        for extra, further, *row in zip(columns["extra_info"], columns["columns"], *always.values(), strict=True)
    ]
    return {
        **{name: [row.get(name) for row in own] for name in dict.fromkeys(name for row in own for name in row)},
        "prompts": prompts,
        "completions": [
            text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]
            for prompt, text in zip(prompts, texts, strict=True)
        ],
        "completion_ids": [ids[:length].tolist() for ids, length in zip(responses, lengths, strict=True)],
    }


def _openrlhf(rows: DataProto, decode: Decode | None) -> dict[str, list[Any]]:
    assert decode is not None, "OpenRLHF's signature needs a tokenizer"
    columns = rows.non_tensor_batch
    prompts = [decode([int(token) for token in ids]) for ids in columns["prompt_ids"]]
    queries = [prompt + text for prompt, text in zip(prompts, columns["response_text"], strict=True)]
    return dict(zip(OPENRLHF.given, (queries, prompts, columns["ground_truth"].tolist()), strict=True))


AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses that another try may mend
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a further try: doubled from one to the next
PLACES = re.compile(r"\{(prompt|response|ground_truth)\}")
SHOWN = 200  # characters of an answer in a reason


class Judge(Reward):
    """A language model behind an OpenAI-compatible endpoint: asked about each response, ``max_concurrency`` at a time,
    and a number is read out. No number, or no answer, is a counted failure, never a zero. Raises RewardError: the
    environment variable with the key is not set."""

    def __init__(self, config: JudgeConfig, sleep: Callable[[float], None] = time.sleep) -> None:
        assert config.base_url is not None
        self._config, self._sleep = config, sleep
        self._url = config.base_url.rstrip("/") + "/chat/completions"
        self._pattern = re.compile(config.pattern)
        self._headers = {"Content-Type": "application/json"}
        if config.api_key_env is not None:
            if not os.environ.get(config.api_key_env):
                fix = f"export {config.api_key_env}=..., or set reward.judge.api_key_env=null"
                raise RewardError("The environment variable with the judge's key is not set.", config.api_key_env, fix)
            self._headers["Authorization"] = f"Bearer {os.environ[config.api_key_env]}"
        self._turn, self._next_start = threading.Lock(), 0.0

    def begin(self, rows: DataProto) -> Pending:
        check_columns(rows, *ROW_COLUMNS, "raw_prompt")
        columns = rows.non_tensor_batch
        told = zip(columns["raw_prompt"], columns["response_text"], columns["ground_truth"], strict=True)
        if self._threads is None:
            self._threads = ThreadPoolExecutor(self._config.max_concurrency, "judge")
        asked = [self._threads.submit(self._judge, *row) for row in told]
        return lambda: [future.result() for future in asked]

    def _judge(self, prompt: Any, response: str, truth: Any) -> Score:
        told = {"prompt": as_text(prompt), "response": response, "ground_truth": str(truth)}
        # One pass: braces inside a prompt or response stay what they are.
        question = PLACES.sub(lambda match: told[match[1]], self._config.prompt)
        try:
            answer = self._asked(question)
        except _FailedError as error:
            return Score(None, "failed", reason=f"judge: {error}")
        found = self._pattern.findall(answer)
        said = answer if len(answer) <= SHOWN else f"{answer[:SHOWN]}..."
        try:
            value = float(found[-1])
        except (IndexError, TypeError, ValueError):
            return Score(None, "failed", {"judgement": said}, f"judge: no score in its answer: {said!r}")
        return check_result({"score": value, "judgement": said})

    def _asked(self, question: str) -> str:
        """The endpoint's answer, asked for again where that may help."""
        body = {
            "model": self._config.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0.0,
            "max_tokens": self._config.max_tokens,
        }
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers, method="POST")
        pause, reason = FIRST_PAUSE, ""
        for attempt in range(self._config.retries + 1):
            if attempt:
                self._sleep(min(pause, LONGEST_PAUSE))
                pause *= 2
            self._await_turn()
            try:
                with _OPENER.open(request, timeout=self._config.timeout) as reply:
                    return _content(reply.read())
            except urllib.error.HTTPError as error:
                reason = f"{self._url} answers {error.code}: {_start(error)}"
                if error.code not in AGAIN:
                    break
                asked = error.headers.get("Retry-After", "")
                pause = max(pause, float(asked)) if asked.isdigit() else pause
            except (OSError, http.client.HTTPException) as error:  # no connection, no answer in time, half an answer
                reason = f"{self._url} does not answer: {error or type(error).__name__}"
        raise _FailedError(reason)

    def _await_turn(self) -> None:
        """Wait until another request may begin (``requests_per_minute``)."""
        if self._config.requests_per_minute is None:
            return
        with self._turn:
            start = max(self._next_start, time.monotonic())
            self._next_start = start + 60.0 / self._config.requests_per_minute
        wait = start - time.monotonic()
        if wait > 0:
            self._sleep(wait)


class _FailedError(Exception):
    """No answer; its text is the reason."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """urllib would ask again without the question, and show the key to whatever place it is sent to."""

    def redirect_request(self, *_: Any) -> None:
        return None


_OPENER = urllib.request.build_opener(_NoRedirects)


def _content(reply: bytes) -> str:
    try:
        content = json.loads(reply)["choices"][0]["message"]["content"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise _FailedError(f"its answer is no chat completion: {reply[:SHOWN].decode(errors='replace')!r}") from error
    return content if isinstance(content, str) else ""


def _start(error: urllib.error.HTTPError) -> str:
    try:
        return error.read(SHOWN).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return str(error.reason)


def as_text(prompt: Any) -> str:
    """A prompt for a reader: text as it is, of messages each with its role (a lone user's message without)."""
    if isinstance(prompt, str):
        return prompt
    if len(prompt) == 1:
        return str(prompt[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)
