"""A language model behind an OpenAI-compatible endpoint as a reward: it is asked to judge, and a number is read out.

What is no number is a counted failure, and so is an endpoint that does not answer: never a zero.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from verl.config.schema_reward import JudgeConfig
from verl.errors import RewardError
from verl.protocol import DataProto, check_columns
from verl.rewards.functions import ROW_COLUMNS, Pending, Reward
from verl.rewards.results import Score, check_result

AGAIN = (408, 409, 425, 429, 500, 502, 503, 504)  # statuses that another try may mend
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds before a further try: doubled from one to the next
PLACES = re.compile(r"\{(prompt|response|ground_truth)\}")
SHOWN = 200  # characters of an answer in a reason


class Judge(Reward):
    """Asks the endpoint about each response, ``max_concurrency`` at a time; a :class:`verl.rewards.functions.Reward`.

    Args:
        sleep: waits so many seconds.

    Raises:
        RewardError: the environment variable with the key is not set.
    """

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
