"""Which rows come next: weights by hand, streams that resume, a curriculum that learns (B067, B068)."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from in_memory import dataset_in_memory

from verl.checkpoint.store import CheckpointStore
from verl.config import DataConfig
from verl.data.dataset import PromptDataset
from verl.data.loader import PromptLoader
from verl.data.rows import PromptRow
from verl.data.samplers import (
    CurriculumSampler,
    EpochSampler,
    MixtureSampler,
    RowWeightSampler,
    make_sampler,
    uniforms,
)
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto


def dataset_of(*sources: str, entries: list[int] | None = None, weights: list[float] | None = None) -> PromptDataset:
    rows = [PromptRow(f"p{i}", source, str(i), {}, i) for i, source in enumerate(sources)]
    made = dataset_in_memory(rows, [[i] for i in range(len(rows))])
    changes = {"entries": np.array(entries, np.int32)} if entries else {}
    changes |= {"weights": np.array(weights)} if weights else {}
    return PromptDataset(**{**vars(made), **changes})


TWO_SETS = dataset_of(*["a"] * 2, *["b"] * 8, entries=[0] * 2 + [1] * 8)


def config(files: int = 1, shuffle: bool = True, **sampler) -> DataConfig:
    return DataConfig(train_files=[f"f{i}" for i in range(files)], shuffle=shuffle, sampler=sampler)


def stream(sampler, draws: int) -> list[int]:
    """Rows of a stream, drawn by the epoch."""
    found: list[int] = []
    epoch = 0
    while len(found) < draws:
        found += sampler.take(epoch, 0, len(found), sampler.size)
        epoch += 1
    return found[:draws]


def rows_of(loader: PromptLoader, batches: int) -> list[list[int]]:
    return [list(loader.next_batch().non_tensor_batch["row_index"]) for _ in range(batches)]


# --- weights


@pytest.mark.parametrize(
    "chosen",
    [
        {"weights": [1, 1]},
        {"weights": [4, 1], "weights_by": "row"},
        {"source_weights": {"b": 3, "a": 3}},
        {"source_weights": {"a": 4, "b": 1}, "weights_by": "row"},
    ],
)
def test_equal_shares_of_sets_of_two_and_eight(chosen):
    # Per row 1/4 and 1/16: 4000 draws, 5 standard deviations are 137 and 77 draws.
    counts = np.bincount(stream(make_sampler(TWO_SETS, config(2, **chosen), 3), 4000), minlength=10)
    assert abs(counts[:2].sum() / 4000 - 0.5) < 0.03
    assert all(abs(count - 1000) < 137 for count in counts[:2]) and all(abs(count - 250) < 77 for count in counts[2:])


def test_shares_are_those_asked_for():
    counts = np.bincount(stream(make_sampler(TWO_SETS, config(2, weights=[3, 1]), 3), 4000), minlength=10)
    assert abs(counts[:2].sum() / 4000 - 0.75) < 0.03
    by_row = np.bincount(stream(make_sampler(TWO_SETS, config(2, weights=[1, 1], weights_by="row"), 3), 4000))
    assert abs(by_row[:2].sum() / 4000 - 0.2) < 0.03
    none = stream(make_sampler(TWO_SETS, config(2, weights=[0, 1]), 3), 400)
    assert min(none) == 2


def test_rounding_gives_no_draw_to_a_set_without_a_share(monkeypatch):
    shares = np.array([0.1] * 10 + [0.0])
    assert np.cumsum(shares / shares.sum())[-1] < 1
    monkeypatch.setattr("verl.data.samplers.uniforms", lambda key, start, count: np.full(count, 1 - 2.0**-53))
    assert MixtureSampler(np.arange(10), shares, 1).take(0, 0, 0, 2) == [9, 9]


def test_a_set_is_gone_through_once_before_a_row_comes_again():
    drawn = stream(MixtureSampler(np.array([0, 0, 0, 1, 1]), np.array([1.0, 2.0]), seed=5), 400)
    for members in ({0, 1, 2}, {3, 4}):
        own = [row for row in drawn if row in members]
        laps = [own[i : i + len(members)] for i in range(0, len(own) - len(members), len(members))]
        assert all(set(lap) == members for lap in laps) and len({tuple(lap) for lap in laps}) > 1
    straight = stream(MixtureSampler(np.array([0, 0, 0, 1, 1]), np.array([1.0, 2.0]), 5, shuffle=False), 400)
    assert [row for row in straight if row < 3][:7] == [0, 1, 2, 0, 1, 2, 0]


def test_weights_of_rows_of_their_own():
    dataset = dataset_of(*"abcd", weights=[0.0, 1.0, 3.0, 0.0])
    counts = np.bincount(stream(make_sampler(dataset, config(weight_column="w"), 1), 4000), minlength=4)
    assert counts[0] == counts[3] == 0 and abs(counts[2] / 4000 - 0.75) < 0.035
    with pytest.raises(DataError, match="No row has a weight above 0"):
        make_sampler(dataset_of("a", weights=[0.0]), config(weight_column="w"), 1)


def test_a_weight_column_of_a_file(write, row_of, make_tokenizer):
    rows = [row_of("w0", w=0.5), row_of("w1", w="2"), row_of("w2", w=-1), row_of("w3", w=None), row_of("w4", w="x")]
    path = write("a.jsonl", rows)
    fields = {"train_files": str(path), "max_skipped_fraction": 0.9, "sampler": {"weight_column": "w"}}
    dataset = PromptDataset.load(str(path), DataConfig(**fields), make_tokenizer())
    assert dataset.weights.tolist() == [0.5, 2.0]
    assert [bad.reason for bad in dataset.skipped] == [
        "the weight in column 'w' is -1, not 0 or more",
        "the weight in column 'w' is None, not a number",
        "the weight in column 'w' is 'x', not a number",
    ]


@pytest.mark.parametrize(
    ("files", "chosen", "words"),
    [
        (2, {"weights": [1, 1, 1]}, "3 weights, 2 entries"),
        (2, {"weights": [1, -1]}, "data.sampler.weights"),
        (2, {"weights": [0, 0]}, "no weight above 0"),
        (1, {"source_weights": {"a": -1}}, "data.sampler.source_weights"),
        (1, {"source_weights": {"a": "x"}}, "data.sampler.source_weights"),
        (1, {"weights": [1], "weight_column": "w"}, "each say how rows are drawn"),
        (1, {"weights": [1], "kind": "random"}, "draws without data.sampler.weights"),
        (1, {"kind": "weighted"}, "has no weights"),
        (1, {"class_path": "x.py"}, "data.sampler.class_name"),
    ],
)
def test_weights_that_the_configuration_refuses(files, chosen, words):
    from verl.config import build_config

    tree = {"data": {"train_files": ["x"] * files, "sampler": chosen}, "model": {"path": "m"}}
    with pytest.raises(ConfigError) as caught:
        build_config(tree)
    assert words in str(caught.value)


def test_weights_that_do_not_fit_the_data():
    for chosen, words in (
        ({"source_weights": {"a": 1, "bb": 1}}, r"(?s)no row has.*bb.*did you mean b\?"),
        ({"source_weights": {"a": 1}}, r"(?s)lacks a data source.*b"),
    ):
        with pytest.raises(DataError, match=words):
            make_sampler(TWO_SETS, config(2, **chosen), 1)
    with pytest.raises(DataError, match=r"(?s)no usable row.*f2"):
        make_sampler(TWO_SETS, config(3, weights=[1, 1, 1]), 1)


def test_uniforms_do_not_depend_on_how_they_are_asked_for():
    whole = uniforms("k", 0, 100)
    assert np.array_equal(np.concatenate([uniforms("k", 0, 37), uniforms("k", 37, 63)]), whole)
    assert whole.min() >= 0 and whole.max() < 1 and abs(uniforms("k", 0, 10**5).mean() - 0.5) < 0.005


def test_which_sampler_is_made():
    dataset = dataset_of("a", "a", "a")
    kinds = {
        (True, "auto"): (EpochSampler, True),
        (False, "auto"): (EpochSampler, False),
        (True, "sequential"): (EpochSampler, False),
        (False, "random"): (EpochSampler, True),
    }
    for (shuffle, kind), (made, shuffles) in kinds.items():
        sampler = make_sampler(dataset, config(shuffle=shuffle, kind=kind), 1)
        assert type(sampler) is made and sampler.settings == {"seed": 1, "shuffle": shuffles}
    assert isinstance(make_sampler(dataset, config(kind="curriculum"), 1), CurriculumSampler)


# --- curriculum


def scored(loader_batch: DataProto, scores: dict[int, list[float | None]]) -> DataProto:
    """The batch repeated as its rows' scores are many."""
    columns = {"uid": [], "row_index": [], "score": []}
    for uid, row in zip(*(loader_batch.non_tensor_batch[name] for name in ("uid", "row_index")), strict=True):
        for score in scores[row]:
            for name, value in zip(columns, (uid, row, score), strict=True):
                columns[name].append(value)
    return DataProto.from_dict(tensors={}, non_tensors=columns, meta_info={})


def test_success_rates_run_by_hand():
    sampler = CurriculumSampler(np.array([10, 20, 30, 40]), seed=1)
    batch = DataProto.from_dict(
        tensors={},
        non_tensors={
            "uid": ["x", "x", "y", "y", "z", "z"],
            "row_index": [10, 10, 20, 20, 40, 40],
            "score": [1.0, 0.0, 3.0, 1.0, None, None],
        },
        meta_info={},
    )
    sampler.learn(batch)
    assert sampler.rates.tolist() == [0.5, 0.75, 0.5, 0.5]  # 0.5 -> (0.5 + 1) / 2; 3.0 counts as 1
    sampler.learn(batch)
    assert sampler.rates.tolist() == [0.5, 0.875, 0.5, 0.5]


def test_a_curriculum_draws_what_is_solved_half_the_time():
    sampler = CurriculumSampler(np.arange(30), seed=2)
    sampler.rates[:10], sampler.rates[10:20] = 0.0, 1.0
    counts = np.zeros(30)
    for draw in range(0, 2000, 5):
        places = sampler.take(0, 0, draw, 5)
        assert len(set(places)) == 5
        counts[places] += 1
    # Weights 0.02 and 0.27; of five drawn without repetition a little less in favour of the heavy ones.
    assert counts[20:].sum() / counts.sum() > 0.8 and counts.min() > 0


def test_a_curriculum_in_the_loader_learns_and_resumes(tmp_path):
    dataset = dataset_of(*["a"] * 12)
    scores = {i: [1.0, 1.0] if i < 6 else [1.0, 0.0] for i in range(12)}

    def run(loader: PromptLoader, steps: int) -> list[str]:
        uids = []
        for _ in range(steps):
            batch = loader.next_batch()
            uids += list(batch.non_tensor_batch["uid"])
            loader.learn(scored(batch, scores))
        return uids

    def fresh() -> PromptLoader:
        return PromptLoader(dataset, 4, make_sampler(dataset, config(kind="curriculum"), 7))

    whole = fresh()
    seen = run(whole, 40)
    assert whole.sampler.rates[6:].min() == 0.5 and whole.sampler.rates[:6].max() > 0.95
    for stop in (1, 3, 17):  # 3: exactly at the end of an epoch
        first = fresh()
        before = run(first, stop)
        store = CheckpointStore(tmp_path / str(stop))
        with store.begin(stop) as pending:
            pending.write_state("trainer", {"loader": first.state_dict()})
            pending.commit()
        second = fresh()
        second.load_state_dict(store.open(store.latest()).read_state("trainer")["loader"])
        assert before + run(second, 40 - stop) == seen
    with pytest.raises(DataError, match="of other data"):
        CurriculumSampler(np.arange(3), 1).load_state_dict(whole.sampler.state_dict())


# --- streams that resume


SAMPLERS = {
    "sequential": {"kind": "sequential"},
    "random": {"kind": "random"},
    "set weights": {"weights": [3, 1]},
    "row weights": {"weights": [1, 4], "weights_by": "row"},
    "sources": {"source_weights": {"a": 1, "b": 2}},
    "curriculum": {"kind": "curriculum"},
}


@settings(max_examples=60)
@given(
    name=st.sampled_from([*SAMPLERS]),
    batch=st.integers(1, 10),
    seed=st.integers(0, 2**62),
    drop_last=st.booleans(),
    stops=st.lists(st.integers(0, 6), max_size=4),
)
def test_any_number_of_stops_changes_nothing(name, batch, seed, drop_last, stops):
    chosen = config(2, **SAMPLERS[name])

    def fresh() -> PromptLoader:
        return PromptLoader(TWO_SETS, batch, make_sampler(TWO_SETS, chosen, seed), drop_last)

    whole, loader, seen = fresh(), fresh(), []
    expected = rows_of(whole, sum(stops) + 3)
    for steps in stops:
        seen += rows_of(loader, steps)
        state = loader.state_dict()
        json.dumps({**state, "sampler": sorted(state["sampler"])})
        loader = fresh()
        loader.load_state_dict(state)
    assert seen + rows_of(loader, 3) == expected
    assert all(1 <= len(rows) <= batch for rows in expected)
    assert not drop_last or all(len(rows) == batch for rows in expected)


def test_another_way_of_drawing_is_refused_on_resume():
    state = PromptLoader(TWO_SETS, 2, make_sampler(TWO_SETS, config(2, weights=[1, 1]), 1)).state_dict()
    for other in ({"weights": [1, 2]}, {"kind": "random"}, {"kind": "curriculum"}):
        loader = PromptLoader(TWO_SETS, 2, make_sampler(TWO_SETS, config(2, **other), 1))
        with pytest.raises(DataError, match=r"data\.sampler is not what"):
            loader.load_state_dict(state)


def test_rows_drawn_twice_in_a_batch_are_two_groups():
    loader = PromptLoader(TWO_SETS, 10, RowWeightSampler(np.array([1.0] + [0.0] * 9), seed=1))
    batch = loader.next_batch()
    assert set(batch.non_tensor_batch["row_index"]) == {0} and len(set(batch.non_tensor_batch["uid"])) == 10
