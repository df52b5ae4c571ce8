"""Start-up check of the parity law: does this engine's log-prob of a token equal the trainer's, bit for bit?

Run on the machine, the model, the widths and the row counts of the run itself. Where it holds, old log-probs are the
engine's by proof; where it does not, the run says so and computes them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.models.packed import pack_rows
from verl.models.policy import PolicyModel, model_device
from verl.rollout.protocol import Request, Result, RolloutEngine, SamplingParams, Slot, generate

PROBE_TOKENS = 5


@dataclass(frozen=True)
class ParityReport:
    """Outcome of the check: ``differing`` of ``tokens`` log-probs differ, at most by ``largest`` nats."""

    tokens: int
    differing: int
    largest: float
    proven: bool = True  # the engine says so, and rows of matmuls keep their bits; else it may be a coincidence
    decoding: str = ""  # by what the engine decodes, in words, where it is known

    @classmethod
    def total(cls, parts: Sequence[ParityReport]) -> ParityReport:
        """Of several engines."""
        tokens, differing = sum(part.tokens for part in parts), sum(part.differing for part in parts)
        return cls(
            tokens,
            differing,
            max(part.largest for part in parts),
            all(part.proven for part in parts),
            parts[0].decoding,
        )

    @property
    def exact(self) -> bool:
        return self.tokens > 0 and self.differing == 0 and self.proven


def check_parity(
    engine: RolloutEngine,
    policy: PolicyModel,
    *,
    rows: int,
    longest: int,
    group_size: int,
    temperature: float,
) -> ParityReport:
    """Sample a few tokens with the engine and compare their log-probs with the trainer's packed forward.

    Args:
        rows: responses that the engine runs at once in this run.
        longest: tokens of the longest row of this run, response included.
        group_size: responses that share a prompt.
        temperature: of the training sampling.
    """
    requests = probe_requests(policy, rows, longest, group_size, temperature)
    return compare(policy, requests, generate(engine, requests), temperature)


def compare(
    policy: PolicyModel, requests: list[Request], results: list[Result], temperature: float, claimed: bool = True
) -> ParityReport:
    """The trainer's own log-probs of what an engine, here or in another process, sampled with the same weights.

    Args:
        claimed: the engine says that they are equal bit for bit, of any batch.
    """
    engine_log_probs = torch.from_numpy(np.concatenate([result.log_probs for result in results]))
    trainer_log_probs = trainer_forward(policy, requests, results, temperature)
    differing = engine_log_probs != trainer_log_probs
    largest = float((engine_log_probs - trainer_log_probs).abs().max())
    return ParityReport(differing.numel(), int(differing.sum()), largest, claimed and policy.rows.proven)


@torch.no_grad()
def trainer_forward(
    policy: PolicyModel, requests: list[Request], results: list[Result], temperature: float, share: bool = True
) -> Tensor:
    """The trainer's log-probs of what an engine sampled, all responses end to end."""
    groups: dict[tuple[int, ...], int] = {}
    packed = pack_rows(
        [request.prompt_ids for request in requests],
        [result.response_ids.tolist() for result in results],
        max(len(result.response_ids) for result in results),
        [groups.setdefault(tuple(request.prompt_ids), len(groups)) for request in requests] if share else None,
    )
    return policy(packed.to(model_device(policy)), temperature)[0].cpu()


def probe_requests(policy: PolicyModel, rows: int, longest: int, group_size: int, temperature: float) -> list[Request]:
    """Groups of short prompts filling all rows, the first group's prompt being as long as this run's rows get.

    Arguments as of :func:`check_parity`.
    """
    generator = np.random.default_rng(0)
    vocabulary = int(policy.model.config.get_text_config().vocab_size)
    requests: list[Request] = []
    for group in range(-(-rows // group_size)):
        length = max(longest - PROBE_TOKENS, 1) if group == 0 else int(generator.integers(1, min(longest, 48) + 1))
        prompt = generator.integers(0, vocabulary, length).tolist()
        for index in range(min(group_size, rows - group * group_size)):
            sampling = SamplingParams(min(PROBE_TOKENS, longest), temperature, seed=len(requests), ignore_eos=True)
            requests.append(Request(Slot(f"parity-check:{group}", index), prompt, sampling))
    return requests
