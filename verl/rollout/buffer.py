"""Groups on their way from rollout to training, and how old they may be.

Versions number the weights; training step v trains with version v as current. A group's version is that of its oldest
token, so a group whose members (or a member whose tokens) have several versions is as old as the oldest of them.

- A group is complete when each of its slots has an outcome. Members that were lost stay away and count as unscored;
  nothing takes their place. A group that lost all its members is dropped, and another prompt may be submitted for it.
- ``staleness_unit: sample``: a group older than the bound is dropped as soon as that is known, though members may still
  be in flight. Its prompt is submitted again once; the second time, another prompt may be submitted for it.
- ``staleness_unit: token``: tokens older than the bound are masked, and a group is dropped when none is left.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from verl.rollout.dispatch import Lost, Outcome
from verl.rollout.protocol import Result, Slot

COUNTS = (
    "training/staleness/requeued",  # groups whose prompt was submitted once more
    "training/staleness/dropped",  # groups that were given up
    "training/staleness/dropped_tokens",  # sampled, and not trained for being too old
    "training/lost_groups",  # all of whose members were lost
)


def fresh_tokens(versions: NDArray[np.int32], current: int, limit: int) -> NDArray[np.bool_]:
    """Of the versions (R,) of a response's tokens, those at most ``limit`` behind ``current``."""
    return versions >= current - limit


@dataclass(eq=False)
class Group:
    """The responses to one prompt, an outcome for each slot in the order in which they were asked for.

    Attributes:
        oldest, newest: versions of its tokens so far; None: there are no tokens.
        again: its prompt was submitted a second time.
    """

    uid: str
    outcomes: dict[Slot, Outcome | None]
    again: bool = False
    oldest: int | None = None
    newest: int | None = None

    @property
    def complete(self) -> bool:
        return bool(self.outcomes) and None not in self.outcomes.values()

    @property
    def results(self) -> list[Result]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, Result)]

    @property
    def lost(self) -> list[Lost]:
        return [outcome for outcome in self.outcomes.values() if isinstance(outcome, Lost)]

    @property
    def tokens(self) -> int:
        return sum(len(result.response_ids) for result in self.results)

    def add(self, outcome: Outcome) -> None:
        self.outcomes[outcome.slot] = outcome
        if isinstance(outcome, Result) and len(outcome.versions):
            oldest, newest = int(outcome.versions.min()), int(outcome.versions.max())
            self.oldest = oldest if self.oldest is None else min(oldest, self.oldest)
            self.newest = newest if self.newest is None else max(newest, self.newest)

    def mask(self, current: int, limit: int) -> int:
        """Mask the tokens that are too old; how many were not masked before."""
        masked = 0
        for slot, outcome in self.outcomes.items():
            if isinstance(outcome, Result):
                fresh = outcome.loss_mask & fresh_tokens(outcome.versions, current, limit)
                masked += int(outcome.loss_mask.sum() - fresh.sum())
                self.outcomes[slot] = replace(outcome, loss_mask=fresh)
        return masked


@dataclass
class Taken:
    """What a step trains on, and what has become too old.

    Attributes:
        groups: the batch in the order of the draws; empty: not enough groups are complete yet.
        again: prompts to submit once more, after what is in flight of them has been cancelled.
        dropped: prompts that are given up; cancel what is in flight of them.
    """

    groups: list[Group] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)


class GroupBuffer:
    """Complete groups wait here for their step; says how many prompts may be submitted, and which to submit again.

    Args:
        prompts: of a batch.
        max_staleness: versions that a trained token may be behind. 0: the batches of a synchronous run.
        steps: training steps of the whole run; no more prompts are submitted than they need.
        epoch: prompts of an epoch, whose last batch is what is left of them; None: all batches are full.

    Attributes:
        exhausted: set it when no new prompts will come; the last batch may then be short.
        metrics: of the latest batch, and counts since the one before it.
    """

    def __init__(
        self,
        prompts: int,
        max_staleness: int,
        steps: int,
        unit: Literal["sample", "token"] = "sample",
        epoch: int | None = None,
    ) -> None:
        self.exhausted = False
        self.metrics: dict[str, float] = {}
        self._prompts, self._max_staleness, self._steps, self._unit = prompts, max_staleness, steps, unit
        self._epoch = epoch
        self._step = 0  # whose batch is taken next
        self._further = 0  # prompts that the step before it wants beside its batch
        self._groups: dict[str, Group] = {}  # in flight and complete ones, in the order of the draws
        self._counts: Counter[str] = Counter()

    @property
    def outstanding(self) -> list[str]:
        """Prompts in flight or waiting here, by draw; after a resume all are to be asked for again."""
        return list(self._groups)

    @property
    def done(self) -> bool:
        return not self._groups and (self.exhausted or self._step >= self._steps)

    def size(self, step: int) -> int:
        """Prompts of the batch of training step ``step``, counted from 0."""
        if self._epoch is None:
            return self._prompts
        return min(self._prompts, self._epoch - step % -(-self._epoch // self._prompts) * self._prompts)

    def budget(self, version: int) -> int:
        """New prompts that may be submitted when this version is published, so that their turn comes in time."""
        wanted = sum(map(self.size, range(self._step, min(version + self._max_staleness + 1, self._steps))))
        return 0 if self.exhausted else max(wanted + self._further - len(self._groups), 0)

    def submit(self, slots: Iterable[Slot]) -> None:
        """These are asked for now: new prompts in the order of the draws, or prompts that are to be submitted again."""
        new: dict[str, Group] = {}
        for slot in slots:
            known = self._groups.get(slot.uid)
            group = new.setdefault(slot.uid, Group(slot.uid, {}, known is not None and known.again))
            group.outcomes[slot] = None
        self._groups.update(new)

    def add(self, outcome: Outcome) -> None:
        """One slot's outcome; nothing happens if nobody waits for it (its prompt was given up)."""
        group = self._groups.get(outcome.slot.uid)
        if group is None or group.outcomes.get(outcome.slot, outcome) is not None:
            return
        group.add(outcome)
        if group.complete and not group.results:
            del self._groups[group.uid]
            self._counts["training/lost_groups"] += 1

    def take(self, version: int, prompts: int | None = None) -> Taken:
        """The batch of step ``version``: of the complete groups those drawn first.

        Args:
            prompts: how many, where the step wants further ones in place of some that it does not train; None: a batch.
        """
        taken, wanted = Taken(), prompts or self.size(version)
        self._further = wanted if self._step > version else 0
        for group in [group for group in self._groups.values() if self._stale(group, version)]:
            self._drop(group, taken)
        ready = [group for group in self._groups.values() if group.complete]
        short = self.exhausted and len(ready) == len(self._groups)
        if len(ready) < wanted and not short:
            return taken
        taken.groups, self._further = ready[:wanted], 0
        for group in taken.groups:
            del self._groups[group.uid]
        if taken.groups:
            self._step = version + 1
            self._measure(taken.groups, version)
        return taken

    def _stale(self, group: Group, version: int) -> bool:
        if self._unit == "token" and not group.complete:
            return False
        decides = group.newest if self._unit == "token" else group.oldest
        return decides is not None and version - decides > self._max_staleness

    def _drop(self, group: Group, taken: Taken) -> None:
        self._counts["training/staleness/dropped_tokens"] += group.tokens
        if group.again:
            del self._groups[group.uid]
            taken.dropped.append(group.uid)
            self._counts["training/staleness/dropped"] += 1
        else:
            self._groups[group.uid] = Group(group.uid, dict.fromkeys(group.outcomes), again=True)
            taken.again.append(group.uid)
            self._counts["training/staleness/requeued"] += 1

    def _measure(self, groups: list[Group], version: int) -> None:
        lags = []
        for group in groups:
            if self._unit == "token":
                self._counts["training/staleness/dropped_tokens"] += group.mask(version, self._max_staleness)
            versions = np.concatenate([result.versions[result.loss_mask] for result in group.results])
            lags += [version - int(versions.min())] if len(versions) else []
        self.metrics = {name: float(self._counts[name]) for name in COUNTS}
        self.metrics["training/staleness/mean"] = sum(lags) / len(lags) if lags else 0.0
        self.metrics["training/staleness/max"] = float(max(lags, default=0))
        self._counts.clear()

    def state_dict(self) -> dict[str, Any]:
        """JSON values. Responses are not kept: the prompts outstanding are asked for again."""
        again = [uid for uid, group in self._groups.items() if group.again]
        return {"step": self._step, "uids": self.outstanding, "again": again, "counts": dict(self._counts)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._step, self._counts = int(state["step"]), Counter(state["counts"])
        self._groups = {uid: Group(uid, {}, uid in state["again"]) for uid in state["uids"]}
