"""Tagged sentences → a .conll: a word and its tag a line, a blank line after each sentence; complete or not at all.

The columns are those of the model's own files, so that the model reads what it wrote as the same sentences: word, tab,
tag, unless it learnt from others. What would not read back is refused, for these files have no escapes: any other
spelling of a word would be another word.
"""

import codecs
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bertsmith.errors import UserError
from bertsmith.inference.row_writer import Row, RowWriter
from bertsmith.storage import atomic_file, disk_errors
from bertsmith.tasks.conll import DOCUMENT_START, split_line
from bertsmith.tasks.examples import TaggedExample
from bertsmith.tasks.spec import TaskSpec
from bertsmith.tasks.table import shorten
from bertsmith.text.decoding import why_not_text
from bertsmith.text.streams import HEAD

CONLL = ".conll"
_OTHER = "name a .jsonl or .parquet as the --output"
_LINE_END = re.compile("[\r\n]")
_BYTE_ORDER_MARK = "\ufeff"
_UNUSED = "_"
"""What stands in a column that is neither the word's nor the tag's."""


class ConllLayout:
    """The lines of a file that a model of `spec` reads: as few columns as its words and tags need, `_` in the others.

    `spec`: as the model learnt it, token_column and tag_column not the same. Where its files are not in UTF-8, a file
    begins with a mark, which wins over the encoding.
    """

    def __init__(self, spec: TaskSpec) -> None:
        self.separators = ("auto", spec.separator)
        word, tag = spec.token_column, spec.tag_column
        # counted from the end, a column moves with their number, and must not fall upon the other
        self.count = next(
            count
            for count in range(2, abs(word) + abs(tag) + 3)
            if -count <= min(word, tag) and max(word, tag) < count and (word - tag) % count
        )
        self.word, self.tag = word % self.count, tag % self.count
        self.mark = "" if codecs.lookup(spec.encoding).name.startswith("utf-8") else _BYTE_ORDER_MARK

    def line(self, word: str, tag: str) -> str:
        """A word's line, without its end."""
        return "\t".join(self._cells(word, tag))

    def reads_back(self, word: str, tag: str) -> bool:
        """Whether a line of them is split into them: as the model's own files are, and as files are by default."""
        cells, line = self._cells(word, tag), self.line(word, tag)
        if cells[0] == DOCUMENT_START or _LINE_END.search(line) or tag != tag.strip(" "):
            return False
        return all(split_line(line, separator) == cells for separator in self.separators)

    def _cells(self, word: str, tag: str) -> list[str]:
        cells = [_UNUSED] * self.count
        cells[self.word], cells[self.tag] = word, tag
        return cells


def is_conll(path: Path) -> bool:
    """Whether an output is to be of this layout."""
    return path.suffix.lower() == CONLL


def check_conll(path: Path, spec: TaskSpec, keep: Sequence[str]) -> None:
    """Raise UserError for a task that tags no words, for tags and words that cannot stand as the model reads them, and
    where columns are to be kept."""
    if spec.name != "ner":
        raise UserError(f"{path}: .conll holds a tag for each word, and {spec.name} predicts none; {_OTHER}")
    if keep:
        raise UserError(f"{path}: .conll holds words and tags, and no columns for --keep; {_OTHER}")
    if spec.strip_digit:
        raise UserError(
            f"{path}: the model takes a number off each word of a .conll (ner.strip_digit), and it is lost; {_OTHER}"
        )
    if spec.token_column == spec.tag_column:  # learnt from lists
        raise UserError(f"{path}: the model looks for words and tags of a .conll in one column; {_OTHER}")
    layout = ConllLayout(spec)
    for tag in spec.labels:
        if not layout.reads_back("word", tag):
            raise UserError(f"{path}: the tag {shorten(tag)!r} cannot stand in a .conll; {_OTHER}")


def check_sentences(examples: Iterable[TaggedExample], path: str, layout: ConllLayout) -> Iterator[TaggedExample]:
    """The sentences as they come. `path`: of the file they are of.

    Raises UserError for a sentence without words, which would not be there; for a word that is not one in a line: with
    a tab or a line end, with blanks where they separate, called as what begins a document; where the first words would
    be taken for those of no text (`<html`); and where there is no sentence at all: no task reads an empty file.
    """
    head = layout.mark
    begun = False
    for example in examples:
        if not example.words:
            raise UserError(f"{example.place}: a sentence without words cannot stand in a .conll; {_OTHER}")
        for word in example.words:
            # a mark that begins a file is no text
            marked = not begun and layout.line(word, "O").startswith(_BYTE_ORDER_MARK)
            if marked or not layout.reads_back(word, "O"):
                raise UserError(f"{example.place}: the word {shorten(word)!r} cannot stand in a .conll; {_OTHER}")
            if len(head) < HEAD:
                head += layout.line(word, "O") + "\n"
            begun = True
        head += "\n" if len(head) < HEAD else ""
        yield example
    if not begun:
        raise UserError(f"{path}: holds no sentence, and a .conll without any is no input; {_OTHER}")
    if reason := why_not_text(head.encode("utf-8")[:HEAD], "utf-8"):
        reason = reason.partition(";")[0]  # what follows is advice to who has such a file
        raise UserError(f"{path}: a .conll with its first words is no input ({reason}); {_OTHER}")


def with_words(examples: Sequence[TaggedExample], rows: Sequence[Row]) -> list[Row]:
    """What the writer takes: each sentence's `words` beside its `tags`."""
    return [{"words": example.words, **row} for example, row in zip(examples, rows, strict=True)]


@contextlib.contextmanager
def open_conll_writer(path: Path, layout: ConllLayout) -> Iterator[RowWriter]:
    """Yield a writer of the rows of `with_words`; the file stands under its name when the block ends without error."""
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file, disk_errors(path):
        file.write(layout.mark)
        yield _ConllWriter(file, layout)


class _ConllWriter:
    def __init__(self, file: Any, layout: ConllLayout) -> None:
        self.file, self.layout = file, layout

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            lines = (self.layout.line(word, tag) + "\n" for word, tag in zip(row["words"], row["tags"], strict=True))
            self.file.write("".join(lines) + "\n")

    def expect(self, row: Row) -> None:
        """Columns have no names here."""
