"""Files of rows: .jsonl, .csv, .tsv and .parquet → their rows, or a document for each row's text column.

A row that cannot be used is counted with its reason and the first ones are named; a column that no row has is an error
that names the columns there are. Cells are text as they stand: "NA", "null" and "01" mean nothing special.
"""

import csv
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

from bertsmith.errors import UserError
from bertsmith.options import did_you_mean
from bertsmith.text.decoding import Decoder, TextFile
from bertsmith.text.documents import Document, ReadOptions, ReadReport, join_names, make_document
from bertsmith.text.inputs import input_size
from bertsmith.text.streams import is_url, open_bytes

MAX_FIELD = 1 << 26
"""Characters in a .csv field; more is a quote that is never closed, not a text."""
BATCH_BYTES = 4 << 20
"""Text of a .parquet batch, about."""
NAMES = 20
RETURN = "\udc0d"
"""Stands for `\\r` inside `RowDecoder`; a lone surrogate, which decoding never gives."""


def count_cells(cells: Sequence[Any]) -> str:
    """`1 cell`, `2 cells`."""
    return f"{len(cells)} cell{'s' * (len(cells) != 1)}"


class MarkedReturns:
    """An incremental codec whose `\\r` come out as RETURN, so that `Decoder` does not make line ends of them."""

    def __init__(self, codec: Any) -> None:
        self.codec, self.getstate, self.setstate = codec, codec.getstate, codec.setstate

    def decode(self, data: bytes, final: bool = False) -> str:
        return self.codec.decode(data, final).replace("\r", RETURN)


class RowDecoder(Decoder):
    """A Decoder for rows: `\\n` and `\\r\\n` end a line; a lone `\\r` stays in its cell, where it splits no row."""

    def __init__(self, path: str, options: ReadOptions, report: ReadReport, offset: int = 0) -> None:
        super().__init__(path, options, report, offset)
        self.codec: Any = MarkedReturns(self.codec)
        self.last = ""  # a RETURN at the end of a block, until it is known whether "\n" follows

    def decode(self, data: bytes, final: bool = False) -> str:
        text, self.last = self.last + super().decode(data, final), ""
        if text.endswith(RETURN):  # at the end of the file it is what is left of a line end
            text, self.last = text[:-1], "" if final else RETURN
        return text.replace(f"{RETURN}\n", "\n").replace(RETURN, "\r") if RETURN in text else text


class RowFile(TextFile):
    """A TextFile of rows. Where its head holds no `\\n` at all, `\\r` is the line end (old Macintosh)."""

    def decoder(self, report: ReadReport, on_invalid: str) -> Decoder:
        if "\n" not in self.head[self.mark :].decode(self.encoding, errors="replace"):
            return super().decoder(report, on_invalid)
        options = ReadOptions(encoding=self.encoding, on_invalid=on_invalid)
        return RowDecoder(self.path, options, report, offset=self.mark)


def missing_column(path: str, column: str, names: Iterable[str], kind: str) -> UserError:
    names = list(names)
    there = f"there are {join_names(names, NAMES)}" if names else "there are none"
    return UserError(
        f"{path}: no {kind} {column!r}; {there}; choose one with --text-column{near_names([column], names)}"
    )


def near_names(missing: Iterable[str], there: Collection[str]) -> str:
    """What ends a message about columns that are `missing`: those that may be meant, as typing errors have them."""
    hints = {name: did_you_mean(name, there, show=repr) for name in missing}
    if len(hints) == 1:
        return "".join(hints.values())
    return "".join(f"{hint.removesuffix('?')} for {name!r}?" for name, hint in hints.items() if hint)


class RepeatedKey(ValueError):
    """A key that stands twice in one JSON object: which of its values is meant, nobody but the writer can say."""

    def __init__(self, key: str, row: dict[str, Any]) -> None:
        super().__init__(f"the key {key!r} is given twice")
        self.key, self.row = key, row


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """json's `object_pairs_hook` that raises RepeatedKey; without it the last value wins and the others are lost."""
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        raise RepeatedKey(next(name for name in row if names.count(name) > 1), row)
    return row


def json_rows(file: TextFile) -> Iterator[tuple[int, dict[str, Any]]]:
    """(line, object) for each line of a .jsonl file; blank, broken, ambiguous and other lines are counted.

    Raises UserError at the end where no line held an object.
    """
    # not strict: a raw tab inside a string is against the letter of JSON and plain to read
    decode = json.JSONDecoder(strict=False, object_pairs_hook=unique_keys).decode
    objects, failure = 0, ""
    for first, lines in file.lines():
        for number, line in enumerate(lines, first):
            if not line or line.isspace():
                file.report.skip("blank line", f"{file.path}:{number}")
                continue
            try:
                row = decode(line[1:] if line[0] == "\ufeff" else line)  # files with byte-order marks, joined
            except RepeatedKey as error:
                failure = failure or f"line {number}: {error}"
                file.report.skip("a key given twice", f"{file.path}:{number}: {error.key!r}")
                continue
            except (ValueError, RecursionError) as error:
                failure = failure or f"line {number}: {error}"
                file.report.skip("broken JSON", f"{file.path}:{number}")
                continue
            if isinstance(row, dict):
                objects += 1
                yield number, row
            else:
                failure = failure or f"line {number} holds {type(row).__name__}"
                file.report.skip("not a JSON object", f"{file.path}:{number}")
    if failure and not objects:
        raise UserError(f"{file.path}: no line is a JSON object ({failure}); one object a line is expected")


def read_jsonl(file: TextFile) -> Iterator[Document]:
    """A document for each line's text. Raises UserError at the end where no line has the text column."""
    column, path, report = file.options.text_column, file.path, file.report
    rows, found = 0, False
    others: dict[str, None] = {}
    for number, row in json_rows(file):
        rows += 1
        text = row.get(column)
        if isinstance(text, str):
            found = True
            if document := make_document(text, path, number, file.options, report):
                yield document
        elif column in row:
            found = True
            report.skip("text is null" if text is None else "text is not a string", f"{path}:{number}")
        else:
            report.skip("no text column", f"{path}:{number}")
            if not found and len(others) <= 10 * NAMES:
                others.update(dict.fromkeys(row))
    if rows and not found:
        raise missing_column(path, column, others, "line has the key")


def csv_rows(file: TextFile, blank: bool = False) -> Iterator[tuple[int, list[str]]]:
    """(line it starts on, cells) for each row of a .csv file, the header too: RFC 4180, quoted line ends and all.

    blank: a blank line, which may be an empty cell where there is one column, is a row of no cells; else it is counted.
    A row with text after a closing quote is counted as broken. Raises UserError where a quote is never closed: all rows
    after it would be one cell.
    """
    # The limit is csv's own module-wide variable, 131,072 at first; raising it harms no other reader.
    csv.field_size_limit(max(csv.field_size_limit(), MAX_FIELD))
    reader = csv.reader((line + "\n" for _, lines in file.lines() for line in lines), strict=True)
    while True:
        start = reader.line_num + 1
        try:
            row = next(reader, None)
        except csv.Error as error:
            if "end of data" in str(error) or "field limit" in str(error):
                raise UserError(
                    f"{file.path}: line {start}: a quote opened in this row is never closed, so that all that follows "
                    "would be one cell; close it, or double the quotes inside cells"
                ) from None
            file.report.skip("broken CSV row", f"{file.path}:{start}")
            continue
        if row is None:
            return
        if not row and not blank:
            file.report.skip("blank line", f"{file.path}:{start}")
            continue
        yield start, row


def tsv_rows(file: TextFile, blank: bool = False) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) for each line of a .tsv file, the header too; a quote is a character like any other.

    blank: as for `csv_rows`.
    """
    for first, lines in file.lines():
        for number, line in enumerate(lines, first):
            if line or blank:
                yield number, line.split("\t") if line else []
            else:
                file.report.skip("blank line", f"{file.path}:{number}")


def find_column(file: TextFile, header: list[str]) -> int:
    """The place of the text column in a header row; UserError where it is missing or there twice."""
    column = file.options.text_column
    if header.count(column) > 1:
        raise UserError(f"{file.path}: {header.count(column)} columns are named {column!r}; rename all but one")
    if column not in header:
        raise missing_column(file.path, column, header, "column")
    return header.index(column)


def read_delimited(file: TextFile, rows: Iterator[tuple[int, list[str]]]) -> Iterator[Document]:
    """A document for each row's text. The first row names the columns; UserError where the text column is not there.

    A row with more or fewer cells than the header is counted, not guessed at: its text may have been cut in two.
    """
    header: list[str] | None = None
    for number, row in rows:
        if header is None:
            header, index = row, find_column(file, row)
        elif len(row) != len(header):
            file.report.skip(f"not as many cells as the header ({len(header)})", f"{file.path}:{number}")
        elif document := make_document(row[index], file.path, number, file.options, file.report):
            yield document


def open_parquet_file(path: str) -> Any:
    """The open pyarrow ParquetFile; UserError where it is damaged."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        # a small buffer makes pyarrow read pages as they are needed, not whole column chunks
        return pq.ParquetFile(open_bytes(path) if is_url(path) else path, buffer_size=1 << 20, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged Parquet file: {error}") from error


def open_parquet(path: str, column: str) -> Any:
    """The open pyarrow ParquetFile; UserError where it is damaged or the column is missing or no text."""
    import pyarrow as pa

    file = open_parquet_file(path)
    names = file.schema_arrow.names
    if names.count(column) != 1:
        file.close()
        raise missing_column(path, column, names, "column")
    kind = file.schema_arrow.field(column).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if not any(
        test(kind)
        for test in (
            pa.types.is_string,
            pa.types.is_large_string,
            pa.types.is_string_view,
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
            pa.types.is_null,
        )
    ):
        file.close()
        raise UserError(f"{path}: column {column!r} holds {kind}, not text; choose another with --text-column")
    return file


def read_parquet(
    path: str,
    options: ReadOptions,
    report: ReadReport,
    on_bytes: Callable[[int], None] | None = None,
    told: int = 0,
) -> Iterator[Document]:
    """A document for each row's text, in batches of about 4 MB of text. Binary columns are decoded by the options.

    told: stored bytes that `on_bytes` has been told of already; with the last row group it knows of the whole file.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    file = open_parquet(path, options.text_column)
    try:
        number, rows_done = 1, 0
        stored = input_size([path]) - told
        for group in range(file.num_row_groups):
            about = file.metadata.row_group(group)
            if on_bytes:
                before, rows_done = rows_done, rows_done + about.num_rows
                total = max(file.metadata.num_rows, 1)
                on_bytes(stored * rows_done // total - stored * before // total)
            for batch in parquet_batches(file, group, [options.text_column]):
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                elif pa.types.is_string_view(column.type) or pa.types.is_binary_view(column.type):
                    # few of pyarrow's functions take views yet
                    column = column.cast(pa.large_string() if column.type == pa.string_view() else pa.large_binary())
                if not pa.types.is_null(column.type):
                    report.bytes += pc.sum(pc.binary_length(column)).as_py() or 0
                for text in column_values(column, path, number, options, report):
                    if text is None:
                        report.skip("text is null", f"{path}:{number}")
                    elif document := make_document(text, path, number, options, report):
                        yield document
                    number += 1
    except (pa.ArrowException, OSError) as error:
        raise UserError(f"{path}: damaged Parquet file (after row {number - 1:,}): {error}") from error
    finally:
        file.close()


def parquet_batches(file: Any, group: int, columns: Sequence[str]) -> Iterator[Any]:
    """The record batches of a row group, about BATCH_BYTES of these columns each."""
    about = file.metadata.row_group(group)
    chunks = [about.column(i) for i in range(about.num_columns)]
    # nested columns are stored as one chunk a leaf: answers.text.list.element
    size = sum(c.total_uncompressed_size for c in chunks if (c.path_in_schema + ".").startswith(wanted_paths(columns)))
    rows = int(BATCH_BYTES * about.num_rows / max(size, 1))
    yield from file.iter_batches(
        batch_size=max(1, min(rows, 8192)), row_groups=[group], columns=list(columns), use_threads=False
    )


def wanted_paths(columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"{column}." for column in columns)


def parquet_rows(
    path: str,
    columns: Sequence[str],
    options: ReadOptions,
    report: ReadReport,
    convert: Callable[[str, Any, int], Iterable[Any]] | None = None,
) -> Iterator[tuple[int, dict[str, Any]]]:
    """(1-based row, cells as Python values) for each row of a .parquet file; text and binary cells are str.

    `convert`: makes other cells of an Arrow array, told its column's name and its first row. Raises UserError
    where the file is damaged; that it has the columns is for the caller to see to.
    """
    import pyarrow as pa

    file = open_parquet_file(path)
    number = 1
    try:
        for group in range(file.num_row_groups):
            for batch in parquet_batches(file, group, columns):
                cells = [
                    convert(name, batch.column(name), number)
                    if convert
                    else cell_values(batch.column(name), path, number, options, report)
                    for name in columns
                ]
                for values in zip(*cells, strict=True) if columns else [()] * batch.num_rows:
                    yield number, dict(zip(columns, values, strict=True))
                    number += 1
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: damaged Parquet file (after row {number - 1:,}): {error}") from error
    finally:
        file.close()


def cell_values(column: Any, path: str, first: int, options: ReadOptions, report: ReadReport) -> Iterator[Any]:
    """The values of an Arrow array; text that is not UTF-8 is decoded with a count, as `column_values` does."""
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    kinds = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary, pa.types.is_large_binary)
    if any(test(column.type) for test in kinds):
        return column_values(column, path, first, options, report)
    return iter(column.to_pylist())


def column_values(column: Any, path: str, first: int, options: ReadOptions, report: ReadReport) -> Iterator[str | None]:
    """The texts of an Arrow array; binary cells, and strings that are no UTF-8 after all, are decoded with a count."""
    import pyarrow as pa

    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    if is_text or pa.types.is_null(column.type):
        try:
            yield from column.to_pylist()
            return
        except UnicodeDecodeError:
            column = column.cast(pa.large_binary())
            options = ReadOptions(on_invalid=options.on_invalid)
    for number, value in enumerate(column.to_pylist(), first):
        if value is None or isinstance(value, str):
            yield value
            continue
        decoder = Decoder(path, options, report)
        decoder.line = number
        yield decoder.decode(value, final=True)
