"""Raw text → a corpus folder of token shards, in parallel, in memory that does not grow with the corpus.

This process reads the documents in order, drops exact duplicates, decides by each document's hash which split it goes
to, and groups them into chunks; workers turn chunks into ids (tokenize.py); this process appends the results in order
(writer.py). Every step is a function of the text alone, so any number of workers writes the same bytes.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bertsmith.corpus.chunk_builder import CHUNK_CHARACTERS, HELD_OUT, ChunkBuilder
from bertsmith.corpus.duplicates import SeenDocuments, hash_document
from bertsmith.corpus.report import build_report
from bertsmith.corpus.shards import TOKENIZER
from bertsmith.corpus.tokenize import ChunkCounts, TextChunk, tokenize_chunk
from bertsmith.corpus.writer import SHARD_TOKENS, CorpusWriter
from bertsmith.errors import UserError
from bertsmith.progress import Progress, say
from bertsmith.storage import atomic_folder
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.readers import check_inputs, expand_inputs, input_size, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer
from bertsmith.workers import WorkerPool, available_cores


@dataclass
class _Reading:
    """What the reading side counts while chunks are made."""

    report: ReadReport = field(default_factory=ReadReport)
    duplicates: int = 0


def _read_chunks(
    paths: Sequence[str],
    options: ReadOptions,
    builder: ChunkBuilder,
    dedup: bool,
    reading: _Reading,
    on_bytes: Callable[[int], None],
) -> Iterator[TextChunk]:
    """Documents in input order, the first of equal ones kept, as chunks."""
    seen = SeenDocuments()
    for path in paths:
        for document in read_documents(path, options, reading.report, on_bytes):
            key = hash_document(document.text)
            if dedup and not seen.add(key):
                reading.duplicates += 1
            else:
                yield from builder.add(document.text, key)
    yield from builder.finish()


def prepare_corpus(
    inputs: Sequence[str],
    tokenizer: str | Path | BertTokenizer,
    out: str | Path,
    *,
    workers: int | None = None,
    language: str = "en",
    read_options: ReadOptions | None = None,
    dedup: bool = True,
    held_out: float = HELD_OUT,
    shard_tokens: int = SHARD_TOKENS,
    chunk_characters: int = CHUNK_CHARACTERS,
) -> dict[str, Any]:
    """Turn text files into the corpus folder `out`; returns the JSON summary of `bertsmith prepare`.

    `inputs` are files, folders, globs or fsspec URLs; `workers` processes tokenize (default: one a core). The folder is
    complete or absent. The summary is what report.json holds, plus seconds, peak_memory_mb (all processes together),
    megabytes_per_second and workers; report.json has none of these, so that equal input gives equal bytes.

    Raises UserError before any work for inputs that are missing, a tokenizer or language that cannot be used, an `out`
    that is not empty; and, with nothing left behind, when no text is found, the disk is full or a worker is killed.
    """
    started = time.monotonic()
    out = Path(out)
    if not 0 <= held_out < 1:
        raise UserError(f"--held-out {held_out:g}: a share from 0 to below 1 is needed")
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError(f"{out}: exists already; remove it or choose another --out")
    options = read_options or ReadOptions()
    if not isinstance(tokenizer, BertTokenizer):
        tokenizer = load_tokenizer(tokenizer)
    split_sentences("", language)  # an unknown language is refused here, before anything is read
    reading, counts = _Reading(), ChunkCounts()
    paths = expand_inputs(inputs, reading.report)
    check_inputs(paths, options)
    with WorkerPool(available_cores() if workers is None else workers) as pool, atomic_folder(out) as folder:
        writer = CorpusWriter(folder, tokenizer, shard_tokens)
        folder_name, fingerprint = str(folder / TOKENIZER), tokenizer.fingerprint

        def make_chunk(split: str, texts: list[str], continues: bool) -> TextChunk:
            return TextChunk(split, texts, continues, folder_name, fingerprint, language)

        builder = ChunkBuilder(make_chunk, held_out, chunk_characters, language)
        with Progress("preparing", input_size(paths), "MB", scale=1e6) as bar:
            chunks = _read_chunks(paths, options, builder, dedup, reading, bar.advance)
            for split, ids, lost in pool.map_in_order(tokenize_chunk, chunks):
                writer.add(split, ids)
                counts.add(lost)
        report = build_report(writer, builder, reading.report, reading.duplicates, counts, inputs, language, dedup)
        summary = writer.finish(report)
        peak = pool.peak_memory
    for warning in summary["warnings"]:
        say(f"warning: {warning}")
    say(
        f"{summary['documents']:,} documents, mean {summary['sentences_per_document']:.1f} sentences;"
        f" {summary['tokens']:,} tokens, {summary['held_out_tokens']:,} of them held out;"
        f" {summary['bytes_per_token']:.3f} bytes a token in {out}"
    )
    seconds = time.monotonic() - started
    return summary | {
        "seconds": round(seconds, 3),
        "peak_memory_mb": round(peak / 1e6, 1),
        "megabytes_per_second": round(summary["bytes"] / 1e6 / seconds, 3),
        "workers": pool.workers,
    }
