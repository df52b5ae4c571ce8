"""Groups are scored while the others of their batch are still being sampled."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from verl.protocol import DataProto
from verl.rewards.scorer import RuleScorer
from verl.rollout.protocol import Request, Result
from verl.rollout.text import response_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PROMPT_COLUMNS = ["uid", "data_source", "ground_truth", "extra_info", "raw_prompt"]


class EarlyScoring:
    """Gives the scorer each group as soon as its last response has ended; ``score`` of the whole batch finds them.

    Args:
        prompts: columns ``PROMPT_COLUMNS``, one row a prompt.
    """

    def __init__(
        self, scorer: RuleScorer, tokenizer: PreTrainedTokenizerBase, requests: list[Request], prompts: DataProto
    ) -> None:
        self._scorer, self._tokenizer, self._prompts = scorer, tokenizer, prompts
        self._places = {uid: place for place, uid in enumerate(prompts.non_tensor_batch["uid"])}
        self._sampling = {request.slot.uid: request.sampling for request in requests}
        self._missing = Counter(request.slot.uid for request in requests)
        self._groups: dict[str, list[Result]] = defaultdict(list)

    def finished(self, results: list[Result]) -> None:
        """After a step of the engine, with what has ended in it."""
        for result in results:
            uid = result.slot.uid
            self._groups[uid].append(result)
            self._missing[uid] -= 1
            if not self._missing[uid]:
                self._submit(uid, [result for result in self._groups.pop(uid) if result.loss_mask.any()])
        self._scorer.pump()

    def _submit(self, uid: str, results: list[Result]) -> None:
        sampling = self._sampling[uid]
        texts = [response_text(r, self._decode, sampling.stop, sampling.min_new_tokens) for r in results]
        rows = self._prompts.select_idxs([self._places[uid]] * len(results))
        self._scorer.submit(
            rows.union(DataProto.from_dict({}, {"index": [r.slot.index for r in results], "response_text": texts}))
        )

    def _decode(self, ids) -> str:  # type: ignore[no-untyped-def]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=True)
        return text
