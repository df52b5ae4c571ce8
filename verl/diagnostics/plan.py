"""``verl plan``: the memory of every process of a run, from its configuration and the model's sizes alone.

Bytes of a trained model by parameter: 4 of the float32 master, 4 of its gradient, 8 of AdamW's moments; 2 more of the
copy that computes in bfloat16 and, on a CPU, 2 of that copy in oneDNN's layout. What a backward pass keeps is counted
from what the code saves: see :func:`kept_bytes`.

Shape legend of the comments: H hidden, I intermediate, A heads, K key-value heads, D head size, t queries and L keys of
a segment, b bytes of a number in compute.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from verl.models.facts import ModelFacts

if TYPE_CHECKING:
    from verl.cluster.placement import Group, Plan, ProcessSpec
    from verl.config import Config

GIB = 2**30
SPARE = 0.1  # share of the memory that a run should leave: the prediction is no promise
BLOCK, CHUNK = 128, 1024  # keys of a block of the pool; tokens whose logits are made together
SLICED, NARROWEST = 2**23, 1024  # numbers of the logits' gradient that exist at once; tokens of the vocabulary at least
# Of a process that has loaded the libraries and a model of no size, and sampled from it: measured, not derived
# (docs/planning.md).
LIBRARIES = {"cpu": int(0.48 * GIB), "cuda": int(0.6 * GIB)}
# In bfloat16 on a CPU oneDNN keeps the code of a product for every shape that it has met, the latest 1,024 of them:
# measured bytes of one, and how many a step adds beyond those that the row rule tries.
KERNEL, KERNELS_A_STEP, MOST_KERNELS = int(0.55 * 2**20), 40, 1024
CACHED = 0.5  # most of the free memory that keys and values take where nobody says how much


@dataclass(frozen=True)
class Machine:
    """What a run may use: bytes of a GPU, or of main memory where there is none; cores; GPUs."""

    memory: int
    cores: int
    gpus: int


def this_machine() -> Machine:
    """Memory that is free now (within the limit of a container), cores, and GPUs."""
    import torch

    from verl.cluster.threads import available_cores
    from verl.models.memory import free_memory

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Machine(torch.cuda.mem_get_info()[1] if gpus else free_memory(), available_cores(), gpus)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt and of a response: the longest, or those that are expected."""

    prompt: int
    response: int


@dataclass(frozen=True)
class Pack:
    """What one forward holds."""

    rows: int  # responses
    tokens: int  # packed
    scores: int  # sum over segments of padded queries x keys: of one head
    keys: int  # sum over segments of padded keys, those of the prompt with each of its responses


def pack(rows: int, n: int, lengths: Lengths, shared: bool) -> Pack:
    """So many responses, n of each prompt; the last token of a response is not part of it."""
    prompt, rest = lengths.prompt, lengths.response - 1
    keys = up(prompt + rest, 32)
    segments = [(rows, up(rest, 8), keys)] if shared else [(rows, up(prompt + rest, 8), keys)]
    groups = -(-rows // n) if shared else rows
    if shared:
        segments.append((groups, up(prompt, 8), up(prompt, 32)))
    return Pack(
        rows,
        groups * prompt + rows * rest,
        sum(count * t * length for count, t, length in segments),
        sum(count * length for count, _, length in segments),
    )


def largest_pack(available: int, n: int, lengths: Lengths, shared: bool, rows: int | None, tokens: int | None) -> Pack:
    """The most responses that the limits of one forward allow, one at least."""
    most = min(available, rows or available)
    if tokens is not None:
        most = bisect_right(range(1, most + 1), tokens, key=lambda count: pack(count, n, lengths, shared).tokens)
    return pack(max(most, 1), n, lengths, shared)


def kept_bytes(model: ModelFacts, part: Pack, b: int) -> int:
    """What one layer keeps for its backward pass. By token: inputs of both norms and what comes out of them (4 H),
    queries and the attention's output (2 A D), gate and up (2 I). By key: copies of keys and values (2 K D). By score:
    a weight."""
    width, kv = model.heads * model.head_size, model.kv_heads * model.head_size
    by_token = 4 * model.hidden + 2 * width + 2 * model.intermediate
    return (part.tokens * by_token + part.keys * 2 * kv + part.scores * model.heads) * b


def passing_bytes(model: ModelFacts, part: Pack, b: int) -> int:
    """What the backward pass of one layer needs beside that, and gives back: gradients of its scores or of its MLP."""
    return max(part.scores * model.heads * 2 * b, part.tokens * (4 * model.intermediate + 2 * model.hidden) * b)


def activations(model: ModelFacts, part: Pack, b: int, checkpointing: bool) -> int:
    """Bytes that a forward with gradient leaves behind in all layers; masks once."""
    layer, masks = kept_bytes(model, part, b), 4 * part.scores
    if checkpointing:
        return model.layers * part.tokens * model.hidden * b + masks
    return model.layers * layer + masks + 2 * part.tokens * model.hidden * b


@dataclass(frozen=True)
class Process:
    """Memory of one process, in bytes."""

    name: str
    count: int  # of processes like it
    device: str
    held: dict[str, int]  # by part, all the time
    stages: dict[str, dict[str, int]]  # by stage, the most that it needs beside; stages take turns

    @property
    def peak_stage(self) -> str:
        return max(self.stages, key=lambda stage: sum(self.stages[stage].values()))

    @property
    def peak(self) -> int:
        return sum(self.held.values()) + sum(self.stages[self.peak_stage].values())


def processes(
    config: Config, plan: Plan, model: ModelFacts, critic: ModelFacts | None, lengths: Lengths, memory: int
) -> list[Process]:
    """Of every process that holds a model. ``memory``: bytes that one may have; the cache takes half of the rest."""
    found = [
        _group(config, group, model, critic, lengths, memory, _staged(config, plan, model))
        for group in plan.groups
        if group.roles != {"reward"}
    ]
    for spec in plan.rollout:
        held = _libraries(config, spec, {model})
        held["rollout weights"] = _frozen(model, bytes_of(config), spec.device)
        held |= _staged(config, plan, model)
        stage = _rollout(config, spec, model, lengths, memory - sum(held.values()), plan.rollout[0].count)
        found.append(Process(f"{spec.pool}: rollout", spec.count, spec.device, held, {"rollout": stage}))
    return found


def shares(config: Config) -> bool:
    """Whether the responses of a group share their prompt in a pack."""
    sharing = config.actor.prefix_sharing
    return sharing == "on" or (sharing == "auto" and config.rollout.n > 1)


def bytes_of(config: Config) -> int:
    return 4 if config.model.dtype == "float32" else 2


def _libraries(config: Config, process: ProcessSpec, models: set[ModelFacts]) -> dict[str, int]:
    from verl.models.rows import LARGE, LARGEST, PACKED_BLOCK, PROBE_ROWS  # with torch

    held = {"libraries": LIBRARIES[process.device]}
    if process.device == "cpu" and bytes_of(config) < 4:
        shapes = {shape for model in models for shape in _weight_shapes(model)}
        small = [rows for rows in PROBE_ROWS if rows <= PACKED_BLOCK]
        tried = sum(len(small) + sum(rows * out * into <= LARGEST for rows in LARGE) for out, into in shapes)
        more = KERNELS_A_STEP * (config.trainer.total_training_steps or MOST_KERNELS)
        kernels = min(len({1, 2, process.threads}) * tried + more, MOST_KERNELS)
        held[f"code of {kernels} matrix products"] = kernels * KERNEL
    return held


def _weight_shapes(model: ModelFacts) -> set[tuple[int, int]]:
    hidden, width, kv = model.hidden, model.heads * model.head_size, model.kv_heads * model.head_size
    inner = {(model.intermediate, hidden), (hidden, model.intermediate)}
    return inner | {(width, hidden), (hidden, width), (kv, hidden), (model.vocabulary, hidden)}


def _frozen(model: ModelFacts, b: int, device: str) -> int:
    """Weights that compute; on a CPU in bfloat16 once more as oneDNN lays them out."""
    packed = b if device == "cpu" and b == 2 else 0
    return model.parameters * b + model.multiplied * packed


def _staged(config: Config, plan: Plan, model: ModelFacts) -> dict[str, int]:
    """Of the actor's first process and of rollout workers: what was sent, or is received while the version before it
    computes."""
    broadcast = plan.rollout and config.rollout.weight_sync == "broadcast"
    return {"weights of a broadcast": model.parameters * bytes_of(config)} if broadcast else {}


def _trained(config: Config, model: ModelFacts, ranks: int, device: str, name: str) -> dict[str, int]:
    b, sharded = bytes_of(config), ranks > 1 and config.actor.strategy == "fsdp2"
    share = -(-model.parameters // ranks) if sharded else model.parameters
    parts = {f"{name} master weights (float32)": 4 * share, f"{name} optimizer state": 8 * share}
    if not sharded and b < 4:
        parts[f"{name} compute weights ({config.model.dtype})"] = _frozen(model, b, device)
    return parts


def _group(
    config: Config,
    group: Group,
    model: ModelFacts,
    critic: ModelFacts | None,
    lengths: Lengths,
    memory: int,
    staged: dict[str, int],
) -> Process:
    """``staged``: what the actor keeps of weights that it has published."""
    b, ranks, device = bytes_of(config), group.count, group.device
    sharded, shared = ranks > 1 and config.actor.strategy == "fsdp2", shares(config)
    held = _libraries(config, group, {model, *([critic] if critic is not None and "critic" in group.roles else [])})
    held |= staged if "actor" in group.roles else {}
    stages: dict[str, dict[str, int]] = {}
    rows = -(-config.data.train_batch_size * config.rollout.n // ranks)
    for role, facts in (("actor", model), ("critic", critic)):
        if role not in group.roles or facts is None:
            continue
        held |= _trained(config, facts, ranks, device, role)
        batch = config.actor_batch(ranks) if role == "actor" else config.critic_batch(ranks)
        available = -(-batch.rows_per_mini_batch // ranks)
        part = largest_pack(available, config.rollout.n, lengths, shared, batch.micro_batch_rows, batch.max_tokens)
        several = part.rows < available
        # Sharded gradients are whole until the last backward pass of an optimizer step adds them up over the ranks.
        gradients = 4 * (facts.parameters if several or not sharded else -(-facts.parameters // ranks))
        stages[f"{role} update"] = _update(config, facts, part, gradients, several, role == "actor", sharded, device)
    if "reference" in group.roles:
        held["reference weights"] = _frozen(model, b, device)
        most, tokens = config.reference_batch()
        part = largest_pack(rows, config.rollout.n, lengths, shared, most, tokens)
        stages["reference log-probs"] = {
            "one layer": kept_bytes(model, part, b) + passing_bytes(model, part, b) // 2,
            "logits of a chunk": min(CHUNK, part.rows * lengths.response) * model.vocabulary * b,
        }
    held |= {"rollout weights": _frozen(model, b, device)} if "rollout" in group.roles and sharded else {}
    moved = _moved(config, held, sharded)
    if "rollout" in group.roles:
        there = sum(size for name, size in held.items() if "rollout" in moved.get(name, ["rollout"]))
        stages["rollout"] = _rollout(config, group, model, lengths, memory - there, ranks)
    for name, stage in [(name, stage) for name, needing in moved.items() for stage in needing & stages.keys()]:
        stages[stage][name] = held[name]
    held = {name: size for name, size in held.items() if name not in moved}
    whole, data = config.data.train_batch_size * config.rollout.n, config.data
    held["columns of a batch"] = whole * (24 * data.max_prompt_length + 54 * data.max_response_length)
    return Process(f"{group.pool}: {group.named_roles}", ranks, device, held, stages)


def _moved(config: Config, held: dict[str, int], sharded: bool) -> dict[str, set[str]]:
    """Parts that make room while another role works, each with the stages that it is there in."""
    found: dict[str, set[str]] = {}
    for role, asked in (("actor", config.actor), ("critic", config.critic)):
        masters, compute = f"{role} master weights (float32)", f"{role} compute weights ({config.model.dtype})"
        computing = compute if compute in held else masters
        if asked.param_offload:
            found[computing] = {f"{role} update", *["rollout"] * (role == "actor" and not sharded)}
        if asked.optimizer_offload:
            found |= {name: {f"{role} update"} for name in (masters, f"{role} optimizer state") if name != computing}
    found |= {"reference weights": {"reference log-probs"}} if config.ref.param_offload else {}
    return {name: stages for name, stages in found.items() if name in held}


def _update(
    config: Config, model: ModelFacts, part: Pack, gradients: int, several: bool, head: bool, sharded: bool, device: str
) -> dict[str, int]:
    """What a micro-batch's backward pass holds layer by layer, or all gradients behind it; and what is as large as the
    embedding, which finds no hole among what is smaller."""
    b, saving = bytes_of(config), config.model.enable_gradient_checkpointing
    words = model.vocabulary * model.hidden
    layer = passing_bytes(model, part, b) + (kept_bytes(model, part, b) if saving else 0)
    some = min(max(SLICED, part.tokens * NARROWEST), part.tokens * model.vocabulary)
    logits = head * b * max(min(CHUNK, part.tokens) * model.vocabulary, some)
    begun = {
        "gradients": gradients * several,
        "activations of a micro-batch": activations(model, part, b, saving),
        "one layer's backward" if layer > logits else "logits": max(layer, logits),
    }
    ended = {"gradients": gradients}
    # A tied projection's gradient waits for the embedding's; another comes to float32 before that.
    large = {"the embedding's gradient": words * (b * (1 + (head and model.tied)))}
    if sharded:
        ends = words * (1 if model.tied else 2)
        block = (model.parameters - ends) // model.layers
        # Whole are the embedding, the projection and one layer, while the next one comes.
        begun["gathered weights"] = b * (ends + 2 * block)
        # Flat and in float32, by gloo in a copy; of the embedding or of a layer.
        large["sums of gradients over the ranks"] = 4 * max(words, block) * 2
    needed = max(begun, ended, key=lambda parts: sum(parts.values())) | large
    if device == "cpu":
        # Of these and the float32 gradient: glibc gives an aligned tensor no hole of just its size. Where weights are
        # sharded that is true of all: what is gathered, given up and summed layer by layer lies between the rest.
        needed["holes of the last step"] = sum((needed if sharded else large).values()) + 4 * words * (not sharded)
    return needed


def _rollout(
    config: Config, process: ProcessSpec, model: ModelFacts, lengths: Lengths, left: int, engines: int
) -> dict[str, int]:
    b, rollout, data = bytes_of(config), config.rollout, config.data
    rows = min(rollout.max_num_seqs, -(-data.train_batch_size * rollout.n // engines))
    block = 2 * model.layers * model.kv_heads * model.head_size * BLOCK * b
    asked = getattr(process, "kv_cache_gb", None) or rollout.kv_cache_gb
    longest = -(-(data.max_prompt_length + data.max_response_length) // BLOCK)
    pool = (
        int(asked * GIB)
        if asked
        else max(longest * block, min(longest * rollout.max_num_seqs * block, int(left * CACHED)))
    )
    used = rows * -(-(lengths.prompt + lengths.response) // BLOCK) * block
    fed = min(rollout.max_num_batched_tokens, -(-rows // rollout.n) * lengths.prompt + rows)
    feeding = pack(max(1, fed // lengths.prompt), 1, Lengths(lengths.prompt, 1), False)
    return {
        # On a CPU the pool takes memory where it is written.
        "keys and values": min(pool, used) if process.device == "cpu" else pool,
        "one layer of a prefill": kept_bytes(model, feeding, b),
        "logits": rows * model.vocabulary * (b + 4),
    }


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def needed(found: list[Process]) -> int:
    """Bytes that must be there: of a GPU the largest process's, of main memory those of all processes together."""
    if any(process.device == "cuda" for process in found):
        return max(process.peak for process in found if process.device == "cuda")
    return sum(process.count * process.peak for process in found)


def planned(
    config: Config, machine: Machine, model: ModelFacts, critic: ModelFacts | None, lengths: Lengths
) -> tuple[Plan, list[Process]]:
    """The processes of a run on a machine, and the memory of those that hold a model."""
    from verl.cluster.placement import make_plan

    plan = make_plan(config, machine.cores, machine.gpus)
    count = 1 if machine.gpus else sum(p.count for p in (*plan.groups, *plan.rollout) if p.device == "cpu")
    return plan, processes(config, plan, model, critic, lengths, machine.memory // max(count, 1))


def to_fit(
    build: Callable[[list[str]], Config],
    machine: Machine,
    model: ModelFacts,
    critic: ModelFacts | None,
    lengths: Lengths,
) -> tuple[list[str], bool]:
    """The settings with which a run fits a machine: none, or those that cost least; else the smallest, and False.
    ``build``: gives the configuration with further settings."""

    def fits(config: Config) -> bool:
        return needed(planned(config, machine, model, critic, lengths)[1]) <= (1 - SPARE) * machine.memory

    config = build([])
    if fits(config):
        return [], True
    settings: list[str] = []
    for settings in smaller(config, planned(config, machine, model, critic, lengths)[0].groups[0].count):
        if fits(build(settings)):
            return settings, True
    return settings, False


def smaller(config: Config, ranks: int) -> Iterator[list[str]]:
    """Settings that need less memory, those that cost least first."""
    batch, actor = config.actor_batch(ranks), config.actor
    longest = config.data.max_prompt_length + config.data.max_response_length + config.bootstraps
    if batch.max_tokens is not None:
        limits = [batch.max_tokens, *(size for size in _halves(batch.max_tokens) if size > longest), longest]
        roles = ("actor", "critic") if config.uses_critic else ("actor",)
        sizes = [[f"{role}.ppo_max_token_len_per_gpu={limit}" for role in roles] for limit in dict.fromkeys(limits)]
    else:
        rows, total = batch.micro_batch_rows or 1, batch.rows_per_mini_batch // ranks
        limits = [rows, *(size for size in range(rows - 1, 0, -1) if total % size == 0)]
        sizes = [[f"actor.ppo_micro_batch_size_per_gpu={limit}"] for limit in limits]
    cache, running = config.rollout.kv_cache_gb, config.rollout.max_num_seqs
    if cache is not None:
        caches = [[], *([f"rollout.kv_cache_gb={cache / 2**i:g}"] for i in range(1, 6))]
    else:
        caches = [[], *([f"rollout.max_num_seqs={size}"] for size in _halves(running))]
    sizes[0] = []
    shards = [[], ["actor.strategy=fsdp2"]][: 1 + (ranks > 1 and actor.strategy != "fsdp2")]
    savings = [[], ["model.enable_gradient_checkpointing=true"]][: 2 - config.model.enable_gradient_checkpointing]
    for shard, saving, cache_words, size in product(shards, savings, caches, sizes):
        yield shard + saving + size + cache_words


def _halves(number: int) -> list[int]:
    return [number >> i for i in range(1, number.bit_length())]
