"""Corpora made in memory for the tests of examples, masks and batches: sentence lengths in, shards out.

With `traceable` ids every token of the corpus has an id of its own, which says where a piece of a batch came from.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from bertsmith.corpus.masking import TokenizerInfo

FIRST_ID = 10  # ids below are special or unused
PAD, UNK, CLS, SEP, MASK = 0, 1, 2, 3, 4


@dataclass
class MadeShard:
    tokens: np.ndarray
    sentence_lengths: np.ndarray
    document_offsets: np.ndarray
    document_token_offsets: np.ndarray
    fingerprint: str = "made"


@dataclass
class MadeSplit:
    shards: list[MadeShard] = field(default_factory=list)


def make_split(documents: Sequence[Sequence[int]], shards: int = 1, vocab_size: int | None = None) -> MadeSplit:
    """A split of documents given as their sentences' lengths; traceable ids, or random ones below `vocab_size`."""
    split = MadeSplit()
    next_id = FIRST_ID
    generator = np.random.default_rng(0)
    for part in np.array_split(np.arange(len(documents)), min(shards, len(documents))):
        lengths = [np.array(documents[d], dtype=np.uint16) for d in part]
        sentences = np.concatenate(lengths)
        total = int(sentences.sum(dtype=np.int64))
        if vocab_size is None:
            tokens = np.arange(next_id, next_id + total, dtype=np.uint32)
            next_id += total
        else:
            tokens = generator.integers(FIRST_ID, vocab_size, total).astype(np.uint16)
        split.shards.append(
            MadeShard(
                tokens=tokens,
                sentence_lengths=sentences,
                document_offsets=np.cumsum([0, *map(len, lengths)]).astype(np.int32),
                document_token_offsets=np.cumsum([0, *(int(n.sum(dtype=np.int64)) for n in lengths)]).astype(np.int32),
            )
        )
    return split


def random_documents(count: int, seed: int = 0, sentences: int = 20, longest: int = 40) -> list[list[int]]:
    """`count` documents of 1 … `sentences` sentences of 1 … `longest` tokens."""
    generator = np.random.default_rng(seed)
    return [generator.integers(1, longest + 1, generator.integers(1, sentences + 1)).tolist() for _ in range(count)]


def make_tokenizer(vocab_size: int, continuation_share: float = 0.0, fingerprint: str = "made") -> TokenizerInfo:
    """Ids 0–4 are special, 5–9 unused; a share of the rest are continuations."""
    ids = np.arange(vocab_size)
    return TokenizerInfo(
        vocab_size=vocab_size,
        cls_id=CLS,
        sep_id=SEP,
        mask_id=MASK,
        maskable=ids > MASK,
        continuation=(ids >= FIRST_ID) & (np.random.default_rng(1).random(vocab_size) < continuation_share),
        replacements=ids[FIRST_ID:].astype(np.int64),
        fingerprint=fingerprint,
    )
