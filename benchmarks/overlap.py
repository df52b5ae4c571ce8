"""What the schedules of ``trainer.mode`` gain: the real loop, dispatcher and buffer; engine and trainer are simulated.

    python benchmarks/overlap.py [--quick] [--json FILE]

A batch is 10 s of training, and 10 s of rollout if no worker ever waits: a run one after the other takes 20 s a step,
an ideal overlap 10 s. Seconds are simulated and really slept, ``--second`` of real ones each. With long-tailed lengths
a batch is as late as its longest response, which takes 40 s; ``async`` goes on with others meanwhile, as far as
``max_staleness`` lets it: below 4 the longest can never be trained whole. ``s a step`` is counted from the end of the
first step; ``waste`` is the share of the sampled tokens that were too old to be trained.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verl.checkpoint.store import CheckpointStore
from verl.cluster.roles import Roles
from verl.config import build_config
from verl.data.dataset import PromptDataset
from verl.data.loader import PromptLoader
from verl.data.rows import PromptRow
from verl.diagnostics.simulate import Sampling
from verl.protocol import DataProto
from verl.rollout.protocol import EngineStats, Request, Result, Slot
from verl.run_dir import RunDir
from verl.tracking.trackers import Tracker
from verl.trainer import sources
from verl.trainer.loop import TrainingLoop
from verl.trainer.run import source_of
from verl.trainer.sampling import Sampler
from verl.trainer.sources import Feed
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer

PROMPTS, N, WORKERS = 16, 4, 4
PLACES = PROMPTS * N // WORKERS  # of a worker: together they have one for each response of a batch
TRAINING, TOKEN = 10.0, 0.5  # seconds of a step's training, and of a token
LENGTH, LONGEST = 20, 80  # tokens of a response: on average, so that a batch is 10 s of all places; at most
IDEAL = 10.0


def fixed(slot: Slot) -> int:
    return LENGTH


def long_tailed(slot: Slot) -> int:
    """Log-normal, cut at four times the mean."""
    drawn = random.Random(str(slot)).lognormvariate(0.0, 0.8)
    return min(max(round(LENGTH * drawn / 1.34), 1), LONGEST)


class RealClock:
    """Seconds that pass by themselves, ``second`` real ones each. ``changed`` guards all that the threads share."""

    def __init__(self, second: float) -> None:
        self.second, self.start, self.changed = second, time.perf_counter(), threading.Condition()
        self.run: Callable[[float], None] = lambda until: None  # what happens up to then
        self.next_event: Callable[[], float] = lambda: inf

    def now(self) -> float:
        return (time.perf_counter() - self.start) / self.second

    def wait(self, ready: Callable[[], bool], until: float = inf) -> None:
        """With ``changed`` held."""
        while True:
            self.run(now := self.now())
            if ready() or now >= until:
                return
            left = min(until, self.next_event()) - now
            self.changed.wait(None if left == inf else left * self.second)


class VirtualClock(RealClock):
    """Time goes on when all threads wait, to the next moment that one of them waits for. The same in every run."""

    def __init__(self) -> None:
        super().__init__(1.0)
        self.time, self.running = 0.0, 1
        self.waiting: list[tuple[Callable[[], bool], float]] = []

    def now(self) -> float:
        return self.time

    def wait(self, ready: Callable[[], bool], until: float = inf) -> None:
        own = (ready, until)
        self.waiting.append(own)
        self.running -= 1
        self.wake()
        while own in self.waiting:
            if self.running:
                self.changed.wait()
                continue
            self.time = min(self.next_event(), *(limit for _, limit in self.waiting))
            assert self.time < inf, "everybody waits for something that never happens"
            self.run(self.time)
            self.wake()

    def wake(self) -> None:
        """On behalf of the threads that can go on, which may be slow to do so."""
        for one in [one for one in self.waiting if one[0]() or self.time >= one[1]]:
            self.waiting.remove(one)
            self.running += 1
        self.changed.notify_all()


class ClockedExecutor:
    """Stands in for the thread pool of the look-ahead, whose thread a virtual clock has to know."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock

    def submit(self, work: Callable[..., Any], *arguments: Any) -> ClockedFuture:
        future = ClockedFuture(self.clock)
        with self.clock.changed:
            self.clock.running += 1

        def job() -> None:
            try:
                future.set_result(work(*arguments))
            except BaseException as error:
                future.set_exception(error)
            with self.clock.changed:
                self.clock.running -= 1
                self.clock.wake()

        threading.Thread(target=job, daemon=True).start()
        return future


class ClockedFuture(Future[Any]):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self.clock = clock

    def result(self, timeout: float | None = None) -> Any:
        with self.clock.changed:
            self.clock.wait(self.done)
        return super().result()


class SimulatedRollout:
    """Workers with ``PLACES`` each, a token every ``TOKEN`` seconds in every place; new weights stop nobody."""

    apart = True

    def __init__(self, clock: RealClock, length: Callable[[Slot], int]) -> None:
        self.clock, self.workers = clock, Sampling(WORKERS, PLACES, TOKEN, length)
        self.boxes: dict[Slot, list[Result]] = {}
        self.answers: list[Result] = []
        clock.run, clock.next_event = self.run, self.workers.next_event

    def run(self, until: float) -> None:
        self.workers.run(until)
        for result in self.workers.answers:
            self.boxes.pop(result.slot, self.answers).append(result)
        self.workers.answers.clear()

    def submit(self, requests: list[Request], prompts: DataProto | None = None) -> None:
        with self.clock.changed:
            now = self.clock.now()
            self.run(now)
            self.workers.submit(requests, now)
            self.clock.changed.notify_all()

    def generate(self, requests: list[Request], prompts: DataProto | None = None) -> list[Result]:
        box: list[Result] = []
        self.boxes.update((request.slot, box) for request in requests)
        self.submit(requests)
        with self.clock.changed:
            self.clock.wait(lambda: len(box) == len(requests))
        found = {result.slot: result for result in box}
        return [found[request.slot] for request in requests]

    def finished(self) -> list[Result]:
        with self.clock.changed:
            self.clock.wait(lambda: bool(self.answers))
            results, self.answers = self.answers, []
            return results

    def cancel(self, slots: list[Slot]) -> None:
        with self.clock.changed:
            self.workers.cancel(slots, self.clock.now())
            self.answers = [answer for answer in self.answers if answer.slot not in slots]

    def publish(self, version: int) -> None:
        with self.clock.changed:
            assert version == len(self.workers.published)
            self.run(self.clock.now())
            self.workers.publish(self.clock.now())

    def metrics(self) -> dict[str, float]:
        return {}

    def spans(self) -> dict[str, list[Any]]:
        return {}

    def stats(self) -> EngineStats:
        return EngineStats(0, 0, len(self.workers.published) - 1, 0, 0, 0)


class SimulatedTrainer:
    """Actor and reward: the updates of a batch take ``TRAINING`` seconds, everything else none."""

    def __init__(self, clock: RealClock) -> None:
        self.clock, self.worker, self.trained = clock, self, 0
        self.ends: list[float] = []  # of the updates

    def log_probs(self, batch: DataProto) -> DataProto:
        return DataProto.from_dict({"old_log_probs": batch.tensors["rollout_log_probs"].clone()})

    def score(self, batch: DataProto) -> DataProto:
        mask = batch.tensors["response_mask"]
        scores = torch.zeros(mask.shape)
        scores[:, 0] = torch.arange(len(batch)) % 2
        return DataProto.from_dict({"token_level_scores": scores, "scored": torch.ones(len(batch), dtype=torch.bool)})

    def update(self, mini_batch: DataProto, denominators: Any) -> dict[str, Any]:
        with self.clock.changed:
            self.clock.wait(lambda: False, self.clock.now() + TRAINING * len(mini_batch) / (PROMPTS * N))
            self.ends.append(self.clock.now())
        self.trained += int(mini_batch.tensors["response_mask"].sum())
        return {}

    def memory_gb(self) -> dict[str, float]:
        return {"peak": 0.0, "rewards": 0.0}

    def spans(self) -> dict[str, list[Any]]:
        return {}


class Bytes:
    """As much of a tokenizer as the loop asks for."""

    pad_token_id = 0

    def decode(self, ids: Any, **_: Any) -> str:
        return "a" * len(ids)


def simulate(
    mode: str, staleness: int, unit: str, length: Callable[[Slot], int], steps: int, clock: RealClock
) -> tuple[float, float]:
    """Seconds of a step, and the share of the sampled tokens that was not trained.

    Args:
        mode: of ``trainer.mode``; ``streamed``: sync with ``trainer.stream_minibatches``, four mini-batches a step.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = {"mode": mode, "default_local_dir": folder, "val_before_train": False, "total_training_steps": steps}
        updates = 4 if mode == "streamed" else 1
        if mode == "streamed":
            trainer |= {"mode": "sync", "stream_minibatches": True}
        if mode == "async":
            trainer |= {"max_staleness": staleness, "staleness_unit": unit}
        config = build_config(
            {
                "data": {"train_files": "none", "train_batch_size": PROMPTS, "max_response_length": LONGEST},
                "model": {"path": "none"},
                "actor": {"ppo_mini_batch_size": PROMPTS // updates},
                "rollout": {"n": N},
                "algorithm": {"adv_estimator": "grpo"},
                "trainer": trainer,
                "cluster": {"backend": "inline"},
            }
        )
        rows = [PromptRow("", "simulated", "a", {}, number) for number in range(PROMPTS * (steps + 50))]
        dataset = PromptDataset(rows, [[1]] * len(rows), numbers=np.arange(len(rows)))
        loader = PromptLoader(dataset, PROMPTS)
        simulated, rollout = SimulatedTrainer(clock), SimulatedRollout(clock, length)
        roles = Roles(simulated, rollout, simulated, None, None, exact_rollout=True)  # type: ignore[arg-type]
        state, timer, run_dir = TrainerState.fresh(config, loader), StepTimer(), RunDir(folder).create()
        sampler = Sampler(config.training_sampling, config, Bytes())  # type: ignore[arg-type]
        source = source_of(Feed(config, roles, state, sampler, timer, steps))
        if isinstance(clock, VirtualClock) and isinstance(source, sources.Ahead):
            source._thread = ClockedExecutor(clock)  # type: ignore[assignment]
        store, tracker = CheckpointStore(run_dir.checkpoints, None), Tracker(run_dir, {})
        loop = TrainingLoop(config, steps, roles, state, source, sampler, None, run_dir, store, tracker, timer)
        loop.fit()
        assert len(simulated.ends) == steps * updates
        seconds = (simulated.ends[-1] - simulated.ends[updates - 1]) / (steps - 1)
        return seconds, 1 - simulated.trained / rollout.workers.sampled


RUNS = [
    ("sync", 0, ""),
    ("streamed", 0, ""),
    ("one_step_off", 1, ""),
    ("async", 1, "sample"),
    ("async", 2, "sample"),
    ("async", 4, "sample"),
    ("async", 4, "token"),
    ("async", 8, "sample"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few steps, short seconds: the figures mean little")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--second", type=float, default=0.1, help="real seconds of a simulated one")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    arguments = parser.parse_args()
    steps, second = (3, 0.002) if arguments.quick else (max(arguments.steps, 2), arguments.second)
    rows = []
    print(f"{'lengths':12}{'mode':14}{'staleness':>12}{'s a step':>10}{'of the ideal':>14}{'waste':>8}")
    for length in (fixed, long_tailed):
        for mode, staleness, unit in RUNS:
            seconds, waste = simulate(mode, staleness, unit, length, steps, RealClock(second))
            setting = {"lengths": length.__name__, "mode": mode, "staleness": staleness, "staleness_unit": unit}
            rows.append(setting | {"seconds_a_step": seconds, "of_ideal": IDEAL / seconds, "waste": waste})
            bound = f"{staleness} {unit}"
            print(f"{length.__name__:12}{mode:14}{bound:>12}{seconds:10.2f}{IDEAL / seconds:14.0%}{waste:8.1%}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
