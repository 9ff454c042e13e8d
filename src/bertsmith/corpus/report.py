"""The data-loss report of `prepare`: what was dropped, replaced, cut, unknown or repeated, and what it means.

It holds no times and no machine's figures: equal input gives an equal report.
"""

from collections.abc import Sequence
from typing import Any

from bertsmith.corpus.chunk_builder import ChunkBuilder
from bertsmith.corpus.chunks import ChunkCounts
from bertsmith.corpus.shards import SPLITS
from bertsmith.corpus.writer import CorpusWriter
from bertsmith.errors import UserError
from bertsmith.text.documents import ReadReport

MANY_UNKNOWN = 0.03
"""Share of [UNK] among the tokens from which on the tokenizer is said not to fit the text."""

MANY_REPEATED = 0.2
"""Share of duplicate documents, or of repeated sentences, from which on the user is told."""


def build_report(
    writer: CorpusWriter,
    builder: ChunkBuilder,
    read: ReadReport,
    duplicates: int,
    inputs: Sequence[str],
    language: str,
    dedup: bool,
    layout: str,
) -> dict[str, Any]:
    """What came in, what is stored, and everything in between, adding up. Raises UserError if there is no text.

    `layout`: what ends a document of plain text, see ReadOptions.documents.
    """
    entries = {split: writer.writers[split].close() for split in SPLITS}
    stored = {split: sum(entry.documents for entry in entries[split]) for split in SPLITS}
    tokens = {split: sum(entry.tokens for entry in entries[split]) for split in SPLITS}
    sentences = sum(entry.sentences for split in SPLITS for entry in entries[split])
    empty = sum(each.empty_documents for each in writer.writers.values())
    states = [each.state for each in writer.writers.values()]
    cut = builder.cut_documents + sum(state.cut_documents for state in states)
    counts = ChunkCounts()
    for state in states:
        counts.add(state.lost)
    if builder.cut_documents and not stored["held-out"]:
        empty, cut = empty - 1, cut - 1  # no token in the end that was to be held out: that is no document
    documents = read.documents - duplicates - empty
    assert sum(stored.values()) == documents + cut, (stored, documents, cut)
    if empty:
        read.skipped["document without tokens"] = empty
    if not tokens["train"]:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in read.skipped.items())
        raise UserError(
            f"no text to train on in {', '.join(inputs)} ({read.files:,} files, {read.bytes:,} bytes"
            f"{': left out ' + reasons if reasons else ''}); check the files and --documents, --text-column, --encoding"
        )
    total = sum(tokens.values())
    report = read.as_dict() | {
        "characters": counts.characters,
        "documents_read": read.documents,
        "documents": documents,
        "duplicates_dropped": duplicates,
        "documents_cut": cut,
        "sentences_per_document": round(sentences / documents, 3),
        "tokens_per_sentence": round(total / sentences, 3),
        "train_documents": stored["train"],
        "train_tokens": tokens["train"],
        "held_out_documents": stored["held-out"],
        "held_out_tokens": tokens["held-out"],
        "unknown_tokens": counts.unknown_tokens,
        "unknown_rate": round(counts.unknown_tokens / total, 6),
        "long_words": counts.long_words,
        "empty_sentences": counts.empty_sentences,
        "repeated_sentences": counts.repeated_sentences,
        "language": language,
        "dedup": dedup,
        "held_out": builder.held_out,
        "vocab_size": writer.tokenizer.vocab_size,
        "tokenizer_fingerprint": writer.tokenizer.fingerprint,
    }
    single = sum(state.single_sentence_documents for state in states)
    return report | {"warnings": _warnings(report, single, sentences, builder, layout)}


def _warnings(report: dict[str, Any], single: int, sentences: int, builder: ChunkBuilder, layout: str) -> list[str]:
    """What the user should know before training on this corpus, a sentence each."""
    documents, mean = report["documents"], report["sentences_per_document"]
    shape = f"{documents:,} document{'s' * (documents != 1)}, mean {mean:.1f} sentences"
    warnings = []
    if report["invalid_bytes"]:
        warnings.append(
            f"{report['invalid_bytes']:,} invalid bytes were replaced, the first at {report['invalid_places'][0]};"
            " name the files' --encoding if it is not UTF-8"
        )
    if report["skipped"]:
        reasons = ", ".join(f"{count:,} × {reason}" for reason, count in report["skipped"].items())
        warnings.append(f"left out: {reasons}")
    if documents == 1:
        warnings.append(
            f"{shape}: the halves of all sentence pairs come from the same document; if blank lines separate documents"
            " in these files, use --documents blank-line"
        )
    elif single >= documents / 2:
        whose = "every one has" if single == documents else f"{single:,} have"
        # blank lines end documents only where that was asked for; elsewhere a row or a file is one
        remedy = "put all sentences of a document into one row or file"
        if layout == "blank-line":
            remedy = "if blank lines stand between all sentences, use --documents file"
        warnings.append(
            f"{shape}: {whose} a single sentence, of which no pair with a true next sentence can be made; {remedy};"
            " or pre-train with --objective mlm"
        )
    if report["unknown_rate"] > MANY_UNKNOWN:
        warnings.append(
            f"{report['unknown_rate']:.1%} of the tokens are [UNK] ({report['long_words']:,} words are too long, the"
            " others not in the vocabulary): the tokenizer does not fit this text; train one with `bertsmith vocab`"
        )
    if report["duplicates_dropped"] > MANY_REPEATED * report["documents_read"]:
        warnings.append(f"{report['duplicates_dropped']:,} of {report['documents_read']:,} documents were duplicates")
    if report["repeated_sentences"] > MANY_REPEATED * sentences:
        warnings.append(
            f"{report['repeated_sentences'] / sentences:.0%} of the sentences repeat one shortly before them, word for"
            " word; a model learns such lines by heart: clean the text"
        )
    if builder.held_out and not report["held_out_tokens"]:
        warnings.append("nothing could be held out for evaluation: one document of few sentences")
    elif builder.note:
        warnings.append(builder.note)
    return warnings
