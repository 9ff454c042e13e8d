"""Text → sentences → token ids, a chunk of documents at a time: the work of a preparation worker.

`tokenize_chunk` is a pure function of the chunk: which process or machine runs it cannot change a byte of the corpus.
"""

import hashlib
import pickle
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from bertsmith.corpus.chunks import LONGEST_SENTENCE, ChunkCounts, TokenChunk, TokenizedChunk
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import BertTokenizer


@dataclass(frozen=True)
class TextChunk:
    """Documents of one split, about a million characters together."""

    split: str
    texts: list[str] = field(repr=False)
    continues: bool
    """The first text goes on with the document that ended the split's chunk before."""

    def digest(self) -> bytes:
        """16 bytes that depend on everything tokenization sees of the text: equal ones give equal ids."""
        digest = hashlib.blake2b(bytes([self.continues]), digest_size=16)
        for text in self.texts:
            data = text.encode("utf-8")
            digest.update(len(data).to_bytes(8, "little") + data)
        return digest.digest()


@dataclass(frozen=True)
class PackedTokenizer:
    """A tokenizer on its way to workers, which may have no file system in common; each unpacks it once."""

    fingerprint: str
    content: bytes = field(repr=False, compare=False)

    @classmethod
    def pack(cls, tokenizer: BertTokenizer) -> "PackedTokenizer":
        return cls(tokenizer.fingerprint, pickle.dumps(tokenizer))

    @lru_cache(maxsize=1)  # noqa: B019 - one tokenizer is to live as long as the process does
    def unpack(self) -> BertTokenizer:
        """The tokenizer, built once a process, not once a chunk."""
        tokenizer = pickle.loads(self.content)
        assert isinstance(tokenizer, BertTokenizer)
        return tokenizer


def tokenize_chunk(chunk: TextChunk, packed: PackedTokenizer, language: str) -> TokenizedChunk:
    """Split into sentences, turn into ids; counts what was lost on the way."""
    tokenizer = packed.unpack()
    documents = [split_sentences(text, language) for text in chunk.texts]
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
    return TokenizedChunk(chunk.split, ids, counts, chunk.digest())
