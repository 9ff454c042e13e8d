"""Files of N-way choices (SWAG's .csv, CODAH's .tsv, the user's own tables) → ChoiceExample, a row each.

SWAG's second sentence is cut in two: its beginning is put before each ending, as the paper does (section 4.4), so that
the model is shown the first sentence as A and a whole continuation as B.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile
from typing import Any

from bertsmith.errors import UserError
from bertsmith.tasks.examples import ChoiceExample
from bertsmith.tasks.table import (
    Problems,
    StrictReport,
    Table,
    TableRow,
    check_label_column,
    is_missing,
    kind_of,
    read_text,
    shorten,
)
from bertsmith.text.documents import ReadOptions, ReadReport, join_names
from bertsmith.text.readers import detect_kind
from bertsmith.text.tables import RowFile, count_cells, tsv_rows

SWAG_ENDINGS = ("ending0", "ending1", "ending2", "ending3")
SWAG_COLUMNS = ("sent1", "sent2", *SWAG_ENDINGS)
CODAH_CELLS = 7  # category, prompt, four candidates, number of the right one
CONTEXT_COLUMNS = ("context", "sentence1", "text")

ReadRow = Callable[[TableRow], tuple[str, tuple[str, ...], Any]]
"""A row → its context, its choices, its label's cell (None: there is none). Raises ValueError (what is wrong)."""


def read_choices(
    path: str,
    text_column: str | None = None,
    label_column: str | None = None,
    labelled: bool | None = None,
    encoding: str = "utf-8",
    allow_empty: bool = False,
    report: ReadReport | None = None,
) -> Iterator[ChoiceExample]:
    """The examples of a file of choices, in order; the id is the row from 0.

    SWAG is known by its columns, CODAH (a .tsv without a header) by its first row; any other file, and any whose
    context `text_column` names, is read as `read_choice_examples` does. `labelled`, `allow_empty`, errors: as there.
    """
    if text_column is None and is_codah(path, encoding):
        yield from read_codah(path, labelled, encoding, allow_empty, report)
        return
    if text_column is None:
        with Table(path, encoding, ReadReport()) as table:
            columns = table.columns
        if {"distractor-0", "gold-ending"} <= set(columns):
            raise UserError(
                f"{path}:1: is one of SWAG's *_full.csv, which keep the right ending apart; give train.csv or val.csv"
            )
        if set(SWAG_COLUMNS) <= set(columns):
            yield from read_swag(path, label_column or "label", labelled, encoding, allow_empty, report)
            return
    yield from read_choice_examples(path, text_column, label_column, labelled, encoding, allow_empty, report)


def read_choice_examples(
    path: str,
    context_column: str | None = None,
    label_column: str | None = None,
    labelled: bool | None = None,
    encoding: str = "utf-8",
    allow_empty: bool = False,
    report: ReadReport | None = None,
) -> Iterator[ChoiceExample]:
    """The examples of one's own table: a context, `choices` (a list) or columns `choice0` `choice1` …, a label.

    The context is in `context`, else `sentence1`, else `text`; columns may also be called `ending0` …. Empty cells
    after a row's last choice are none, so rows may differ in number; two are needed. The label is the number of the
    right choice, from 0, or its exact text. `labelled`, `allow_empty`, errors: as for `table.read_text_examples`.
    """
    label = label_column or "label"
    with Table(path, encoding, report) as table:
        context = context_column or next((name for name in CONTEXT_COLUMNS if name in table.columns), "context")
        columns = find_choice_columns(table)

        def read_row(row: TableRow) -> tuple[str, tuple[str, ...], Any]:
            return read_text(row, context, allow_empty), listed_choices(row, columns, allow_empty), row.cells.get(label)

        if labelled is not False:
            check_label_column(path, label, [context, *columns])
        table.require([context, *columns], label=label if labelled else None)
        yield from make_examples(path, table.rows((), [context, *columns, label]), read_row, labelled, label)


def read_swag(
    path: str,
    label: str,
    labelled: bool | None,
    encoding: str = "utf-8",
    allow_empty: bool = False,
    report: ReadReport | None = None,
) -> Iterator[ChoiceExample]:
    """SWAG's train.csv, val.csv and test.csv (no label column): sent1 is the context, sent2 + an ending a choice."""

    def read_row(row: TableRow) -> tuple[str, tuple[str, ...], Any]:
        begun = read_text(row, "sent2", allow_empty=True)
        choices = (read_text(row, name, allow_empty) for name in SWAG_ENDINGS)
        return (
            read_text(row, "sent1", allow_empty),
            tuple(f"{begun} {ending}" if begun else ending for ending in choices),
            as_number(row.cells.get(label)),
        )

    with Table(path, encoding, report) as table:
        table.require(SWAG_COLUMNS, label=label if labelled else None)
        yield from make_examples(path, table.rows((), [*SWAG_COLUMNS, label]), read_row, labelled, label)


def is_codah(path: str, encoding: str) -> bool:
    """Whether the first row is CODAH's: seven cells between tabs, of which the last is the number of a candidate."""
    file = RowFile(path, ReadOptions(encoding=encoding), ReadReport())
    try:
        if detect_kind(file) not in ("tsv", "text") or not file.head[file.mark :]:
            return False
        first = file.head_text.lstrip("\n").split("\n", 1)[0].split("\t")
        return len(first) == CODAH_CELLS and re.fullmatch("[0-3]", first[-1]) is not None
    finally:
        file.close()


def read_codah(
    path: str,
    labelled: bool | None,
    encoding: str = "utf-8",
    allow_empty: bool = False,
    report: ReadReport | None = None,
) -> Iterator[ChoiceExample]:
    """CODAH's .tsv, no header: category, prompt (the context), four candidates, the number of the right one."""
    names = [str(number) for number in range(1, CODAH_CELLS + 1)]
    strict = StrictReport()
    file = RowFile(path, ReadOptions(encoding=encoding), strict)

    def rows() -> Iterator[TableRow]:
        for line, cells in tsv_rows(file):
            if len(cells) != CODAH_CELLS:
                raise UserError(f"{path}:{line}: {count_cells(cells)} where CODAH has {CODAH_CELLS}; mend the row")
            yield TableRow(line, dict(zip(names, cells, strict=True)))

    def read_row(row: TableRow) -> tuple[str, tuple[str, ...], Any]:
        texts = [read_text(row, name, allow_empty) for name in names[1:-1]]
        return texts[0], tuple(texts[1:]), as_number(row.cells[names[-1]])

    try:
        yield from make_examples(path, rows(), read_row, labelled, names[-1])
    finally:
        file.close()
        strict.settle(report, file.encoding)


def make_examples(
    path: str, rows: Iterator[TableRow], read_row: ReadRow, labelled: bool | None, label: str
) -> Iterator[ChoiceExample]:
    """An example a row. Raises UserError at the end, naming the first unusable rows; after one, none is given."""
    problems = Problems(f"every row needs a context, two choices or more{' and a label' if labelled else ''}")
    for index, row in enumerate(rows):
        place = f"{path}:{row.line}"
        try:
            context, choices, cell = read_row(row)
            answer = None
            if labelled is not False and not is_missing(cell) and cell != "":
                answer = find_choice(cell, choices, label)
            elif labelled:
                raise ValueError(f"column {label!r} is empty" if label in row.cells else f"no {label!r}")
        except ValueError as error:
            problems.add(place, str(error))
            continue
        if not problems:
            yield ChoiceExample(place, str(index), context, choices, answer)
    problems.check()


def find_choice_columns(table: Table) -> list[str]:
    """`["choices"]`, or the numbered columns; UserError where there are neither."""
    if "choices" in table.columns:
        return ["choices"]
    for name in ("choice", "ending"):
        columns = list(takewhile(table.columns.__contains__, (f"{name}{n}" for n in range(len(table.columns)))))
        if len(columns) > 1:
            return columns
    table.check_separator(["choices", "choice0", "ending0"])
    raise UserError(
        f"{table.path}:1: no choices: a column 'choices' that holds lists, or columns 'choice0', 'choice1' and so on "
        f"are needed; there are {join_names(map(shorten, table.columns)) or 'none'}"
    )


def listed_choices(row: TableRow, columns: Sequence[str], allow_empty: bool) -> tuple[str, ...]:
    """The choices of a row; ValueError (what is wrong) where they are fewer than two or no texts."""
    if list(columns) == ["choices"]:
        found = row.cells.get("choices")
        if not isinstance(found, list):
            raise ValueError("no 'choices'" if found is None else f"'choices' holds {kind_of(found)}, not a list")
        cells = {f"choices[{number}]": choice for number, choice in enumerate(found)}
    else:
        cells = {column: row.cells.get(column) for column in columns}
        while cells and not cells[next(reversed(cells))]:
            cells.popitem()
    if len(cells) < 2:
        raise ValueError(f"{len(cells)} choice{'s' * (len(cells) != 1)}, where two are needed")
    return tuple(read_text(TableRow(row.line, cells), name, allow_empty) for name in cells)


def as_number(cell: Any) -> Any:
    """A label that can only be a choice's number, where it is one: candidates of CODAH are numbers themselves."""
    return int(cell) if isinstance(cell, str) and re.fullmatch("[0-9]{1,9}", cell) else cell


def find_choice(value: Any, choices: Sequence[str], column: str) -> int:
    """The number of the choice that a label cell means; ValueError where it means none, or two."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    if isinstance(value, str):
        number = int(value) if re.fullmatch(r"\s*\d{1,9}\s*", value, re.ASCII) else None
        if value in choices and number != choices.index(value):
            if number is not None and number < len(choices):
                raise ValueError(
                    f"column {column!r} holds {value!r}, the number of one choice and the text of another; only .jsonl "
                    "can tell a number from a text"
                )
            number = choices.index(value)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(choices):
        raise ValueError(
            f"column {column!r} holds {shorten(str(value))!r}, which is no choice: they are 0 to {len(choices) - 1}"
        )
    return number
