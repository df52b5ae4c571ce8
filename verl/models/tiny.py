"""A tiny random model with a byte tokenizer, made on the spot: for tests and for examples that need no download.

Token ids 0..255 are the bytes themselves; then ``<pad>``, ``<eos>``, the three roles and reserved ids up to 264, so
that the vocabulary is a multiple of 8. There is no BOS token.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import ModelError
from verl.models.model_cache import Report, build_once, report_to_stderr
from verl.models.quiet import without_bars

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

ALIAS = "tiny-llama"
FAMILIES = ("llama", "qwen2", "gpt2")
BYTES = 256
SPECIAL_TOKENS = ("<pad>", "<eos>", "<|system|>", "<|user|>", "<|assistant|>", "<|0|>", "<|1|>", "<|2|>")
PAD_ID, EOS_ID = BYTES, BYTES + 1
VOCABULARY = BYTES + len(SPECIAL_TOKENS)
# Raised when the recipe changes, so that cached models of the old one are not used.
RECIPE_VERSION = 1
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def get_tiny(report: Report = report_to_stderr) -> Path:
    """Folder of the default tiny Llama (seed 0) in the model cache, built if it is not there."""
    source: dict[str, object] = {"model": ALIAS, "recipe": RECIPE_VERSION, "seed": 0}
    return build_once(ALIAS, source, lambda folder: _build_into(folder), report)


def _build_into(folder: Path) -> None:
    build_tiny(folder)


def build_tiny(
    to: Path,
    seed: int = 0,
    family: str = "llama",
    hidden_size: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 2048,
    tie_embeddings: bool = True,
) -> Path:
    """Write a random fp32 decoder and its byte tokenizer as a Hugging Face folder; the same seed gives the same bits.

    Args:
        to: folder to write, made if missing.
        seed: of the random weights; torch's global generator is left as it was.
        family: one of ``FAMILIES``. ``gpt2`` has no grouped KV heads and ignores ``kv_heads``.
        hidden_size: divisible by ``heads``, the head width even (rotary embedding).
        max_positions: longest sequence in tokens.

    Returns:
        ``to``.

    Raises:
        ModelError: unknown family or sizes that do not fit together.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = _config(family, hidden_size, layers, heads, kv_heads, max_positions, tie_embeddings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    to = Path(to)
    with without_bars():
        model.save_pretrained(to)
    byte_tokenizer(max_positions).save_pretrained(to)
    return to


def _config(
    family: str, hidden_size: int, layers: int, heads: int, kv_heads: int, max_positions: int, tie_embeddings: bool
) -> PreTrainedConfig:
    from transformers import GPT2Config, LlamaConfig, Qwen2Config

    if family not in FAMILIES:
        raise ModelError("unknown family of tiny models", value=family, fix=f"one of {', '.join(FAMILIES)}")
    if hidden_size % (2 * heads) or heads % kv_heads:
        raise ModelError(
            "sizes of the tiny model do not fit together",
            value=f"hidden_size={hidden_size}, heads={heads}, kv_heads={kv_heads}",
            fix="hidden_size must be a multiple of twice the heads, and heads a multiple of kv_heads",
        )
    tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    if family == "gpt2":
        return GPT2Config(
            **tokens,
            n_embd=hidden_size,
            n_layer=layers,
            n_head=heads,
            n_positions=max_positions,
            tie_word_embeddings=tie_embeddings,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    kind = LlamaConfig if family == "llama" else Qwen2Config
    return kind(
        **tokens,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=max_positions,
        tie_word_embeddings=tie_embeddings,
    )


def byte_tokenizer(max_length: int = 2048) -> PreTrainedTokenizerFast:
    """Tokenizer with one token a UTF-8 byte (id = byte), special tokens from id 256 on, and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {symbol: byte for byte, symbol in enumerate(_byte_symbols())}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        eos_token="<eos>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def _byte_symbols() -> list[str]:
    """The printable character that byte-level tokenizers write for each byte, in byte order.

    GPT-2's table: printable Latin-1 bytes stand for themselves, the others for code points from 256 upwards.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    replacements = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(replacements)) for byte in range(BYTES)]
