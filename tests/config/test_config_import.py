"""The configuration package is cheap: it loads no torch, no Ray, no transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers", "numpy", "tensordict")


def in_subprocess(code: str) -> list:
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def test_import_loads_nothing_heavy():
    code = f"""
import json, sys
import verl.config
print(json.dumps([m for m in {(*HEAVY, "omegaconf")} if m in sys.modules]))
"""
    assert in_subprocess(code) == []


def test_loading_loads_nothing_heavy():
    code = f"""
import json, sys
from verl.config import dump_yaml, load_config
dump_yaml(load_config(None, ["data.train_files=[a]", "model.path=m"]).config)
print(json.dumps([m for m in {HEAVY} if m in sys.modules]))
"""
    assert in_subprocess(code) == []
