"""Which row comes next. Draws are numbered, and what a draw gives is arithmetic on its number, seed and weights: the
state of a stream is three counters, and no random generator has to be saved. Two samplers learn or are the user's own,
and have a state beside.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config import DataConfig
from verl.config.names import did_you_mean
from verl.errors import DataError
from verl.user_code import describe, load_user_function

if TYPE_CHECKING:
    from verl.data.dataset import PromptDataset
    from verl.protocol import DataProto


class Sampler:
    """Gives places of rows in the dataset; one that learns, or is elsewhere than the counters say, has a
    state beside."""

    size: int  # rows of one epoch
    settings: dict[str, Any]  # JSON values that must be the same when a run goes on

    def take(self, epoch: int, position: int, draw: int, count: int) -> list[int]:
        """The next rows: ``position`` of them were drawn before in this ``epoch``, ``draw`` since the start.

        Fewer than ``count`` (or none) where the epoch ends sooner than ``size`` says.
        """
        raise NotImplementedError

    def learn(self, batch: DataProto) -> None:
        """Told of every scored batch, in order."""

    def state_dict(self) -> dict[str, Any]:
        """What it has learned or where it is, beside the counters; JSON values, arrays and tensors."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over such a state."""


def random_words(key: str, start: int, count: int) -> np.ndarray:
    """``(count,)`` uint64: numbers ``start`` and on of the stream ``key``; splitmix64 (Steele, Lea, Flood 2014) of
    (hash of ``key``) + number."""
    base = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "little")
    with np.errstate(over="ignore"):
        places = np.arange(start, start + count, dtype=np.uint64) + np.uint64(1)
        z = np.uint64(base) + places * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def uniforms(key: str, start: int, count: int) -> np.ndarray:
    """``(count,)`` float64 in [0, 1), of :func:`random_words`."""
    return (random_words(key, start, count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def epoch_order(size: int, seed: int | str, epoch: int) -> np.ndarray:
    """``(size,)`` int64 permutation of the rows for one epoch: their order by a 64-bit random word."""
    return np.argsort(random_words(f"prompt order {seed} {epoch}", 0, size), kind="stable").astype(np.int64)


class EpochSampler(Sampler):
    """Every row once an epoch: in a new seeded order each time, or in the order of the files."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self.size, self.seed, self.shuffle = size, seed, shuffle
        self.settings = {"seed": seed, "shuffle": shuffle}
        self._order, self._epoch = np.arange(size, dtype=np.int64), -1

    def take(self, epoch: int, position: int, draw: int, count: int) -> list[int]:
        if self.shuffle and epoch != self._epoch:
            self._order, self._epoch = epoch_order(self.size, self.seed, epoch), epoch
        places: list[int] = self._order[position : position + count].tolist()
        return places


def _bounds(weights: np.ndarray) -> np.ndarray:
    """Ends of each one's share of [0, 1)."""
    bounds = np.cumsum(weights / weights.sum())
    bounds[bounds == bounds[-1]] = 1.0  # rounding must not let a draw fall behind the last share
    return bounds


class MixtureSampler(Sampler):
    """Each draw picks a set of rows with the probability of its share, and takes the next row of that set; a set's own
    rows come in shuffled passes, each row once a pass. An epoch is as many draws as there are rows. ``members``: (N,)
    for each row the number of its set. ``shares``: (S,) not negative, not all zero."""

    def __init__(self, members: np.ndarray, shares: np.ndarray, seed: int, shuffle: bool = True) -> None:
        self.size = len(members)
        self._rows = [np.flatnonzero(members == i) for i in range(len(shares))]
        self._bounds = _bounds(shares)
        self._key, self._shuffle = f"prompt mixture {seed}", shuffle
        self.settings = {"seed": seed, "shuffle": shuffle, "shares": [float(f"{share:.12g}") for share in shares]}
        self._counted, self._draws = np.zeros(len(shares), np.int64), 0  # draws of each set so far
        self._laps: dict[int, tuple[int, np.ndarray]] = {}  # the pass that each set is in, and its order

    def take(self, epoch: int, position: int, draw: int, count: int) -> list[int]:
        if draw < self._draws:
            self._counted[:], self._draws = 0, 0
        while self._draws < draw:  # after a resume: count again what was drawn before
            part = min(draw - self._draws, 2**20)
            self._counted += np.bincount(self._sets(self._draws, part), minlength=len(self._rows))
            self._draws += part
        count = min(count, self.size - position)
        places = []
        for number in self._sets(draw, count).tolist():
            rows = self._rows[number]
            lap, place = divmod(int(self._counted[number]), len(rows))
            order = self._lap(number, lap) if self._shuffle else rows
            places.append(int(order[place]))
            self._counted[number] += 1
        self._draws += count
        return places

    def _sets(self, start: int, count: int) -> np.ndarray:
        return np.searchsorted(self._bounds, uniforms(self._key, start, count), side="right")

    def _lap(self, number: int, lap: int) -> np.ndarray:
        if self._laps.get(number, (-1,))[0] != lap:
            rows = self._rows[number]
            self._laps[number] = (lap, rows[epoch_order(len(rows), f"{self._key} set {number}", lap)])
        return self._laps[number][1]


class RowWeightSampler(Sampler):
    """Each draw is of its own: any row, with the probability of its weight among all; ``weights``: (N,) not negative,
    not all zero."""

    def __init__(self, weights: np.ndarray, seed: int) -> None:
        self.size = len(weights)
        self._bounds = _bounds(weights)
        self._key = f"prompt weights {seed}"
        self.settings = {"seed": seed, "weights": hashlib.sha256(weights.tobytes()).hexdigest()[:16]}

    def take(self, epoch: int, position: int, draw: int, count: int) -> list[int]:
        count = min(count, self.size - position)
        places: list[int] = np.searchsorted(self._bounds, uniforms(self._key, draw, count), side="right").tolist()
        return places


class CurriculumSampler(Sampler):
    """Most often the rows that are solved about half the time; those always or never solved now and then.

    A row's success rate runs: after each of its groups it moves half of the way to the group's mean score (clipped to
    0..1); before the first it counts as 0.5. A row's weight is ``rate * (1 - rate) + FLOOR``, and the rows of a batch
    are drawn by weight, none twice in it (the largest of log(uniform) / weight: Efraimidis and Spirakis 2006). An
    epoch is as many draws as there are rows.
    """

    FLOOR = 0.02  # of the largest 0.25: a hopeless row is drawn about a thirteenth as often as the best

    def __init__(self, numbers: np.ndarray, seed: int) -> None:
        self.size = len(numbers)
        self._numbers, self._key = numbers, f"prompt curriculum {seed}"
        self.rates = np.full(self.size, 0.5, np.float32)
        self.settings = {"seed": seed, "curriculum": True}

    def take(self, epoch: int, position: int, draw: int, count: int) -> list[int]:
        count = min(count, self.size - position)
        weights = self.rates.astype(np.float64) * (1 - self.rates) + self.FLOOR
        # A stream of its own for every batch, named by its first draw.
        keys = np.log(uniforms(f"{self._key} {draw}", 0, self.size) + 2.0**-60) / weights
        best = np.argpartition(-keys, count - 1)[:count]
        places: list[int] = best[np.argsort(-keys[best])].tolist()
        return places

    def learn(self, batch: DataProto) -> None:
        """Mean scores of the rows of a batch; responses that could not be scored tell nothing."""
        groups: dict[str, list[float]] = {}
        rows: dict[str, int] = {}
        columns = batch.non_tensor_batch
        for uid, number, score in zip(columns["uid"], columns["row_index"], columns["score"], strict=True):
            if score is not None:
                groups.setdefault(uid, []).append(min(max(float(score), 0.0), 1.0))
                rows[uid] = int(np.searchsorted(self._numbers, number))
        for uid, scores in groups.items():
            place = rows[uid]
            self.rates[place] += 0.5 * (sum(scores) / len(scores) - self.rates[place])

    def state_dict(self) -> dict[str, Any]:
        return {"rates": self.rates.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        rates = np.array(state["rates"], np.float32)
        if rates.shape != self.rates.shape:
            raise DataError("The saved state of the curriculum is of other data.", rates.shape, "start anew")
        self.rates = rates


class CustomSampler(Sampler):
    """A sampler class of the user's own (``data.sampler.class_path``), made with the keyword arguments ``data_source``
    (the dataset: ``len()``, ``rows``) and ``data_config``.

    ``iter()`` is asked for once an epoch and gives places of rows, 0 to ``len(data_source) - 1``; ``len()``, where it
    has one, is the rows of an epoch. ``update(batch)``, where it has one, is told of every scored batch. With
    ``state_dict`` and ``load_state_dict`` it is resumed by them, and ``iter()`` then goes on inside the epoch; without
    them ``iter()`` is asked once for every epoch so far and what was drawn is passed over, so it must always give the
    same. A class that learns (``update``) must have them. Raises DataError: no such class, it lacks what it must have,
    or fails.
    """

    def __init__(self, dataset: PromptDataset, config: DataConfig) -> None:
        path, name = config.sampler.class_path, config.sampler.class_name
        assert path is not None and name is not None
        self._name = f"{name} of {path}"
        key = "data.sampler.class_path"
        make, self._file = load_user_function(path, name, "sampler", key, DataError, is_class=True)
        try:
            self._own = make(data_source=dataset, data_config=config)
            self.size = len(self._own) if hasattr(self._own, "__len__") else len(dataset)
        except Exception as error:
            fix = "it is made with data_source and data_config; see docs/data.md"
            raise DataError(f"The sampler class {self._name} fails.", describe(error, self._file), fix) from error
        self._rows = len(dataset)
        self._saves = hasattr(self._own, "state_dict") and hasattr(self._own, "load_state_dict")
        if not hasattr(self._own, "__iter__"):
            near = did_you_mean("__iter__", [n for n, _ in inspect.getmembers(type(self._own))])
            raise DataError(f"The sampler class {self._name} has no __iter__.", fix=f"{near}give places of rows in it")
        if hasattr(self._own, "update") and not self._saves:
            what = f"The sampler class {self._name} learns (update), and could not be resumed."
            raise DataError(what, fix="give it state_dict() and load_state_dict(state)")
        self.settings = {"sampler": name}
        self._iterator: Iterator[Any] = iter(())
        self._epoch, self._taken = -1, 0  # the epoch that the iterator is of, and the rows drawn from it

    def take(self, epoch: int, position: int, draw: int, count: int) -> list[int]:
        while self._epoch < epoch:
            # To its very end, where a generator may set itself up for the next epoch.
            self._next(self.size - self._taken + 1)
            self._start()
        self._next(position - self._taken)  # after a resume without a state of its own
        return self._next(min(count, self.size - position))

    def _start(self) -> None:
        with self._blamed():
            self._iterator = iter(self._own)
        self._epoch, self._taken = self._epoch + 1, 0

    def _next(self, count: int) -> list[int]:
        with self._blamed():
            found = [int(place) for place in itertools.islice(self._iterator, max(count, 0))]
        outside = [place for place in found if not 0 <= place < self._rows]
        if outside:
            fix = f"places are 0 to {self._rows - 1}"
            raise DataError(f"The sampler class {self._name} gives a row that is not there.", outside[0], fix)
        self._taken += len(found)
        return found

    @contextlib.contextmanager
    def _blamed(self) -> Iterator[None]:
        """What the class does inside fails by its name."""
        try:
            yield
        except Exception as error:
            reason = describe(error, self._file)
            raise DataError(f"The sampler class {self._name} fails.", reason, "correct the class") from error

    def learn(self, batch: DataProto) -> None:
        if hasattr(self._own, "update"):
            with self._blamed():
                self._own.update(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"own": self._own.state_dict(), "epoch": self._epoch, "taken": self._taken} if self._saves else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._saves:
            with self._blamed():
                self._own.load_state_dict(state["own"])
            if state["epoch"] >= 0:
                self._epoch = int(state["epoch"]) - 1
                self._start()
                self._taken = int(state["taken"])


def make_sampler(dataset: PromptDataset, config: DataConfig, seed: int) -> Sampler:
    """The sampler that ``data.sampler`` asks for. Raises DataError: weights that do not fit the data; see
    :class:`CustomSampler`."""
    chosen = config.sampler
    if chosen.class_path is not None:
        return CustomSampler(dataset, config)
    if chosen.weight_column is not None:
        if not dataset.weights.sum():
            raise DataError("No row has a weight above 0.", chosen.weight_column, "give some row a weight above 0")
        return RowWeightSampler(dataset.weights, seed)
    if chosen.weights or chosen.source_weights:
        members, weights, names = _sets(dataset, config)
        sizes = np.bincount(members, minlength=len(weights))
        for name, weight, size in zip(names, weights, sizes, strict=True):
            if weight and not size:
                raise DataError("A weight is given to what has no usable row.", name, "set its weight to 0")
        shares = np.array(weights, np.float64) * (sizes if chosen.weights_by == "row" else 1)
        return MixtureSampler(members, shares, seed, config.shuffle)
    if chosen.kind == "curriculum":
        return CurriculumSampler(dataset.numbers, seed)
    shuffle = config.shuffle if chosen.kind == "auto" else chosen.kind == "random"
    return EpochSampler(len(dataset), seed, shuffle)


def _sets(dataset: PromptDataset, config: DataConfig) -> tuple[np.ndarray, Sequence[float], list[str]]:
    """(N,) set of each row, (S,) weights, (S,) names of the sets."""
    chosen = config.sampler
    if chosen.weights:
        return dataset.entries, chosen.weights, list(config.train_files)
    held = list(dict.fromkeys(dataset.sources))
    for name in chosen.source_weights:
        if name not in held:
            fix = f"{did_you_mean(name, held)}data sources: {', '.join(held)}"
            raise DataError("data.sampler.source_weights names a data source that no row has.", name, fix)
    missing = [name for name in held if name not in chosen.source_weights]
    if missing:
        fix = "give each data source a weight, 0 to leave it out"
        raise DataError("data.sampler.source_weights lacks a data source.", ", ".join(missing), fix)
    names = list(chosen.source_weights)
    members = np.array([names.index(name) for name in dataset.sources], np.int32)
    return members, list(chosen.source_weights.values()), names
