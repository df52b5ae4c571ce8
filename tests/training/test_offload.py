"""Parts of roles that make room for others: where their bytes are meanwhile, and that they come back as they were."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from verl.cluster.threads import worker_environment
from verl.errors import VerlError
from verl.training import offload
from verl.training.offload import PinnedMemory, ScratchFile, Turns


def sizes(tensors: list[Tensor]) -> list[int]:
    return [tensor.untyped_storage().size() for tensor in tensors]


def test_a_part_goes_and_comes_back_with_all_that_looks_into_it(tmp_path: Path) -> None:
    turns, whole = Turns(torch.device("cpu"), tmp_path), torch.randn(6, 4)
    one, view, other = torch.nn.Parameter(whole), whole.T, torch.arange(5, dtype=torch.bfloat16)
    frozen, expected = torch.full((3,), 7.0), [whole.clone(), other.clone()]
    turns.share(lambda: [one, view, other], {"a", "both"})
    turns.share(lambda: [frozen], {"b", "both"}, fixed=True)
    assert sizes([one, view, other, frozen]) == [0, 0, 0, 0]
    assert list(tmp_path.iterdir()) == []  # the files have no name
    turns.begin("a")
    assert sizes([one, frozen]) == [96, 0] and torch.equal(one, expected[0]) and torch.equal(other, expected[1])
    assert view.data_ptr() == one.data_ptr() and torch.equal(view, expected[0].T)
    with torch.no_grad():
        one.add_(1.0)
    turns.begin("b")
    assert sizes([one, other, frozen]) == [0, 0, 12] and frozen.tolist() == [7.0] * 3
    turns.begin("both")
    assert torch.equal(one, expected[0] + 1) and torch.equal(view, (expected[0] + 1).T) and frozen.tolist() == [7.0] * 3
    assert turns.seconds > 0


def test_what_nobody_changes_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    turns, frozen, moving = Turns(torch.device("cpu"), tmp_path), torch.ones(4), torch.ones(8)
    written: list[int] = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: written.append(len(data)) or real(file, data, place))
    turns.share(lambda: [frozen], {"a"}, fixed=True)
    turns.share(lambda: [moving], {"a"})
    for _ in range(3):
        turns.begin("a")
        turns.begin("b")
    assert written == [16, 32, 32, 32, 32] and turns.begin("a") is None and frozen.sum() == 4


def test_tensors_that_look_into_what_is_not_ours_are_copied(tmp_path: Path) -> None:
    file = tmp_path / "weights"
    file.write_bytes(bytes(range(8)))
    mapped = torch.nn.Parameter(torch.from_file(str(file), size=8, dtype=torch.uint8), requires_grad=False)
    turns = Turns(torch.device("cpu"), tmp_path)
    turns.share(lambda: [mapped], {"a"})
    assert sizes([mapped]) == [0]
    turns.begin("a")
    assert mapped.tolist() == list(range(8))


def test_a_full_disk_is_told_and_nothing_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    turns, weights = Turns(torch.device("cpu"), tmp_path / "run"), torch.ones(4)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(VerlError, match="cannot put idle weights away") as caught:
            turns.share(lambda: [weights], {"a"})
    assert "No space left" in str(caught.value.value) and "param_offload" in (caught.value.fix or "")
    assert weights.tolist() == [1.0] * 4 and not caught.value.bad_input
    turns.begin("b")
    assert sizes([weights]) == [0]


@pytest.mark.parametrize("store", [PinnedMemory, ScratchFile])
def test_a_store_keeps_bytes_across_its_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: type[PinnedMemory] | type[ScratchFile]
) -> None:
    monkeypatch.setattr(offload, "PINNED", 7)
    kept = PinnedMemory() if store is PinnedMemory else ScratchFile(tmp_path)
    data, found = torch.arange(40, dtype=torch.uint8), torch.zeros(40, dtype=torch.uint8)
    for place, end in ((0, 3), (3, 24), (24, 40)):
        kept.write(place, data[place:end])
    for place, end in ((24, 40), (0, 13), (13, 24)):
        kept.read(place, found[place:end])
    assert torch.equal(found, data)


RESIDENT = """
import sys, torch
from pathlib import Path
from verl.models.memory import held_memory
from verl.training.offload import Turns
weights = [torch.ones(2**20 + i) for i in range(64)]
turns, held = Turns(torch.device("cpu"), Path(sys.argv[1])), [held_memory()]
turns.share(lambda: weights, {"a"})
for turn in ("b", "a", "b"):
    turns.begin(turn)
    held.append(held_memory())
print(*(amount // 2**20 for amount in held))
"""


def test_resident_memory_falls_in_a_worker(tmp_path: Path) -> None:
    """256 MiB in a process whose allocator keeps what is freed, as that of the workers does."""
    command = [sys.executable, "-c", RESIDENT, str(tmp_path)]
    environment = os.environ | worker_environment(1)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=100)
    before, away, back, again = map(int, done.stdout.split())
    assert before - away > 240 and back - away > 240 and back - again > 240
