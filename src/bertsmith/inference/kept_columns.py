"""Columns of an input that are carried along into an output (`--keep`): an id beside what is computed of its row.

The table is read a second time beside the reading that the model is fed from, and as far. Both must be at the same
line at every row, so that no cell ever stands beside another row's result.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from bertsmith.errors import UserError
from bertsmith.inference.chunks import KEPT_AT_ONCE, split_stretches
from bertsmith.inference.row_writer import Row, tsv_cell
from bertsmith.progress import silenced
from bertsmith.tasks.table import Table
from bertsmith.text.decoding import TextFile
from bertsmith.text.documents import SURROGATES, ReadOptions, ReadReport
from bertsmith.text.readers import detect_kind
from bertsmith.text.streams import is_read_once, is_url
from bertsmith.text.tables import column_values, open_parquet_file, parquet_rows

_Read = TypeVar("_Read")
_ROWS_AT_ONCE = 4096


class KeptColumns:
    """The columns `names` of a table at `path`; without names, nothing is read and nothing is kept.

    `output`: the file they are written to. `own`: the names of its other columns. `is_table`: whether a file has a row
    for each result, where its kind does not tell. `held`: whether cells wait to be taken.

    Cells are as they are in the input: text as typed of .csv and .tsv, any value of .jsonl and .parquet; what goes from
    .parquet to .parquet is not touched. An output that is no .parquet gets what JSON can hold: dates as ISO text, null
    for a number that is none, bytes as the text that they are in `encoding`. A key that a line of .jsonl lacks is null;
    the first line must have it.

    Raises UserError for a name that is absent, empty, given twice or among `own`, for files that cannot be kept of or
    kept in and, while reading, for values that the output cannot hold, such as bytes that are no text.
    """

    def __init__(
        self,
        path: str,
        names: Sequence[str],
        output: Path | None,
        own: Iterable[str],
        encoding: str = "utf-8",
        is_table: Callable[[str], bool] = lambda path: True,
        held: bool = True,
    ) -> None:
        self.path, self.names, self.encoding = path, tuple(names), encoding
        ending = "" if output is None else output.suffix.lower()
        self.to_parquet = ending == ".parquet"
        self.waiting, self.held = deque[Row](), held
        self.last: Row = {}  # of the row read last
        if self.names:
            if output is None:
                raise UserError("--keep: there is no file to write columns to; name one with --output")
            self._check_input(is_table)
            with self._open(ReadReport()) as table:
                # blanks after the commas are no part of a name, unless the file says so
                self.names = tuple(name if name in table.columns else name.strip() for name in names)
                self._check_names(list(own), tsv_cell if ending == ".tsv" else str)
                table.require(self.names)

    def _check_names(self, own: Sequence[str], written: Callable[[str], str]) -> None:
        """`written`: what becomes of a name in the output."""
        for name in self.names:
            if not name:
                raise UserError("--keep: a name is empty; give the names of columns with commas between them")
            if SURROGATES.search(name):
                raise UserError(f"--keep: {name!r} holds half a character (a lone surrogate), which no file can")
            if self.names.count(name) > 1:
                raise UserError(f"--keep: {name!r} is given twice; name each column once")
            if name in own:
                raise UserError(
                    f"--keep: {name!r} is what a column of the output itself is called ({', '.join(own)}); rename it "
                    "in the input, or leave it out"
                )
        names = [*self.names, *own]
        for index, name in enumerate(names):
            if other := next((other for other in names[:index] if written(other) == written(name)), None):
                raise UserError(f"--keep: a .tsv writes {other!r} and {name!r} alike; name another --output")

    def _check_input(self, is_table: Callable[[str], bool]) -> None:
        if is_read_once(self.path):
            raise UserError(f"{self.path}: can be read once only, and --keep reads it twice; put it in a file")
        with closing(TextFile(self.path, ReadOptions(encoding=self.encoding), ReadReport())) as file:
            self.kind = detect_kind(file)
        if self.kind == "text" or not is_table(self.path):
            raise UserError(
                f"{self.path}: has no columns with names that --keep could mean; give a .csv, .tsv, .jsonl or "
                ".parquet file with a row for each prediction"
            )

    def _open(self, report: ReadReport | None) -> Table:
        return Table(self.path, self.encoding, report, advice="--keep takes their names")

    def follow(self, rows: Iterable[_Read], place: Callable[[_Read], str]) -> Iterator[_Read]:
        """`rows` as they are read, unchanged; the cells of each then wait for `take`. `place`: where a row came from,
        `file:line`.

        Raises UserError where the table's rows are others.
        """
        if not self.names:
            yield from rows
            return
        self.waiting.clear()
        # bytes that are replaced are said by who reads the rows, but for those of columns that only this reads
        with self._open(None if self.kind == "parquet" else ReadReport()) as table:
            beside = self._rows(table)
            for row in rows:
                line, cells = next(beside, (0, {}))
                while f"{self.path}:{line}" != place(row) and _is_blank(table, cells):
                    line, cells = next(beside, (0, {}))
                if f"{self.path}:{line}" != place(row):
                    raise UserError(
                        f"{place(row)}: --keep finds another row here (line {line}); another layout than a table's "
                        "came before: mend the file"
                    )
                self.last = cells
                if self.held:
                    self.waiting.append(cells)
                yield row
            table.mended.settle(None, self.encoding)

    def count(self, rows: Iterable[Any]) -> int | None:
        """`count_rows` of `follow`'s rows, whose cells are taken; without any to keep, only where they are `held`."""
        if not self.names:
            return count_rows(self.path, rows) if self.held else None
        with silenced():
            return sum(1 for _ in rows if not self.held or self.take(1))

    def _rows(self, table: Table) -> Iterator[tuple[int, Row]]:
        """(line, all cells to keep) of every row, as the output can hold them."""
        if table.kind == "parquet":
            yield from parquet_rows(
                self.path, self.names, table.file.options, table.strict, partial(self._convert, table)
            )
            return
        line = 0
        try:
            for row in table.rows((), self.names):
                line, cells = row.line, {name: row.cells.get(name) for name in self.names}
                yield line, cells if self.to_parquet else {name: to_json(cells[name]) for name in self.names}
        except UserError as error:  # who reads the rows for the model took them as they are
            raise UserError(f"--keep reads the file as a plain table: {error}") from None
        except RecursionError:
            raise UserError(f"{self.path}:{line}: --keep: lists or objects are nested too deeply") from None

    def _convert(self, table: Table, name: str, column: Any, first: int) -> Iterable[Any]:
        """The cells of an Arrow array: arrays of one value each where they go to .parquet."""
        import pyarrow as pa

        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if self.to_parquet:
            return (column.slice(index, 1) for index in range(len(column)))
        is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
        try:
            if is_text:
                return list(column_values(column, self.path, first, table.file.options, table.strict))
            return [to_json(value, self.encoding) for value in column.to_pylist()]
        except (ValueError, OverflowError, KeyError) as error:  # KeyError: a time zone that is not known
            what = "times finer than microseconds, outside the years 1 to 9999 or of an unknown time zone"
            if isinstance(error, UnicodeDecodeError):
                what = f"bytes that are no {self.encoding} text"
            raise UserError(
                f"{self.path} (from row {first:,} on): --keep: column {name!r} is {column.type} and holds {what}; "
                "name a .parquet as the --output, or leave it out"
            ) from None

    def weigh(self) -> int:
        """The size of the cells of the row read last, about, in bytes."""
        return size_of(self.last)

    def take(self, count: int) -> list[Row]:
        """The cells of the next `count` rows."""
        return [self.waiting.popleft() for _ in range(count)] if self.names else [{}] * count

    def beside(self, rows: Sequence[Row]) -> list[Row]:
        """The next rows of an output: what was kept of each before what was computed of it."""
        return [kept | row for kept, row in zip(self.take(len(rows)), rows, strict=True)]

    def arrow_types(self) -> dict[str, Any]:
        """The Arrow type of each column, for an output that is .parquet (else {}): what the input's is or, where that
        is .jsonl, what all its values are, for which it is read to its end.

        Raises UserError for values that make no column.
        """
        if not self.names or not self.to_parquet:
            return {}
        import pyarrow as pa

        if self.kind in ("csv", "tsv"):
            return dict.fromkeys(self.names, pa.string())
        if self.kind == "parquet":
            with open_parquet_file(self.path) as file:
                return {name: _read_type(file.schema_arrow.field(name).type) for name in self.names}
        types, mixed = dict.fromkeys(self.names, pa.null()), set[str]()
        for name, values in self._stretches():
            with self._refused(name):
                kind = pa.array(values).type
                if kind != types[name]:
                    if types[name] != pa.null():
                        mixed.add(name)
                    types[name] = _unify(types[name], kind)
        for name, values in self._stretches() if mixed else ():  # each may not fit what all of them make
            with self._refused(name):
                pa.array(values, types[name])
        return types

    def _stretches(self) -> Iterator[tuple[str, list[Any]]]:
        """(name, values) of every column for some rows at a time."""
        with self._open(ReadReport()) as table:
            rows = (cells for _, cells in self._rows(table))
            for chunk in split_stretches(rows, _ROWS_AT_ONCE, (KEPT_AT_ONCE, size_of)):
                yield from ((name, [cells[name] for cells in chunk]) for name in self.names)

    @contextmanager
    def _refused(self, name: str) -> Iterator[None]:
        """Say what Arrow and Parquet do not take of a column."""
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OverflowError, OSError, RecursionError) as error:
            raise UserError(
                f"{self.path}: --keep: column {name!r} holds values that make no column of a .parquet file "
                f"({str(error).splitlines()[0]}); name a .jsonl as the --output"
            ) from None


def count_rows(path: str, rows: Iterable[Any]) -> int | None:
    """How many rows a file holds, all of which are read: one that cannot be is told before hours of work.

    None for URLs and pipes, which are left alone. Raises what reading does.
    """
    if is_url(path) or not Path(path).is_file():
        return None
    with silenced():  # what there is to warn of is said when they are read for use
        return sum(1 for _ in rows)


def size_of(cells: Row) -> int:
    """Of some cells, about, in bytes."""
    return sum(
        len(value) if isinstance(value, str) else getattr(value, "nbytes", 0) or len(repr(value))
        for value in cells.values()
    )


def _is_blank(table: Table, cells: Row) -> bool:
    """Whether these are a blank line's of a table of one column: an empty cell here, nothing to who reads texts."""
    one = table.kind in ("csv", "tsv") and len(table.columns) == 1
    return one and bool(cells) and not any(cells.values())


def _read_type(kind: Any) -> Any:
    """The type of the values that come of a column of Arrow type `kind`."""
    import pyarrow as pa

    return kind.value_type if pa.types.is_dictionary(kind) else kind


def _unify(first: Any, second: Any) -> Any:
    """The Arrow type of values of both. Raises what pyarrow does where there is none, or .parquet cannot have it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    schemas = [pa.schema([("", kind)]) for kind in (first, second)]
    schema = pa.unify_schemas(schemas, promote_options="permissive")
    written = pa.BufferOutputStream()
    pq.write_table(schema.empty_table(), written)
    pq.read_schema(pa.BufferReader(written.getvalue()))  # what is nested too deeply can be written and not read
    return schema.field(0).type


def to_json(value: Any, encoding: str = "utf-8") -> Any:
    """A cell as JSON can hold it: dates and times as ISO text, bytes and other kinds as text, NaN as null.

    Raises UnicodeDecodeError for bytes that are no text in `encoding`.
    """
    if isinstance(value, list | tuple):
        return [to_json(item, encoding) for item in value]
    if isinstance(value, dict):
        return {key: to_json(item, encoding) for key, item in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, bytes):
        return value.decode(encoding)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
