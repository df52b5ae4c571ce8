"""The two model heads that training needs, over any transformers decoder: log-probs and values of response tokens."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from verl.errors import ModelError
from verl.models.attention import AttentionContext
from verl.models.full_kl import full_kl
from verl.models.fused import install
from verl.models.log_probs import logit_rule, project, project_rows, response_log_probs, temper
from verl.models.packed import PackedBatch, PackedContext, decoder_states
from verl.models.plain import PlainDecoder, plain_decoder
from verl.models.rows import RowRule, apply_row_rule, choose_row_rule
from verl.models.support import check_support

DROPOUT_RATES = ("dropout", "attention_dropout", "activation_dropout", "hidden_dropout", "layerdrop")


class PolicyModel(nn.Module):
    """A causal language model that answers with log-probs of response tokens.

    Everything happens inside this module's forward, so that a sharded vocabulary projection is whole when it is used.
    Dropout is switched off: sampling and training must see the same distribution.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        head = model.get_output_embeddings()
        if head is None:
            raise ModelError(f"{type(model).__name__} has no vocabulary projection", fix="use a causal language model")
        self.model = disable_dropout(model)
        self.logits_of = logit_rule(model.config)

    @cached_property
    def key_shape(self) -> tuple[int, int]:
        """Key-value heads and their width, as a forward shows them: configurations name them in many ways.

        Raises:
            ModelError: packed attention is not what this model needs.
        """
        return check_support(self.model)

    @cached_property
    def rows(self) -> RowRule:
        """Found at first use, when the parameters have the dtype and the place that they compute in.

        Raises:
            ModelError: packed attention is not what this model needs.
        """
        assert self.key_shape
        return follow_row_rule(self.model)

    @cached_property
    def plain(self) -> PlainDecoder | None:
        return plain_decoder(self.model.base_model, self.rows)

    def forward(
        self, packed: PackedBatch, temperature: float, reference: PolicyModel | None = None
    ) -> tuple[Tensor, ...]:
        """Log-probs (M,) of ``packed.targets`` and entropies (M,), in the order of the pack.

        Args:
            reference: a third result, the KL divergence (M,) of this policy from that one over the whole vocabulary.
        """
        predictors = self.predictors(packed)
        head = self.model.get_output_embeddings()
        found = response_log_probs(
            predictors, head.weight, head.bias, packed.targets, temperature, self.rows, self.logits_of
        )
        if reference is None:
            return found
        with torch.no_grad():
            others = reference.predictors(packed)
        logits, other_logits = (partial(model.logits, temperature=temperature) for model in (self, reference))
        return (*found, full_kl(predictors, logits, others, other_logits))

    def predictors(self, packed: PackedBatch) -> Tensor:
        """Hidden states (M, H) that predict ``packed.targets``."""
        packed = packed.filled(self.rows.padded)
        hidden = self.hidden_states(packed.input_ids, packed.position_ids, PackedContext(packed))
        return hidden.index_select(0, packed.response_index)

    def hidden_states(self, input_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """Last hidden states (T, H) of packed tokens (T,), T of :meth:`RowRule.padded`."""
        modules = torch.is_grad_enabled() and self.model.training  # they may be told to compute again
        if not modules and self.plain is not None and self.plain.whole:
            return self.plain(input_ids, position_ids, context)
        return decoder_states(self.model.base_model, input_ids, position_ids, context)

    def logits(self, hidden: Tensor, temperature: float | Tensor = 1.0) -> Tensor:
        """(N, H) hidden states -> (N, V) tempered logits, the same bits as in :meth:`forward`."""
        head = self.model.get_output_embeddings()
        return project(hidden, head.weight, head.bias, temperature, self.rows, self.logits_of)

    def logits_by_piece(self, hidden: Tensor, temperature: Tensor, rows: int) -> Iterator[Tensor]:
        """What :meth:`logits` gives, some rows at a time: few enough of them stay in a CPU's cache."""
        head = self.model.get_output_embeddings()
        projected = project_rows(hidden, head.weight, head.bias, self.rows)
        for piece, by in zip(projected.split(rows), temperature.split(rows), strict=True):
            yield temper(piece, by, self.logits_of)


class ValueModel(nn.Module):
    """A decoder with a linear value head; the value of token t is read from the hidden state that predicts it.

    A sequence-classification model brings its head: its score is the value. The head of a causal language model starts
    at zero, so that a fresh critic says 0 everywhere and first learns the mean return. Heads compute in float32.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.backbone = disable_dropout(model.base_model)
        if isinstance(getattr(model, "score", None), nn.Linear):
            self.value_head: nn.Linear = model.score.float()  # type: ignore[assignment]
            self.value_head.__class__ = _ValueHead
            return
        embedding = self.backbone.get_input_embeddings().weight
        self.value_head = _ValueHead(embedding.shape[1], 1, device=embedding.device)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @cached_property
    def rows(self) -> RowRule:
        """See :attr:`PolicyModel.rows`."""
        check_support(self.backbone)
        return follow_row_rule(self.backbone)

    def forward(self, packed: PackedBatch) -> Tensor:
        """Values (M,) of the response tokens, in the value head's dtype."""
        packed = packed.filled(self.rows.padded)
        hidden = decoder_states(self.backbone, packed.input_ids, packed.position_ids, PackedContext(packed))
        predictors = hidden.index_select(0, packed.response_index)
        return self.value_head(predictors.to(self.value_head.weight.dtype))  # type: ignore[no-any-return]


class _ValueHead(nn.Linear):
    """(M, H) -> (M,), row by row: the bits of a matmul with one column depend on how many rows it has."""

    def forward(self, input: Tensor) -> Tensor:
        rows = input.shape[0]
        # Fewer than 8 rows are summed in another order; see LEAST_ROWS of verl.models.native.training.
        values = (F.pad(input, (0, 0, 0, -rows % 8)) * self.weight).sum(1)[:rows]
        return values if self.bias is None else values + self.bias


def follow_row_rule(model: PreTrainedModel, dtype: torch.dtype | None = None) -> RowRule:
    """See :func:`choose_row_rule`; the model follows it from then on."""
    rule = choose_row_rule(model, dtype)
    apply_row_rule(model, rule)
    install(model, rule)
    return rule


def disable_dropout(model: PreTrainedModel) -> PreTrainedModel:
    """Also where layers keep a rate of their own for the functional form, used in training mode only."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for rate in DROPOUT_RATES:
            if isinstance(getattr(module, rate, None), float):
                setattr(module, rate, 0.0)
    return model


def enable_checkpointing(model: PreTrainedModel) -> None:
    """Recompute activations in the backward pass."""
    # transformers renamed it in the middle of version 5; the old name warns where there is a new one.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": False})
    model.train()  # layers checkpoint in training mode only; dropout is off in either


def model_device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device
