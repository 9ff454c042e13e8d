"""Sentences with a tag for each word from the user's own .jsonl and .parquet, a list of words and one of tags a row.

The same sentences as columns of words are conll.py's. Rows in = rows out, as table.py reads them.
"""

import re
from collections.abc import Iterator

from bertsmith.errors import UserError
from bertsmith.tasks.examples import TaggedExample
from bertsmith.tasks.table import Problems, Table, check_label_column, read_list, shorten
from bertsmith.text.documents import ReadReport

# who predicts does not look at labels
_RAW_TEXT = " (for running text add --raw-text to predict)"
TAG = re.compile("O|[BIESLU]-.+", re.DOTALL)


def read_tagged_examples_table(
    path: str,
    tokens_column: str = "tokens",
    tags_column: str = "tags",
    labelled: bool | None = None,
    encoding: str = "utf-8",
    report: ReadReport | None = None,
) -> Iterator[TaggedExample]:
    """The examples of a .jsonl or .parquet table with a list of words and a list of tag names in each row.

    Raises UserError as `read_text_examples` does; also for lists that differ in length and tags that are none.
    """
    remedy = _RAW_TEXT if labelled is False else ""
    problems = Problems(f"tokens and tags are lists of texts of one length{remedy}")
    with Table(path, encoding, report, advice=f"name yours with --text-column or --label-column{remedy}") as table:
        if table.kind in ("csv", "tsv"):
            raise UserError(f"{path}: a .{table.kind} cell holds no list; give CoNLL columns, .jsonl or .parquet")
        if labelled is not False:
            check_label_column(path, tags_column, [tokens_column])
        table.require([tokens_column], label=tags_column if labelled else None)
        for index, row in enumerate(table.rows((), [tokens_column, tags_column])):
            place = f"{path}:{row.line}"
            words = tags = None
            try:
                words = read_list(row, tokens_column)
                if labelled or (labelled is None and row.cells.get(tags_column) is not None):
                    tags = read_list(row, tags_column)
                    if len(tags) != len(words):
                        raise ValueError(f"{len(words)} tokens and {len(tags)} tags")
                    for tag in tags:
                        check_tag(tag)
            except ValueError as error:
                problems.add(place, str(error))
                continue
            if not problems:
                yield TaggedExample(place, str(index), words, tags)
    problems.check()


def check_tag(tag: str) -> None:
    """ValueError unless `tag` is O, or a prefix of one of the four schemes, a hyphen and a type."""
    if not TAG.fullmatch(tag):
        raise ValueError(
            f"{shorten(tag)!r} is no tag: O, or a prefix (B I, or B I E S, or B I L U), a hyphen and a type, as in "
            "B-PER, is needed"
        )
