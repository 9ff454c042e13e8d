"""Word counts → the pieces of a WordPiece vocabulary, by merging the most frequent pair of neighbours over and over.

This is the training of `tokenizers`' WordPieceTrainer (byte-pair encoding, Sennrich et al. 2016, with ## before what
continues a word), but of one outcome: equal counts are decided by the pair's text, never by the order of a hash table.
All words lie in one array of symbols, linked both ways; an index from pair to places is kept up to date, so a merge
touches only the places it changes.
"""

import heapq
from collections.abc import Callable, Sequence

import numpy as np

_DEAD = -1  # no neighbour; a symbol that a merge has swallowed


class PairIndex:
    """Words as linked symbols, with the count and the places of every pair of neighbours."""

    def __init__(self, symbols: np.ndarray, lengths: np.ndarray, counts: np.ndarray) -> None:
        """`symbols` int32 (N,): ids of all words' symbols one after the other; `lengths`, `counts` (words,)."""
        total = len(symbols)
        if total >= 2**31:
            raise ValueError(f"{total} symbols do not fit 32-bit places")
        ends = np.cumsum(lengths)
        self.symbols = symbols
        self.counts = counts
        self.word = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
        self.next = np.arange(1, total + 1, dtype=np.int32)
        self.next[ends - 1] = _DEAD
        self.previous = np.arange(-1, total - 1, dtype=np.int32)
        self.previous[ends - lengths] = _DEAD
        self.pair_counts: dict[int, int] = {}
        self._places: dict[int, list[np.ndarray]] = {}
        left = np.flatnonzero(self.next != _DEAD).astype(np.int32)
        self._add(self._keys(left), left)

    def _keys(self, left: np.ndarray) -> np.ndarray:
        """Pair keys int64: id of the left symbol in the upper half, of its right neighbour in the lower."""
        return (self.symbols[left].astype(np.int64) << 32) | self.symbols[self.next[left]]

    def _add(self, keys: np.ndarray, places: np.ndarray) -> list[int]:
        """Count pairs in at `places` (of their left symbols); returns the distinct keys."""
        order = np.argsort(keys, kind="stable")
        keys, places = keys[order], places[order]
        distinct, starts, sums = _sum_groups(keys, self.counts[self.word[places]])
        bounds = [*starts, len(places)]
        for index, (key, count) in enumerate(zip(distinct, sums, strict=True)):
            found = places[bounds[index] : bounds[index + 1]]
            known = self._places.get(key)
            if known is None:
                self.pair_counts[key] = count
                self._places[key] = [found]
            else:
                self.pair_counts[key] += count
                known.append(found)
        return distinct

    def _remove(self, keys: np.ndarray, places: np.ndarray) -> None:
        """Count pairs out; their places are left and found out of date when they are used."""
        order = np.argsort(keys, kind="stable")
        distinct, _, sums = _sum_groups(keys[order], self.counts[self.word[places[order]]])
        for key, count in zip(distinct, sums, strict=True):
            left = self.pair_counts[key] - count
            if left:
                self.pair_counts[key] = left
            else:
                del self.pair_counts[key], self._places[key]

    def merge(self, left: int, right: int, merged: int) -> list[int]:
        """Replace `left` `right` by `merged` wherever they stand; returns the keys of pairs that may have grown."""
        symbols, following, previous = self.symbols, self.next, self.previous
        stored = self._places[left << 32 | right]
        first = np.sort(np.concatenate(stored)) if len(stored) > 1 else stored[0]
        second = following[first]
        # a place is out of date when a symbol of it was swallowed or has grown (place -1 is harmless: masked)
        valid = (symbols[first] == left) & (second != _DEAD) & (symbols[second] == right)
        if not valid.all():
            first, second = first[valid], second[valid]
        if left == right:
            taken = _every_other(first, second)
            first, second = first[taken], second[taken]
        before, after = previous[first], following[second]
        # "a b a b": the second of the first pair stands before the second pair; that edge must count once
        touching = np.zeros(len(first), dtype=bool)
        touching[1:] = before[1:] == second[:-1]
        has_before, has_after = (before != _DEAD) & ~touching, after != _DEAD
        outer = before[has_before]

        old = np.concatenate([outer, first, second[has_after]])
        self._remove(self._keys(old), old)
        symbols[first] = merged
        symbols[second] = _DEAD
        following[first] = after
        previous[after[has_after]] = first[has_after]
        new = np.concatenate([outer, first[has_after]])
        return self._add(self._keys(new), new)


def _sum_groups(keys: np.ndarray, values: np.ndarray) -> tuple[list[int], list[int], list[int]]:
    """Of sorted `keys`: the distinct ones, where each starts, and the sum of its `values`."""
    if not len(keys):
        return [], [], []
    starts = np.concatenate([[0], np.flatnonzero(keys[1:] != keys[:-1]) + 1])
    return keys[starts].tolist(), starts.tolist(), np.add.reduceat(values, starts).tolist()


def _every_other(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Of overlapping pairs ("aaa" holds two of "aa") take the first, third, … from the left: bool (len(first),)."""
    index = np.arange(len(first))
    chained = np.zeros(len(first), dtype=bool)
    chained[1:] = first[1:] == second[:-1]
    start = np.maximum.accumulate(np.where(chained, 0, index))
    return (index - start) % 2 == 0


def learn_pieces(
    alphabet: Sequence[str],
    index: PairIndex,
    room: int,
    min_frequency: int,
    on_piece: Callable[[], None] = lambda: None,
) -> list[str]:
    """At most `room` new pieces, in the order learned. `alphabet[i]` is the text of symbol i in `index`.

    Merges the pair with the highest count; among equals the one whose left, then right text comes first by code points.
    Ends when no pair occurs `min_frequency` times. `on_piece` is called after each.
    """
    texts = list(alphabet)
    ids = {text: symbol for symbol, text in enumerate(texts)}
    pieces: list[str] = []

    def entry(key: int) -> tuple[int, str, str, int]:
        return -index.pair_counts[key], texts[key >> 32], texts[key & 0xFFFFFFFF], key

    heap = [entry(key) for key, count in index.pair_counts.items() if count >= min_frequency]
    heapq.heapify(heap)
    while heap and len(pieces) < room:
        negative, left, right, key = heapq.heappop(heap)
        count = index.pair_counts.get(key, 0)
        if count != -negative:
            # counts fall while an entry waits; a pair that grew was entered again when it did
            if min_frequency <= count < -negative:
                heapq.heappush(heap, (-count, left, right, key))
            continue
        text = left + right[2:]
        merged = ids.get(text)
        if merged is None:  # two ways may lead to one piece ("a" "##bc", "ab" "##c"): then it is new only once
            merged = ids[text] = len(texts)
            texts.append(text)
            pieces.append(text)
            on_piece()
        for grown in index.merge(key >> 32, key & 0xFFFFFFFF, merged):
            if index.pair_counts[grown] >= min_frequency:
                heapq.heappush(heap, entry(grown))
    return pieces
