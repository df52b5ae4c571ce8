"""The worker over Ray: threads, tensors through the object store, errors, and who may speak to it. One Ray for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl_process import ROOT

CORES = len(os.sched_getaffinity(0))
THREADS = min(2, CORES)

SCRIPT = """
import json, os, subprocess, sys
from pathlib import Path
from verl.config import build_config
from verl.cluster.threads import set_environment

tree = json.loads(sys.argv[1])
config = build_config(tree)
set_environment(1)  # as the command line does for a run over Ray

import numpy as np
import ray
import torch
from verl.cluster.ray_runtime import _answers_anybody, _require_listener
from verl.cluster.start import start_workers
from verl.errors import VerlError
from verl.protocol import DataProto

found = {"controller_threads": torch.get_num_threads()}
lines, events = [], []
with start_workers(config, lines.append, None, lambda *event: events.append(event)) as roles:
    worker = roles.policy.worker
    found["parity"] = lines[-1]
    call = lambda work: ray.get(worker._actors[0].__ray_call__.remote(work), timeout=60)
    found["worker_threads"] = call(lambda self: __import__("torch").get_num_threads())
    found["worker_omp"] = call(lambda self: __import__("os").environ["OMP_NUM_THREADS"])
    found["worker_cbwr"] = call(lambda self: __import__("os").environ["MKL_CBWR"])
    found["same_process"] = call(lambda self: __import__("os").getpid()) == os.getpid()
    found["cpus"] = ray.cluster_resources()["CPU"]

    sent = DataProto.from_dict(
        {"x": torch.arange(500_000.0).view(1000, 500), "flag": torch.ones(1000, dtype=torch.bool)},
        {"uid": [str(i) for i in range(1000)]},
        {"step": 3},
    )
    reference = ray.put(sent)
    one, other = ray.get(reference), ray.get(reference)
    found["equal"] = one.equal(sent) and other.equal(sent)
    found["shared_memory"] = one.batch["x"].data_ptr() == other.batch["x"].data_ptr()
    found["own_memory"] = one.writable().batch["x"].data_ptr() != one.batch["x"].data_ptr()
    half = torch.arange(300_000).view(1000, 300).bfloat16()
    found["bfloat16"] = bool(torch.equal(ray.get(ray.put(DataProto.from_dict({"h": half}))).batch["h"], half))

    try:
        worker.load("/no/such/checkpoint")
    except VerlError as error:
        found["error"] = [type(error).__name__, error.what]
    try:
        call(lambda self: 1 / 0)
    except ZeroDivisionError:
        found["foreign_error"] = True

    worker._answers("dream", [worker._actors[0].__ray_call__.remote(lambda self: __import__("time").sleep(2.5))])
    found["stalled"] = events
    try:
        worker._answers("divide", [worker._actors[0].__ray_call__.remote(lambda self: 1 / 0)])
    except RuntimeError as error:
        found["defect"] = [str(error), str(error.__cause__)]

    probe = Path(sys.argv[2])
    address = ray.get_runtime_context().gcs_address
    found["answers_anybody"] = _answers_anybody(address)
    held = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith("RAY_AUTH_")}
    try:
        _require_listener(address)
    except VerlError as error:
        found["joined without"] = [str(error), error.bad_input]
    os.environ.update(held)
    _require_listener(address)
    bare = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")} | {"HOME": str(probe.parent)}
    clients = {}
    for name, token in (("without", None), ("wrong", "0" * 64), ("right", os.environ["RAY_AUTH_TOKEN"])):
        extra = {} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        clients[name] = subprocess.Popen([sys.executable, str(probe), address], env=bare | extra, text=True,
                                         stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    for name, client in clients.items():  # a refused one tries for twenty seconds: all at once
        try:
            out, err = client.communicate(timeout=60)
            found[f"client_{name}"] = [client.returncode, out, err[-3000:]]
        except subprocess.TimeoutExpired:
            client.kill()
            found[f"client_{name}"] = [-1, "", "no answer"]
print("FOUND" + json.dumps(found))
"""

CLIENT = """
import sys, ray
ray.init(address=sys.argv[1], logging_level="ERROR", log_to_driver=False)

@ray.remote(num_cpus=0)
def run():
    return "code was executed"

print(ray.get(run.remote(), timeout=30))
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("ray")
    probe = folder / "client.py"
    probe.write_text(CLIENT)
    tree = {
        "data": {"train_files": "none.jsonl", "train_batch_size": 2, "max_prompt_length": 8, "max_response_length": 8},
        "model": {"path": str(tiny_model_dir), "dtype": "bfloat16"},
        "actor": {"ppo_mini_batch_size": 2},
        "rollout": {"n": 2},
        "algorithm": {"adv_estimator": "grpo"},
        "trainer": {"device": "cpu"},
        "cluster": {"backend": "ray", "threads": THREADS, "stall_seconds": 1},
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(tree), str(probe)],
        cwd=ROOT,
        env={**{k: v for k, v in os.environ.items() if not k.startswith("RAY_")}, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("FOUND")]
    result: dict[str, Any] = json.loads(line.removeprefix("FOUND"))
    return result


def test_threads_of_worker_and_controller(found: dict[str, Any]) -> None:
    assert found["worker_threads"] == THREADS and found["worker_omp"] == str(THREADS)
    assert found["controller_threads"] == 1
    assert found["cpus"] == THREADS
    assert found["worker_cbwr"] == os.environ["MKL_CBWR"]
    assert not found["same_process"]


def test_law_3_holds_in_the_worker_process(found: dict[str, Any]) -> None:
    assert found["parity"].startswith("engine and trainer agree to the bit")


def test_tensors_come_out_of_the_object_store_without_a_copy(found: dict[str, Any]) -> None:
    assert found["equal"] and found["bfloat16"]
    assert found["shared_memory"] and found["own_memory"]


def test_errors_come_out_as_they_were_raised(found: dict[str, Any]) -> None:
    kind, what = found["error"]
    assert kind in ("CheckpointError", "DataError") and "/no/such" not in what and what
    assert found["foreign_error"]


def test_a_long_wait_is_logged_with_the_stack_of_the_silent_process(found: dict[str, Any]) -> None:
    events = [event for event in found["stalled"] if "dream" in event[2]]
    assert 1 <= len(events) <= 2  # every second of two and a half, where the machine is not busy
    kind, subject, detail = events[0]
    assert (kind, subject) == ("stalled", "the worker process")
    assert detail.startswith("no answer to dream for 1 s\n") and "in <lambda>" in detail


def test_a_defect_is_told_with_its_place_and_the_remote_traceback(found: dict[str, Any]) -> None:
    said, cause = found["defect"]
    assert said == "the worker process failed during divide: ZeroDivisionError: division by zero"
    assert "in <lambda>" in cause and cause.endswith("ZeroDivisionError: division by zero")


@pytest.mark.parametrize("client", ["without", "wrong"])
def test_b159_a_client_without_the_token_is_refused(found: dict[str, Any], client: str) -> None:
    code, out, err = found[f"client_{client}"]
    assert code != 0 and "executed" not in out, (code, out, err)
    assert "AuthenticationError" in err, err


def test_that_it_asks_for_a_token_is_seen(found: dict[str, Any]) -> None:
    assert found["answers_anybody"] is False
    said, bad_input = found["joined without"]
    assert said.startswith("the Ray cluster at cluster.address asks for a token") and bad_input


def test_a_client_with_the_token_is_served(found: dict[str, Any]) -> None:
    """So that the refusals are about the token, not about the address."""
    code, out, err = found["client_right"]
    assert (code, out.strip()) == (0, "code was executed"), err
