"""What DataProto costs on top of the bare tensor operations, on 8192 rows x 4096 tokens. Run on a quiet machine:

    python benchmarks/protocol.py

Where bytes move (concat, serialise, save) the figure is the ratio to the same torch or numpy work on the same bytes
in the same run. Where none move (chunk, union, select) it is the time of a call, at 4096 tokens and at 64: it must not
grow with the tokens. Best of several alternating repetitions.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from verl.protocol import DataProto

ROWS, TOKENS, PIECES, REPEATS = 8192, 4096, 8, 5


def columns(rows: int, tokens: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Ids, log-probs and a mask, as a rollout has them."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "responses": torch.randint(0, 50_000, (rows, tokens), generator=generator),
        "log_probs": torch.rand(rows, tokens, generator=generator),
        "response_mask": torch.ones(rows, tokens, dtype=torch.bool),
    }


def batch(rows: int, tokens: int) -> DataProto:
    return DataProto.from_dict(columns(rows, tokens), {"uid": [f"train:{row}" for row in range(rows)]}, {"step": 1})


def best(*works: Callable[[], Any]) -> list[float]:
    """Seconds of each piece of work: the best of ``REPEATS``, the pieces taking turns."""
    times = [float("inf")] * len(works)
    for _ in range(REPEATS + 1):  # the first round warms up
        for number, work in enumerate(works):
            start = time.perf_counter()
            result = work()
            times[number] = min(times[number], time.perf_counter() - start)
            del result
    return times


def moving(data: DataProto, folder: Path) -> list[tuple[str, float, float]]:
    """(name, seconds of DataProto, seconds of the bare operation)."""
    pieces = data.chunk(PIECES)
    bare = [piece.tensors for piece in pieces]
    arrays = {name: tensor.numpy() for name, tensor in data.tensors.items()}

    def cat() -> dict[str, torch.Tensor]:
        return {name: torch.cat([piece[name] for piece in bare]) for name in bare[0]}

    def through(value: Any) -> Any:
        return pickle.loads(pickle.dumps(value, protocol=5))

    def uids() -> np.ndarray:
        return np.concatenate([piece.non_tensor_batch["uid"] for piece in pieces])

    objects = data.non_tensor_batch
    return [
        ("concat", *best(lambda: DataProto.concat(pieces), lambda: (cat(), uids()))),
        ("serialise", *best(lambda: through(data), lambda: through((arrays, objects)))),
        (
            "save (checksums, synced)",
            *best(
                lambda: data.save_to_disk(folder / "ours"),
                lambda: save_file(data.tensors, folder / "bare"),
            ),
        ),
    ]


def still(rows: int, widths: tuple[int, ...]) -> dict[str, list[float]]:
    """Seconds of the calls that move no tensor, for each number of tokens; all take turns."""
    works: dict[str, list[Callable[[], Any]]] = {}
    for tokens in widths:
        for name, work in calls(batch(rows, tokens), DataProto.from_dict({"values": torch.zeros(rows, tokens)})):
            works.setdefault(name, []).append(work)
    times = iter(best(*(work for group in works.values() for work in group)))
    return {name: [next(times) for _ in group] for name, group in works.items()}


def calls(data: DataProto, other: DataProto) -> list[tuple[str, Callable[[], Any]]]:
    return [
        ("chunk", lambda: data.chunk(PIECES)),
        ("union", lambda: data.select().union(other)),
        ("select", lambda: data.select(["responses"])),
        ("slice", lambda: data.slice(0, len(data) // 2)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    given = parser.parse_args()
    data = batch(given.rows, given.tokens)
    print(
        f"{given.rows} rows x {given.tokens} tokens, {data.size_in_bytes() / 2**20:.0f} MiB; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, Python {sys.version.split()[0]}"
    )
    print(f"\n{'bytes move':<26}{'DataProto':>11}{'bare':>11}{'ratio':>8}")
    with tempfile.TemporaryDirectory() as folder:
        for name, ours, bare in moving(data, Path(folder)):
            print(f"{name:<26}{ours * 1e3:>8.1f} ms{bare * 1e3:>8.1f} ms{ours / bare:>8.2f}")
    print(f"\n{'no bytes move':<26}{'64 tokens':>11}{f'{given.tokens} tokens':>14}{'ratio':>8}")
    for name, (short, long) in still(given.rows, (64, given.tokens)).items():
        print(f"{name:<26}{short * 1e6:>8.0f} us{long * 1e6:>11.0f} us{long / short:>8.2f}")


if __name__ == "__main__":
    main()
