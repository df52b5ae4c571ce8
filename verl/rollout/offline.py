"""Text in, text out: the embedded engine without a trainer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from verl.errors import EngineError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, load_tokenizer, require_chat_template, stop_ids
from verl.models.policy import PolicyModel
from verl.rollout.embedded import EmbeddedEngine
from verl.rollout.protocol import Request, SamplingParams, Slot, generate
from verl.rollout.seeds import slot_seed


def generate_text(
    model: str,
    prompts: Sequence[str],
    *,
    raw: bool = False,
    n: int = 1,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 1,
    dtype: str = "bfloat16",
    trust_remote_code: bool = False,
) -> list[str]:
    """``n`` responses to each prompt, those of a prompt side by side, special tokens left out.

    Args:
        model: what ``model.path`` takes.
        raw: continue the text as it is; else each prompt is a user message for the chat template.

    Raises:
        ModelError: no such model, or no chat template (and not ``raw``).
        EngineError: an empty prompt, or one that leaves no room for a response.
    """
    tokenizer = load_tokenizer(model, trust_remote_code)
    if not raw:
        require_chat_template(tokenizer, model)
    lm = load_causal_lm(model, getattr(torch, dtype), trust_remote_code, attn_implementation=ATTENTION_NAME)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    engine = EmbeddedEngine(PolicyModel(lm.to(device)), tokenizer, end_tokens=stop_ids(model, tokenizer))
    requests = []
    for number, prompt in enumerate(prompts):
        message = [{"role": "user", "content": prompt}]
        ids = (
            tokenizer(prompt)["input_ids"]
            if raw
            else tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True, return_dict=False)
        )
        for index in range(n):
            sampling = SamplingParams(max_new_tokens, temperature, seed=slot_seed(seed, str(number), index))
            requests.append(Request(Slot(str(number), index), list(ids), sampling))
    results = generate(engine, requests)
    for request, result in zip(requests, results, strict=True):
        if result.finish_reason == "refused":
            raise EngineError(
                f"prompt {request.slot.uid} is as long as all positions of the model",
                f"{len(request.prompt_ids)} tokens",
                "shorten it",
            )
    return [tokenizer.decode(result.response_ids, skip_special_tokens=True) for result in results]
