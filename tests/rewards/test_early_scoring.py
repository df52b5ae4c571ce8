"""Groups scored while others are still being sampled: the same scores as at once, and most of the time gone already."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_judge import server  # noqa: F401
from test_scorer import batch_of

from verl.cluster.early_scoring import EarlyScoring
from verl.config import RewardConfig
from verl.protocol import DataProto
from verl.rewards.scorer import RuleScorer
from verl.rollout.protocol import Request, Result, SamplingParams, Slot, generate

FUNCTIONS = """
import os, random, time
def note(*words):
    with open({notes!r}, "a") as file:
        print(*words, file=file)
def slow(data_source, solution_str, ground_truth, extra_info=None):
    note("slow", solution_str)
    time.sleep(0.15)
    if solution_str == "bad":
        raise ValueError("no")
    return {{"score": len(solution_str), "acc": 0.5, "drawn": random.random()}}
def whole(completions, **columns):
    note("whole", len(completions))
    return [len(completions)] * len(completions)
"""


@pytest.fixture
def scorer_of(tmp_path: Path):
    made = []
    (tmp_path / "r.py").write_text(textwrap.dedent(FUNCTIONS.format(notes=str(tmp_path / "notes"))))

    def make(*names: str, **fields) -> RuleScorer:
        functions = {name: {"path": str(tmp_path / "r.py"), "name": name} for name in names}
        made.append(RuleScorer(RewardConfig(functions=functions, num_workers=2, max_failed_fraction=1.0, **fields)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def whole_batch(groups: dict[str, list[str]], truth: str = "1") -> DataProto:
    texts = [text for group in groups.values() for text in group]
    batch = batch_of(texts, [truth] * len(texts))
    columns = {
        "uid": [uid for uid, group in groups.items() for _ in group],
        "index": [i for group in groups.values() for i in range(len(group))],
        "raw_prompt": ["p"] * len(texts),
        "prompt_ids": [[1]] * len(texts),
        "columns": [{}] * len(texts),
    }
    attention = {"attention_mask": batch.batch["response_mask"].long()}
    return batch.union(DataProto.from_dict(attention, columns))


def only(batch: DataProto, uid: str) -> DataProto:
    """A group, with what is known of it while others are sampled."""
    known = ["uid", "index", "data_source", "ground_truth", "extra_info", "raw_prompt", "response_text"]
    places = [i for i, own in enumerate(batch.non_tensor_batch["uid"]) if own == uid]
    return batch.select_idxs(places).select(batch_keys=[], non_tensor_batch_keys=known)


def stream(scorer: RuleScorer, batch: DataProto, uids: str, seconds: float) -> None:
    """Groups come in this order; then the generation goes on for so long."""
    for uid in uids:
        scorer.submit(only(batch, uid))
    time.sleep(seconds)


def same(one: DataProto, other: DataProto, but: str = "drawn") -> None:
    assert torch.equal(one.batch["token_level_scores"], other.batch["token_level_scores"])
    assert torch.equal(one.batch["scored"], other.batch["scored"])
    assert one.meta_info == other.meta_info
    assert one.non_tensor_batch.keys() == other.non_tensor_batch.keys()
    for name in one.non_tensor_batch:
        assert name.endswith(but) or one.non_tensor_batch[name].tolist() == other.non_tensor_batch[name].tolist(), name


GROUPS = {"a": ["x", "yy", "bad"], "b": ["x", "zzzz"], "c": ["late", "later"]}


@pytest.mark.parametrize("cache", [True, False])
def test_scores_are_those_at_once_and_were_made_meanwhile(scorer_of, tmp_path, cache):
    batch, scorer = whole_batch(GROUPS), scorer_of("slow", "whole", cache=cache)
    notes = tmp_path / "notes"
    scorer.score(whole_batch({"z": ["warm"]}))  # workers are there
    notes.unlink()
    stream(scorer, batch, "ba", 1.0)  # not in the batch's order
    assert sorted(notes.read_text().split()[1::2]) == sorted(["bad", "yy", "zzzz"] + ["x"] * (1 if cache else 2)), (
        "asked, each once; what looks at a batch as a whole is not yet"
    )
    start = time.monotonic()
    streamed = scorer.score(batch)
    assert time.monotonic() - start < 0.6  # of seven calls of 0.15 s by two workers, the two late ones are left
    said = notes.read_text()
    assert said.count("slow") == (6 if cache else 7) and said.count("whole 7") == 1
    same(streamed, scorer_of("slow", "whole", cache=cache).score(batch))
    assert streamed.meta_info["metrics"]["reward/slow/failed"] == 1


def test_what_was_begun_counts_for_the_very_response_only_and_once(scorer_of, tmp_path):
    batch, scorer = whole_batch(GROUPS), scorer_of("slow", cache=False)
    stream(scorer, batch, "b", 0)
    other = whole_batch({"b": ["x", "other"]})  # the same slots, sampled anew
    assert scorer.score(other).non_tensor_batch["score"].tolist() == [1.0, 5.0]
    assert scorer.score(other).non_tensor_batch["score"].tolist() == [1.0, 5.0]
    asked = (tmp_path / "notes").read_text().split()[1::2]
    assert asked.count("x") == 2 and asked.count("other") == 2 and asked.count("zzzz") <= 1


def test_retries_and_empty_rows_of_a_streamed_batch(scorer_of, tmp_path):
    batch, scorer = whole_batch(GROUPS), scorer_of("slow", on_error="retry")
    stream(scorer, batch, "abc", 0)
    batch.batch["response_mask"][0] = False
    out = scorer.score(batch)
    assert out.non_tensor_batch["score"].tolist() == [None, 2.0, None, 1.0, 4.0, 4.0, 5.0]
    assert out.meta_info["metrics"]["reward/empty"] == 1 and out.meta_info["metrics"]["reward/failed"] == 1
    assert (tmp_path / "notes").read_text().count("bad") == 3


def test_whoever_looks_late_is_no_time_out(tmp_path):
    (tmp_path / "r.py").write_text(
        "import time\ndef compute_score(data_source, solution_str, ground_truth):\n"
        "    time.sleep(0.3)\n    return {'score': 1, 'text': 'x' * 1_000_000}\n"
    )
    config = RewardConfig(custom_reward_function={"path": str(tmp_path / "r.py")}, timeout=0.6, num_workers=1)
    batch, scorer = whole_batch({"a": ["x"], "b": ["y"]}), RuleScorer(config)
    scorer.score(batch)
    batch = whole_batch({"a": ["z"], "b": ["w"]})
    stream(scorer, batch, "ab", 0)
    sum(range(60_000_000))  # keeps the interpreter, and nobody listens
    assert scorer.score(batch).non_tensor_batch["score"].tolist() == [1.0, 1.0]
    scorer.close()


def test_programs_run_meanwhile():
    truth = json.dumps({"inputs": [""], "outputs": ["1"]})
    batch = whole_batch({"a": ["import time; time.sleep(0.4); print(1)", "print(2)"], "b": ["print(1)"] * 2}, truth)
    scorer = RuleScorer(RewardConfig(rule="code", sandbox={"workers": 2}))
    stream(scorer, batch, "ab", 2.0)
    start = time.monotonic()
    streamed = scorer.score(batch)
    assert time.monotonic() - start < 0.2
    assert streamed.non_tensor_batch["score"].tolist() == [1.0, 0.0, 1.0, 1.0]
    same(streamed, RuleScorer(RewardConfig(rule="code")).score(batch))
    scorer.submit(only(batch, "a"))
    scorer.close()  # nobody waits for it: it is given up


def test_a_judge_is_asked_meanwhile(server):  # noqa: F811
    server.answer = lambda body, number: (200, "Score: 4")
    batch = whole_batch({"a": ["x", "y"]})
    scorer = RuleScorer(RewardConfig(judge={"base_url": server.url}))
    stream(scorer, batch, "a", 0.5)
    asked = len(server.requests)
    assert asked == 2
    assert scorer.score(batch).non_tensor_batch["score"].tolist() == [4.0, 4.0] and len(server.requests) == asked


class Engine:
    """Ends one response a step, in this order."""

    def __init__(self, order: list[Slot]) -> None:
        self.order, self.steps = order, 0

    def stats(self):
        return type("Stats", (), {"paused": False, "waiting": 0, "active": 0})

    def submit(self, requests: list[Request]) -> None:
        self.requests = requests

    def step(self) -> list[Result]:
        slot = self.order[self.steps]
        self.steps += 1
        ids = np.array([ord(c) for c in f"{slot.uid}{slot.index}#"], np.int32)
        trained = np.full(len(ids), slot.index != 2)
        return [Result(slot, ids, ids.astype(np.float32), trained, ids, "stop")]


class Tokenizer:
    def decode(self, ids, skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return "".join(map(chr, ids))


def test_groups_are_given_when_their_last_response_has_ended():
    slots = [Slot(uid, index) for uid in "ab" for index in (0, 1, 2, -1)]
    engine = Engine([slots[i] for i in (4, 0, 7, 5, 6, 3, 1, 2)])
    given: list[tuple[int, dict]] = []

    class Scorer:
        def submit(self, rows: DataProto) -> None:
            given.append((engine.steps, {name: values.tolist() for name, values in rows.non_tensor_batch.items()}))

    names = {"uid": ["b", "a"], "data_source": ["s", "t"], "ground_truth": ["2", "1"], "extra_info": [{}, {"k": 1}]}
    prompts = DataProto.from_dict({}, {**names, "raw_prompt": ["p", "q"], "prompt_ids": [[1], [2]]})
    requests = [Request(slot, [1], SamplingParams(8, stop=("#",))) for slot in slots]
    scorer = Scorer()
    early = EarlyScoring(scorer, Tokenizer())  # type: ignore[arg-type]
    early.expect(requests, prompts)
    assert [r.slot for r in generate(engine, requests, early.finished)] == slots  # type: ignore[arg-type]
    assert [steps for steps, _ in given] == [5, 8]
    early.expect(requests, prompts)
    early.forget(["b"])  # the batch of b is being scored: what others still tell of it changes nothing
    engine.steps = 0
    generate(engine, requests, early.finished)  # type: ignore[arg-type]
    assert [steps for steps, _ in given[2:]] == [8]
    assert given[1][1] == {
        "uid": ["a"] * 3, "data_source": ["t"] * 3, "ground_truth": ["1"] * 3, "extra_info": [{"k": 1}] * 3,
        "raw_prompt": ["q"] * 3, "prompt_ids": [[2]] * 3,
        "index": [0, -1, 1], "response_text": ["a0", "a-1", "a1"],  # no token of 2 is trained
    }  # fmt: skip
