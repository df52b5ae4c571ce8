"""Batch sizes that fit a machine: the arithmetic of ``verl init``, plain numbers in and out."""

from __future__ import annotations

from dataclasses import dataclass

from verl.models.facts import ModelFacts

GIB = 2**30
SPARE = 0.25  # share of the memory that is left to everything else
CACHE_SHARE = 0.3  # of what the weights leave: keys and values of the responses being generated
MOST_TOKENS = 16384  # in one backward pass; more gains nothing
MOST_SEQUENCES = {"cpu": 64, "cuda": 256}
BATCH_RESPONSES = {"cpu": 128, "cuda": 512}  # of one step: a steady gradient, and steps that end


@dataclass(frozen=True)
class Machine:
    memory: int  # bytes that a run may use: of the GPU with one, else of the machine
    cores: int
    gpus: int

    @property
    def device(self) -> str:
        return "cuda" if self.gpus else "cpu"


@dataclass(frozen=True)
class Wanted:
    """What is to be trained.

    Attributes:
        rows: training prompts.
        longest: tokens of the longest sequence, prompt and response.
        n: responses a prompt.
        critic, reference: whether there is one beside the actor: trained, frozen.
        bytes: of one number in compute: 2 for bfloat16, 4 for float32.
    """

    rows: int
    longest: int
    n: int
    critic: bool
    reference: bool
    bytes: int


@dataclass(frozen=True)
class Sizes:
    """Chosen sizes, and the bytes they come from.

    Attributes:
        prompts: of one training step and one optimizer step.
        sequences: decoded at once.
        tokens: of one backward pass.
        fits: whether the estimate is within the memory at all.
    """

    prompts: int
    sequences: int
    tokens: int
    checkpointing: bool
    fits: bool
    weights: int
    free: int
    per_sequence: int
    per_token: int


def choose_sizes(model: ModelFacts, machine: Machine, wanted: Wanted) -> Sizes:
    """The largest sizes within the memory, up to limits beyond which nothing is gained.

    A trained model takes 16 bytes a parameter (float32 weight, gradient and two moments of AdamW) and, computing in
    bfloat16, 2 more for the copy that computes; a frozen one its compute copy alone. A backward pass keeps, for every
    token and layer, about 16 vectors of the hidden and 6 of the intermediate size, and for each head and key the
    attention's weight in float32, twice in the compute type, and a mask; with gradient checkpointing one hidden vector
    a layer, and one layer whole. Measured on SmolLM2-135M in bfloat16: 1.67 and 3.34 MiB a token in rows of 304 and
    1,024 tokens, where this says 1.76 and 3.43.
    """
    copy = wanted.bytes if wanted.bytes < 4 else 0
    trained = model.parameters * (16 + copy) * (1 + wanted.critic)
    weights = trained + model.parameters * wanted.bytes * wanted.reference
    free = int(machine.memory * (1 - SPARE)) - weights
    per_sequence = 2 * model.layers * model.kv_heads * model.head_size * wanted.bytes * wanted.longest
    layer = (16 * model.hidden + 6 * model.intermediate) * wanted.bytes
    layer += model.heads * wanted.longest * (5 + 2 * wanted.bytes)
    plain, saving = model.layers * layer, model.layers * model.hidden * wanted.bytes + layer
    prompts = _power_of_two(min(wanted.rows, BATCH_RESPONSES[machine.device] // wanted.n))
    room = max(free, 0)
    sequences = min(prompts * wanted.n, MOST_SEQUENCES[machine.device], int(room * CACHE_SHARE) // per_sequence)
    left = room - max(sequences, 1) * per_sequence
    checkpointing = left // plain < wanted.longest
    per_token = saving if checkpointing else plain
    tokens = min(MOST_TOKENS, max(left, 0) // per_token // 256 * 256)
    fits = free > 0 and sequences >= 1 and tokens >= wanted.longest
    return Sizes(
        prompts, max(sequences, 1), max(tokens, wanted.longest), checkpointing, fits, weights, free, per_sequence,
        per_token,
    )  # fmt: skip


def _power_of_two(most: int) -> int:
    """The largest power of two that is at most ``most`` (1 for less)."""
    return 1 << max(most.bit_length() - 1, 0)
