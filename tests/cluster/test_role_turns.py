"""Idle roles of a worker make room for the one that works, and nothing that it computes is another for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_worker import batch, config_of, ready
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

from verl.algorithms.aggregation import count_denominators
from verl.cluster.weight_sync import exported, take
from verl.cluster.worker import Worker
from verl.protocol import DataProto
from verl.rollout.protocol import Request, SamplingParams, Slot

OFFLOAD = {"param_offload": True, "optimizer_offload": True}
ROLES = {"actor": OFFLOAD, "critic": OFFLOAD, "ref": {"param_offload": True}}


def worker_of(model_dir: Path, tmp_path: Path, offload: bool, dtype: str, full: bool = False, **more: Any) -> Worker:
    sections: dict[str, Any] = {
        "actor": {"use_kl_loss": True, "kl_loss_type": "full" if full else "k3", "ppo_mini_batch_size": 2},
        "model": {"dtype": dtype},
        "trainer": {"default_local_dir": str(tmp_path / "run")},
    }
    for name, settings in ROLES.items() if offload else ():
        sections[name] = sections.get(name, {}) | settings
    return ready(config_of(model_dir, **sections, **more))


def there(worker: Worker) -> set[str]:
    """Parts whose bytes are in memory, all of them."""
    actor, critic = worker._actor, worker._critic
    parts: dict[str, list[Tensor]] = {
        "actor": actor.weights.computing(),
        "actor optimizer": [*actor.weights.apart(), *actor.optimizer.moments()],
        "critic": critic.weights.computing(),
        "critic optimizer": [*critic.weights.apart(), *critic.optimizer.moments()],
        "reference": list(worker._reference.policy.parameters()),
    }
    if worker._scorer is not None and worker._config.reward.model.path is not None:
        parts["reward"] = list(worker._scorer._parts[-1].reward.model.parameters())  # type: ignore[attr-defined]
    sizes = {name: {t.untyped_storage().size() > 0 for t in tensors} for name, tensors in parts.items()}
    assert all(len(found) <= 1 for found in sizes.values()), sizes
    return {name for name, found in sizes.items() if found == {True}}


def kept(worker: Worker) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, weights, optimizer in worker._trained():
        worker.turns.begin(f"{name} update")
        found |= {f"{name}/{key}": value.detach().clone() for key, value in weights.masters.items()}
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state().items()}
    return found


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def step(worker: Worker, version: int) -> tuple[list[Any], list[set[str]]]:
    """Every call of a training step; what they answer, and what is in memory after each."""
    data, found, memory = batch(), [], []
    denominators = count_denominators(data.batch["response_mask"], 6.0)

    def note(answer: Any) -> DataProto:
        found.append(answer)
        memory.append(there(worker))
        return answer

    requests = [Request(Slot("a", i), [5, 6, i], SamplingParams(6, seed=i)) for i in range(3)]
    sampled = worker.generate(requests, None)
    note([(result.response_ids.tolist(), result.log_probs.tolist()) for result in sampled])
    data.batch["old_log_probs"] = note(worker.actor_log_probs(data)).batch["old_log_probs"]
    data.batch["ref_log_probs"] = note(worker.reference_log_probs(data)).batch["ref_log_probs"]
    data.batch["values"] = note(worker.values(data)).batch["values"]
    note(worker.full_kl(data))
    for update in (worker.update_critic, worker.update_actor):
        metrics = update(data, denominators)
        assert ("perf/offload_seconds" in metrics) == (worker.turns.seconds > 0)
        note({name: metric.to_floats() for name, metric in metrics.items() if not name.startswith("perf/")})
    note(worker.publish(version))
    return [dict(answer.tensors) if isinstance(answer, DataProto) else answer for answer in found], memory


def equal(one: Any, other: Any) -> bool:
    return same(one, other) if isinstance(one, dict) and isinstance(next(iter(one.values())), Tensor) else one == other


@pytest.mark.parametrize(("dtype", "full"), [("float32", True), ("bfloat16", False), ("bfloat16", True)])
def test_what_a_turn_does_not_need_is_gone_and_no_number_changes(
    tiny_model_dir: Path, tmp_path: Path, dtype: str, full: bool
) -> None:
    plain, moving = (worker_of(tiny_model_dir, tmp_path, offload, dtype, full) for offload in (False, True))
    assert there(moving) == {"actor"}  # after the parity check
    for version in (1, 2):
        (expected, stayed), (found, memory) = step(plain, version), step(moving, version)
        assert all(equal(one, other) for one, other in zip(expected, found, strict=True))
        assert memory == [
            {"actor"},
            {"actor"},
            {"reference"},
            {"critic"},
            {"actor", "reference"},
            {"critic", "critic optimizer"},
            {"actor", "actor optimizer"} | ({"reference"} if full else set()),
            {"actor"},
        ]
        assert {"actor", "critic", "reference", "actor optimizer", "critic optimizer"} == stayed[-1]
    assert same(kept(plain), kept(moving))


@pytest.mark.parametrize("background", [False, True])
def test_a_checkpoint_and_published_weights_are_those_of_roles_that_stay(
    tiny_model_dir: Path, tmp_path: Path, background: bool
) -> None:
    plain, moving = (worker_of(tiny_model_dir, tmp_path, offload, "bfloat16") for offload in (False, True))
    for number, worker in enumerate((plain, moving)):
        step(worker, 1)
        worker.save(str(tmp_path / f"{number}"), background)
        worker.reference_log_probs(batch())  # what is written in the background is a copy
        while not worker.saved():
            pass
    files = sorted(path.relative_to(tmp_path / "0") for path in (tmp_path / "0").rglob("*.safetensors"))
    assert len(files) == 4
    assert all((tmp_path / "0" / file).read_bytes() == (tmp_path / "1" / file).read_bytes() for file in files)
    other = worker_of(tiny_model_dir, tmp_path, True, "bfloat16")
    other.load(str(tmp_path / "0"))
    assert same(kept(other), kept(plain))
    weights = moving.exported_weights()  # looked into through numpy, and away afterwards all the same
    copy = {name: parameter.detach().clone() for name, parameter in plain._actor.policy.model.named_parameters()}
    taken = {name: torch.empty(0) for name in copy}
    for name, parameter in copy.items():
        taken[name] = torch.nn.Parameter(torch.zeros_like(parameter))
    take(taken, {name: (dtype, np.array(array)) for name, (dtype, array) in weights.items()})
    assert same({n: p.detach() for n, p in taken.items()}, copy) and exported(copy.items()).keys() == weights.keys()
    moving.values(batch())
    assert there(moving) == {"critic"}


def test_a_reward_model_among_them(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_model_dir, num_labels=1)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "judge")
    AutoTokenizer.from_pretrained(tiny_model_dir).save_pretrained(tmp_path / "judge")
    columns: dict[str, Any] = {"index": [0, 1, 0, 1], "response_text": list("wxyz"), "raw_prompt": ["p"] * 4}
    columns |= {"data_source": ["s"] * 4, "ground_truth": ["1"] * 4, "extra_info": [{}] * 4, "prompt_ids": [[5, 6]] * 4}
    rows = batch().union(DataProto.from_dict({}, columns))
    scores = []
    for offload in (False, True):
        reward = {"model": {"path": str(tmp_path / "judge"), "param_offload": offload}}
        worker = worker_of(tiny_model_dir, tmp_path, offload, "float32", reward=reward)
        for _ in range(2):
            worker.values(rows)
            scores.append(worker.score(rows).batch["token_level_scores"])
        assert not offload or there(worker) == {"reward"}
        worker.close()
    assert all(torch.equal(scores[0], other) for other in scores) and scores[0].count_nonzero() == 4
