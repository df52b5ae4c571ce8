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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rollout import chain_sum

TRL = "trl==1.16.0"
TRL_HOME = Path(os.environ.get("VERL_BENCH_TRL", "~/.cache/verl/bench-trl")).expanduser()
GROUP = 8
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

Job = dict[str, Any]


def workload(groups: int, longest: int) -> tuple[list[str], list[int]]:
    """Questions, and the lengths of all responses, ``GROUP`` a question: exponential, cut at ``longest``."""
    rng = random.Random(0)
    questions = [chain_sum(rng) for _ in range(groups)]
    mean = longest * 36 / 64
    lengths = [max(1, min(longest, round(rng.expovariate(1 / mean)))) for _ in range(groups * GROUP)]
    lengths[0] = longest
    return questions, lengths


# --- the sides: each does a job in a process of its own and tells the seconds of its steps --------------------------


def verl_side(job: Job) -> Job:
    from verl.cluster.threads import set_environment

    set_environment(job["threads"])
    from verl.cluster.start import start_workers
    from verl.trainer.run import Inputs
    from verl.trainer.stages import process, rollout, update
    from verl.trainer.timer import StepTimer

    config = verl_config(job)
    inputs, timer = Inputs.load(config, _reward), StepTimer()
    sampler = fixed_lengths(config, inputs.tokenizer, job)
    with patched(job), start_workers(config, print, _reward) as roles:
        prompts = inputs.loader.next_batch()

        def step() -> dict[str, float]:
            with timer("rollout"):
                batch = rollout(prompts, roles, sampler, timer)
            with timer("process"):
                batch, _ = process(batch, roles, config, config.algorithm.kl_ctrl.kl_coef, timer)
            with timer("update"):
                update(batch, roles, config, {"actor": 1e-6, "critic": 1e-5}, 0, timer)
                roles.rollout.publish(1)
            found = {name.removeprefix("timing_s/"): seconds for name, seconds in timer.flush().items()}
            return {part: found[part] for part in ("rollout", "process", "update")}

        return run_steps(step, job)


def verl_config(job: Job) -> Any:
    from verl.config import load_config

    file = Path(job["folder"]) / "prompts.jsonl"
    rows = [{"prompt": [{"role": "user", "content": text}], "answer": "0"} for text in job["questions"]]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    losses = {
        "grpo": ["algorithm.adv_estimator=grpo", "actor.use_kl_loss=true"],
        "ppo": ["algorithm.adv_estimator=gae", "algorithm.lam=0.95", "algorithm.use_kl_in_reward=true"],
    }
    count = len(job["questions"])
    return load_config(
        overrides=[
            f"model.path={job['model']}", f"data.train_files={file}", f"data.train_batch_size={count}",
            "data.shuffle=false", f"actor.ppo_mini_batch_size={count}", "data.max_prompt_length=128",
            f"data.max_response_length={max(job['lengths'])}", f"rollout.n={GROUP}", "rollout.ignore_eos=true",
            "cluster.backend=inline", f"cluster.threads={job['threads']}", "trainer.device=cpu",
            f"trainer.default_local_dir={job['folder']}", f"model.dtype={job['dtype']}",
            *losses[job["algorithm"]], *(word for word in job.get("overrides", ()) if not word.startswith("patch=")),
        ]
    ).config  # fmt: skip


def fixed_lengths(config: Any, tokenizer: Any, job: Job) -> Any:
    """The run's sampler, with a length for each response."""
    from dataclasses import replace

    from verl.trainer.sampling import Sampler

    padded = "patch=padded_rollout" in job.get("overrides", ())

    class Fixed(Sampler):
        def requests(self, prompts: Any) -> Any:
            lengths = [max(job["lengths"])] * len(job["lengths"]) if padded else job["lengths"]
            return [
                replace(request, sampling=replace(request.sampling, max_new_tokens=length))
                for request, length in zip(super().requests(prompts), lengths, strict=True)
            ]

        def assemble(self, prompts: Any, results: Any) -> Any:
            names = ("response_ids", "log_probs", "loss_mask", "versions")
            cut = [
                replace(result, **{name: getattr(result, name)[:length] for name in names})
                for result, length in zip(results, job["lengths"], strict=True)
            ]
            return super().assemble(prompts, cut)

    return Fixed(config.training_sampling, config, tokenizer)


class patched:
    """VeRL without something that has no switch, since nobody would want it off."""

    def __init__(self, job: Job) -> None:
        self.names = [word[6:] for word in job.get("overrides", ()) if word.startswith("patch=")]

    def __enter__(self) -> None:
        from dataclasses import replace

        from verl.models import log_probs
        from verl.training import micro_batches

        if "whole_logits" in self.names:
            log_probs.CACHED = log_probs.SLICED = 2**40
            log_probs._rows_at_once = lambda *_: 2**40
        if "padded_rows" in self.names:
            pack = micro_batches.pack_rows

            def padded(prompts: Any, responses: Any, width: int, groups: Any = None) -> Any:
                """Rows as long as the longest; the logits of padding are left out, as everybody leaves them out."""
                prompt_width = max(map(len, prompts))
                prompts = [[ids[0]] * (prompt_width - len(ids)) + ids for ids in prompts]
                lengths = [len(ids) for ids in responses]
                packed = pack(prompts, [(ids + ids[:1] * width)[:width] for ids in responses], width, groups)
                import torch

                keep = packed.columns < torch.tensor(lengths)[packed.rows]
                return replace(packed.only(keep), shape=(len(prompts), width))

            micro_batches.pack_rows = padded

    def __exit__(self, *_: object) -> None:
        pass  # the process ends


def _reward(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
    return float(len(solution_str) % 2)


def naive_side(job: Job) -> Job:
    import torch
    from naive import Naive
    from transformers import AutoTokenizer

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    prompts = [ids for text in job["questions"] for ids in [_prompt_ids(tokenizer, text)] * GROUP]
    side = Naive(
        job["model"], getattr(torch, job["dtype"]), prompts, job["lengths"], GROUP, job["rows"],
        tokenizer.eos_token_id, job["algorithm"] == "ppo",
    )  # fmt: skip
    return run_steps(side.step, job)


def _prompt_ids(tokenizer: Any, text: str) -> list[int]:
    message = [{"role": "user", "content": text}]
    text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def trl_side(job: Job) -> Job:
    import torch
    from datasets import Dataset  # type: ignore[import-not-found]
    from naive import Lengths
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer  # type: ignore[import-not-found]

    torch.set_num_threads(job["threads"])
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    lengths, rows = job["lengths"], min(job["rows"], len(job["lengths"]))
    steps = 1 + job["steps"] + job["memory"]
    dataset = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in job["questions"]])
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=getattr(torch, job["dtype"]))
    width = max(len(_prompt_ids(tokenizer, text)) for text in job["questions"])
    generate, clock = model.generate, Steps(job)

    def generate_lengths(*args: Any, **kwargs: Any) -> Any:
        ends = Lengths(lengths, width, tokenizer.eos_token_id)
        return generate(*args, **kwargs, logits_processor=[ends])

    model.generate = generate_lengths

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        assert [len(ids) for ids in completion_ids] == lengths
        return [float(row % 2) for row in range(len(completion_ids))]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.begin()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            clock.end()

    config = GRPOConfig(
        output_dir=job["folder"], use_cpu=True, report_to="none", save_strategy="no", logging_strategy="no",
        per_device_train_batch_size=rows, gradient_accumulation_steps=len(lengths) // rows, num_generations=GROUP,
        max_completion_length=max(lengths), beta=0.001, temperature=1.0, learning_rate=1e-6, max_steps=steps,
        gradient_checkpointing=False, bf16=False, shuffle_dataset=False, disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model, reward_funcs=reward, args=config, train_dataset=dataset, processing_class=tokenizer, callbacks=[Clock()]
    )
    trainer.train()
    return {"steps": clock.seconds}


def flops_side(job: Job) -> Job:
    """The actor's update alone, over about 4,096 packed tokens, and a matmul of the same dtype beside it."""
    from verl.cluster.threads import set_environment

    set_environment(job["threads"])
    import torch

    from verl.cluster.start import start_workers
    from verl.trainer.run import Inputs
    from verl.trainer.stages import process, rollout, update
    from verl.trainer.timer import StepTimer

    config, timer = verl_config(job), StepTimer()
    inputs = Inputs.load(config, _reward)
    x, w = (torch.randn(*shape).to(getattr(torch, job["dtype"])) for shape in ((4096, 576), (1536, 576)))

    def matmul_rate() -> float:
        seconds = []
        for _ in range(20):
            started = time.perf_counter()
            torch.nn.functional.linear(x, w)
            seconds.append(time.perf_counter() - started)
        return 2 * 4096 * 576 * 1536 / statistics.median(seconds)

    with start_workers(config, print, _reward) as roles:
        sampler = fixed_lengths(config, inputs.tokenizer, job)
        batch = rollout(inputs.loader.next_batch(), roles, sampler, timer)
        batch, _ = process(batch, roles, config, 0.0, timer)
        policy = roles.policy.worker._actor.policy  # type: ignore[attr-defined]
        flops, tokens = useful_flops(policy.model, batch.non_tensor_batch["prompt_ids"][::GROUP], job["lengths"])
        shares, rates = [], []
        for number in range(job["steps"] + 1):
            before = matmul_rate()
            with timer("all"):
                update(batch, roles, config, {"actor": 1e-6}, 0, timer)
            seconds, after = timer.flush()["timing_s/all"], matmul_rate()
            if number:
                rates.append((before + after) / 2)
                shares.append(flops / seconds / rates[-1])
    return {"share": statistics.median(shares), "matmul_gflops": statistics.median(rates) / 1e9, "tokens": tokens,
            "tflop": flops / 1e12}  # fmt: skip


def useful_flops(model: Any, prompts: Any, lengths: list[int]) -> tuple[float, int]:
    """Of an update with shared prompts: 6 a weight and token that reaches it, and attention; packed tokens."""
    config = model.config
    layers = sum(p.numel() for p in model.base_model.layers.parameters() if p.dim() == 2)
    tokens, pairs = 0, 0.0
    for number, prompt in enumerate(prompts):
        own = [length - 1 for length in lengths[number * GROUP : (number + 1) * GROUP]]
        tokens += len(prompt) + sum(own)
        pairs += len(prompt) ** 2 / 2 + sum(length * len(prompt) + length**2 / 2 for length in own)
    head = config.vocab_size * config.hidden_size * sum(lengths)  # only what predicts a response token
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = 2 * config.num_hidden_layers * config.num_attention_heads * size * pairs  # multiply-adds
    return 6.0 * (layers * tokens + head + attention), tokens


class Steps:
    """Seconds of the steps between warm-up and memory step; tells the parent when the last one begins."""

    def __init__(self, job: Job) -> None:
        self.seconds: list[float] = []
        self._job, self._number, self._started = job, 0, 0.0

    def begin(self) -> None:
        if self._number == 1 + self._job["steps"]:
            print("memory", file=sys.__stdout__, flush=True)
        self._started = time.perf_counter()

    def end(self) -> None:
        if 1 <= self._number <= self._job["steps"]:
            self.seconds.append(time.perf_counter() - self._started)
        self._number += 1


def run_steps(step: Callable[[], dict[str, float]], job: Job) -> Job:
    clock, parts = Steps(job), []
    for number in range(1 + job["steps"] + job["memory"]):
        clock.begin()
        found = step()
        clock.end()
        if 1 <= number <= job["steps"]:
            parts.append(found)
    return {"steps": clock.seconds, "parts": {name: statistics.median(part[name] for part in parts) for name in found}}


SIDES = {"verl": verl_side, "naive": naive_side, "trl": trl_side, "flops": flops_side}


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
