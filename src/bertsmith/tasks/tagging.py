"""Sentences that are split into words → sequences with the first piece of each word to be tagged, and tags back.

A word is tagged by the last hidden state of its first piece (Devlin et al. 2018, section 5.3); its other pieces are
context only. A sentence longer than the model takes is shown in windows that overlap by half, and each word is answered
for by exactly one of them, that in which it stands farthest from the edges: one tag a word, always.
"""

from collections.abc import Mapping, Sequence
from itertools import chain

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError
from bertsmith.tasks.examples import EncodedSequence, EncodingReport, TaggedExample
from bertsmith.tasks.long_texts import count_tokens, join_segments
from bertsmith.text.documents import join_names
from bertsmith.text.tokenizer import BertTokenizer

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.floating]


def encode_words(
    example: TaggedExample,
    tokenizer: BertTokenizer,
    max_length: int,
    tag_ids: Mapping[str, int] | None,
    report: EncodingReport,
) -> list[EncodedSequence]:
    """A sentence as one sequence of at most `max_length` tokens, or as overlapping windows of whole words.

    `positions` (P,): the first pieces of the words this sequence answers for; over all sequences, each word once.
    `origin` (P,): the numbers of those words. `targets` (P,): their tags' numbers by `tag_ids`; empty where that is
    None or the example is unlabelled. A sentence without words gives no sequence. Of a word with more pieces than a
    window holds, the first ones are shown and the rest is counted (`words_cut`).

    Raises UserError for a tag that `tag_ids` lacks, for tags that are not one a word, and where `max_length` is below
    3.
    """
    room = max_length - 2
    if room < 1:
        raise UserError(f"max_length: {max_length} tokens do not hold a word; use 3 or more")
    targets = _tag_numbers(example, tag_ids)
    report.examples += 1
    if not example.words:
        return []
    pieces = tokenizer.encode_words(example.words)
    lengths = np.fromiter(map(len, pieces), dtype=np.int64, count=len(pieces))
    flat = np.fromiter(chain.from_iterable(pieces), dtype=np.int32, count=int(lengths.sum()))
    count_tokens(report, flat, tokenizer)
    kept = np.minimum(lengths, room)
    if cut := int((lengths - kept).sum()):
        report.truncated += 1
        report.truncated_tokens += cut
        report.note("words_cut", int(np.count_nonzero(kept < lengths)))
        flat = flat[np.arange(len(flat)) - np.repeat(np.cumsum(lengths) - lengths, lengths) < room]
    ends = np.cumsum(kept)
    starts = ends - kept
    windows = find_windows(starts, ends, room)
    owners = choose_windows(starts, ends, windows)
    sequences = []
    for number, (first, last) in enumerate(windows):
        words = np.flatnonzero(owners == number).astype(np.int32)
        if len(words):  # a window may answer for no word: its neighbours know all of its words better
            ids, length = join_segments(tokenizer, flat[starts[first] : ends[last - 1]])
            positions = (starts[words] - starts[first] + 1).astype(np.int32)
            sequences.append(
                EncodedSequence(ids, length, positions, targets[words] if len(targets) else targets, words)
            )
    report.sequences += len(sequences)
    report.windowed += len(sequences) > 1
    return sequences


def find_windows(starts: Ints, ends: Ints, room: int) -> list[tuple[int, int]]:
    """Windows of whole words, (first word, one past the last) each, of at most `room` pieces.

    `starts` and `ends` (words,): each word's first piece and one past its last; no word is longer than `room`. A
    window begins at the first word in the second half of the one before, the last one as early as it can and still
    hold the end: so each has all the context there is room for.
    """
    count = len(starts)
    windows = []
    first = 0
    while ends[-1] - starts[first] > room:
        last = int(np.searchsorted(ends, starts[first] + room, side="right"))
        windows.append((first, last))
        middle = int(np.searchsorted(starts, starts[first] + room - room // 2))
        # where a long word follows, the next window may have to begin later to hold it
        first = min(last, max(middle, int(np.searchsorted(starts, ends[last] - room))))
    first = int(np.searchsorted(starts, ends[-1] - room))
    return [*windows, (first, count)]


def choose_windows(starts: Ints, ends: Ints, windows: Sequence[tuple[int, int]]) -> npt.NDArray[np.int64]:
    """The number of the window that answers for each word, (words,): the one with the most context.

    That is, the most pieces on the side of the word where there are fewer (the reference's rule for tokens of SQuAD's
    contexts); of equals, the earlier one.
    """
    owners = np.full(len(starts), -1, dtype=np.int64)
    most = np.full(len(starts), -1, dtype=np.int64)
    for number, (first, last) in enumerate(windows):
        words = slice(first, last)
        context = np.minimum(starts[words] - starts[first], ends[last - 1] - ends[words])
        better = context > most[words]
        owners[words][better] = number
        most[words][better] = context[better]
    return owners


def word_logits(example: TaggedExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Floats:
    """The logits of every word, (words, tags), from those of each sequence's positions, (P, tags).

    Raises ValueError where they are not one row for each word: sequences of another example, or not all of them.
    """
    numbers = np.concatenate([sequence.origin for sequence in sequences])
    if not np.array_equal(np.sort(numbers), np.arange(len(example.words))):
        raise ValueError(f"{example.place}: the sequences do not hold each word once")
    rows = np.concatenate(logits)
    ordered = np.empty_like(rows)
    ordered[numbers] = rows
    return ordered


def decode_tags(
    example: TaggedExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats], tags: Sequence[str]
) -> list[str]:
    """Exactly one tag a word: the likeliest one. `logits` (P, tags) for each sequence; `tags` by number.

    Each word's tag is its own: a sequence of tags that is not well-formed IOB2 (an I- after O, or of another type) is
    left as it is. seqeval, which scores them, begins an entity there.
    """
    if not example.words:
        return []
    return [tags[number] for number in word_logits(example, sequences, logits).argmax(axis=1).tolist()]


def tag_scores(example: TaggedExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> list[float]:
    """The probability of the tag that `decode_tags` gives each word."""
    if not example.words:
        return []
    rows = word_logits(example, sequences, logits).astype(np.float64)
    return (1 / np.exp(rows - rows.max(axis=1, keepdims=True)).sum(axis=1)).tolist()


def _tag_numbers(example: TaggedExample, tag_ids: Mapping[str, int] | None) -> npt.NDArray[np.int64]:
    """(words,), or (0,) where there are no labels."""
    if tag_ids is None or example.tags is None:
        return np.zeros(0, dtype=np.int64)
    if len(example.tags) != len(example.words):
        raise UserError(f"{example.place}: {len(example.tags)} tags for {len(example.words)} words; give one a word")
    check_tag_types(example, tag_ids)
    return np.array([tag_ids[tag] for tag in example.tags], dtype=np.int64)


def check_tag_types(example: TaggedExample, ids: Mapping[str, int]) -> None:
    """Raise UserError for a tag of a type that the training file lacks; `ids`: its tags, in IOB2 as the example's."""
    if unknown := sorted({tag.partition("-")[2] for tag in example.tags or () if tag not in ids}):
        known = join_names(sorted({tag.partition("-")[2] for tag in ids} - {""}), 20)
        raise UserError(
            f"{example.place}: the sentence that begins here has tags of type {join_names(unknown, 5)}; the training "
            f"file's types are {known}; mend one of the files"
        )
