"""A reward model as a reward: scores of responses by a sequence-classification model, packed."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from verl.config import Config
from verl.config.schema_reward import RewardModelConfig
from verl.data.packing import plan_micro_batches
from verl.data.rendering import Renderer, UnusableError, cut
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_classifier, load_tokenizer, stop_ids
from verl.models.packed import pack_rows
from verl.models.policy import ValueModel, model_device
from verl.protocol import DataProto, check_columns
from verl.rewards.functions import Pending, Reward
from verl.rewards.results import Score, check_result

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLUMNS = ("responses", "attention_mask", "prompt_ids", "raw_prompt", "response_text", "uid")


class RewardModel(Reward):
    """Scores a response by what the model's head says behind its last token.

    A model with the actor's tokenizer and chat template reads the very ids that were sampled. Any other reads prompt
    and response rendered anew by its own.

    Args:
        model: is frozen here.
        tokenizer: the model's own.
        ends: token ids that end a response for it.
        actor_tokenizer: what the ids of a batch are of.
        positions: most tokens that the model can read; None: any number.
        alone: nothing else computes in this process, so that groups are scored while others are being sampled.
    """

    def __init__(
        self,
        model: ValueModel,
        config: RewardModelConfig,
        tokenizer: PreTrainedTokenizerBase,
        ends: Sequence[int],
        actor_tokenizer: PreTrainedTokenizerBase,
        positions: int | None,
        alone: bool = False,
    ) -> None:
        self.model, self._config = model.requires_grad_(False).eval(), config
        self._limit = min(config.max_token_len_per_gpu, config.max_length or 2**60, positions or 2**60)
        self._renderer = None if _alike(tokenizer, actor_tokenizer) else Renderer(tokenizer, ends, {})
        self._threads = ThreadPoolExecutor(1, "reward-model") if alone else None

    def begin(self, rows: DataProto) -> Pending | None:
        return None if self._threads is None else self._threads.submit(self._score, rows).result

    def told(self, rows: DataProto) -> list[Hashable]:
        return super().told(rows) if self._renderer else [tuple(texts[1]) for texts in self._texts(rows)]

    def score(self, rows: DataProto) -> list[Score]:
        """See :class:`verl.rewards.functions.Reward`; also asks for the columns ``COLUMNS``."""
        return (self.begin(rows) or partial(self._score, rows))()

    def _score(self, rows: DataProto) -> list[Score]:
        check_columns(rows, *COLUMNS)
        scores: list[Score | None] = [None] * len(rows)
        read: list[tuple[list[int], list[int]]] = []  # what the rows of a group share, and the rest of each
        places, groups = [], []
        for place, texts in enumerate(self._texts(rows)):
            if isinstance(texts, str):
                scores[place] = Score(None, "failed", reason=texts)
                continue
            shared, rest = texts
            whole = self._renderer is None and len(shared) + len(rest) <= self._limit
            if not whole:
                shared, rest = cut([*shared, *rest], self._limit, self._config.truncation), []
            places.append(place)
            read.append((shared, rest))
            groups.append(rows.non_tensor_batch["uid"][place] if whole else place)
        for place, value in zip(places, self._values(read, groups), strict=True):
            scores[place] = check_result(value)
        return scores  # type: ignore[return-value]  # every place has one

    def _texts(self, rows: DataProto) -> list[tuple[list[int], list[int]] | str]:
        """Of each row prompt and response as ids, or why there are none."""
        columns, responses = rows.non_tensor_batch, rows.tensors["responses"]
        if self._renderer is None:
            lengths = rows.tensors["attention_mask"][:, -responses.shape[1] :].sum(1).tolist()
            sampled = zip(columns["prompt_ids"].tolist(), responses, lengths, strict=True)
            return [(list(prompt), ids[:length].tolist()) for prompt, ids, length in sampled]
        return [self._rendered(*row) for row in zip(columns["raw_prompt"], columns["response_text"], strict=True)]

    def _rendered(self, prompt: Any, response: str) -> tuple[list[int], list[int]] | str:
        assert self._renderer is not None
        try:
            return self._renderer.answer(prompt, response, "a response").ids, []
        except UnusableError as error:
            return str(error)

    @torch.no_grad()
    def _values(self, read: list[tuple[list[int], list[int]]], groups: list[Any]) -> list[float]:
        """The model's scores, in order."""
        values = [0.0] * len(read)
        # A place behind the last token, whose value is the score, is counted but not computed.
        plan = plan_micro_batches(
            [len(rest) + 1 for _, rest in read],
            groups,
            max_tokens=self._config.max_token_len_per_gpu + 1,
            prompt_lengths=[len(shared) for shared, _ in read],
            shared=True,
        )
        for rows in plan:
            numbers = {group: number for number, group in enumerate(dict.fromkeys(groups[i] for i in rows))}
            responses = [[*read[i][1], 0] for i in rows]
            packed = pack_rows(
                [read[i][0] for i in rows], responses, max(map(len, responses)), [numbers[groups[i]] for i in rows]
            )
            ends = torch.tensor([len(response) - 1 for response in responses])
            packed = packed.only(packed.columns == ends[packed.rows]).to(model_device(self.model))
            for i, value in zip(rows, self.model(packed).float().tolist(), strict=True):
                values[i] = value
        return values


def load_reward_model(
    config: Config, device: torch.device, actor_tokenizer: PreTrainedTokenizerBase, alone: bool = False
) -> RewardModel | None:
    """The model of ``reward.model``, computing in ``model.dtype``; None where there is none.

    Args:
        alone: see :class:`RewardModel`.

    Raises:
        ModelError: it cannot be loaded.
    """
    path = config.reward.model.path
    if path is None:
        return None
    trusted = config.reward.model.trust_remote_code
    model = load_classifier(path, getattr(torch, config.model.dtype), trusted, ATTENTION_NAME).to(device)
    tokenizer = load_tokenizer(path, trusted)
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    ends = stop_ids(path, tokenizer)
    return RewardModel(ValueModel(model), config.reward.model, tokenizer, ends, actor_tokenizer, positions, alone)


def _alike(one: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase) -> bool:
    return one.get_vocab() == other.get_vocab() and one.chat_template == other.chat_template
