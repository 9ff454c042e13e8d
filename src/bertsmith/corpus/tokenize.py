"""Text → sentences → token ids, a chunk of documents at a time: the work of a preparation worker.

`tokenize_chunk` is a pure function of the chunk: which process or machine runs it cannot change a byte of the corpus.
"""

from dataclasses import dataclass, field, fields
from functools import lru_cache

import numpy as np

from bertsmith.corpus.chunks import LONGEST_SENTENCE, TokenChunk
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer


@dataclass
class ChunkCounts:
    """The data-loss report of tokenization; adds up over chunks."""

    characters: int = 0
    """Characters of the documents kept (duplicates are not among them)."""
    unknown_tokens: int = 0
    """Words that became [UNK]."""
    long_words: int = 0
    """Those of them that are unknown because they are longer than the tokenizer takes."""
    empty_sentences: int = 0
    """Sentences of which the tokenizer keeps nothing (control characters, say); dropped."""
    repeated_sentences: int = 0
    """Sentences that occur earlier in the same chunk (about a million characters), word for word."""

    def add(self, other: "ChunkCounts") -> None:
        """Add the counts of another chunk."""
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True)
class TextChunk:
    """Documents of one split, about a million characters together, with what is needed to tokenize them."""

    split: str
    texts: list[str] = field(repr=False)
    continues: bool
    """The first text goes on with the document that ended the split's chunk before."""
    tokenizer: str
    """Folder of the tokenizer."""
    fingerprint: str
    """Fingerprint the tokenizer in that folder must have."""
    language: str


@lru_cache(maxsize=1)
def _tokenizer(folder: str, fingerprint: str) -> BertTokenizer:
    """Loaded once a process, not once a chunk."""
    tokenizer = load_tokenizer(folder)
    if tokenizer.fingerprint != fingerprint:
        raise RuntimeError(f"{folder}: the tokenizer changed while it was in use")
    return tokenizer


def tokenize_chunk(chunk: TextChunk) -> tuple[str, TokenChunk, ChunkCounts]:
    """Split into sentences, turn into ids; returns the split's name, the ids and what was lost on the way."""
    tokenizer = _tokenizer(chunk.tokenizer, chunk.fingerprint)
    documents = [split_sentences(text, chunk.language) for text in chunk.texts]
    sentences = [sentence for document in documents for sentence in document]
    tokens, lengths = tokenizer.encode_flat(sentences)

    counts = ChunkCounts(characters=sum(map(len, chunk.texts)))
    counts.repeated_sentences = len(sentences) - len(set(sentences))
    unknown = tokens == tokenizer.unk_id
    counts.unknown_tokens = int(unknown.sum())
    if counts.unknown_tokens:
        owner = np.repeat(np.arange(len(sentences)), lengths)
        counts.long_words = tokenizer.count_overlong_words(sentences[s] for s in np.unique(owner[unknown]))

    document_lengths = np.array([len(document) for document in documents], np.int64)
    full = lengths > 0
    counts.empty_sentences = int((~full).sum())
    if counts.empty_sentences:
        owner = np.repeat(np.arange(len(documents)), document_lengths)
        document_lengths = np.bincount(owner[full], minlength=len(documents))
        lengths = lengths[full]
    assert not len(lengths) or lengths.max() <= LONGEST_SENTENCE
    ids = TokenChunk(tokens, lengths.astype(np.uint16), document_lengths.astype(np.int32), chunk.continues)
    return chunk.split, ids, counts
