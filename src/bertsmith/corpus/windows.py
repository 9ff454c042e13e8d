"""Where a split can be cut: blocks of about 32 k tokens, shuffled every epoch, and windows of 64 blocks of that order.

In go the mapped shards; out come block boundaries, the blocks of a window, the sentences of some blocks. A shuffle of
blocks, then of the examples within a window, mixes texts from 64 places, yet needs neither a pass over the corpus at
the start nor memory that grows with it: a boundary costs one binary search, and a window is read when its turn comes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bertsmith.corpus.random_bits import derive_key, permutation
from bertsmith.errors import UserError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

BLOCK_TOKENS = 32_768
WINDOW_BLOCKS = 64
_LONG_DOCUMENT = 65_536  # sentences


class ShardArrays(Protocol):
    """What is read of a shard; `corpus.shards.Shard` has the arrays mapped from disk."""

    @property
    def fingerprint(self) -> str:
        """The tokenizer's."""

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """uint16 or uint32 (tokens,)"""

    @property
    def sentence_lengths(self) -> npt.NDArray[Any]:
        """(sentences,) tokens of each sentence, at least 1"""

    @property
    def document_offsets(self) -> npt.NDArray[Any]:
        """(documents + 1,) into the sentences"""

    @property
    def document_token_offsets(self) -> npt.NDArray[Any]:
        """(documents + 1,) into the tokens"""


class SplitShards(Protocol):
    """A split of a corpus (`corpus.shards.CorpusSplit`)."""

    @property
    def shards(self) -> Sequence[ShardArrays]:
        """The split's shards, in corpus order."""


@dataclass(frozen=True)
class SentenceTable:
    """Sentences of some blocks, one row each, in block order; `start` counts the tokens of the sentence's shard."""

    shard: Ints
    start: Ints
    length: Ints
    document: Ints
    """Number of the document in the whole split."""
    block: Ints
    index: Ints
    """Number of the row within its block."""
    run_end: Ints
    """The row after the last one of the same document in the same block."""


class CorpusIndex:
    """The shards of a split, its counts, its block boundaries.

    A block is a range of tokens of one shard. It begins and ends with a document, or (inside a document that goes on
    for more than half a block, such as a novel) at a token; `sentence_table` then moves on to the next sentence.
    """

    def __init__(
        self, split: SplitShards, block_tokens: int = BLOCK_TOKENS, window_blocks: int = WINDOW_BLOCKS
    ) -> None:
        self.shards = [shard for shard in split.shards if len(shard.document_offsets) > 1]
        if not self.shards:
            raise UserError("the corpus split holds no documents; prepare it again from a larger text")
        counts = [len(shard.document_offsets) - 1 for shard in self.shards]
        self.document_base: Ints = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
        self.documents = int(self.document_base[-1])
        self.sentences = sum(len(shard.sentence_lengths) for shard in self.shards)
        self.tokens = sum(len(shard.tokens) for shard in self.shards)
        bounds = [_cut_blocks(shard.document_token_offsets, block_tokens) for shard in self.shards]
        self.block_shard: Ints = np.repeat(np.arange(len(bounds)), [len(b) - 1 for b in bounds])  # (blocks,)
        self.block_start: Ints = np.concatenate([b[:-1] for b in bounds])  # (blocks,) tokens of the shard
        self.block_end: Ints = np.concatenate([b[1:] for b in bounds])
        self.blocks = len(self.block_shard)
        self.window_blocks = window_blocks
        self.windows = -(-self.blocks // window_blocks)
        self._order: tuple[tuple[int, int], Ints] | None = None
        self._long_documents: dict[tuple[int, int], Ints] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_order": None, "_long_documents": {}}

    def window(self, key: int, epoch: int, window: int) -> Ints:
        """The blocks of one window of an epoch's order. `key` stands for the seed."""
        kept = self._order
        if kept is None or kept[0] != (key, epoch):
            kept = self._order = ((key, epoch), permutation(derive_key(key, "block order", epoch), self.blocks))
        return kept[1][window * self.window_blocks : (window + 1) * self.window_blocks]

    def sample_blocks(self, key: int, count: int = 64) -> Ints:
        """A sample of the blocks, two million tokens or all there are."""
        return np.sort(permutation(key, self.blocks)[:count])

    def document_at(self, shard: int, token: int) -> int:
        """The number, in the whole split, of the document that holds a token of a shard."""
        local = search_sorted(self.shards[shard].document_token_offsets, token, "right") - 1
        return int(self.document_base[shard] + local)

    def document_starts(self, block: int) -> Ints:
        """The tokens at which documents begin strictly inside a block."""
        offsets = self.shards[int(self.block_shard[block])].document_token_offsets
        low = search_sorted(offsets, self.block_start[block], "right")
        high = search_sorted(offsets, self.block_end[block], "left")
        return offsets[int(low) : int(high)].astype(np.int64)

    def sentence_offsets(self, shard: int, document: int) -> Ints:
        """(sentences + 1,) the tokens at which the sentences of a document begin, and its end; numbers in the shard."""
        arrays = self.shards[shard]
        first, end = int(arrays.document_offsets[document]), int(arrays.document_offsets[document + 1])
        kept = self._long_documents.get((shard, document))
        if kept is not None:
            return kept
        offsets = np.empty(end - first + 1, dtype=np.int64)
        offsets[0] = 0
        np.cumsum(arrays.sentence_lengths[first:end], dtype=np.int64, out=offsets[1:])
        offsets += int(arrays.document_token_offsets[document])
        if end - first > _LONG_DOCUMENT:
            # blocks of one enormous document (a corpus in one file) follow each other: do not sum it 64 times a window;
            # a new dictionary of at most four, because another thread may be reading the old one
            latest = list(self._long_documents.items())[-3:]
            self._long_documents = dict([*latest, ((shard, document), offsets)])
        return offsets

    def _block_sentences(self, block: int) -> tuple[Ints, Ints, Ints]:
        """Start, length and document (number in the split) of the sentences that begin in a block."""
        shard, start, end = int(self.block_shard[block]), int(self.block_start[block]), int(self.block_end[block])
        arrays = self.shards[shard]
        first = int(search_sorted(arrays.document_token_offsets, start, "right")) - 1
        last = int(search_sorted(arrays.document_token_offsets, end, "left"))
        if last - first == 1:
            starts = self.sentence_offsets(shard, first)
            lengths = np.diff(starts)
            starts = starts[:-1]
            documents = np.broadcast_to(np.int64(first), len(starts))
        else:
            bounds = arrays.document_offsets[first : last + 1].astype(np.int64)
            lengths = arrays.sentence_lengths[bounds[0] : bounds[-1]].astype(np.int64)
            starts = np.cumsum(lengths) - lengths + int(arrays.document_token_offsets[first])
            documents = np.repeat(np.arange(first, last), np.diff(bounds))
        low, high = np.searchsorted(starts, (start, end))
        return starts[low:high], lengths[low:high], documents[low:high] + self.document_base[shard]

    def sentence_table(self, blocks: Ints, room: int) -> SentenceTable:
        """The sentences of `blocks`. One longer than `room` tokens is cut into pieces of room / 2 and what is left.

        The reference takes about the middle of such a sentence and drops the rest. As pieces, two of which make a full
        pair, all of it is learnt from.
        """
        parts = [self._block_sentences(block) for block in blocks.tolist()]
        start, length, document = (np.concatenate([part[i] for part in parts]) for i in range(3))
        block = np.repeat(blocks, [len(part[0]) for part in parts])
        if len(length) and length.max() > room:
            size = piece_size(room)
            pieces = np.where(length > room, -(-length // size), 1)
            row = np.repeat(np.arange(len(pieces)), pieces)
            low = size * (np.arange(len(row)) - np.repeat(np.cumsum(pieces) - pieces, pieces))
            high = np.where(pieces[row] > 1, np.minimum(low + size, length[row]), length[row])
            start, length, document, block = start[row] + low, high - low, document[row], block[row]
        return SentenceTable(
            shard=self.block_shard[block],
            start=start,
            length=length,
            document=document,
            block=block,
            index=np.arange(len(block)) - _run_bounds(block)[0],
            run_end=_run_bounds(block, document)[1],
        )


def piece_size(room: int) -> int:
    """Tokens of the pieces of a sentence that has no room: half of it, rounded up, so that two fill a pair."""
    return (room + 1) // 2


def search_sorted(array: npt.NDArray[Any], values: Any, side: Any = "left") -> Ints:
    """`np.searchsorted` that casts the few values to the type of the array; numpy would copy the whole mapped array."""
    return np.asarray(np.searchsorted(array, np.asarray(values).astype(array.dtype), side=side), dtype=np.int64)


def _cut_blocks(document_token_offsets: npt.NDArray[Any], block_tokens: int) -> Ints:
    """The tokens at which the blocks of a shard begin, and the last one's end.

    Nominal boundaries lie `block_tokens` apart; each moves on to the next document if that is nearer than half a block.
    """
    start, end = int(document_token_offsets[0]), int(document_token_offsets[-1])
    nominal = np.arange(start + block_tokens, end, block_tokens, dtype=np.int64)
    following = document_token_offsets[search_sorted(document_token_offsets, nominal)].astype(np.int64)
    cuts = np.where(following - nominal < block_tokens // 2, following, nominal)
    return np.unique(np.concatenate([[start], cuts, [end]])).astype(np.int64)


def _run_bounds(*columns: Ints) -> tuple[Ints, Ints]:
    """For each row: the first row of its run of equal rows, and the row after the last one."""
    count = len(columns[0])
    changes = np.ones(count, dtype=np.bool_)
    changes[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    firsts = np.flatnonzero(changes)
    ends = np.append(firsts[1:], count)
    lengths = ends - firsts if count else ends[:0]
    return np.repeat(firsts, lengths), np.repeat(ends if count else ends[:0], lengths)
