"""The sides of step.py: each does a job in a process of its own and tells the seconds of its steps."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GROUP = 8  # responses of a prompt
Job = dict[str, Any]


def verl_side(job: Job) -> Job:
    from verl.cluster.threads import set_environment

    set_environment(job["threads"])
    from verl.cluster.start import start_workers
    from verl.trainer.inputs import Inputs
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
    from verl.trainer.inputs import Inputs
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
