"""``verl plan``: the arithmetic of the batch sizes in words, and tokens, FLOPs and time of a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING

from verl.diagnostics.plan import Lengths, Pack, largest_pack, pack, shares
from verl.models.facts import ModelFacts

if TYPE_CHECKING:
    from verl.cluster.placement import Plan
    from verl.config import BatchPlan, Config

PASSES = 3  # forwards that a forward and a backward pass cost
# Of the calibration: layers of its two models, tokens of a micro-batch and of a sequence at most, repetitions.
LAYERS, PACKED, LONGEST, TIMES = (1, 3), 256, 256, 3


@dataclass(frozen=True)
class Speed:
    """Of one process."""

    flops: float  # a second, of training, attained
    decode_step: Callable[[int], float]  # seconds of one token of so many responses
    source: str  # in words


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


def calibrate(config: Config, model: ModelFacts, device: str, rows: int, threads: int, lengths: Lengths) -> Speed:
    """Two models of the run's shape, with one and with three layers of random weights, do on this machine what the run
    will: a forward and backward pass over a micro-batch, and tokens of ``rows`` responses at once in the engine. What
    the layer more took is taken for every layer."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        small, large = (_measure(config, layers, device, rows, lengths) for layers in LAYERS)
    finally:
        torch.set_num_threads(before)
    (part, first, token), (_, more, later) = small, large
    beyond = (model.layers - LAYERS[0]) / (LAYERS[1] - LAYERS[0])
    seconds, step = first + beyond * max(more - first, 0.0), token + beyond * max(later - token, 0.0)
    flops = PASSES * _forward_flops(model, part) / seconds
    return Speed(
        flops,
        lambda _: step,
        f"measured with {LAYERS[0]} and {LAYERS[1]} layers on {threads} thread{'s'[: threads > 1]}: "
        f"{flops / 1e9:,.0f} GFLOP/s in training, {step * 1e3:.1f} ms for a token of {rows} responses",
    )


def _measure(config: Config, layers: int, device: str, rows: int, lengths: Lengths) -> tuple[Pack, float, float]:
    """What was packed, and the seconds of its forward and backward pass, and of a token of all ``rows``."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl.models.attention import ATTENTION_NAME
    from verl.models.loading import load_config
    from verl.models.packed import pack_rows
    from verl.models.policy import PolicyModel
    from verl.rollout.embedded import EmbeddedEngine, EngineLimits
    from verl.rollout.protocol import Request, SamplingParams, Slot

    shape = load_config(config.model.path, config.model.trust_remote_code)
    text = shape.get_text_config()
    text.num_hidden_layers, text.layer_types = layers, (getattr(text, "layer_types", None) or [])[:layers] or None
    built = AutoModelForCausalLM.from_config(
        shape, dtype=getattr(torch, config.model.dtype), attn_implementation=ATTENTION_NAME
    )
    policy = PolicyModel(built.to(device))
    n, prompt = config.rollout.n, min(lengths.prompt, LONGEST)
    response = min(lengths.response, LONGEST)
    taken = largest_pack(rows, n, Lengths(prompt, response), shares(config), None, PACKED)
    packed = pack_rows(
        [[1] * prompt] * taken.rows,
        [[1] * response] * taken.rows,
        response,
        [row // n for row in range(taken.rows)] if shares(config) else None,
    )
    packed = packed.to(device) if device != "cpu" else packed

    def train() -> None:
        policy(packed, 1.0)[0].sum().backward()
        policy.zero_grad(set_to_none=True)

    def decode() -> Callable[[], object]:
        middle = min(prompt + response // 2, LONGEST)
        params = SamplingParams(8 * TIMES, ignore_eos=True)
        engine = EmbeddedEngine(policy, _NoText(), EngineLimits(rows, longest=middle + 8 * TIMES), ())  # type: ignore[arg-type]
        engine.submit([Request(Slot(str(row // n), row % n), [1] * middle, params) for row in range(rows)])
        fed = -1
        while fed != (fed := engine.stats().prefill_tokens):  # until no prompt is fed any more
            engine.step()
        return engine.step

    return taken, _median_seconds(train), _median_seconds(decode())


class _NoText:
    """As much of a tokenizer as an engine asks for that looks for no stop strings."""

    def decode(self, ids: object) -> str:
        return ""


def _median_seconds(work: Callable[[], object]) -> float:
    import torch

    times = []
    for _ in range(TIMES):
        start = perf_counter()
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(perf_counter() - start)
    return median(times)


def given(model: ModelFacts, b: int, lengths: Lengths, tflops: float, bandwidth: float) -> Speed:
    """From numbers of the hardware: TFLOP/s that training attains, GB/s that decoding reads weights and keys with."""
    cache = 2 * model.layers * model.kv_heads * model.head_size * b * (lengths.prompt + lengths.response / 2)

    def step(rows: int) -> float:
        compute = 2 * model.multiplied * rows / (tflops * 1e12)
        return max((model.parameters * b + rows * cache) / (bandwidth * 1e9), compute)

    return Speed(tflops * 1e12, step, f"given: {tflops:g} TFLOP/s and {bandwidth:g} GB/s a process")


def _forward_flops(model: ModelFacts, part: Pack) -> float:
    return 2.0 * model.multiplied * part.tokens + 4.0 * model.layers * model.heads * model.head_size * part.scores


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
        flops = forwards * _forward_flops(facts, whole)
        found.append(Stage(name, whole.tokens, flops, flops / plan.group_of(role).count / speed.flops))

    if config.off_policy or config.actor.recompute_old_log_probs == "always":
        add("old log-probs", model, 1, "actor")
    if config.uses_reference:
        add("reference log-probs", model, 1, "reference")
    passes = PASSES + config.model.enable_gradient_checkpointing
    if critic is not None:
        add("values", critic, 1, "critic")
        add("critic update", critic, passes * config.critic_batch(plan.group_of("critic").count).epochs, "critic")
    add("actor update", model, passes * config.actor.ppo_epochs, "actor")
    return found
