"""A block of documents as token ids: what a worker makes of text and what the shard writer appends.

Plain numpy arrays, so that a block travels between processes, or machines, as a few buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

LONGEST_SENTENCE = 65_535
"""Sentence lengths are stored as uint16; a longer sentence is stored as several (no token is lost)."""


def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 where every id fits, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 65_535 else np.uint32)


@dataclass(frozen=True)
class TokenBlock:
    """Documents one after the other; no empty document and no empty sentence among them."""

    tokens: np.ndarray
    """(T,) uint16 or uint32"""
    sentence_lengths: np.ndarray
    """(S,) uint16, tokens of each sentence"""
    document_lengths: np.ndarray
    """(D,) int32, sentences of each document"""

    @classmethod
    def from_lists(cls, documents: Sequence[Sequence[Sequence[int]]], vocab_size: int) -> "TokenBlock":
        """From documents given as lists of sentences given as lists of ids; what is empty is left out."""
        kept = [[sentence for sentence in document if len(sentence)] for document in documents]
        kept = [document for document in kept if document]
        sentences = [sentence for document in kept for sentence in document]
        ids = np.array([i for sentence in sentences for i in sentence], np.int64)
        if len(ids) and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"token ids from {ids.min()} to {ids.max()} in a vocabulary of {vocab_size}")
        lengths = np.array([len(sentence) for sentence in sentences], np.int64)
        lengths, document_lengths, _ = cut_long_sentences(lengths, np.array([len(d) for d in kept], np.int64))
        return cls(ids.astype(token_dtype(vocab_size)), lengths.astype(np.uint16), document_lengths.astype(np.int32))

    @staticmethod
    def concatenate(blocks: Sequence["TokenBlock"]) -> "TokenBlock":
        """One block of all their documents, in order."""
        return TokenBlock(
            np.concatenate([block.tokens for block in blocks]),
            np.concatenate([block.sentence_lengths for block in blocks]),
            np.concatenate([block.document_lengths for block in blocks]),
        )

    @property
    def document_offsets(self) -> np.ndarray:
        """(D + 1,) int32 into the sentences."""
        return np.concatenate([[0], np.cumsum(self.document_lengths)]).astype(np.int32)

    @property
    def document_token_offsets(self) -> np.ndarray:
        """(D + 1,) int32 into the tokens."""
        sentence_ends = np.concatenate([[0], np.cumsum(self.sentence_lengths, dtype=np.int64)])
        return sentence_ends[self.document_offsets].astype(np.int32)


def cut_long_sentences(lengths: np.ndarray, document_lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Store sentences over LONGEST_SENTENCE tokens as several; returns both arrays anew and how many were cut."""
    long = np.flatnonzero(lengths > LONGEST_SENTENCE)
    if not len(long):
        return lengths, document_lengths, 0
    pieces = -(-lengths // LONGEST_SENTENCE)  # (S,) rows each sentence takes, ceiling
    out = np.repeat(np.minimum(lengths, LONGEST_SENTENCE), pieces)
    ends = np.cumsum(pieces) - 1
    out[ends] = lengths - (pieces - 1) * LONGEST_SENTENCE
    owner = np.repeat(np.arange(len(document_lengths)), document_lengths)  # (S,) document of each sentence
    return out, np.bincount(owner, weights=pieces, minlength=len(document_lengths)).astype(np.int64), len(long)
