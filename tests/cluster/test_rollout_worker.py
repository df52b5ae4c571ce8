"""A rollout worker's engine without Ray: the trainer's bits, and no copy of published weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import HashStore

from verl.cluster import network, weight_sync
from verl.cluster.compression import compressed, decompressed
from verl.cluster.placement import WorkerSpec
from verl.cluster.rollout_worker import RolloutWorker
from verl.cluster.weight_sync import Broadcast, Disk, Meeting, SharedMemory, Workers, exported
from verl.cluster.worker import Worker
from verl.config import Config, build_config
from verl.errors import EngineError
from verl.rollout.protocol import Request, Result, Resume, SamplingParams, Slot

SPEC = WorkerSpec("rollout", 1, 1, 0.0, None, {}, "cpu", {}, None)


def config_of(model: Path, dtype: str = "float32") -> Config:
    return build_config(
        {
            "data": {
                "train_files": "unused.jsonl",
                "train_batch_size": 4,
                "max_prompt_length": 8,
                "max_response_length": 24,
            },
            "model": {"path": str(model), "dtype": dtype},
            "actor": {"ppo_mini_batch_size": 4},
            "rollout": {"n": 2},
            "algorithm": {"adv_estimator": "grpo"},
            "reward": {"num_workers": 0},
            "trainer": {"device": "cpu"},
            "cluster": {"backend": "inline", "threads": 1},
        }
    )


def requests(count: int, tokens: int = 12) -> list[Request]:
    """Groups of two over short prompts; the seed belongs to the slot."""
    return [
        Request(Slot(f"p{i // 2}", i % 2), [5 + i // 2, 9, 11], SamplingParams(tokens, seed=i, ignore_eos=True))
        for i in range(count)
    ]


def run(worker: RolloutWorker, work: list[Request], seconds: float = 0.0) -> list[Result]:
    """In many short calls, to the end; in the order of the requests."""
    found: dict[Slot, Result] = {}
    todo = work
    while len(found) < len(work):
        progress = worker.advance(todo, seconds)
        todo = []
        found |= {result.slot: result for result in progress.results}
    return [found[request.slot] for request in work]


def bits(results: list[Result]) -> list[Any]:
    return [(r.response_ids.tolist(), r.log_probs.tobytes(), r.versions.tolist()) for r in results]


def beside(worker: RolloutWorker) -> Workers:
    """In a thread of its own, as a pool does it."""

    def call(method: str, *arguments: Any) -> Callable[[], dict[str, Any]]:
        answer = ThreadPoolExecutor(1).submit(getattr(worker, method), *arguments)
        return lambda: {worker._name: answer.result()}

    return call


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("way", ["shared_memory", "disk", "broadcast"])
def test_published_weights_give_the_trainers_bits(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, way: str
) -> None:
    """Shared memory is used where it is, and what was a file may go."""
    monkeypatch.setattr(weight_sync, "BUCKET_BYTES", 20_000)
    trainer = Worker(config_of(tiny_model_dir, dtype))
    trainer.setup()
    worker = RolloutWorker(trainer._config, SPEC)
    worker.setup()
    probe = trainer.parity_probe()
    assert trainer.compare(probe, worker.sample(probe)).exact
    before = bits(run(worker, requests(6)))

    with torch.no_grad():
        for parameter in trainer._actor.policy.model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    trainer.publish(3)
    assert not trainer.compare(probe, worker.sample(probe)).exact  # the worker's are the old ones
    folder = tmp_path / "weights"
    meeting, met = partial(Meeting, seconds=30.0, nccl=False, local=True), defaultdict(HashStore)
    monkeypatch.setattr(network, "RayStore", lambda name, seconds: met[name])
    events: list[tuple[str, str, str]] = []
    sync = {
        "shared_memory": SharedMemory(trainer.exported_weights),
        "disk": Disk(trainer.write_weights, folder),
        "broadcast": Broadcast(
            trainer.broadcast_weights, trainer.sent_weights, meeting, met.pop, lambda *event: events.append(event)
        ),
    }[way]
    sync.publish(3, beside(worker))
    worker.load_weights(3, sync.reference(worker._name))
    pointers = [parameter.data_ptr() for parameter in worker._policy.model.parameters()]
    if way == "broadcast":
        assert events == [] and sync.reference(worker._name) is None and worker._received == {}
        assert all(pointer % weight_sync.ALIGNMENT == 0 for pointer in pointers)
        assert {t.data_ptr() for t in trainer._sent.values()}.isdisjoint(pointers)
        late = RolloutWorker(trainer._config, SPEC, "another")  # gets the same without having been there
        late.setup()
        late.load_weights(3, sync.reference("another"))
        assert bits(run(late, requests(6))) == bits(trainer.generate(requests(6), None))
        sync.publish(4, beside(worker))  # over the same connections
        worker.load_weights(4, sync.reference(worker._name))
        assert events == [] and met == {}
        worker.load_weights(3, trainer.exported_weights())
    elif way == "disk":
        (file,) = folder.iterdir()
        assert file.name == "version_000003.safetensors"
        with file.open("r+b") as written:
            written.write(bytes(file.stat().st_size))  # which nobody maps
        sync.close()
        assert not folder.exists()
    else:
        assert pointers == [parameter.data_ptr() for parameter in trainer._actor.policy.model.parameters()]
    assert trainer.compare(probe, worker.sample(probe)).exact
    after = bits(run(worker, requests(6)))
    assert after == bits(trainer.generate(requests(6), None)) != before
    assert after[0][2] == [3] * 12


@pytest.mark.parametrize("mass", [False, True])
def test_compressed_results_are_the_same_to_the_bit(mass: bool) -> None:
    rng = np.random.default_rng(1)
    results = [
        Result(
            Slot("train:1:0:7", index),
            rng.integers(0, 50_000, length, np.int32),
            -rng.random(length, np.float32),
            rng.random(length) < 0.9,
            rng.integers(3, 5, length, np.int32),
            "length",
            {"queue": 0.25},
            rng.random(length, np.float32) if mass and index != 1 else None,
        )
        for index, length in enumerate([17, 1, 0, 400])
    ]
    packed = compressed(results)
    found = decompressed(packed)
    assert bits(found) == bits(results)
    for one, other in zip(found, results, strict=True):
        assert (one.slot, one.finish_reason, one.timings) == (other.slot, other.finish_reason, other.timings)
        np.testing.assert_array_equal(one.loss_mask, other.loss_mask)
        assert one.response_ids.dtype == other.response_ids.dtype and one.loss_mask.dtype == other.loss_mask.dtype
        np.testing.assert_equal(one.kept_log_mass, other.kept_log_mass)
    assert sum(map(len, packed.columns.values())) < 0.8 * sum(13 * len(result.response_ids) for result in results)
    assert decompressed(compressed([])) == []


def test_a_response_handed_back_goes_on_elsewhere_and_ends_as_if_undisturbed(tiny_model_dir: Path) -> None:
    config = config_of(tiny_model_dir)
    one, other = RolloutWorker(config, SPEC), RolloutWorker(config, SPEC)
    one.setup()
    other.setup()
    work = requests(2, tokens=20)
    expected = bits(run(other, work))
    for call in range(6):
        assert one.advance([] if call else work, 0.0).results == []
    parts = {result.slot: result for result in one.abort()}
    assert all(0 < len(part.response_ids) < 20 for part in parts.values())
    on = [
        replace(request, resume=Resume(part.response_ids, part.log_probs, part.versions))
        for request in work
        for part in [parts[request.slot]]
    ]
    assert bits(run(other, on)) == expected
    assert one.advance([], 0.0).stats.active == 0


def test_b101_a_request_that_the_engine_fails_with_is_named_and_the_others_have_their_bits(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = RolloutWorker(config_of(tiny_model_dir), SPEC)
    worker.setup()
    work = requests(6)
    expected = bits(run(worker, work))
    bad, forward = work[3].slot, worker._engine._forward

    def failing(plan: Any) -> Any:
        if any(part.sequence.request.slot == bad and part.start >= 9 for part in plan.work):
            raise ValueError("no such place")
        return forward(plan)

    monkeypatch.setattr(worker._engine, "_forward", failing)
    progress = [worker.advance(work, 0.0)]
    while worker._isolation.busy:
        progress.append(worker.advance([], 0.0))
    failed = {slot: reason for part in progress for slot, reason in part.failed.items()}
    assert list(failed) == [bad] and failed[bad].startswith("ValueError: no such place")
    found = {result.slot: result for part in progress for result in part.results}
    good = [request.slot for request in work if request.slot != bad]
    assert bits([found[slot] for slot in good]) == [part for i, part in enumerate(expected) if i != 3]


def test_a_version_goes_when_a_newer_one_is_used_and_no_worker_is_reading_it(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "version_000099.safetensors").write_text("of a run that was killed")
    sync = Disk(lambda file: Path(file).touch(), folder)
    assert not folder.exists()
    files = []
    for version in range(4):
        sync.publish(version, lambda *_: dict)
        files.append(Path(sync.reference("any")))
    sync.retire({2, 0})  # version 3 is published, and not used yet
    assert [file.exists() for file in files] == [True, False, True, True]
    sync.retire({3})
    assert [file.exists() for file in files] == [False, False, False, True]


def test_weights_that_a_worker_does_not_see_are_named(tiny_model_dir: Path, tmp_path: Path) -> None:
    worker = RolloutWorker(config_of(tiny_model_dir), SPEC)
    worker.setup()
    with pytest.raises(EngineError, match=r"cannot read the published weights(.|\n)*nowhere(.|\n)*machines share"):
        worker.load_weights(1, str(tmp_path / "nowhere"))


def test_weights_of_another_model_are_refused(tiny_model_dir: Path) -> None:
    worker = RolloutWorker(config_of(tiny_model_dir), SPEC)
    worker.setup()
    weights = dict(exported(worker._policy.model.named_parameters()))
    weights.pop(next(iter(weights)))
    with pytest.raises(EngineError, match="of another model"):
        worker.load_weights(1, weights)
