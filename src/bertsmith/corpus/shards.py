"""The token store: a corpus folder of Arrow IPC files, one row a document, memory-mapped and read without copying.

`open_corpus` gives numpy views of the files. A row holds `tokens`, the document's ids one after the other, and
`sentence_lengths`, which cuts them into sentences. Two flat lists rather than a list of lists: after the ids, a 4-byte
offset for every sentence would be the largest thing on disk; a 2-byte length is half of it, and polars, duckdb and
pyarrow read either. No text, no masks, no padding and no copies of a document are stored.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from bertsmith.corpus.chunks import token_dtype
from bertsmith.errors import UserError
from bertsmith.object_storage import RemoteFolder, is_url

FORMAT_VERSION = 1
SPLITS = ("train", "held-out")
SplitName = Literal["train", "held-out"]
INDEX, REPORT, COUNTS, TOKENIZER = "corpus.json", "report.json", "token_counts.npy", "tokenizer"


@dataclass(frozen=True)
class ShardEntry:
    """What the index says of a shard file: enough to plan an epoch without opening it, and to see that it is whole."""

    file: str
    split: str
    bytes: int
    documents: int
    sentences: int
    tokens: int
    longest_sentence: int
    sha256: str


def shard_schema(fingerprint: str, vocab_size: int, split: str) -> pa.Schema:
    """The Arrow schema of every shard of a split; whoever copies one file still knows which tokenizer made it."""
    ids = pa.uint16() if token_dtype(vocab_size) == np.uint16 else pa.uint32()
    return pa.schema(
        [
            pa.field("tokens", pa.list_(pa.field("item", ids, nullable=False)), nullable=False),
            pa.field("sentence_lengths", pa.list_(pa.field("item", pa.uint16(), nullable=False)), nullable=False),
        ],
        metadata={
            "bertsmith.format": str(FORMAT_VERSION),
            "bertsmith.tokenizer": fingerprint,
            "bertsmith.vocab_size": str(vocab_size),
            "bertsmith.split": split,
        },
    )


def _from_json(path: Path, folder: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes().decode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        kind = "is not a corpus folder" if folder.is_dir() else "does not exist"
        raise UserError(
            f"{folder}: {kind} ({path.name} is missing); make one with `bertsmith prepare INPUT --out FOLDER`"
        ) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read ({error}); run `bertsmith prepare` again") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: is not what `bertsmith prepare` writes; run it again")
    return value


@dataclass
class Shard:
    """One shard file as numpy views of the mapped file: read-only, shared between processes, opened at first use.

    Pickles as its path and counts, so that a worker process opens its own mapping. `token_count`, `sentence_count` and
    `document_count` come from the index and cost nothing. Offsets inside one shard fit int32 (Arrow lists use it).
    """

    path: Path
    entry: ShardEntry
    fingerprint: str
    vocab_size: int

    def __post_init__(self) -> None:
        self.document_count = self.entry.documents
        self.sentence_count = self.entry.sentences
        self.token_count = self.entry.tokens

    def __reduce__(self) -> tuple[Any, ...]:
        return Shard, (self.path, self.entry, self.fingerprint, self.vocab_size)

    @cached_property
    def _columns(self) -> tuple[pa.ListArray, pa.ListArray]:
        broken = "is missing or broken; copy the folder again or run `bertsmith prepare` again"
        try:
            size = self.path.stat().st_size
            if size != self.entry.bytes:
                raise UserError(f"{self.path}: {size:,} of {self.entry.bytes:,} bytes are there; the file {broken}")
            # Closing the file gives its descriptor back at once; the mapping lives as long as the arrays do.
            with pa.memory_map(os.fsencode(self.path)) as source:
                reader = pa.ipc.open_file(source)
                schema, batches = reader.schema, [reader.get_batch(i) for i in range(reader.num_record_batches)]
            for batch in batches:
                batch.validate()
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.path}: the file {broken} ({str(error).splitlines()[0]})") from error
        if not schema.equals(shard_schema(self.fingerprint, self.vocab_size, self.entry.split), check_metadata=True):
            raise UserError(
                f"{self.path}: belongs to another corpus (another tokenizer, split or format than {INDEX} beside it"
                " says); copy the whole folder again or run `bertsmith prepare` again"
            )
        expected = (self.entry.documents, self.entry.sentences, self.entry.tokens)
        found = [(len(batch), len(batch[1].values), len(batch[0].values)) for batch in batches]
        if found != [expected]:
            raise UserError(f"{self.path}: holds other documents than {INDEX} says; the file {broken}")
        return batches[0][0], batches[0][1]

    def check(self) -> None:
        """Map the file and compare it with the index; UserError names the file if it is missing, cut or foreign."""
        _ = self._columns

    @cached_property
    def tokens(self) -> np.ndarray:
        """(tokens,) uint16, or uint32 for vocabularies past 65,535 entries."""
        return self._columns[0].values.to_numpy(zero_copy_only=True)

    @cached_property
    def sentence_lengths(self) -> np.ndarray:
        """(sentences,) uint16, tokens of each sentence, none of them 0."""
        return self._columns[1].values.to_numpy(zero_copy_only=True)

    @cached_property
    def document_offsets(self) -> np.ndarray:
        """(documents + 1,) int32: document d holds the sentences [document_offsets[d], document_offsets[d + 1])."""
        return self._columns[1].offsets.to_numpy(zero_copy_only=True)

    @cached_property
    def document_token_offsets(self) -> np.ndarray:
        """(documents + 1,) int32: document d holds the tokens [document_token_offsets[d], …[d + 1])."""
        return self._columns[0].offsets.to_numpy(zero_copy_only=True)

    @cached_property
    def sentence_offsets(self) -> np.ndarray:
        """(sentences + 1,) int32: sentence s is tokens[sentence_offsets[s] : sentence_offsets[s + 1]].

        Summed at first use and kept, 4 bytes a sentence: the only array of a shard that is not a view of the file.
        Whoever visits single documents of a very large corpus takes `sentence_offsets_of` instead.
        """
        offsets = np.zeros(self.sentence_count + 1, np.int32)
        np.cumsum(self.sentence_lengths, out=offsets[1:])
        return offsets

    def sentence_offsets_of(self, document: int) -> np.ndarray:
        """(sentences of the document + 1,) int64 into `tokens`, computed for this document alone."""
        lengths = self.sentence_lengths[self.document_offsets[document] : self.document_offsets[document + 1]]
        start = int(self.document_token_offsets[document])
        return np.concatenate([[start], start + np.cumsum(lengths, dtype=np.int64)])


@dataclass
class CorpusSplit:
    """The shards of one split, in corpus order; `shards` is empty where nothing was held out."""

    name: str
    shards: list[Shard]
    documents: int = field(init=False)
    sentences: int = field(init=False)
    tokens: int = field(init=False)
    longest_sentence: int = field(init=False)

    def __post_init__(self) -> None:
        self.documents = sum(shard.document_count for shard in self.shards)
        self.sentences = sum(shard.sentence_count for shard in self.shards)
        self.tokens = sum(shard.token_count for shard in self.shards)
        self.longest_sentence = max((shard.entry.longest_sentence for shard in self.shards), default=0)


@dataclass
class TokenCorpus:
    """A corpus folder, opened by `open_corpus`; cheap to pickle into a worker process."""

    folder: Path
    vocab_size: int
    tokenizer_fingerprint: str
    special_ids: tuple[int, ...]
    sha256: str
    shards: list[Shard]

    @property
    def tokenizer(self) -> Path:
        """The folder of the tokenizer that made the ids, as copied at prepare time."""
        return self.folder / TOKENIZER

    @cached_property
    def report(self) -> dict[str, Any]:
        """The data-loss report, report.json."""
        return _from_json(self.folder / REPORT, self.folder)

    @cached_property
    def token_counts(self) -> np.ndarray:
        """(vocab_size,) int64: how often each id occurs, both splits together."""
        path = self.folder / COUNTS
        try:
            counts = np.load(path, allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"{path}: is missing or broken ({error}); run `bertsmith prepare` again") from error
        if counts.shape != (self.vocab_size,) or counts.dtype != np.int64:
            raise UserError(f"{path}: {counts.shape} counts for {self.vocab_size} ids; run `bertsmith prepare` again")
        return counts

    @cached_property
    def unigram_entropy(self) -> float:
        """Nats a token of a model that knows word frequencies and nothing else: the line a loss must get under."""
        return unigram_entropy(self.token_counts, self.special_ids)

    def split(self, name: SplitName) -> CorpusSplit:
        """The shards of `train` or `held-out`."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r}: one of {', '.join(SPLITS)}")
        return CorpusSplit(name, [shard for shard in self.shards if shard.entry.split == name])

    def check_tokenizer(self, fingerprint: str, where: str) -> None:
        """UserError unless the tokenizer at `where` is the one that made these ids."""
        if fingerprint != self.tokenizer_fingerprint:
            raise UserError(
                f"{self.folder}: was made with another tokenizer (fingerprint {self.tokenizer_fingerprint[:12]}…) than"
                f" {where} holds ({fingerprint[:12]}…); run `bertsmith prepare --tokenizer {where}` on the text"
            )


def open_corpus(path: str | Path) -> TokenCorpus:
    """Open a corpus folder and check that it is whole: every file there, of its full length, of this corpus.

    Raises UserError naming the file that is missing, cut, broken or from elsewhere, or the format that is not known;
    and for a URL, since only files of this machine can be mapped into memory.
    """
    if is_url(str(path)):
        _refuse_remote(str(path))
    folder = Path(path)
    index = _from_json(folder / INDEX, folder)
    if index.get("format") != FORMAT_VERSION:
        raise UserError(
            f"{folder}: corpus format {index.get('format')!r}, this version of bertsmith reads {FORMAT_VERSION};"
            " run `bertsmith prepare` again"
        )
    try:
        fingerprint, vocab_size = str(index["tokenizer_fingerprint"]), int(index["vocab_size"])
        shards = [
            Shard(folder / entry["file"], ShardEntry(**entry), fingerprint, vocab_size) for entry in index["shards"]
        ]
        corpus = TokenCorpus(folder, vocab_size, fingerprint, tuple(index["special_ids"]), str(index["sha256"]), shards)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{folder / INDEX}: is damaged ({error!r}); run `bertsmith prepare` again") from error
    for shard in shards:
        shard.check()
    if not corpus.tokenizer.is_dir():
        raise UserError(
            f"{corpus.tokenizer}: is missing; copy the whole corpus folder or run `bertsmith prepare` again"
        )
    _ = corpus.token_counts
    return corpus


def _refuse_remote(url: str) -> None:
    if INDEX not in RemoteFolder(url).names():
        raise UserError(
            f"{url}: is not a complete corpus ({INDEX} is missing); the `bertsmith prepare` that writes it has not"
            " finished, or it is something else"
        )
    raise UserError(
        f"{url}: a corpus is mapped into memory, which only files of this machine can be; copy the folder here first"
        f" (`aws s3 cp --recursive {url} corpus`, say)"
    )


def unigram_entropy(counts: np.ndarray, special_ids: Sequence[int] = ()) -> float:
    """Entropy in nats of the distribution `counts` (V,) without the special tokens; 0.0 for an empty corpus."""
    kept = np.delete(counts.astype(np.float64), list(special_ids))
    kept = kept[kept > 0]
    total = kept.sum()
    return float(np.log(total) - (kept * np.log(kept)).sum() / total) if total else 0.0


def describe_corpus(folder: str | Path) -> dict[str, Any]:
    """What `bertsmith info FOLDER` prints for a corpus: sizes, splits, tokenizer, entropy, the data-loss report."""
    from bertsmith.text.tokenizer import load_tokenizer

    corpus = open_corpus(folder)
    corpus.check_tokenizer(load_tokenizer(corpus.tokenizer).fingerprint, str(corpus.tokenizer))
    return {
        "kind": "corpus",
        "folder": str(corpus.folder),
        "format": FORMAT_VERSION,
        "vocab_size": corpus.vocab_size,
        "tokenizer_fingerprint": corpus.tokenizer_fingerprint,
        "sha256": corpus.sha256,
        "megabytes": round(sum(p.stat().st_size for p in corpus.folder.rglob("*") if p.is_file()) / 1e6, 3),
        "unigram_entropy": round(corpus.unigram_entropy, 4),
        "ln_vocab": round(float(np.log(corpus.vocab_size)), 4),
        "splits": {
            name: {
                "shards": len(split.shards),
                "documents": split.documents,
                "sentences": split.sentences,
                "tokens": split.tokens,
                "longest_sentence": split.longest_sentence,
            }
            for name in SPLITS
            for split in [corpus.split(name)]  # type: ignore[arg-type]
        },
        "report": corpus.report,
    }
