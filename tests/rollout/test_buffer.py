"""What a step trains on, how old it may be, and how many prompts are asked for."""

from __future__ import annotations

import json

import numpy as np
import pytest
from pool_cases import group, result, uid

from verl.rollout.buffer import GroupBuffer, fresh_tokens
from verl.rollout.dispatch import Lost
from verl.rollout.protocol import Slot


def ask(buffer: GroupBuffer, draws: range, n: int = 1) -> None:
    buffer.submit([request.slot for draw in draws for request in group(draw, n)])


def answer(buffer: GroupBuffer, draw: int, versions: int | list[int], n: int = 1) -> None:
    for index in range(n):
        buffer.add(result(Slot(uid(draw), index), versions))


def uids(draws: range | list[int]) -> list[str]:
    return [uid(draw) for draw in draws]


def test_without_staleness_the_batches_are_those_of_a_synchronous_run() -> None:
    buffer = GroupBuffer(4, 0, steps=3)
    for step in range(3):
        assert buffer.budget(step) == 4
        draws = range(4 * step, 4 * step + 4)
        ask(buffer, draws, n=2)
        assert buffer.budget(step) == 0
        for draw in reversed(draws):
            assert buffer.take(step).groups == []
            answer(buffer, draw, step, n=2)
        taken = buffer.take(step)
        assert [group.uid for group in taken.groups] == uids(draws)
        assert [result.slot.index for result in taken.groups[0].results] == [0, 1]
        assert buffer.metrics["training/staleness/max"] == 0 and buffer.budget(step) == 0
    assert buffer.done and buffer.budget(3) == 0


def test_the_last_batch_of_an_epoch_may_be_short() -> None:
    buffer = GroupBuffer(4, 1, steps=5, epoch=10)
    assert [buffer.size(step) for step in range(5)] == [4, 4, 2, 4, 4]
    assert [buffer.budget(version) for version in range(5)] == [8, 10, 14, 18, 18]
    ask(buffer, range(10))
    for draw in range(10):
        answer(buffer, draw, 2)
    assert [len(buffer.take(step).groups) for step in range(3)] == [4, 4, 2] and buffer.budget(2) == 4
    assert GroupBuffer(5, 0, steps=2, epoch=10).size(1) == 5


def test_a_step_may_want_further_groups_in_place_of_some_that_it_does_not_train() -> None:
    buffer = GroupBuffer(4, 1, steps=2)
    ask(buffer, range(8))
    for draw in range(4):
        answer(buffer, draw, 0)
    assert len(buffer.take(0).groups) == 4 and buffer.budget(0) == 0
    assert buffer.take(0, 3).groups == [] and buffer.budget(0) == 3
    ask(buffer, range(8, 11))
    assert buffer.budget(0) == 0
    for draw in (8, 5, 10):
        answer(buffer, draw, 0)
    assert [group.uid for group in buffer.take(0, 3).groups] == uids([5, 8, 10])
    assert buffer.budget(0) == buffer.budget(1) == 0  # four are under way for the last step
    for draw in (4, 6, 7, 9):
        answer(buffer, draw, 0)
    assert len(buffer.take(1).groups) == 4 and buffer.done
    assert buffer.take(1, 1).groups == [] and buffer.budget(1) == 1  # the last step gets its further ones too


def test_with_staleness_the_rollout_is_ahead_by_as_many_batches_and_not_past_the_end() -> None:
    buffer = GroupBuffer(4, 2, steps=5)
    assert buffer.budget(0) == 12
    ask(buffer, range(12))
    for draw in range(11, 5, -1):
        answer(buffer, draw, 0)
    assert [group.uid for group in buffer.take(0).groups] == uids([6, 7, 8, 9])  # the first that are complete
    assert buffer.budget(0) == 0 and buffer.budget(1) == 4
    ask(buffer, range(12, 16))
    assert buffer.budget(2) == 4 and buffer.budget(3) == 4  # five batches are all


def test_the_bound_is_strict_and_a_stale_prompt_is_asked_for_once_more() -> None:  # B104
    buffer = GroupBuffer(2, 1, steps=9)
    buffer.load_state_dict({"step": 5, "uids": uids(range(4)), "again": [], "counts": {}})
    ask(buffer, range(4), n=2)
    for draw, versions in enumerate(([5, 5], [4, 4], [3, 3], [5, 3])):  # the last is as old as its oldest token
        for index, version in enumerate(versions):
            buffer.add(result(Slot(uid(draw), index), version))
    taken = buffer.take(5)
    assert [group.uid for group in taken.groups] == uids([0, 1])
    assert (taken.again, taken.dropped) == (uids([2, 3]), [])
    assert buffer.metrics == {
        "training/staleness/mean": 0.5,
        "training/staleness/max": 1,
        "training/staleness/requeued": 2,
        "training/staleness/dropped": 0,
        "training/staleness/dropped_tokens": 16,
        "training/lost_groups": 0,
    }
    buffer.load_state_dict(json.loads(json.dumps(buffer.state_dict())))  # a resume forgets nothing of it
    ask(buffer, range(2, 4), n=2)
    assert buffer.budget(6) == 2  # those two and two more
    answer(buffer, 2, 4, n=2)
    answer(buffer, 3, 6, n=2)
    taken = buffer.take(6)
    assert (taken.groups, taken.again, taken.dropped) == ([], [], uids([2]))
    assert buffer.budget(6) == 3  # another prompt takes its place
    assert buffer.outstanding == uids([3])


def test_a_group_that_will_be_stale_is_given_up_while_a_member_is_in_flight() -> None:
    buffer = GroupBuffer(1, 1, steps=9)
    ask(buffer, range(2), n=2)
    buffer.add(result(Slot(uid(0), 0), 0))
    answer(buffer, 1, 1, n=2)
    assert buffer.take(1).groups[0].uid == uid(1)
    assert buffer.take(2).again == [uid(0)]
    answer(buffer, 0, 2)
    ask(buffer, range(1), n=2)  # only from now on it is waited for again
    answer(buffer, 0, 2, n=2)
    assert len(buffer.take(2).groups[0].results) == 2


@pytest.mark.parametrize(("limit", "mask"), [(0, [0, 0, 1, 1]), (1, [0, 0, 1, 1]), (2, [1, 1, 1, 1])])
def test_tokens_that_are_too_old(limit: int, mask: list[int]) -> None:  # B105
    assert fresh_tokens(np.array([3, 3, 5, 5], np.int32), 5, limit).tolist() == [bool(fresh) for fresh in mask]


def test_by_token_the_old_ones_are_masked_and_a_group_goes_when_none_is_left() -> None:  # B105
    buffer = GroupBuffer(1, 1, steps=9, unit="token")
    buffer.load_state_dict({"step": 5, "uids": uids(range(2)), "again": [], "counts": {}})
    ask(buffer, range(2), n=2)
    old, mixed = Slot(uid(1), 0), Slot(uid(1), 1)
    answer(buffer, 0, [3, 3], n=2)
    buffer.add(result(old, [3, 3]))
    assert buffer.take(5).again == [uid(0)]  # not group 1: its second member may have newer tokens
    made = result(mixed, [3, 3, 5, 5])
    made.loss_mask[3] = False  # not sampled by the policy
    buffer.add(made)
    (kept,) = buffer.take(5).groups
    assert [member.loss_mask.tolist() for member in kept.results] == [[False] * 2, [False, False, True, False]]
    assert kept.results[1].versions.tolist() == [3, 3, 5, 5]
    np.testing.assert_array_equal(kept.results[1].log_probs, made.log_probs)
    assert buffer.metrics["training/staleness/dropped_tokens"] == 4 + 2 + 2
    assert buffer.metrics["training/staleness/max"] == 0


def test_a_group_trains_with_the_members_that_it_has() -> None:  # B099
    buffer = GroupBuffer(2, 0, steps=2)
    ask(buffer, range(2), n=4)
    answer(buffer, 0, 0, n=3)
    buffer.add(Lost(Slot(uid(0), 3), "refused"))
    for index in range(4):
        buffer.add(Lost(Slot(uid(1), index), "refused"))
    assert buffer.outstanding == uids([0]) and buffer.budget(0) == 1  # another prompt for the one that is lost whole
    ask(buffer, range(2, 3), n=4)
    answer(buffer, 2, 0, n=4)
    first, second = buffer.take(0).groups
    assert [member.slot.index for member in first.results] == [0, 1, 2]
    assert first.lost == [Lost(Slot(uid(0), 3), "refused")] and len(second.results) == 4
    assert buffer.metrics["training/lost_groups"] == 1


def test_the_data_end_before_the_steps_do() -> None:  # B098
    buffer = GroupBuffer(2, 1, steps=9)
    ask(buffer, range(4))
    sizes = []
    for step, draws in enumerate((range(2), range(2, 4), range(4, 5))):
        for draw in draws:
            answer(buffer, draw, step)
        sizes.append(len(buffer.take(step).groups))
        if step == 0:
            ask(buffer, range(4, 5))
            buffer.exhausted = True
        assert buffer.budget(step + 1) == 0
    assert sizes == [2, 2, 1] and buffer.done


def test_a_short_last_batch_waits_for_what_is_in_flight() -> None:
    buffer = GroupBuffer(3, 0, steps=9)
    ask(buffer, range(2))
    buffer.exhausted = True
    answer(buffer, 0, 0)
    assert buffer.take(0).groups == [] and not buffer.done
    buffer.add(Lost(Slot(uid(1), 0), "refused"))
    assert [group.uid for group in buffer.take(0).groups] == [uid(0)] and buffer.done


def test_strange_outcomes_change_nothing() -> None:
    buffer = GroupBuffer(1, 0, steps=1)
    ask(buffer, range(1))
    answer(buffer, 7, 0)  # of no group
    buffer.add(result(Slot(uid(0), 5), 0))  # no member
    assert not buffer.take(0).groups
    answer(buffer, 0, 0)
    buffer.add(Lost(Slot(uid(0), 0), "twice"))
    assert len(buffer.take(0).groups[0].results) == 1
    assert buffer.done


def test_after_a_resume_what_was_outstanding_is_asked_for_again_within_the_budget() -> None:  # B109
    buffer = GroupBuffer(2, 1, steps=9)
    ask(buffer, range(4))
    for draw in (0, 1, 3):
        answer(buffer, draw, 0)
    assert [group.uid for group in buffer.take(0).groups] == uids([0, 1])
    ask(buffer, range(4, 6))
    answer(buffer, 4, 1)
    answer(buffer, 5, 1)
    assert [group.uid for group in buffer.take(1).groups] == uids([3, 4])
    resumed = GroupBuffer(2, 1, steps=9)
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert resumed.outstanding == uids([2, 5])  # in flight, and complete
    assert resumed.take(2).groups == [] and resumed.budget(2) == 2
    resumed.submit([Slot(name, 0) for name in resumed.outstanding])
    for name in resumed.outstanding:
        resumed.add(result(Slot(name, 0), 2))
    assert [group.uid for group in resumed.take(2).groups] == uids([2, 5])
