"""The stream of prompts: epochs, resume at any point, validation passes (B060, B061, B068, B070, B071, B072)."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import dataset_in_memory

from verl.data.dataset import PromptDataset
from verl.data.loader import PromptLoader, iterate_once
from verl.data.rows import PromptRow
from verl.data.samplers import EpochSampler, epoch_order
from verl.errors import DataError


def dataset_of(size: int, salt: str = "") -> PromptDataset:
    rows = [PromptRow(f"p{salt}{i}", "src", str(i), {"index": i}, i) for i in range(size)]
    return dataset_in_memory(rows, [[i, i + 1] for i in range(size)])


def loader_of(
    dataset: PromptDataset, batch_size: int, shuffle: bool = True, seed: int = 1, drop_last: bool = True
) -> PromptLoader:
    return PromptLoader(dataset, batch_size, EpochSampler(len(dataset), seed, shuffle), drop_last)


def drawn(loader: PromptLoader, batches: int) -> list[list[int]]:
    return [list(loader.next_batch().non_tensor_batch["row_index"]) for _ in range(batches)]


def uids(loader: PromptLoader, batches: int) -> list[str]:
    return [uid for _ in range(batches) for uid in loader.next_batch().non_tensor_batch["uid"]]


def test_columns_of_a_batch():
    batch = loader_of(dataset_of(3), 2, shuffle=False).next_batch()
    assert len(batch) == 2 and not list(batch.batch.keys())
    columns = batch.non_tensor_batch
    assert set(columns) == {
        "uid", "prompt_ids", "raw_prompt", "data_source", "ground_truth", "extra_info", "row_index", "columns",
    }  # fmt: skip
    assert columns["uid"].tolist() == ["train:0:src:0", "train:1:src:1"]
    # Equal lengths must not be stacked into a matrix.
    assert columns["prompt_ids"].shape == (2,) and columns["prompt_ids"][1] == [1, 2]
    assert columns["extra_info"][1] == {"index": 1} and columns["ground_truth"].tolist() == ["0", "1"]


def test_what_happens_to_a_batch_does_not_reach_the_dataset():
    dataset = dataset_of(2)
    batch = loader_of(dataset, 2, shuffle=False).next_batch()
    batch.non_tensor_batch["prompt_ids"][0].append(99)
    batch.non_tensor_batch["extra_info"][0]["x"] = 1
    assert dataset.prompt_ids[0] == [0, 1] and dataset.rows[0].extra_info == {"index": 0}


@pytest.mark.parametrize(("drop_last", "sizes", "steps"), [(True, [2, 2], 2), (False, [2, 2, 1], 3)])
def test_five_prompts_in_batches_of_two(drop_last, sizes, steps):
    loader = loader_of(dataset_of(5), 2, drop_last=drop_last, seed=3)
    assert loader.steps_per_epoch == steps
    epoch = drawn(loader, steps)
    assert [len(batch) for batch in epoch] == sizes
    flat = list(chain(*epoch))
    assert len(set(flat)) == len(flat) and loader.epoch == 0
    drawn(loader, 1)
    assert loader.epoch == 1


@pytest.mark.parametrize("drop_last", [True, False])
def test_a_dataset_smaller_than_a_batch_is_refused(drop_last):
    with pytest.raises(DataError, match=r"3 prompts, data\.train_batch_size=4"):
        loader_of(dataset_of(3), 4, drop_last=drop_last)


def test_batch_size_equal_to_the_dataset_and_refused_sizes():
    assert loader_of(dataset_of(4), 4).steps_per_epoch == 1
    with pytest.raises(DataError):
        loader_of(dataset_of(4), 0)
    with pytest.raises(DataError):
        list(iterate_once(dataset_of(4), -1))


def test_epochs_are_permutations_of_their_own_and_depend_on_the_seed():
    orders = [tuple(epoch_order(50, 7, epoch)) for epoch in range(4)]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len(set(orders)) == 4 and tuple(epoch_order(50, 8, 0)) != orders[0]
    assert tuple(epoch_order(50, 7, 0)) == orders[0]


def test_the_order_never_changes_between_releases():
    # Frozen on purpose: a checkpoint resumed with a later version must see the same prompts. Oracle: scalar splitmix64.
    import hashlib

    def key(seed: int, epoch: int, row: int) -> int:
        mask = 2**64 - 1
        base = int.from_bytes(hashlib.sha256(f"prompt order {seed} {epoch}".encode()).digest()[:8], "little")
        z = (base + (row + 1) * 0x9E3779B97F4A7C15) & mask
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        return z ^ (z >> 31)

    assert epoch_order(9, 1, 0).tolist() == sorted(range(9), key=lambda row: key(1, 0, row))
    assert epoch_order(9, 5, 3).tolist() == sorted(range(9), key=lambda row: key(5, 3, row))


def test_first_places_are_uniform():
    # 4 rows, 4000 seeds: each row is first in 1000 +- 5 standard deviations (27.4).
    firsts = [int(epoch_order(4, seed, 0)[0]) for seed in range(4000)]
    assert all(abs(firsts.count(row) - 1000) < 137 for row in range(4))


def test_without_shuffle_the_order_of_the_files():
    assert drawn(loader_of(dataset_of(4), 2, shuffle=False), 4) == [[0, 1], [2, 3], [0, 1], [2, 3]]


def test_draws_number_the_stream_and_uids_never_repeat():
    names = uids(loader_of(dataset_of(4), 2), 6)
    assert [int(name.split(":")[1]) for name in names] == list(range(12)) and len(set(names)) == 12


def test_the_same_prompt_twice_in_a_batch_is_two_groups():
    rows = [PromptRow("same", "s", "1", {"index": 0, "uid": "x"}, i, {"uid": "x"}) for i in range(2)]
    batch = loader_of(dataset_in_memory(rows, [[1], [1]]), 2).next_batch()
    assert len(set(batch.non_tensor_batch["uid"])) == 2


@pytest.mark.parametrize("killed_after", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("rows", [4, 5])
def test_killed_and_resumed_sees_the_uninterrupted_sequence(killed_after, drop_last, rows):
    whole = uids(loader_of(dataset_of(rows), 2, drop_last=drop_last, seed=11), 9)
    first = loader_of(dataset_of(rows), 2, drop_last=drop_last, seed=11)
    before = uids(first, killed_after)
    state = json.loads(json.dumps(first.state_dict()))
    second = loader_of(dataset_of(rows), 2, drop_last=drop_last, seed=11)
    second.load_state_dict(state)
    assert second.epoch == first.epoch
    assert before + uids(second, 9 - killed_after) == whole


def test_resume_exactly_at_the_end_of_an_epoch():
    # 4 prompts, batch 2, 2 epochs, saved at step 2: exactly steps 3 and 4 are left, and they are another order.
    whole = drawn(loader_of(dataset_of(4), 2, seed=2), 4)
    first = loader_of(dataset_of(4), 2, seed=2)
    drawn(first, 2)
    second = loader_of(dataset_of(4), 2, seed=2)
    second.load_state_dict(first.state_dict())
    rest = drawn(second, 2)
    assert rest == whole[2:] and sorted(chain(*rest)) == [0, 1, 2, 3]


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 12),
    batch=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    stops=st.lists(st.integers(0, 5), max_size=5),
)
def test_any_number_of_stops_changes_nothing(rows, batch, seed, drop_last, shuffle, stops):
    batch = min(batch, rows)
    options = {"batch_size": batch, "shuffle": shuffle, "seed": seed, "drop_last": drop_last}
    dataset = dataset_of(rows)
    whole = uids(loader_of(dataset, **options), sum(stops) + 3)
    loader, seen = loader_of(dataset, **options), []
    for steps in stops:
        seen += uids(loader, steps)
        state = json.loads(json.dumps(loader.state_dict()))
        loader = loader_of(dataset, **options)
        loader.load_state_dict(state)
    assert seen + uids(loader, 3) == whole


@settings(max_examples=50, deadline=None)
@given(rows=st.integers(1, 20), batch=st.integers(1, 20), epochs=st.integers(1, 3), drop_last=st.booleans())
def test_each_epoch_draws_each_row_at_most_once(rows, batch, epochs, drop_last):
    batch = min(batch, rows)
    loader = loader_of(dataset_of(rows), batch, drop_last=drop_last)
    for _ in range(epochs):
        flat = list(chain(*drawn(loader, loader.steps_per_epoch)))
        assert len(flat) == len(set(flat)) == (rows - rows % batch if drop_last else rows)


def test_another_dataset_is_refused_on_resume():
    state = loader_of(dataset_of(4), 2).state_dict()
    for other in (dataset_of(5), dataset_of(4, salt="x")):
        with pytest.raises(DataError, match="not the data that the checkpoint"):
            loader_of(other, 2).load_state_dict(state)
    with pytest.raises(DataError, match=r"data\.seed"):
        loader_of(dataset_of(4), 2, seed=5).load_state_dict(state)
    with pytest.raises(DataError, match=r"data\.shuffle"):
        loader_of(dataset_of(4), 2, shuffle=False).load_state_dict(state)


@pytest.mark.parametrize("change", [{"position": 9}, {"epoch": -1}, {"version": 99}])
def test_a_damaged_state_is_refused(change):
    loader = loader_of(dataset_of(4), 2)
    with pytest.raises(DataError):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(DataError, match="draw"):
        loader.load_state_dict({k: v for k, v in loader.state_dict().items() if k != "draw"})


def test_the_hash_sees_prompt_truth_and_ids():
    rows = [PromptRow("p\ud835", "s", "1", {}, 0)]
    base = dataset_in_memory(rows, [[1]]).content_hash
    assert base != dataset_in_memory(rows, [[2]]).content_hash
    assert base != dataset_in_memory([PromptRow("p\ud835", "s", "2", {}, 0)], [[1]]).content_hash
    assert base == dataset_in_memory(list(rows), [[1]]).content_hash


@pytest.mark.parametrize(("batch", "sizes"), [(2, [2, 2, 1]), (4, [4, 1]), (None, [5]), (9, [5])])
def test_validation_has_every_row_exactly_once(batch, sizes):
    batches = list(iterate_once(dataset_of(5), batch, pass_number=3))
    assert [len(b) for b in batches] == sizes
    names = [uid for b in batches for uid in b.non_tensor_batch["uid"]]
    assert names == [f"val:3:src:{i}" for i in range(5)]
