"""Refuse, by name, a decoder that packed attention would run wrongly.

Some decoders bring an attention of their own, see other tokens than a causal window's, mix tokens in other ways (state
space, convolution), turn positions by a table that depends on the batch, or change their logits behind the projection.
They would run without an error and give the probabilities of another model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.errors import ModelError, first_line
from verl.models.attention import MASKS_ASKED, AttentionRule
from verl.models.log_probs import logit_rule
from verl.models.packed import PackedContext, decoder_states, pack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FIX = "use a model with plain attention in every layer, such as Llama, Qwen, Mistral, Gemma or GPT-2 (docs/models.md)"
PROBE = ([1, 2, 3, 4, 5], [6, 7, 8])
FAR = 2**40  # a place with more tokens before it than any window holds
BATCH_TABLES = ("longrope", "dynamic")  # rotary tables that follow the longest row of a batch
LAYER_KINDS = {"full_attention": False, "sliding_attention": True}  # whether it has a window


class NotingContext(PackedContext):
    """Notes what each layer asks of its attention."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.rules: dict[int, AttentionRule] = {}
        self.key_shape: tuple[int, int] | None = None

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, rule: AttentionRule) -> Tensor:
        self.rules[layer] = rule
        for shape in ((x.shape[0], x.shape[2]) for x in (key, value)):
            if self.key_shape not in (None, shape):
                raise ModelError("keys and values differ in their heads or widths", [self.key_shape, shape], FIX)
            self.key_shape = shape
        return super().attend(layer, query, key, value, rule)


@torch.no_grad()
def check_support(model: PreTrainedModel) -> tuple[int, int]:
    """Run a few tokens; see that attention is what is asked, rows do not touch and logits are the shared function's.

    Args:
        model: a causal language model, or a decoder without a vocabulary projection.

    Returns:
        Key-value heads and their width, the same in every layer.

    Raises:
        ModelError: packed attention is not what this model needs.
    """
    name, device = type(model).__name__, next(model.parameters()).device
    rows = probe_rows(model.get_input_embeddings().weight.shape[0])
    _check_rotary(name, model)
    heard: list[Callable[..., Tensor]] = []
    listening = MASKS_ASKED.set(heard)
    with _evaluating(model):
        try:
            alone = _states(model.base_model, rows[1:], device)[2]
            windows = {_window(mask) for mask in heard}
            packed, context, together = _states(model.base_model, rows, device)
            _check_windows(model.config.get_text_config(), context.rules, windows)
        except ModelError as error:
            raise ModelError(f"{name} is not supported: {error.what}", error.value, error.fix) from error
        except (RuntimeError, TypeError, AttributeError, ValueError, IndexError) as error:
            reason = first_line(error)
            raise ModelError(f"{name} does not run with packed attention: {reason}", fix=FIX) from error
        finally:
            MASKS_ASKED.reset(listening)
        if not bool(together.isfinite().all()):
            fix = "load other weights; where float16 overflows, compute in bfloat16 or float32 (model.dtype)"
            raise ModelError(
                f"{name} gives hidden states that are not finite: its weights are broken", together.dtype, fix
            )
        if not _close(together[len(rows[0]) :], alone):
            raise ModelError(f"{name} lets tokens of one row of a pack reach another row", fix=FIX)
        head = model.get_output_embeddings()
        if head is not None and model.base_model is not model:
            logits = nn.functional.linear(together, head.weight, head.bias)
            loud = 100 / float(logits.abs().max().clamp(min=1e-6))  # what bends large logits only shows as well
            hook = head.register_forward_hook(lambda module, inputs, out: out * loud)
            own = _run(model, packed, PackedContext(packed)).logits[0]
            hook.remove()
            if not _close(logit_rule(model.config).apply(logits * loud), own):
                raise ModelError(f"{name} changes its logits behind the vocabulary projection", fix=FIX)
    assert context.key_shape is not None  # as many layers attended as there are
    return context.key_shape


def probe_rows(vocabulary: int) -> list[list[int]]:
    return [[token % vocabulary for token in row] for row in PROBE]


def _check_rotary(name: str, model: nn.Module) -> None:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None) or ()
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds] if isinstance(kinds, str) else ():
            if any(table in kind for table in BATCH_TABLES):
                raise ModelError(
                    f"{name} turns positions by a table that depends on the other rows of a batch (rope_type)",
                    kind,
                    "use a model with another rope_type (default, linear, llama3, yarn)",
                )


def _check_windows(config: Any, rules: dict[int, AttentionRule], windows: set[int | None]) -> None:
    """Every layer asked for the window that its kind and the model's own masks say."""
    count = config.num_hidden_layers
    if len(rules) != count:
        raise ModelError(f"packed attention is used in {len(rules)} of its {count} layers only", fix=FIX)
    kinds = getattr(config, "layer_types", None)
    for layer, rule in sorted(rules.items()):
        if kinds is not None and LAYER_KINDS.get(kinds[layer]) is not (rule.window is not None):
            raise ModelError(f"layer {layer} asks for {_words(rule.window)} but is of another kind", kinds[layer], FIX)
        if windows and (rule.window not in windows or (kinds is None and len(windows) > 1)):
            masks = ", ".join(map(_words, windows))
            raise ModelError(f"layer {layer} asks for {_words(rule.window)}, the model's masks for {masks}", fix=FIX)


def _words(window: int | None) -> str:
    return "no window" if window is None else f"a window of {window}"


def _window(mask: Callable[..., Tensor]) -> int | None:
    """How many tokens a query sees under a mask of transformers, itself included; None: all before it."""

    def sees(query: int, key: int) -> bool:
        return bool(mask(torch.tensor(0), torch.tensor(0), torch.tensor(query), torch.tensor(key)))

    if not sees(FAR, FAR) or sees(FAR, FAR + 1):
        raise ModelError("its attention is not causal", fix=FIX)
    if sees(FAR, 0):
        return None
    seen, hidden = FAR, 0
    while seen - hidden > 1:
        middle = (seen + hidden) // 2
        seen, hidden = (middle, hidden) if sees(FAR, middle) else (seen, middle)
    window = FAR - seen + 1
    if not all(sees(place, place - window + 1) and not sees(place, place - window) for place in (FAR + 1, FAR - 1)):
        raise ModelError("its attention sees other tokens than a sliding window's", fix=FIX)
    return window


def _states(decoder: nn.Module, rows: list[list[int]], device: torch.device) -> tuple[Any, NotingContext, Tensor]:
    packed = pack_rows(rows, [[] for _ in rows], 0).to(device)
    context = NotingContext(packed)
    return packed, context, decoder_states(decoder, packed.input_ids, packed.position_ids, context)


def _run(model: nn.Module, packed: Any, context: PackedContext) -> Any:
    ids, positions = packed.input_ids[None], packed.position_ids[None]
    return model(input_ids=ids, position_ids=positions, use_cache=False, attention_context=context)


def _close(a: Tensor, b: Tensor) -> bool:
    """Within what rounding can do; a wrong model differs by far more."""
    tolerance = 0.05 if a.dtype in (torch.bfloat16, torch.float16) else 1e-3
    a, b = a.double(), b.double()
    return bool((a - b).norm() <= tolerance * b.norm())  # False for NaN


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
