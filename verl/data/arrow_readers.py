"""Record batches of parquet files and of Arrow's own files, checked to the last value, in bounded memory."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from verl.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS = 1024
PARQUET_MAGIC = b"PAR1"
ARROW_MAGIC = b"ARROW1"
STREAM_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
# Hugging Face feature types that say nothing about how Arrow's own columns are to be understood.
_PLAIN = ("Value", "ClassLabel", "Sequence", "List", "LargeList", "Translation", "TranslationVariableLanguages", "Json")
_MEDIA = ("Image", "Audio", "Video", "Pdf", "Nifti", "Array2D", "Array3D", "Array4D", "Array5D")
KNOWN_FEATURES = frozenset(_PLAIN + _MEDIA)


def read_parquet(path: Path) -> Iterator[pa.RecordBatch]:
    """At least one batch (which may have no row), none over ``BATCH_ROWS`` rows. Raises DataError: the file is cut,
    damaged or not parquet, or declares a column type that is not known."""
    import pyarrow.parquet as pq

    with _named_errors("parquet", path), pq.ParquetFile(str(path), buffer_size=2**20, pre_buffer=False) as file:
        _check_features(path, (file.schema_arrow.metadata or {}).get(b"huggingface"))
        yield _empty(file.schema_arrow)
        yield from file.iter_batches(batch_size=BATCH_ROWS)


def read_arrow(path: Path) -> Iterator[pa.RecordBatch]:
    """Batches of an Arrow file (also called Feather) or stream; as :func:`read_parquet`."""
    import pyarrow as pa

    with _named_errors("Arrow", path), pa.memory_map(str(path)) as source:
        if source.read(len(ARROW_MAGIC)) == ARROW_MAGIC:
            reader = pa.ipc.open_file(source)
            batches: Iterable[pa.RecordBatch] = map(reader.get_batch, range(reader.num_record_batches))
        else:
            source.seek(max(source.size() - len(STREAM_END), 0))
            if source.read() != STREAM_END:
                raise ValueError("the stream has no end")
            source.seek(0)
            batches = reader = pa.ipc.open_stream(source)
        _check_features(path, (reader.schema.metadata or {}).get(b"huggingface"))
        yield _empty(reader.schema)
        for batch in batches:
            batch.validate()  # before anything follows its offsets: damaged ones may point anywhere
            if batch.num_rows and not batch.nbytes:  # a damaged number of rows could be any
                raise ValueError(f"{batch.num_rows} rows without a value")
            for start in range(0, batch.num_rows, BATCH_ROWS):
                yield batch.slice(start, BATCH_ROWS)


def _empty(schema: pa.Schema) -> pa.RecordBatch:
    import pyarrow as pa

    return pa.RecordBatch.from_arrays([pa.array([], field.type) for field in schema], schema=schema)


@contextlib.contextmanager
def _named_errors(kind: str, path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError, ValueError, KeyError, MemoryError, RecursionError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = f"A data file cannot be read; it is cut, damaged or not {kind}."
        raise DataError(what, path, f"{reason}; copy or write the file again") from error


def _check_features(path: Path, metadata: bytes | None) -> None:
    """Refuse a file whose writer declared a column type that we would misread as plain storage."""
    if not metadata:
        return
    try:
        features = json.loads(metadata).get("info", {}).get("features", {})
    except (ValueError, AttributeError, RecursionError):
        what = "A data file carries feature metadata that is not JSON."
        raise DataError(what, path, "write the file again") from None
    for column, feature in features.items() if isinstance(features, dict) else ():
        for kind in re.findall(r'"_type": "([^"]*)"', json.dumps(feature)):
            if kind not in KNOWN_FEATURES:
                what = f"A data file declares a feature type that is not known, in column {column!r}."
                raise DataError(what, f"{path}: {kind}", "write the file again without its huggingface metadata")
