"""Many readers of one batch on a host: each maps the sender's bytes and adds next to nothing of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from verl_process import ROOT

SCRIPT = """
import json, os, sys
count, megabytes = int(sys.argv[1]), int(sys.argv[2])
import numpy as np
import ray
import torch
from verl.protocol import DataProto

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
ray.init("local", num_cpus=count, include_dashboard=False, logging_level="ERROR",
         object_store_memory=(megabytes + 200) << 20)

@ray.remote(num_cpus=1)
class Reader:
    def own_bytes(self):
        # Private pages of this process: what would be gone with it. Shared memory counts nowhere.
        lines = open("/proc/self/smaps_rollup").read().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) << 10

    def read(self, references, keep):
        data = ray.get(references[0])
        total = float(sum(tensor.sum() for tensor in data.tensors.values()))  # every page is touched
        if keep:
            self.data = data
        return total, self.own_bytes()

rows = megabytes // 2
def batch(rows):
    return DataProto.from_dict({
        "tokens": torch.ones(rows, 131072, dtype=torch.int64),
        "log_probs": torch.zeros(rows, 262144),
    }, {"uid": [str(i) for i in range(rows)]})

readers = [Reader.remote() for _ in range(count)]
small, large = ray.put(batch(1)), ray.put(batch(rows))
ray.get([reader.read.remote([small], False) for reader in readers])  # imports and pools are there
before = ray.get([reader.own_bytes.remote() for reader in readers])
after = ray.get([reader.read.remote([large], True) for reader in readers])
print(json.dumps({
    "sums": [total for total, _ in after],
    "expected": rows * 131072.0,
    "bytes": rows * (131072 * 8 + 262144 * 4),
    "added": [own - was for (_, own), was in zip(after, before)],
}))
ray.shutdown()
"""


@pytest.mark.parametrize(
    ("readers", "megabytes"), [(2, 160), pytest.param(10, 500, marks=pytest.mark.drill)], ids=["two", "ten"]
)
def test_readers_add_under_a_twentieth_each(readers: int, megabytes: int) -> None:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(readers), str(megabytes)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bytes"] >= 0.95 * (megabytes << 20)
    assert found["sums"] == pytest.approx([found["expected"]] * readers)
    assert max(found["added"]) < found["bytes"] / 20, found["added"]
