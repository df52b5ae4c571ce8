"""A process that does nothing but sample responses, with weights that the actor published."""

from __future__ import annotations

import resource
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verl.cluster.profiling import Recorder, Span, recorded
from verl.config import Config
from verl.errors import EngineError
from verl.models.attention import ATTENTION_NAME
from verl.models.loading import load_causal_lm, load_tokenizer, stop_ids
from verl.models.memory import held_memory
from verl.models.policy import PolicyModel
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.protocol import EngineStats, Request, Result, Slot, generate

if TYPE_CHECKING:
    from verl.cluster.placement import WorkerSpec

Weights = Mapping[str, tuple[str, NDArray[np.generic]]]
"""By parameter name its dtype and its bytes as numpy has them (bfloat16 as int16)."""


@dataclass(frozen=True)
class Progress:
    """What a worker says when it is asked to go on.

    Attributes:
        results: finished since the last answer.
        seconds: spent on it.
        memory: bytes of main memory that the worker holds.
        spans: what it has done since the last answer.
    """

    results: list[Result]
    stats: EngineStats
    seconds: float
    memory: int
    spans: list[Span]


class RolloutWorker:
    """An engine of its own. Methods are called one at a time, over Ray; :meth:`setup` comes first."""

    def __init__(self, config: Config, spec: WorkerSpec, name: str = "rollout worker") -> None:
        self._config, self._spec = config, spec
        self.recorder = Recorder(config.profiler, name.replace(" ", "_"), whole="rollout")

    def setup(self) -> None:
        """Load the model; published weights take the place of its own."""
        config, spec = self._config, self._spec
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
        self._engine = EmbeddedEngine(policy, tokenizer, limits, stop_ids(path, tokenizer))

    def sample(self, requests: list[Request]) -> list[Result]:
        """All of them to their end."""
        return generate(self._engine, requests)

    def advance(self, requests: Sequence[Request], seconds: float) -> Progress:
        """Take these on and compute for about so long, or until something has finished."""
        started = time.monotonic()
        with self.recorder.call("rollout", "advance"):
            self._engine.submit(list(requests))
            while True:
                results, stats = self._engine.step(), self._engine.stats()
                seconds_spent = time.monotonic() - started
                if results or seconds_spent >= seconds or not (stats.waiting or stats.active):
                    break
        return Progress(results, stats, seconds_spent, held_memory(), self.recorder.take())

    def profile(self, folder: str | None) -> None:
        self.recorder.profile(folder)

    def abort(self, slots: list[Slot] | None = None) -> list[Result]:
        """Give these (None: all) back as far as they are."""
        return self._engine.abort(slots)

    @recorded("rollout")
    def load_weights(self, version: int, weights: Weights) -> None:
        """Sample from these from now on; on the machine that holds them they are used where they are.

        Raises:
            EngineError: they are of another model.
        """
        parameters = dict(self._policy.model.named_parameters())
        shapes = {name: tuple(array.shape) for name, (_, array) in weights.items()}
        if shapes != {name: tuple(p.shape) for name, p in parameters.items()}:
            raise EngineError("the published weights are of another model than the rollout worker's")
        for name, parameter in parameters.items():
            parameter.data = _tensor(*weights[name]).to(parameter.device)
        self._engine.load_weights(version)


def exported(named: Iterable[tuple[str, Tensor]]) -> Weights:
    """A model's parameters for other processes, each once; not copied where they are in the machine's memory."""
    return {name: (str(p.dtype).removeprefix("torch."), _array(p.detach())) for name, p in named}


def _array(tensor: Tensor) -> NDArray[np.generic]:
    tensor = tensor.cpu().contiguous()
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def _tensor(dtype: str, array: NDArray[np.generic]) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what lies in the object store is read-only, and is only read
        return torch.from_numpy(array).view(getattr(torch, dtype))
