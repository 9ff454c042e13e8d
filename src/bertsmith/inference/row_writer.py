"""Rows of results → .jsonl, .csv, .tsv or .parquet by the file's ending, written in chunks, complete or absent.

Lists and dictionaries stand as JSON in the cells of .csv and .tsv, and as they are in the other two.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bertsmith.errors import UserError
from bertsmith.storage import atomic_file, disk_errors

ENDINGS = (".jsonl", ".csv", ".tsv", ".parquet")
Row = dict[str, Any]
# RFC 4180, and a lone CR, which Python's own writer (3.11) leaves bare
_QUOTED = re.compile('[",\r\n]')


class RowWriter(Protocol):
    """Takes rows, all with the same keys."""

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""

    def expect(self, row: Row) -> None:
        """Rows will be such as `row`, if any come: the columns, and for .parquet their types, are known before."""


def find_ending(path: Path, more: Sequence[str] = ()) -> str:
    """The format of an output: its ending, .jsonl where it has none. Raises UserError for any but ENDINGS.

    `more`: endings that are not of rows, and may be given as well.
    """
    ending = path.suffix.lower() or ".jsonl"
    if ending not in ENDINGS:
        raise UserError(f"{path}: an output ends in {', '.join((*ENDINGS, *more))}, not in {path.suffix}")
    return ending


@contextlib.contextmanager
def open_row_writer(path: Path, types: Mapping[str, Any] | None = None) -> Iterator[RowWriter]:
    """Yield a writer; the file stands under its name when the block ends without an error.

    `types`: for .parquet, the Arrow types of columns that are not to be told by the first rows. Raises UserError as
    `find_ending` does.
    """
    ending = find_ending(path)
    with atomic_file(path) as partial:
        if ending == ".parquet":
            writer = _ParquetWriter(partial, types or {})
            try:
                yield writer
            finally:
                writer.close()
            return
        with partial.open("w", encoding="utf-8", newline="") as file, disk_errors(path):
            yield _LineWriter(file) if ending == ".jsonl" else _CellWriter(file, "," if ending == ".csv" else "\t")


class _LineWriter:
    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, rows: Sequence[Row]) -> None:
        self.file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    def expect(self, row: Row) -> None:
        """A line names its own keys."""


class _CellWriter:
    def __init__(self, file: Any, separator: str) -> None:
        self.separator = separator
        self.file = file
        self.header: list[str] | None = None

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self.expect(row)
            self._write([_cell(row[name]) for name in self.header or ()])

    def expect(self, row: Row) -> None:
        if self.header is None:
            self.header = list(row)
            self._write(self.header)

    def _write(self, cells: list[str]) -> None:
        if self.separator == ",":
            written = [_quote(cell) for cell in cells]
            written = written if any(written) else ['""', *written[1:]]  # or the line would be blank, and no row
        else:  # a .tsv has no quotes: what would end a cell or a row is a blank
            written = [tsv_cell(cell) for cell in cells]
        self.file.write(self.separator.join(written) + "\n")


def tsv_cell(cell: str) -> str:
    """A text as a .tsv can hold it."""
    return " ".join(cell.replace("\t", " ").splitlines())


def _quote(cell: str) -> str:
    return '"' + cell.replace('"', '""') + '"' if _QUOTED.search(cell) else cell


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def arrow_column(values: Sequence[Any], kind: Any) -> Any:
    """A column of Arrow type `kind` from Python values, or from arrays of one value each, as they are carried along."""
    import pyarrow as pa

    return pa.concat_arrays(values) if values and isinstance(values[0], pa.Array) else pa.array(values, kind)


def _with_texts(kind: Any) -> Any:
    """A column's Arrow type; lists that are all empty so far are lists of texts (labels, tags)."""
    import pyarrow as pa

    return pa.list_(pa.string()) if pa.types.is_list(kind) and pa.types.is_null(kind.value_type) else kind


class _ParquetWriter:
    def __init__(self, path: Path, types: Mapping[str, Any]) -> None:
        self.path, self.types = path, types
        self.writer: Any = None

    def write(self, rows: Sequence[Row]) -> None:
        import pyarrow as pa

        if not rows:
            return
        self._begin(rows)
        schema = self.writer.schema
        columns = [arrow_column([row[column.name] for row in rows], column.type) for column in schema]
        self.writer.write_table(pa.table(columns, schema=schema))

    def expect(self, row: Row) -> None:
        self._begin([row])

    def _begin(self, rows: Sequence[Row]) -> None:
        """Open the file with the columns of `rows`, unless it is."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.writer is None:
            types = {
                name: self.types[name]
                if name in self.types
                else _with_texts(pa.array([row[name] for row in rows]).type)
                for name in rows[0]
            }
            self.writer = pq.ParquetWriter(self.path, pa.schema(types))

    def close(self) -> None:
        """Write the file's end; a file without rows is an empty table."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.writer is None:
            pq.write_table(pa.table({}), self.path)
        else:
            self.writer.close()
