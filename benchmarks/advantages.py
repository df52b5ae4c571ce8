"""Time and memory of every advantage estimator, as multiples of one `cumsum` over the same tensor.

    python benchmarks/advantages.py [--rows 8192] [--tokens 4096] [--repeat 3]

Aim: every estimator within 8 times the time of the cumsum, and within 4 times the memory of the rewards.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import torch

from verl.algorithms.advantage_inputs import AdvantageInputs
from verl.algorithms.advantages import ESTIMATORS
from verl.config.schema_run import AlgorithmConfig

GROUP = 8


def seconds(call: Callable[[], object], repeat: int) -> float:
    """Best of so many runs, after one that warms up."""
    best = float("inf")
    for run in range(repeat + 1):
        started = time.perf_counter()
        call()
        if run:
            best = min(best, time.perf_counter() - started)
    return best


def peak_memory(call: Callable[[], object]) -> int:
    """Bytes by which the call raises the process's resident memory at its worst, its result included."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # sets the peak back to what is resident now
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def resident(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def inputs_of(rows: int, tokens: int, gaps: bool) -> AdvantageInputs:
    g = torch.Generator().manual_seed(0)
    mask = torch.arange(tokens) < torch.randint(1, tokens + 1, (rows, 1), generator=g)
    if gaps:
        mask &= torch.rand(rows, tokens, generator=g) < 0.8
    rewards, values = (torch.randn(rows, tokens, generator=g) for _ in range(2))
    return AdvantageInputs(
        rewards,
        mask,
        torch.arange(rows) // GROUP,
        torch.ones(rows, dtype=torch.bool),
        values=values,
        reward_components=torch.randn(rows, 2, generator=g),
        baselines=torch.randn(rows, generator=g),
    )


def fresh(inputs: AdvantageInputs) -> AdvantageInputs:
    """The same inputs without the statistics that they keep."""
    return AdvantageInputs(**{name: getattr(inputs, name) for name in AdvantageInputs.__dataclass_fields__})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    plain, gaps = (inputs_of(arguments.rows, arguments.tokens, gaps) for gaps in (False, True))
    rewards = plain.token_level_rewards
    size = rewards.numel() * rewards.element_size()
    print(f"{arguments.rows} rows x {arguments.tokens} tokens, {torch.get_num_threads()} threads")
    print(f"{'estimator':38}{'ms':>10}{'x cumsum':>10}{'x memory':>10}")
    cases = [(name, name, {}) for name in ESTIMATORS] + [("gae, not whitened", "gae", {"whiten_advantages": False})]
    for label, name, settings in cases:
        config = AlgorithmConfig(gamma=0.99, lam=0.95, **settings)
        for kind, inputs in (("", plain), (", gaps", gaps)):

            def call(name: str = name, inputs: AdvantageInputs = inputs, config: AlgorithmConfig = config) -> object:
                return ESTIMATORS[name](fresh(inputs), config)

            # The unit is measured anew beside each: on a busy machine both are slowed down.
            unit, own = seconds(lambda: rewards.cumsum(1), arguments.repeat), seconds(call, arguments.repeat)
            print(f"{label + kind:38}{own * 1e3:10.0f}{own / unit:10.1f}{peak_memory(call) / size:10.1f}", flush=True)
    print(f"peak of the process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GB")


if __name__ == "__main__":
    main()
