"""Texts of any length become sequences the model takes; what is not shown is counted, and nothing else is lost."""

import functools
import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.tasks.examples import ChoiceExample, EncodedSequence, EncodingReport, TextExample
from bertsmith.tasks.long_texts import (
    Long,
    cut_pair,
    encode_text,
    encode_texts,
    pool_windows,
    spread_windows,
)
from bertsmith.text.tokenizer import SPECIAL_TOKENS, BertTokenizer

# words w0, w1, … are one token each, so that a text of n words has n different tokens and any other word is unknown
TOKENIZER = BertTokenizer([*SPECIAL_TOKENS, *(f"w{n}" for n in range(6000)), *(f"v{n}" for n in range(6000))])
CLS, SEP, UNK = TOKENIZER.cls_id, TOKENIZER.sep_id, TOKENIZER.unk_id


def text_of(count: int, letter: str = "w") -> str:
    return " ".join(f"{letter}{n}" for n in range(count))


@functools.cache
def ids_of(count: int, letter: str = "w") -> list[int]:
    return TOKENIZER.encode_ids([text_of(count, letter)])[0]


def segments(sequence: EncodedSequence) -> tuple[list[int], list[int] | None]:
    """The tokens of A and of B, with the special tokens checked to be in place."""
    ids, boundary = sequence.token_ids.tolist(), sequence.second_segment
    assert sequence.token_ids.dtype == np.int32
    assert ids[0] == CLS
    assert ids[-1] == SEP
    assert ids[boundary - 1] == SEP
    if boundary == len(ids):
        assert ids.count(SEP) == 1
        return ids[1:-1], None
    assert ids.count(SEP) == 2
    return ids[1 : boundary - 1], ids[boundary:-1]


def cut_token_by_token(first: int, second: int, room: int) -> tuple[int, int]:
    """The reference's rule as it is told: while they are too long, the longer loses a token, of equals the second."""
    while first + second > room:
        if first > second:
            first -= 1
        else:
            second -= 1
    return first, second


def test_a_pair_is_cut_as_the_reference_cuts_it_token_by_token() -> None:
    for first, second, room in itertools.product(range(14), range(14), range(14)):
        if first + second > room:
            assert cut_pair(first, second, room) == cut_token_by_token(first, second, room), (first, second, room)


@given(count=st.integers(0, 400), room=st.integers(1, 60), data=st.data())
def test_windows_hold_every_token_are_full_and_overlap(count: int, room: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(0, room - 1))
    starts = spread_windows(count, room, overlap)
    assert starts[0] == 0
    if count <= room:
        assert len(starts) == 1
        return
    assert starts[-1] == count - room
    steps = np.diff(starts)
    assert (steps > 0).all()
    assert (steps <= room - overlap).all(), "less overlap than asked for"
    assert steps.max() - steps.min() <= 1, "not evenly spread"
    assert count > room + (len(starts) - 2) * (room - overlap), "a window less would do"


@pytest.mark.parametrize("long", ["cut", "window"])
@pytest.mark.parametrize("count", [0, 1, 2, 126, 127, 509, 510, 511, 512, 513, 5000])
def test_a_text_of_any_length(count: int, long: Long) -> None:
    report = EncodingReport()
    sequences = encode_text(text_of(count), None, TOKENIZER, 512, long, report)
    expected = ids_of(count)
    shown = [segments(sequence)[0] for sequence in sequences]
    assert all(len(sequence) <= 512 for sequence in sequences)
    if count <= 510 or long == "cut":
        assert shown == [expected[:510]]
    else:
        assert all(len(part) == 510 for part in shown)
        starts = [expected.index(part[0]) for part in shown]
        assert shown == [expected[start : start + 510] for start in starts]
        assert max(np.diff(starts)) <= 383, "a quarter in common"
        assert set(itertools.chain(*shown)) == set(expected)
    cut = max(0, count - 510) if long == "cut" else 0
    assert report == EncodingReport(
        examples=1,
        sequences=len(sequences),
        tokens=count,
        truncated=int(cut > 0),
        truncated_tokens=cut,
        windowed=int(len(sequences) > 1),
    )
    assert (len(sequences) > 1) == (long == "window" and count > 510)


@settings(max_examples=200)
@given(
    first=st.integers(0, 300),
    second=st.none() | st.integers(0, 300),
    max_length=st.integers(5, 90),
    long=st.sampled_from(["cut", "window"]),
)
def test_what_always_holds(first: int, second: int | None, max_length: int, long: Long) -> None:
    report = EncodingReport()
    pair = None if second is None else text_of(second, "v")
    sequences = encode_text(text_of(first), pair, TOKENIZER, max_length, long, report)
    shown_first: set[int] = set()
    shown_second: set[int] = set()
    for sequence in sequences:
        assert len(sequence) <= max_length
        assert sequence.positions.tolist() == [0]
        assert not len(sequence.targets)
        a, b = segments(sequence)
        assert (b is None) == (second is None)
        # what is shown of a text is a stretch of it
        for part, whole in ((a, ids_of(first)), (b or [], ids_of(second or 0, "v"))):
            start = whole.index(part[0]) if part else 0
            assert whole[start : start + len(part)] == part
        shown_first.update(a)
        shown_second.update(b or [])
    total = first + (second or 0)
    assert report.tokens == total
    assert len(shown_first) + len(shown_second) + report.truncated_tokens == total
    assert report.truncated == (report.truncated_tokens > 0)
    assert report.sequences == len(sequences)
    assert report.windowed == (len(sequences) > 1)
    assert report.unknown_tokens == 0
    room = max_length - (2 if second is None else 3)
    if total <= room:
        assert len(sequences) == 1
        assert not report.truncated
    elif long == "cut":
        assert len(sequences) == 1
        assert len(sequences[0]) == max_length
        if second is not None:
            assert (len(shown_first), len(shown_second)) == cut_token_by_token(first, second, room)
    else:
        assert all(len(sequence) == max_length for sequence in sequences)
        longer, shorter = (shown_first, shown_second) if first > (second or 0) else (shown_second, shown_first)
        assert len(longer) == max(first, second or 0), "of the longer text nothing is lost"
        assert len(shorter) == min(first, second or 0, room // 2) or second is None


def test_the_shorter_text_of_a_pair_stands_in_every_window() -> None:
    for first, second in ((10, 100), (100, 10)):
        sequences = encode_text(
            text_of(first), text_of(second, "v"), TOKENIZER, 43, "window", report := EncodingReport()
        )
        assert len(sequences) == 5  # 30 tokens a window, 7 or more in common: 1 + (100 - 30) / 23 rounded up
        kept = [segments(sequence)[first > second] for sequence in sequences]
        assert kept == [ids_of(10, "v" if first > second else "w")] * 5
        assert (report.truncated, report.truncated_tokens, report.windowed) == (0, 0, 1)


def test_a_shorter_text_of_more_than_half_the_room_is_cut_to_it_and_counted() -> None:
    report = EncodingReport()
    sequences = encode_text(text_of(25), text_of(100, "v"), TOKENIZER, 43, "window", report)
    assert {tuple(segments(sequence)[0]) for sequence in sequences} == {tuple(ids_of(25)[:20])}
    assert (report.truncated, report.truncated_tokens) == (1, 5)


def test_a_batch_gives_what_each_alone_gives() -> None:
    examples = [
        TextExample(f"x:{n}", str(n), text_of(a), None if b is None else text_of(b, "v"), None)
        for n, (a, b) in enumerate([(0, None), (0, 0), (7, None), (30, None), (90, 4), (4, 90), (60, 60)])
    ]
    for long in ("cut", "window"):
        together, alone = EncodingReport(), EncodingReport()
        batch = encode_texts(examples, TOKENIZER, 32, long, together)
        assert len(batch) == len(examples)
        for example, sequences in zip(examples, batch, strict=True):
            expected = encode_text(example.text, example.pair, TOKENIZER, 32, long, alone)
            assert [s.token_ids.tolist() for s in sequences] == [s.token_ids.tolist() for s in expected]
            assert [s.second_segment for s in sequences] == [s.second_segment for s in expected]
        assert together == alone
        assert together.truncated == (3 if long == "cut" else 1)


def test_a_choice_is_a_sequence_an_ending() -> None:
    endings = (text_of(2, "v"), text_of(30, "v"), text_of(5, "v"), "")
    examples = [ChoiceExample("x:1", "1", text_of(20), endings, 0), TextExample("x:2", "2", "w1", None, None)]
    report = EncodingReport()
    choices, text = encode_texts(examples, TOKENIZER, 28, "cut", report)
    assert [tuple(map(len, segments(s))) for s in choices] == [(20, 2), (13, 12), (20, 5), (20, 0)]
    assert len(text) == 1
    assert report == EncodingReport(examples=2, sequences=5, tokens=118, truncated=1, truncated_tokens=25)
    with pytest.raises(UserError, match=re.escape("x:1: a choice can only be cut")):
        encode_texts(examples, TOKENIZER, 28, "window", report)


def test_unknown_tokens_are_counted_and_typed_separators_are_text() -> None:
    report = EncodingReport()
    [sequence] = encode_text("w1 nonsense [SEP] w2", None, TOKENIZER, 16, "cut", report)
    assert segments(sequence)[0].count(UNK) == 4  # nonsense [ sep ]
    assert (report.tokens, report.unknown_tokens) == (6, 4)


def test_windows_count_alike() -> None:
    logits = np.array([[1.0, 2.0], [3.0, -2.0], [2.0, 6.0]], dtype=np.float32)
    assert pool_windows(logits).tolist() == [2.0, 2.0]
    assert pool_windows(logits).dtype == np.float32
    assert np.array_equal(pool_windows(logits[:1]), logits[0])
    with pytest.raises(ValueError, match="one window or more"):
        pool_windows(logits[:0])


@pytest.mark.parametrize(
    ("pair", "max_length", "long", "told"),
    [
        (None, 2, "cut", "max_length: 2 tokens do not hold a text; use 3 or more"),
        ("b", 4, "window", "max_length: 4 tokens do not hold a pair of texts; use 5 or more"),
        (None, 16, "slide", "long: 'slide' is not known; use one of cut, window"),
    ],
)
def test_what_is_refused(pair: str | None, max_length: int, long: Long, told: str) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        encode_text("a", pair, TOKENIZER, max_length, long, EncodingReport())
    with pytest.raises(UserError, match=re.escape(told)):
        encode_texts([TextExample("x:1", "1", "a", pair, None)], TOKENIZER, max_length, long, EncodingReport())


def test_the_shortest_lengths_there_can_be() -> None:
    assert [len(s) for s in encode_text(text_of(3), None, TOKENIZER, 3, "window", EncodingReport())] == [3, 3, 3]
    assert [len(s) for s in encode_text("w1 w2", "v1 v2", TOKENIZER, 5, "window", EncodingReport())] == [5, 5]
    assert [len(s) for s in encode_text("w1 w2", "v1 v2", TOKENIZER, 5, "cut", EncodingReport())] == [5]
