"""Tagged sentences → a .conll: word, tab, tag a line, a blank line after each sentence; complete or not at all.

What is written reads back as the same sentences (tasks/conll.py, with the columns that it takes by default). What would
not is refused, for these files have no escapes: any other spelling of a word would be another word.
"""

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
from bertsmith.tasks.table import shorten
from bertsmith.tasks.task import Task

_OTHER = "name a .jsonl or .parquet as the --output"
_LINE_END = re.compile("[\r\n]")
_BYTE_ORDER_MARK = "\ufeff"


def is_conll(path: Path) -> bool:
    """Whether an output is to be of this layout."""
    return path.suffix.lower() == ".conll"


def check_conll(path: Path, task: Task, keep: Sequence[str]) -> None:
    """Raise UserError where the task tags no words or has a tag that fits no line, or where columns are to be kept."""
    if task.head != "token":
        raise UserError(f"{path}: .conll holds a tag for each word, and {task.spec.name} predicts none; {_OTHER}")
    if keep:
        raise UserError(f"{path}: .conll holds words and tags, and no columns for --keep; {_OTHER}")
    for tag in task.spec.labels:
        if not _reads_back("word", tag, task.spec.separator):
            raise UserError(f"{path}: the tag {shorten(tag)!r} cannot stand in a .conll; {_OTHER}")


def check_sentences(examples: Iterable[TaggedExample], separator: str) -> Iterator[TaggedExample]:
    """The sentences as they come. `separator`: by which the model's own files are split, see `read_conll`.

    Raises UserError for a sentence without words, which would not be there, and for a word that is not one in a line:
    with a tab or a line end, with blanks where they separate, called as what begins a document.
    """
    begun = False
    for example in examples:
        if not example.words:
            raise UserError(f"{example.place}: a sentence without words cannot stand in a .conll; {_OTHER}")
        for word in example.words:
            # a mark that begins a file is no text
            if not _reads_back(word, "O", separator) or (not begun and word.startswith(_BYTE_ORDER_MARK)):
                raise UserError(f"{example.place}: the word {shorten(word)!r} cannot stand in a .conll; {_OTHER}")
            begun = True
        yield example


def _reads_back(word: str, tag: str, separator: str) -> bool:
    """Whether a line of them is read as them: by the model's own files' rules, and by those that hold by default."""
    if word == DOCUMENT_START or _LINE_END.search(word + tag) or tag != tag.strip(" "):
        return False
    return all(split_line(f"{word}\t{tag}", each) == [word, tag] for each in ("auto", separator))


def with_words(examples: Sequence[TaggedExample], rows: Sequence[Row]) -> list[Row]:
    """What the writer takes: each sentence's `words` beside its `tags`."""
    return [{"words": example.words, **row} for example, row in zip(examples, rows, strict=True)]


@contextlib.contextmanager
def open_conll_writer(path: Path) -> Iterator[RowWriter]:
    """Yield a writer of the rows of `with_words`; the file stands under its name when the block ends without error."""
    with atomic_file(path) as partial, partial.open("w", encoding="utf-8", newline="\n") as file, disk_errors(path):
        yield _ConllWriter(file)


class _ConllWriter:
    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            lines = (f"{word}\t{tag}\n" for word, tag in zip(row["words"], row["tags"], strict=True))
            self.file.write("".join(lines) + "\n")

    def expect(self, row: Row) -> None:
        """Columns have no names here."""
