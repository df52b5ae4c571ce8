"""Where a step's batch comes from: all that differs between the modes of ``trainer.mode``, and streamed mini-batches.

========================  =============================================  ============================
mode                      what runs while a step trains                  weights that sampled a batch
========================  =============================================  ============================
:class:`Now`              nothing                                        the current ones
:class:`AsCompleted`      the rollout of the step's other mini-batches   those at the step's beginning
:class:`Ahead`            the rollout of the next step                   one update older
:class:`Stream`           rollout without a pause                        up to ``max_staleness`` older
========================  =============================================  ============================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from verl.algorithms.advantage_inputs import group_index, group_statistics, outcome_scores
from verl.cluster.roles import Roles
from verl.config import Config
from verl.errors import VerlError
from verl.protocol import DataProto
from verl.rollout.buffer import Group, GroupBuffer
from verl.rollout.dispatch import Lost
from verl.rollout.protocol import Result, Slot, lost_result
from verl.trainer.advantages import reward_values
from verl.trainer.sampling import Sampler, join
from verl.trainer.stages import rollout, scored
from verl.trainer.state import TrainerState
from verl.trainer.timer import StepTimer


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


class Source:
    """Gives each step its scored batch, and tells the run's state what the batch was like; this one keeps nothing."""

    def __init__(self, feed: Feed) -> None:
        self._feed = feed

    def parts(self) -> Iterable[DataProto]:
        """The batch, whole or in parts of which each is trained on before the next one is asked for."""
        raise NotImplementedError

    def settle(self) -> None:
        """Called before new weights are published: what needs the present ones is finished here."""

    def published(self) -> None:
        """The weights of version ``state.step + 1`` are with every rollout worker."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        pass


class Now(Source):
    """Samples when it is asked: no staleness, nothing in between steps."""

    def parts(self) -> Iterable[DataProto]:
        feed = self._feed
        yield feed.sample(feed.current_sampler, feed.timer, feed.state.learn)


class AsCompleted(Source):
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


class Ahead(Source):
    """Samples the next batch while the present one trains, always under the weights before that update.

    The look-ahead is drawn after the present batch was heard of, and heard of when its own turn comes, so that a run
    does the same wherever its time goes. It is finished before new weights are published, hence whole in every
    checkpoint: the weights that made it are gone afterwards. Where rollout has no processes of its own
    (``cluster.backend=inline``) it is sampled before the step trains: the same run, without the gain.
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
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


class Stream(Source):
    """Keeps prompts submitted up to the budget that ``max_staleness`` leaves, and takes batches of complete groups.

    A step waits until there are as many complete groups as its batch has prompts, none of them too old, and for others
    in place of those that ``algorithm.filter_groups`` drops; meanwhile, and while the step trains, the rollout workers
    go on. Prompts are known by their uids, which is all that a checkpoint keeps of them: what is under way or waiting
    then is sampled again after a resume, by the weights of then.
    """

    def __init__(self, feed: Feed) -> None:
        super().__init__(feed)
        config, trainer = feed.config, feed.config.trainer
        self._overlaps = trainer.max_staleness > 0
        self._asked_before: list[str] = []  # by the run that this one goes on with
        full = config.data.drop_last or config.algorithm.filter_groups.enable
        self._buffer = GroupBuffer(
            config.data.train_batch_size,
            trainer.max_staleness,
            feed.total_steps,
            trainer.staleness_unit,
            None if full else feed.state.loader.sampler.size,
        )

    def parts(self) -> list[DataProto]:
        return [self._feed.filtered(self._sample)]

    def _sample(self, wanted: int) -> DataProto:
        feed, version = self._feed, self._feed.state.step
        wanted = min(wanted, self._buffer.size(version))
        with feed.timer("wait_rollout"):
            again, self._asked_before = self._asked_before, []
            self._submit(again)
            while not (groups := self._take(version, wanted)):
                for result in feed.roles.rollout.finished():
                    lost = result.finish_reason == "lost"
                    self._buffer.add(Lost(result.slot, "") if lost else result)
        batch = scored(self._assembled(groups), feed.roles, feed.sampler, feed.timer)
        counts = {name: count for name, count in self._buffer.metrics.items() if not name.endswith(("/mean", "/max"))}
        batch.meta_info["metrics"] = batch.meta_info.get("metrics", {}) | counts
        feed.state.learn(batch)
        return batch

    def _take(self, version: int, wanted: int) -> list[Group]:
        taken = self._buffer.take(version, wanted)
        stale = [*taken.again, *taken.dropped]
        if stale:
            self._feed.roles.rollout.cancel([Slot(uid, index) for uid in stale for index in self._feed.sampler.indices])
            self._submit(taken.again)
        self._fill(version)
        return taken.groups

    def _fill(self, version: int) -> None:
        """Submit new prompts as far as the budget goes."""
        loader = self._feed.state.loader
        while room := self._buffer.budget(version):
            drawn = loader.next_batch(min(room, loader.batch_size))
            self._submit(drawn.non_tensor_batch["uid"].tolist())

    def _submit(self, uids: list[str]) -> None:
        if uids:
            prompts = self._feed.state.loader.recall(uids)
            requests = self._feed.current_sampler.requests(prompts)
            self._buffer.submit(request.slot for request in requests)
            self._feed.roles.rollout.submit(requests, prompts)

    def _assembled(self, groups: list[Group]) -> DataProto:
        results = [
            lost_result(slot) if outcome is None or isinstance(outcome, Lost) else outcome
            for group in groups
            for slot, outcome in group.outcomes.items()
        ]
        return self._feed.sampler.assemble(self._feed.state.loader.recall([group.uid for group in groups]), results)

    def published(self) -> None:
        """No worker waits. Without overlap it is the next step that asks, which knows what this one has learnt."""
        if self._overlaps:
            self._fill(self._feed.state.step + 1)

    def state_dict(self) -> dict[str, Any]:
        state = self._buffer.state_dict()
        return state if state["uids"] or state["counts"] else {}

    def load_state_dict(self, tree: dict[str, Any]) -> None:
        nothing = {"step": self._feed.state.step, "uids": [], "again": [], "counts": {}}
        self._buffer.load_state_dict(tree or nothing)
        self._asked_before = self._buffer.outstanding


def filtered_rollout(sample: Callable[[int], DataProto], sampler: Sampler, config: Config) -> DataProto:
    """A scored batch of ``data.train_batch_size`` groups with spread (Yu et al. 2025, arXiv:2503.14476, section 3.2).

    A group is kept when ``algorithm.filter_groups.metric`` differs among its responses that were scored, by more than
    rounding. Batches of prompts are sampled until there are enough; groups beyond that are dropped too. Everything that
    was sampled is counted: the scorer's counts are those of all batches, and ``filter_groups/*`` says what became of
    the groups (drawn = kept + flat + surplus) and what the mean score was before any were dropped. Raises VerlError:
    not enough groups after as many as ``max_num_gen_batches`` batches have.

    Args:
        sample: a scored batch of further prompts; it is told how many groups are still wanted.
    """
    settings, wanted, n = config.algorithm.filter_groups, config.data.train_batch_size, sampler.plan.n
    kept: list[DataProto] = []
    counts: Counter[str] = Counter()
    seen: list[Tensor] = []  # all scores
    while counts["kept"] < wanted:
        if settings.max_num_gen_batches and counts["drawn"] >= settings.max_num_gen_batches * wanted:
            raise _not_filled(counts, wanted, settings.metric)
        batch = sample(wanted - counts["kept"])
        scores = outcome_scores(batch.tensors["token_level_scores"], batch.tensors["response_mask"])
        seen.append(scores[batch.tensors["scored"]])
        keep = rows_with_spread(batch, settings.metric)
        kept.append(batch.select_idxs(keep))
        groups, found = len(batch) // n, int(keep.sum()) // n
        counts.update(gen_batches=1, drawn=groups, flat=groups - found, kept=found)
    counts["surplus"] = counts["kept"] - wanted
    counts["kept"] = wanted
    joined = join(kept, sampler.tokenizer.pad_token_id).slice(0, wanted * n)
    filter_counts = {f"filter_groups/{name}": count for name, count in counts.items()}
    mean = {"filter_groups/score": float(torch.cat(seen).mean())}
    joined.meta_info["metrics"] |= filter_counts | mean
    return joined


def rows_with_spread(batch: DataProto, metric: str) -> Tensor:
    """(B,) bool: all rows of the groups in which the metric differs."""
    values = reward_values(batch, metric, "algorithm.filter_groups.metric")
    group_ids = group_index(batch.non_tensor_batch["uid"].tolist())
    statistics = group_statistics(values, batch.tensors["scored"] & ~values.isnan(), group_ids)
    return statistics.total(statistics.spread) > 0


def _not_filled(counts: Counter[str], wanted: int, metric: str) -> VerlError:
    batches = counts["drawn"] // wanted
    return VerlError(
        f"algorithm.filter_groups: after {batches} batch{'es' if batches > 1 else ''} of prompts "
        f"(algorithm.filter_groups.max_num_gen_batches) there are not enough groups whose {metric} differs",
        f"{counts['drawn']} groups drawn, {counts['flat']} without spread, {counts['kept']} of {wanted} found",
        "raise max_num_gen_batches or rollout.n, lower data.train_batch_size, or give prompts that are neither too "
        "easy nor too hard",
    )
