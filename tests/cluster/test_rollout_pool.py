"""The rollout pool over Ray: whatever becomes of its workers, the trainer's own samples, each once. One Ray for all."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from verl_process import ROOT

SCRIPT = """
import json, math, os, signal, sys, threading, time
from dataclasses import replace
from functools import partial
from pathlib import Path

sys.path.insert(0, "tests/cluster")
from verl.cluster.threads import set_environment

set_environment(1)
os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
os.environ["RAY_AUTH_MODE"] = "disabled"  # as many a cluster that is joined
import ray
from ray.experimental.internal_kv import _internal_kv_list
from test_rollout_worker import SPEC, bits, config_of, requests

from verl.cluster.ray_runtime import _answers_anybody
from verl.cluster import rollout_crew
from verl.cluster.network import NAMESPACE, forget_meeting
from verl.cluster.rollout_pool import RolloutPool
from verl.cluster.weight_sync import Broadcast, Disk, Meeting, SharedMemory, exported
from verl.cluster.worker import Worker
from verl.errors import ClusterError

rollout_crew.ROOM_SECONDS = 1.0
quiet = {"include_dashboard": False, "logging_level": "ERROR", "log_to_driver": False}
ray.init(address="local", num_cpus=3, resources={"place": 3}, **quiet)
found = {"answers_anybody": _answers_anybody(ray.get_runtime_context().gcs_address)}
config = config_of(Path(sys.argv[1]))
settings = {"worker_timeout": 6.0, "max_num_seqs": 8, "max_workers": 4, "compress_results": True}
rollout = config.rollout.model_copy(update=settings | {"weight_sync": "broadcast"})
config = config.model_copy(update={"rollout": rollout})
trainer = Worker(config)
trainer.setup()
events, wish, harm = [], [None], []
sync = Broadcast(
    lambda meeting: ([deed() for deed in harm], trainer.broadcast_weights(meeting))[1],
    lambda: ray.put(trainer.sent_weights()),
    partial(Meeting, seconds=6.0, nccl=False, local=True),
    forget_meeting,
    lambda kind, subject, detail: events.append([kind, subject, detail]),
)
pool = RolloutPool(
    config,
    [replace(SPEC, count=2, resources={"place": 1})],
    sync,
    lambda kind, subject, detail: events.append([kind, subject, detail]),
    wish=lambda: wish[0],
)
probe = trainer.parity_probe()
found["parity"] = [trainer.compare(probe, results).exact for results in pool.start(probe)]


def named(batch, count=120):
    plain = requests(count, 24)
    return [replace(r, slot=replace(r.slot, uid=f"{batch}:{r.slot.uid}")) for r in plain]


expected = bits(trainer.generate(named("expected"), None))


def versions_as(version):
    return [(ids, log_probs, [version] * len(ids)) for ids, log_probs, _ in expected]


pool.publish(1)
found["calm"] = bits(pool.generate(named("calm"))) == versions_as(1)
pids = [ray.get(m.actor.__ray_call__.remote(lambda self: os.getpid())) for m in pool._crew.members.values()]


def later(*deeds):
    def go():
        for seconds, deed in deeds:
            time.sleep(seconds)
            deed()
    thread = threading.Thread(target=go)
    thread.start()
    return thread


def until(condition):
    deadline = time.monotonic() + 90
    while not condition():
        assert time.monotonic() < deadline, events
        time.sleep(0.05)


def count(kind):
    return sum(event[0] == kind for event in events)


pool.publish(2)
thread = later((0.1, lambda: os.kill(pids[0], signal.SIGKILL)), (0.2, lambda: os.kill(pids[1], signal.SIGSTOP)))
found["killed and hung"] = bits(pool.generate(named("killed"))) == versions_as(2)
thread.join()
until(lambda: count("died") == 2 and count("joined") == 4)
found["retried"] = pool.metrics()["rollout/retried"]

# One dies in the midst of a broadcast, over connections that stood: the other samples on, and so does who comes for it.
found["broadcast"] = [len(sync._received)]
pool.publish(3)
found["broadcast"] += [len(sync._received), count("missed"), len(_internal_kv_list("", namespace=NAMESPACE))]
pid = ray.get(list(pool._crew.members.values())[0].actor.__ray_call__.remote(lambda self: os.getpid()))
harm += [lambda: os.kill(pid, signal.SIGKILL)]
pool.publish(2)
harm.clear()
until(lambda: count("died") == 3 and count("joined") == 5)
found["harmed"] = bits(pool.generate(named("harmed", 40))) == versions_as(2)[:40]

# Every engine fails with one response, wherever it is.
poisoned, bad = named("poisoned"), 77


def poison(self, slot=poisoned[bad].slot):
    forward = self._engine._forward

    def failing(plan):
        if any(part.sequence.request.slot == slot for part in plan.work):
            raise ValueError("no such place")
        return forward(plan)

    self._engine._forward = failing


ray.get([m.actor.__ray_call__.remote(poison) for m in pool._crew.members.values()])
results = pool.generate(poisoned)
found["bad"] = results[bad].finish_reason
found["good"] = bits(results[:bad] + results[bad + 1 :]) == versions_as(2)[:bad] + versions_as(2)[bad + 1 :]
found["workers left"] = len(pool._crew.members), count("died")

wish[0] = 3
until(lambda: count("joined") == 6)
wish[0] = 4  # there is no room for it
until(lambda: any(event[:2] == ["waiting", "rollout worker 7"] for event in events))
wish[0] = 1
thread = later((0.0, lambda: until(lambda: count("left") == 3)))
given = [named(f"scaled {i}") for i in range(4)]
results = [bits(pool.generate(batch)) for batch in given]
thread.join()
found["scaled"] = results == [versions_as(2)] * 4
found["workers"] = pool.metrics()["rollout/workers"]
found["spans"] = {name: sorted({what for what, _, _ in spans}) for name, spans in pool.spans().items()}

shared = SharedMemory(lambda: ray.put(exported(trainer._actor.policy.model.named_parameters())))
pool._sync = shared
pool.publish(5)
found["shared memory"] = bits(pool.generate(named("shared"))) == versions_as(5)

# Given up, asked for again under other weights, from disk: one answer each, of the new ones.
pool._sync = Disk(trainer.write_weights, Path(sys.argv[1]).parent / "weights")
stale = named("stale", 20)
pool.submit(stale)
pool.cancel([request.slot for request in stale])
pool.publish(3)
pool.submit(stale)
answers = []
while len(answers) < len(stale):
    answers += pool.finished()
found["once"] = len({result.slot for result in answers}) == len(answers) == len(stale)
found["new"] = [sorted({int(v) for r in answers for v in r.versions})]
found["stats"] = pool.stats().version
pool.publish(4)
until(lambda: os.listdir(pool._sync._folder) == ["version_000004.safetensors"])
found["disk"] = bits(pool.generate(named("disk"))) == versions_as(4)
found["late"] = list(pool._finished)

# A validation while much is asked for does not wait for all that.
behind = named("behind")
pool.submit(behind)
pool.generate(named("first", 6))
found["before"] = len(pool._finished)
pool.cancel([request.slot for request in behind])

# No worker answers in time: given up, named, and not waited for.
pool._dispatcher._seconds = 0.0
answers = pool.generate(named("overdue", 6))
found["overdue"] = sorted({result.finish_reason for result in answers}), count("lost") - 1  # the poisoned one

# Every worker fails with whatever it is given.
pool._dispatcher._seconds = math.inf
rollout_crew.MAX_LOSSES = 0
(member,) = pool._crew.members.values()
ray.get(member.actor.__ray_call__.remote(lambda self: setattr(self, "_isolation", None)))
try:
    pool.generate(named("hopeless", 4))
except ClusterError as error:
    found["hopeless"] = str(error)
pool.close()
found["events"] = events
print("FOUND" + json.dumps(found, default=str))
"""


@pytest.fixture(scope="module")
def found(tiny_model_dir: Path) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_model_dir)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.partition("FOUND")[2])


def test_its_samples_are_the_trainers(found: dict[str, Any]) -> None:
    assert found["parity"] == [True, True] and found["calm"]


def test_b096_workers_that_fail_one_after_the_other_end_the_run_with_the_cause(found: dict[str, Any]) -> None:
    assert "rollout workers were lost" in found["hopeless"] and "AttributeError during advance" in found["hopeless"]


def test_b096_a_killed_and_a_hanging_worker_change_nothing(found: dict[str, Any]) -> None:
    assert found["killed and hung"] and found["retried"] > 0
    died = [detail for kind, _, detail in found["events"] if kind == "died"]
    assert died[0] == "died during advance" and "no answer to advance" in died[1]


def test_b101_a_response_that_every_engine_fails_with_is_lost_alone_and_costs_no_worker(found: dict[str, Any]) -> None:
    assert found["bad"] == "lost" and found["good"] and found["workers left"] == [2, 3]
    subject = "response 1 of poisoned:p38"
    told = [(kind, detail) for kind, name, detail in found["events"] if name == subject]
    assert [kind for kind, _ in told] == ["failed"] * 3 + ["lost"]
    assert "ValueError: no such place" in told[0][1] and "failed with it 3 times" in told[-1][1]
    assert len({detail.partition(":")[0] for kind, detail in told[:3]}) == 2  # another worker has tried it, too


def test_it_tells_what_each_worker_did(found: dict[str, Any]) -> None:
    assert list(found["spans"].values()) == [["advance", "load_weights"]], found["spans"]
    assert all(name.startswith("rollout_worker_") for name in found["spans"])


def test_workers_that_come_and_go_change_nothing(found: dict[str, Any]) -> None:
    assert found["scaled"] and found["workers"] == 1, found["events"]


def test_a_worker_for_which_there_is_no_room_is_told_and_given_up(found: dict[str, Any]) -> None:
    events = found["events"]
    (told,) = [detail for kind, name, detail in events if (kind, name) == ("waiting", "rollout worker 7")]
    assert "not ready after 1 s" in told and "1 place (free: 0)" in told
    assert ["left", "rollout worker 7", "before it was ready"] in events


def test_what_was_given_up_and_asked_for_again_is_answered_once(found: dict[str, Any]) -> None:
    assert found["once"] and found["new"] == [[3]] and found["stats"] == 3 and found["late"] == []


def test_weights_from_disk_are_the_trainers(found: dict[str, Any]) -> None:
    assert found["disk"]


def test_a_worker_that_dies_in_a_broadcast_changes_nothing(found: dict[str, Any]) -> None:
    assert found["broadcast"] == [2, 2, 0, 0] and found["harmed"], found["events"]
    died = [detail for kind, _, detail in found["events"] if kind == "died"]
    assert died[2] == "died during receive"
    (missed,) = [event[1:] for event in found["events"] if event[0] == "missed"]
    assert missed[0] == "weights 2" and "it was lost" in missed[1]


def test_weights_from_shared_memory_are_the_trainers(found: dict[str, Any]) -> None:
    assert found["shared memory"]


def test_what_somebody_waits_for_goes_first(found: dict[str, Any]) -> None:
    assert found["before"] < 60  # of 120 that were submitted before it


def test_what_has_no_answer_in_time_is_lost_by_name(found: dict[str, Any]) -> None:
    assert found["overdue"] == [["lost"], 6]


def test_that_this_ray_asks_for_no_token_is_seen(found: dict[str, Any]) -> None:
    assert found["answers_anybody"] is True
