"""`bertsmith embed`: the vectors of every row of a file, streamed: rows in = rows out, memory that of some chunks.

In: texts, a row each, or sentences split into words. Out: .npy, .parquet or .safetensors, complete or not at all.
"""

import os
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.inference.features import FeatureExtractor, FeatureOptions, Text
from bertsmith.inference.kept_columns import KeptColumns
from bertsmith.inference.vector_writer import find_vector_format, open_vector_writer, parquet_columns
from bertsmith.model.weights import CONFIG, find_model, read_config
from bertsmith.progress import Progress, say, silenced
from bertsmith.storage import check_out
from bertsmith.tasks.conll import read_conll
from bertsmith.tasks.examples import EncodingReport, replaced_bytes, say_unknown
from bertsmith.tasks.spec import TASK_KEY, TaskSpec
from bertsmith.tasks.table import Table, read_list
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.readers import COMPRESSED_SUFFIXES, SUFFIX_KINDS
from bertsmith.text.rows import ROW_FORMATS, read_rows
from bertsmith.text.streams import is_read_once, local_path
from bertsmith.training.ranks import ALONE, Ranks

_CONLL = (".conll", ".bio", ".iob")


def check_output(input_path: str, output: Path) -> None:
    """Raise UserError where `output` cannot be written, or is the input, which would be replaced."""
    check_out(output, folder=False)
    source = local_path(input_path)
    if output.exists() and os.path.exists(source) and output.samefile(source):
        raise UserError(f"{output}: is the input as well, and would be replaced; choose another --output")


def check_input(input_path: str, ranks: Ranks) -> None:
    """Raise UserError where several processes are to read what can be read only once, such as a pipe."""
    if ranks.size > 1 and is_read_once(input_path):
        raise UserError(
            f"{input_path}: can be read once only, and {ranks.size} processes are to read it; put it in a file, or "
            "start one process, without torchrun"
        )


def check_rows(path: str, rows: Iterator[Any]) -> None:
    """Raise UserError where a file cannot be read, lacks its columns or begins with a row that is none.

    `rows` reads `path` and is used up to the first one. What can be read only once, such as a pipe, is left alone.
    """
    if is_read_once(path):
        return
    try:
        next(rows, None)
    finally:
        if isinstance(rows, Generator):
            rows.close()


def choose_text_column(model_folder: str | Path, input_path: str, text_column: str, encoding: str = "utf-8") -> str:
    """`text_column`, or where that is the default and no column of the input, the one that a fine-tuned model learnt
    from, if the input has it; which is said."""
    if text_column != "text" or SUFFIX_KINDS.get(_suffix(input_path)) not in ROW_FORMATS or is_read_once(input_path):
        return text_column
    folder = find_model(model_folder)
    task = read_config(folder)[1].get(TASK_KEY)
    learnt = None if task is None else TaskSpec.from_dict(task, str(folder / CONFIG)).text_column
    if learnt is None:
        return text_column
    with silenced(), Table(input_path, encoding) as table:
        if text_column in table.columns or learnt not in table.columns:
            return text_column
    say(f"{input_path}: has no column {text_column!r}; texts are read from {learnt!r}, as {folder} learnt from it")
    return learnt


def check_embedding(
    input_path: str,
    output: Path,
    options: FeatureOptions,
    text_column: str = "text",
    encoding: str = "utf-8",
    ranks: Ranks = ALONE,
    keep: Sequence[str] = (),
) -> None:
    """Raise UserError for whatever `embed_file` can tell of its files before there is a model."""
    _open_kept(input_path, output, options, encoding, ranks, keep)
    read = read_word_rows if options.words else read_text_rows
    try:
        check_rows(input_path, read(input_path, text_column, encoding))
    except UserError:
        if not options.words and _begins_with_words(input_path, text_column, encoding):
            raise UserError(
                f"{input_path}: holds lists of words, not texts: --words gives a vector a word; for a vector a text, "
                "name a column of texts with --text-column"
            ) from None
        raise


def _begins_with_words(path: str, text_column: str, encoding: str) -> bool:
    """Whether the first row is a sentence split into words."""
    rows = read_word_rows(path, text_column, encoding)
    with suppress(UserError), silenced(), closing(rows):
        return not isinstance(next(rows, ("", ""))[1], str)
    return False


def _open_kept(
    input_path: str, output: Path, options: FeatureOptions, encoding: str, ranks: Ranks, keep: Sequence[str]
) -> KeptColumns:
    """The columns to carry along; the first rank holds them, the others know their sizes.

    Raises UserError for files that do not suit.
    """
    find_vector_format(output, options.several, bool(keep))
    check_input(input_path, ranks)
    if ranks.is_first:
        check_output(input_path, output)
    own = parquet_columns(options.several, options.several and not options.words)
    return KeptColumns(input_path, keep, output, own, encoding, held=ranks.is_first)


def read_text_rows(path: str, text_column: str = "text", encoding: str = "utf-8") -> Iterator[tuple[str, str]]:
    """(`file:line`, text) of every row of a file (see text.rows), streamed; replaced bytes are said at the end."""
    report = ReadReport()
    for line, text in read_rows(path, ReadOptions(text_column=text_column, encoding=encoding), report):
        yield f"{path}:{line}", text
    if report.invalid_bytes:
        say(f"warning: {replaced_bytes(report.invalid_bytes, encoding, report.invalid_places[0])}")


def is_word_file(path: str) -> bool:
    """Whether a file's name says that it holds a word a line."""
    return _suffix(path) in _CONLL


def read_word_rows(
    path: str, text_column: str = "text", encoding: str = "utf-8"
) -> Generator[tuple[str, Text], None, None]:
    """(`file:line`, words) of every row: lists of words as they are, texts still to be split at blanks.

    .jsonl and .parquet hold either in the column `text`, or else `tokens`; .conll, .bio and .iob hold a word a line;
    all else is texts. Raises UserError as their readers do, and for a cell that is neither.
    """
    if is_word_file(path):
        for example in read_conll(path, labelled=False, encoding=encoding):
            yield example.place, example.words
    elif SUFFIX_KINDS.get(_suffix(path)) in ("jsonl", "parquet"):
        with Table(path, encoding) as table:
            other = text_column == "text" and "text" not in table.columns and "tokens" in table.columns
            column = "tokens" if other else text_column
            table.require([column])
            for row in table.rows((), [column]):
                value = row.cells.get(column)
                try:
                    yield f"{path}:{row.line}", value if isinstance(value, str) else read_list(row, column)
                except ValueError as error:
                    raise UserError(f"{path}:{row.line}: {error}; give a text or a list of words") from None
    else:
        yield from read_text_rows(path, text_column, encoding)


def _suffix(path: str) -> str:
    """What a file's name ends in, but for how it is compressed."""
    suffixes = [suffix for suffix in Path(path).suffixes if suffix not in COMPRESSED_SUFFIXES]
    return suffixes[-1].lower() if suffixes else ""


def say_losses(report: EncodingReport, max_length: int) -> None:
    """Warn of texts that were cut, and of a vocabulary that does not know them."""
    say_cut(report, max_length)
    say_unknown(report.unknown_tokens / report.tokens if report.tokens else 0.0)


def say_cut(report: EncodingReport, max_length: int) -> None:
    """Warn of texts that were cut."""
    if report.truncated:
        say(
            f"warning: {report.truncated:,} of {report.examples:,} texts are longer than {max_length} tokens; "
            f"{report.truncated_tokens:,} tokens were cut"
        )


def say_empty(rows: int, input_path: str, output: str | Path | None) -> None:
    """Say where there was no row: an output without any could pass for one that was written by mistake."""
    if not rows:
        say(f"warning: {input_path}: no rows{'' if output is None else f', and so none in {output}'}")


def embed_file(
    extractor: FeatureExtractor,
    input_path: str,
    output_path: str | Path,
    text_column: str = "text",
    encoding: str = "utf-8",
    ranks: Ranks = ALONE,
    keep: Sequence[str] = (),
) -> dict[str, Any]:
    """The vectors of every row of a file, in order, written as vector_writer.py says; returns the JSON summary.

    `keep`: columns of the input that are written before the vectors, into .parquet only (see kept_columns.py). Several
    processes (`ranks`) call it together and share the rows; the first one writes, the others return {}. Raises
    UserError for an output that cannot be written and for rows that cannot be read, naming the line.
    """
    output, options, report = Path(output_path), extractor.options, extractor.report
    with ranks.alike():
        kept = _open_kept(input_path, output, options, encoding, ranks, keep)
    read = read_word_rows if options.words else read_text_rows

    def read_rows_with_kept() -> Iterator[tuple[str, Text]]:
        return kept.follow(read(input_path, text_column, encoding), itemgetter(0))

    with ranks.alike():
        total, types = kept.count(read_rows_with_kept()), kept.arrow_types()
    tokens = options.several and not options.words
    begun = time.monotonic()
    vectors = 0
    with (
        open_vector_writer(output, extractor.dimension, options.several, tokens, types)
        if ranks.is_first
        else nullcontext() as writer,
        Progress("embedding", total, "rows") as bar,
    ):
        extractor.on_rows = bar.advance
        rows = 0
        for chunk in extractor.chunks(read_rows_with_kept(), ranks, kept.weigh):
            assert writer is not None, "only the first rank gets vectors"
            texts = len(chunk.rows) if chunk.counts is None else len(chunk.counts)
            writer.write(replace(chunk, kept=kept.take(texts)))
            vectors += len(chunk.rows)
            rows += texts
            bar.advance(rows - bar.done)
    extractor.merge_counts(ranks)
    if not ranks.is_first:
        return {}
    seconds = time.monotonic() - begun
    say_empty(report.examples, input_path, output)
    say_losses(report, extractor.max_length)
    empty = report.notes.get("empty_texts", 0)
    if empty:
        so = "they have no vector" if options.words else "their vectors are of [CLS] and [SEP] alone"
        first = report.first_places["empty_texts"]
        say(f"warning: {empty:,} of {report.examples:,} texts hold no token, such as {first}; {so}")
    return {
        "rows": report.examples,
        "vectors": vectors,
        "dimension": extractor.dimension,
        "layers": extractor.levels,
        "truncated": report.truncated,
        "truncated_tokens": report.truncated_tokens,
        "windowed": report.windowed,
        "empty_texts": empty,
        "unknown_rate": report.as_dict()["unknown_rate"],
        "tokens": extractor.computed_tokens,
        "tokens_per_second": extractor.computed_tokens / seconds,
        "seconds": seconds,
        "output": str(output),
    }
