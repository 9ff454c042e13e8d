"""Texts and pairs of texts → sequences of at most `max_length` tokens: cut, or shown in overlapping windows.

In: what is to be classified, as read. Out: [CLS] A [SEP] or [CLS] A [SEP] B [SEP], one or more an example, without
targets. Nothing is cut in silence: every token of the texts is shown in some sequence or counted in the report. A batch
of examples takes one call of the tokenizer's quick way.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError, one_of
from bertsmith.tasks.examples import ChoiceExample, EncodedSequence, EncodingReport, TextExample
from bertsmith.text.tokenizer import BertTokenizer

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]
Long = Literal["cut", "window"]
LONG = ("cut", "window")


def join_segments(
    tokenizer: BertTokenizer, first: Ints, second: Ints | None = None
) -> tuple[npt.NDArray[np.int32], int]:
    """[CLS] first [SEP], or [CLS] first [SEP] second [SEP]: int32 ids, and where `second` begins (or the length)."""
    boundary = len(first) + 2
    ids = np.empty(boundary if second is None else boundary + len(second) + 1, dtype=np.int32)
    ids[0] = tokenizer.cls_id
    ids[1 : boundary - 1] = first
    ids[boundary - 1] = tokenizer.sep_id
    if second is not None:
        ids[boundary:-1] = second
        ids[-1] = tokenizer.sep_id
    return ids, boundary


def spread_windows(count: int, room: int, overlap: int) -> npt.NDArray[np.int64]:
    """Where windows of `room` tokens begin, (W,): as few as cover `count` tokens with `overlap` (< room) or more.

    They are spread evenly, so that all are full: a last window of three tokens would count as much as the others.
    """
    if count <= room:
        return np.zeros(1, dtype=np.int64)
    gaps = -((room - count) // (room - overlap))
    return np.arange(gaps + 1) * (count - room) // gaps


def cut_pair(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of either text are kept: those at the beginning.

    The reference's rule (google-research/bert run_classifier.py): the longer one, of equals the second, loses its last
    token until both fit. Computed at once: neither loses more than what it has over its half, unless the other's half
    is not used up.
    """
    second = min(second, max(room // 2, room - first))
    return min(first, room - second), second


def count_tokens(report: EncodingReport, ids: Ints, tokenizer: BertTokenizer) -> None:
    """Count tokens of a text, each once and before anything is cut, and those that are [UNK]."""
    report.tokens += len(ids)
    report.unknown_tokens += int(np.count_nonzero(ids == tokenizer.unk_id))


def encode_text(
    text: str, pair: str | None, tokenizer: BertTokenizer, max_length: int, long: Long, report: EncodingReport
) -> list[EncodedSequence]:
    """A text or a pair as sequences of at most `max_length` tokens: positions [0], no targets.

    One sequence where everything fits. Else, by `long`:
    - "cut": one sequence; a text loses its end, a pair loses tokens as `cut_pair` says.
    - "window": windows over the text, each with a quarter of its tokens or more in common with the next. Of a pair,
      the longer text is windowed (of equals the second) and the shorter one stands in every window, whole if it takes
      at most half of the room; what it has over its half is cut and counted.

    Raises UserError where `max_length` has no room for a token of each text, or `long` is neither.
    """
    _check(max_length, long, pair is not None)
    report.examples += 1
    rows = tokenizer.encode_ids([text] if pair is None else [text, pair])
    first, *rest = (np.array(ids, dtype=np.int32) for ids in rows)
    sequences, cut = _fit(first, rest[0] if rest else None, tokenizer, max_length, long, report)
    report.truncated += cut > 0
    return sequences


def encode_texts(
    examples: Sequence[TextExample | ChoiceExample],
    tokenizer: BertTokenizer,
    max_length: int,
    long: Long,
    report: EncodingReport,
) -> list[list[EncodedSequence]]:
    """The sequences of each example, in order: a text's as `encode_text` makes them, a choice's one for each ending.

    A choice is context and ending as a pair (SWAG: Devlin et al. 2018, section 4.4); it is only ever cut, and "window"
    raises UserError: windows of different endings could not be compared. Otherwise raises as `encode_text`.
    """
    tokens = _encode_all(examples, tokenizer)
    encoded = []
    for example in examples:
        report.examples += 1
        pairs: Iterable[tuple[Ints, Ints | None]]
        if isinstance(example, ChoiceExample):
            _check(max_length, long, pair=True)
            if long != "cut":
                raise UserError(f"{example.place}: a choice can only be cut; use long cut, not {long}")
            context = next(tokens)
            pairs = [(context, next(tokens)) for _ in example.choices]
        else:
            _check(max_length, long, example.pair is not None)
            pairs = [(next(tokens), None if example.pair is None else next(tokens))]
        sequences: list[EncodedSequence] = []
        lost = 0
        for first, second in pairs:
            made, cut = _fit(first, second, tokenizer, max_length, long, report)
            sequences += made
            lost += cut
        report.truncated += lost > 0
        encoded.append(sequences)
    return encoded


def pool_windows(logits: Floats) -> Floats:
    """One prediction of a text's windows: logits (W, n) → (n,), the mean, every window counting the same.

    For classes that is the geometric mean of the windows' probabilities, for a regression the mean of the numbers.
    Windows are all full (`spread_windows`), so none deserves more weight than another.
    """
    if not len(logits):
        raise ValueError("a text has one window or more")
    return logits.mean(axis=0, dtype=np.float64).astype(logits.dtype)


def _check(max_length: int, long: str, pair: bool) -> None:
    one_of("long", long, LONG)
    needed = 5 if pair else 3  # a token of each text, [CLS], and [SEP] after each
    if max_length < needed:
        what = "a pair of texts" if pair else "a text"
        raise UserError(f"max_length: {max_length} tokens do not hold {what}; use {needed} or more")


def _encode_all(examples: Iterable[TextExample | ChoiceExample], tokenizer: BertTokenizer) -> Iterator[Ints]:
    """The ids of every text of `examples`, in order, by one call of the tokenizer."""
    texts: list[str] = []
    for example in examples:
        if isinstance(example, ChoiceExample):
            texts += [example.context, *example.choices]
        else:
            texts += [example.text] if example.pair is None else [example.text, example.pair]
    flat, counts = tokenizer.encode_flat(texts)
    ends = np.cumsum(counts)
    for begin, end in zip((ends - counts).tolist(), ends.tolist(), strict=True):
        yield flat[begin:end]


def _fit(
    first: Ints, second: Ints | None, tokenizer: BertTokenizer, max_length: int, long: Long, report: EncodingReport
) -> tuple[list[EncodedSequence], int]:
    """The sequences of one text or pair, and how many of its tokens are in none of them."""
    count_tokens(report, first, tokenizer)
    if second is not None:
        count_tokens(report, second, tokenizer)
    room = max_length - (2 if second is None else 3)
    total = len(first) + (0 if second is None else len(second))
    segments: list[tuple[Ints, Ints | None]]
    if total <= room:
        segments, cut = [(first, second)], 0
    elif long == "window":
        segments, cut = _windows(first, second, room)
    elif second is None:
        segments, cut = [(first[:room], None)], total - room
    else:
        kept_first, kept_second = cut_pair(len(first), len(second), room)
        segments, cut = [(first[:kept_first], second[:kept_second])], total - room
    report.truncated_tokens += cut
    report.windowed += len(segments) > 1
    report.sequences += len(segments)
    return [_sequence(tokenizer, a, b) for a, b in segments], cut


def _windows(first: Ints, second: Ints | None, room: int) -> tuple[list[tuple[Ints, Ints | None]], int]:
    """The segments of each window, and how many tokens of the shorter text are cut."""
    if second is None:
        return [(first[start : start + room], None) for start in spread_windows(len(first), room, room // 4)], 0
    slides_first = len(first) > len(second)
    longer, shorter = (first, second) if slides_first else (second, first)
    kept = shorter[: room // 2]
    room -= len(kept)
    parts = [longer[start : start + room] for start in spread_windows(len(longer), room, room // 4)]
    segments: list[tuple[Ints, Ints | None]] = [(part, kept) if slides_first else (kept, part) for part in parts]
    return segments, len(shorter) - len(kept)


def _sequence(tokenizer: BertTokenizer, first: Ints, second: Ints | None) -> EncodedSequence:
    ids, second_segment = join_segments(tokenizer, first, second)
    return EncodedSequence(ids, second_segment, np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int64))
