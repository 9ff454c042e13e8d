"""One tag a word, always: whatever pieces the words have and however long the sentence is."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seqeval.metrics import f1_score

from bertsmith.errors import UserError
from bertsmith.tasks.examples import EncodedSequence, EncodingReport, TaggedExample
from bertsmith.tasks.tagging import (
    choose_windows,
    decode_tags,
    encode_words,
    find_windows,
    tag_scores,
    word_logits,
)
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer, load_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
TOKENIZER = BertTokenizer([*SPECIAL_TOKENS, *LETTERS, *("##" + letter for letter in LETTERS)])
NOTHING = "\ue000"  # a private-use character: cleaning leaves nothing of it
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")
TAG_IDS = {tag: number for number, tag in enumerate(TAGS)}


def sentence(pieces: list[int], tags: bool = True) -> TaggedExample:
    """A sentence whose n-th word gives pieces[n] pieces of one letter (0: cleaning leaves nothing of it)."""
    words = tuple(LETTERS[n % 26] * count or NOTHING for n, count in enumerate(pieces))
    return TaggedExample("x:1", "1", words, tuple(TAGS[n * 7 % 5] for n in range(len(words))) if tags else None)


def encode(
    example: TaggedExample, max_length: int, report: EncodingReport | None = None, tags: bool = True
) -> list[EncodedSequence]:
    report = EncodingReport() if report is None else report
    return encode_words(example, TOKENIZER, max_length, TAG_IDS if tags else None, report)


def one_hot(sequences: list[EncodedSequence], classes: int = 5) -> list[np.ndarray]:
    """Logits of a model that knows the targets."""
    return [np.eye(classes, dtype=np.float32)[sequence.targets] for sequence in sequences]


@settings(max_examples=300)
@given(pieces=st.lists(st.integers(0, 12), max_size=60), max_length=st.integers(3, 40))
def test_what_always_holds(pieces: list[int], max_length: int) -> None:
    example = sentence(pieces)
    report = EncodingReport()
    sequences = encode(example, max_length, report)
    expected = TOKENIZER.encode_words(example.words)
    room = max_length - 2
    answered: list[int] = []
    shown: set[tuple[int, int]] = set()
    for sequence in sequences:
        ids = sequence.token_ids.tolist()
        assert len(ids) <= max_length
        assert sequence.second_segment == len(ids)
        assert ids[0] == TOKENIZER.cls_id
        assert ids[-1] == TOKENIZER.sep_id
        assert len(sequence.positions) == len(sequence.origin) == len(sequence.targets) > 0
        assert (np.diff(sequence.positions) > 0).all()
        assert sequence.positions[0] >= 1
        assert sequence.positions[-1] < len(ids) - 1
        for word, position, target in zip(
            sequence.origin.tolist(), sequence.positions.tolist(), sequence.targets.tolist(), strict=True
        ):
            kept = expected[word][:room]
            assert ids[position : position + len(kept)] == kept, "the word stands there, whole"
            assert TAGS[target] == (example.tags or ())[word]
            answered.append(word)
            shown.update((word, piece) for piece in range(len(kept)))
    assert sorted(answered) == list(range(len(pieces))), "each word is answered for once"
    total = sum(map(len, expected))
    assert report.tokens == total
    assert len(shown) + report.truncated_tokens == total
    assert report.unknown_tokens == pieces.count(0)
    assert report.notes.get("words_cut", 0) == sum(count > room for count in pieces)
    assert report.truncated == any(count > room for count in pieces)
    assert (report.examples, report.sequences) == (1, len(sequences))
    assert report.windowed == (len(sequences) > 1)
    if sum(min(len(ids), room) for ids in expected) <= room:
        assert len(sequences) == bool(pieces)
    assert decode_tags(example, sequences, one_hot(sequences), TAGS) == list(example.tags or ())


@settings(max_examples=200)
@given(pieces=st.lists(st.integers(1, 12), min_size=1, max_size=80), room=st.integers(12, 50))
def test_windows_fit_cover_and_overlap(pieces: list[int], room: int) -> None:
    ends = np.cumsum(pieces)
    starts = ends - pieces
    windows = find_windows(starts, ends, room)
    assert windows[0][0] == 0
    assert windows[-1][1] == len(pieces)
    assert all(ends[last - 1] - starts[first] <= room for first, last in windows)
    for (first, last), (following, end) in itertools.pairwise(windows):
        assert first < following <= last
        assert last < end
        assert ends[last] - starts[first] > room, "another word would fit"
        # half in common, less what a word of 12 pieces keeps from being shared at either edge
        assert ends[last - 1] - starts[following] >= room // 2 - 22
    first = windows[-1][0]
    assert first == 0 or ends[-1] - starts[first - 1] > room, "the last window has all the context there is room for"
    owners = choose_windows(starts, ends, windows)
    for word, owner in enumerate(owners.tolist()):
        context = {
            number: min(starts[word] - starts[first], ends[last - 1] - ends[word])
            for number, (first, last) in enumerate(windows)
            if first <= word < last
        }
        assert owner == max(context, key=lambda number: (context[number], -number))


@pytest.mark.parametrize("count", [1, 2, 300, 509, 510, 511, 512, 513, 5000])
@pytest.mark.parametrize("max_length", [128, 512])
def test_a_sentence_of_any_length(count: int, max_length: int) -> None:
    example = sentence([1] * count)
    sequences = encode(example, max_length, report := EncodingReport())
    assert all(len(sequence) <= max_length for sequence in sequences)
    assert (len(sequences) == 1) == (count <= max_length - 2)
    assert len(sequences) <= 2 * count / (max_length - 2) + 1
    assert report.truncated_tokens == 0
    assert decode_tags(example, sequences, one_hot(sequences), TAGS) == list(example.tags or ())
    # inside the sentence, every word has a quarter of a window of context on both sides
    for sequence in sequences:
        inner = (sequence.origin >= max_length // 4) & (sequence.origin < count - max_length // 4)
        assert (sequence.positions[inner] >= max_length // 4 - 2).all()
        assert (len(sequence) - sequence.positions[inner] >= max_length // 4 - 2).all()


def test_a_sentence_without_words_has_no_sequence_and_no_tags() -> None:
    assert encode(sentence([]), 16, report := EncodingReport()) == []
    assert report == EncodingReport(examples=1)
    assert decode_tags(sentence([]), [], [], TAGS) == []
    assert tag_scores(sentence([]), [], []) == []


def test_a_word_longer_than_the_model_is_shown_by_its_first_pieces() -> None:
    sequences = encode(sentence([2, 40, 3, 12]), 12, report := EncodingReport())
    assert [sequence.origin.tolist() for sequence in sequences] == [[0], [1], [2], [3]]
    assert (report.truncated, report.truncated_tokens, report.notes) == (1, 32, {"words_cut": 2})
    assert len(sequences[1]) == 12


def test_without_tags_there_are_no_targets() -> None:
    for example, tags in ((sentence([1, 2], tags=False), True), (sentence([1, 2]), False)):
        [sequence] = encode(example, 16, tags=tags)
        assert sequence.positions.tolist() == [1, 2]
        assert not len(sequence.targets)


def test_each_word_gets_its_likeliest_tag_whatever_stands_before_it() -> None:
    example = sentence([1, 3, 0])
    sequences = encode(example, 16)
    logits = [np.array([[0, 0, 2, 0, 0], [1, 0, 0, 0, 1.5], [3, 0, 0, 0, 0]], dtype=np.float32)]
    assert decode_tags(example, sequences, logits, TAGS) == ["I-PER", "I-LOC", "O"], "not mended"
    expected = np.exp(logits[0].max(axis=1)) / np.exp(logits[0]).sum(axis=1)
    assert tag_scores(example, sequences, logits) == pytest.approx(expected.tolist())
    # seqeval begins an entity at an I- that follows none of its type: what decode_tags promises
    assert f1_score([["B-PER", "B-LOC", "O"]], [["I-PER", "I-LOC", "O"]]) == 1.0


def test_tags_go_to_their_words_in_whatever_order_the_sequences_come() -> None:
    example = sentence([5] * 9)
    sequences = encode(example, 22)[::-1]
    assert len(sequences) > 1
    assert decode_tags(example, sequences, one_hot(sequences), TAGS) == list(example.tags or ())


def test_sequences_of_another_sentence_are_not_taken() -> None:
    sequences = encode(sentence([5] * 9), 22)
    assert len(sequences) > 1
    with pytest.raises(ValueError, match="do not hold each word once"):
        word_logits(sentence([5] * 9), sequences[1:], one_hot(sequences[1:]))


@pytest.mark.parametrize(
    ("words", "tags", "max_length", "told"),
    [
        (("a", "b"), ("O", "B-ORG"), 16, "here has tags of type 'ORG'; the training file's types are 'LOC', 'PER'"),
        (("a", "b"), ("O",), 16, "x:1: 1 tags for 2 words; give one a word"),
        (("a",), ("O",), 2, "max_length: 2 tokens do not hold a word; use 3 or more"),
    ],
)
def test_what_is_refused(words: tuple[str, ...], tags: tuple[str, ...], max_length: int, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        encode(TaggedExample("x:1", "1", words, tags), max_length)


@pytest.mark.shared_data
def test_real_sentences_keep_their_words(shared_data: Path) -> None:
    tokenizer = load_tokenizer(shared_data / "vocabs" / "bert-base-cased")
    lines = (shared_data / "tasks" / "wnut17" / "emerging.dev.conll").read_text("utf-8").split("\n")
    sentences = [
        [line.split("\t") for line in group]
        for blank, group in itertools.groupby(lines, lambda x: not x.strip())
        if not blank
    ]
    tags = sorted({row[1] for rows in sentences for row in rows})
    tag_ids = {tag: number for number, tag in enumerate(tags)}
    report = EncodingReport()
    for rows in sentences:
        words, gold = zip(*rows, strict=True)
        example = TaggedExample("x", "1", words, gold)
        sequences = encode_words(example, tokenizer, 24, tag_ids, report)
        assert decode_tags(example, sequences, one_hot(sequences, len(tags)), tags) == list(gold)
    assert report.examples == len(sentences) == 1009
    assert report.windowed > 100
    assert report.truncated_tokens < report.tokens / 100
