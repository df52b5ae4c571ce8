"""Where a step's batch comes from: all that differs between the modes of ``trainer.mode``, and streamed mini-batches.

========================  =============================================  ============================
mode                      what runs while a step trains                  weights that sampled a batch
========================  =============================================  ============================
:class:`Now`              nothing                                        the current ones
:class:`AsCompleted`      the rollout of the step's other mini-batches   those at the step's beginning
:class:`Ahead`            the rollout of the next step                   one update older
:class:`~verl.trainer.streaming.Stream`  rollout without a pause        up to ``max_staleness`` older
========================  =============================================  ============================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Protocol

from verl.cluster.roles import Roles
from verl.config import Config
from verl.protocol import DataProto
from verl.rollout.protocol import Result
from verl.trainer.group_filter import filtered_rollout
from verl.trainer.sampling import Sampler
from verl.trainer.stages import rollout, scored
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer


class Source(Protocol):
    """Gives each step its scored batch, and tells the run's state what the batch was like."""

    def parts(self) -> Iterable[DataProto]:
        """The batch, whole or in parts of which each is trained on before the next one is asked for."""
        ...

    def settle(self) -> None:
        """Called before new weights are published: what needs the present ones is finished here."""
        ...

    def published(self) -> None:
        """The weights of version ``state.step + 1`` are with every rollout worker."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, tree: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class Feed:
    """What a source draws from and answers to."""

    config: Config
    roles: Roles
    state: TrainerState
    sampler: Sampler
    timer: StepTimer
    total_steps: int

    @property
    def current_sampler(self) -> Sampler:
        """With the cap on lengths of the step to come."""
        return replace(self.sampler, max_new_tokens=self.state.cap.value)

    def sample(self, sampler: Sampler, timer: StepTimer, heard: Callable[[DataProto], None]) -> DataProto:
        """A scored batch of the next prompts; ``heard`` gets every batch that was sampled for it."""

        def scored_batch(_: int) -> DataProto:
            batch = rollout(self.state.loader.next_batch(), self.roles, sampler, timer)
            heard(batch)
            return batch

        return self.filtered(scored_batch)

    def filtered(self, sample: Callable[[int], DataProto]) -> DataProto:
        """What ``sample`` gives, told how many groups are wanted; where ``filter_groups`` is on, of several times."""
        if self.config.algorithm.filter_groups.enable:
            return filtered_rollout(sample, self.sampler, self.config)
        return sample(self.config.data.train_batch_size)


class Now:
    """Samples when it is asked: no staleness, nothing in between steps."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def parts(self) -> Iterable[DataProto]:
        feed = self._feed
        yield feed.sample(feed.current_sampler, feed.timer, feed.state.learn)

    def settle(self) -> None:
        pass

    def published(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        pass


class AsCompleted(Now):
    """Gives the mini-batches of a step one by one, each as soon as enough groups are complete.

    The other responses go on meanwhile, under the weights that the rollout workers got before the step. Which groups
    are together depends on time; they are in the order of the draws, and so in one part with the same bits whichever
    was complete first.
    """

    def parts(self) -> Iterator[DataProto]:
        feed, sampler = self._feed, self._feed.current_sampler
        prompts = feed.state.loader.next_batch()
        places = {uid: place for place, uid in enumerate(prompts.non_tensor_batch["uid"].tolist())}
        groups: dict[str, dict[int, Result]] = {uid: {} for uid in places}  # of those that have not been given
        complete: list[str] = []
        feed.roles.rollout.submit(sampler.requests(prompts), prompts)
        while groups:
            size = min(feed.config.streamed_prompts, len(groups))
            with feed.timer("wait_rollout"):
                while len(complete) < size:
                    for result in feed.roles.rollout.finished():
                        group = groups[result.slot.uid]
                        group[result.slot.index] = result
                        if len(group) == len(sampler.indices):
                            complete.append(result.slot.uid)
            chosen, complete = sorted(complete[:size], key=places.__getitem__), complete[size:]
            results = [group[index] for group in map(groups.pop, chosen) for index in sampler.indices]
            drawn = prompts.select_idxs([places[uid] for uid in chosen])
            part = scored(sampler.assemble(drawn, results), feed.roles, sampler, feed.timer)
            feed.state.learn(part)
            yield part


class Ahead:
    """Samples the next batch while the present one trains, always under the weights before that update.

    The look-ahead is drawn after the present batch was heard of, and heard of when its own turn comes, so that a run
    does the same wherever its time goes. It is finished before new weights are published, hence whole in every
    checkpoint: the weights that made it are gone afterwards. Where rollout has no processes of its own
    (``cluster.backend=inline``) it is sampled before the step trains: the same run, without the gain.
    """

    def __init__(self, feed: Feed) -> None:
        self._feed = feed
        self._thread = ThreadPoolExecutor(1, "look-ahead") if feed.roles.rollout.apart else None
        self._made: Future[tuple[DataProto, list[DataProto], StepTimer]] | None = None

    def parts(self) -> list[DataProto]:
        feed = self._feed
        if self._made is None:
            self._start()
        with feed.timer("wait_rollout"):
            assert self._made is not None
            batch, heard, timer = self._made.result()
        feed.timer.add(timer)
        self._made = None
        for part in heard:
            feed.state.learn(part)
        if feed.state.step + 1 < feed.total_steps:
            self._start()
        return [batch]

    def _start(self) -> None:
        sampler = self._feed.current_sampler
        if self._thread is not None:
            self._made = self._thread.submit(self._make, sampler)
            return
        self._made = Future()
        self._made.set_result(self._make(sampler))

    def _make(self, sampler: Sampler) -> tuple[DataProto, list[DataProto], StepTimer]:
        heard: list[DataProto] = []
        timer = StepTimer()
        return self._feed.sample(sampler, timer, heard.append), heard, timer

    def settle(self) -> None:
        if self._made is not None:
            with self._feed.timer("wait_rollout"):
                self._made.result()

    def published(self) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        if self._made is None:
            return {}
        batch, heard, _ = self._made.result()
        parts = [] if len(heard) == 1 and heard[0] is batch else heard
        return {"batch": batch.to_tree(), "heard": [part.to_tree() for part in parts]}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        if not tree:
            return
        batch = DataProto.from_tree(tree["batch"])
        heard = [DataProto.from_tree(part) for part in tree["heard"]] or [batch]
        self._made = Future()
        self._made.set_result((batch, heard, StepTimer()))
