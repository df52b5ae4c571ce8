"""Damaged and hostile input of every loader and reader: a clear error or a right result, in bounded time and memory.

A few hundred inputs each here; ``make drills`` goes on for a minute each with new ones.
"""

from __future__ import annotations

import json
import resource
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from verl.checkpoint.store import Checkpoint, CheckpointStore
from verl.config import load_config
from verl.config.keys import leaves
from verl.config.schema_data import DataConfig
from verl.data.rows import prompt_row
from verl.data.tables import open_table
from verl.errors import ConfigError, DataError, VerlError
from verl.protocol import DataProto, codec
from verl.protocol.files import read_safetensors, read_tree, write_tree
from verl.rewards import rules
from verl.run_dir import RunDir
from verl.tracking.report import write_report
from verl.tracking.runs import overview
from verl.tracking.samples import read_samples

SECONDS = 20
MEMORY = 2 << 30
DRILL_SECONDS = 60.0


@contextmanager
def bounded() -> Iterator[None]:
    """Memory beyond ``MEMORY`` and time beyond ``SECONDS`` become errors."""

    def late(*_: object) -> None:
        raise TimeoutError(f"not done within {SECONDS} s")

    old = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, old[1]))
    try:
        yield
    except VerlError as error:
        assert error.what
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
        signal.alarm(0)
        signal.signal(signal.SIGALRM, handler)


# --- inputs --------------------------------------------------------------------------------------------------------

EDITS = st.lists(
    st.tuples(st.floats(0, 1), st.sampled_from(["flip", "cut", "insert", "drop", "double"]), st.binary(max_size=12)),
    min_size=1,
    max_size=4,
)


def edited(content: bytes, edits: list[tuple[float, str, bytes]]) -> bytes:
    for place, kind, data in edits:
        at = int(place * len(content))
        if kind == "cut":
            content = content[:at]
        elif kind == "insert":
            content = content[:at] + data + content[at:]
        elif kind == "drop":
            content = content[:at] + content[at + len(data) :]
        elif kind == "double":
            content = content[:at] + content[max(0, at - 40) : at] * 2 + content[at:]
        else:
            content = content[:at] + bytes(b ^ 0x55 for b in content[at : at + 1 + len(data) // 3]) + content[at + 1 :]
    return content


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from([10**400, 2**63, -1, "1e999", "${trainer.seed}", "${a.${b}}", "$float", "nan", "[" * 200, "\0"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=12,
)
TAGS = ["$float", "$tuple", "$dict", "$tensor", "$array", "$objects", "$strings", "$number", "$bytes", "$what"]
SPECS = st.one_of(
    JSON,
    st.tuples(st.sampled_from(["w", "x"]), st.sampled_from(["float32", "int64", "f"]), st.lists(st.integers(-2, 4))),
    st.tuples(
        st.sampled_from(["<U3", "<U999999999", "O", "V9", "f8"]), st.lists(st.integers(-2, 10**9), max_size=3), JSON
    ),
    st.tuples(st.lists(st.integers(-2, 10**9), max_size=3), st.lists(SCALARS, max_size=3)),
    st.tuples(st.sampled_from(["float64", "int8", "O", "S99999999", "datetime64"]), SCALARS),
)
TREES = st.recursive(
    st.one_of(SCALARS, st.dictionaries(st.sampled_from(TAGS), SPECS, min_size=1, max_size=2)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(st.text(max_size=5), st.sampled_from(TAGS)), inner, max_size=3),
    ),
    max_leaves=8,
)
KEYS = sorted(leaves())
PIECES = (
    r"\boxed{ \frac{ } { ( ) [ ] 1 2 10 ^ _ + - * / = , . \sqrt{ \pi \infty \cup \text{ $ % #### \left \right \, x y "
    r"9^9^9 10^{10^{10}} 1e999 factorial( 99999999! \begin{pmatrix} \end{pmatrix} & \\ A B True None ( ( ) )"
)
LATEX = st.lists(
    st.sampled_from(PIECES.split(" ")) | st.text(max_size=3),
    max_size=25,
).map("".join)

YAML = b"""data: {train_files: [a.parquet], max_prompt_length: 128}
model:
  path: tiny   # a comment
  dtype: bf16
actor: &a
  optim: {lr: 1e-3, betas: [0.9, 0.999]}
algorithm: {adv_estimator: grpo, kl_ctrl: {type: adaptive}}
trainer:
  experiment_name: "x${trainer.seed}"
  total_training_steps: 3
  save_freq: -1
"""
ROWS = [
    {"data_source": "a", "prompt": [{"role": "user", "content": "1+1?"}], "reward_model": {"ground_truth": "2"}},
    {"data_source": "b", "prompt": "say \u00e9", "reward_model": {"ground_truth": "x"}, "extra_info": {"index": 1}},
] * 3
METRICS = "".join(
    json.dumps({"step": step, "actor/pg_loss": 0.5, "critic/score/mean": step}) + "\n" for step in range(6)
)
SAMPLE = {"step": 1, "split": "train", "uid": "train:0:a:0", "prompt": "p", "response": "r", "score": 1.0, "index": 0}


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Good files, by name."""
    folder = tmp_path_factory.mktemp("originals")
    columns = {key: [json.dumps(row.get(key)) for row in ROWS] for key in ("prompt", "data_source")}
    pq.write_table(pa.table(columns), folder / "rows.parquet")
    table = pa.table(columns)
    with pa.ipc.new_file(folder / "rows.arrow", table.schema) as file:
        file.write_table(table)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "rows.json").write_text(json.dumps(ROWS))
    (folder / "rows.csv").write_text('prompt,ground_truth\n"a, b",1\n"c\nd",2\n')
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}
    data = DataProto.from_single_dict({**tensors, "text": np.array(["x", "y"], dtype=object)})
    data.save_to_disk(folder / "data.dataproto")
    write_tree(folder / "tree.safetensors", {"w": tensors["a"], "l": [1, "x", (2.0,)]})
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def config_text(draw: Callable[[Any], Any], folder: Path, _: dict[str, bytes]) -> None:
    text = draw(st.one_of(EDITS.map(lambda edits: edited(YAML, edits)), st.binary(max_size=80), JSON.map(_dumped)))
    (folder / "config.yaml").write_bytes(text)
    load_config(folder / "config.yaml")


def config_values(draw: Callable[[Any], Any], folder: Path, _: dict[str, bytes]) -> None:
    tree: dict[str, Any] = {"data": {"train_files": ["a.parquet"]}, "model": {"path": "tiny"}}
    for key, value in draw(st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4)).items():
        *sections, name = key.split(".")
        inner = tree
        for section in sections:
            inner = inner.setdefault(section, {})
        inner[name] = value
    (folder / "config.yaml").write_bytes(_dumped(tree))
    load_config(folder / "config.yaml")


def overrides(draw: Callable[[Any], Any], folder: Path, _: dict[str, bytes]) -> None:
    word = st.tuples(
        st.sampled_from(["", "+", "++", "~", "actor_rollout_ref."]),
        st.one_of(st.sampled_from(KEYS), st.text(max_size=10)),
        st.sampled_from(["=", "", "=="]),
        st.one_of(st.text(max_size=10), JSON.map(lambda value: _dumped(value).decode())),
    ).map("".join)
    load_config(overrides=["data.train_files=a.parquet", "model.path=tiny", *draw(st.lists(word, max_size=3))])


def datasets(draw: Callable[[Any], Any], folder: Path, originals: dict[str, bytes]) -> None:
    name = draw(st.sampled_from([name for name in originals if name.startswith("rows")]))
    file = folder / name
    file.write_bytes(draw(st.one_of(EDITS.map(lambda edits: edited(originals[name], edits)), st.binary(max_size=60))))
    config = DataConfig(train_files=[str(file)])
    for number, row in enumerate(open_table(file)):
        prompt_row(row, list(row.values), config, number, number)


def checkpoints(draw: Callable[[Any], Any], folder: Path, _: dict[str, bytes]) -> None:
    store = CheckpointStore(folder / "checkpoints")
    with store.begin(3) as pending:
        pending.write_state("trainer", {"step": 3, "w": torch.ones(5), "names": ["a", ("b", 1.5)]})
        made = pending.commit({"m": 1}).path
    for name in draw(st.lists(st.sampled_from(sorted(p.name for p in made.iterdir())), min_size=1, unique=True)):
        (made / name).write_bytes(edited((made / name).read_bytes(), draw(EDITS)))
    latest = store.latest()
    if latest is not None:
        checkpoint = Checkpoint(latest)
        checkpoint.verify()
        checkpoint.read_state("trainer")


def trees(draw: Callable[[Any], Any], folder: Path, _: dict[str, bytes]) -> None:
    """What a forger could write with right checksums."""
    codec.decode(draw(TREES), {"w": torch.ones(2, 2), "x": torch.tensor(3)})


def data_protos(draw: Callable[[Any], Any], folder: Path, originals: dict[str, bytes]) -> None:
    name = draw(st.sampled_from(["data.dataproto", "tree.safetensors"]))
    file = folder / name
    content = originals[name]
    if draw(st.booleans()):  # the header alone: lengths, shapes and offsets
        length = int.from_bytes(content[:8], "little")
        content = (
            content[:8] + edited(content[8 : 8 + length], draw(EDITS))[:length].ljust(length) + content[8 + length :]
        )
    else:
        content = edited(content, draw(EDITS))
    file.write_bytes(content)
    for load in (read_safetensors, read_tree, DataProto.load_from_disk):
        try:
            load(file)
        except VerlError as error:
            assert error.what


def answers(draw: Callable[[Any], Any], folder: Path, _: dict[str, bytes]) -> None:
    rule = draw(st.sampled_from(["gsm8k", "number", "exact_match", "boxed", "math"]))
    truth, text = draw(LATEX), draw(LATEX)
    found = getattr(rules, rule)(draw(st.sampled_from([text, rf"\boxed{{{text}}}", f"#### {text}"])), truth)
    assert 0 <= found["score"] <= 1


def run_files(draw: Callable[[Any], Any], folder: Path, _: dict[str, bytes]) -> None:
    run = RunDir(folder / "run").create()
    lines = st.one_of(JSON.map(lambda v: _dumped(v) + b"\n"), st.binary(max_size=30))
    content = st.one_of(EDITS.map(lambda edits: edited(METRICS.encode(), edits)), lines)
    run.metrics.write_bytes(METRICS.encode() * draw(st.integers(0, 1)) + draw(content))
    sample = st.dictionaries(st.sampled_from(sorted(SAMPLE)), JSON).map(lambda change: _dumped(SAMPLE | change) + b"\n")
    run.samples(1).write_bytes(b"".join(draw(st.lists(st.one_of(sample, lines), max_size=3))))
    run.events.write_bytes(draw(lines))
    run.config.write_bytes(draw(st.one_of(EDITS.map(lambda edits: edited(YAML, edits)), lines)))
    read_samples(run.samples(1))
    overview(run)
    write_report(run)
    run.truncate_after(3)


def _dumped(value: Any) -> bytes:
    return json.dumps(value, default=str).encode("utf-8", "surrogatepass")


TARGETS = [config_text, config_values, overrides, datasets, checkpoints, trees, data_protos, answers, run_files]
QUIET = settings(
    deadline=None, database=None, phases=(Phase.generate, Phase.shrink), suppress_health_check=list(HealthCheck)
)


def attack(target: Callable[..., None], originals: dict[str, bytes], number: int, examples: int) -> None:
    @seed(number)
    @settings(QUIET, max_examples=examples)
    @given(st.data())
    def once(data: st.DataObject) -> None:
        with tempfile.TemporaryDirectory() as folder, bounded():
            target(data.draw, Path(folder), originals)

    once()


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_damaged_input(
    target: Callable[..., None], originals: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    attack(target, originals, 1, 100)


@pytest.mark.drill
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.__name__)
def test_damaged_input_for_a_minute(
    target: Callable[..., None], originals: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path))
    end, number = time.monotonic() + DRILL_SECONDS, time.time_ns() % 10**6
    while time.monotonic() < end:
        number += 1
        print("seed", number)
        attack(target, originals, number, 200)


def test_what_was_found(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    run = "data: {train_files: [a]}\nmodel: {path: b}\n"
    broken = "algorithm: {filter_groups: {metric: []}}", "profiler: {roles: [null]}", "profiler: {roles: [actr]}"
    for text in ('"0"', *(run + part for part in broken)):
        file.write_text(text)
        with pytest.raises(ConfigError):
            load_config(file)
    assert rules.math("1%", "0.01")["score"] == 0.0 and rules.math(r"\boxed{1%}", "1%")["score"] == 1.0
    assert rules.math(r"\boxed{\cupfactorial(}", r"\frac{\cup")["score"] == 0.0
    assert rules.math("3%", r"1\frac{")["score"] == 0.0
    for tree in ({"$strings": ["<U99999999", [3], ["a", "b", "c"]]}, {"$number": ["int8", 128]}):
        with pytest.raises(DataError):
            codec.decode(tree, {})
