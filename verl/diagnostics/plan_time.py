"""``verl plan``: the arithmetic of the batch sizes in words, and tokens, FLOPs and time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from verl.diagnostics.plan import Lengths, largest_pack, pack, shares
from verl.models.facts import ModelFacts

if TYPE_CHECKING:
    from verl.cluster.placement import Plan
    from verl.config import BatchPlan, Config

# Of a backward pass's time the share of its large matmuls; the rest is attention, norms and the optimizer.
MATMUL_SHARE = 0.5
CALIBRATION = 0.5  # seconds of each of the two measurements


@dataclass(frozen=True)
class Speed:
    """Of one process.

    Attributes:
        flops: a second, of training, attained.
        decode_step: seconds of one token of so many responses.
        source: in words.
    """

    flops: float
    decode_step: Callable[[int], float]
    source: str


@dataclass(frozen=True)
class Stage:
    """One stage of a step: what all processes compute together, and how long it takes."""

    name: str
    tokens: int
    flops: float
    seconds: float


def batch_words(config: Config, plan: Plan, lengths: Lengths) -> Iterator[str]:
    """How the batch sizes follow from one another, a sentence each."""
    prompts, n = config.data.train_batch_size, config.rollout.n
    yield (
        f"a step draws GBS = data.train_batch_size = {prompts} prompts; rollout.n = {n} responses each make "
        f"{prompts * n} responses, of {lengths.prompt} + {lengths.response} tokens"
    )
    for role, batch_of in (("actor", config.actor_batch), ("critic", config.critic_batch)):
        if role == "actor" or config.uses_critic:
            ranks = plan.group_of(role).count
            yield from _role_words(config, role, batch_of(ranks), ranks, lengths)


def _role_words(config: Config, role: str, batch: BatchPlan, ranks: int, lengths: Lengths) -> Iterator[str]:
    n, rows = config.rollout.n, batch.rows_per_mini_batch
    steps = config.data.train_batch_size // batch.mini_batch_prompts
    passes = f" x {batch.epochs} passes over it" if batch.epochs > 1 else ""
    yield (
        f"{role}: MBS = ppo_mini_batch_size = {batch.mini_batch_prompts} prompts x {n} = {rows} responses an optimizer "
        f"step; optimizer steps a batch: {steps * batch.epochs} (GBS / MBS = {steps}{passes})"
    )
    here = -(-rows // ranks)
    where = f"on each of {ranks} ranks" if ranks > 1 else "on one rank"
    if batch.micro_batch_rows is not None:
        yield (
            f"{role}: micro-batches of {batch.micro_batch_rows} responses {where}: K = {rows} / "
            f"({batch.micro_batch_rows} x {ranks}) = {batch.accumulation} backward passes an optimizer step"
        )
        return
    part = largest_pack(here, n, lengths, shares(config), None, batch.max_tokens)
    yield (
        f"{role}: {here} responses {where}, in micro-batches of at most {batch.max_tokens} tokens: {part.rows} "
        f"responses fit into one ({part.tokens} tokens), K = {-(-here // part.rows)} backward passes an optimizer step"
    )


def calibrate(model: ModelFacts, device: str, dtype: str, rows: int, threads: int) -> Speed:
    """A second of matmuls of the model's widths on this machine: many rows, and as many as are decoded at once."""
    import torch

    from verl.models.rows import choose_row_rule, linear_rows

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    kind = {"device": device, "dtype": getattr(torch, dtype)}
    count = max(2, min(16, 2**26 // (model.intermediate * model.hidden)))  # more than a cache holds
    weights = [torch.randn(model.intermediate, model.hidden, **kind) for _ in range(count)]

    example = torch.nn.Linear(model.hidden, model.intermediate, bias=False, **kind)
    rule = choose_row_rule(example)

    def seconds_of(rows: int) -> float:
        x, times = torch.randn(rule.padded(rows), model.hidden, **kind), 0
        for weight in weights:  # laid out once
            linear_rows(x, weight, None, rule)
        start = perf_counter()
        while times < count or perf_counter() - start < CALIBRATION:
            linear_rows(x, weights[times % count], None, rule)
            times += 1
            if device == "cuda":
                torch.cuda.synchronize()
        return (perf_counter() - start) / times

    try:
        with torch.no_grad():
            many, few = seconds_of(512), seconds_of(rows)
    finally:
        torch.set_num_threads(before)
    size = model.intermediate * model.hidden
    flops = 2 * 512 * size / many
    step = few / size * model.multiplied
    return Speed(
        flops * MATMUL_SHARE,
        lambda _: step,
        f"measured: {flops / 1e9:,.0f} GFLOP/s in matmuls of {threads} thread{'s'[: threads > 1]}, of which "
        f"{MATMUL_SHARE:.0%} are taken to be attained; {step * 1e3:.1f} ms for a token of {rows} responses",
    )


def given(model: ModelFacts, b: int, lengths: Lengths, tflops: float, bandwidth: float) -> Speed:
    """From numbers of the hardware: TFLOP/s that training attains, GB/s that decoding reads weights and keys with."""
    cache = 2 * model.layers * model.kv_heads * model.head_size * b * (lengths.prompt + lengths.response / 2)

    def step(rows: int) -> float:
        compute = 2 * model.multiplied * rows / (tflops * 1e12)
        return max((model.parameters * b + rows * cache) / (bandwidth * 1e9), compute)

    return Speed(tflops * 1e12, step, f"given: {tflops:g} TFLOP/s and {bandwidth:g} GB/s a process")


def stages_of(
    config: Config, plan: Plan, model: ModelFacts, critic: ModelFacts | None, lengths: Lengths, speed: Speed
) -> list[Stage]:
    """The stages of one step; rollout with equally long responses."""
    rows, n = config.data.train_batch_size * config.rollout.n, config.rollout.n
    engines = sum(spec.count for spec in plan.rollout) or plan.groups[0].count
    here = -(-rows // engines)
    running = min(here, config.rollout.max_num_seqs)
    prefill, decoded = rows // n * lengths.prompt, rows * lengths.response
    per_token = 2 * model.multiplied
    seconds = -(-here // running) * lengths.response * speed.decode_step(running)
    seconds += prefill * per_token / engines / speed.flops
    found = [Stage("rollout", prefill + decoded, (prefill + decoded) * per_token, seconds)]
    whole = pack(rows, n, lengths, shares(config))

    def add(name: str, facts: ModelFacts, forwards: int, role: str) -> None:
        flops = (
            2.0 * facts.multiplied * whole.tokens + 4.0 * facts.layers * facts.heads * facts.head_size * whole.scores
        )
        flops *= forwards
        found.append(Stage(name, whole.tokens, flops, flops / plan.group_of(role).count / speed.flops))

    if config.off_policy or config.actor.recompute_old_log_probs == "always":
        add("old log-probs", model, 1, "actor")
    if config.uses_reference:
        add("reference log-probs", model, 1, "reference")
    passes = 3 + config.model.enable_gradient_checkpointing
    if critic is not None:
        add("values", critic, 1, "critic")
        add("critic update", critic, passes * config.critic_batch(plan.group_of("critic").count).epochs, "critic")
    add("actor update", model, passes * config.actor.ppo_epochs, "actor")
    return found
