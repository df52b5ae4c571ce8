"""Training ranks on two machines of a Ray cluster: two nodes of one, on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from verl_process import GRPO, checkpoint_bytes, computed, train, verl

NODES = """
import sys
from ray.cluster_utils import Cluster
cluster = Cluster()
for _ in range(2):
    cluster.add_node(num_cpus=1, include_dashboard=False, object_store_memory=2**28)
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
TOKEN = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "two-machines" * 4}


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name, value in TOKEN.items():
        monkeypatch.setenv(name, value)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", NODES], env=dict(os.environ), **pipes) as nodes:  # type: ignore[call-overload]
        yield nodes.stdout.readline().strip()
        nodes.stdin.close()


@pytest.mark.drill
@pytest.mark.parametrize("strategy", ["replicate", "fsdp2"])
def test_two_ranks_on_two_machines_are_two_ranks_on_one(tmp_path: Path, address: str, strategy: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    common = (
        "data.train_batch_size=4",
        "actor.ppo_mini_batch_size=2",
        "trainer.val_before_train=false",
        "data.val_files=[]",
        "trainer.total_training_steps=3",
        "trainer.save_freq=3",
        "cluster.backend=ray",
        f"actor.strategy={strategy}",
    )
    for folder, where in ((two, (f"cluster.address={address}", "trainer.nnodes=2")), (one, ("actor.world_size=2",))):
        done = verl(*train(GRPO, folder, *common, *where), log=tmp_path / folder.name, seconds=600)
        assert done.code == 0, done.err
    assert computed(one) == computed(two)
    assert checkpoint_bytes(one, 3) == checkpoint_bytes(two, 3)
    assert not list(two.glob("verl-ranks-*"))
