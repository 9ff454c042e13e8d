"""Feature-based use (Devlin et al. 2018, section 5.3): texts → vectors of any layers, per text, token or word.

In: texts, or sentences that are split into words. Out: one vector a text, or one for each of its tokens or words, in
input order, some thousand texts at a time. Every token is in some vector or counted as cut.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from bertsmith.errors import UserError, not_finite, one_of, whole_number
from bertsmith.inference.chunks import TEXTS_AT_ONCE, Text, count_characters, split_chunks
from bertsmith.inference.encoder import Encoder, Sequences, TokenBatch, ranges
from bertsmith.inference.vector_writer import Vectors
from bertsmith.tasks.examples import EncodingReport
from bertsmith.tasks.long_texts import spread_windows
from bertsmith.tasks.table import kind_of
from bertsmith.tasks.tagging import choose_windows, find_windows
from bertsmith.training.ranks import ALONE, Ranks, check_same_count, split_evenly

Ints = npt.NDArray[np.integer]
Floats = npt.NDArray[np.float32]

COMBINATIONS = ("concat", "sum", "mean")
POOLINGS = ("mean", "cls", "none", "pooler")
LONG = ("cut", "window", "refuse")
# characters in memory at a time: enough that batches of like lengths fill up
CHARACTERS_AT_ONCE = 4_000_000
# bytes of vectors in memory at a time, should every character be a token
_BYTES_AT_ONCE = 256 << 20
_PLACES_NAMED = 5


@dataclass(frozen=True)
class FeatureOptions:
    """What a vector is made of. Raises UserError for values that are not known or contradict each other."""

    layers: str = "-1"
    """Levels: 0 the embeddings, 1 … the layers, -1 the last. One, a list such as `-4,-3`, or a slice such as `-4:`."""
    combine: str = "concat"
    """concat (in the order of `layers`; reshape to (n, layers, hidden) to weight them), sum or mean of the layers."""
    pool: str = "mean"
    """mean (all real tokens, [CLS] and [SEP] among them), cls, pooler (what next-sentence prediction trained), or none:
    a vector for each token, [CLS] and [SEP] among them."""
    words: bool = False
    """A vector for each word, the mean of its pieces."""
    normalize: bool = False
    """Vectors of length 1."""
    max_length: int | None = None
    """Tokens of a sequence at most; None: as many as the model has positions that were trained."""
    long: str | None = None
    """Longer texts: cut, shown in overlapping windows, or refused. None: cut, and window for words.

    With windows the vector of a text is the mean of its windows' vectors; a token or word gets its vector from the
    window in which it has the most context."""
    allow_special: bool = False
    """Whether [CLS], [SEP], [MASK] and the like in a text are these tokens, and not plain text."""

    def __post_init__(self) -> None:
        for name in ("words", "normalize", "allow_special"):
            if not isinstance(value := getattr(self, name), bool | np.bool_):
                raise UserError(f"{name}: {value!r} is neither True nor False")
        if self.max_length is not None:
            whole_number("max_length", self.max_length)
        one_of("combine", self.combine, COMBINATIONS)
        one_of("pool", self.pool, POOLINGS)
        if self.long is not None:
            one_of("long", self.long, LONG)
        if self.words and self.pool != "mean":
            raise UserError(f"words: a word's vector is the mean of its pieces; pool {self.pool} contradicts that")
        if self.words and self.long == "cut":
            raise UserError("words: of a text that is cut, words would have no vector; use long window or refuse")
        if self.pool == "pooler" and self.layers != "-1":
            raise UserError(f"layers: the pooler looks at the last one only; {self.layers} contradicts pool pooler")

    @property
    def several(self) -> bool:
        """Whether a text has any number of vectors."""
        return self.words or self.pool == "none"


def parse_layers(layers: str, top: int) -> list[int]:
    """The levels, 0 … `top`, that `-1`, `-4,-3` or a slice such as `-4:` names, in that order.

    Raises UserError for anything else, for a level that the model does not have, and where none is left.
    """
    there = f"0 (embeddings) to {top}, or -1 (the last) to -{top + 1}"
    if re.fullmatch(r"(-?\d+)?:(-?\d+)?", layers):
        first, _, last = layers.partition(":")
        bounds = [int(bound) if bound else None for bound in (first, last)]
        if all(bound is None or -top - 1 <= bound <= top + 1 for bound in bounds):
            levels = list(range(top + 1))[slice(*bounds)]
            if levels:
                return levels
    elif re.fullmatch(r"-?\d+(,-?\d+)*", layers):
        numbers = [int(number) for number in layers.split(",")]
        if all(-top - 1 <= number <= top for number in numbers):
            return [number % (top + 1) for number in numbers]
    else:
        raise UserError(f"layers: {layers!r} is no level, list (-2,-1) or slice (-4:); this model has {there}")
    raise UserError(f"layers: {layers} is not in this model, which has {there}")


@dataclass(frozen=True)
class _Plan:
    """N sequences, and S vectors that are means of tokens of theirs."""

    sequences: Sequences
    spans: Ints  # (S, 2): the tokens [begin, end) of each vector, counted from its sequence's start
    span_counts: Ints  # (N,): vectors of each sequence
    slots: Ints  # (S,): the row of the result that a vector is for; where several have one, it is their mean
    counts: Ints  # (n,): rows of each text
    token_ids: Ints | None = None  # (rows,)


class FeatureExtractor:
    """Texts → vectors by one encoder. `why_no_pooler`: what to say where the pooler was never trained.

    Raises UserError for options that do not suit the model.
    """

    def __init__(self, encoder: Encoder, options: FeatureOptions, why_no_pooler: str | None = None) -> None:
        self.encoder = encoder
        self.options = options
        config = encoder.config
        self.levels = parse_layers(options.layers, config.num_hidden_layers)
        if options.pool == "pooler" and why_no_pooler is not None:
            raise UserError(why_no_pooler)
        self.max_length = encoder.max_length if options.max_length is None else options.max_length
        if not 3 <= self.max_length <= config.max_position_embeddings:
            raise UserError(
                f"max_length: {self.max_length} is not between 3 and the model's {config.max_position_embeddings} "
                "positions"
            )
        self.dimension = config.hidden_size * (len(self.levels) if options.combine == "concat" else 1)
        self.long = options.long or ("window" if options.words else "cut")
        self.report = EncodingReport()
        """What was encoded and what was lost, over all calls."""
        self.computed_tokens = 0
        """Tokens that went through the model."""
        self.on_rows: Callable[[float], None] | None = None
        """Called now and then by `chunks` with how many rows more are done: a batch's by its share of its chunk's
        tokens."""
        self._rows = 0

    def chunks(
        self, texts: Iterable[tuple[str, Text]], ranks: Ranks = ALONE, weigh: Callable[[], int] = lambda: 0
    ) -> Iterator[Vectors]:
        """The vectors of (place, text) pairs, some texts at a time, in order. `place` is for messages, `weigh` for
        `split_chunks`, the same on all ranks.

        Several processes (`ranks`) read the same texts and compute a share each; the first one gets all vectors, the
        others none.
        """
        most = CHARACTERS_AT_ONCE
        if self.options.several:
            most = min(most, _BYTES_AT_ONCE // (4 * self.dimension))
        chunks = split_chunks(texts, most * ranks.size, TEXTS_AT_ONCE * ranks.size, weigh)
        while True:
            with ranks.alike():
                chunk = next(chunks, [])
            check_same_count(len(chunk), ranks)
            if not chunk:
                return
            self._rows = len(chunk)
            own = chunk[split_evenly([1 + count_characters(text) for _, text in chunk], ranks.size)[ranks.rank]]
            with ranks.alike():
                vectors = self.extract([text for _, text in own], [place for place, _ in own])
            arrays = [array for array in (vectors.rows, vectors.counts, vectors.token_ids) if array is not None]
            yield from (Vectors(*parts) for _, parts in ranks.gather(None, arrays))

    def merge_counts(self, ranks: Ranks) -> None:
        """Count on the first rank what all of them did."""
        for rank, ((counts, tokens), _) in enumerate(ranks.gather((asdict(self.report), self.computed_tokens))):
            if rank:
                self.report.merge(EncodingReport(**counts))
                self.computed_tokens += tokens

    def extract(self, texts: Sequence[Text], places: Sequence[str]) -> Vectors:
        """The vectors of `texts`, all in memory at once.

        Raises UserError where they are not finite, which weights that diverged or are damaged make them.
        """
        if not texts:
            none = np.zeros(0, dtype=np.int64) if self.options.several else None
            return Vectors(np.zeros((0, self.dimension), dtype=np.float32), none, None if self.options.words else none)
        plan = self._plan_units(texts, places) if self.options.several else self._plan_texts(texts, places)
        self.report.sequences += len(plan.sequences)
        self.computed_tokens += len(plan.sequences.token_ids)
        vectors = self._compute(plan)
        if not np.isfinite(vectors).all():
            raise not_finite(f"{places[0]} and on: the model's vectors")
        rows = int(plan.counts.sum())
        if len(plan.slots) > rows:  # windows of one text lie side by side
            firsts = np.flatnonzero(np.diff(plan.slots, prepend=-1))
            windows = np.diff(firsts, append=len(plan.slots))
            vectors = np.add.reduceat(vectors, firsts, axis=0)
            vectors /= windows[:, None].astype(np.float32)
        elif self.options.several:
            ordered = np.empty_like(vectors)
            ordered[plan.slots] = vectors
            vectors = ordered
        if self.options.normalize:
            lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
            vectors /= np.where(lengths > 0, lengths, 1)
        return Vectors(vectors, plan.counts.astype(np.int64) if self.options.several else None, plan.token_ids)

    # -- which tokens a vector is made of

    def _plan_texts(self, texts: Sequence[Text], places: Sequence[str]) -> _Plan:
        """One vector a text."""
        flat, lengths = self.encoder.tokenizer.encode_flat(_as_texts(texts, places), self.options.allow_special)
        room = self.max_length - 2
        self._count(flat, lengths, places)
        begins = np.cumsum(lengths) - lengths
        owners = np.arange(len(texts))
        if self.long == "window" and (lengths > room).any():
            offsets = [spread_windows(int(length), room, room // 4) for length in lengths]
            owners = np.repeat(owners, [len(each) for each in offsets])
            begins = begins[owners] + np.concatenate(offsets)
            lengths = np.minimum(lengths[owners], room)
        else:
            lengths = np.minimum(lengths, room)
        sequences = Sequences.frame(self.encoder.tokenizer, flat, begins, lengths)
        ends = lengths + 2 if self.options.pool == "mean" else np.ones_like(lengths)
        spans = np.stack([np.zeros_like(ends), ends], axis=1)
        return _Plan(sequences, spans, np.ones(len(sequences), int), owners, np.ones(len(texts), int))

    def _plan_units(self, texts: Sequence[Text], places: Sequence[str]) -> _Plan:
        """A vector for each token, [CLS] and [SEP] among them, or for each word."""
        tokenizer, room, words = self.encoder.tokenizer, self.max_length - 2, self.options.words
        sizes: list[Ints]  # of each text: the tokens of each of its units
        if words:
            flat, sizes, lost = self._encode_words(texts)
        else:
            flat, totals = tokenizer.encode_flat(_as_texts(texts, places), self.options.allow_special)
            sizes, lost = [np.ones(total, dtype=np.int64) for total in totals], np.zeros_like(totals)
        lengths = np.array([size.sum() for size in sizes], dtype=np.int64)
        begins = np.cumsum(lengths) - lengths
        self._count(flat, lengths + lost, places)
        self.report.truncated += int(np.count_nonzero(lost))
        self.report.truncated_tokens += int(lost.sum())
        if self.long == "cut":
            sizes = [size[:room] for size in sizes]
        counts = np.array([len(size) + (0 if words else 2) for size in sizes], dtype=np.int64)
        parts = [
            (begin + start, length, spans, first + rows)
            for begin, first, size in zip(begins, np.cumsum(counts) - counts, sizes, strict=True)
            for start, length, spans, rows in _split_units(size, room, framed=not words)
        ]
        return _Plan(
            Sequences.frame(
                tokenizer,
                flat,
                np.array([begin for begin, _, _, _ in parts], dtype=np.int64),
                np.array([length for _, length, _, _ in parts], dtype=np.int64),
            ),
            np.concatenate([np.zeros((0, 2), dtype=np.int64), *(spans for _, _, spans, _ in parts)]),
            np.array([len(rows) for _, _, _, rows in parts], dtype=np.int64),
            np.concatenate([np.zeros(0, dtype=np.int64), *(rows for _, _, _, rows in parts)]),
            counts,
            None if words else Sequences.frame(tokenizer, flat, begins, counts - 2).token_ids,
        )

    def _encode_words(self, texts: Sequence[Text]) -> tuple[Ints, list[Ints], Ints]:
        """The ids of all words; of each text how many each of its words has, never 0; of each text how many are lost.

        Lost are the last pieces of a word that has more than a sequence has room for.
        """
        tokenizer, room = self.encoder.tokenizer, self.max_length - 2
        sentences = [text.split() if isinstance(text, str) else text for text in texts]
        ids = tokenizer.encode_ids(itertools.chain.from_iterable(sentences), self.options.allow_special)
        kept = [word[:room] or [tokenizer.unk_id] for word in ids]  # cleaning can leave nothing of a word
        sizes = np.array([len(word) for word in kept], dtype=np.int64)
        words = [len(sentence) for sentence in sentences]
        lost = np.zeros(len(texts), dtype=np.int64)
        np.add.at(lost, np.repeat(np.arange(len(texts)), words), [max(len(word) - room, 0) for word in ids])
        flat = np.fromiter(itertools.chain.from_iterable(kept), dtype=np.int32, count=int(sizes.sum()))
        return flat, np.split(sizes, np.cumsum(words)[:-1]), lost

    def _count(self, flat: Ints, lengths: Ints, places: Sequence[str]) -> None:
        """Count texts, tokens (`lengths` of each text) and what does not fit.

        Raises UserError, naming them, for long texts where they are refused.
        """
        report, room = self.report, self.max_length - 2
        report.examples += len(lengths)
        report.tokens += int(lengths.sum())
        report.unknown_tokens += int(np.count_nonzero(flat == self.encoder.tokenizer.unk_id))
        for index in np.flatnonzero(lengths == 0).tolist():
            report.note("empty_texts", 1, places[index])
        longer = np.flatnonzero(lengths > room)
        if self.long == "refuse" and len(longer):
            named = ", ".join(f"{places[index]} ({lengths[index] + 2:,})" for index in longer[:_PLACES_NAMED])
            more = f" and {len(longer) - _PLACES_NAMED} more" if len(longer) > _PLACES_NAMED else ""
            raise UserError(
                f"{named}{more}: more tokens than {self.max_length:,}; shorten the text, or let it be cut or windowed"
            )
        if self.long == "cut":
            report.truncated += len(longer)
            report.truncated_tokens += int((lengths[longer] - room).sum())
        else:
            report.windowed += len(longer)

    # -- from tokens to vectors

    def _compute(self, plan: _Plan) -> Floats:
        """The vectors of all spans, (S, dimension)."""
        vectors = np.empty((len(plan.spans), self.dimension), dtype=np.float32)
        first = np.cumsum(plan.span_counts) - plan.span_counts

        def fill(batch: TokenBatch) -> None:
            counts = plan.span_counts[batch.numbers]
            chosen = ranges(first[batch.numbers], counts)
            spans = plan.spans[chosen] + np.repeat(batch.starts[:-1], counts)[:, None]
            vectors[chosen] = self._vectors(batch, spans[:, 0], spans[:, 1] - spans[:, 0]).cpu().numpy()

        for batch, _ in self.encoder.map(fill, self.encoder.batches(plan.sequences)):
            if self.on_rows is not None:
                # by tokens: the longest texts go first, and by rows they would seem slow
                self.on_rows(self._rows * int(batch.starts[-1]) / len(plan.sequences.token_ids))
        return vectors

    @torch.inference_mode()
    def _vectors(self, batch: TokenBatch, begins: Ints, lengths: Ints) -> Tensor:
        """(s, dimension) float32: for each of s stretches of tokens their mean, layers combined."""
        bert, device = self.encoder.bert, self.encoder.device
        rows = torch.from_numpy(ranges(begins, lengths)).to(device)
        offsets = torch.from_numpy(np.cumsum(lengths) - lengths).to(device)
        top = max(self.levels)
        some = len(rows) < len(batch.token_ids)  # the highest layer is wanted at these tokens only
        states = bert.levels(*batch.inputs(), self.levels, rows if some else None)
        parts = []
        for level, hidden in zip(self.levels, states, strict=True):
            wanted = torch.arange(len(rows), device=device) if some and level == top else rows
            if self.options.pool == "pooler":
                hidden = bert.pooler(hidden)
            parts.append(F.embedding_bag(wanted, hidden.float(), offsets, mode="mean"))
        if self.options.combine == "concat":
            return torch.cat(parts, dim=1)
        total = torch.stack(parts).sum(0)
        return total / len(parts) if self.options.combine == "mean" else total


def _as_texts(texts: Sequence[Text], places: Sequence[str]) -> list[str]:
    for text, place in zip(texts, places, strict=True):
        if not isinstance(text, str):
            raise UserError(f"{place}: is {kind_of(text)}, not a text; a list of words is for vectors of words")
    return [str(text) for text in texts]


def _split_units(sizes: Ints, room: int, framed: bool) -> Iterator[tuple[int, int, Ints, Ints]]:
    """The sequences of one text: first token, how many, the stretches of tokens that are vectors, and their rows.

    `sizes` (units,): tokens of each unit, at most `room`. Tokens are counted in the text, stretches in the sequence,
    where [CLS] is 0. Each unit has its vector from the window in which it has the most context. `framed`: [CLS] of the
    first window and [SEP] of the last have rows as well, before and after the units'.
    """
    ends = np.cumsum(sizes)
    starts = ends - sizes
    if len(sizes):
        windows = find_windows(starts, ends, room)
        owners = choose_windows(starts, ends, windows)
    else:  # nothing between [CLS] and [SEP]
        windows, owners = [(0, 0)] if framed else [], starts
    for number, (first, last) in enumerate(windows):
        mine = np.flatnonzero(owners == number)
        begin, end = (int(starts[first]), int(ends[last - 1])) if last else (0, 0)
        spans = np.stack([starts[mine], ends[mine]], axis=1) - begin + 1
        rows = mine + framed
        if framed and number == 0:
            spans, rows = np.concatenate([[[0, 1]], spans]), np.concatenate([[0], rows])
        if framed and number == len(windows) - 1:
            sep = end - begin + 1
            spans, rows = np.concatenate([spans, [[sep, sep + 1]]]), np.concatenate([rows, [len(sizes) + 1]])
        if len(rows):  # else its neighbours know all of its units better
            yield begin, end - begin, spans, rows
