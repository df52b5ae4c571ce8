"""Who runs and who waits, without a model; a simulated pool shows any wrong sharing, copying or eviction."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from contract import PieceTokenizer, request
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from verl.errors import EngineError
from verl.rollout.blocks import BlockManager
from verl.rollout.protocol import Request, Result, Resume, SamplingParams, Slot
from verl.rollout.scheduler import SMALLEST_CHUNK, Plan, Scheduler, Sequence

EOS = 9
SIZE = 4  # tokens of a block
NO_TEXT = PieceTokenizer().decode


def make(
    max_rows: int = 4, max_tokens: int = 100, max_model_len: int = 64, count: int = 100, prefix_cache: bool = False
) -> Scheduler:
    return Scheduler(max_rows, max_tokens, max_model_len, [EOS], BlockManager(count), SIZE, prefix_cache)


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.slot.uid for sequence in sequences]


def work_of(plan: Plan) -> list[tuple[str, int, int]]:
    return [(work.sequence.request.slot.uid, work.start, work.end) for work in plan.work]


class Simulated:
    """An engine whose keys and values are, for each place of each block, the tokens up to it."""

    def __init__(self, scheduler: Scheduler, token: Callable[[], int] = lambda: 1) -> None:
        self.scheduler, self.token = scheduler, token
        self.pool: list[list[list[int] | None]] = [[None] * SIZE for _ in range(scheduler.blocks.count)]
        self.steps = 0

    def step(self) -> tuple[Plan, list[Result]]:
        scheduler, blocks = self.scheduler, self.scheduler.blocks
        for block in blocks._free:
            self.pool[block] = [None] * SIZE
        before, preemptions = list(scheduler.active), scheduler.preemptions
        decoding = sum(s.computed == s.length - 1 for s in before)
        plan = scheduler.schedule()
        self._check(plan, before, scheduler.preemptions > preemptions, decoding)
        copied = [list(self.pool[source]) for source, _ in plan.copies]
        for (_, target), content in zip(plan.copies, copied, strict=True):
            self.pool[target] = content
        for work in plan.work:
            tokens = work.sequence.tokens(0, work.end)
            for place in range(work.start, work.end):
                self.pool[work.sequence.blocks[place // SIZE]][place % SIZE] = tokens[: place + 1]
        for work in plan.work:
            tokens = work.sequence.tokens(0, work.end)
            for place in range(work.end):
                assert self.pool[work.sequence.blocks[place // SIZE]][place % SIZE] == tokens[: place + 1]
        scheduler.complete(plan)
        ended, results = [], []
        for work in plan.work:
            sequence = work.sequence
            if work.samples:
                sequence.append(self.token(), -0.5, 0, 0.0)
                reason = sequence.finish_reason(NO_TEXT)
                if reason:
                    ended.append(sequence)
                    results.append(sequence.result(reason))
        scheduler.remove(ended)
        self.steps += 1
        self.check_blocks()
        return plan, results

    def _check(self, plan: Plan, before: list[Sequence], preempted: bool, decoding: int) -> None:
        scheduler, fed = self.scheduler, [work.sequence for work in plan.work]
        assert len(scheduler.active) <= scheduler.max_rows
        assert len({id(sequence) for sequence in fed}) == len(fed)
        assert not before or before[0] in fed  # the oldest always advances
        kept = scheduler.active[: len(before)] if not preempted else scheduler.active
        assert kept == before[: len(kept)] and (preempted or len(kept) == len(before))
        lengths = [work.end - work.start for work in plan.work]
        assert lengths == sorted(lengths, key=lambda length: length > 1)
        assert sum(lengths) <= decoding + max(scheduler.max_tokens - decoding, SMALLEST_CHUNK)
        for work in plan.work:
            assert work.sequence in scheduler.active
            assert work.start == work.sequence.computed < work.end <= work.sequence.length
        for sequence in kept:
            assert sequence in fed or sequence.computed < sequence.length - 1  # one token always has room

    def check_blocks(self) -> None:
        scheduler = self.scheduler
        users = Counter(block for sequence in scheduler.active for block in sequence.blocks)
        assert scheduler.blocks._users == [users[block] for block in range(scheduler.blocks.count)]
        assert scheduler.blocks.used == len(users)
        assert not any(sequence.blocks or sequence.computed for sequence in scheduler.waiting)
        waiting = Counter(sequence.keys[-1] for sequence in scheduler.waiting)
        assert scheduler._waiting_for == waiting

    def run(self, most_steps: int = 2000) -> dict[Slot, Result]:
        found: dict[Slot, Result] = {}
        for _ in range(most_steps):
            if not self.scheduler.active and not self.scheduler.waiting:
                return found
            results = self.step()[1]
            assert not {result.slot for result in results} & set(found)
            found |= {result.slot: result for result in results}
        raise AssertionError("it never came to an end")


# --- order, budget, chunks ----------------------------------------------------------------------------------------


def test_first_come_first_served_up_to_the_rows() -> None:
    scheduler = make(max_rows=3)
    engine = Simulated(scheduler)
    assert scheduler.submit([request(uid, 0, [ord(uid), 2], 4) for uid in "abcde"]) == []
    assert work_of(engine.step()[0]) == [("a", 0, 2), ("b", 0, 2), ("c", 0, 2)]
    assert work_of(engine.step()[0]) == [("a", 2, 3), ("b", 2, 3), ("c", 2, 3)]
    scheduler.remove([scheduler.active[1]])
    assert work_of(engine.step()[0]) == [("a", 3, 4), ("c", 3, 4), ("d", 0, 2)]
    assert names(scheduler.active) == ["a", "c", "d"] and names(list(scheduler.waiting)) == ["e"]
    assert all(s.started is not None for s in scheduler.active) and scheduler.waiting[0].started is None
    engine.run()
    assert scheduler.blocks.used == 0 and not scheduler._slots


def test_the_token_budget_and_chunks() -> None:
    scheduler = make(max_tokens=10)
    engine = Simulated(scheduler)
    scheduler.submit(
        [request("long", 0, range(25), 9), request("b", 0, [5, 6, 7], 9), request("c", 0, range(30, 60), 9)]
    )
    assert work_of(engine.step()[0]) == [("long", 0, 10)]
    assert work_of(engine.step()[0]) == [("long", 10, 20)]
    assert not scheduler.active[0].ids
    assert work_of(engine.step()[0]) == [("long", 20, 25), ("b", 0, 3), ("c", 0, 2)]
    assert [len(s.ids) for s in scheduler.active] == [1, 1, 0]
    assert work_of(engine.step()[0]) == [("long", 25, 26), ("b", 3, 4), ("c", 2, 10)]  # ten in all
    scheduler.max_tokens = 1
    assert work_of(engine.step()[0]) == [("long", 26, 27), ("b", 4, 5), ("c", 10, 18)]  # prompts never stand still
    assert [len(s.blocks) for s in scheduler.active] == [7, 2, 5]


def test_a_prompt_without_budget_left_waits_for_the_next_step() -> None:
    scheduler = make(max_tokens=8)
    engine = Simulated(scheduler)
    scheduler.submit([request("a", 0, range(12), 9), request("b", 0, range(20, 36), 9)])
    assert work_of(engine.step()[0]) == [("a", 0, 8)]
    assert work_of(engine.step()[0]) == [("a", 8, 12), ("b", 0, 4)]
    scheduler.submit([request("c", 0, range(40, 44), 9)])
    assert work_of(engine.step()[0]) == [("a", 12, 13), ("b", 4, 12)]
    assert work_of(engine.step()[0]) == [("a", 13, 14), ("b", 12, 16), ("c", 0, 4)]


# --- shared prompts -----------------------------------------------------------------------------------------------


def test_followers_wait_for_their_leader_and_others_pass() -> None:
    scheduler = make(max_rows=8)
    engine = Simulated(scheduler)
    scheduler.submit([request("g", k, range(10), 6) for k in range(3)] + [request("h", 0, [5, 6], 6)])
    assert work_of(engine.step()[0]) == [("g", 0, 10), ("h", 0, 2)]
    assert [s.request.slot.index for s in scheduler.waiting] == [1, 2]
    plan, _ = engine.step()
    assert work_of(plan) == [("g", 10, 11), ("h", 2, 3), ("g", 9, 10), ("g", 9, 10)]
    leader, _, one, two = scheduler.active
    assert one.blocks[:2] == two.blocks[:2] == leader.blocks[:2]  # full ones are shared
    assert plan.copies == [(leader.blocks[2], one.blocks[2]), (leader.blocks[2], two.blocks[2])]
    assert len({leader.blocks[2], one.blocks[2], two.blocks[2]}) == 3
    assert scheduler.reused_tokens == 18 and scheduler.blocks.used == 6
    engine.run()
    assert scheduler.blocks.used == 0 and not scheduler.blocks._known  # nobody waits, nothing is kept


def test_a_prompt_that_ends_with_its_block_is_shared_whole() -> None:
    scheduler = make(max_rows=8)
    engine = Simulated(scheduler)
    scheduler.submit([request("g", k, range(8), 6) for k in range(3)])
    engine.step()
    plan, _ = engine.step()
    assert plan.copies == [] and work_of(plan) == [("g", 8, 9), ("g", 7, 8), ("g", 7, 8)]
    assert [s.blocks[:2] for s in scheduler.active] == [scheduler.active[0].blocks[:2]] * 3
    engine.run()


def test_followers_of_a_long_prompt_wait_for_all_its_chunks() -> None:
    scheduler = make(max_rows=8, max_tokens=8)
    engine = Simulated(scheduler)
    scheduler.submit([request("g", k, range(20), 6) for k in range(2)])
    scheduler.submit([request("h", 0, [1], 6), request("i", 0, [1], 6)])
    assert [work_of(engine.step()[0]) for _ in range(4)] == [
        [("g", 0, 8)],
        [("g", 8, 16)],
        [("h", 0, 1), ("i", 0, 1), ("g", 16, 20)],
        [("g", 20, 21), ("h", 1, 2), ("i", 1, 2), ("g", 19, 20)],
    ]


def test_different_prompts_share_their_common_beginning() -> None:
    scheduler = make(max_rows=8)
    engine = Simulated(scheduler)
    scheduler.submit([request("a", 0, [*range(8), 50], 9)])
    engine.step()
    scheduler.submit([request("b", 0, [*range(8), 60, 61, 62], 9), request("c", 0, [*range(7), 9, 9], 9)])
    plan, _ = engine.step()
    assert work_of(plan) == [("a", 9, 10), ("b", 8, 11), ("c", 4, 9)] and plan.copies == []
    a, b, c = scheduler.active
    assert b.blocks[:2] == a.blocks[:2] and c.blocks[0] == a.blocks[0] and c.blocks[1] != a.blocks[1]
    engine.run()


def test_a_follower_takes_over_when_its_leader_is_aborted() -> None:
    scheduler = make(max_rows=8, max_tokens=8)
    engine = Simulated(scheduler)
    scheduler.submit([request("g", k, range(20), 3) for k in range(3)])
    engine.step()
    scheduler.abort({Slot("g", 0)})
    assert work_of(engine.step()[0]) == [("g", 8, 16)]  # what the leader computed is kept for those who wait
    scheduler.abort({Slot("g", 1), Slot("g", 2)})
    assert scheduler.blocks.used == 0 and not scheduler.active and not scheduler.waiting and not scheduler._waiting_for


# --- memory -------------------------------------------------------------------------------------------------------


def test_the_youngest_gives_way_and_comes_back_first() -> None:
    scheduler = make(count=6)
    engine = Simulated(scheduler)
    scheduler.submit([request(uid, 0, [ord(uid)] * 3, 15) for uid in "ab"])  # 5 blocks each in the end
    engine.step()
    scheduler.submit([request("c", 0, [7] * 3, 2)])  # no room for three to go on for a while
    seen = []
    while not scheduler.preemptions:
        seen.append(names(scheduler.active))
        engine.step()
    assert all(active == ["a", "b"] or "c" in active for active in seen)
    assert names(scheduler.active)[0] == "a" and scheduler.waiting[0].request.slot.uid in "bc"
    victim = scheduler.waiting[0]
    assert victim.ids and victim.computed == 0 and victim.blocks == []
    results = engine.run()
    assert {r.slot.uid: len(r.response_ids) for r in results.values()} | {"c": 2} == {"a": 15, "b": 15, "c": 2}
    assert scheduler.blocks.used == 0


def test_nobody_starts_in_a_step_that_sent_somebody_back() -> None:
    scheduler = make(max_rows=2, count=4)
    engine = Simulated(scheduler)
    scheduler.submit([request(uid, 0, [ord(uid)] * 3, 12) for uid in "ab"] + [request("c", 0, [5], 1)])
    for _ in range(6):
        engine.step()
    assert [s.computed for s in scheduler.active] == [8, 8] and scheduler.preemptions == 0
    assert work_of(engine.step()[0]) == [("a", 8, 9)]  # its third block was b's
    assert scheduler.preemptions == 1 and names(list(scheduler.waiting)) == ["b", "c"]
    assert names(scheduler.active) == ["a"]
    engine.run()


def test_the_oldest_takes_from_all_others() -> None:
    scheduler = make(count=6)
    engine = Simulated(scheduler)
    scheduler.submit([request(uid, 0, [ord(uid)], 23) for uid in "abcd"])
    results = engine.run()
    assert [r.slot.uid for r in results.values()] == list("abcd") and scheduler.preemptions > 0
    assert all(len(r.response_ids) == 23 for r in results.values())
    assert engine.steps <= 4 * 24 + 10


def test_what_can_never_fit_is_refused() -> None:
    scheduler = make(count=3)
    results = scheduler.submit([request("a", 0, range(5), 9), request("b", 0, range(5), 8), request("c", 0, [1], 99)])
    assert [(r.slot.uid, r.finish_reason, r.response_ids.size) for r in results] == [
        ("a", "refused", 0),
        ("c", "refused", 0),
    ]
    assert list(Simulated(scheduler).run()) == [Slot("b", 0)]


def test_the_prefix_cache_keeps_prompts_until_memory_is_wanted() -> None:
    for cached in (True, False):
        scheduler = make(count=6, prefix_cache=cached)
        engine = Simulated(scheduler)
        prompt = list(range(10))
        for new in (1, 2):
            scheduler.submit([request("a", new, prompt, 3)])
            assert work_of(engine.step()[0]) == [("a", 9 if cached and new > 1 else 0, 10)]
            engine.run()
            assert scheduler.blocks.used == 0 and bool(scheduler.blocks._known) == cached
        scheduler.submit([request("b", 0, range(30, 50), 3)])  # all six blocks
        engine.run()
        scheduler.submit([request("a", 3, prompt, 1)])
        assert work_of(engine.step()[0]) == [("a", 0, 10)]


def test_new_weights_put_everybody_back_and_forget_every_block() -> None:
    scheduler = make(max_rows=2, prefix_cache=True)
    engine = Simulated(scheduler)
    scheduler.submit([request(uid, 0, [ord(uid)] * 9, 9) for uid in "abc"])
    for _ in range(3):
        engine.step()
    scheduler.requeue_active()
    assert not scheduler.active and names(list(scheduler.waiting)) == ["a", "b", "c"]
    assert scheduler.blocks.used == 0 and not scheduler.blocks._known and scheduler.preemptions == 0
    engine.pool = [[None] * SIZE for _ in engine.pool]
    assert work_of(engine.step()[0]) == [("a", 0, 12), ("b", 0, 12)]
    engine.run()


def test_a_resumed_response_uses_the_prompt_of_its_group() -> None:
    scheduler = make()
    engine = Simulated(scheduler)
    scheduler.submit([request("g", 0, range(10), 9)])
    engine.step()
    part = Resume(np.arange(5, dtype=np.int32) % 3, np.zeros(5, np.float32), np.zeros(5, np.int32))
    scheduler.submit([Request(Slot("g", 1), list(range(10)), SamplingParams(9), part)])
    plan, _ = engine.step()
    assert work_of(plan) == [("g", 10, 11), ("g", 10, 15)]
    leader, resumed = scheduler.active
    assert plan.copies == [(leader.blocks[2], resumed.blocks[2])] and resumed.ids == [0, 1, 2, 0, 1, 1]
    assert [len(r.response_ids) for r in engine.run().values()] == [9, 9]


def test_tokens_of_prompt_and_response() -> None:
    sequence = Sequence(request("a", 0, [1, 2, 3], 4), 4, frozenset())
    sequence.ids = [4, 5]
    every = [1, 2, 3, 4, 5]
    for start in range(6):
        for end in range(start, 6):
            assert sequence.tokens(start, end) == every[start:end]


# --- wrong requests -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "refused", "room"), [(15, None, 1), (16, "refused", None), (17, "refused", None), (8, None, 8)]
)
def test_prompts_at_the_limit(length: int, refused: str | None, room: int | None) -> None:
    """B095: 16 positions, 8 new tokens asked for."""
    scheduler = make(max_model_len=16)
    results = scheduler.submit([request("a", 0, range(length), 8)])
    if refused:
        assert [r.finish_reason for r in results] == [refused] and results[0].response_ids.size == 0
        assert not scheduler.waiting
        assert scheduler.submit([request("a", 0, [1], 8)]) == []  # the slot is free for another attempt
    else:
        assert results == [] and scheduler.waiting[0].max_new_tokens == room
        assert scheduler.waiting[0].full_length == length + room  # type: ignore[operator]


def test_a_wrong_request_leaves_nothing_behind() -> None:
    scheduler = make()
    good = request("a", 0, [1], 4)
    for bad, message in (
        ([good, request("b", 0, [], 4)], "empty prompt"),
        ([good, request("a", 1, [1], 4), good], "submitted twice"),
        ([request("c", 0, range(99), 4), request("c", 0, range(99), 4)], "submitted twice"),
    ):
        with pytest.raises(EngineError, match=message):
            scheduler.submit(bad)
        assert not scheduler.waiting
    scheduler.submit([good])
    for _ in "waiting", "running":
        with pytest.raises(EngineError, match="submitted twice") as caught:
            scheduler.submit([good])
        assert caught.value.value == Slot("a", 0)
        scheduler.schedule()
    scheduler.remove(scheduler.active)
    assert scheduler.submit([good]) == []


def test_a_resumed_response_at_its_limit_is_done() -> None:
    part = Resume(np.array([4, 5], np.int32), np.array([-1, -2], np.float32), np.array([0, 1], np.int32))
    for limit, done in ((2, True), (3, False)):
        scheduler = make()
        results = scheduler.submit([Request(Slot("a", 0), [1], SamplingParams(limit), part)])
        assert bool(results) == done
        if done:
            assert results[0].finish_reason == "length"
            assert results[0].response_ids.tolist() == [4, 5] and results[0].versions.tolist() == [0, 1]
        else:
            assert scheduler.waiting[0].tokens(0, 3) == [1, 4, 5] and scheduler.waiting[0].full_length == 4


# --- the end of a response ----------------------------------------------------------------------------------------


def ends(ids: list[int], new: int = 5, decode=NO_TEXT, **sampling) -> list[str | None]:  # type: ignore[no-untyped-def]
    """The finish reason after each token."""
    scheduler = make(max_model_len=2000, count=1000)
    scheduler.submit([request("a", 0, [1], new, **sampling)])
    sequence, found = scheduler.waiting[0], []
    for token in ids:
        sequence.append(token, -0.5, 0, 0.0)
        found.append(sequence.finish_reason(decode))
    return found


def test_end_tokens_and_the_limit() -> None:
    """B092: a cut response is cut, and a stop at the last place is a stop."""
    assert ends([1, 2, 3], 3) == [None, None, "length"]
    assert ends([1, EOS]) == [None, "stop"]
    assert ends([1, EOS], 2) == [None, "stop"]
    assert ends([1, EOS], ignore_eos=True) == [None, None]
    assert ends([1, EOS], 2, ignore_eos=True) == [None, "length"]
    assert ends([1, 7], stop_token_ids=(7, 8)) == [None, "stop"]
    assert ends([EOS], stop_token_ids=(7,)) == ["stop"]
    assert ends([EOS, 7], ignore_eos=True, stop_token_ids=(7,)) == [None, "stop"]
    assert ends([1, EOS], ignore_eos=True, stop_token_ids=(7, EOS)) == [None, "stop"]  # asked for by name
    assert ends([EOS], stop_token_ids=(EOS,)) == ["stop"] == ends([EOS], 1)


def test_stop_strings_across_tokens() -> None:
    """B091: "a", "EN", "D!", "b" with stop "END"."""
    decode = PieceTokenizer(["a", "EN", "D!", "b"]).decode
    assert ends([0, 1, 2], stop=("END",), decode=decode) == [None, None, "stop"]
    assert ends([0, 1, 2], 3, stop=("END",), decode=decode) == [None, None, "stop"]
    assert ends([1, 0, 2], 3, stop=("END",), decode=decode) == [None, None, "length"]
    assert ends([0, 1, 2], stop=("zz", "ND!"), decode=decode) == [None, None, "stop"]
    assert ends([3], stop=("END", "b"), decode=decode) == ["stop"]


def test_stop_strings_at_the_borders_of_characters() -> None:
    """A character's last byte completes the stop; its first alone, another character with it, or half of it, do not."""
    decode = lambda ids: bytes(ids).decode("utf-8", "replace")  # noqa: E731
    assert ends(list("é".encode()), stop=("é",), decode=decode) == [None, "stop"]
    assert ends(list("è".encode()), 2, stop=("é",), decode=decode) == [None, "length"]
    assert ends(list("aé".encode())[:2], 2, stop=("é",), decode=decode) == [None, "length"]
    assert ends(list("aé!".encode()), 4, stop=("é!", "zz"), decode=decode) == [None, None, None, "stop"]
    text = PieceTokenizer(["a", "é", "éb", "c"]).decode  # within a token, text behind it
    assert ends([0, 2, 3], stop=("aé",), decode=text) == [None, "stop", "stop"]
    # Forced to two tokens: the stop's last byte is the third. Forced to three: it was whole before.
    ids = list("aé".encode())
    assert ends(ids, 9, stop=("é",), decode=decode, min_new_tokens=2) == [None, None, "stop"]
    assert ends([*ids, 97], 9, stop=("é",), decode=decode, min_new_tokens=3) == [None] * 4
    assert ends([*ids, *ids], 9, stop=("é",), decode=decode, min_new_tokens=3) == [None] * 5 + ["stop"]
    assert ends([*ids, 97], 4, stop=("aéa",), decode=decode, min_new_tokens=3) == [None] * 3 + ["stop"]


def test_a_stop_lies_across_the_border_of_a_resumed_part() -> None:
    """ "EN" was sampled before the pause; and a part that has its end already is not gone on with."""
    decode = PieceTokenizer(["a", "EN", "D!", "b"]).decode
    part = Resume(np.array([0, 1], np.int32), np.array([-1, -1], np.float32), np.array([0, 0], np.int32))
    scheduler = make()
    scheduler.submit([Request(Slot("a", 0), [3], SamplingParams(9, stop=("END",)), part)])
    sequence = scheduler.schedule().work[0].sequence
    sequence.append(2, -0.5, 1, 0.0)
    assert sequence.finish_reason(decode) == "stop"
    ended = Resume(np.array([1, EOS], np.int32), np.array([-1, -1], np.float32), np.array([0, 0], np.int32))
    for limit in (2, 9):  # also at its limit: a stop wins
        results = make().submit([Request(Slot("a", 0), [3], SamplingParams(limit), ended)])
        assert [(r.finish_reason, r.response_ids.tolist()) for r in results] == [("stop", [1, EOS])]
    assert make().submit([Request(Slot("a", 0), [3], SamplingParams(9, ignore_eos=True), ended)]) == []


@pytest.mark.parametrize("stop", ["完了しましたので終わり", "\U0001f600" * 12, "a" * 60])
def test_a_stop_string_of_many_bytes_is_found_one_byte_a_token(stop: str) -> None:
    decode = lambda ids: bytes(ids).decode("utf-8", "replace")  # noqa: E731
    ids = list(("x" * 30 + stop).encode())
    found = ends(ids, 1000, stop=(stop,), decode=decode)
    assert found == [None] * (len(ids) - 1) + ["stop"]


def test_a_result_says_what_was_sampled() -> None:
    scheduler = make()
    scheduler.submit([request("a", 3, [1, 2], 4), request("b", 0, [1], 4, top_p=0.9)])
    plain, cut = scheduler.waiting
    for sequence in (plain, cut):
        for k in range(3):
            sequence.append(5 + k, -0.1 * k, k, -0.01 * k)
    result = plain.result("stop")
    assert result.slot == Slot("a", 3) and result.finish_reason == "stop"
    assert (result.response_ids.dtype, result.response_ids.tolist()) == (np.int32, [5, 6, 7])
    assert result.log_probs.dtype == np.float32 and np.allclose(result.log_probs, [0, -0.1, -0.2])
    assert (result.loss_mask.dtype, result.loss_mask.tolist()) == (np.bool_, [True] * 3)
    assert (result.versions.dtype, result.versions.tolist()) == (np.int32, [0, 1, 2])
    assert result.kept_log_mass is None and set(result.timings) == {"queued", "running"}
    mass = cut.result("stop").kept_log_mass
    assert mass is not None and mass.dtype == np.float32 and np.allclose(mass, [0, -0.01, -0.02])


# --- schedules ----------------------------------------------------------------------------------------------------

BASES = [[3] * 9, [3, 3, 3, 3, 4, 4, 4, 4], [5, 6]]


def random_request(rng: random.Random, slot: Slot, prompt: list[int]) -> Request:
    new, resume = rng.randint(1, 12), None
    if rng.random() < 0.15:
        count = rng.randint(1, new)
        resume = Resume(np.ones(count, np.int32), np.zeros(count, np.float32), np.zeros(count, np.int32))
    return Request(slot, prompt, SamplingParams(new), resume)


@examples(max_examples=250, deadline=None)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 6),
    st.integers(1, 30),
    st.integers(3, 14),
    st.booleans(),
    st.lists(st.sampled_from("sssppppppppppxq"), max_size=60),
)
def test_any_schedule(
    rng: random.Random, max_rows: int, max_tokens: int, count: int, cached: bool, actions: list[str]
) -> None:
    """Submit, step, abort, requeue at random, in little memory: every slot comes out once and blocks hold what they
    should.
    """
    scheduler = make(max_rows, max_tokens, 30, count, cached)
    engine = Simulated(scheduler, lambda: rng.choice([1, 1, 1, 1, EOS]))
    submitted: list[Slot] = []
    out: dict[Slot, str] = {}

    def take(results: list[Result]) -> None:
        for result in results:
            assert result.slot not in out
            out[result.slot] = result.finish_reason

    for action in actions:
        if action == "s":
            prompt = rng.choice(BASES) + [rng.randrange(2) for _ in range(rng.choice([0, 0, 1, 4, 9, 20]))]
            new = [Slot(f"u{len(submitted)}", k) for k in range(rng.randint(1, 4))]
            take(scheduler.submit([random_request(rng, slot, prompt) for slot in new]))
            submitted += new
        elif action == "p":
            take(engine.step()[1])
        elif action == "x":
            chosen = {slot for slot in submitted if rng.random() < 0.3} | {Slot("nobody", 0)}
            results = scheduler.abort(chosen)
            assert {result.slot for result in results} == chosen & set(submitted) - set(out)
            assert all(result.finish_reason == "abort" for result in results)
            take(results)
        else:
            order = [s.request.slot for s in [*scheduler.active, *scheduler.waiting]]
            scheduler.requeue_active()
            assert not scheduler.active and [s.request.slot for s in scheduler.waiting] == order
            engine.pool = [[None] * SIZE for _ in engine.pool]
        engine.check_blocks()
        inside = [s.request.slot for s in [*scheduler.active, *scheduler.waiting]]
        assert len(set(inside)) == len(inside) and set(inside) == scheduler._slots
        assert sorted([*inside, *out]) == sorted(submitted)
    for slot, result in engine.run().items():
        assert slot not in out
        out[slot] = result.finish_reason
    assert sorted(out) == sorted(submitted) and not scheduler._slots and not scheduler._waiting_for
    assert scheduler.blocks.used == 0
