"""``trainer.mode=async``: rollout that never stops, and a bound on how old what it gives may be."""

from __future__ import annotations

from typing import Any

from verl.protocol import DataProto
from verl.rollout.buffer import Group, GroupBuffer
from verl.rollout.dispatch import Lost
from verl.rollout.protocol import Slot, lost_result
from verl.trainer.sources import Feed
from verl.trainer.stages import scored


class Stream:
    """Keeps prompts submitted up to the budget that ``max_staleness`` leaves, and takes batches of complete groups.

    A step waits until there are as many complete groups as its batch has prompts, none of them too old, and for others
    in place of those that ``algorithm.filter_groups`` drops; meanwhile, and while the step trains, the rollout workers
    go on. Prompts are known by their uids, which is all that a checkpoint keeps of them: what is under way or waiting
    then is sampled again after a resume, by the weights of then.
    """

    def __init__(self, feed: Feed) -> None:
        config, trainer = feed.config, feed.config.trainer
        self._feed, self._overlaps = feed, trainer.max_staleness > 0
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

    def settle(self) -> None:
        pass

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
