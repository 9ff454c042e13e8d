"""Packed batches: what the model is fed, from any point of the corpus, for any rank or worker, the same every time.

In go a split, a tokenizer and options; out come batches of real tokens only (no padding), masked. A stream position is
three numbers (epoch, window, offset); starting there plans one window, so a resume takes as long at step 1,000,000 as
at step 1. A global batch is `batch_size` consecutive examples of one global order; ranks divide each batch.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import numpy as np

from bertsmith.corpus.examples import LABEL_NAMES, OBJECTIVES, ExamplePlan, ExamplePlanner, Objective
from bertsmith.corpus.masking import MaskingOptions, TokenizerInfo, mask_tokens
from bertsmith.corpus.random_bits import derive_key, hash_bits
from bertsmith.corpus.windows import BLOCK_TOKENS, WINDOW_BLOCKS, CorpusIndex, Ints, SplitShards
from bertsmith.errors import UserError

# What the sort in masking.py has bits for.
LONGEST_SEQUENCE, MOST_SEQUENCES = 65_535, 1 << 18
_MASKS = 1 << 32  # the counter, of an example's key, that gives the key of its masks


class TokenNames(Protocol):
    """Whoever tells the token of an id (`text.tokenizer.BertTokenizer`)."""

    def id_to_token(self, id: int, /) -> str:
        """The token."""


@dataclass(frozen=True)
class StreamPosition:
    """A point between two examples of the endless stream; `StreamPosition()` is its beginning.

    `offset` counts examples, so it means the same text only for the same corpus, seed, objective and length; with
    offset 0, (epoch, window) means the same text at every length.
    """

    epoch: int = 0
    window: int = 0
    offset: int = 0
    fraction: float = 0.0
    """Passes over the corpus so far, e.g. 2.25: what a schedule by epochs goes by."""

    def as_dict(self) -> dict[str, Any]:
        """For a checkpoint's JSON; `StreamPosition(**that)` gives it back."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Batch:
    """N packed sequences of T tokens in all, M of them masked; all arrays int64.

    On more than one rank, a small last batch may leave a rank with none: N = T = M = 0 is legal.
    """

    token_ids: Ints
    """(T,) after masking: [CLS] first segment [SEP] second segment [SEP], or [CLS] row [SEP]"""
    segment_ids: Ints
    """(T,) 0 or 1"""
    position_ids: Ints
    """(T,) from 0 in each sequence"""
    sequence_starts: Ints
    """(N + 1,) sequence n is [starts[n], starts[n + 1])"""
    masked_positions: Ints
    """(M,) into T, rising"""
    masked_labels: Ints
    """(M,) the ids before masking"""
    next_sentence_labels: Ints | None
    """(N,) 0 = is next (in order), 1 = random (swapped), as in Google's code and transformers; None for mlm"""
    example_ids: Ints
    """(N,) stable number of each example, unique within an epoch"""
    position: StreamPosition
    """Where the stream stands after this batch: the point to resume from."""
    tokens_cut: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    """(N,) tokens of each example's own running text that were cut away to make it fit"""

    def __len__(self) -> int:
        return len(self.sequence_starts) - 1

    def rows(self, first: int, end: int) -> "Batch":
        """The sequences from `first` up to `end` (0 ≤ first ≤ end ≤ N) as a batch of their own; arrays are views."""
        low, high = self.sequence_starts[[first, end]].tolist()
        m_low, m_high = np.searchsorted(self.masked_positions, [low, high]).tolist()
        labels = self.next_sentence_labels
        return Batch(
            token_ids=self.token_ids[low:high],
            segment_ids=self.segment_ids[low:high],
            position_ids=self.position_ids[low:high],
            sequence_starts=self.sequence_starts[first : end + 1] - low,
            masked_positions=self.masked_positions[m_low:m_high] - low,
            masked_labels=self.masked_labels[m_low:m_high],
            next_sentence_labels=None if labels is None else labels[first:end],
            example_ids=self.example_ids[first:end],
            position=self.position,
            tokens_cut=self.tokens_cut[first:end],
        )

    @property
    def max_sequence_length(self) -> int:
        """Tokens of the longest sequence; 0 when there is none."""
        return int(np.diff(self.sequence_starts).max(initial=0))


@dataclass
class BatchCounts:
    """What went by so far; JSON-able, so that a resumed run goes on counting."""

    examples: int = 0
    tokens: int = 0
    masked: int = 0
    tokens_cut: int = 0
    label_0: int = 0
    label_1: int = 0

    def add(self, batch: Batch) -> None:
        """Count a batch."""
        self.examples += len(batch)
        self.tokens += len(batch.token_ids)
        self.masked += len(batch.masked_positions)
        self.tokens_cut += int(batch.tokens_cut.sum())
        if batch.next_sentence_labels is not None:
            ones = int(batch.next_sentence_labels.sum())
            self.label_1 += ones
            self.label_0 += len(batch) - ones

    def merge(self, other: "BatchCounts") -> None:
        """Count what another one counted."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def as_dict(self, objective: Objective) -> dict[str, int]:
        """With the labels by name: `is next` and `random`, or `in order` and `swapped`."""
        counts = {name: value for name, value in asdict(self).items() if not name.startswith("label_")}
        names = LABEL_NAMES.get(objective)
        return counts if names is None else counts | {names[0]: self.label_0, names[1]: self.label_1}


class BatchStream:
    """All batches of a split: endless over epochs for training, once through in a fixed order for evaluation.

    Pickles as its options and shard paths, for worker processes. One stream may be read by several threads.
    """

    def __init__(
        self,
        split: SplitShards,
        tokenizer: TokenizerInfo,
        objective: Objective = "mlm+nsp",
        max_length: int = 128,
        batch_size: int = 32,
        seed: int = 0,
        masking: MaskingOptions | None = None,
        short_share: float = 0.1,
        random_split: SplitShards | None = None,
        block_tokens: int = BLOCK_TOKENS,
        window_blocks: int = WINDOW_BLOCKS,
    ) -> None:
        """`max_length`: tokens a sequence at most; `batch_size`: sequences a global batch, over all ranks.

        `short_share`: share of pairs filled to a random shorter length (0.1 in the paper). `random_split`: where random
        next segments come from, if not from the split itself. `block_tokens`, `window_blocks`: the grain of the shuffle
        (see windows.py); they are part of what a stream position means.

        Raises UserError, naming everything that is wrong, for options out of range, a corpus made with another
        tokenizer, or a corpus that offers no pairs of the kind asked for.
        """
        self.masking = masking or MaskingOptions()
        _check_options(tokenizer, objective, max_length, batch_size, short_share, self.masking)
        for shard in [*split.shards, *(random_split.shards if random_split else [])]:
            if shard.fingerprint != tokenizer.fingerprint:
                raise UserError(
                    f"the corpus was made with another tokenizer (fingerprint {shard.fingerprint[:12]}…) than the one "
                    f"given ({tokenizer.fingerprint[:12]}…); run `bertsmith prepare` again with this tokenizer"
                )
        self.corpus = CorpusIndex(split, block_tokens, window_blocks)
        random_corpus = CorpusIndex(random_split) if random_split and objective == "mlm+nsp" else None
        self.planner = ExamplePlanner(self.corpus, objective, max_length, short_share, random_corpus)
        self.shards = self.corpus.shards + (random_corpus.shards if random_corpus else [])
        self.tokenizer, self.objective, self.max_length = tokenizer, objective, max_length
        self.batch_size, self.seed = batch_size, seed
        self._key = derive_key(seed, "training")
        # not the seed's: runs with different seeds are measured on the same examples and masks
        self._evaluation_key = derive_key("evaluation")

    def batches(
        self,
        position: StreamPosition | None = None,
        rank: int = 0,
        world_size: int = 1,
        epochs: int | None = None,
        worker: int = 0,
        workers: int = 1,
        run: int = 1,
    ) -> Iterator[Batch]:
        """Batches from `position` on, endless or until `epochs` epochs (counted from the very beginning) are read.

        Each global batch is dealt out to the ranks in runs of `run` examples: rank r gets the runs r, r + world_size, …
        so that all ranks take the same number of steps; only the very last batch can be smaller. Worker w of a loader
        builds the batches w, w + workers, ….

        Raises UserError for a position that does not belong to this corpus, and for a token id past the vocabulary.
        """
        groups = self._global_batches(self._key, position or StreamPosition(), self.batch_size, epochs)
        for number, (plans, after) in enumerate(groups):
            if number % workers == worker:
                yield self._build(plans, after, rank, world_size, run)

    def evaluation_batches(
        self, max_examples: int | None = None, batch_size: int | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Each example once, or a fixed sample of `max_examples`: same order, pairs and masks always, for any seed."""
        size = batch_size or self.batch_size
        for plans, after in self._global_batches(self._evaluation_key, StreamPosition(), size, 1, max_examples):
            yield self._build(plans, after, rank, world_size)

    def _global_batches(
        self, key: int, position: StreamPosition, size: int, epochs: int | None, limit: int | None = None
    ) -> Iterator[tuple[list[ExamplePlan], StreamPosition]]:
        """Plans of `size` consecutive examples (parts of several windows or epochs), and the position after them."""
        windows = self.corpus.windows
        if not (0 <= position.window < windows and position.epoch >= 0 and position.offset >= 0):
            raise UserError(
                f"the stream position (epoch {position.epoch}, window {position.window}, example {position.offset}) is "
                f"not in this corpus of {windows} windows; continue with the corpus the run began with"
            )
        epoch, window, offset = position.epoch, position.window, position.offset
        left = math.inf if limit is None else limit
        parts: list[ExamplePlan] = []
        missing = size
        while left and (epochs is None or epoch < epochs):
            plan = self._plan_window(key, epoch, window)
            while offset < len(plan) and left:
                taken = int(min(missing, len(plan) - offset, left))
                parts.append(plan.take(slice(offset, offset + taken)))
                offset, missing, left = offset + taken, missing - taken, left - taken
                if not missing:
                    yield parts, self._position(epoch, window, offset, len(plan))
                    parts, missing = [], size
            if left:
                window, offset = (window + 1) % windows, 0
                epoch += window == 0
        if parts:
            yield parts, self._position(epoch, window, offset, len(plan))

    def _plan_window(self, key: int, epoch: int, window: int) -> ExamplePlan:
        """The examples of one window in their shuffled order."""
        blocks = self.corpus.window(key, epoch, window)
        plan = self.planner.plan_blocks(blocks, key, 0 if self.masking.static else epoch)
        return plan.take(np.argsort(hash_bits(derive_key(key, "example order", epoch), plan.ids), kind="stable"))

    def _position(self, epoch: int, window: int, offset: int, examples: int) -> StreamPosition:
        """The position after `offset` of the `examples` of a window: the next window's start rather than its end."""
        size, blocks = self.corpus.window_blocks, self.corpus.blocks
        if offset >= examples:
            window, offset = window + 1, 0
            if window == self.corpus.windows:
                return StreamPosition(epoch + 1, 0, 0, epoch + 1.0)
        done = window * size + offset / max(examples, 1) * min(size, blocks - window * size)
        return StreamPosition(epoch, window, offset, epoch + done / blocks)

    def _build(
        self, plans: list[ExamplePlan], after: StreamPosition, rank: int, world_size: int, run: int = 1
    ) -> Batch:
        """One rank's part of a global batch."""
        plan = ExamplePlan.concatenate(plans)
        if world_size > 1:
            plan = plan.take(np.flatnonzero(np.arange(len(plan)) // run % world_size == rank))
        pieces = self.planner.resolve(plan)
        token_ids = self._lay_out(pieces.offsets.tolist(), pieces.shard, pieces.start, pieces.length)
        with_separator = pieces.length + 1
        text_ends = np.concatenate([[0], np.cumsum(with_separator)]).astype(np.int64)
        lengths = 1 + np.diff(text_ends[pieces.offsets])
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        position_ids = np.arange(len(token_ids)) - np.repeat(starts[:-1], lengths)
        paired = self.objective != "mlm"
        if paired:
            with_separator[::2] += 1  # [CLS]
            segment_ids = np.repeat(np.tile(np.arange(2), len(plan)), with_separator)
        else:
            segment_ids = np.zeros_like(token_ids)
        if len(token_ids) and int(token_ids.max()) >= self.tokenizer.vocab_size:
            raise self._bad_token(plan, token_ids, starts)
        mask_keys = hash_bits(plan.keys, _MASKS)
        masked = mask_tokens(token_ids, position_ids, lengths, mask_keys, self.tokenizer, self.masking)
        return Batch(
            token_ids=masked.token_ids,
            segment_ids=segment_ids,
            position_ids=position_ids,
            sequence_starts=starts,
            masked_positions=masked.positions,
            masked_labels=masked.labels,
            next_sentence_labels=plan.label if paired else None,
            example_ids=plan.ids,
            position=after,
            tokens_cut=pieces.tokens_cut,
        )

    def _lay_out(self, offsets: list[int], shard: Ints, start: Ints, length: Ints) -> Ints:
        """[CLS] piece [SEP] piece [SEP] … for every example, one after the other."""
        tokens = [arrays.tokens for arrays in self.shards]
        cls = np.array([self.tokenizer.cls_id], dtype=tokens[0].dtype)
        sep = np.array([self.tokenizer.sep_id], dtype=tokens[0].dtype)
        ends = (start + length).tolist()
        texts = [tokens[s][a:b] for s, a, b in zip(shard.tolist(), start.tolist(), ends, strict=True)]
        parts = []
        for first, end in itertools.pairwise(offsets):
            parts.append(cls)
            for text in texts[first:end]:
                parts.append(text)
                parts.append(sep)
        return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)

    def _bad_token(self, plan: ExamplePlan, token_ids: Ints, starts: Ints) -> UserError:
        where = int(np.argmax(token_ids))
        example = int(np.searchsorted(starts, where, side="right")) - 1
        document = self.corpus.document_at(int(plan.shard[example]), int(plan.start[example]))
        return UserError(
            f"token id {token_ids[where]} is past the vocabulary of {self.tokenizer.vocab_size} entries, in or near "
            f"document {document + 1} of the split: the corpus is damaged; run `bertsmith prepare` again"
        )


def _check_options(
    tokenizer: TokenizerInfo,
    objective: str,
    max_length: int,
    batch_size: int,
    short_share: float,
    masking: MaskingOptions,
) -> None:
    problems = []
    if objective not in OBJECTIVES:
        problems.append(f"objective: {objective!r} is not known; use one of {', '.join(OBJECTIVES)}")
    shortest = 3 if objective == "mlm" else 5
    if not shortest <= max_length <= LONGEST_SEQUENCE:
        problems.append(f"max_length: {max_length} is not from {shortest} to {LONGEST_SEQUENCE} tokens")
    if not 1 <= batch_size <= MOST_SEQUENCES:
        problems.append(f"batch_size: {batch_size} is not from 1 to {MOST_SEQUENCES} sequences")
    if not 0 <= short_share <= 1:
        problems.append(f"short_share: {short_share} is not a share from 0 to 1")
    if masking.random_share > 0 and not len(tokenizer.replacements):
        problems.append("masking.random_share: the vocabulary holds special tokens only, nothing to replace with")
    if problems:
        raise UserError("; ".join(problems))


def split_batch(batch: Batch, micro_batch_size: int) -> list[Batch]:
    """Cut a batch into micro-batches of at most `micro_batch_size` sequences, in order; an empty batch stays one."""
    if micro_batch_size < 1:
        raise UserError(f"micro_batch_size: {micro_batch_size} is not a number of sequences from 1 on")
    if len(batch) <= micro_batch_size:
        return [batch]
    return [
        batch.rows(first, min(first + micro_batch_size, len(batch))) for first in range(0, len(batch), micro_batch_size)
    ]


def describe_example(batch: Batch, n: int, tokenizer: TokenNames, objective: Objective = "mlm+nsp") -> str:
    """Example n in words: its label by name, then its tokens, with what was there in braces after each masked one.

    `example 17, is next: [CLS] the [MASK]{cat} sat red{on} the{the} [SEP] it slept [SEP]`
    """
    low, high = batch.sequence_starts[n : n + 2].tolist()
    tokens = [tokenizer.id_to_token(i) for i in batch.token_ids[low:high].tolist()]
    first, end = np.searchsorted(batch.masked_positions, [low, high]).tolist()
    for position, label in zip(
        batch.masked_positions[first:end].tolist(), batch.masked_labels[first:end].tolist(), strict=True
    ):
        tokens[position - low] += f"{{{tokenizer.id_to_token(label)}}}"
    names = LABEL_NAMES.get(objective)
    named = "" if names is None or batch.next_sentence_labels is None else f", {names[batch.next_sentence_labels[n]]}"
    return f"example {batch.example_ids[n]}{named}: {' '.join(tokens)}"
