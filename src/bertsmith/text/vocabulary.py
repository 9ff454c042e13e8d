"""Text files → a tokenizer folder with a WordPiece vocabulary: the same bytes for any file order, workers or hash seed.

Count the words (word_counts.py), choose the alphabet, learn pieces by merging (merges.py). Everything that decides is a
sum of counts or a comparison of texts. The vocabulary never has more entries than asked; what is dropped on the way
(rare characters, over-long words) is counted and said.
"""

import contextlib
import hashlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bertsmith.errors import UserError
from bertsmith.object_storage import is_url
from bertsmith.progress import Progress, say
from bertsmith.storage import PARTIAL
from bertsmith.text.merges import PairIndex, learn_pieces
from bertsmith.text.readers import ReadOptions, ReadReport, expand_inputs, input_size, read_documents
from bertsmith.text.tokenizer import CONTINUATION, BertTokenizer
from bertsmith.text.tokenizer_files import SPECIAL_TOKENS
from bertsmith.text.tokenizer_output import tokenizer_folder, why_taken
from bertsmith.text.word_counts import CHUNK_CHARACTERS, WordCounts, count_words, cut_text
from bertsmith.text.words import Normalization, WordSplitter
from bertsmith.workers import make_pool, peak_memory

DEFAULT_SIZE = 30_000
"""Entries, about what BERT has (Devlin et al. 2018, section 3: 30,000)."""
TRAINING_CHARACTERS = 10_000_000
"""Characters of distinct words to learn from, the most frequent words first: bounds the memory of training. The 122 MB
of English in the benchmarks have 2 million; where 10 million are reached, what is left out is rare."""

_COVERAGE = 0.9999  # of all characters read; the alphabet need not be larger …
_USUAL_ALPHABET = (
    1_000  # … but has this many characters, if there are as many and they leave half the entries to pieces
)
# … and has what these take even if little is left to pieces: a missing letter ruins whole words
_NEEDED_COVERAGE = 0.99
_NEEDED_SHARE = 1e-4  # a character's share of the text
_CODE_POINTS = 0x110000


class CharacterCounts:
    """How often each character starts and continues a word: int64 (code points,) each."""

    def __init__(self) -> None:
        self.starting = np.zeros(_CODE_POINTS, np.int64)
        self.continuing = np.zeros(_CODE_POINTS, np.int64)

    def add(self, words: Sequence[str], counts: np.ndarray) -> None:
        """Count the characters of `words`, which occur `counts` times each."""
        codes, lengths = split_characters(words)
        first = np.cumsum(lengths) - lengths
        weights = np.repeat(counts, lengths)
        np.add.at(self.starting, codes[first], counts)
        weights[first] = 0
        np.add.at(self.continuing, codes, weights)

    def by_frequency(self) -> np.ndarray:
        """Code points that occur, the most frequent first, equals by code point."""
        total = self.starting + self.continuing
        present = np.flatnonzero(total)
        return present[np.argsort(-total[present], kind="stable")]


def split_characters(words: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """The code points of all words one after the other, int32 (N,), and the length of each word, int64 (words,)."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    return np.frombuffer("".join(words).encode("utf-32-le"), "<i4"), lengths


@dataclass
class Training:
    """A trained vocabulary and the account of what it was trained on."""

    tokens: list[str]
    unique_words: int
    words: int
    """Occurrences."""
    words_not_learned_from: int
    """Occurrences of words beyond TRAINING_CHARACTERS, or with a character that is not in the alphabet."""
    characters: int
    """Distinct characters seen."""
    characters_dropped: int
    """Those among them without an entry; words that hold one become [UNK]."""
    dropped_share: float
    """Share of all characters read that these are."""


def choose_alphabet(characters: CharacterCounts, room: int, limit: int | None = None) -> np.ndarray:
    """Code points that get entries, the most frequent first, where `room` entries are to be had in all.

    A character needs one entry, and one more if it ever continues a word. Unless `limit` says how many characters:
    enough for 99.99 % of the text and at least 1,000, as long as half of `room` is left to longer pieces; and in any
    case enough for 99 %, and all that are more than one in 10,000.
    """
    ordered = characters.by_frequency()
    fitting = _fitting(characters, ordered, room)
    if limit is not None:
        return ordered[: min(limit, fitting)]
    total = characters.starting[ordered] + characters.continuing[ordered]
    share = total / max(int(total.sum()), 1)
    covered = np.cumsum(share)
    usual = max(_USUAL_ALPHABET, int(np.searchsorted(covered, _COVERAGE)) + 1)
    needed = max(int(np.searchsorted(covered, _NEEDED_COVERAGE)) + 1, int((share > _NEEDED_SHARE).sum()))
    return ordered[: min(fitting, max(needed, min(usual, _fitting(characters, ordered, room // 2))))]


def _fitting(characters: CharacterCounts, ordered: np.ndarray, entries: int) -> int:
    """How many of the characters `ordered` find place in `entries`."""
    taken = np.cumsum(1 + (characters.continuing[ordered] > 0))
    return int(np.searchsorted(taken, entries, side="right"))


def select_words(words: list[str], counts: np.ndarray, characters: int) -> tuple[list[str], np.ndarray]:
    """The most frequent words (equals: first by text), until their lengths reach `characters`."""
    lengths = np.fromiter(map(len, words), np.int64, len(words))
    if lengths.sum() <= characters:
        return words, counts
    order = np.argsort(-counts, kind="stable")
    last = int(np.searchsorted(np.cumsum(lengths[order]), characters))
    threshold = counts[order[last]]
    # texts are compared only among the words that are as frequent as the last one: far less than sorting all
    kept = np.flatnonzero(counts > threshold)
    ties = sorted(np.flatnonzero(counts == threshold).tolist(), key=words.__getitem__)
    room = characters - int(lengths[kept].sum())
    enough = int(np.searchsorted(np.cumsum(lengths[ties]), room)) + 1
    chosen = [*kept.tolist(), *ties[:enough]]
    return [words[index] for index in chosen], counts[chosen]


def train_vocabulary(
    groups: Iterable[dict[str, int]],
    size: int,
    *,
    min_frequency: int = 2,
    alphabet_limit: int | None = None,
    training_characters: int = TRAINING_CHARACTERS,
    on_entries: Callable[[int], None] = lambda more: None,
) -> Training:
    """Learn a vocabulary of at most `size` tokens from word counts (`WordCounts.groups()`).

    The five special tokens have ids 0–4; then the alphabet by code point; then pieces, the most frequent merge first.
    A pair that occurs less than `min_frequency` times is not merged. `on_entries` is told how many entries are new.
    """
    characters = CharacterCounts()
    words: list[str] = []
    counts = np.zeros(0, np.int64)
    unique_words = occurrences = held = 0
    for group in groups:
        group_words, group_counts = list(group), np.fromiter(group.values(), np.int64, len(group))
        characters.add(group_words, group_counts)
        unique_words += len(group)
        occurrences += int(group_counts.sum())
        held += sum(map(len, group_words))
        words += group_words
        counts = np.concatenate([counts, group_counts])
        if held > 2 * training_characters:
            words, counts = select_words(words, counts, training_characters)
            held = training_characters
    words, counts = select_words(words, counts, training_characters)

    room = size - len(SPECIAL_TOKENS)
    ordered = characters.by_frequency()
    chosen = choose_alphabet(characters, room, alphabet_limit)
    on_entries(len(SPECIAL_TOKENS))
    while True:
        alphabet, index, learned_from = _spell_words(words, counts, characters, np.sort(chosen))
        on_entries(len(alphabet))
        pieces = learn_pieces(alphabet, index, room - len(alphabet), min_frequency, on_piece=lambda: on_entries(1))
        learned = len(alphabet) + len(pieces)
        more = _fitting(characters, ordered, len(alphabet) + room - learned)
        if alphabet_limit is not None or more <= len(chosen):
            break
        # Pieces ran out early (a small corpus, or one of ideographs): what is left goes to characters, whose words
        # then count too. Each round takes in more of them, so this ends.
        chosen = ordered[:more]
        on_entries(-learned)
    tokens = [*SPECIAL_TOKENS, *alphabet, *pieces]
    dropped = ordered[len(chosen) :]
    if alphabet_limit is None and len(tokens) < size and len(dropped):
        tokens.append(chr(dropped[0]))  # one entry left, but this character also continues words: half of it
        dropped = dropped[1:]
    total = characters.starting + characters.continuing
    return Training(
        tokens,
        unique_words,
        words=occurrences,
        words_not_learned_from=occurrences - learned_from,
        characters=len(ordered),
        characters_dropped=len(dropped),
        dropped_share=float(total[dropped].sum() / max(int(total.sum()), 1)),
    )


def _spell_words(
    words: list[str], counts: np.ndarray, characters: CharacterCounts, chosen: np.ndarray
) -> tuple[list[str], PairIndex, int]:
    """The alphabet of the `chosen` code points, the words spelled in it, and how many occurrences that covers."""
    continuing = chosen[characters.continuing[chosen] > 0]
    alphabet = [chr(code) for code in chosen] + [CONTINUATION + chr(code) for code in continuing]
    starting_symbol = np.full(_CODE_POINTS, -1, np.int32)
    starting_symbol[chosen] = np.arange(len(chosen))
    continuing_symbol = np.full(_CODE_POINTS, -1, np.int32)
    continuing_symbol[continuing] = len(chosen) + np.arange(len(continuing))
    codes, lengths = split_characters(words)
    first = np.cumsum(lengths) - lengths
    symbols = continuing_symbol[codes]
    symbols[first] = starting_symbol[codes[first]]
    # A word with a dropped character will be [UNK] as a whole: it must not vote for pieces.
    usable = np.minimum.reduceat(symbols, first) >= 0 if len(words) else np.zeros(0, bool)
    learned_from = int(counts[usable].sum())
    usable &= lengths > 1
    symbols = symbols[np.repeat(usable, lengths)]
    return alphabet, PairIndex(symbols, lengths[usable], counts[usable]), learned_from


# -- from files to a folder --------------------------------------------------------------------------------------------


def build_vocabulary(
    inputs: Sequence[str],
    out: str | Path,
    *,
    size: int = DEFAULT_SIZE,
    lowercase: bool = True,
    strip_accents: bool | None = None,
    workers: int | None = None,
    ray: str | None = None,
    read_options: ReadOptions | None = None,
    min_frequency: int = 2,
    alphabet_limit: int | None = None,
    chunk_characters: int = CHUNK_CHARACTERS,
) -> dict[str, Any]:
    """Train a vocabulary on text files and write the tokenizer folder `out`; returns the JSON summary of `vocab`.

    `inputs` are files, folders, globs or fsspec URLs; `workers` processes count words (default: one a core), or tasks
    at a time on the Ray cluster `ray`: "local" or HOST:PORT. `out`, a folder here or a URL of one, is written whole or
    not at all; an older tokenizer there is replaced. `sha256` in the summary is that of vocab.txt; `peak_memory_mb` is
    of all processes together.

    Raises UserError before any work for sizes that make no sense, missing inputs, an `out` that holds something else
    or a Ray that is not there; and when the inputs hold no word.
    """
    started = time.monotonic()
    opened = make_pool(workers, ray)
    _check_options(size, min_frequency, alphabet_limit, str(out))
    normalization = Normalization(lowercase, strip_accents)
    options = read_options or ReadOptions()
    report = ReadReport()
    paths = expand_inputs(inputs, report)

    with _spill_folder(str(out)) as spill:
        words = WordCounts(spill)
        with opened as pool, Progress("counting words", input_size(paths), "MB", scale=1e6) as bar:
            documents = (
                document.text for path in paths for document in read_documents(path, options, report, bar.advance)
            )
            chunks = _group_texts(documents, words, WordSplitter(normalization), chunk_characters)
            for tally in pool.map_in_order(partial(count_words, normalization=normalization), chunks):
                words.add(tally)
            peak = pool.peak_memory
        with Progress("learning the vocabulary", size, "entries") as bar:
            training = train_vocabulary(
                words.groups(),
                size,
                min_frequency=min_frequency,
                alphabet_limit=alphabet_limit,
                on_entries=bar.advance,
            )
    if not training.words:
        raise UserError(_explain_no_words(inputs, report, words))
    with tokenizer_folder(str(out)) as folder:
        BertTokenizer(training.tokens, normalization).save(folder)
        digest = hashlib.sha256((folder / "vocab.txt").read_bytes()).hexdigest()

    summary = {
        "size": len(training.tokens),
        "requested_size": size,
        "sha256": digest,
        "words": training.words,
        "unique_words": training.unique_words,
        "words_not_learned_from": training.words_not_learned_from,
        "overlong_words": words.overlong_words,
        "overlong_characters": words.overlong_characters,
        "characters": training.characters,
        "characters_dropped": training.characters_dropped,
        "characters_dropped_share": training.dropped_share,
        "lowercase": normalization.lowercase,
        "strip_accents": normalization.strips_accents,
        "read": report.as_dict(),
    }
    _say_losses(summary)
    say(f"{out}: {len(training.tokens):,} tokens from {training.words:,} words")
    return summary | {
        "tokenizer": str(out),
        "seconds": round(time.monotonic() - started, 3),
        "peak_memory_mb": round(max(peak, peak_memory()) / 1e6, 1),
        **pool.summary,
    }


def _explain_no_words(inputs: Sequence[str], report: ReadReport, words: WordCounts) -> str:
    named = ", ".join(inputs)
    if words.overlong_words:
        return (
            f"{named}: all {words.overlong_words:,} words are longer than WordPiece takes (100 characters); if this "
            "language or data has no blanks, put some between its words first"
        )
    reasons = ", ".join(f"{count:,} × {reason}" for reason, count in sorted(report.skipped.items()))
    left_out = f" (left out: {reasons})" if reasons else ""
    return f"{named}: no word in {report.documents:,} documents{left_out}; nothing to learn a vocabulary from"


@contextlib.contextmanager
def _spill_folder(out: str) -> Iterator[Path]:
    """Where word counts go that do not fit in memory (made when needed): beside `out`, where there is room for it."""
    if is_url(out):
        with tempfile.TemporaryDirectory(prefix="bertsmith-") as folder:
            yield Path(folder) / "words"
        return
    spill = Path(out).parent / f".{Path(out).name}{PARTIAL}words"
    shutil.rmtree(spill, ignore_errors=True)
    try:
        yield spill
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def _check_options(size: int, min_frequency: int, alphabet_limit: int | None, out: str) -> None:
    problems = []
    least = len(SPECIAL_TOKENS) + 1
    if not least <= size <= 2_000_000:
        problems.append(f"--size {size}: from {least} (the special tokens and one more) to 2,000,000 is possible")
    if min_frequency < 1:
        problems.append(f"--min-frequency {min_frequency}: at least 1 is needed")
    if alphabet_limit is not None and alphabet_limit < 1:
        problems.append(f"--alphabet-limit {alphabet_limit}: at least 1 is needed")
    if taken := why_taken(out):
        problems.append(taken)
    if problems:
        raise UserError("; ".join(problems))


def _group_texts(
    documents: Iterable[str], words: WordCounts, splitter: WordSplitter, characters: int
) -> Iterator[list[str]]:
    """Texts in chunks of about `characters`; stretches too long to be words are counted in `words`."""
    chunk: list[str] = []
    held = 0
    for document in documents:
        for text, overlong in cut_text(document, splitter, characters):
            if overlong:
                words.overlong_words += 1
                words.overlong_characters += overlong
                continue
            chunk.append(text)
            held += len(text)
            if held >= characters:
                yield chunk
                chunk, held = [], 0
    if chunk:
        yield chunk


def _say_losses(summary: dict[str, Any]) -> None:
    """One line on stderr for each thing the user should know before using the vocabulary."""
    read: dict[str, Any] = summary["read"]
    if summary["size"] < summary["requested_size"]:
        say(
            f"warning: too little text for {summary['requested_size']:,} entries: no more pairs occur often enough, "
            f"so there are {summary['size']:,}"
        )
    if (rare := summary["words_not_learned_from"] / max(summary["words"], 1)) > 0.01:
        say(
            f"{rare:.2%} of the text's words were not learned from: too rare (the most frequent words are taken, "
            f"{TRAINING_CHARACTERS:,} characters of them), or with a character that has no entry"
        )
    if summary["characters_dropped"]:
        say(
            f"{summary['characters_dropped']:,} of {summary['characters']:,} distinct characters got no entry "
            f"({summary['characters_dropped_share']:.4%} of the text); words that hold one become [UNK]"
        )
    if share := summary["overlong_characters"] / max(read["characters"], 1):
        say(
            f"{'warning: ' if share > 0.01 else ''}{summary['overlong_words']:,} words are too long for WordPiece "
            f"({share:.4%} of the text) and become [UNK]"
            + ("; if this language or data has no blanks, put some between its words first" if share > 0.01 else "")
        )
    if read["invalid_bytes"]:
        say(f"warning: {read['invalid_bytes']:,} bytes were not in the encoding, first at {read['invalid_places'][0]}")
    for reason, count in read["skipped"].items():
        say(f"left out: {count:,} × {reason}")
