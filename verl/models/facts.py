"""What of a model decides how much memory and time it takes, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of a decoder.

    Attributes:
        positions: most tokens of a sequence; None: no limit known.
        vocabulary: rows of the embedding.
        tied: the embedding is the vocabulary projection, too.
    """

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    positions: int | None
    vocabulary: int = 0
    tied: bool = True

    @property
    def multiplied(self) -> int:
        """Parameters that a token is multiplied with: all but an embedding that is only looked up."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)


def read_facts(path: str, trust_remote_code: bool = False, classifier: bool = False) -> ModelFacts:
    """Of a model folder, alias or hub id; no weight is read.

    Raises:
        ModelError: as :func:`verl.models.loading.load_config`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from verl.models.loading import load_config

    config = load_config(path, trust_remote_code, classifier)
    text = config.get_text_config()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    heads = text.num_attention_heads
    return ModelFacts(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        intermediate=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        positions=getattr(text, "max_position_embeddings", None),
        vocabulary=text.vocab_size,
        tied=model.get_input_embeddings().weight is model.get_output_embeddings().weight,
    )
