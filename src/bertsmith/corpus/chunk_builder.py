"""Documents → chunks of text for the workers, each document in the training or the held-out split by its hash.

Documents longer than a chunk are cut where a line or a sentence ends and put together again by the shard writer.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from bertsmith.corpus.shards import SPLITS
from bertsmith.corpus.tokenize import TextChunk
from bertsmith.text.sentences import split_sentences

CHUNK_CHARACTERS = 1 << 20
"""Text in one piece of work: about a third of a second of a core, a few MB in memory."""

HELD_OUT = 0.02
"""Share of documents held out for evaluation. Of 111 novels among 19,909 documents, 1 % held out none."""

HELD_OUT_AT_LEAST = 2
"""Documents held out of four or more: with one alone, no pair could have its other half from another document."""

_LARGEST_STANDBY = 4 * CHUNK_CHARACTERS


def cut_text(text: str, limit: int, language: str) -> Iterator[str]:
    """Cut `text` into parts of at most `limit` characters that together are `text`.

    Each cut is made in the second half of what the part may hold: behind the last paragraph there, failing that behind
    the last line, sentence, blank, in this order, failing all at the limit.
    """
    start = 0
    while len(text) - start > limit:
        low, high = start + limit // 2, start + limit
        end = _find_boundary(text, low, high, language) or text.rfind(" ", low, high) + 1 or high
        yield text[start:end]
        start = end
    yield text[start:]


def _find_boundary(text: str, low: int, high: int, language: str) -> int:
    """Where in text[low:high] the last paragraph begins, failing that line, that sentence; 0 if it is all one."""
    for mark in ("\n\n", "\n"):
        place = text.rfind(mark, low, high)
        if place >= 0:
            return place + len(mark)
    sentences = split_sentences(text[low:high], language)
    return max(text.rfind(sentences[-1], low, high), 0) if len(sentences) > 1 else 0


@dataclass
class _OpenChunk:
    """The documents of a split that wait to become a chunk."""

    texts: list[str] = field(default_factory=list)
    characters: int = 0
    continues: bool = False


class ChunkBuilder:
    """Documents in, chunks out: `add` and `finish` yield the chunks that are full. Splits by document hash.

    A document is held out when its hash, read as a fraction, is below `held_out` (but for the corpus's first, so that
    there is always one to train on). If fewer than two are, those with the smallest hashes are, which wait here (two,
    and none over four million characters) until that is decided. Of a single document, the end is held out.
    """

    def __init__(
        self,
        held_out: float,
        chunk_characters: int,
        language: str,
    ) -> None:
        self.held_out = held_out
        self.chunk_characters, self.language = chunk_characters, language
        self.documents = dict.fromkeys(SPLITS, 0)
        self.cut_documents = 0
        """1 if the end of a document was held out: it is then stored as two."""
        self.note = ""
        """What is unusual about the held-out split, for the user; empty if nothing is."""
        self._open = {split: _OpenChunk() for split in SPLITS}
        self._begun = False
        self._standby: list[tuple[bytes, str]] = []  # those with the smallest hashes, smallest first

    def add(self, text: str, key: bytes) -> Iterator[TextChunk]:
        """Place one document; `key` is its `hash_document`."""
        if self._begun and int.from_bytes(key[:8], "big") < self.held_out * 2**64:
            yield from self._place("held-out", text)
        elif self.held_out and self._missing and len(text) <= _LARGEST_STANDBY:
            self._standby = sorted([*self._standby, (key, text)], key=lambda pair: pair[0])
        else:
            yield from self._place("train", text)
        self._begun = True
        while len(self._standby) > self._missing:
            yield from self._place("train", self._standby.pop()[1])

    def finish(self) -> Iterator[TextChunk]:
        """Decide about the documents that wait, and yield what is left."""
        everything = sum(self.documents.values()) + len(self._standby)
        by_hash = self.documents["held-out"]
        for _, text in self._standby:
            wanted = self.documents["held-out"] < min(HELD_OUT_AT_LEAST, everything // 2)
            yield from self._place("held-out" if wanted else "train", text)
        if self.documents["held-out"] > by_hash:
            self.note = (
                f"of only {everything:,} documents, a share of {self.held_out:g} holds out {by_hash};"
                f" held out instead: {self.documents['held-out']}, those with the smallest hashes"
            )
        if self.held_out and everything and not self.documents["held-out"]:
            yield from self._hold_out_end()
        for split in SPLITS:
            yield from self._flush(split)

    @property
    def _missing(self) -> int:
        return max(0, HELD_OUT_AT_LEAST - self.documents["held-out"])

    def _place(self, split: str, text: str) -> Iterator[TextChunk]:
        self.documents[split] += 1
        for number, part in enumerate(cut_text(text, self.chunk_characters, self.language)):
            chunk = self._open[split]
            if chunk.texts and (number or chunk.characters + len(part) > self.chunk_characters):
                yield from self._flush(split)
                chunk = self._open[split]
            chunk.continues = chunk.continues or number > 0
            chunk.texts.append(part)
            chunk.characters += len(part)

    def _flush(self, split: str) -> Iterator[TextChunk]:
        chunk, self._open[split] = self._open[split], _OpenChunk()
        if chunk.texts:
            yield TextChunk(split, chunk.texts, chunk.continues)

    def _hold_out_end(self) -> Iterator[TextChunk]:
        """All documents train so far: hold out the last, or, of one that is alone or longer than a chunk, its end."""
        chunk = self._open["train"]
        last = chunk.texts.pop()
        if chunk.texts or (self.documents["train"] > 1 and not chunk.continues):
            self.documents["train"] -= 1
            self.note = "no document is below the share to hold out; the last one is held out"
            yield from self._place("held-out", last)
            return
        kept = ""
        if not chunk.continues:
            kept = last[: _find_boundary(last, len(last) // 2, len(last) * 9 // 10, self.language)]
            if not kept:
                chunk.texts.append(last)
                return
            chunk.texts.append(kept)
        self.cut_documents = 1
        self.note = "too few documents to hold one out: the end of the last one is held out"
        yield from self._place("held-out", last[len(kept) :])
        self.documents["held-out"] -= 1
