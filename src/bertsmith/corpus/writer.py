"""Writing a corpus folder: shards of both splits, token counts, the tokenizer's files, the index and the report.

Blocks of token ids go in, in corpus order; the bytes that come out depend on the sequence of blocks alone. Memory is one
shard's worth of ids for each split.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from bertsmith.corpus.blocks import TokenBlock
from bertsmith.corpus.shards import COUNTS, FORMAT_VERSION, INDEX, REPORT, SPLITS, TOKENIZER, ShardEntry, shard_schema
from bertsmith.storage import atomic_folder, disk_errors

if TYPE_CHECKING:
    from bertsmith.text.tokenizer import BertTokenizer

SHARD_TOKENS = 1 << 24
"""Tokens a shard file holds at most (unless one block is larger): 34 MB, which the writer gathers in memory."""


class ShardWriter:
    """Writes the shards of one split: blocks go in, in corpus order; a file is closed before it would grow too long."""

    def __init__(self, folder: Path, split: str, fingerprint: str, vocab_size: int, shard_tokens: int = SHARD_TOKENS):
        self.folder, self.split, self.shard_tokens = folder, split, shard_tokens
        self.schema = shard_schema(fingerprint, vocab_size, split)
        self.entries: list[ShardEntry] = []
        self._blocks: list[TokenBlock] = []
        self._tokens = 0

    def add(self, block: TokenBlock) -> None:
        """Append the documents of `block`; the file boundaries depend on the sequence of blocks alone."""
        if self._tokens and self._tokens + len(block.tokens) > self.shard_tokens:
            self._write_shard()
        if len(block.document_lengths):
            self._blocks.append(block)
            self._tokens += len(block.tokens)

    def close(self) -> list[ShardEntry]:
        """Write what is left and return the index entries of all shards, in order."""
        if self._blocks:
            self._write_shard()
        return self.entries

    def _write_shard(self) -> None:
        block = TokenBlock.concatenate(self._blocks)
        self._blocks, self._tokens = [], 0
        columns = [
            pa.ListArray.from_arrays(pa.array(offsets), pa.array(values), type=kind.type)
            for kind, offsets, values in (
                (self.schema.field(0), block.document_token_offsets, block.tokens),
                (self.schema.field(1), block.document_offsets, block.sentence_lengths),
            )
        ]
        batch = pa.RecordBatch.from_arrays(columns, schema=self.schema)
        path = self.folder / f"{self.split}-{len(self.entries):05d}.arrow"
        with disk_errors(path):
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self.schema) as writer:
                writer.write_batch(batch)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        self.entries.append(
            ShardEntry(
                path.name,
                self.split,
                path.stat().st_size,
                len(block.document_lengths),
                len(block.sentence_lengths),
                len(block.tokens),
                int(block.sentence_lengths.max()),
                digest,
            )
        )


class CorpusWriter:
    """Fills a corpus folder: shards of both splits, token counts, the tokenizer's files, the index, the report.

    `folder` is the (partial) folder to fill; wrap it in `atomic_folder`, or call `write_corpus` for all of it at once.
    """

    def __init__(self, folder: Path, tokenizer: "BertTokenizer", shard_tokens: int = SHARD_TOKENS) -> None:
        self.folder, self.tokenizer = folder, tokenizer
        self.token_counts = np.zeros(tokenizer.vocab_size, np.int64)
        self.writers = {
            split: ShardWriter(folder, split, tokenizer.fingerprint, tokenizer.vocab_size, shard_tokens)
            for split in SPLITS
        }

    def add(self, split: str, block: TokenBlock) -> None:
        """Append a block of documents to a split."""
        self.token_counts += np.bincount(block.tokens, minlength=len(self.token_counts))
        self.writers[split].add(block)

    def finish(self, report: dict[str, Any]) -> dict[str, Any]:
        """Write what is left; return `report` with totals, sha256 and bytes_per_token added, as it went to report.json.

        `sha256` covers the shard files and the token counts, names and contents: not the report, not the tokenizer's
        files (their fingerprint is in every shard).
        """
        entries = [entry for split in SPLITS for entry in self.writers[split].close()]
        counts = self.folder / COUNTS
        with disk_errors(self.folder):
            np.save(counts, self.token_counts, allow_pickle=False)
            self.tokenizer.save(self.folder / TOKENIZER)
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
            report = report | {
                "sentences": sum(entry.sentences for entry in entries),
                "tokens": sum(entry.tokens for entry in entries),
                "bytes_per_token": 0.0,
                "sha256": index["sha256"],
            }
            size = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
            report["bytes_per_token"] = round((size + len(_to_json(report))) / max(report["tokens"], 1), 4)
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
        documents = 0
        for split, rows in splits.items():
            for sentences in rows:
                writer.add(split, TokenBlock.from_lists([sentences], tokenizer.vocab_size))
                documents += 1
        writer.finish({"documents": documents})


def _to_json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, ensure_ascii=False, indent=1) + "\n").encode("utf-8")
