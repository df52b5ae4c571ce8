"""The process that holds models: actor, critic, reference, rollout engine and rewards, or some of them, in turns."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from verl.algorithms.aggregation import Denominators
from verl.algorithms.metric import Metric
from verl.checkpoint.manifest import checkpoint_errors
from verl.cluster.early_scoring import EarlyScoring, Listener
from verl.cluster.placement import Group, whole_run
from verl.cluster.profiling import Recorder, Span, recorded
from verl.cluster.role_models import RoleModels
from verl.cluster.role_turns import share_actor, share_critic, share_reference, share_reward_model
from verl.cluster.threads import available_cores, stand_where_the_run_was_started
from verl.cluster.weight_sync import Meeting, Participant, Weights, exported
from verl.config import Config, SupervisedConfig
from verl.errors import ConfigError
from verl.models.flops import TRAINING, forward_flops, peak_flops
from verl.models.loading import load_tokenizer, resolve_model, save_hf_files, stop_ids
from verl.models.memory import descendants, held_memory
from verl.protocol import DataProto
from verl.protocol.files import write_safetensors
from verl.rewards.scorer import RuleScorer
from verl.rollout.embedded import EmbeddedEngine, EngineLimits
from verl.rollout.engines import EngineContext, engine_class, give_weights, make_engine, require_answers
from verl.rollout.parity import ParityReport, compare, probe_requests
from verl.rollout.protocol import BIT_PARITY, EngineStats, Request, Result, generate
from verl.run_dir import RunDir
from verl.training.actor import Actor
from verl.training.critic import Critic
from verl.training.offload import Turns, turn_of
from verl.training.optimizer import MasterWeights, Optimizer
from verl.training.parallel import Ranks, join_ranks
from verl.training.passes import Passes
from verl.training.reward_model import load_reward_model
from verl.training.saving import load_trained, trained_writer


class Worker:
    """The roles of a group in one process, or those of one of its ranks.

    Methods are called one at a time, directly (``cluster.backend=inline``) or through Ray. :meth:`setup` comes first;
    the constructor is cheap, so that errors of the set-up reach the controller as they are.

    Args:
        reward: a reward function of this process, in place of the configuration's.
        group: whose roles it has; None: all roles of the run are here.
        rank: of the group's processes.
        meeting: file over which the ranks find each other.
    """

    def __init__(
        self,
        config: Config,
        reward: Callable[..., Any] | None = None,
        group: Group | None = None,
        rank: int = 0,
        meeting: str = "",
    ) -> None:
        self._config, self._reward, self._meeting = config, reward, meeting
        self._group = group or whole_run(config, available_cores())
        self._device = None if group is None else torch.device(group.device)
        size, learns = self._group.count, not self._group.roles.isdisjoint({"actor", "critic"})
        sharded = size > 1 and learns and config.actor.strategy == "fsdp2"
        self._ranks = Ranks(rank, size, sharded, config.trainer.balance_batch)
        self._scorer: RuleScorer | None = None
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        self._participant = Participant()
        self._moved = 0.0  # seconds that are told already
        self._name = f"{self._group.pool}_{rank}"
        self.recorder = Recorder(config.profiler, self._name)

    def setup(self) -> ParityReport | None:
        """Load the models and, where the engine is here, check it against the trainer on this machine."""
        config, roles = self._config, self._group.roles
        stand_where_the_run_was_started()
        torch.set_num_threads(self._group.threads)
        device = self._device or choose_device(config)
        if self._ranks.size > 1:
            join_ranks(self._ranks, self._meeting, config.cluster.collective_timeout, device)
        models = RoleModels(config, self._ranks, device)
        self.turns = Turns(device, RunDir(config.run_dir).path)
        if "reference" in roles:
            self._reference = models.reference(lambda: self._actor.weights.abandon() if "actor" in roles else None)
            share_reference(self.turns, self._reference, config)
        if "actor" in roles:
            self._actor = models.actor(self._reference if "reference" in roles else None)
            share_actor(self.turns, self._actor, config, self._rest_of_engine)
        self._tokenizer = tokenizer = load_tokenizer(*config.tokenizer)
        if "rollout" in roles:
            self.turns.begin("rollout")
            sharded = self._actor.weights.sharded
            self._engine_policy = models.policy().requires_grad_(False) if sharded else self._actor.policy
            limits = EngineLimits.of_run(config.rollout, config.data, self._ranks.size)
            ends = stop_ids(config.model.path, tokenizer)
            self._engine = make_engine(EngineContext(self._engine_policy, tokenizer, ends, limits, config))
        if "critic" in roles:
            self._critic = models.critic()
            share_critic(self.turns, self._critic, config)
        if "reward" in roles and self._ranks.rank == 0:  # one rank scores: a reward may look at a batch as a whole
            model = load_reward_model(config, device, tokenizer, roles == {"reward"})
            share_reward_model(self.turns, model, config)
            self._scorer = RuleScorer(config.reward, tokenizer.decode, self._reward, model)
            self._early = EarlyScoring(self._scorer, tokenizer)
        self._require_same_weights()
        if "rollout" not in roles:
            return None
        requests = self.parity_probe()
        report = self.compare(requests, self.generate(requests, None))
        return replace(report, decoding=getattr(self._engine, "decoding", ""))  # an engine of one's own may be silent

    def _rest_of_engine(self) -> None:
        """What it keeps of the actor's weights in another layout goes with them."""
        engine = getattr(self, "_engine", None)
        if isinstance(engine, EmbeddedEngine) and not self._actor.weights.sharded:
            engine.rest()

    # rollout -------------------------------------------------------------------------------------------------------

    @recorded("rollout")
    @turn_of("rollout")
    def generate(
        self, requests: list[Request], prompts: DataProto | None, listener: Listener | None = None
    ) -> list[Result]:
        """Sample these.

        Args:
            prompts: whose they are, to be scored meanwhile where the scorer is here.
            listener: else, where it is.
        """
        if self._scorer is None or prompts is None:
            return generate(self._engine, requests, *([listener.hear] if listener is not None else []))
        self._early.expect(requests, prompts)
        return generate(self._engine, requests, self._early.finished)

    def expect(self, requests: list[Request], prompts: DataProto) -> None:
        """Others are sampling these; :meth:`hear` tells what they have."""
        self._early.expect(requests, prompts)

    def hear(self, results: list[Result]) -> None:
        self._early.finished(results)

    @recorded("rollout")
    @turn_of("actor")
    def publish(self, version: int) -> None:
        """The engine's caches are dropped, the version is noted. Its weights are the actor's own tensors; where those
        are sharded, a copy that is brought up to date here."""
        give_weights(self._engine, self._engine_policy, version, self._actor.weights.whole())

    def engine_stats(self) -> EngineStats:
        return self._engine.stats()

    @recorded("actor")
    @turn_of("actor")
    def exported_weights(self) -> Weights:
        """The actor's, for rollout workers; from the first rank."""
        return exported(self._published().items())

    @recorded("actor")
    @turn_of("actor")
    def broadcast_weights(self, meeting: Meeting) -> str:
        """Send the same to rollout workers, from the first rank; what went wrong, if anything."""
        weights = self._published()
        if self._ranks.rank > 0:
            return ""
        self._sent: dict[str, Tensor] = {}  # room for the next
        self._sent, trouble = self._participant.exchange(weights, 0, meeting)
        return trouble

    def sent_weights(self) -> Weights:
        """What was sent last, for those who missed it."""
        return exported(self._sent.items())

    @recorded("actor")
    @turn_of("actor")
    def write_weights(self, file: str) -> None:
        """The same into a safetensors file. Raises CheckpointError: the disk failed."""
        weights = self._published()
        if self._ranks.rank == 0:
            with checkpoint_errors("publish weights", Path(file)):
                write_safetensors(Path(file), weights)

    def _published(self) -> dict[str, Tensor]:
        actor, first = self._actor, self._ranks.rank == 0
        named = actor.weights.whole() if actor.weights.sharded else actor.policy.model.named_parameters()
        return {name: tensor.detach() for name, tensor in named if first}

    def parity_probe(self) -> list[Request]:
        """What rollout workers sample so that :meth:`compare` can tell whether they agree with the trainer."""
        config = self._config
        rows = -(-config.data.train_batch_size * config.rollout.n // self._ranks.size)
        longest = config.data.max_prompt_length + config.data.max_response_length
        rows, n = min(config.rollout.max_num_seqs, rows), config.rollout.n
        return probe_requests(self._actor.policy, rows, longest, n, config.rollout.temperature)

    @turn_of("actor")
    def compare(self, requests: list[Request], results: list[Result]) -> ParityReport:
        name, temperature = self._config.rollout.name, self._config.rollout.temperature
        require_answers(name, requests, results)
        claimed = BIT_PARITY in engine_class(name).capabilities
        return compare(self._actor.policy, requests, results, temperature, claimed)

    def memory_gb(self) -> dict[str, float]:
        """``peak``: most memory (GiB) that this process ever had, of the GPU where it computes on one, else of the
        machine; main memory that it holds now, and that its reward processes do together."""
        if torch.cuda.is_initialized():
            peak = torch.cuda.max_memory_reserved() / 2**30
        else:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        rewards = sum(map(held_memory, descendants(os.getpid()))) if self._scorer is not None else 0
        return {
            "peak": peak,
            self._name: held_memory() / 2**30,
            "rewards": rewards / 2**30,
        }

    def profile(self, folder: str | None) -> None:
        self.recorder.profile(folder)

    def spans(self) -> dict[str, list[Span]]:
        """What this process has done since the last call."""
        return {self._name: self.recorder.take()}

    @recorded("reward")
    def score(self, batch: DataProto) -> DataProto:
        assert self._scorer is not None
        if self._config.reward.model.path is not None:  # functions alone need no room
            self.turns.begin("reward")
        self._early.forget(batch.non_tensor_batch.get("uid", ()))
        return self._scorer.score(batch)

    def close(self) -> None:
        """End the processes that this one started."""
        if self._scorer is not None:
            self._scorer.close()

    # process and update --------------------------------------------------------------------------------------------

    @recorded("actor")
    @turn_of("actor")
    def actor_log_probs(self, batch: DataProto) -> DataProto:
        return self._actor.log_probs(batch)

    @recorded("reference")
    @turn_of("reference")
    def reference_log_probs(self, batch: DataProto) -> DataProto:
        return self._reference.log_probs(batch)

    @recorded("reference")
    @turn_of("full KL")
    def full_kl(self, batch: DataProto) -> DataProto:
        return self._reference.full_kl(batch, self._actor.policy)

    @recorded("critic")
    @turn_of("critic")
    def values(self, batch: DataProto) -> DataProto:
        return self._critic.values(batch)

    @recorded("actor")
    @turn_of("actor update")
    def update_actor(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        return self._measured(self._actor, self._actor.policy.model, mini_batch, denominators)

    @recorded("critic")
    @turn_of("critic update")
    def update_critic(self, mini_batch: DataProto, denominators: Denominators) -> dict[str, Metric]:
        return self._measured(self._critic, self._critic.model.backbone, mini_batch, denominators)

    def _measured(
        self, role: Actor | Critic, model: PreTrainedModel, mini_batch: DataProto, denominators: Denominators
    ) -> dict[str, Metric]:
        """An update's metrics as plain numbers, with the share of this machine's operations that the model used, and
        how many tokens each packed one stood for."""
        attention, passes = mini_batch.tensors["attention_mask"], role.passes
        responses = attention[:, mini_batch.tensors["prompts"].shape[1] :].sum(1)
        weight = next(model.parameters())
        peak = peak_flops(weight.dtype, weight.device, torch.get_num_threads())
        whole, packed, started = passes.whole_tokens, passes.packed_tokens, time.perf_counter()
        metrics = {name: metric.to_floats() for name, metric in role.update(mini_batch, denominators).items()}
        seconds = time.perf_counter() - started
        # The batch is that of all ranks.
        flops = 0.0 if self._ranks.rank else TRAINING * forward_flops(model, attention.sum(1), responses)
        if not self._ranks.rank and self.turns.seconds:
            metrics["perf/offload_seconds"] = Metric(self.turns.seconds - self._moved, 1.0, "sum")
            self._moved = self.turns.seconds
        return metrics | {
            f"perf/mfu/{passes.role}": Metric(flops, seconds * peak),
            f"perf/prefix_sharing/{passes.role}": Metric(passes.whole_tokens - whole, passes.packed_tokens - packed),
        }

    # checkpoints ---------------------------------------------------------------------------------------------------

    def save(self, folder: str, background: bool = False) -> None:
        """Write ``actor/`` and ``critic/``, what is here of them, into a checkpoint folder being made: the first rank
        does, or every rank its share.

        Args:
            background: return with a copy in memory, which a thread writes; :meth:`saved` tells when it is written.

        Raises:
            CheckpointError: the disk failed.
        """
        self._require_same_weights()
        with checkpoint_errors("write the checkpoint", Path(folder)):
            writers = []
            for name, weights, optimizer in self._trained():
                self.turns.begin(f"{name} update")
                writers.append(trained_writer(Path(folder) / name, weights, optimizer, background))
                if not background:
                    writers.pop()()
            for passes in self._passes():
                passes.save(Path(folder))
            if self._ranks.rank == 0 and "actor" in self._group.roles:
                save_hf_files(resolve_model(self._config.model.path), Path(folder) / "actor" / "hf")

        def write() -> None:
            with checkpoint_errors("write the checkpoint", Path(folder)):
                for writer in writers:
                    writer()

        if background:
            self._written = self._writer.submit(write)
        else:
            write()

    def saved(self) -> bool:
        """Whether the last :meth:`save` has been written. Raises CheckpointError: the disk failed."""
        if self._written is None or not self._written.done():
            return self._written is None
        self._written.result()
        return True

    def load(self, folder: str) -> None:
        """Take what :meth:`save` wrote."""
        for name, weights, optimizer in self._trained():
            self.turns.begin(f"{name} update")
            load_trained(Path(folder) / name, weights, optimizer)
        for passes in self._passes():
            passes.load(Path(folder))

    def _require_same_weights(self) -> None:
        for name, weights, _ in self._trained() if self._ranks.size > 1 and not self._ranks.lockstep else ():
            self.turns.begin(f"{name} update")
            self._ranks.require_same(weights.masters, f"the {name}'s weights")

    def _passes(self) -> list[Passes]:
        names = [name for name in ("actor", "critic", "reference") if name in self._group.roles]
        return [getattr(self, f"_{name}").passes for name in names]

    def _trained(self) -> list[tuple[str, MasterWeights, Optimizer]]:
        trained: list[tuple[str, MasterWeights, Optimizer]] = []
        if "actor" in self._group.roles:
            trained.append(("actor", self._actor.weights, self._actor.optimizer))
        if "critic" in self._group.roles:
            trained.append(("critic", self._critic.weights, self._critic.optimizer))
        return trained


def choose_device(config: Config | SupervisedConfig) -> torch.device:
    """``trainer.device``; asking for CUDA where there is none is an error with the way out."""
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device asks for a GPU and this machine has none", wanted, "set trainer.device=cpu")
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() and config.trainer.n_gpus_per_node != 0 else "cpu"
    return torch.device(wanted)
