"""A generative judge against a local server that answers, fails, is busy, is slow and talks nonsense."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from verl.config import build_config
from verl.config.schema_reward import JudgeConfig, RewardConfig
from verl.errors import ConfigError, RewardError
from verl.protocol import DataProto
from verl.rewards.functions import Judge, as_text
from verl.rewards.scorer import RuleScorer

Answer = Callable[[dict[str, Any], int], tuple[int, Any]]  # of a request and its number: status and content


class Server:
    """An OpenAI-compatible endpoint whose every answer a test decides."""

    def __init__(self) -> None:
        self.answer: Answer = lambda body, number: (200, "Score: 5")
        self.headers: dict[str, str] = {}
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.most_at_once = self._at_once = 0
        server, lock = self, threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    number = len(server.requests)
                    server.requests.append(body | {"path": self.path})
                    server.keys.append(self.headers["Authorization"])
                    server._at_once += 1
                    server.most_at_once = max(server.most_at_once, server._at_once)
                status, content = server.answer(body, number)
                with lock:
                    server._at_once -= 1
                reply = {"choices": [{"message": {"content": content}}]} if isinstance(content, str) else content
                data = json.dumps(reply).encode()
                self.send_response(status)
                for name, value in {"Content-Length": str(len(data)), **server.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                with contextlib.suppress(BrokenPipeError):  # the judge had waited long enough
                    self.wfile.write(data)

            def do_GET(self) -> None:
                server.keys.append(self.headers["Authorization"])

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}/v1"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


def batch_of(responses: list[str]) -> DataProto:
    count = len(responses)
    return DataProto.from_dict(
        tensors={"response_mask": torch.ones(count, 1, dtype=torch.bool)},
        non_tensors={
            "response_text": responses,
            "raw_prompt": [[{"role": "user", "content": "What is {response}?"}]] * count,
            "data_source": ["x"] * count,
            "ground_truth": [4] * count,
            "extra_info": [{}] * count,
        },
        meta_info={},
    )


def judge(server: Server, waits: list[float] | None = None, **settings: Any) -> Judge:
    config = JudgeConfig(base_url=server.url, **settings)
    return Judge(config, (waits if waits is not None else []).append)


def test_it_is_asked_and_its_number_is_read(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.answer = lambda body, _: (200, "First Score: 1, no:\nScore: -2.5" if "RIGHT" in str(body) else "Score: 7")
    asked = judge(server, model="wise", api_key_env="JUDGE_KEY", prompt="Q {prompt} A {response} T {ground_truth}")
    scores = asked.score(batch_of(["RIGHT", "{prompt}"]))
    assert [score.value for score in scores] == [-2.5, 7.0]
    assert scores[0].extras == {"judgement": "First Score: 1, no:\nScore: -2.5"}
    by_text = {request["messages"][0]["content"]: request for request in server.requests}
    # Braces of a prompt or a response are no places of the template.
    assert set(by_text) == {"Q What is {response}? A RIGHT T 4", "Q What is {response}? A {prompt} T 4"}
    request = server.requests[0]
    assert (request["path"], request["model"], request["temperature"]) == ("/v1/chat/completions", "wise", 0.0)
    assert server.keys[0] == "Bearer secret"


@pytest.mark.parametrize(
    ("status", "content", "reason"),
    [
        (200, "I like it.", "no score in its answer: 'I like it.'"),
        (200, {"error": "no"}, "its answer is no chat completion"),
        (200, {"choices": [{"message": {"content": None}}]}, "no score in its answer: ''"),
        (401, {"error": "who are you"}, "answers 401"),
    ],
)
def test_what_is_no_score_is_a_failure_and_asked_once(server: Server, status: int, content: Any, reason: str) -> None:
    server.answer = lambda body, number: (status, content)
    (score,) = judge(server).score(batch_of(["x"]))
    assert (score.value, score.outcome) == (None, "failed") and reason in str(score.reason)
    assert len(server.requests) == 1


def test_the_key_is_not_shown_to_where_an_endpoint_points(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    elsewhere = Server()
    server.headers = {"Location": f"{elsewhere.url}/chat/completions"}
    for status in (302, 307):
        server.answer = lambda body, number, status=status: (status, {})  # type: ignore[misc]
        (score,) = judge(server, api_key_env="JUDGE_KEY").score(batch_of(["x"]))
        assert score.outcome == "failed" and f"answers {status}" in str(score.reason)
    elsewhere.close()
    assert (len(server.requests), elsewhere.keys) == (2, [])


def test_a_busy_endpoint_is_asked_again(server: Server) -> None:
    server.headers = {"Retry-After": "3"}
    server.answer = lambda body, number: (429, {}) if number < 2 else (200, "Score: 4")
    waits: list[float] = []
    (score,) = judge(server, waits).score(batch_of(["x"]))
    assert score.value == 4.0 and waits == [3.0, 6.0]
    server.answer = lambda body, number: (503, {})
    (score,) = judge(server, retries=1).score(batch_of(["x"]))
    assert score.outcome == "failed" and "answers 503" in str(score.reason)
    assert len(server.requests) == 5


def test_a_slow_endpoint_and_none_at_all_are_failures(server: Server) -> None:
    def slow(body: dict[str, Any], number: int) -> tuple[int, Any]:
        time.sleep(0.4)
        return 200, "Score: 1"

    server.answer = slow
    began = time.monotonic()
    (score,) = judge(server, timeout=0.1, retries=0).score(batch_of(["x"]))
    assert score.outcome == "failed" and "does not answer" in str(score.reason) and time.monotonic() - began < 0.35
    gone = Judge(JudgeConfig(base_url="http://127.0.0.1:1/v1", retries=0))
    assert gone.score(batch_of(["x"]))[0].outcome == "failed"


def test_no_more_at_once_and_no_faster_than_allowed(server: Server) -> None:
    def takes_a_while(body: dict[str, Any], number: int) -> tuple[int, Any]:
        time.sleep(0.03)
        return 200, "Score: 1"

    server.answer = takes_a_while
    assert len(judge(server, max_concurrency=3).score(batch_of(["x"] * 9))) == 9
    assert server.most_at_once == 3
    waits: list[float] = []
    judge(server, waits, requests_per_minute=60, max_concurrency=1).score(batch_of(["x"] * 3))
    assert len(waits) == 2 and 0.8 < waits[0] <= 1.0 and 1.7 < waits[1] <= 2.0  # nobody waits here, so they add up


def test_alone_and_beside_a_rule(server: Server) -> None:
    server.answer = lambda body, _: (200, "Score: 8" if "[Answer]\n4\n" in body["messages"][0]["content"] else "hm")
    alone = RuleScorer(RewardConfig(judge={"base_url": server.url}))
    found = alone.score(batch_of(["4", "5"]))
    assert found.non_tensor_batch["score"].tolist() == [8.0, None]
    assert found.meta_info["metrics"]["reward/failed"] == 1
    both = RuleScorer(RewardConfig(rule="exact_match", judge={"base_url": server.url, "weight": 0.5}))
    found = both.score(batch_of(["4", "4", "x"]))
    assert found.non_tensor_batch["score"].tolist() == [5.0, 5.0, None]
    assert found.non_tensor_batch["reward_extra/judge"].tolist() == [8.0, 8.0, None]
    assert found.non_tensor_batch["reward_extra/function"].tolist() == [1.0, 1.0, 0.0]


def test_settings_that_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    for judge_settings, message in (
        ({"base_url": "localhost:8000"}, "is no web address"),
        ({"pattern": "score"}, "has 0 groups"),
        ({"pattern": "("}, "is no regular expression"),
        ({"prompt": "hello"}, "does not hold {response}"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_config({"data": {"train_files": "x"}, "model": {"path": "y"}, "reward": {"judge": judge_settings}})
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(RewardError, match="the judge's key is not set"):
        Judge(JudgeConfig(base_url="http://localhost/v1", api_key_env="NO_SUCH_KEY"))


def test_a_prompt_for_a_reader() -> None:
    assert as_text("plain") == as_text([{"role": "user", "content": "plain"}]) == "plain"
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    assert as_text(turns) == "system: Be brief.\n\nuser: Hi"
