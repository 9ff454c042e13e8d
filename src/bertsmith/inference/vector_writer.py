"""Vectors → .npy, .parquet or .safetensors by the file's ending, streamed: memory is that of one chunk.

One vector a text stands in an array `(n, d)`. Several a text (tokens, words) stand end to end, and offsets say where
each text's begin. A file is complete or absent; how many vectors there are is known only at the end, so that headers
are written in a place kept free for them.

    .npy          (n, d) float32; one vector a text only, for it has no place for offsets
    .safetensors  `vectors` (n, d) or (rows, d) float32; then `offsets` (n + 1,) int64: text i has the rows
                  [offsets[i], offsets[i + 1]); for tokens also `token_ids` (rows,) int32
    .parquet      a row a text: `vector`, a list of d floats; or `vectors`, a list of such, and `token_ids`; before
                  them columns that are carried along
"""

import contextlib
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError
from bertsmith.inference.row_writer import arrow_column
from bertsmith.storage import atomic_file, disk_errors

ENDINGS = (".npy", ".parquet", ".safetensors")
_NPY_HEADER = 128  # bytes; a shape of two 20-digit numbers fits
_SAFETENSORS_HEADER = 1024


@dataclass(frozen=True)
class Vectors:
    """The vectors of some texts, in order."""

    rows: npt.NDArray[np.float32]  # (R, d)
    counts: npt.NDArray[np.int64] | None = None
    """(n,): how many rows each text has; None: one."""
    token_ids: npt.NDArray[np.integer] | None = None
    """(R,): the token of each row, where rows are tokens."""
    kept: Sequence[dict[str, Any]] = field(default=(), kw_only=True)
    """(n,): what stands beside each text, where columns are carried along."""


class VectorWriter(Protocol):
    """Takes the vectors of some more texts."""

    def write(self, vectors: Vectors) -> None:
        """Append them."""


def find_vector_format(path: Path, several: bool, kept: bool = False) -> str:
    """The ending of an output. Raises UserError for any but ENDINGS, and where it cannot hold `several` a text or other
    columns (`kept`)."""
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise UserError(f"{path}: vectors are written to {', '.join(ENDINGS)}; let the output end in one of these")
    if several and ending == ".npy":
        raise UserError(f"{path}: .npy holds one vector a text; for tokens or words name a .safetensors or .parquet")
    if kept and ending != ".parquet":
        raise UserError(f"{path}: {ending} holds vectors and no columns for --keep; name a .parquet")
    return ending


def parquet_columns(several: bool, tokens: bool) -> list[str]:
    """The names of the columns that a .parquet of vectors has."""
    return ["vectors" if several else "vector", *(["token_ids"] if tokens else [])]


@contextlib.contextmanager
def open_vector_writer(
    path: Path, dimension: int, several: bool, tokens: bool = False, types: Mapping[str, Any] | None = None
) -> Iterator[VectorWriter]:
    """Yield a writer of vectors of `dimension`; the file stands under its name when the block ends without an error.

    `several`: texts have any number of vectors; `tokens`: and these come with token ids. `types`: the Arrow types of
    the columns of `Vectors.kept`. Raises UserError as `find_vector_format`, and where the disk refuses.
    """
    ending = find_vector_format(path, several, bool(types))
    with atomic_file(path) as partial, disk_errors(path):
        if ending == ".parquet":
            with _ParquetWriter(partial, dimension, several, tokens, types or {}) as writer:
                yield writer
            return
        with partial.open("wb") as file, contextlib.ExitStack() as temporary:
            if ending == ".npy":
                array = _ArrayWriter(file, dimension)
                yield array
                array.finish()
                return
            # what comes after the vectors waits beside the output, where there is room for the vectors as well
            parts = [name for name, used in (("offsets", several), ("token_ids", tokens)) if used]
            waiting = {
                name: temporary.enter_context(tempfile.TemporaryFile(dir=partial.parent, prefix=f"{partial.name}-"))
                for name in parts
            }
            tensors = _TensorWriter(file, dimension, waiting)
            yield tensors
            tensors.finish()


def _append(file: Any, array: npt.NDArray[Any], kind: str) -> int:
    """Write an array's bytes in little-endian order; returns how many."""
    return int(file.write(np.ascontiguousarray(array, dtype=kind).data.cast("B") if array.size else b""))


class _ArrayWriter:
    """NumPy's format, version 1.0 (numpy.lib.format)."""

    def __init__(self, file: BinaryIO, dimension: int) -> None:
        self.file = file
        self.dimension = dimension
        self.rows = 0
        file.write(bytes(_NPY_HEADER))

    def write(self, vectors: Vectors) -> None:
        _append(self.file, vectors.rows, "<f4")
        self.rows += len(vectors.rows)

    def finish(self) -> None:
        shape = f"({self.rows}, {self.dimension})"
        text = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".encode("ascii")
        length = _NPY_HEADER - 10
        self.file.seek(0)
        self.file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", length) + text.ljust(length - 1) + b"\n")


class _TensorWriter:
    """safetensors: the header's length (8 bytes), a JSON header padded with blanks, the tensors' bytes end to end."""

    def __init__(self, file: BinaryIO, dimension: int, waiting: dict[str, Any]) -> None:
        self.file = file
        self.dimension = dimension
        self.waiting = waiting
        self.rows = self.texts = 0
        file.write(bytes(_SAFETENSORS_HEADER))
        if "offsets" in waiting:
            _append(waiting["offsets"], np.zeros(1, dtype=np.int64), "<i8")

    def write(self, vectors: Vectors) -> None:
        _append(self.file, vectors.rows, "<f4")
        if "offsets" in self.waiting:
            assert vectors.counts is not None
            _append(self.waiting["offsets"], self.rows + np.cumsum(vectors.counts), "<i8")
            self.texts += len(vectors.counts)
        if "token_ids" in self.waiting:
            assert vectors.token_ids is not None
            _append(self.waiting["token_ids"], vectors.token_ids, "<i4")
        self.rows += len(vectors.rows)

    def finish(self) -> None:
        end = 4 * self.rows * self.dimension
        header: dict[str, Any] = {"vectors": _entry("F32", [self.rows, self.dimension], 0, end)}
        for name, kind, count in (("offsets", "I64", self.texts + 1), ("token_ids", "I32", self.rows)):
            if name in self.waiting:
                begin, end = end, end + count * int(kind[1:]) // 8
                header[name] = _entry(kind, [count], begin, end)
                self.waiting[name].seek(0)
                shutil.copyfileobj(self.waiting[name], self.file, 1 << 20)
        length = _SAFETENSORS_HEADER - 8
        self.file.seek(0)
        self.file.write(struct.pack("<Q", length) + json.dumps(header).encode("ascii").ljust(length))


def _entry(kind: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


class _ParquetWriter:
    """A row group a chunk. Floats are neither compressed nor made a dictionary of: they hardly ever repeat."""

    def __init__(self, path: Path, dimension: int, several: bool, tokens: bool, types: Mapping[str, Any]) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        vector = pa.list_(pa.float32(), dimension)
        own = (pa.list_(vector) if several else vector, pa.list_(pa.int32()))
        fields = dict(zip(parquet_columns(several, tokens), own, strict=False))
        self.types, self.schema = types, pa.schema({**types, **fields})
        self.several, self.tokens, self.dimension = several, tokens, dimension
        self.writer = pq.ParquetWriter(path, self.schema, use_dictionary=False, compression="none")

    def __enter__(self) -> "_ParquetWriter":
        return self

    def __exit__(self, *error: object) -> None:
        self.writer.close()

    def write(self, vectors: Vectors) -> None:
        import pyarrow as pa

        columns = [pa.FixedSizeListArray.from_arrays(pa.array(vectors.rows.reshape(-1)), self.dimension)]
        if self.several:
            assert vectors.counts is not None
            offsets = pa.array(np.concatenate([[0], np.cumsum(vectors.counts)]).astype(np.int32))
            columns = [pa.ListArray.from_arrays(offsets, columns[0])]
            if self.tokens:
                columns.append(pa.ListArray.from_arrays(offsets, pa.array(vectors.token_ids, pa.int32())))
        kept = [arrow_column([row[name] for row in vectors.kept], kind) for name, kind in self.types.items()]
        self.writer.write_table(pa.table([*kept, *columns], schema=self.schema))
