"""The worker that holds the models: devices, limits, and checkpoints that come back bit for bit."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from verl.algorithms.aggregation import count_denominators
from verl.algorithms.metric import Metric
from verl.cluster.early_scoring import for_scoring
from verl.cluster.placement import Group, make_plan, whole_run
from verl.cluster.role_models import limits_of
from verl.cluster.start import start_workers
from verl.cluster.threads import MALLOC, available_cores, process_threads, worker_environment
from verl.cluster.worker import Worker, choose_device
from verl.config import Config, build_config
from verl.errors import CheckpointError, ClusterError, ConfigError
from verl.models.loading import load_tokenizer
from verl.models.tiny import build_tiny
from verl.protocol import DataProto
from verl.rollout.protocol import Request, Result, SamplingParams, Slot
from verl.training.micro_batches import Limits


def config_of(model_dir: Path, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "data": {
            "train_files": "unused.jsonl",
            "train_batch_size": 2,
            "max_prompt_length": 8,
            "max_response_length": 6,
        },
        "model": {"path": str(model_dir), "dtype": "bfloat16"},
        "actor": {"ppo_mini_batch_size": 2},
        "rollout": {"n": 2},
        "algorithm": {"adv_estimator": "gae"},
        "trainer": {"device": "cpu"},
        "cluster": {"backend": "inline", "threads": 1},
    }
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return build_config(tree)


def batch() -> DataProto:
    generator = torch.Generator().manual_seed(3)
    mask = torch.arange(6) < torch.tensor([6, 3, 4, 1])[:, None]
    prompts = torch.randint(0, 256, (2, 5), generator=generator).repeat_interleave(2, 0)
    columns = {
        name: torch.randn(4, 6, generator=generator)
        for name in ("advantages", "returns", "values", "old_log_probs", "rollout_log_probs")
    }
    return DataProto.from_dict(
        tensors={
            "prompts": prompts,
            "responses": torch.randint(0, 256, (4, 6), generator=generator),
            "attention_mask": torch.cat([torch.ones(4, 5, dtype=torch.int64), mask.long()], 1),
            "response_mask": mask,
            **columns,
        },
        non_tensors={"uid": ["a", "a", "b", "b"]},
        meta_info={"learning_rate": 1e-3, "fresh_weights": False, "scheduled": {}},
    )


def ready(config: Config, group: Group | None = None) -> Worker:
    worker = Worker(config, None, group)
    worker.setup()
    return worker


def test_a_process_that_only_scores_begins_with_each_group(tiny_model_dir: Path, tmp_path: Path) -> None:
    AutoModelForSequenceClassification.from_pretrained(tiny_model_dir, num_labels=1).save_pretrained(tmp_path)
    load_tokenizer(tiny_model_dir, False).save_pretrained(tmp_path)
    config = config_of(tiny_model_dir, reward={"model": {"path": str(tmp_path)}})
    columns = {
        "index": [0, 1, 0, 1],
        "response_text": list("wxyz"),
        "raw_prompt": ["p"] * 4,
        "prompt_ids": [[5, 6]] * 4,
    }
    columns |= {"data_source": ["s"] * 4, "ground_truth": ["1"] * 4, "extra_info": [{}] * 4, "prompt_ids": [[5, 6]] * 4}
    whole = batch().union(DataProto.from_dict({}, columns))
    requests = [Request(Slot("a", i), [5, 6], SamplingParams(6)) for i in range(2)]
    lengths = whole.batch["response_mask"].sum(1)
    ids = [whole.batch["responses"][i, : lengths[i]].int().numpy() for i in range(2)]
    results = [Result(r.slot, i, i.astype("f4"), i >= 0, i, "stop") for r, i in zip(requests, ids, strict=True)]
    found = []
    for told in ([], results):
        worker = ready(config, replace(whole_run(config, 1), roles=frozenset({"reward"})))
        worker.expect(requests, for_scoring(whole.select_idxs([0])))
        worker.hear(told)
        assert len(worker._scorer._begun) == len(told)  # type: ignore[union-attr]
        found.append(worker.score(whole).batch["token_level_scores"])
        worker.close()
    assert torch.equal(*found) and found[0].count_nonzero() == 4


def train(worker: Worker, steps: int) -> list[dict[str, Metric]]:
    data = batch()
    denominators = count_denominators(data.batch["response_mask"], 6.0)
    return [
        {
            name: metric.to_floats()
            for name, metric in {
                **worker.update_critic(data, denominators),
                **worker.update_actor(data, denominators),
            }.items()
            if not name.startswith("perf/")  # clocks
        }
        for _ in range(steps)
    ]


def everything(worker: Worker) -> dict[str, torch.Tensor]:
    """Masters, computing parameters and optimizer state of both roles."""
    found: dict[str, torch.Tensor] = {}
    for name, weights, optimizer in worker._trained():
        found |= {f"{name}/master/{key}": value.detach().clone() for key, value in weights.masters.items()}
        found |= {f"{name}/{key}": value.clone() for key, value in optimizer.state().items()}
    for role in (worker._actor.policy, worker._critic.model if worker._critic else None):
        if role is not None:
            found |= {f"{type(role).__name__}/{key}": value.clone() for key, value in role.state_dict().items()}
    return found


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_law_4_a_checkpoint_brings_everything_back_bit_for_bit(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = config_of(tiny_model_dir)
    one = ready(config)
    train(one, 2)
    one._actor.passes.limits = halved = Limits(None, 20, True)  # memory had run out
    one.save(str(tmp_path))
    saved = everything(one)
    assert any("exp_avg_sq" in name for name in saved)
    other = ready(config)
    assert not same(saved, everything(other))
    other.load(str(tmp_path))
    assert same(saved, everything(other)) and other._actor.passes.limits == halved
    assert train(one, 2) == train(other, 2)
    assert same(everything(one), everything(other))
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} <= {".safetensors", ".json", ".jinja"}


@pytest.mark.parametrize(
    "difference", [{"hidden_size": 32}, {"layers": 1}, {"tie_embeddings": False}], ids=["width", "layers", "untied"]
)
def test_another_models_checkpoint_is_refused(tmp_path: Path, tiny_model_dir: Path, difference: dict[str, Any]) -> None:
    one = ready(config_of(tiny_model_dir))
    train(one, 1)
    one.save(str(tmp_path / "checkpoint"))
    other = ready(config_of(build_tiny(tmp_path / "other", **difference)))
    before = everything(other)
    with pytest.raises(CheckpointError, match="the checkpoint's actor is another model"):
        other.load(str(tmp_path / "checkpoint"))
    assert same(before, everything(other))


def test_b048_float16_trains_and_its_scale_survives_a_checkpoint(tmp_path: Path, tiny_model_dir: Path) -> None:
    """The scale 2^30 overflows at once and comes down until gradients fit; a resumed run has the scale it came to."""
    config = config_of(tiny_model_dir, model={"dtype": "float16", "fp16": {"initial_scale_power": 30}})
    one = ready(config)
    before = everything(one)
    skipped = train(one, 1)[0]
    assert skipped["actor/skipped_steps"].value() == 1.0
    masters = {name: value for name, value in before.items() if name.startswith("actor/master")}
    assert masters and all(torch.equal(value, everything(one)[name]) for name, value in masters.items())
    steps = train(one, 30)
    assert steps[-1]["actor/skipped_steps"].value() == 0.0 and steps[-1]["actor/loss_scale"].value() < 2.0**29
    assert one._actor.policy.model.get_output_embeddings().weight.dtype == torch.float16
    assert one.actor_log_probs(batch()).batch["old_log_probs"].dtype == torch.float32  # B047
    one.save(str(tmp_path))
    other = ready(config)
    other.load(str(tmp_path))
    assert train(one, 1) == train(other, 1)


def test_roles_that_the_algorithm_needs_and_no_others(tiny_model_dir: Path) -> None:
    grpo = ready(config_of(tiny_model_dir, algorithm={"adv_estimator": "grpo"}))
    assert not hasattr(grpo, "_critic") and not hasattr(grpo, "_reference")
    ppo = ready(config_of(tiny_model_dir, algorithm={"adv_estimator": "gae", "use_kl_in_reward": True}))
    assert {p.dtype for n, p in ppo._critic.model.named_parameters() if not n.startswith("value_head")} == {
        torch.bfloat16
    }
    assert ppo._critic.model.value_head.weight.dtype == torch.float32
    assert not any(p.requires_grad for p in ppo._reference.policy.parameters())


def test_a_fresh_reference_is_the_actor(tiny_model_dir: Path) -> None:
    """KL starts at exactly 0, in bf16 too: same cast weights, same temperature."""
    worker = ready(
        config_of(
            tiny_model_dir,
            algorithm={"adv_estimator": "gae", "use_kl_in_reward": True},
            rollout={"n": 2, "temperature": 0.6},
        )
    )
    data = batch()
    actor = worker.actor_log_probs(data).batch["old_log_probs"]
    assert torch.equal(actor, worker.reference_log_probs(data).batch["ref_log_probs"])
    train(worker, 1)
    assert not torch.equal(actor, worker.actor_log_probs(data).batch["old_log_probs"])
    assert torch.equal(actor, worker.reference_log_probs(data).batch["ref_log_probs"])  # frozen


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_checkpointing_changes_no_bit(tiny_model_dir: Path, checkpointing: bool) -> None:
    plain = ready(config_of(tiny_model_dir))
    other = ready(config_of(tiny_model_dir, model={"enable_gradient_checkpointing": checkpointing}))
    assert train(plain, 2) == train(other, 2)
    assert same(everything(plain), everything(other))


def test_limits_of_a_role(tiny_model_dir: Path) -> None:
    config = config_of(tiny_model_dir, actor={"ppo_mini_batch_size": 2, "ppo_micro_batch_size_per_gpu": 2})
    assert limits_of(config.actor_batch(1), config) == Limits(2, None, True)
    config = config_of(tiny_model_dir, actor={"ppo_mini_batch_size": 2, "prefix_sharing": "off"})
    assert limits_of(config.actor_batch(1), config) == Limits(None, 16384, False)
    config = config_of(tiny_model_dir, rollout={"n": 1})
    assert limits_of(config.actor_batch(1), config).share_prompts is False  # auto: nothing to share


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_cuda_without_a_gpu(tiny_model_dir: Path) -> None:
    config = config_of(tiny_model_dir, trainer={"device": "cuda", "n_gpus_per_node": 1})
    with pytest.raises(ConfigError, match="this machine has none") as caught:
        choose_device(config)
    assert caught.value.fix == "set trainer.device=cpu"
    assert choose_device(config_of(tiny_model_dir, trainer={"device": "auto"})) == torch.device("cpu")


def test_no_gpu_is_used_where_none_is_asked_for(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    none_asked = {"device": "auto", "n_gpus_per_node": 0}
    assert choose_device(config_of(tiny_model_dir, trainer=none_asked)) == torch.device("cpu")
    assert choose_device(config_of(tiny_model_dir, trainer={"device": "auto"})) == torch.device("cuda")


@pytest.mark.parametrize("backend", ["inline", "ray"])
def test_b152_more_threads_than_cores_are_refused_at_once(tiny_model_dir: Path, backend: str) -> None:
    """Before anything is started: a local Ray would believe whatever number of CPUs it is told."""
    wanted = available_cores() + 62
    config = config_of(tiny_model_dir, cluster={"backend": backend, "threads": wanted})
    with (
        pytest.raises(ClusterError, match="more was asked for than this machine has") as caught,
        start_workers(config, print),
    ):
        pass
    assert caught.value.value == f"wanted {wanted} CPU, available {available_cores()}"


def test_several_machines_are_refused_and_several_ranks_inline(tiny_model_dir: Path) -> None:
    config = config_of(tiny_model_dir, trainer={"device": "cpu", "nnodes": 2}, cluster={"backend": "ray"})
    with (
        pytest.raises(ClusterError, match="more machines were asked for than this machine has: 1"),
        start_workers(config, print),
    ):
        pass
    with pytest.raises(ConfigError, match="cluster.backend=inline is one process"):
        config_of(tiny_model_dir, actor={"ppo_mini_batch_size": 2, "world_size": 2})
    cores = available_cores()
    many = {"ppo_mini_batch_size": 2 * cores, "world_size": 4 * cores}
    config = config_of(
        tiny_model_dir, data={"train_batch_size": 2 * cores}, actor=many, cluster={"backend": "ray", "threads": None}
    )
    with (
        pytest.raises(ClusterError, match="more was asked for than this machine has") as caught,
        start_workers(config, print),
    ):
        pass
    assert caught.value.value == f"wanted {4 * cores} CPU, available {cores}"


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another allocator")
@pytest.mark.parametrize("own", [{}, {"MALLOC_TRIM_THRESHOLD_": "131072"}])
def test_freed_memory_of_a_worker_stays_with_it(own: dict[str, str]) -> None:
    """Unless the user has a word of their own about it: 64 MB cost page faults each time, not only the first."""
    code = """
import ctypes, resource
from verl.cluster.threads import set_environment
set_environment(1)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_void_p], [ctypes.c_size_t]
faults = []
for _ in range(3):
    memory = libc.malloc(2**26)
    ctypes.memset(memory, 1, 2**26)
    libc.free(memory)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(faults[2] - faults[1])
"""
    environment = {name: value for name, value in os.environ.items() if name not in MALLOC} | own
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert (int(done.stdout) < 1000) == (not own)


def test_threads_of_a_worker(tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert process_threads(config_of(tiny_model_dir, cluster={"threads": None})) == available_cores()
    assert process_threads(config_of(tiny_model_dir, cluster={"threads": 1})) == 1
    for name in ("MKL_CBWR", "GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    environment = worker_environment(3)
    assert 0 < int(environment["GOMP_SPINCOUNT"]) < 10**5 and environment["OMP_WAIT_POLICY"] == "PASSIVE"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")  # the user's own word
    assert "GOMP_SPINCOUNT" not in worker_environment(3) and worker_environment(3)["OMP_WAIT_POLICY"] == "ACTIVE"
    assert {environment[n] for n in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {"3"}
    assert environment["MKL_CBWR"] == "AUTO,STRICT"  # without it rows of a float32 matmul depend on their number


@pytest.mark.parametrize(
    "failing", ["worker.compare", "role_models.load_causal_lm"]
)  # after and before the scorer is there
def test_a_failed_set_up_leaves_no_reward_process(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*args: object, **more: object) -> None:
        raise ConfigError("the machine is on fire")

    closed: list[object] = []
    monkeypatch.setattr(f"verl.cluster.{failing}", fail)
    monkeypatch.setattr("verl.rewards.scorer.RuleScorer.close", lambda scorer: closed.append(scorer))
    with pytest.raises(ConfigError, match="on fire"), start_workers(config_of(tiny_model_dir), print):
        pass
    assert len(closed) == (failing == "worker.compare")


@pytest.mark.parametrize("open_to_all", [True, False])
def test_joining_a_cluster_that_asks_for_no_token_warns_once(
    monkeypatch: pytest.MonkeyPatch, open_to_all: bool
) -> None:
    from verl.cluster import ray_runtime

    monkeypatch.setattr(ray_runtime, "_start_ray", lambda *_: "")
    monkeypatch.setattr(ray_runtime, "_answers_anybody", lambda address: open_to_all and address == "10.0.0.1:6379")
    monkeypatch.setattr(ray_runtime, "ray", MagicMock())
    monkeypatch.setattr(ray_runtime, "_warned", set())
    ray_runtime.ray.get_runtime_context().gcs_address = "10.0.0.1:6379"
    config = build_config({"data": {"train_files": "-"}, "model": {"path": "-"}, "cluster": {"address": "auto"}})
    said: list[str] = []
    for _ in range(2):  # a run that goes on after a worker's death joins again
        with ray_runtime.ray_running(config, make_plan(config, 1, 0), said.append):
            pass
    assert len(said) == open_to_all
    assert not said or said[0].startswith("warning: the Ray cluster at auto asks for no token")
