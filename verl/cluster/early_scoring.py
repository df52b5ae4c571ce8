"""Groups are scored while the others of their batch are still being sampled."""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from verl.protocol import DataProto
from verl.protocol.columns import padded
from verl.rewards.scorer import RuleScorer
from verl.rollout.protocol import Request, Result, SamplingParams
from verl.rollout.text import response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LISTENING = "listening"  # Ray's concurrency group for what is heard while the process samples or trains
PROMPT_COLUMNS = ["uid", "data_source", "ground_truth", "extra_info", "raw_prompt", "prompt_ids"]


def for_scoring(prompts: DataProto) -> DataProto:
    """What scoring needs of a batch of prompts."""
    return prompts.select(batch_keys=[], non_tensor_batch_keys=PROMPT_COLUMNS)


class EarlyScoring:
    """Gives the scorer each group as soon as its last response has ended; ``score`` of the whole batch finds them.

    Results may be heard of in a thread of their own.
    """

    def __init__(self, scorer: RuleScorer, tokenizer: PreTrainedTokenizerBase) -> None:
        self._scorer, self._tokenizer = scorer, tokenizer
        self._prompts: dict[str, DataProto] = {}  # one row each, of prompts under way
        self._sampling: dict[str, SamplingParams] = {}
        self._missing: Counter[str] = Counter()
        self._groups: dict[str, list[Result]] = defaultdict(list)
        self._turn = threading.Lock()

    def expect(self, requests: list[Request], prompts: DataProto) -> None:
        """These are asked for; of a prompt that is asked for again, what there was is forgotten.

        Args:
            prompts: columns ``PROMPT_COLUMNS``, one row a prompt.
        """
        with self._turn:
            for place, uid in enumerate(prompts.non_tensor_batch["uid"]):
                self._forget(uid)
                self._prompts[uid] = prompts.select_idxs([place])
            for request in requests:
                self._sampling[request.slot.uid] = request.sampling
            self._missing.update(request.slot.uid for request in requests)

    def forget(self, uids: Iterable[str]) -> None:
        """They are scored as a batch now: what is heard of them from here on is too late."""
        with self._turn:
            for uid in uids:
                self._forget(uid)

    def _forget(self, uid: str) -> None:
        for known in (self._prompts, self._sampling, self._missing, self._groups):
            known.pop(uid, None)

    def finished(self, results: list[Result]) -> None:
        """After a step of the engine, with what has ended in it."""
        with self._turn:
            for result in results:
                uid = result.slot.uid
                if uid not in self._prompts:
                    continue
                self._groups[uid].append(result)
                self._missing[uid] -= 1
                if not self._missing[uid]:
                    if trained := [result for result in self._groups[uid] if result.loss_mask.any()]:
                        self._submit(uid, trained)
                    self._forget(uid)

    def _submit(self, uid: str, results: list[Result]) -> None:
        sampling = self._sampling[uid]
        texts = [response_text(r, self._decode, sampling.stop, sampling.min_new_tokens) for r in results]
        ids, mask = padded([result.response_ids.tolist() for result in results])
        own = {"index": [result.slot.index for result in results], "response_text": texts}
        rows = DataProto.from_dict({"responses": ids, "attention_mask": mask.long()}, own)
        self._scorer.submit(self._prompts[uid].repeat(len(results)).union(rows))

    def _decode(self, ids) -> str:  # type: ignore[no-untyped-def]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text


class Listener:
    """Tells :class:`EarlyScoring` in another process of what has ended in this one.

    Args:
        actor: Ray's handle of that process (it may be this one).
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def hear(self, results: list[Result]) -> None:
        """Nobody waits for it: what goes wrong shows when the batch is scored."""
        if results:
            self._actor.hear.options(concurrency_group=LISTENING).remote(results)
