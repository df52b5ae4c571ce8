"""Tokenizers small enough to count by hand, and writers of data files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from verl.config import DataConfig
from verl.data.rows import BadRow, FileRows, PromptRow

SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<u>": 3, "<a>": 4}
# One id a word: w0 is 10, w1 is 11, ... Every message adds <u> and a closing </s>, the generation prompt adds <a>.
VOCABULARY = {**SPECIALS, **{f"w{i}": 10 + i for i in range(50)}}
PLAIN_TEMPLATE = (
    "{% for m in messages %}<u> {{ m.content }} </s> {% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)

MakeTokenizer = Callable[..., PreTrainedTokenizerFast]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of converted files goes to a folder of the test's own."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("VERL_CACHE", str(folder))
    return folder / "data"


@pytest.fixture(scope="session")
def make_tokenizer() -> MakeTokenizer:
    def make(adds_bos: bool = False, template: str | None = PLAIN_TEMPLATE) -> PreTrainedTokenizerFast:
        backend = Tokenizer(models.WordLevel(VOCABULARY, unk_token="<unk>"))
        backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        if adds_bos:
            backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=backend,
            bos_token="<s>",
            eos_token="</s>",
            unk_token="<unk>",
            additional_special_tokens=["<u>", "<a>"],
        )
        tokenizer.chat_template = template
        return tokenizer

    return make


def words(count: int, start: int = 0) -> str:
    return " ".join(f"w{(start + i) % 50}" for i in range(count))


def field_row(prompt: Any, truth: Any = "1", source: str = "s", index: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"split": "train", "index": index},
        **more,
    }


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """``write("a.parquet" | "a.jsonl", rows)``."""

    def writer(name: str, rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / name
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), str(path))
        else:
            path.write_bytes(b"".join(json.dumps(row).encode() + b"\n" for row in rows))
        return path

    return writer


@pytest.fixture(scope="session")
def prompt_rows() -> Callable[..., list[PromptRow]]:
    """``prompt_rows(files, **fields of DataConfig)``: every row, none of which may be bad."""

    def read(files: Any, **fields: Any) -> list[PromptRow]:
        files = [str(file) for file in files] if isinstance(files, list) else str(files)
        source = FileRows(files, DataConfig(train_files="unused", **fields))
        rows = source.read(0, len(source))
        assert not any(isinstance(row, BadRow) for row in rows), rows
        return rows  # type: ignore[return-value]

    return read


@pytest.fixture(scope="session")
def row_of() -> Callable[..., dict[str, Any]]:
    return field_row


@pytest.fixture(scope="session")
def words_of() -> Callable[..., str]:
    return words
