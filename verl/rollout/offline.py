"""Text in, text out: the embedded engine without a trainer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.data.rendering import render
from verl.data.rows import BadRow, FileRows, PromptRow
from verl.data.tables import expand_files
from verl.errors import DataError, EngineError, ModelError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, stop_ids
from verl.models.policy import PolicyModel
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.protocol import Request, Result, RolloutEngine, SamplingParams, Slot
from verl.rollout.seeds import slot_seed
from verl.rollout.text import Decode, TextStream, response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import DataConfig

SHOWN_BAD_ROWS = 5


# --- prompts -------------------------------------------------------------------------------------------------------


def plain_prompt(text: str, number: int, location: str) -> PromptRow:
    """A row that is nothing but a prompt. Raises DataError for a blank one."""
    if not text.strip():
        raise DataError("A prompt is empty.", location, "give it some text")
    return PromptRow(text, data_source="", ground_truth=None, extra_info={}, row_index=number, location=location)


def read_prompts(file: str, config: DataConfig) -> list[PromptRow]:
    """Prompts of a data file by ``config.prompt_key``, or of a ``.txt``: each line that is not blank.

    Raises:
        DataError: it cannot be read, or rows have no prompt (all counted, the first few named).
    """
    if file.endswith(".txt"):
        return [prompt for path in expand_files([file], "--input") for prompt in _lines(path)]
    source = FileRows([file], config, "--input")
    rows = source.read(0, len(source))
    bad = [f"\n    {row}" for row in rows if isinstance(row, BadRow)]
    if bad:
        more = f"\n    and {len(bad) - SHOWN_BAD_ROWS} more" if len(bad) > SHOWN_BAD_ROWS else ""
        what = f"{len(bad)} of {len(rows)} rows have no prompt."
        raise DataError(what, "".join(bad[:SHOWN_BAD_ROWS]) + more, "correct or remove them")
    return [row for row in rows if isinstance(row, PromptRow)]


def _lines(path: Path) -> list[PromptRow]:
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise DataError("A file of prompts is not UTF-8 text.", path, "save it as UTF-8") from error
    found = [plain_prompt(line, i, f"{path}, line {i + 1}") for i, line in enumerate(lines) if line.strip()]
    if not found:
        raise DataError("A file of prompts has no line with text.", path, "write one prompt a line")
    return found


def as_chats(rows: Sequence[PromptRow], system: str | None = None) -> list[PromptRow]:
    """Plain text becomes a user's message; ``system`` goes before it, and before chats without one of their own."""
    chats = []
    for row in rows:
        messages = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        if system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": system}, *messages]
        chats.append(replace(row, prompt=messages))
    return chats


def requests_for(
    rows: Sequence[PromptRow],
    tokenizer: PreTrainedTokenizerBase,
    sampling: SamplingParams,
    n: int = 1,
    seed: int = 1,
    template_kwargs: dict[str, Any] | None = None,
) -> list[Request]:
    """``n`` requests a prompt, those of a prompt side by side, each with a seed of its own.

    Raises:
        DataError: a chat that the template refuses.
        ModelError: chats, and the tokenizer has no chat template.
    """
    if not tokenizer.chat_template and not all(isinstance(row.prompt, str) for row in rows):
        fix = "use an instruction-tuned model, or let it continue the text as it is with --raw"
        raise ModelError("the model's tokenizer has no chat template", tokenizer.name_or_path, fix)
    ids, refused = render(rows, tokenizer, template_kwargs)
    for place, reason in refused.items():
        where = rows[place].location
        raise DataError("The chat template refuses a prompt.", f"{where}: {reason}", "change its messages")
    return [
        Request(Slot(str(number), i), prompt, replace(sampling, seed=slot_seed(seed, str(number), i)))
        for number, prompt in enumerate(ids)
        for i in range(n)
    ]


# --- responses -----------------------------------------------------------------------------------------------------


def load_engine(
    model: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    dtype: str = "bfloat16",
    trust_remote_code: bool = False,
    limits: EngineLimits | None = None,
    device: str | None = None,
) -> EmbeddedEngine:
    """An engine with the weights of what ``model.path`` takes; ``device`` None: the GPU if there is one.

    Raises:
        ModelError: no such model, or it cannot be loaded.
    """
    lm = load_causal_lm(model, getattr(torch, dtype), trust_remote_code, attn_implementation=ATTENTION_NAME)
    policy = PolicyModel(lm.to(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    return EmbeddedEngine(policy, tokenizer, limits, stop_ids(model, tokenizer))


def in_order(
    engine: RolloutEngine, requests: Sequence[Request], finished: Callable[[int], None] = lambda count: None
) -> Iterator[Result]:
    """The result of each request, in their order, each as soon as those before it are there.

    Args:
        finished: told how many responses have ended, in any order.
    """
    engine.submit(list(requests))
    results: dict[Slot, Result] = {}
    count = 0
    for request in requests:
        while request.slot not in results:
            ended = engine.step()
            results.update((result.slot, result) for result in ended)
            if ended:
                count += len(ended)
                finished(count)
        yield results.pop(request.slot)


def stream(engine: EmbeddedEngine, request: Request, decode: Decode) -> Iterator[str]:
    """The response's text in pieces, as it is sampled.

    Raises:
        EngineError: as :func:`require_room`.
    """
    engine.submit([request])
    text = TextStream(decode, request.sampling.stop)
    while True:
        ended = engine.step()
        if ended:
            require_room(ended[0], request)
            sampling = request.sampling
            yield text.finish(response_text(ended[0], decode, sampling.stop, sampling.min_new_tokens))
            return
        yield text.grow(engine.scheduler.active[0].ids)


def require_room(result: Result, request: Request) -> None:
    """Raise EngineError for a prompt that fills all positions of the model."""
    if result.finish_reason == "refused":
        what = f"prompt {int(request.slot.uid) + 1} is as long as all positions of the model"
        raise EngineError(what, f"{len(request.prompt_ids)} tokens", "shorten it")
