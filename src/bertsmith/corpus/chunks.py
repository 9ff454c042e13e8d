"""A chunk of documents as token ids: what a worker makes of text and what the shard writer appends.

Plain numpy arrays, which travel between processes, or machines, as a few buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np

LONGEST_SENTENCE = 65_535
"""Tokens; sentence lengths are stored as uint16. `split_sentences` gives at most about 10,000 characters."""


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 65_535 else np.uint32)


@dataclass(frozen=True)
class TokenChunk:
    """Documents one after the other. No sentence is empty; a document may be (the shard writer drops it)."""

    tokens: np.ndarray
    """(T,) uint16 or uint32"""
    sentence_lengths: np.ndarray
    """(S,) uint16, tokens of each sentence"""
    document_lengths: np.ndarray
    """(D,) int32, sentences of each document"""
    continues: bool = False
    """The first document goes on with the last document of the chunk before it."""

    @classmethod
    def from_lists(cls, documents: Sequence[Sequence[Sequence[int]]], vocab_size: int) -> "TokenChunk":
        """From documents given as lists of sentences given as lists of ids."""
        sentences = [sentence for document in documents for sentence in document]
        ids = np.array([i for sentence in sentences for i in sentence], np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"token ids from {ids.min()} to {ids.max()} in a vocabulary of {vocab_size}")
        lengths = np.array([len(sentence) for sentence in sentences], np.int64)
        if len(lengths) and not 1 <= lengths.min() <= lengths.max() <= LONGEST_SENTENCE:
            raise ValueError(f"sentences of {lengths.min()} to {lengths.max()} tokens; 1 to {LONGEST_SENTENCE} fit")
        document_lengths = np.array([len(document) for document in documents], np.int32)
        return cls(ids.astype(token_dtype(vocab_size)), lengths.astype(np.uint16), document_lengths)


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
class TokenizedChunk:
    """What a worker gives back."""

    split: str
    ids: TokenChunk
    lost: ChunkCounts
    digest: bytes
    """Of the text that came in (`TextChunk.digest`)."""
