"""Examples from sentences: which text makes which training row, for the objectives mlm+nsp, mlm+sop and mlm.

In go blocks of a corpus, a key (the seed) and an epoch; out come plans (where each example's text lies, a few numbers
each) and, for those a worker really builds, their pieces of text. Every choice is hashed from (key, epoch, block,
sentence), so the plan of a block is the same for whoever makes it. Pairs follow the paper (section 3.1 and appendix
A.2) and its reference, `create_instances_from_document` in google-research/bert's create_pretraining_data.py.
"""

from bisect import bisect_right
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np

from bertsmith.corpus.random_bits import UInt64s, binomial_half, derive_key, hash_bits, scale_to_integers, to_uniform
from bertsmith.corpus.windows import Bools, CorpusIndex, Ints, SentenceTable, piece_size
from bertsmith.errors import UserError

Objective = Literal["mlm+nsp", "mlm+sop", "mlm"]
OBJECTIVES: tuple[Objective, ...] = ("mlm+nsp", "mlm+sop", "mlm")
LABEL_NAMES: dict[str, tuple[str, str]] = {"mlm+nsp": ("is next", "random"), "mlm+sop": ("in order", "swapped")}
"""What the labels 0 and 1 of a pair mean (as in Google's code and transformers)."""

# Counters of the numbers drawn for the chunk that begins at a sentence.
_SHORT, _TARGET, _FIRST_PART, _COIN, _DOCUMENT, _SENTENCE, _PIECE, _FRONT_A, _FRONT_B = range(9)
_BALANCE_SENTENCES = 50_000
_INDEX_BITS = 24  # an example's id is its block's number, then its number in the block in 24 bits


@dataclass(frozen=True)
class ExamplePlan:
    """Where the text of each example lies, one entry an example. Tokens are counted within the example's shard."""

    ids: Ints
    """Stable: the same (seed, epoch, id) is the same example whoever makes it; unique within an epoch."""
    keys: UInt64s
    """What the example's further random choices are hashed from."""
    shard: Ints
    start: Ints
    first_length: Ints
    """Tokens of the first segment before truncation; for objective mlm, of the whole row."""
    second_length: Ints
    """Tokens right after them that make the second segment; 0 where that is random, and for objective mlm."""
    label: Ints
    """1: random next, or swapped; else 0."""
    target: Ints
    """Tokens that the pair is filled to."""
    document: Ints
    lost: Ints
    """Tokens beside the example that could not be made part of any."""

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: Ints | slice) -> "ExamplePlan":
        """The examples with these numbers, in this order."""
        return ExamplePlan(*(getattr(self, field.name)[rows] for field in fields(self)))

    @staticmethod
    def concatenate(plans: list["ExamplePlan"]) -> "ExamplePlan":
        """All their examples, one plan after the other."""
        if len(plans) == 1:
            return plans[0]
        return ExamplePlan(*(np.concatenate([getattr(p, field.name) for p in plans]) for field in fields(ExamplePlan)))


@dataclass(frozen=True)
class Pieces:
    """The text of some examples: example n is the pieces [offsets[n], offsets[n + 1]), each a range of a shard."""

    offsets: Ints
    shard: Ints
    """Number of the shard of each piece; those of `random_corpus` are counted after the corpus's own."""
    start: Ints
    length: Ints
    tokens_cut: Ints
    """(N,) tokens of the example's own running text that were cut away to make it fit."""


class ExamplePlanner:
    """Plans the examples of one split for one objective and length."""

    def __init__(
        self,
        corpus: CorpusIndex,
        objective: Objective,
        max_length: int,
        short_share: float = 0.1,
        random_corpus: CorpusIndex | None = None,
    ) -> None:
        """`max_length`: tokens a row with special tokens. `short_share`: share of pairs with a short target length.

        `random_corpus`: where random second segments come from, if not from the corpus itself (a held-out split of one
        document has no other document to offer).

        Raises UserError when the text offers no pairs of the kind asked for.
        """
        self.corpus, self.objective, self.max_length, self.short_share = corpus, objective, max_length, short_share
        self.random_corpus = random_corpus
        self.room = max_length - (2 if objective == "mlm" else 3)
        self.random_chance = 0.5
        self.expected_random_share = 0.0
        if objective != "mlm":
            self._check_pairs_exist()
        if objective == "mlm+nsp":
            self._balance_labels()

    def plan_blocks(self, blocks: Ints, key: int, epoch: int) -> ExamplePlan:
        """The examples of `blocks`, block after block. `key` stands for the seed."""
        epoch_key = derive_key(key, "examples", epoch)
        if self.objective == "mlm":
            return self._plan_rows(blocks, epoch_key)
        table = self.corpus.sentence_table(blocks, self.room)
        chunks = _Chunks(table, hash_bits(epoch_key, table.block), self.room, self.short_share)
        return self._plan_pairs(table, chunks)

    def resolve(self, plan: ExamplePlan) -> Pieces:
        """Look up (and for pairs, draw and truncate) the text of planned examples."""
        return self._resolve_rows(plan) if self.objective == "mlm" else self._resolve_pairs(plan)

    # --- pairs

    def _check_pairs_exist(self) -> None:
        corpus = self.corpus
        has_pairs = corpus.sentences > corpus.documents or any(
            len(shard.sentence_lengths) and int(shard.sentence_lengths.max()) > self.room for shard in corpus.shards
        )
        found = self._shape()
        if not has_pairs:
            raise UserError(
                f"objective {self.objective} needs documents of several sentences to learn what follows what, but the "
                f"corpus has {found}; if a blank line follows every sentence, prepare it again with one only between "
                "documents, or use objective mlm"
            )
        if self.objective == "mlm+nsp" and self.random_corpus is None and corpus.documents < 2:
            raise UserError(
                f"objective mlm+nsp takes random next sentences from another document, but the corpus has {found}; "
                "mark where documents end (with --documents blank-line: a blank line) and prepare it again, or use "
                "objective mlm+sop or mlm"
            )

    def _shape(self) -> str:
        mean = self.corpus.sentences / self.corpus.documents
        return f"{self.corpus.documents:,} documents, mean {mean:.1f} sentences"

    def warnings(self) -> list[str]:
        """What the person should know about the pairs before training: labels that cannot be balanced."""
        if self.expected_random_share < 0.6:
            return []
        return [
            f"{self.expected_random_share:.0%} of the pairs will be labelled random, because most documents have one "
            f"sentence ({self._shape()}) and offer no true next; if a blank line follows every sentence, prepare the "
            "corpus again with one only between documents"
        ]

    def _balance_labels(self) -> None:
        """Choose the chance of "random" for chunks of several sentences so that half of all pairs are random.

        A chunk of one sentence (the last of a document, often) can only get a random next. The reference tosses a fair
        coin for all others, so that more than half of its pairs are random: two thirds where documents have two
        sentences. The chance is found on a fixed sample, whatever the seed: some blocks, planned several times if few.
        """
        sample = self.corpus.sample_blocks(derive_key("sample for the balance of labels"))
        table = self.corpus.sentence_table(sample, self.room)
        plannings = min(32, -(-_BALANCE_SENTENCES // max(len(table.length), 1)))
        chunks = [
            _Chunks(table, hash_bits(derive_key("balance of labels", n), table.block), self.room, self.short_share)
            for n in range(plannings)
        ]

        def share(chance: float) -> float:
            # expected rather than counted, given which chunks come up: less noise for the same sample
            pairs = forced = 0
            for planning in chunks:
                begins, _ = planning.walk_next_sentences(chance)
                pairs, forced = pairs + len(begins), forced + int(planning.alone[begins].sum())
            return chance + (1 - chance) * forced / pairs

        low, high = 0.0, 0.5
        for _ in range(9):
            middle = (low + high) / 2
            low, high = (low, middle) if share(middle) > 0.5 else (middle, high)
        self.random_chance = high if share(0.5) > 0.5 else 0.5
        self.expected_random_share = share(self.random_chance)

    def _plan_pairs(self, table: SentenceTable, chunks: "_Chunks") -> ExamplePlan:
        is_nsp = self.objective == "mlm+nsp"
        begins, label = chunks.walk_next_sentences(self.random_chance) if is_nsp else chunks.walk_swaps()
        bounds = (begins, chunks.first_end[begins], chunks.end[begins])
        first_length, second_length = np.diff([chunks.position[bound] for bound in bounds], axis=0)
        if is_nsp:
            second_length[label[begins]] = 0
        elif len(alone := np.flatnonzero(second_length == 0)):
            # order can be told only of two segments: a chunk of one sentence is cut into two at a random token
            whole = first_length[alone]
            cut = 1 + scale_to_integers(chunks.draw(_PIECE)[begins[alone]], np.maximum(whole - 1, 1))
            first_length[alone] = np.minimum(cut, whole)
            second_length[alone] = whole - first_length[alone]
        plan = ExamplePlan(
            ids=(table.block[begins] << _INDEX_BITS) | table.index[begins],
            keys=chunks.keys[begins],
            shard=table.shard[begins],
            start=table.start[begins],
            first_length=first_length,
            second_length=second_length,
            label=label[begins].astype(np.int64),
            target=chunks.target[begins],
            document=table.document[begins],
            lost=np.zeros(len(begins), dtype=np.int64),
        )
        return plan if is_nsp else _drop_single_tokens(plan)

    def _resolve_pairs(self, plan: ExamplePlan) -> Pieces:
        random = (plan.label == 1) & (self.objective == "mlm+nsp")
        second_shard, second_start = plan.shard.copy(), plan.start + plan.first_length
        second_length = plan.second_length.copy()
        rows = np.flatnonzero(random)
        if len(rows):
            second_shard[rows], second_start[rows], second_length[rows] = self._draw_random_segments(plan.take(rows))
        cut_first, cut_second = _tokens_to_cut(plan.first_length, second_length, self.room)
        front_first = binomial_half(hash_bits(plan.keys, _FRONT_A), cut_first)
        front_second = binomial_half(hash_bits(plan.keys, _FRONT_B), cut_second)
        shard = np.stack([plan.shard, second_shard], axis=1)  # (N, 2)
        start = np.stack([plan.start + front_first, second_start + front_second], axis=1)
        length = np.stack([plan.first_length - cut_first, second_length - cut_second], axis=1)
        if self.objective == "mlm+sop":
            swapped = plan.label == 1
            for array in (shard, start, length):
                array[swapped] = array[swapped, ::-1]
        return Pieces(
            offsets=np.arange(0, 2 * len(plan) + 1, 2),
            shard=shard.ravel(),
            start=start.ravel(),
            length=length.ravel(),
            tokens_cut=cut_first + np.where(random, 0, cut_second) + plan.lost,
        )

    def _draw_random_segments(self, plan: ExamplePlan) -> tuple[Ints, Ints, Ints]:
        """Shard, start and length of a segment from another document for each example.

        As in the reference: a document, then a sentence of it, then as many sentences as fill the pair to its target
        length or the document holds. The document differs from the example's own by construction, not by ten tries.
        """
        uniform = {i: to_uniform(hash_bits(plan.keys, i)) for i in (_DOCUMENT, _SENTENCE, _PIECE)}
        if self.random_corpus is None:
            corpus, shards_before = self.corpus, 0
            documents = scale_to_integers(uniform[_DOCUMENT], corpus.documents - 1)
            documents += documents >= plan.document
        else:
            corpus, shards_before = self.random_corpus, len(self.corpus.shards)
            documents = scale_to_integers(uniform[_DOCUMENT], corpus.documents)
        shards = np.searchsorted(corpus.document_base, documents, side="right") - 1
        local = documents - corpus.document_base[shards]
        wanted = np.maximum(plan.target - plan.first_length, 1)
        starts, lengths = np.empty_like(wanted), np.empty_like(wanted)
        columns = (shards, local, wanted, uniform[_SENTENCE], uniform[_PIECE])
        for row, (number, document, want, u, v) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
            offsets = corpus.sentence_offsets(number, document)
            sentence = int(u * (len(offsets) - 1))
            start = int(offsets[sentence])
            if (length := int(offsets[sentence + 1]) - start) > self.room:  # cut to pieces as in `sentence_table`
                size = piece_size(self.room)
                start += size * int(v * -(-length // size))
            end = int(offsets[min(int(offsets.searchsorted(start + want)), len(offsets) - 1)])
            starts[row], lengths[row] = start, min(end - start, self.room)
        return shards + shards_before, starts, lengths

    # --- rows

    def _plan_rows(self, blocks: Ints, epoch_key: int) -> ExamplePlan:
        """Cut the running text of each block into rows of exactly `max_length` tokens (RoBERTa's "full sentences").

        A row may go on into the next document, after a [SEP] that takes the place of a token; one that would end with
        that [SEP] ends a token early instead. Only a block's last row is shorter. Nothing is dropped.
        """
        starts, lengths, counts = [], [], []
        for number in blocks.tolist():
            first, end = int(self.corpus.block_start[number]), int(self.corpus.block_end[number])
            cuts = np.array(_cut_rows(first, end, self.corpus.document_starts(number).tolist(), self.room))
            starts.append(cuts[:-1])
            lengths.append(np.diff(cuts))
            counts.append(len(cuts) - 1)
        start, length = np.concatenate(starts), np.concatenate(lengths)
        block = np.repeat(blocks, counts)
        index = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = (block << _INDEX_BITS) | index
        zeros = np.zeros(len(ids), dtype=np.int64)
        shard = self.corpus.block_shard[block]
        keys = hash_bits(epoch_key, ids)
        return ExamplePlan(ids, keys, shard, start, length, zeros, zeros, zeros + self.room, zeros - 1, zeros)

    def _resolve_rows(self, plan: ExamplePlan) -> Pieces:
        cuts: list[int] = []
        counts = []
        for shard, start, length in zip(
            plan.shard.tolist(), plan.start.tolist(), plan.first_length.tolist(), strict=True
        ):
            offsets = self.corpus.shards[shard].document_token_offsets
            low, high = offsets.searchsorted(np.array([start + 1, start + length], dtype=offsets.dtype)).tolist()
            cuts.append(start)
            if high > low:
                cuts += offsets[low:high].tolist()
            counts.append(1 + high - low)
        offsets_of_pieces = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)]).astype(np.int64)
        starts = np.array(cuts, dtype=np.int64)
        ends = np.empty_like(starts)
        ends[:-1] = starts[1:]
        ends[offsets_of_pieces[1:] - 1] = plan.start + plan.first_length
        shards = np.repeat(plan.shard, counts)
        return Pieces(offsets_of_pieces, shards, starts, ends - starts, np.zeros(len(plan), dtype=np.int64))


class _Chunks:
    """For every sentence of a table: the chunk that would begin there. Making the pairs is then a walk of single steps.

    Row i is the chunk of the sentences [i, end[i]), filled to `target[i]` tokens as far as its document goes; its first
    segment is [i, first_end[i]).
    """

    def __init__(self, table: SentenceTable, block_keys: UInt64s, room: int, short_share: float) -> None:
        rows = np.arange(len(table.length))
        self.position: Ints = np.concatenate([[0], np.cumsum(table.length)]).astype(np.int64)
        self.keys = hash_bits(block_keys, table.index)
        # The reference draws a length once for each document; here each pair has its own, so that 10 % of the pairs
        # are short rather than those of 10 % of the documents, which would be a quarter of all pairs.
        self.target: Ints = np.full(len(rows), room)
        short = np.flatnonzero(self.draw(_SHORT) < short_share)
        self.target[short] = 2 + scale_to_integers(to_uniform(hash_bits(self.keys[short], _TARGET)), room - 1)
        filled = np.searchsorted(self.position, self.position[:-1] + self.target)
        self.end: Ints = np.minimum(filled, table.run_end)
        count = self.end - rows
        first_part = scale_to_integers(self.draw(_FIRST_PART), np.maximum(count - 1, 1))
        self.first_end: Ints = rows + 1 + first_part
        self.alone: Bools = count == 1
        self.coin = self.draw(_COIN)

    def draw(self, counter: int) -> np.ndarray:
        """A uniform number for each row."""
        return to_uniform(hash_bits(self.keys, counter))

    def walk_next_sentences(self, random_chance: float) -> tuple[Ints, Bools]:
        """Rows at which pairs begin, and for all rows whether the next segment is random.

        After a random next, the sentences that were to be the second segment begin the next chunk: none is wasted.
        """
        random = self.alone | (self.coin < random_chance)
        return _walk(np.where(random, self.first_end, self.end)), random

    def walk_swaps(self) -> tuple[Ints, Bools]:
        """Rows at which pairs begin, and for all rows whether the segments are swapped."""
        return _walk(self.end), self.coin < 0.5


def _walk(following: Ints) -> Ints:
    """The rows 0, following[0], following[following[0]], … up to the end."""
    steps = following.tolist()
    row, rows = 0, []
    while row < len(steps):
        rows.append(row)
        row = steps[row]
    return np.array(rows, dtype=np.int64)


def _cut_rows(start: int, end: int, document_starts: list[int], room: int) -> list[int]:
    """Tokens at which the rows of [start, end) begin, and the end. `document_starts` lie inside, rising."""
    # with k separators, a row from p fits up to q = p + room - k; separator j is taken in only with a token after it
    reach = [position + number + 2 for number, position in enumerate(document_starts)]
    cuts = [start]
    position = start
    while position < end:
        budget = position + room + bisect_right(document_starts, position)
        taken = bisect_right(reach, budget)
        position = min(budget - taken, end)
        if taken < len(document_starts):
            position = min(position, document_starts[taken])
        cuts.append(position)
    return cuts


def _tokens_to_cut(first: Ints, second: Ints, room: int) -> tuple[Ints, Ints]:
    """How many tokens each segment loses until both fit (the reference's truncate_seq_pair, in closed form).

    The reference takes tokens off the longer one, at equal lengths off the second, one at a time.
    """
    excess = np.maximum(first + second - room, 0)
    difference = first - second
    uneven = np.minimum(excess, np.abs(difference))
    rest = excess - uneven
    return np.where(difference > 0, uneven, 0) + rest // 2, np.where(difference < 0, uneven, 0) + (rest + 1) // 2


def _drop_single_tokens(plan: ExamplePlan) -> ExamplePlan:
    """Drop chunks of one token, which have no order; each is counted as lost by a neighbour."""
    kept = np.flatnonzero(plan.second_length > 0)
    if len(kept) == len(plan) or not len(kept):
        return plan.take(kept)
    dropped = np.flatnonzero(plan.second_length == 0)
    neighbour = kept[np.minimum(np.searchsorted(kept, dropped), len(kept) - 1)]
    np.add.at(plan.lost, neighbour, 1)
    return plan.take(kept)
