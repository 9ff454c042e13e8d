"""Running text for models that tag words: cut into words as annotators cut it, entities given back by their places.

Data sets of tagged words (CoNLL-2003 and those like it) hold punctuation as words of its own, but for what belongs to
a word: U.S., J., St., don't, Franco-German, 3.5, @user. Text is cut so here, in whatever language has blanks; of
ideographs each is a word. Characters that nobody sees (marks of direction, blanks of no width) are no part of a word
at its ends.
"""

import re
import unicodedata
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from bertsmith.tasks.conll import split_tag, to_iob2
from bertsmith.tasks.examples import EncodingReport, TaggedExample
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.rows import read_rows
from bertsmith.text.sentences import find_sentences
from bertsmith.text.words import IDEOGRAPHS

Span = tuple[int, int]
"""First character and one past the last."""

# dashes of a sentence, and points where something is left out, stand between words without blanks too
_PIECES = re.compile(
    rf"[{IDEOGRAPHS}]|[\u2014\u2015]+|\u2026+|--+|\.\.+|(?:(?!--|\.\.)[^\s\u2014\u2015\u2026{IDEOGRAPHS}])+"
)
_ALPHANUMERIC = re.compile(r"[^\W_]+")
# letters with a point after each: initials, U.S., z.B.
_LONGEST_POINTED = 20
_POINTED = re.compile(r"(?:[^\W\d_]\.)+")
_SHAPELESS = ("Cf", "Cc")
_POSSESSIVE = ("'s", "\u2019s", "'S", "\u2019S")


@dataclass(frozen=True, slots=True)
class RunningExample(TaggedExample):
    """A text with the words found in it: `words[k]` is `text[slice(*spans[k])]`."""

    text: str
    spans: tuple[Span, ...]


def make_running(place: str, identity: str, text: str) -> RunningExample:
    """An example without tags."""
    spans = tuple(find_words(text))
    return RunningExample(place, identity, tuple(text[first:last] for first, last in spans), None, text, spans)


def read_running_text(path: str, text_column: str, encoding: str, report: EncodingReport) -> Iterator[RunningExample]:
    """A file of texts, one a row (see text.rows); a blank one has no words. `report`: counts invalid bytes, at the end.

    Raises UserError as `read_rows`.
    """
    read = ReadReport()
    options = ReadOptions(text_column=text_column, encoding=encoding)
    for number, (line, text) in enumerate(read_rows(path, options, read)):
        yield make_running(f"{path}:{line}", str(number), text)
    report.note_reading(read)


def find_words(text: str) -> Iterator[Span]:
    """The words of a text: what stands between blanks and dashes, punctuation taken off both ends (a run of one mark is
    a word of its own) and `'s` off the end. A point that ends no sentence is its word's."""
    ends = set(_final_points(text))
    for piece in _PIECES.finditer(text):
        first, last = _trim(text, *piece.span())
        if _ALPHANUMERIC.fullmatch(text, first, last):
            yield first, last
            continue
        marks = list(_find_marks(text, first, last))
        for begin, end in marks:  # before the word
            if begin != first or (text[begin] in "@#" and end < last and text[end].isalnum()):
                break
            yield begin, end
            first = end
        first, last = _trim(text, first, last)
        closing: list[Span] = []
        marks = [mark for mark in marks if mark[0] > first]
        while first < last and not (last - first <= _LONGEST_POINTED and _POINTED.fullmatch(text, first, last)):
            if marks and marks[-1][1] == last:
                if text[slice(*marks[-1])] == "." and _is_its_words(text, marks[-1][0], ends):
                    break
                closing.append(marks[-1])
            elif text.endswith(_POSSESSIVE, first + 1, last):
                closing.append((last - 2, last))
            else:
                break
            first, last = _trim(text, first, closing[-1][0])
            while marks and marks[-1][1] > last:
                marks.pop()
        if first < last:
            yield first, last
        yield from reversed(closing)


def _is_its_words(text: str, point: int, ends: Container[int]) -> bool:
    """Whether a point belongs to the word before it: the sentence goes on, and no bracket or quote ends behind it."""
    after = text[point + 1 : point + 2]
    closes = after != "" and (after in "\"'" or unicodedata.category(after) in ("Pe", "Pf"))
    return point not in ends and text[point - 1].isalnum() and not closes


def _final_points(text: str) -> Iterator[int]:
    """Where a point is, or may be, the end of a sentence: nothing but marks comes between."""
    if "." not in text:
        return
    for first, last in find_sentences(text):
        place = last
        while place > first and not text[place - 1].isalnum():
            place -= 1
        yield from (point for point in range(place, last) if text[point] == ".")


def _trim(text: str, first: int, last: int) -> Span:
    """A span without the characters at its ends that have no shape."""
    while first < last and unicodedata.category(text[first]) in _SHAPELESS:
        first += 1
    while first < last and unicodedata.category(text[last - 1]) in _SHAPELESS:
        last -= 1
    return first, last


def _find_marks(text: str, first: int, last: int) -> Iterator[Span]:
    """Punctuation and symbols between `first` and `last`, runs of one together, with what combines with them."""
    begin, before = first, ""
    for place in range(first, last):
        category = unicodedata.category(text[place])
        if category[0] == "M" or category in _SHAPELESS:  # accents, joiners, variants
            continue
        if before and text[place] != before:
            yield begin, place
        if text[place] != before:
            begin, before = place, text[place] if category[0] in "PS" else ""
    if before:
        yield begin, last


def find_entities(example: RunningExample, tags: Sequence[str]) -> list[dict[str, Any]]:
    """The entities of IOB2 `tags`, one a word, in order: `type`, `text`, and its place in the text, `start` to `end`.

    A stray I- begins one, as seqeval counts them.
    """
    entities: list[dict[str, Any]] = []
    for (first, last), tag in zip(example.spans, to_iob2(tags, "IOB2"), strict=True):
        prefix, kind = split_tag(tag)
        if prefix == "B":
            entities.append({"type": kind, "text": "", "start": first, "end": last})
        elif prefix == "I":
            entities[-1]["end"] = last
    for entity in entities:
        entity["text"] = example.text[entity["start"] : entity["end"]]
    return entities
