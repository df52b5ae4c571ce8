"""Small models whose answers are known: random decoders that listen to their attention, and Markov chains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from verl.models.attention import ATTENTION_NAME
from verl.models.policy import PolicyModel

VOCABULARY, EOS = 40, 39
FAMILIES = ("llama", "qwen2", "gpt2")


PARTIAL_ROTARY = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
# Every family that is compared with transformers' own forward, and what makes its peculiarities show in a tiny model.
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
ALL_FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen2-windows": {"use_sliding_window": True, **WINDOWS},
    "qwen3": {"head_dim": 16},
    "gemma": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **WINDOWS},
    "gemma3_text": {"head_dim": 16, "final_logit_softcapping": 3.0, **WINDOWS},
    "mistral": {"sliding_window": 5},
    "gpt2": {},
    "gpt_neox": {"attention_bias": True, "rope_parameters": PARTIAL_ROTARY},
    "gpt_neox-serial": {"use_parallel_residual": False, "rope_parameters": PARTIAL_ROTARY},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "cohere": {"logit_scale": 0.5, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.5, **WINDOWS},
    "granite": {"logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.7},
    "phi3": {"sliding_window": 5},
    "olmo2": {},
    "starcoder2": {"sliding_window": 5},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "phi": {},
    "mixtral": {"num_local_experts": 4},
    "smollm3": {},
}


def has_avx512_bf16() -> bool:
    try:
        return "avx512_bf16" in Path("/proc/cpuinfo").read_text().split()
    except OSError:
        return False


needs_avx512_bf16 = pytest.mark.skipif(not has_avx512_bf16(), reason="compiled code needs bfloat16 instructions")


def config_of(family: str, **changes: Any) -> PreTrainedConfig:
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
    }
    if family == "gpt2":
        sizes = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    ends = {"eos_token_id": EOS, "bos_token_id": None, "pad_token_id": None}
    return AutoConfig.for_model(family.split("-")[0], **sizes | ends | ALL_FAMILIES.get(family, {}) | changes)


def random_lm(
    family: str, dtype: torch.dtype = torch.float32, seed: int = 0, attention: str = ATTENTION_NAME, **changes: Any
) -> PreTrainedModel:
    """Weights far larger than at a usual start, so that what a token attends to shows in its log-probs."""
    config = config_of(family, **changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.25 if parameter.dim() > 1 else parameter + noise * 0.1)
    return model.to(dtype).eval()


def random_policy(family: str = "llama", dtype: torch.dtype = torch.float32, **changes: Any) -> PolicyModel:
    return PolicyModel(random_lm(family, dtype, **changes))


def markov_policy(logits: Tensor, positions: int = 64, dtype: torch.dtype = torch.float32) -> PolicyModel:
    """A policy whose next-token logits depend on the last token alone: row t of ``logits`` (V, V), V even.

    Token t is embedded as a unit vector, both residual branches add nothing, and RMS norm makes it sqrt(V) long.
    """
    size = logits.shape[0]
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=positions,
        rms_norm_eps=0.0,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME, dtype=torch.float32)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.copy_(logits.T / size**0.5)
    return PolicyModel(model.to(dtype).eval())


def successor_logits(size: int, probability: float) -> Tensor:
    """Token t is followed by t + 1 (the last by the first) with this probability, by each other one equally."""
    logits = torch.zeros(size, size)
    step = float(np.log(probability / ((1 - probability) / (size - 1))))
    logits[torch.arange(size), (torch.arange(size) + 1) % size] = step
    return logits


def same_numbers(a: Tensor, b: Tensor, policy: PolicyModel) -> None:
    """Equal bits where the row rule is proven on this machine, else equal within the tolerance form of the law."""
    if policy.rows.proven:
        assert torch.equal(a, b), f"{int((a != b).sum())} of {a.numel()} differ, at most by {(a - b).abs().max()}"
    else:
        narrow = next(policy.parameters()).dtype == torch.bfloat16
        torch.testing.assert_close(a, b, atol=0.1 if narrow else 1e-4, rtol=0)
