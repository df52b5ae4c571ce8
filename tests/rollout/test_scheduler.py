"""Who runs and who waits, without a model."""

from __future__ import annotations

import random

import numpy as np
import pytest
from contract import PieceTokenizer, request
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from verl.errors import EngineError
from verl.rollout.protocol import Request, Resume, SamplingParams, Slot
from verl.rollout.scheduler import Scheduler, Sequence

EOS = 9
NO_TEXT = PieceTokenizer().decode


def make(max_rows: int = 4, max_tokens: int = 100, max_model_len: int = 64) -> Scheduler:
    return Scheduler(max_rows, max_tokens, max_model_len, [EOS])


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.slot.uid for sequence in sequences]


# --- admission ----------------------------------------------------------------------------------------------------


def test_first_come_first_served_up_to_the_rows() -> None:
    scheduler = make(max_rows=3)
    assert scheduler.submit([request(uid, 0, [1, 2], 4) for uid in "abcde"]) == []
    assert names(scheduler.admit()) == ["a", "b", "c"] == names(scheduler.active)
    assert scheduler.admit() == []
    assert scheduler.remove([1]) == ([2], [1])
    assert names(scheduler.active) == ["a", "c"]
    assert names(scheduler.admit()) == ["d"] and names(scheduler.active) == ["a", "c", "d"]


def test_the_token_budget_counts_a_shared_prompt_once() -> None:
    scheduler = make(max_rows=10, max_tokens=6)
    scheduler.submit([request("long", 0, range(50), 1)])
    scheduler.submit([request("g", k, [1, 2, 3, 4], 4) for k in range(3)])
    scheduler.submit([request("h", 0, [5, 6], 4), request("i", 0, [7], 4)])
    assert names(scheduler.admit()) == ["long"]  # alone, though over the budget
    assert names(scheduler.admit()) == ["g", "g", "g", "h"]
    assert names(scheduler.admit()) == ["i"]


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
        scheduler.admit()
    scheduler.remove([0])
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
            assert scheduler.waiting[0].tokens == [1, 4, 5] and scheduler.waiting[0].full_length == 4


# --- the end of a response ----------------------------------------------------------------------------------------


def ends(ids: list[int], new: int = 5, decode=NO_TEXT, **sampling) -> list[str | None]:  # type: ignore[no-untyped-def]
    """The finish reason after each token."""
    scheduler = make(max_model_len=2000)
    scheduler.submit([request("a", 0, [1], new, **sampling)])
    sequence, found = scheduler.admit()[0], []
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
    sequence = scheduler.admit()[0]
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
    plain, cut = scheduler.admit()
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


class Reference:
    """The cache as the engine keeps it: what each row holds, moved as the scheduler says."""

    def __init__(self, rows: int) -> None:
        self.rows: list[Slot | None] = [None] * rows

    def move(self, sources: list[int], targets: list[int]) -> None:
        taken = [self.rows[source] for source in sources]
        for target, slot in zip(targets, taken, strict=True):
            self.rows[target] = slot


@examples(max_examples=150)
@given(
    st.randoms(use_true_random=False),
    st.integers(1, 6),
    st.integers(1, 30),
    st.lists(st.sampled_from("ssaarrxq"), max_size=60),
)
def test_any_schedule(rng: random.Random, max_rows: int, max_tokens: int, actions: list[str]) -> None:
    """Submit, admit, remove, abort, requeue at random: every slot comes out once and rows hold what they should."""
    scheduler, cache = make(max_rows, max_tokens, 20), Reference(max_rows)
    submitted: list[Slot] = []
    out: list[Slot] = []

    def admit() -> None:
        before = [sequence.request.slot for sequence in scheduler.active]
        waiting = [sequence.request.slot for sequence in scheduler.waiting]
        admitted = scheduler.admit()
        chosen = [sequence.request.slot for sequence in admitted]
        assert chosen == waiting[: len(chosen)]  # in order, nobody overtakes
        assert [s.request.slot for s in scheduler.active] == before + chosen  # the last rows
        assert bool(chosen) == bool(waiting and len(before) < max_rows)  # nobody starves
        distinct = {tuple(s.tokens) for s in admitted}
        assert len(distinct) <= 1 or sum(map(len, distinct)) <= max_tokens
        for row, slot in enumerate(chosen, len(before)):
            cache.rows[row] = slot

    def check() -> None:
        active = [sequence.request.slot for sequence in scheduler.active]
        assert len(active) <= max_rows and cache.rows[: len(active)] == active
        waiting = [sequence.request.slot for sequence in scheduler.waiting]
        inside = active + waiting
        assert len(set(inside)) == len(inside) and set(inside) == scheduler._slots
        assert sorted(inside + out) == sorted(submitted)

    for action in actions:
        if action == "s":
            new = [Slot(f"u{len(submitted)}", k) for k in range(rng.randint(1, 3))]
            prompt = [rng.randrange(3) for _ in range(rng.randint(1, 22))]
            refused = scheduler.submit([Request(slot, prompt, SamplingParams(4)) for slot in new])
            submitted += new
            out += [result.slot for result in refused]
            assert [r.slot for r in refused] == (new if len(prompt) >= 20 else [])
        elif action == "a":
            admit()
        elif action == "r":
            rows = [row for row in range(len(scheduler.active)) if rng.random() < 0.4]
            out += [scheduler.active[row].request.slot for row in rows]
            cache.move(*scheduler.remove(rows))
        elif action == "x":
            chosen = {slot for slot in submitted if rng.random() < 0.3} | {Slot("nobody", 0)}
            results, sources, targets = scheduler.abort(chosen)
            assert all(result.finish_reason == "abort" for result in results)
            out += [result.slot for result in results]
            cache.move(sources, targets)
        else:
            order = [s.request.slot for s in [*scheduler.active, *scheduler.waiting]]
            scheduler.requeue_active()
            assert not scheduler.active and [s.request.slot for s in scheduler.waiting] == order
        check()
    out += [result.slot for result in scheduler.abort(None)[0]]
    assert sorted(out) == sorted(submitted) and not scheduler._slots and not scheduler.active
