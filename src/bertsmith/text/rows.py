"""A file of texts, one a row: .txt (a text a line), .jsonl, .csv, .tsv or .parquet, compressed or not.

What commands that answer text by text read (fill). Rows in = rows out: a row without a text is an error that names its
line, never a row less. A blank text is a text like any other: a blank line of .txt, an empty cell, "" in .jsonl. A
blank line is nothing in the other formats.
"""

from collections.abc import Iterator

from bertsmith.errors import UserError
from bertsmith.progress import say
from bertsmith.text.decoding import TextFile
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.readers import detect_kind, read_documents
from bertsmith.text.tables import RowFile

ROW_FORMATS = ("jsonl", "csv", "tsv", "parquet")


class EveryRow(ReadReport):
    """A report that lets nothing be left out: UserError for whatever a reader would skip, but for blank lines."""

    keep_blank = True
    advice = "every row must hold a text (--text-column names its column)"

    def skip(self, reason: str, place: str) -> None:
        if reason != "blank line":
            raise UserError(f"{place}: {reason}; {self.advice}")


def read_rows(path: str, options: ReadOptions, report: ReadReport | None = None) -> Iterator[tuple[int, str]]:
    """(1-based line or row, text) of every row of a file or fsspec URL, in order; `report` counts invalid bytes.

    Raises UserError where the file cannot be read, is of another kind, or a row holds no text.
    """
    strict = EveryRow()
    try:
        file = TextFile(path, options, strict)
        try:
            kind = detect_kind(file)
            if not file.head[file.mark :]:
                raise UserError(f"{path}: empty file; a text a row is expected")
            if kind == "text":
                for first, lines in file.lines():
                    yield from enumerate(lines, first)
                return
        finally:
            file.close()
        if kind not in ROW_FORMATS:
            raise UserError(f"{path}: is in {kind}'s format; give a .txt, .jsonl, .csv, .tsv or .parquet file")
        for document in read_documents(path, options, strict, open_file=RowFile):
            yield document.line, document.text
    finally:
        if report is not None:
            report.merge(strict)


def read_texts(path: str, text_column: str = "text", encoding: str = "utf-8") -> tuple[list[str], list[str]]:
    """All texts of a file, and for each its place as messages name it (`file:line`). Raises UserError as `read_rows`.

    Bytes that are not in the encoding are replaced, and said.
    """
    report = ReadReport()
    rows = list(read_rows(path, ReadOptions(text_column=text_column, encoding=encoding), report))
    if report.invalid_bytes:
        say(f"warning: {report.invalid_bytes:,} bytes are not {encoding}, first at {report.invalid_places[0]}")
    return [text for _, text in rows], [f"{path}:{line}" for line, _ in rows]
