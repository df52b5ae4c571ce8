"""Refuse, by name, a decoder that packed attention would run wrongly.

Some decoders bring an attention of their own, mix tokens in other ways (state space, convolution), or change their
logits behind the projection. They would run without an error and give the probabilities of another model.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from verl.errors import ModelError
from verl.models.packed import PackedContext, pack_rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from transformers import PreTrainedModel

FIX = "use a model with plain attention in every layer, such as Llama, Qwen, Mistral or GPT-2"
PROBE = ([1, 2, 3, 4, 5], [6, 7, 8])


class _CountingContext(PackedContext):
    """Notes which layers asked it to attend."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.layers: set[int] = set()

    def attend(self, layer: int, *args: Any) -> Tensor:  # type: ignore[override]
        self.layers.add(layer)
        return super().attend(layer, *args)


@torch.no_grad()
def check_support(model: PreTrainedModel) -> None:
    """Run a few tokens and see that rows of a pack do not touch and that nothing follows the vocabulary projection.

    Args:
        model: a causal language model, or a decoder without a vocabulary projection.

    Raises:
        ModelError: packed attention is not what this model needs.
    """
    name, device = type(model).__name__, next(model.parameters()).device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    rows = [[token % vocabulary for token in row] for row in PROBE]
    with _evaluating(model):
        try:
            packed, layers, together = _states(model.base_model, rows, device)
            alone = _states(model.base_model, rows[1:], device)[2]
        except ModelError as error:
            raise ModelError(f"{name} is not supported: {error.what}", error.value, error.fix) from error
        except (RuntimeError, TypeError, AttributeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ModelError(f"{name} does not run with packed attention: {reason}", fix=FIX) from error
        count = model.config.get_text_config().num_hidden_layers
        if len(layers) != count:
            raise ModelError(f"{name} uses packed attention in {len(layers)} of its {count} layers only", fix=FIX)
        if not _close(together[len(rows[0]) :], alone):
            raise ModelError(f"{name} lets tokens of one row of a pack reach another row", fix=FIX)
        head = model.get_output_embeddings()
        if head is not None and model.base_model is not model:
            context = PackedContext(packed)
            own = model(
                input_ids=packed.input_ids[None],
                position_ids=packed.position_ids[None],
                use_cache=False,
                attention_context=context,
            ).logits[0]
            if not _close(nn.functional.linear(together, head.weight, head.bias), own):
                raise ModelError(f"{name} changes its logits behind the vocabulary projection", fix=FIX)


def _states(decoder: nn.Module, rows: list[list[int]], device: torch.device) -> tuple[Any, set[int], Tensor]:
    packed = pack_rows(rows, [[] for _ in rows], 0).to(device)
    context = _CountingContext(packed)
    out = decoder(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        attention_context=context,
    )
    return packed, context.layers, out.last_hidden_state[0]


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
