"""Files → documents: the one way text gets in. `read_documents` tells a file's kind and streams what it holds.

Content decides first (compression, Parquet, MediaWiki, WikiExtractor), then the name's inner ending (`x.jsonl.gz` is
.jsonl); anything else that is text is plain text. Each file is read whole, or refused with its name and the reason.
"""

import json
import os
from collections.abc import Callable, Iterator, Sequence

from bertsmith.errors import UserError
from bertsmith.text.decoding import MEDIAWIKI, TextFile, find_cut
from bertsmith.text.documents import MAX_DOCUMENT, Document, ReadOptions, ReadReport, make_document
from bertsmith.text.inputs import expand_inputs, input_size
from bertsmith.text.streams import is_url
from bertsmith.text.tables import (
    csv_rows,
    find_column,
    open_parquet,
    read_delimited,
    read_jsonl,
    read_parquet,
    tsv_rows,
)
from bertsmith.text.wiki import DOC_START, read_mediawiki, read_wikiextractor

__all__ = [
    "Document",
    "ReadOptions",
    "ReadReport",
    "check_inputs",
    "expand_inputs",
    "input_size",
    "read_documents",
]

COMPRESSED_SUFFIXES = (".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd")
SUFFIX_KINDS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".tab": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
MOST_PROBLEMS = 20


def detect_kind(file: TextFile) -> str:
    """ "parquet", "mediawiki", "wikiextractor", "jsonl", "csv", "tsv" or "text"."""
    if file.is_parquet:
        return "parquet"
    if MEDIAWIKI.match(file.head_text):
        return "mediawiki"
    if DOC_START.match(file.head_text.lstrip()):
        return "wikiextractor"
    name = os.path.basename(file.path.split("?")[0] if is_url(file.path) else file.path).lower()
    stem, suffix = os.path.splitext(name)
    while suffix in COMPRESSED_SUFFIXES:
        stem, suffix = os.path.splitext(stem)
    if suffix in SUFFIX_KINDS:
        return SUFFIX_KINDS[suffix]
    return "jsonl" if starts_with_json_line(file.head_text) else "text"


def starts_with_json_line(text: str) -> bool:
    """Whether the first line is a whole JSON object (`part-00000`, WikiExtractor's --json files have no ending)."""
    line = text.lstrip().split("\n", 1)[0]
    if not line.startswith("{"):
        return False
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def read_documents(
    path: str,
    options: ReadOptions,
    report: ReadReport,
    on_bytes: Callable[[int], None] | None = None,
    open_file: Callable[..., TextFile] = TextFile,
) -> Iterator[Document]:
    """Stream the documents of one file or URL; memory does not grow with the file, only with a .jsonl line or a cell.

    report: everything replaced or left out is counted there. on_bytes: told the stored bytes as they are read.
    open_file: what tells lines, RowFile where they are rows. Raises UserError (file, line, reason) where the file is
    missing, is no text, is in another encoding, is cut off or damaged, or has no text column. Where that shows only on
    the way, documents before it have been given: the caller stops, and does not pass them off as the whole.
    """
    file = open_file(path, options, report, on_bytes)
    try:
        report.files += 1
        if not file.head[file.mark :]:
            report.bytes += len(file.head)
            report.skip("empty file", path)
            return
        kind = detect_kind(file)
        if kind == "parquet":
            check_parquet(file)
            yield from read_parquet(path, options, report, on_bytes, told=file.source.taken)
        elif kind == "mediawiki":
            yield from read_mediawiki(file)
        elif kind == "wikiextractor":
            yield from read_wikiextractor(file)
        elif kind == "jsonl":
            yield from read_jsonl(file)
        elif kind == "csv":
            yield from read_delimited(file, csv_rows(file))
        elif kind == "tsv":
            yield from read_delimited(file, tsv_rows(file))
        elif options.documents == "blank-line":
            yield from read_blank_line_documents(file)
        else:
            yield from read_whole_file(file)
    finally:
        file.close()


def check_parquet(file: TextFile) -> None:
    if not file.is_parquet:
        raise UserError(f"{file.path}: named .parquet, but it is no Parquet file (its first bytes are not PAR1)")
    if file.compression:
        raise UserError(f"{file.path}: a Parquet file inside {file.compression}; decompress it first")


def read_whole_file(file: TextFile) -> Iterator[Document]:
    """The file's text as one document; one of more than MAX_DOCUMENT characters goes on in a next document."""
    parts: list[str] = []
    length, line = 0, 1
    for block in file.blocks():
        parts.append(block)
        length += len(block)
        while length > MAX_DOCUMENT:
            text = "".join(parts)
            cut = find_cut(text, MAX_DOCUMENT)
            if document := make_document(text[:cut], file.path, line, file.options, file.report):
                yield document
            file.report.continued_documents += 1
            line += text.count("\n", 0, cut)
            parts, length = [text[cut:]], length - cut
    if document := make_document("".join(parts), file.path, line, file.options, file.report):
        yield document


def read_blank_line_documents(file: TextFile) -> Iterator[Document]:
    """Google's layout (create_pretraining_data.py): blank lines end documents, the lines between are their text."""
    lines: list[str] = []
    length, start = 0, 1

    def finish() -> Iterator[Document]:
        if lines and (document := make_document("\n".join(lines), file.path, start, file.options, file.report)):
            yield document
        lines.clear()

    for first, batch in file.lines(longest=MAX_DOCUMENT):
        for number, line in enumerate(batch, first):
            if not line or line.isspace():
                yield from finish()
                length = 0
                continue
            if not lines:
                start = number
            lines.append(line)
            length += len(line) + 1
            if length > MAX_DOCUMENT:
                file.report.continued_documents += 1
                yield from finish()
                length = 0
    yield from finish()


def check_inputs(paths: Sequence[str], options: ReadOptions) -> None:
    """Look at the start of every local file before work begins: one UserError names all that would be refused.

    What shows only further on (a cut stream, a key no line has) is left to reading.
    """
    problems = []
    for path in paths:
        if is_url(path):
            continue  # opening each would be a connection each
        try:
            file = TextFile(path, options, ReadReport())
            try:
                kind = detect_kind(file)
                if kind == "parquet" and file.head:
                    check_parquet(file)
                    open_parquet(path, options.text_column).close()
                elif file.head[file.mark :]:
                    file.refuse_if_not_text()
                    if kind in ("csv", "tsv"):
                        for _, header in csv_rows(file) if kind == "csv" else tsv_rows(file):
                            find_column(file, header)
                            break
            finally:
                file.close()
        except UserError as error:
            problems.append(str(error))
    if problems:
        more = f"\n… and {len(problems) - MOST_PROBLEMS} more files" if len(problems) > MOST_PROBLEMS else ""
        raise UserError("\n".join(problems[:MOST_PROBLEMS]) + more)
