"""An engine of the user's own in rollout workers of their own: one of them dies on the way, the run goes on."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from verl_process import GRPO, ROOT, metric_lines, train, verl

from verl.run_dir import RunDir

# It is handed the weights as tensors; the first worker that samples with version 1 dies of it.
ENGINE = """
import os, sys
sys.path.insert(0, {examples!r})
from engine import PlainEngine

class Engine(PlainEngine):
    capabilities = frozenset()
    def load_weights(self, version, tensors=()):
        given, own = dict(tensors), dict(self._policy.model.named_parameters())
        assert given.keys() == own.keys() and all((given[name] == own[name]).all() for name in own)
        super().load_weights(version)
    def step(self):
        if self._version == 1 and self._sequences:
            try:
                os.close(os.open({mark!r}, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                pass
            else:
                os._exit(3)
        return super().step()
"""


def test_an_engine_of_ones_own_samples_in_workers_that_may_die(tmp_path: Path) -> None:
    mark, run = tmp_path / "died", tmp_path / "run"
    (tmp_path / "own.py").write_text(ENGINE.format(examples=str(ROOT / "examples" / "extending"), mark=str(mark)))
    settings = (
        f"rollout.name={tmp_path / 'own.py'}:Engine",
        "cluster.backend=ray",
        "cluster.pools.w.processes=2",
        "cluster.placement.rollout=w",
        "rollout.weight_sync=broadcast",
        "trainer.total_training_steps=3",
        "data.val_files=[]",
    )
    done = verl(*train(GRPO, run, *settings), log=tmp_path / "log")
    assert done.code == 0, done.err
    assert "an engine that claims none" in done.out and "Traceback" not in done.out + done.err
    kinds = Counter(event.kind for event in RunDir(run).read_events())
    assert mark.exists() and kinds["died"] == 1 and not kinds["failed"] and not kinds["lost"], kinds
    lines = metric_lines(run)
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert all(line["response_length/mean"] > 8 and line["rollout/lost"] == 0 for line in lines)
