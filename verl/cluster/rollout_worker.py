"""A process that does nothing but sample responses, with weights that the actor published."""

from __future__ import annotations

import resource
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from verl.cluster.compression import Compressed, compressed
from verl.cluster.profiling import Recorder, Span, recorded
from verl.cluster.threads import stand_where_the_run_was_started
from verl.cluster.weight_sync import Meeting, Participant, Weights, take
from verl.config import Config
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, load_tokenizer, stop_ids
from verl.models.memory import held_memory
from verl.models.policy import PolicyModel
from verl.rollout.embedded import EngineLimits
from verl.rollout.engines import EngineContext, give_weights, make_engine
from verl.rollout.isolation import Isolation
from verl.rollout.protocol import EngineStats, Request, Result, Slot, generate

if TYPE_CHECKING:
    from verl.cluster.placement import WorkerSpec


@dataclass(frozen=True)
class Progress:
    """What a worker says when it is asked to go on.

    Attributes:
        results: finished since the last answer.
        failed: what the engine fails with, and how.
        seconds: spent on it.
        memory: bytes of main memory that the worker holds.
        spans: what it has done since the last answer.
    """

    results: list[Result] | Compressed
    failed: dict[Slot, str]
    stats: EngineStats
    seconds: float
    memory: int
    spans: list[Span]


class RolloutWorker:
    """An engine of its own. Methods are called one at a time, over Ray; :meth:`setup` comes first."""

    def __init__(self, config: Config, spec: WorkerSpec, name: str = "rollout worker") -> None:
        self._config, self._spec, self._name = config, spec, name
        self._participant = Participant()
        self._received: dict[int, dict[str, torch.Tensor]] = {}  # by version, until it is taken
        self.recorder = Recorder(config.profiler, name.replace(" ", "_"), whole="rollout")

    def setup(self) -> None:
        """Load the model; published weights take the place of its own."""
        config, spec = self._config, self._spec
        stand_where_the_run_was_started()
        torch.set_num_threads(spec.threads)
        if spec.memory_gb is not None:
            limit = int(spec.memory_gb * 2**30)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        device = torch.device(spec.device)
        path, trust = config.model.path, config.model.trust_remote_code
        dtype = getattr(torch, config.model.dtype)
        model = load_causal_lm(path, dtype, trust, attn_implementation=ATTENTION_NAME).to(device)
        self._policy = policy = PolicyModel(model)
        tokenizer = load_tokenizer(*config.tokenizer)
        rollout = config.rollout
        if spec.kv_cache_gb is not None:
            rollout = rollout.model_copy(update={"kv_cache_gb": spec.kv_cache_gb})
        limits = EngineLimits.of_run(rollout, config.data, spec.count)
        self._engine = make_engine(EngineContext(policy, tokenizer, stop_ids(path, tokenizer), limits, config))
        self._isolation = Isolation(self._engine)

    def sample(self, requests: list[Request]) -> list[Result]:
        """All of them to their end."""
        return generate(self._engine, requests)

    def advance(self, requests: Sequence[Request], seconds: float) -> Progress:
        """Take these on and compute for about so long, or until something has finished."""
        started = time.monotonic()
        with self.recorder.call("rollout", "advance"):
            self._isolation.submit(requests)
            while True:
                results, failed = self._isolation.step()
                spent = time.monotonic() - started
                if results or failed or spent >= seconds or not self._isolation.busy:
                    break
        answer = compressed(results) if self._config.rollout.compress_results else results
        return Progress(answer, failed, self._engine.stats(), spent, held_memory(), self.recorder.take())

    def profile(self, folder: str | None) -> None:
        self.recorder.profile(folder)

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        """Give these (None: all) back as far as they are."""
        return self._isolation.abort(slots)

    def ready(self) -> None:
        """Answers that it lives."""

    def receive(self, version: int, meeting: Meeting) -> str:
        """Receive weights for :meth:`load_weights`, in a thread of its own; why they have not come, if so."""
        if self._name not in meeting.workers:
            return "it came when the others had met"
        named, rank = dict(self._policy.model.named_parameters()), meeting.workers.index(self._name) + 1
        tensors, trouble = self._participant.exchange(named, rank, meeting)
        if not trouble:
            self._received[version] = tensors
        return trouble

    @recorded("rollout")
    def load_weights(self, version: int, weights: Weights | str | None) -> None:
        """Sample from these from now on, None: from what was received for this version.
        :func:`verl.cluster.weight_sync.take` says how they are taken, and raises."""
        take(dict(self._policy.model.named_parameters()), self._received[version] if weights is None else weights)
        for old in [received for received in list(self._received) if received <= version]:
            del self._received[old]
        give_weights(self._engine, self._policy, version)
