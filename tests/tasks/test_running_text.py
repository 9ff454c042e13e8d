"""Running text: cut into words as annotators cut it, nothing lost; entities given back by their places."""

import re
import time
import unicodedata
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.tasks.conll import read_conll
from bertsmith.tasks.running_text import find_entities, find_words, make_running

Tuned = Callable[[str], Path]


def words(text: str) -> list[str]:
    return [text[first:last] for first, last in find_words(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Barack Obama (born 1961) visited the U.S., too.", "Barack Obama ( born 1961 ) visited the U.S. , too ."),
        ('"Yes!" said J. Smith-Jones, didn\'t he?', '" Yes ! " said J. Smith-Jones , didn\'t he ?'),
        (
            "New York's and the dogs' l'homme d\u2019Italie\u2019s",
            "New York 's and the dogs ' l'homme d\u2019Italie \u2019s",
        ),
        ("Wait... $3.5m (50%), 1,000.00; and/or -5!!", "Wait ... $ 3.5m ( 50 % ) , 1,000.00 ; and/or - 5 !!"),
        ("@user: #tag, a@b.com", "@user : #tag , a@b.com"),
        ("天地，宇宙。ABC中", "天 地 ， 宇 宙 。 ABC 中"),
        ("हिन्दी में। cafe\u0301, \u00abBonjour\u00bb", "हिन्दी में । cafe\u0301 , \u00ab Bonjour \u00bb"),
        ("ok\U0001f44d\U0001f44d z.B. in Köln.", "ok \U0001f44d\U0001f44d z.B. in Köln ."),
        ("'s ... _", "' s ... _"),
        (
            "St. Louis, Gen. Lee and Apple Inc., in Oct. 1990. The end.",
            "St. Louis , Gen. Lee and Apple Inc. , in Oct. 1990 . The end .",
        ),
        ('He met Bob. (Bob.) "Bob." Then he left.', 'He met Bob . ( Bob . ) " Bob . " Then he left .'),
        (
            "Merkel\u2014the chancellor--left\u2026or...not. 1990\u201395",
            "Merkel \u2014 the chancellor -- left \u2026 or ... not . 1990\u201395",
        ),
        ("MERKEL'S PARTY", "MERKEL 'S PARTY"),
        ("(\x00''s", "(\x00 '' s"),
        ("\u200bLondon \u200e(Paris\u200f) \u200b\u200e ok\x00 ab\u200ccd", "London ( Paris ) ok ab\u200ccd"),
        (" \t\u3000\n", ""),
        ("", ""),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert words(text) == expected.split()


@settings(max_examples=1000)
@given(
    st.text(st.sampled_from("ab9.,\u2014\u200b''\u2019s@#_- \u0301\u200d\u4e2d\U0001f44d\n\x00\ud800"), max_size=20)
    | st.text()
)
def test_nothing_is_lost(text: str) -> None:
    spans = list(find_words(text))
    left_out = list(text)
    for first, last in spans:
        left_out[first:last] = [" "] * (last - first)
    assert all(letter.isspace() or unicodedata.category(letter) in ("Cf", "Cc") for letter in left_out)
    assert all(first < last for first, last in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(not any(letter.isspace() for letter in text[first:last]) for first, last in spans)


@pytest.mark.parametrize("piece", ["!?", "a.", "'s", "x'", "@", "\u0301", "\u4e2d", "ab"])
def test_a_line_without_blanks_takes_no_longer_a_character(piece: str) -> None:
    begun = time.perf_counter()
    assert sum(last - first for first, last in find_words("a" + piece * 200_000 + "!?" * 1000)) > 200_000
    assert time.perf_counter() - begun < 10


@pytest.mark.parametrize(("file", "share"), [("wikigold/wikigold.conll.txt", 0.95), ("wnut17/wnut17train.conll", 0.65)])
def test_annotators_cut_alike(shared_data: Path, file: str, share: float) -> None:
    """Written as one would, 96 % of Wikipedia's sentences and 70 % of tweets are cut into the annotators' words."""
    made = list(read_conll(str(shared_data / "tasks" / file), labelled=False))
    written = [re.sub(r"([(\[]) | (?=[.,;:!?)\]]|'s\b)", r"\1", " ".join(one.words)) for one in made]
    alike = sum(words(text) == list(one.words) for text, one in zip(written, made, strict=True))
    assert len(made) > 1600
    assert alike > share * len(made)


def test_entities_by_their_places() -> None:
    text = "In the U.S., Mary Ann  Smith (Paris) met Bob's Bob."
    example = make_running("x:1", "0", text)
    assert example.words == ("In", "the", "U.S.", ",", "Mary", "Ann", "Smith", "(", "Paris", ")", "met", "Bob", "'s",
                             "Bob", ".")  # fmt: skip
    tags = ["O", "B-LOC", "I-LOC", "O", "B-PER", "I-PER", "I-PER", "O", "I-LOC", "O", "O", "B-PER", "O", "B-PER", "I-X"]
    found = find_entities(example, tags)
    assert [(entity["type"], entity["text"]) for entity in found] == [
        ("LOC", "the U.S."), ("PER", "Mary Ann  Smith"), ("LOC", "Paris"), ("PER", "Bob"), ("PER", "Bob"), ("X", ".")
    ]  # fmt: skip
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in found)


@given(st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B-C", "I-B-C"]), max_size=12))
def test_entities_are_those_that_seqeval_counts(tags: list[str]) -> None:
    from seqeval.metrics.sequence_labeling import get_entities

    example = make_running("x:1", "0", " ".join("w" * (number + 1) for number in range(len(tags))))
    expected = [(kind, example.spans[first][0], example.spans[last][1]) for kind, first, last in get_entities(tags)]
    assert [(e["type"], e["start"], e["end"]) for e in find_entities(example, tags)] == expected
