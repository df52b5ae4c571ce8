"""A whole training step (rollout, process, update) beside TRL and a textbook implementation, and what makes it fast.

    python benchmarks/step.py [--threads 2] [--repeat 3] [--json FILE] [--only PART ...] [--quick]
    python benchmarks/step.py --with-trl              # makes a virtual environment for TRL once (about 1.5 GB)

The step: 8 prompts (chain sums, about 50 tokens) x 8 responses of at most 64 tokens, 30 in the mean, KL to the
reference. Every side gets the same prompts, and its responses the same lengths. Each runs in a process of its own,
alone; the first step is left out and the median of the others counts. TRL and the textbook are measured in several
settings, of which the fastest counts. Memory is the proportional set size (PSS) of a side's processes during one more
step. On a machine with a GPU everything still runs on the CPU.

Parts: verl, naive, trl (GRPO); ppo (with a critic, verl and the textbook); ablation (each optimisation off in turn);
flops (the update's arithmetic a second, as a share of a plain matmul's); scaling (16 to 512 responses a step).

Aims, as ratios: vs_trl_step 4, vs_naive_step 3, vs_naive_ppo_step 3, vs_trl_memory 1 (all: the other's over ours),
update_flops_share_bf16 0.75, update_flops_share_fp32 0.85.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rollout import chain_sum
from step_sides import GROUP, SIDES, Job

TRL = "trl==1.16.0"
TRL_HOME = Path(os.environ.get("VERL_BENCH_TRL", "~/.cache/verl/bench-trl")).expanduser()
RATIOS = (
    "vs_trl_step", "vs_naive_step", "vs_naive_ppo_step", "vs_trl_memory",
    "update_flops_share_bf16", "update_flops_share_fp32",
)  # fmt: skip
PARTS = ("verl", "naive", "trl", "ppo", "ablation", "flops", "scaling")
# (dtype, responses of a micro-batch) of the textbook and of TRL; None: verl's own choice
SETTINGS = [("bfloat16", 64), ("bfloat16", 16), ("float32", 16)]
# What is switched off, and how: overrides of the configuration, or a patch of the program (see `patched`).
ABLATION = {
    "nothing": [],
    "prefix sharing": ["actor.prefix_sharing=off"],
    "packing, prefix sharing": ["actor.prefix_sharing=off", "patch=padded_rows"],
    "rows leave when they end": ["patch=padded_rollout"],
    "large micro-batches (8 rows)": ["actor.ppo_micro_batch_size_per_gpu=8"],
    "log-probs in pieces": ["patch=whole_logits"],
    "old log-probs of the engine": ["actor.recompute_old_log_probs=always"],
    "bfloat16": ["model.dtype=float32"],
    "second thread": ["patch=one_thread"],
}
SCALES = (16, 64, 512)


def workload(groups: int, longest: int) -> tuple[list[str], list[int]]:
    """Questions, and the lengths of all responses, ``GROUP`` a question: exponential, cut at ``longest``."""
    rng = random.Random(0)
    questions = [chain_sum(rng) for _ in range(groups)]
    mean = longest * 36 / 64
    lengths = [max(1, min(longest, round(rng.expovariate(1 / mean)))) for _ in range(groups * GROUP)]
    lengths[0] = longest
    return questions, lengths


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(1)


def serve() -> None:
    """A side's process: a job on standard input, what came of it on standard output."""
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    sys.stdout = sys.stderr  # libraries may print what they like
    found = SIDES[job["side"]](job)
    print(json.dumps(found), file=sys.__stdout__, flush=True)


# --- the parent ------------------------------------------------------------------------------


class Bench:
    """Runs jobs one after the other."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        from verl.models.resolve import resolve_model

        self.arguments, self.quick = arguments, arguments.quick
        self.model = str(resolve_model("tiny-llama" if arguments.quick else arguments.model))
        self.found: dict[str, Any] = {}

    def run(self, side: str, *, groups: int = 8, memory: bool = False, **settings: Any) -> Job:
        arguments, quick = self.arguments, self.quick
        questions, lengths = workload(2 if quick else groups, 6 if quick else 64)
        job: Job = {
            "side": side, "model": self.model, "questions": questions, "lengths": lengths, "memory": memory,
            "steps": arguments.repeat, "threads": arguments.threads, "dtype": "bfloat16", "algorithm": "grpo",
        } | settings  # fmt: skip
        if "patch=one_thread" in job.get("overrides", ()):
            job["threads"] = 1
        threads = str(job["threads"])
        env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "CUDA_VISIBLE_DEVICES": ""}
        python = str(TRL_HOME / "bin" / "python") if side == "trl" else sys.executable
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as said:
            process = subprocess.Popen(
                [python, __file__, "--serve"],
                env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                stderr=None if arguments.verbose else said,
            )  # fmt: skip
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(job | {"folder": folder}) + "\n")
            process.stdin.flush()
            answer, peak = "", 0.0
            for answer in process.stdout:
                if answer == "memory\n":
                    watch = MemoryWatch(process.pid)
            if process.wait() != 0:
                said.seek(0)
                raise SystemExit(f"{side} failed:\n{said.read()[-3000:]}")
            if memory:
                peak = watch.stop()
        found: Job = json.loads(answer)
        if "steps" in found:
            found["seconds"] = statistics.median(found.pop("steps"))
        return found | ({"memory_gb": peak} if memory else {})

    def best(self, side: str, memory: bool = False, **settings: Any) -> Job:
        """Of a side in its several settings."""
        tried = []
        for dtype, rows in SETTINGS[: 1 if self.quick else None]:
            found = self.run(side, dtype=dtype, rows=rows, memory=memory, **settings)
            tried.append(found | {"dtype": dtype, "rows": rows})
            self.line(f"{side} {settings.get('algorithm', 'grpo')} {dtype}, {rows} rows", found)
        return min(tried, key=lambda found: found["seconds"])

    def line(self, name: str, found: Job, note: str = "") -> None:
        parts = "".join(f"  {part} {seconds:.2f}" for part, seconds in found.get("parts", {}).items())
        memory = f"  {found['memory_gb']:.2f} GiB" if "memory_gb" in found else ""
        print(f"{name:36}{found['seconds']:8.2f} s{memory}{parts}{note}", flush=True)

    def part(self, name: str) -> None:
        found = self.found
        if name == "verl":
            found["verl"] = self.run("verl", memory=True)
            self.line("verl grpo bfloat16", found["verl"])
        elif name in ("naive", "trl"):
            found[name] = self.best(name, memory=True)
        elif name == "ppo":
            found["verl_ppo"] = self.run("verl", algorithm="ppo")
            self.line("verl ppo bfloat16", found["verl_ppo"])
            found["naive_ppo"] = self.best("naive", algorithm="ppo")
        elif name == "ablation":
            table = found["ablation"] = {}
            for off, overrides in list(ABLATION.items())[: 3 if self.quick else None]:
                table[off] = self.run("verl", overrides=overrides)
                times = table[off]["seconds"] / table["nothing"]["seconds"]
                self.line(f"without {off}", table[off], f"  x{times:.2f}")
        elif name == "flops":
            for short, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
                got = found[f"flops_{short}"] = self.run("flops", dtype=dtype, groups=14)
                print(
                    f"update of {got['tokens']} packed tokens, {dtype}: {got['share']:.1%} of "
                    f"{got['matmul_gflops']:.0f} GFLOP/s", flush=True,
                )  # fmt: skip
        elif name == "scaling":
            costs = found["scaling"] = {}
            for rows in (16,) if self.quick else SCALES:
                got = self.run("verl", groups=rows // GROUP, steps=1 if rows > 64 else self.arguments.repeat)
                costs[rows] = got["seconds"] / sum(workload(rows // GROUP, 64)[1]) * 1e3
                self.line(f"{rows} responses", got, f"  {costs[rows]:.2f} ms a response token")

    def ratios(self) -> dict[str, float | None]:
        found = self.found

        def of(other: str, own: str, key: str = "seconds") -> float | None:
            return found[other][key] / found[own][key] if other in found and own in found else None

        shares = {f"update_flops_share_{s}": found.get(f"flops_{s}", {}).get("share") for s in ("bf16", "fp32")}
        ratios = {
            "vs_trl_step": of("trl", "verl"),
            "vs_naive_step": of("naive", "verl"),
            "vs_naive_ppo_step": of("naive_ppo", "verl_ppo"),
            "vs_trl_memory": of("trl", "verl", "memory_gb"),
        } | shares
        assert tuple(ratios) == RATIOS
        return ratios


class MemoryWatch:
    """The most PSS (GiB) of a process and its descendants; looking takes at most a tenth of the time."""

    def __init__(self, pid: int) -> None:
        self._peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look, args=(pid,))
        self._thread.start()

    def stop(self) -> float:
        self._over.set()
        self._thread.join()
        return self._peak / 2**20

    def _look(self, pid: int) -> None:
        looked = 0.01
        while not self._over.wait(10 * looked):
            started = time.perf_counter()
            self._peak = max(self._peak, sum(map(pss, tree(pid))))
            looked = time.perf_counter() - started


def tree(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            children = task.read_text().split()
        except OSError:
            continue
        for child in children:
            yield from tree(int(child))


def pss(pid: int) -> int:
    """KiB; 0 of a process that has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("Pss:"))


def make_trl() -> None:
    """A virtual environment with TRL, made once; torch first and pinned, so that nothing pulls in another build."""
    if (TRL_HOME / "ready").exists():
        return
    print(f"making {TRL_HOME} with {TRL} (once)", flush=True)
    venv.create(TRL_HOME, with_pip=True, clear=True)
    pip = [str(TRL_HOME / "bin" / "python"), "-m", "pip", "-q", "install"]
    subprocess.run([*pip, "torch==2.13.0"], check=True)
    subprocess.run([*pip, "torch==2.13.0", TRL], check=True)
    (TRL_HOME / "ready").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3, help="steps that are measured")
    parser.add_argument("--only", nargs="*", choices=PARTS)
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: shows only that it runs")
    parser.add_argument("--with-trl", action="store_true", help="measure TRL too, in an environment of its own")
    parser.add_argument("--verbose", action="store_true", help="show what the sides print")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
        return
    if arguments.with_trl:
        make_trl()
    bench = Bench(arguments)
    for part in arguments.only or PARTS:
        if part != "trl" or arguments.with_trl:
            bench.part(part)
    ratios = bench.ratios()
    for key, ratio in ratios.items():
        print(f"{key:26}" + ("not measured" if ratio is None else f"{ratio:6.2f}"))
    if arguments.json:
        arguments.json.write_text(json.dumps({"threads": arguments.threads, "ratios": ratios} | bench.found, indent=2))


if __name__ == "__main__":
    main()
