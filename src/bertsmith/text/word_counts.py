"""Texts → how often each of BERT's words occurs: exact 64-bit counts in bounded memory, for any number of workers.

`count_words` is a pure function of a chunk of texts; `WordCounts` adds the chunks up, and moves to disk what does not
fit in memory. Sums do not depend on the order of adding: neither file order nor workers change a count.
"""

import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bertsmith.storage import disk_errors
from bertsmith.text.words import Normalization, WordSplitter, split_at_blanks

CHUNK_CHARACTERS = 4_000_000
"""Texts are counted in chunks of about this many characters; longer documents are cut at the edge of a word."""
WORDS_IN_MEMORY = 1_500_000
"""About 300 MB; more distinct words than that go to disk."""

_PARTITIONS = 64
_MANY_BLANKS = 1 / 12  # blanks a character: below it, text is taken to be of a script that has no blanks


@dataclass
class WordTally:
    """Counts of one chunk. `words` are joined by newlines, which no word holds: one string travels between processes
    many times quicker than a hundred thousand."""

    words: str
    counts: np.ndarray
    """int64 (number of words,)."""
    overlong_words: int
    """Occurrences of words over the limit of WordPiece: [UNK] whatever the vocabulary, so not counted."""
    overlong_characters: int


def count_words(texts: Iterable[str], normalization: Normalization) -> WordTally:
    """Count BERT's words in `texts`, leaving out (and counting) those over `normalization.max_word_characters`."""
    splitter = WordSplitter(normalization)
    pieces: Counter[str] = Counter()
    for text in texts:
        found = split_at_blanks(text)
        if len(found) < len(text) * _MANY_BLANKS:
            # Chinese, Japanese, or data in long lines: hardly a piece would come twice, their parts do
            for piece in found:
                pieces.update(splitter.split_runs(piece))
        else:
            pieces.update(found)

    limit = normalization.max_word_characters
    tally: dict[str, int] = {}
    overlong_words = overlong_characters = 0
    for piece, count in pieces.items():
        for word in splitter.words(piece):
            if len(word) <= limit:
                tally[word] = tally.get(word, 0) + count
            else:
                overlong_words += count
                overlong_characters += count * len(word)
    counts = np.fromiter(tally.values(), np.int64, len(tally))
    return WordTally("\n".join(tally), counts, overlong_words, overlong_characters)


def cut_text(text: str, splitter: WordSplitter, size: int) -> Iterator[tuple[str, int]]:
    """Cut `text` where a word ends, into parts of at most `size` characters: (part, 0).

    A stretch of more than `size` characters without any such place is one over-long word: ("", its length).
    """
    start = 0
    while len(text) - start > size:
        end = splitter.last_boundary(text, start, start + size)
        if end == start:
            end = splitter.next_boundary(text, start + size)
        yield (text[start:end], 0) if end - start <= size else ("", end - start)
        start = end
    if start < len(text):
        yield text[start:], 0


class WordCounts:
    """The sum of many tallies. `folder` takes what does not fit in memory; it is made when needed.

    Partitions by a checksum of the word: each is small enough to be summed up in memory at the end.
    """

    def __init__(self, folder: Path, words_in_memory: int = WORDS_IN_MEMORY) -> None:
        self.folder = folder
        self.words_in_memory = words_in_memory
        self.overlong_words = 0
        self.overlong_characters = 0
        self._counts: dict[str, int] = {}
        self._spilled = False

    def add(self, tally: WordTally) -> None:
        """Add a chunk's counts."""
        self.overlong_words += tally.overlong_words
        self.overlong_characters += tally.overlong_characters
        _add(self._counts, tally.words, tally.counts)
        if len(self._counts) > self.words_in_memory:
            self._spill()

    def groups(self) -> Iterator[dict[str, int]]:
        """The sums as several dictionaries; every word is in exactly one of them. Ends the adding."""
        if not self._spilled:
            yield self._counts
            return
        self._spill()
        for partition in range(_PARTITIONS):
            total: dict[str, int] = {}
            blocks = (self.folder / f"{partition}.counts").read_bytes()
            words = (self.folder / f"{partition}.words").read_bytes().decode("utf-8")
            _add(total, words.removesuffix("\n"), np.frombuffer(blocks, np.int64))
            yield total

    def _spill(self) -> None:
        self._spilled = True
        parts: list[list[str]] = [[] for _ in range(_PARTITIONS)]
        for word in self._counts:
            parts[zlib.crc32(word.encode("utf-8")) % _PARTITIONS].append(word)
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for partition, words in enumerate(parts):
                counts = np.fromiter(map(self._counts.__getitem__, words), np.int64, len(words))
                with (self.folder / f"{partition}.counts").open("ab") as file:
                    file.write(counts.tobytes())
                with (self.folder / f"{partition}.words").open("ab") as file:
                    file.write("".join(word + "\n" for word in words).encode("utf-8"))
        self._counts = {}


def _add(total: dict[str, int], words: str, counts: np.ndarray) -> None:
    if words:
        get = total.get
        for word, count in zip(words.split("\n"), counts.tolist(), strict=True):
            total[word] = get(word, 0) + count
