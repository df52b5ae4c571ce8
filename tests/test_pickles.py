"""B158, B159: a pickle in place of whatever VeRL reads, from disk or from a socket, is never unpickled.

The files of a checkpoint: tests/checkpoint/test_store.py; Ray's own ports: tests/cluster/test_ray_worker.py.
"""

from __future__ import annotations

import http.client
import os
import pickle
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from verl.config import load_config
from verl.config.schema_reward import JudgeConfig
from verl.data.tables import DATA_ENDINGS, open_table
from verl.errors import VerlError
from verl.models.loading import load_causal_lm, load_tokenizer
from verl.protocol import DataProto
from verl.protocol.files import read_safetensors, read_tree
from verl.rewards.functions import Judge
from verl.rewards.pool_worker import Channel
from verl.run_dir import RunDir
from verl.tracking.report import write_report
from verl.tracking.runs import overview
from verl.tracking.samples import read_samples
from verl.tracking.serve import ReportServer
from verl.tracking.timeline import read_timeline


class Trap:
    """Makes a folder when it is unpickled, in whatever process."""

    def __init__(self, marker: Path) -> None:
        self._marker = str(marker)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self._marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "executed"


@pytest.fixture(params=["pickle", "text pickle", "torch", "numpy"])
def payload(request: pytest.FixtureRequest, tmp_path: Path, marker: Path) -> bytes:
    file = tmp_path / "payload"
    if request.param == "torch":
        torch.save(Trap(marker), file)
    elif request.param == "numpy":
        with file.open("wb") as opened:
            np.save(opened, np.array([Trap(marker)], dtype=object), allow_pickle=True)
    else:
        file.write_bytes(pickle.dumps(Trap(marker), protocol=0 if request.param == "text pickle" else None))
    return file.read_bytes()


def test_the_trap_works(marker: Path) -> None:
    pickle.loads(pickle.dumps(Trap(marker)))
    assert marker.is_dir()


def refused(read: Callable[[Path], Any], path: Path) -> None:
    with pytest.raises(VerlError) as error:
        read(path)
    assert error.value.what


@pytest.mark.parametrize("ending", DATA_ENDINGS)
@pytest.mark.parametrize("small", [True, False])
def test_data_files(
    tmp_path: Path, marker: Path, payload: bytes, ending: str, small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    if not small:  # through the cache of converted files
        monkeypatch.setattr("verl.data.tables.SMALL_BYTES", 0)
    file = tmp_path / f"rows{ending}"
    file.write_bytes(payload)
    try:
        table = open_table(file)
        table.read(0, len(table))  # a line of a text pickle may pass for a row of csv
    except VerlError as error:
        assert error.what
    assert not marker.exists()


def test_types_that_pyarrow_would_unpickle(tmp_path: Path, marker: Path) -> None:
    """An extension type whose metadata is a pickle, in either format (CVE-2023-47248)."""
    trap = pickle.dumps(Trap(marker))
    metadata = {"ARROW:extension:name": "arrow.py_extension_type", "ARROW:extension:metadata": trap}
    field = pa.field("prompt", pa.string(), metadata=metadata)
    table = pa.table({"prompt": ["a"]}, schema=pa.schema([field], metadata={"pandas": trap}))
    pq.write_table(table, tmp_path / "rows.parquet")
    with pa.ipc.new_file(tmp_path / "rows.arrow", table.schema) as file:
        file.write_table(table)
    for ending in ("parquet", "arrow"):
        opened = open_table(tmp_path / f"rows.{ending}")
        assert opened.read(0, 1)[0].values["prompt"] == "a"
    pq.write_table(table.replace_schema_metadata({"huggingface": trap}), tmp_path / "rows.parquet")
    refused(open_table, tmp_path / "rows.parquet")
    assert not marker.exists()


def test_batches_and_trees(tmp_path: Path, marker: Path, payload: bytes) -> None:
    file = tmp_path / "batch.dataproto"
    file.write_bytes(payload)
    for read in (DataProto.load_from_disk, read_safetensors, read_tree):
        refused(read, file)
    assert not marker.exists()


def test_files_of_a_run(tmp_path: Path, marker: Path, payload: bytes) -> None:
    run = RunDir(tmp_path / "run").create()
    for file in (run.metrics, run.timeline, run.events, run.samples(1), run.wishes, run.config, run.lock_file):
        file.write_bytes(payload)
    refused(load_config, run.config)
    assert read_samples(run.samples(1))[0] == [] and read_timeline(run) == [] and run.wished_workers() is None
    overview(run)
    write_report(run)
    run.truncate_after(1)
    assert not marker.exists()


def test_yaml_that_calls(tmp_path: Path, marker: Path) -> None:
    for text in (f"!!python/object/apply:os.mkdir ['{marker}']", f"a: !!python/object/new:os.mkdir ['{marker}']"):
        (tmp_path / "config.yaml").write_text(text)
        refused(load_config, tmp_path / "config.yaml")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_files_of_a_model(tmp_path: Path, tiny_model_dir: Path, marker: Path, payload: bytes, name: str) -> None:
    folder = shutil.copytree(tiny_model_dir, tmp_path / "model")
    (folder / name).write_bytes(payload)
    read = load_tokenizer if name.startswith("tokenizer") else lambda path: load_causal_lm(path, torch.float32)
    refused(read, folder)
    assert not marker.exists()


def test_a_gguf_file(tmp_path: Path, marker: Path, payload: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.gguf").write_bytes(payload)
    refused(lambda path: load_causal_lm(path, torch.float32), tmp_path / "model.gguf")
    assert not marker.exists()


def test_what_a_reward_worker_says(marker: Path, payload: bytes) -> None:
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    for message in (payload, struct.pack("!I", len(payload)) + payload):
        theirs.sendall(message)
    with pytest.raises((ValueError, RecursionError)):
        for _ in range(10):
            list(channel.receive())
    channel.close()
    theirs.close()
    assert not marker.exists()


def test_what_a_judge_answers(marker: Path, payload: bytes) -> None:
    class Hostile(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(payload)))
            self.send_header("Content-Type", "application/octet-stream")
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hostile)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        settings = JudgeConfig(base_url=f"http://127.0.0.1:{server.server_port}/v1", retries=0)
        rows = DataProto.from_dict(
            {"response_mask": torch.ones(1, 1, dtype=torch.bool)},
            {
                "raw_prompt": ["q"],
                "response_text": ["a"],
                "ground_truth": ["t"],
                "data_source": ["d"],
                "extra_info": [{}],
            },
        )
        (score,) = Judge(settings).score(rows)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert score.value is None and not marker.exists()


def test_what_is_sent_to_the_report_server(tmp_path: Path, marker: Path, payload: bytes) -> None:
    run = RunDir(tmp_path / "run").create()
    run.metrics.write_text('{"step": 1, "critic/score/mean": 0.5}\n')
    server = ReportServer([run], "127.0.0.1", 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        for method in ("POST", "PUT"):
            connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
            connection.request(method, "/", body=payload)
            assert connection.getresponse().status in (405, 501)
            connection.close()
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=5) as raw:
            raw.sendall(payload + b"\r\n\r\n")
            raw.recv(1000)
        connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=5)
        connection.request("GET", "/state")
        assert connection.getresponse().status == 200  # alive
        connection.close()
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert not marker.exists()
