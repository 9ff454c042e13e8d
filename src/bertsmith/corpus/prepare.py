"""Raw text → a corpus folder of token shards, in parallel, in memory that does not grow with the corpus.

This process reads the documents in order, drops exact duplicates, decides by each document's hash which split it goes
to, and groups them into chunks; workers turn chunks into ids (tokenize.py); this process appends the results in order
(writer.py). Every step is a function of the text alone, so any number of workers, here or on a Ray cluster, writes the
same bytes, and a run that was stopped goes on after its last finished shard (output.py).
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from bertsmith.corpus.chunk_builder import CHUNK_CHARACTERS, HELD_OUT, ChunkBuilder
from bertsmith.corpus.duplicates import SeenDocuments, hash_document
from bertsmith.corpus.output import check_output, describe_settings, open_output
from bertsmith.corpus.report import build_report
from bertsmith.corpus.tokenize import PackedTokenizer, TextChunk, tokenize_chunk
from bertsmith.corpus.writer import SHARD_TOKENS, CorpusWriter
from bertsmith.errors import UserError
from bertsmith.object_storage import local_copy
from bertsmith.progress import Progress, say
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.readers import check_inputs, expand_inputs, input_size, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer import BertTokenizer, load_tokenizer
from bertsmith.text.tokenizer_files import FILE_NAMES
from bertsmith.workers import make_pool


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
    ray: str | None = None,
    language: str = "en",
    read_options: ReadOptions | None = None,
    dedup: bool = True,
    held_out: float = HELD_OUT,
    shard_tokens: int = SHARD_TOKENS,
    chunk_characters: int = CHUNK_CHARACTERS,
) -> dict[str, Any]:
    """Turn text files into the corpus folder `out`; returns the JSON summary of `bertsmith prepare`.

    `inputs` are files, folders, globs or fsspec URLs; `tokenizer` and `out` folders here or URLs of some. `workers`
    processes tokenize (default: one a core), or tasks at a time on the Ray cluster `ray`: "local" or HOST:PORT. The
    folder is complete or absent; what is finished of one that is not complete is kept, and the same call goes on from
    there. The summary is what report.json holds, plus seconds, peak_memory_mb (all processes together),
    megabytes_per_second, workers, ray (machines and processes that did work), resumed_shards (taken over from an
    earlier run) and chunks_tokenized (in this run); report.json has none of these, so that equal input gives equal
    bytes.

    Raises UserError before any work for inputs that are missing, a tokenizer or language that cannot be used, an `out`
    that is not empty, a Ray that is not there; and later when no text is found, the disk is full or a worker is killed.
    """
    started = time.monotonic()
    if not 0 <= held_out < 1:
        raise UserError(f"--held-out {held_out:g}: a share from 0 to below 1 is needed")
    opened = make_pool(workers, ray)
    check_output(out)
    options = read_options or ReadOptions()
    if not isinstance(tokenizer, BertTokenizer):
        with local_copy(tokenizer, FILE_NAMES) as folder:
            tokenizer = load_tokenizer(folder)
    split_sentences("", language)  # an unknown language is refused here, before anything is read
    reading = _Reading()
    paths = expand_inputs(inputs, reading.report)
    check_inputs(paths, options)
    settings = describe_settings(
        paths,
        tokenizer=tokenizer.fingerprint,
        language=language,
        reading=asdict(options),
        dedup=dedup,
        held_out=held_out,
        shard_tokens=shard_tokens,
        chunk_characters=chunk_characters,
    )
    with opened as pool, open_output(out, settings) as output:
        writer = CorpusWriter(output.folder, tokenizer, shard_tokens, output.on_shard)
        output.go_on(writer)
        builder = ChunkBuilder(held_out, chunk_characters, language)
        tokenize = partial(tokenize_chunk, packed=PackedTokenizer.pack(tokenizer), language=language)
        tokenized = 0
        with Progress("preparing", input_size(paths), "MB", scale=1e6) as bar:
            chunks = output.skip_finished(_read_chunks(paths, options, builder, dedup, reading, bar.advance))
            for chunk in pool.map_in_order(tokenize, chunks):
                writer.add(chunk)
                tokenized += 1
        report = build_report(
            writer, builder, reading.report, reading.duplicates, inputs, language, dedup, options.documents
        )
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
    return (
        summary
        | {
            "seconds": round(seconds, 3),
            "peak_memory_mb": round(peak / 1e6, 1),
            "megabytes_per_second": round(summary["bytes"] / 1e6 / seconds, 3),
            "resumed_shards": output.resumed,
            "chunks_tokenized": tokenized,
        }
        | pool.summary
    )
