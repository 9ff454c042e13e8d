"""The user's own files (.csv, .tsv, .jsonl, .parquet, compressed or not) → rows, and the examples of each task.

Rows in = rows out, in order: a row that cannot be used is an error that names file, line and column. Cells of .csv and
.tsv are text as typed ("NA", "null" and "01" mean nothing special), .csv by RFC 4180, .tsv without any quoting.
"""

import itertools
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from bertsmith.errors import UserError, one_of
from bertsmith.progress import say
from bertsmith.tasks.examples import Label, NoLabels, TextExample, replaced_bytes
from bertsmith.text.documents import REPLACEMENT, SURROGATES, ReadOptions, ReadReport, join_names
from bertsmith.text.readers import check_parquet, detect_kind
from bertsmith.text.rows import ROW_FORMATS, EveryRow
from bertsmith.text.tables import (
    RowFile,
    count_cells,
    csv_rows,
    json_rows,
    near_names,
    open_parquet_file,
    parquet_rows,
    tsv_rows,
)

TEXT_KINDS = ("classify", "pairs", "regress", "multilabel")
PAIR_COLUMNS = ("sentence1", "sentence2")
COLUMN_FLAGS = "name yours with --text-column, --text-pair-column or --label-column"
NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*", re.ASCII)
LONGEST_NAME = 40
FEW = 5


class StrictReport(EveryRow):
    """Counts what reading replaced; lets no row be left out."""

    advice = "every line must be a row; mend it or take it out"

    def settle(self, report: ReadReport | None, encoding: str) -> None:
        """Hand the counts to the caller's report; where there is none, say them."""
        if report is not None:
            report.merge(self)
            return
        if self.invalid_bytes:
            say(f"warning: {replaced_bytes(self.invalid_bytes, encoding, self.invalid_places[0])}")
        for reason, count in self.skipped.items():
            first = next(place for place in self.skipped_places if place.endswith(f": {reason}"))
            say(f"warning: {count:,} × {first}")


class Problems:
    """Rows that cannot be used: the first few by name, all by number, in one message."""

    def __init__(self, advice: str) -> None:
        self.advice, self.named, self.count = advice, list[str](), 0

    def add(self, place: str, what: str) -> None:
        self.count += 1
        if len(self.named) < FEW:
            self.named.append(f"{place}: {what}")

    def __bool__(self) -> bool:
        return self.count > 0

    def check(self) -> None:
        """Raise UserError if there was any."""
        if self.count:
            more = f"; and {self.count - len(self.named):,} more rows like these" if self.count > FEW else ""
            raise UserError(f"{'; '.join(self.named)}{more}; {self.advice}")


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row: the 1-based line it starts on (.parquet: row), and the wanted cells that it has, by column."""

    line: int
    cells: dict[str, Any]


class Table:
    """One table, open: `columns` (of .jsonl the first line's keys), then `rows` once, from the first to the last.

    `advice`: what to do where a column is absent. Raises UserError where the file cannot be read or is no table, or its
    first row names a column twice.
    """

    def __init__(
        self, path: str, encoding: str = "utf-8", report: ReadReport | None = None, advice: str = COLUMN_FLAGS
    ) -> None:
        self.path, self.report, self.advice, self.strict = path, report, advice, StrictReport()
        self.mended = StrictReport()  # of the cells that were asked for, once all bytes are text
        self.file = RowFile(path, ReadOptions(encoding=encoding), self.strict)
        try:
            self.kind = detect_kind(self.file)
            if not self.file.head[self.file.mark :]:
                raise UserError(f"{path}: empty file; rows are expected")
            if self.kind not in ROW_FORMATS:
                raise UserError(f"{path}: is in {self.kind}'s format; give a .csv, .tsv, .jsonl or .parquet file")
            self.columns = self.find_columns()
        except BaseException:
            self.close()
            raise

    def find_columns(self) -> list[str]:
        """The names that the first row gives; the other rows stand ready in `self.lines` or `self.objects`."""
        if self.kind == "parquet":
            check_parquet(self.file)
            with open_parquet_file(self.path) as file:
                columns = list(file.schema_arrow.names)
        elif self.kind == "jsonl":
            objects = json_rows(self.file)
            first = list(itertools.islice(objects, 1))
            self.objects = itertools.chain(first, objects)
            return list(first[0][1]) if first else []
        else:
            self.lines = (csv_rows if self.kind == "csv" else tsv_rows)(self.file, blank=True)
            columns = next((cells for _, cells in self.lines if cells), [])
        for name in columns:
            if name and (count := columns.count(name)) > 1:  # spreadsheets end rows with cells that have no name
                raise UserError(f"{self.path}:1: {count} columns are named {shorten(name)!r}; rename all but one")
        return columns

    def require(
        self, columns: Sequence[str], there: Sequence[str] | None = None, line: int = 1, label: str | None = None
    ) -> None:
        """UserError, which lists what is there, unless the first row has all of `columns` and `label`, if it is named;
        NoLabels where that alone is missing."""
        there = self.columns if there is None else there
        missing = [name for name in (*columns, label) if name is not None and name not in there]
        if not missing:
            return
        listed = join_names(shorten(name) for name in there) or "none"
        what = "key" if self.kind == "jsonl" else "column"
        hint = "" if self.kind in ("jsonl", "parquet") else " in the first row, which must name the columns"
        self.check_separator(missing)
        raise (NoLabels if missing == [label] else UserError)(
            f"{self.path}:{line}: no {what}{'s' * (len(missing) > 1)} {join_names(missing)}{hint}; there are {listed}; "
            f"{self.advice}{near_names(missing, there)}"
        )

    def check_separator(self, missing: Sequence[str]) -> None:
        """UserError where columns are `missing` because another character stands between them than the name says."""
        known = {"csv": (";\t|", "commas", "tsv"), "tsv": (";,|", "tabs", "csv")}
        marks, right, other = known.get(self.kind, ("", "", ""))
        header, whole = ("," if self.kind == "csv" else "\t").join(self.columns), len(self.columns) == 1
        for mark in marks:
            names = [name.strip() for name in header.split(mark)]
            # names looked for are sure; without a header a text stands there, and blanks follow its marks
            if not set(missing).isdisjoint(names) or (whole and re.search(re.escape(mark) + r"(?=\S)", header)):
                found = f"looks separated by {mark!r}, and .{self.kind} files are split at {right}"
                raise UserError(f"{self.path}:1: {found}: save it with {right}, or as .{other}")

    def rows(self, columns: Sequence[str], optional: Sequence[str] = ()) -> Iterator[TableRow]:
        """Every row with its cells of `columns`, which must be there, and of those of `optional` that are."""
        if self.kind == "jsonl":
            for line, row in self.objects:
                self.require(columns, list(row), line)
                place = f"{self.path}:{line}"
                names = (name for name in (*columns, *optional) if name in row)
                try:
                    cells = {name: clean(row[name], place, self.mended) for name in names}
                except RecursionError:
                    raise UserError(f"{place}: lists or objects are nested too deeply; take the line out") from None
                yield TableRow(line, cells)
            return
        self.require(columns)
        wanted = list(dict.fromkeys([*columns, *(name for name in optional if name in self.columns)]))
        if self.kind == "parquet":
            for line, cells in parquet_rows(self.path, wanted, self.file.options, self.strict):
                yield TableRow(line, cells)
            return
        width = len(self.columns)
        places = [(name, self.columns.index(name)) for name in wanted]
        for line, values in drop_blank_lines(self.lines, width):
            if len(values) != width:
                csv = self.kind == "csv"
                advice = f"a {'comma' if csv else 'tab'} is missing"
                if len(values) > width:
                    advice = "put quotes around cells that hold commas" if csv else "take out stray tabs"
                raise UserError(
                    f"{self.path}:{line}: {count_cells(values)} where the first row names {width} "
                    f"column{'s' * (width != 1)}; {advice}"
                )
            yield TableRow(line, {name: values[index] for name, index in places})

    def close(self) -> None:
        self.file.close()
        self.strict.merge(self.mended)
        self.strict.settle(self.report, self.file.encoding)
        self.strict, self.mended = StrictReport(), StrictReport()

    def __enter__(self) -> "Table":
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def shorten(name: str) -> str:
    """A cell for a message: without a header the first row holds whole texts."""
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}…"


def clean(value: Any, place: str, report: ReadReport) -> Any:
    """A JSON value whose lone surrogates (halves of characters), in keys too, are made U+FFFD and counted."""
    if isinstance(value, str) and not value.isascii():
        value, surrogates = SURROGATES.subn(REPLACEMENT, value)
        if surrogates:
            report.invalid(6 * surrogates, place)
    elif isinstance(value, list):
        return [clean(item, place, report) for item in value]
    elif isinstance(value, dict):
        mended = {clean(key, place, report): clean(item, place, report) for key, item in value.items()}
        if len(mended) < len(value):
            raise UserError(f"{place}: keys that differ in halves of characters (lone surrogates) only; mend the line")
        return mended
    return value


def drop_blank_lines(lines: Iterator[tuple[int, list[str]]], width: int) -> Iterator[tuple[int, list[str]]]:
    """A blank line is no row; where there is one column only, it is one with an empty cell unless no row follows."""
    blank: list[int] = []
    for line, values in lines:
        if values:
            yield from ((number, [""]) for number in blank)
            blank = []
            yield line, values
        elif width == 1:
            blank.append(line)


def read_table(
    path: str,
    columns: Sequence[str],
    optional: Sequence[str] = (),
    encoding: str = "utf-8",
    report: ReadReport | None = None,
) -> Iterator[TableRow]:
    """Every row of a file or fsspec URL, in order, with flat memory; `report` counts invalid bytes.

    Raises UserError (file, line, column and the columns there are) for a broken row, one with more or fewer cells than
    the first, a missing column, a name that stands twice in the first row.
    """
    with Table(path, encoding, report) as table:
        yield from table.rows(columns, optional)


def kind_of(value: Any) -> str:
    """What a JSON or Parquet value is, for a message."""
    kinds = {"str": "text", "int": "a number", "float": "a number", "dict": "an object", "NoneType": "nothing"}
    return kinds.get(name := type(value).__name__, f"a {name}")


def is_missing(value: Any) -> bool:
    """Whether a cell says nothing: JSON's null, or Parquet's not-a-number where a number is missing."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def as_label(value: Any) -> str:
    """A class name: text as typed, numbers and booleans as JSON writes them. ValueError for anything else."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float):
        return json.dumps(value)
    raise ValueError(f"holds {kind_of(value)}, not one label")


def read_label(kind: str, value: Any, separator: str) -> Label | None:
    """The label in a cell, None where there is none; ValueError (what the cell holds) where it cannot be one."""
    if is_missing(value):
        return None
    if kind == "multilabel":
        if isinstance(value, str):
            value = value.split(separator)
        elif not isinstance(value, list):
            raise ValueError(f"holds {kind_of(value)}, not a list of labels")
        names = (as_label(item).strip() for item in value)
        return tuple(dict.fromkeys(name for name in names if name))
    if isinstance(value, str) and not value.strip():
        return None
    if kind != "regress":
        return as_label(value)
    if isinstance(value, str):
        number = float(value) if NUMBER.fullmatch(value) else math.nan
    else:
        number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not math.isfinite(number):
        raise ValueError(f"holds {shorten(str(value))!r}, not a finite number")
    return number


def read_text(row: TableRow, column: str, allow_empty: bool) -> str:
    """The text in a cell; ValueError (what the cell holds) where it is none, or empty and that is not allowed."""
    if column not in row.cells:
        raise ValueError(f"no {column!r}")
    value = row.cells[column]
    if value is not None and not isinstance(value, str):
        raise ValueError(f"column {column!r} holds {kind_of(value)}, not text")
    if not allow_empty and (not value or value.isspace()):
        raise ValueError(f"column {column!r} is empty")
    return value or ""


def find_text_columns(
    there: Sequence[str], kind: str, text_column: str | None, pair_column: str | None
) -> tuple[str, str | None]:
    """The columns of the text and, where there is one, of its pair: those named, else the defaults.

    The first text beside a pair column that is named: `sentence1`, or where that is absent `text`, or `sentence`.
    """
    default = "sentence" if "sentence" in there and "text" not in there else "text"
    both = kind == "pairs" or pair_column is not None
    if kind == "regress" and text_column is None and default not in there:
        both = both or set(PAIR_COLUMNS) <= set(there)
    if not both:
        return text_column or default, None
    first, second = PAIR_COLUMNS
    usual = (first, "text", "sentence") if pair_column else (first,)
    first = next((name for name in usual if name in there and name != pair_column), first)
    return text_column or first, pair_column or second


def check_label_column(path: str, label: str, texts: Sequence[str]) -> None:
    """Raise UserError where the column of the label is that of a text: the answer would be in the question."""
    if label in texts:
        raise UserError(
            f"{path}: column {shorten(label)!r} is to be read both as text and as label; name two different columns "
            "with --text-column and --label-column"
        )


def read_text_examples(
    path: str,
    kind: str,
    text_column: str | None = None,
    pair_column: str | None = None,
    label_column: str | None = None,
    labelled: bool | None = None,
    label_separator: str = ";",
    encoding: str = "utf-8",
    allow_empty: bool = False,
    report: ReadReport | None = None,
) -> Iterator[TextExample]:
    """The examples of a table for `classify`, `pairs`, `regress` or `multilabel`, in order; the id is the row from 0.

    Columns not named are `text` or else `sentence`; with a pair (`pairs`, a named pair column, or `regress` on a table
    that has them and no text) `sentence1` and `sentence2`; `label`, for multilabel `labels`.

    labelled: True, every row must have a label; False, labels are not looked at; None, a label is used where there is
    one. Only an absent column, an empty cell and null are none: "-1" and "?" are labels like any other. A multilabel
    cell is a JSON list or names between `label_separator`; an empty one says that no label applies.
    allow_empty: let texts be empty (prediction).

    Raises UserError as `read_table` does, and at the end of the file one that names the first five unusable rows.
    """
    one_of("kind", kind, TEXT_KINDS)
    label = label_column or ("labels" if kind == "multilabel" else "label")
    problems = Problems(f"every row needs a text{' and a label' if labelled else ''}: fill in or take out those rows")
    with Table(path, encoding, report) as table:
        text, pair = find_text_columns(table.columns, kind, text_column, pair_column)
        columns = [text, pair] if pair else [text]
        if labelled is not False:
            check_label_column(path, label, columns)
        table.require(columns, label=label if labelled else None)
        for index, row in enumerate(table.rows((), [*columns, label])):
            place = f"{path}:{row.line}"
            try:
                texts = [read_text(row, column, allow_empty) for column in columns]
            except ValueError as error:
                problems.add(place, str(error))
                continue
            try:
                value = None if labelled is False else read_label(kind, row.cells.get(label), label_separator)
            except ValueError as error:
                problems.add(place, f"column {label!r} {error}")
                continue
            if labelled and value is None:
                problems.add(place, f"column {label!r} is empty" if label in row.cells else f"no {label!r}")
            elif not problems:
                yield TextExample(place, str(index), texts[0], texts[1] if pair else None, value)
    problems.check()


def read_list(row: TableRow, column: str) -> tuple[str, ...]:
    if column not in row.cells:
        raise ValueError(f"no {column!r}")
    value = row.cells[column]
    if not isinstance(value, list):
        raise ValueError(f"column {column!r} holds {kind_of(value)}, not a list")
    for number, item in enumerate(value):
        if not isinstance(item, str):
            raise ValueError(f"column {column!r} item {number} is {json.dumps(item, default=str)}, not text")
    return tuple(value)
