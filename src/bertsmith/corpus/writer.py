"""Writing a corpus folder: shards of both splits, token counts, the tokenizer's files, the index and the report.

Chunks of token ids go in, in corpus order; the bytes that come out depend on the sequence of chunks alone. Memory is
one shard's worth of ids for each split.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertsmith.corpus.chunks import ChunkCounts, TokenChunk, TokenizedChunk
from bertsmith.corpus.shards import COUNTS, FORMAT_VERSION, INDEX, REPORT, SPLITS, TOKENIZER, ShardEntry, shard_schema
from bertsmith.storage import atomic_folder, disk_errors

if TYPE_CHECKING:
    from bertsmith.text.tokenizer import BertTokenizer

SHARD_TOKENS = 1 << 24
"""Tokens a shard file holds at most (unless one chunk is larger): 34 MB, which the writer gathers in memory."""


@dataclass
class SplitState:
    """What became of the chunks of a split so far: all that going on from there needs, but for their tokens."""

    token_counts: np.ndarray
    """(V,) int64"""
    chunks: int = 0
    digest: str = ""
    """Of the text of these chunks (hexadecimal), to know them again."""
    documents: int = 0
    """Documents that came in, those without any token among them."""
    single_sentence_documents: int = 0
    cut_documents: int = 0
    """Cuts of documents at the end of a shard file; each stores one document as two."""
    open_sentences: int = 0
    """Of the last document, which the next chunk may continue."""
    lost: ChunkCounts = field(default_factory=ChunkCounts)

    def copy(self) -> "SplitState":
        return replace(self, token_counts=self.token_counts.copy(), lost=replace(self.lost))


def extend_digest(before: str, chunk: bytes) -> str:
    """The digest of some chunks and one more; `chunk` is its own."""
    return hashlib.blake2b(bytes.fromhex(before) + chunk, digest_size=16).hexdigest()


OnShard = Callable[[ShardEntry, SplitState], None]


class ShardWriter:
    """Writes the shards of one split: chunks go in, in corpus order; a file is closed before it would grow too long.

    `on_shard` is told of every shard file that is written, with the state of the split at its end.
    """

    def __init__(
        self,
        folder: Path,
        split: str,
        fingerprint: str,
        vocab_size: int,
        shard_tokens: int = SHARD_TOKENS,
        on_shard: OnShard = lambda entry, state: None,
    ):
        self.folder, self.split, self.shard_tokens, self.on_shard = folder, split, shard_tokens, on_shard
        self.schema = shard_schema(fingerprint, vocab_size, split)
        self.entries: list[ShardEntry] = []
        self.state = SplitState(np.zeros(vocab_size, np.int64))
        self._chunks: list[TokenChunk] = []
        self._tokens = 0
        self._starts_inside = False  # the shard, a document whose beginning is in the one before

    def go_on(self, entries: Sequence[ShardEntry], state: SplitState) -> None:
        """Take up where a writer stopped that had written these shards; the chunks in them are not added again."""
        self.entries, self.state = list(entries), state.copy()

    def add(self, chunk: TokenChunk, lost: ChunkCounts | None = None, digest: bytes = b"") -> None:
        """Append the documents of `chunk`; the file boundaries depend on the sequence of chunks alone."""
        lengths, state = chunk.document_lengths, self.state
        if self._tokens and self._tokens + len(chunk.tokens) > self.shard_tokens:
            self._write_shard()
        if not self._chunks:
            self._starts_inside = chunk.continues and state.open_sentences > 0
        state.chunks += 1
        state.digest = extend_digest(state.digest, digest)
        state.lost.add(lost or ChunkCounts())
        state.token_counts += np.bincount(chunk.tokens, minlength=len(state.token_counts))
        if not len(lengths):
            return
        state.documents += len(lengths) - int(chunk.continues)
        goes_on = chunk.continues and len(lengths) == 1
        state.open_sentences = int(lengths[-1]) + (state.open_sentences if goes_on else 0)
        self._chunks.append(chunk)
        self._tokens += len(chunk.tokens)

    def close(self) -> list[ShardEntry]:
        """Write what is left and return the index entries of all shards, in order."""
        if self._chunks:
            self._write_shard()
        return self.entries

    @property
    def empty_documents(self) -> int:
        """Documents of which no token was left; they are not stored. To be read after `close`."""
        return self.state.documents + self.state.cut_documents - sum(entry.documents for entry in self.entries)

    def _write_shard(self) -> None:
        document_lengths = _join_continued(self._chunks)
        if self._starts_inside and document_lengths[0] > 0:
            self.state.cut_documents += 1
        document_lengths = document_lengths[document_lengths > 0]
        tokens = np.concatenate([chunk.tokens for chunk in self._chunks])
        sentence_lengths = np.concatenate([chunk.sentence_lengths for chunk in self._chunks])
        self._chunks, self._tokens = [], 0
        if not len(tokens):
            return
        self.state.single_sentence_documents += int((document_lengths == 1).sum())
        # (D + 1,) int32 each, as Arrow's lists want them: into the sentences, into the tokens
        document_offsets = np.concatenate([[0], np.cumsum(document_lengths)]).astype(np.int32)
        token_offsets = np.concatenate([[0], np.cumsum(sentence_lengths, dtype=np.int64)])[document_offsets]
        columns = [
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=self.schema.field(name).type)
            for name, offsets, values in (
                ("tokens", token_offsets.astype(np.int32), tokens),
                ("sentence_lengths", document_offsets, sentence_lengths),
            )
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        path = self.folder / f"{self.split}-{len(self.entries):05d}.arrow"
        with disk_errors(path):
            with pa.OSFile(os.fsencode(path), "wb") as sink, pa.ipc.new_file(sink, self.schema) as writer:
                writer.write_batch(batch)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.entries.append(
            ShardEntry(
                file=path.name,
                split=self.split,
                bytes=path.stat().st_size,
                documents=len(document_lengths),
                sentences=len(sentence_lengths),
                tokens=len(tokens),
                longest_sentence=int(sentence_lengths.max()),
                sha256=digest,
            )
        )
        self.on_shard(self.entries[-1], self.state)


def _join_continued(chunks: Sequence[TokenChunk]) -> np.ndarray:
    """(D,) int64: sentences a document over all chunks; a document spread over several counts once."""
    parts = [chunk.document_lengths.astype(np.int64) for chunk in chunks]
    whole = np.concatenate(parts)
    starts = np.cumsum([0] + [len(part) for part in parts[:-1]])
    continued = [start for start, chunk in zip(starts, chunks, strict=True) if chunk.continues and start]
    first = np.ones(len(whole), bool)  # True where a document begins
    first[continued] = False
    return np.bincount(np.cumsum(first) - 1, weights=whole).astype(np.int64)


class CorpusWriter:
    """Fills a corpus folder: shards of both splits, token counts, the tokenizer's files, the index, the report.

    `folder` is the (partial) folder to fill; wrap it in `atomic_folder`, or call `write_corpus` for all of it at once.
    """

    def __init__(
        self,
        folder: Path,
        tokenizer: "BertTokenizer",
        shard_tokens: int = SHARD_TOKENS,
        on_shard: OnShard = lambda entry, state: None,
    ) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        with disk_errors(folder):
            tokenizer.save(folder / TOKENIZER)
        self.writers = {
            split: ShardWriter(folder, split, tokenizer.fingerprint, tokenizer.vocab_size, shard_tokens, on_shard)
            for split in SPLITS
        }

    def add(self, chunk: TokenizedChunk) -> None:
        """Append a chunk of documents to its split."""
        self.writers[chunk.split].add(chunk.ids, chunk.lost, chunk.digest)

    def finish(self, report: dict[str, Any]) -> dict[str, Any]:
        """Write what is left; return what went to report.json: `report` with totals, sha256 and bytes_per_token added.

        `sha256` covers the shard files and the token counts, names and contents: not the report, not the tokenizer's
        files (their fingerprint is in every shard).
        """
        entries = [entry for split in SPLITS for entry in self.writers[split].close()]
        counts = self.folder / COUNTS
        with disk_errors(self.folder):
            token_counts = sum(self.writers[split].state.token_counts for split in SPLITS)
            np.save(counts, np.asarray(token_counts, np.int64), allow_pickle=False)
            digests = {entry.file: bytes.fromhex(entry.sha256) for entry in entries}
            digests[COUNTS] = hashlib.sha256(counts.read_bytes()).digest()
            combined = hashlib.sha256()
            for name in sorted(digests):  # the same digest as storage.sha256_of_files, without reading the shards again
                combined.update(name.encode("utf-8") + b"\0" + digests[name])
            index = {
                "format": FORMAT_VERSION,
                "tokenizer_fingerprint": self.tokenizer.fingerprint,
                "vocab_size": self.tokenizer.vocab_size,
                "special_ids": list(self.tokenizer.special_ids),
                "sha256": combined.hexdigest(),
                "shards": [asdict(entry) for entry in entries],
            }
            (self.folder / INDEX).write_bytes(_to_json(index))
            tokens = sum(entry.tokens for entry in entries)
            report = report | {
                "sentences": sum(entry.sentences for entry in entries),
                "tokens": tokens,
                "bytes_per_token": 0.0,
                "sha256": index["sha256"],
            }
            others = [counts, self.folder / INDEX, *(self.folder / TOKENIZER).iterdir()]
            size = sum(entry.bytes for entry in entries) + sum(path.stat().st_size for path in others)
            for _ in range(3):  # the report is on disk too, and its own digits change its size
                report["bytes_per_token"] = round((size + len(_to_json(report))) / max(tokens, 1), 4)
            (self.folder / REPORT).write_bytes(_to_json(report))
        return report


def write_corpus(
    folder: Path,
    tokenizer: "BertTokenizer",
    splits: dict[str, Iterable[Sequence[Sequence[int]]]],
    shard_tokens: int = SHARD_TOKENS,
) -> None:
    """Write documents that are token ids already, `{"train": [[[ids of a sentence], …], …], "held-out": …}`."""
    with atomic_folder(folder) as partial:
        writer = CorpusWriter(partial, tokenizer, shard_tokens)
        for split, rows in splits.items():
            for sentences in rows:
                writer.writers[split].add(TokenChunk.from_lists([sentences], tokenizer.vocab_size))
        writer.finish({})


def _to_json(value: dict[str, Any]) -> bytes:
    # file names in it may hold undecodable bytes (all of é, in the C locale): they are written as they are
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8", "surrogateescape")
