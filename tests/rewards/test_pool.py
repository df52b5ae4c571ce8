"""Worker processes: bounded time, nothing left behind, results by sample (B119-B123, B136)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from test_scorer import batch_of

from verl.config import RewardConfig
from verl.errors import RewardError
from verl.models.memory import descendants, free_memory
from verl.rewards import pool as pool_module
from verl.rewards.scorer import RuleScorer

EVAL = """
import asyncio, os, signal, subprocess, sys, time
def spin():
    while True:
        pass
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return eval(solution_str)
"""


@pytest.fixture
def scorer_of(tmp_path: Path):
    made = []

    def make(body: str = EVAL, name: str = "compute_score", **fields) -> RuleScorer:
        path = tmp_path / f"reward_{tmp_path.name}.py"  # the name tells this test's processes from all others
        path.write_text(textwrap.dedent(body))
        settings = {"num_workers": 2, "timeout": 1.0, "max_failed_fraction": 1.0} | fields
        made.append(RuleScorer(RewardConfig(custom_reward_function={"path": str(path), "name": name}, **settings)))
        return made[-1]

    yield make
    for scorer in made:
        scorer.close()


def scores(scorer: RuleScorer, texts, **columns) -> list:
    return scorer.score(batch_of(texts, **columns)).non_tensor_batch["score"].tolist()


def processes(*words: str) -> set[int]:
    """Processes whose command line has one of these words."""
    found = set()
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if folder.name.isdigit() and any(word in line for word in words):
            found.add(int(folder.name))
    return found


def children(process: int) -> set[int]:
    """Of a process, and theirs."""
    return set(descendants(process))


def gone(ids: set[int], seconds: float = 3.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(Path(f"/proc/{i}/stat").exists() and not _is_zombie(i) for i in ids):
            return True
        time.sleep(0.02)
    return False


def _is_zombie(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_b120_b123_one_call_that_does_not_stop_costs_its_limit_and_no_more(scorer_of):
    scorer = scorer_of()
    assert scores(scorer, ["1"]) == [1.0]
    texts = [str(i) for i in range(16)]
    for odd in ("spin()", "time.sleep(5)"):  # B122: a busy loop too
        start = time.monotonic()
        out = scorer.score(batch_of([*texts[:8], odd, *texts[8:]]))
        assert 0.9 < time.monotonic() - start < 2.5
        assert out.non_tensor_batch["score"].tolist() == [*map(float, range(8)), None, *map(float, range(8, 16))]
        assert out.non_tensor_batch["reward_reason"][8] == "no answer within reward.timeout=1 s"
        assert out.meta_info["metrics"]["reward/failed"] == 1


def test_b121_a_pool_of_two_survives_four_that_spin_and_leaves_nothing(scorer_of):
    scorer = scorer_of(timeout=0.3)
    before = children(os.getpid())
    assert scores(scorer, ["spin()", "1 + 0 * spin()", "spin() or 1", "[spin()]", "1", "2", "3", "4"])[4:] == [
        1,
        2,
        3,
        4,
    ]
    started = children(os.getpid()) - before
    assert 2 <= len(started) <= 3  # the one that forks, and its workers
    scorer.close()
    assert gone(started)


def test_only_the_calls_own_time_counts(scorer_of):
    # Ten of 0.2 s in one worker, one after the other; waiting in line is no fault of theirs.
    scorer = scorer_of(num_workers=1, timeout=0.5)
    assert scores(scorer, [f"time.sleep(0.2) or {i}" for i in range(6)]) == [0, 1, 2, 3, 4, 5]


def test_a_worker_that_dies_fails_its_call_alone(scorer_of):
    scorer = scorer_of(num_workers=1)
    texts = ["1", "os._exit(0)", "2", "os.kill(os.getpid(), 9)", "3", "sys.exit()", "4"]
    out = scorer.score(batch_of(texts))
    assert out.non_tensor_batch["score"].tolist() == [1.0, None, 2.0, None, 3.0, None, 4.0]
    reasons = out.non_tensor_batch["reward_reason"]
    assert "worker ended in the middle" in reasons[1] and reasons[3] == reasons[1] and "SystemExit" in reasons[5]


def test_what_a_call_starts_ends_with_its_worker(scorer_of):
    seconds = f"3{os.getpid() % 10000:04d}.25"  # tells these sleeps from all others, and is no process id
    popen = f"subprocess.Popen(['sleep', '{seconds}'])"
    apart = f"subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)"
    scorer = scorer_of()
    assert scores(scorer, [f"{popen} and time.sleep(9)", f"{apart} and time.sleep(9)", "1"]) == [None, None, 1.0]
    assert gone(processes(seconds) - {os.getpid()})


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_a_run_that_is_killed(tmp_path, number):
    (tmp_path / "r.py").write_text(EVAL)
    program = f"""
        import sys; sys.path[:] = {sys.path!r}
        from verl.rewards.results import Call
        from verl.rewards.pool import Pool
        from verl.rewards.pool_worker import Target
        pool, target = Pool(2, 1, 60.0, True), Target("compute_score", {str(tmp_path / "r.py")!r})
        texts = ["1", *["spin()"] * 4]
        calls = [Call({{"data_source": "", "ground_truth": i, "solution_str": t}}) for i, t in enumerate(texts)]
        pool.gather(pool.submit(target, calls[:1]))
        print("ready", flush=True)
        pool.gather(pool.submit(target, calls[1:]))
    """
    run = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE)
    assert run.stdout is not None and run.stdout.readline() == b"ready\n"
    time.sleep(0.3)
    started = children(run.pid)
    assert len(started) >= 2
    run.send_signal(number)
    run.wait()
    run.stdout.close()
    assert gone(started)


def test_workers_come_with_the_queue_and_go_without_one(scorer_of, monkeypatch):
    monkeypatch.setattr(pool_module, "IDLE_SECONDS", 0.3)
    scorer = scorer_of(num_workers=3, min_workers=1)
    before = children(os.getpid())
    scores(scorer, ["1"])
    few = children(os.getpid()) - before
    scores(scorer, [f"time.sleep(0.1) or {i}" for i in range(16)])
    many = children(os.getpid()) - before
    assert len(few) == 2 and len(many) == 4
    assert gone(many - few)
    assert scores(scorer, ["2"]) == [2.0] and children(os.getpid()) - before == few


def test_equal_calls_are_made_once_and_remembered(scorer_of, tmp_path):
    body = f"""
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        with open({str(tmp_path / "calls")!r}, "a") as file:
            file.write(solution_str + "\\n")
        if solution_str == "bad":
            raise ValueError("no")
        return len(ground_truth)
    """
    scorer, calls = scorer_of(body), tmp_path / "calls"
    assert scores(scorer, ["a", "a", "b", "bad"], truths=["xy", "xy", "xy", "x"]) == [2, 2, 2, None]
    assert sorted(calls.read_text().split()) == ["a", "b", "bad"]
    assert scores(scorer, ["a", "a", "bad"], truths=["xy", "x", "x"]) == [2, 1, None]
    assert sorted(calls.read_text().split()) == ["a", "a", "b", "bad", "bad"]  # another truth; failures again
    scores(scorer_of(body, cache=False), ["c", "c"])
    assert calls.read_text().split().count("c") == 2


ASYNC = """
import asyncio
async def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "slow":
        await asyncio.sleep(9)
    if solution_str == "spin":
        while True:
            pass
    await asyncio.sleep(0.3)
    return float(solution_str)
"""


def test_async_calls_overlap_and_each_has_its_limit(scorer_of):
    scorer, texts = scorer_of(ASYNC), [str(i) for i in range(20)]
    start = time.monotonic()
    assert scores(scorer, [*texts, "slow"]) == [*map(float, range(20)), None]
    assert time.monotonic() - start < 5.5  # one after the other: 6 at least


def test_an_async_call_that_blocks_the_loop_is_found_and_the_others_are_scored(scorer_of):
    scorer = scorer_of(ASYNC, timeout=0.5)
    assert scores(scorer, ["1", "spin", "2"]) == [1.0, None, 2.0]


def test_a_batch_function_is_called_in_a_worker_and_its_faults_are_told(scorer_of):
    body = """
    import os
    def reward(completions, **columns):
        if completions == ["spin"]:
            while True:
                pass
        return {"1": [1.0, os.getpid()], "short": [1.0]}[completions[0]]
    """

    def batch(texts):
        rows = batch_of(texts)
        rows.non_tensor_batch |= dict.fromkeys(("raw_prompt", "prompt_ids"), rows.non_tensor_batch["ground_truth"])
        rows.non_tensor_batch["columns"] = rows.non_tensor_batch["extra_info"]
        rows.batch["attention_mask"] = rows.batch["response_mask"].long()
        return rows

    scorer = scorer_of(body, name="reward")
    first, process = scorer.score(batch(["1", "2"])).non_tensor_batch["score"]
    assert first == 1.0 and process != os.getpid()
    with pytest.raises(RewardError, match="returned 1 values for 2 responses"):
        scorer.score(batch(["short", "2"]))
    assert "no answer" in scorer.score(batch(["spin"])).non_tensor_batch["reward_reason"][0]


def test_extras_of_any_kind_come_back_as_plain_values(scorer_of):
    body = """
    import numpy as np
    class Own:
        def __repr__(self): return "own"
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": 1, "a": np.arange(2), "b": Own(), "c": {1: (np.float32(.5), None)}, "text": "x\\ud835"}
    """
    columns = scorer_of(body).score(batch_of(["1"])).non_tensor_batch
    found = {name.removeprefix("reward_extra/"): values[0] for name, values in columns.items() if "extra/" in name}
    assert found == {"a": [0, 1], "b": "own", "c": {1: (0.5, None)}, "text": "x\ud835"}


def test_what_cannot_come_back_fails_its_call_alone(scorer_of, monkeypatch):
    body = """
    class Odd:
        def __repr__(self): raise ValueError("no name")
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        deep = []
        for _ in range(9000):
            deep = [deep]
        return {"score": 1, "x": {"long": 10**5000, "deep": deep, "odd": Odd(), "right": "x"}[solution_str]}
    """
    out = scorer_of(body).score(batch_of(["long", "right", "deep", "odd"])).non_tensor_batch
    assert out["score"].tolist() == [None, 1.0, None, None]
    assert all("cannot be sent to the run" in out["reward_reason"][i] for i in (0, 2, 3))


FORGER = """
import glob, json, os, stat, struct
def say(text, length=None):
    for name in glob.glob("/proc/self/fd/*"):
        try:
            if stat.S_ISSOCK(os.stat(name).st_mode):
                length = len(text) if length is None else length
                os.write(int(name.rpartition("/")[2]), struct.pack("!I", length) + text)
        except OSError:
            pass
def spin():
    while True:
        pass
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return eval(solution_str)
"""


@pytest.mark.parametrize(
    "forged",
    [
        "say(b'(S\\'x\\'\\ni__builtin__\\nexit\\n.')",  # a pickle
        "say(b'[]')", "say(b'[\"begun\"]')", "say(b'x', 2**32 - 1)", "say(b'[9, []]')", "say(b'[' * 100000)",
        "say(b'[0, [[NaN, \"scored\", {}, null, 0.0]]]')", "say(b'[0, [[1.0, \"none\", {}, null, 0.0]]]')",
        "say(b'[0, [[1.0, \"scored\", {}, null, 0.0], [1.0, \"scored\", {}, null, 0.0]]]')",
    ],
)  # fmt: skip
def test_a_forged_answer_costs_its_worker_and_no_more(scorer_of, forged):
    out = scorer_of(FORGER, num_workers=1).score(batch_of(["1", f"{forged} or spin()", "2"])).non_tensor_batch
    assert out["score"].tolist() == [1.0, None, 2.0] and "what is no answer" in out["reward_reason"][1]


def test_half_an_answer_is_not_waited_for(scorer_of):
    began = time.monotonic()
    out = scorer_of(FORGER, timeout=0.5).score(batch_of(["1", "say(b'[', 100) or spin()", "2"])).non_tensor_batch
    assert out["score"].tolist() == [1.0, None, 2.0] and "no answer within" in out["reward_reason"][1]
    assert time.monotonic() - began < pool_module.SEND_SECONDS / 2


def test_memory_is_bounded_and_more_fails_its_call_alone(scorer_of):
    out = scorer_of(worker_memory_gb=0.5).score(batch_of(["1", "len(bytearray(10**9))", "2"])).non_tensor_batch
    assert out["score"].tolist() == [1.0, None, 2.0]
    reason = out["reward_reason"][1]
    assert reason.startswith("MemoryError (reward_") and "0.5 GiB (reward.worker_memory_gb)" in reason
    texts = ["int(open('/proc/self/oom_score_adj').read())"]
    texts.append("__import__('resource').getrlimit(__import__('resource').RLIMIT_DATA)[0] / 2**30")
    last, limit = scores(scorer_of(), texts)
    assert last == 1000 and 0 < limit <= max(4, free_memory() / 2**30)


def test_workers_have_one_thread_and_no_torch(scorer_of):
    scorer = scorer_of()
    assert scores(scorer, ["int(os.environ['OMP_NUM_THREADS'])", "float('torch' in sys.modules)"]) == [1.0, 0.0]


def test_a_nursery_that_was_killed_is_replaced(scorer_of):
    scorer = scorer_of()
    before = children(os.getpid())
    assert scores(scorer, ["1"]) == [1.0]
    started = children(os.getpid()) - before
    for process in started:
        os.kill(process, signal.SIGKILL)
    assert gone(started)
    assert scores(scorer, ["2", "3"]) == [2.0, 3.0]


def test_what_cannot_be_sent_is_refused_with_the_way_out(scorer_of):
    with pytest.raises(RewardError, match="num_workers=0"):
        scores(scorer_of(), ["1"], extras=[{"f": lambda: 1}])


@pytest.mark.parametrize("workers", [0, 2])
def test_b119_b136_one_third_is_right_from_any_thread_and_loop_fifty_times(workers):
    scorer = RuleScorer(RewardConfig(rule="math", num_workers=workers, cache=False))
    found = []

    def score() -> None:
        found.extend(scores(scorer, [r"\boxed{\frac{1}{3}}", r"\boxed{(x+1)^2}"], truths=["1/3", "x^2 + 2x + 1"]))

    async def in_a_loop() -> None:
        score()

    for _ in range(50):
        score()
    thread = threading.Thread(target=score)
    thread.start()
    thread.join()
    asyncio.run(in_a_loop())
    scorer.close()
    assert found == [1.0] * 104


def test_words_to_a_thread_that_cannot_read_them_wait_for_nothing():
    pool = pool_module.Pool(1, 1, 1.0, cached=False)
    for _ in range(5000):
        pool._wake()
    pool.close()
