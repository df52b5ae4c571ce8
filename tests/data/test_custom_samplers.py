"""Sampler classes of the user's own: what they must have, resuming anywhere, epochs that end (B061, B068)."""

from __future__ import annotations

import json
from itertools import chain

import pytest
from in_memory import dataset_in_memory

from verl.config import DataConfig
from verl.data.loader import PromptLoader
from verl.data.rows import PromptRow
from verl.data.samplers import Sampler, make_sampler
from verl.errors import DataError

TEN = dataset_in_memory([PromptRow(f"p{i}", "s", str(i), {}, i) for i in range(10)], [[i] for i in range(10)])


def rows_of(loader: PromptLoader, batches: int) -> list[list[int]]:
    return [list(loader.next_batch().non_tensor_batch["row_index"]) for _ in range(batches)]


def make(path: str, name: str) -> Sampler:
    sampler = {"class_path": path, "class_name": name}
    return make_sampler(TEN, DataConfig(train_files="f", sampler=sampler), 1)


ITERATES = """
import random
class Mine:
    def __init__(self, data_source, data_config):
        self.rows, self.rng = len(data_source), random.Random(data_config.train_batch_size)
    def __iter__(self):
        order = list(range(self.rows))
        self.rng.shuffle(order)
        yield from order
        self.rng.random()  # of no use, but part of the stream
"""

LEARNS = """
class Mine:
    def __init__(self, data_source, data_config):
        self.rows, self.next, self.told = len(data_source), 0, 0
    def __len__(self):
        return self.rows
    def __iter__(self):
        while self.next < self.rows:
            self.next += 1
            yield (self.next - 1 + self.told) % self.rows
        self.next = 0
    def update(self, batch):
        self.told += len(batch)
    def state_dict(self):
        return {"next": self.next, "told": self.told}
    def load_state_dict(self, state):
        self.next, self.told = state["next"], state["told"]
"""


@pytest.fixture
def own(tmp_path):
    def write_and_make(code: str, name: str = "Mine") -> Sampler:
        path = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"
        path.write_text(code)
        return make(str(path), name)

    return write_and_make


@pytest.mark.parametrize("code", [ITERATES, LEARNS])
@pytest.mark.parametrize(("batch", "drop_last"), [(5, True), (4, True), (4, False), (3, False), (10, True)])
def test_a_sampler_class_resumes_anywhere(own, code, batch, drop_last):
    def run(loader: PromptLoader, steps: int) -> list[list[int]]:
        found = []
        for _ in range(steps):
            drawn = loader.next_batch()
            found.append(list(drawn.non_tensor_batch["row_index"]))
            loader.learn(drawn)
        return found

    whole = run(PromptLoader(TEN, batch, own(code), drop_last), 12)
    steps = 10 // batch + (1 if 10 % batch and not drop_last else 0)
    for epoch in range(12 // steps):
        rows = list(chain(*whole[epoch * steps : (epoch + 1) * steps]))
        assert len(rows) == (10 if not drop_last else 10 - 10 % batch)
        assert code is LEARNS or len(set(rows)) == len(rows)
    for stops in ([1], [2], [3], [2, 1], [5, 2, 4]):
        loader, seen = PromptLoader(TEN, batch, own(code), drop_last), []
        for stop in stops:
            seen += run(loader, stop)
            state = json.loads(json.dumps(loader.state_dict()))
            loader = PromptLoader(TEN, batch, own(code), drop_last)
            loader.load_state_dict(state)
        assert seen + run(loader, 12 - sum(stops)) == whole


def test_an_endless_or_short_epoch_of_a_class_ends(own):
    endless = "class Mine:\n    def __init__(self, data_source, data_config): pass\n    def __iter__(self):\n"
    loader = PromptLoader(TEN, 5, own(endless + "        while True: yield 3"))
    assert rows_of(loader, 3) == [[3] * 5] * 3 and loader.epoch == 1
    short = endless + "        yield from range(7)"
    loader = PromptLoader(TEN, 5, own(short))
    assert rows_of(loader, 2) == [[0, 1, 2, 3, 4]] * 2 and loader.epoch == 1
    loader = PromptLoader(TEN, 5, own(short), drop_last=False)
    assert rows_of(loader, 4) == [[0, 1, 2, 3, 4], [5, 6]] * 2


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (ITERATES.replace("class Mine", "class Mein"), "no such"),
        (ITERATES.replace("data_source, data_config", "dataset"), "data_source and data_config"),
        (ITERATES.replace("__iter__", "__iterr__"), "has no __iter__"),
        (LEARNS.replace("def load_state_dict", "def load"), "could not be resumed"),
        (ITERATES.replace("yield from order", "yield 99"), "a row that is not there"),
        (ITERATES.replace("yield from order", "yield 1 // 0"), "ZeroDivisionError"),
        (ITERATES.replace("yield from order", "yield from []"), "an epoch without a batch"),
        (LEARNS.replace("return self.rows\n", "return 1\n"), "smaller than a batch"),
        (LEARNS.replace("self.told += len(batch)", "self.told += batch.nothing"), "AttributeError"),
    ],
)
def test_what_is_refused_of_a_sampler_class(own, code, words):
    with pytest.raises(DataError) as caught:
        loader = PromptLoader(TEN, 2, own(code))
        loader.learn(loader.next_batch())
    assert words in str(caught.value)


def test_a_sampler_that_is_not_there(own, tmp_path):
    with pytest.raises(DataError, match=r"The file of data\.sampler\.class_path does not exist"):
        make(str(tmp_path / "no.py"), "X")
    with pytest.raises(
        DataError, match=r"(?s)did you mean Mine\? classes in the file: Mine \(data\.sampler\.class_name\)"
    ):
        own(ITERATES, name="Mien")
