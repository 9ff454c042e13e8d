"""Files of words with a tag each, a word a line (CoNLL-2003 and its many kin) → TaggedExample, a sentence each.

Tags come out as they stand in the file. Four ways to write entities are known (IOB1, IOB2, BIOES, BILOU): which one a
file uses is told by all its tags, `to_iob2` and `from_iob2` go there and back.
"""

import re
from collections.abc import Iterable, Iterator, Sequence

from bertsmith.errors import UserError, one_of
from bertsmith.progress import say_once
from bertsmith.tasks.examples import TaggedExample
from bertsmith.tasks.table import StrictReport, shorten
from bertsmith.tasks.tagged_table import TAG, check_tag
from bertsmith.text.decoding import TextFile
from bertsmith.text.documents import ReadOptions, ReadReport

SCHEMES = ("IOB1", "IOB2", "BIOES", "BILOU")
SEPARATORS = ("auto", "tab", "blank")
BLANKS = re.compile("[ \t]+")  # other kinds of space may be words, in tweets
DOCUMENT_START = "-DOCSTART-"
CHARACTER_PLACE = re.compile("(.+?)[0-9]+", re.DOTALL)
LAST_OF_SCHEME = {"BIOES": ("E", "S"), "BILOU": ("L", "U")}
"""The prefixes of an entity's last word, and of its only one."""


def read_conll(
    path: str,
    token_column: int = 0,
    tag_column: int = -1,
    separator: str = "auto",
    comments: bool = False,
    strip_digit: bool = False,
    labelled: bool | None = None,
    encoding: str = "utf-8",
    report: ReadReport | None = None,
) -> Iterator[TaggedExample]:
    """The sentences of a file, in order; the id is the sentence from 0, the place its first word's line.

    token_column, tag_column: from 0, negative from the end. A blank line (tabs and blanks count as nothing) ends a
    sentence; so does a `-DOCSTART-` line, which is no word and is counted in `report`.
    separator: "tab", "blank" (runs of blanks and tabs), or "auto": tabs in a line that has one, else blanks.
    comments: lines that begin with "# " are no words. Not so by default: in tweets they are.
    strip_digit: take the number off each token's end, as in weibo_ner's `科0`, a character and its place in a word.
    labelled: True, every word must have a tag; False, tags are not looked at; None, tags are read where the
    first word has one.

    Raises UserError, with file and line, for a line of too few columns, for a tag that is not O, B-x, I-x, E-x, S-x,
    L-x or U-x, and without tags for a line of other columns than the first.
    """
    one_of("separator", separator, SEPARATORS)
    strict = StrictReport()
    skipped = ReadReport()
    file = TextFile(path, ReadOptions(encoding=encoding), strict)
    words: list[str] = []
    tags: list[str] = []
    index, place, columns, first, of_one_kind = 0, "", 0, 0, False

    def sentence() -> TaggedExample:
        return TaggedExample(place, str(index), tuple(words), tuple(tags) if labelled else None)

    try:
        if not file.head[file.mark :]:
            raise UserError(f"{path}: empty file; a word a line is expected")
        for number, line in numbered_lines(file):
            cells = split_line(line, separator)
            if comments and (line == "#" or line.startswith("# ")):
                skipped.skip("comment", f"{path}:{number}")
                continue
            starts_document = cells[:1] == [DOCUMENT_START]
            if starts_document:
                skipped.skip(f"{DOCUMENT_START} line", f"{path}:{number}")
            if starts_document or not cells:
                if words:
                    yield sentence()
                    words, tags, index = [], [], index + 1
                continue
            if not words:
                place = f"{path}:{number}"
            if not columns:
                columns, first, of_one_kind = len(cells), number, not any(map(TAG.fullmatch, cells))
            if labelled is None:
                labelled = len(cells) > 1
            words.append(read_token(cells, token_column, strip_digit, f"{path}:{number}"))
            if not labelled and len(cells) != columns:
                raise UserError(
                    f"{path}:{number}: {len(cells)} columns where the first word has {columns}; a word a line in "
                    "columns is expected (for running text add --raw-text to predict, or give embed a .txt)"
                )
            if labelled:
                tags.append(read_tag(cells, token_column, tag_column, f"{path}:{number}"))
        if words:
            yield sentence()
        if labelled is False and columns > 1 and of_one_kind:
            say_once(
                f"note: {path}:{first}: of {columns} columns one is read, and there are no tags (for running text add "
                "--raw-text to predict, or give embed a .txt)",
                (path, "columns"),
            )
    finally:
        file.close()
        strict.settle(report, file.encoding)
        if report is not None:
            report.merge(skipped)


def numbered_lines(file: TextFile) -> Iterator[tuple[int, str]]:
    """(1-based number, line) of every line."""
    for first, lines in file.lines():
        yield from enumerate(lines, first)


def split_line(line: str, separator: str) -> list[str]:
    """The cells of a line; [] of a blank one."""
    if not line.strip(" \t"):
        return []
    if separator == "tab" or (separator == "auto" and "\t" in line.rstrip(" \t")):
        # a token may be a blank, or empty; a tab at the end is no column
        return line.rstrip("\t").split("\t")
    return BLANKS.split(line.strip(" \t"))


def read_token(cells: list[str], column: int, strip_digit: bool, place: str) -> str:
    if not -len(cells) <= column < len(cells):
        raise UserError(f"{place}: {len(cells)} columns; the token was to be in column {column} (from 0)")
    token = cells[column]
    if not strip_digit:
        return token
    found = CHARACTER_PLACE.fullmatch(token)
    if not found:
        raise UserError(f"{place}: token {shorten(token)!r} has no digit at its end to strip; read it as it is")
    return found[1]


def read_tag(cells: list[str], token_column: int, column: int, place: str) -> str:
    """The tag of a line; UserError where there is none (one column, the token's) or it is no entity's."""
    if not -len(cells) <= column < len(cells) or column % len(cells) == token_column % len(cells):
        raise UserError(
            f"{place}: no tag beside {shorten(cells[token_column])!r} in {len(cells)} "
            f"column{'s' * (len(cells) > 1)}; every word needs one"
        )
    tag = cells[column].strip(" ")
    try:
        check_tag(tag)
    except ValueError as error:
        raise UserError(f"{place}: {error}") from None
    return tag


def split_tag(tag: str) -> tuple[str, str]:
    """(prefix, type): ("B", "PER") of B-PER, ("O", "") of O."""
    prefix, _, kind = tag.partition("-")
    return prefix, kind


def detect_scheme(tag_sequences: Iterable[Sequence[str]]) -> str:
    """ "IOB1", "IOB2", "BIOES" or "BILOU", by all the tags of a file, read once.

    E- and S- are BIOES's, L- and U- BILOU's. Of B- and I- alone, IOB1 uses B- only to part an entity from one of its
    type just before it, so that other entities start with I-; everything else is IOB2 (a file without entities too),
    whose stray I- tags count as violations. Raises UserError where both BIOES's and BILOU's prefixes are there.
    """
    prefixes: set[str] = set()
    starts_with_inside, parts_only = False, True
    for tags in tag_sequences:
        before = ""
        for tag in tags:
            prefix, kind = split_tag(tag)
            prefixes.add(prefix)
            if prefix == "B" and kind != before:
                parts_only = False
            elif prefix == "I" and kind != before:
                starts_with_inside = True
            before = kind
    found = [name for name, ends in LAST_OF_SCHEME.items() if prefixes.intersection(ends)]
    if len(found) > 1:
        raise UserError(f"tags with the prefixes {', '.join(sorted(prefixes - {'O'}))} are of two schemes, BIOES and "
                        "BILOU; convert one part of the data to the other's")  # fmt: skip
    if found:
        return found[0]
    return "IOB1" if starts_with_inside and parts_only else "IOB2"


def to_iob2(tags: Sequence[str], scheme: str) -> tuple[str, ...]:
    """The same entities in IOB2: B- on the first word of each, I- on the others.

    Tags that the scheme does not allow where they stand are read as conlleval reads them: a word that cannot go on
    the entity before it starts one.
    """
    one_of("scheme", scheme, SCHEMES)
    last, only = LAST_OF_SCHEME.get(scheme, ("", ""))
    result = []
    open_type = ""
    for tag in tags:
        prefix, kind = split_tag(tag)
        if not kind:
            result.append("O")
        else:
            goes_on = prefix in ("I", last) and kind == open_type
            result.append(f"{'I' if goes_on else 'B'}-{kind}")
        open_type = "" if prefix in (last, only) else kind
    return tuple(result)


def from_iob2(tags: Sequence[str], scheme: str) -> tuple[str, ...]:
    """The entities of IOB2 tags in another scheme; stray I- tags start an entity, as in `to_iob2`."""
    one_of("scheme", scheme, SCHEMES)
    tags = to_iob2(tags, "IOB2")
    if scheme == "IOB2":
        return tuple(tags)
    last, only = LAST_OF_SCHEME.get(scheme, ("", ""))
    result = []
    for index, tag in enumerate(tags):
        prefix, kind = split_tag(tag)
        before = split_tag(tags[index - 1])[1] if index else ""
        ends = index + 1 == len(tags) or tags[index + 1] != f"I-{kind}"
        if kind and scheme == "IOB1":
            prefix = "B" if prefix == "B" and before == kind else "I"
        elif kind and ends:
            prefix = only if prefix == "B" else last
        result.append(f"{prefix}-{kind}" if kind else "O")
    return tuple(result)


def count_violations(tag_sequences: Iterable[Sequence[str]], scheme: str) -> int:
    """How many tags stand where `scheme` does not allow them: those that change on the way to IOB2 and back."""
    return sum(
        before != after
        for tags in tag_sequences
        for before, after in zip(tags, from_iob2(to_iob2(tags, scheme), scheme), strict=True)
    )
