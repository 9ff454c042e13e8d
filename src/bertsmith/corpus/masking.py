"""Masking: which tokens of a packed batch the model must guess, and what it sees in their place (paper, section 3.1).

In go packed token ids and a key for each sequence; out come the ids after masking, the masked positions and the ids
that were there. All sequences are masked at once, by sorting hashed numbers; a sequence's masks depend on its key, not
on the batch it is in. Left on purpose: the reference counts [CLS] and [SEP] in its 15 % and can mask [UNK], which
teaches nothing; here special tokens are neither counted, nor masked, nor put in as random tokens.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from bertsmith.corpus.random_bits import UInt64s, hash_bits, scale_to_integers, uniforms
from bertsmith.corpus.windows import Bools, Ints
from bertsmith.errors import UserError

Unit = Literal["token", "word", "span"]
UNITS: tuple[Unit, ...] = ("token", "word", "span")

# Span lengths as in SpanBERT (Joshi et al., 2020, section 3.1): geometric with p = 0.2, at most 10 words, mean 3.8.
SPAN_PROBABILITY, LONGEST_SPAN = 0.2, 10

# Counters of a sequence's numbers: the position in the sequence (below 2^32) plus one of these.
_SELECT, _FATE, _REPLACEMENT, _LAST_WORD, _SPAN_LENGTH = (number << 32 for number in range(5))

_34, _46, _16 = np.uint64(34), np.uint64(46), np.uint64(16)


class TokenizerLike(Protocol):
    """What is read of `text.tokenizer.BertTokenizer`."""

    cls_id: int
    sep_id: int
    mask_id: int

    @property
    def vocab_size(self) -> int:
        """Number of ids."""

    @property
    def fingerprint(self) -> str:
        """Over the vocabulary and all that changes ids."""

    @property
    def special_ids(self) -> tuple[int, ...]:
        """Ids of [PAD] [UNK] [CLS] [SEP] [MASK]."""

    @property
    def tokens(self) -> Sequence[str]:
        """In id order."""

    @property
    def continuation(self) -> npt.NDArray[np.bool_]:
        """(vocab_size,) True where a token goes on with a word (##)."""


@dataclass(frozen=True, eq=False)
class TokenizerInfo:
    """What building and masking need to know of a tokenizer: plain arrays, cheap to hand to a worker process."""

    vocab_size: int
    cls_id: int
    sep_id: int
    mask_id: int
    maskable: Bools
    """(vocab_size,) False for special tokens."""
    continuation: Bools
    """(vocab_size,) True where the token goes on with a word."""
    replacements: Ints
    """Ids that may be put in as random tokens: neither special nor [unused…]."""
    fingerprint: str

    @classmethod
    def of(cls, tokenizer: TokenizerLike) -> "TokenizerInfo":
        """Read it off a `BertTokenizer`."""
        maskable = np.ones(tokenizer.vocab_size, dtype=np.bool_)
        maskable[list(tokenizer.special_ids)] = False
        unused = [i for i, token in enumerate(tokenizer.tokens) if re.fullmatch(r"\[unused\d+\]", token)]
        replaceable = maskable.copy()
        replaceable[unused] = False
        return cls(
            vocab_size=tokenizer.vocab_size,
            cls_id=tokenizer.cls_id,
            sep_id=tokenizer.sep_id,
            mask_id=tokenizer.mask_id,
            maskable=maskable,
            continuation=np.asarray(tokenizer.continuation, dtype=np.bool_),
            replacements=np.flatnonzero(replaceable).astype(np.int64),
            fingerprint=tokenizer.fingerprint,
        )


@dataclass(frozen=True)
class MaskingOptions:
    """How many tokens are masked and how. Raises UserError naming all values that are out of range."""

    rate: float = field(default=0.15, metadata={"help": "share of a sequence's tokens to guess"})
    """Share of a sequence's tokens (special tokens not counted) to guess, in (0, 1); at least one token is."""
    mask_share: float = field(default=0.8, metadata={"help": "share of those that become [MASK]"})
    """Share of the chosen tokens that become [MASK]."""
    random_share: float = field(default=0.1, metadata={"help": "share of those that become a random token"})
    """Share of the chosen tokens that become a random token."""
    keep_share: float = field(default=0.1, metadata={"help": "share of those that stay as they are"})
    """Share of the chosen tokens that stay as they are (and are to be guessed all the same)."""
    unit: Unit = field(default="token", metadata={"help": "what is masked together"})
    """`token`: each alone; `word`: all pieces of a word or none; `span`: runs of 1 to 10 whole words (SpanBERT)."""
    static: bool = field(default=False, metadata={"help": "the same pairs and masks in every epoch"})
    """The same pairs and masks in every epoch, as with data masked once and stored; only the order changes."""

    def __post_init__(self) -> None:
        if problems := self.problems():
            raise UserError("; ".join(problems))

    def problems(self) -> list[str]:
        """What is wrong, `key: what` each; empty when all is well."""
        problems = []
        if not 0 < self.rate < 1:
            problems.append(f"rate: {self.rate} is not a share of the tokens between 0 and 1, such as 0.15")
        shares = (self.mask_share, self.random_share, self.keep_share)
        for name, share in zip(("mask_share", "random_share", "keep_share"), shares, strict=True):
            if not 0 <= share <= 1:
                problems.append(f"{name}: {share} is not a share from 0 to 1")
        if not math.isclose(sum(shares), 1, abs_tol=1e-6):
            problems.append(f"mask_share, random_share, keep_share: they add up to {sum(shares):g}, not to 1")
        if self.unit not in UNITS:
            problems.append(f"unit: {self.unit!r} is not known; use one of {', '.join(UNITS)}")
        return problems


@dataclass(frozen=True)
class MaskedTokens:
    """The outcome of masking a packed batch."""

    token_ids: Ints
    """(T,) after masking"""
    positions: Ints
    """(M,) into T, rising"""
    labels: Ints
    """(M,) the ids before masking"""


def mask_tokens(
    token_ids: Ints,
    position_ids: Ints,
    sequence_lengths: Ints,
    keys: UInt64s,
    tokenizer: TokenizerInfo,
    options: MaskingOptions,
) -> MaskedTokens:
    """Mask packed sequences: `token_ids` and `position_ids` (T,), `sequence_lengths` and `keys` (N,).

    Each sequence has max(1, round(rate · n)) of its n ordinary tokens masked, exactly so for unit token and in the mean
    for words and spans, which stay whole (the span that fills the budget is cut between words, as in SpanBERT). A
    sequence without an ordinary token gets no mask.
    """
    candidates = np.flatnonzero(tokenizer.maskable[token_ids])
    sequence = np.repeat(np.arange(len(keys)), sequence_lengths)[candidates]
    count = np.bincount(sequence, minlength=len(keys))
    budget = np.where(count > 0, np.maximum(np.rint(count * options.rate), 1), 0).astype(np.int64)
    if options.unit == "token":
        positions, fate = _choose_tokens(candidates, sequence, count, budget, keys, position_ids)
    else:
        words = _find_words(candidates, token_ids, tokenizer)
        positions, fate = _choose_words(candidates, sequence, words, budget, keys, position_ids, options.unit)
    labels = token_ids[positions]
    masked = token_ids.copy()
    masked[positions[fate < options.mask_share]] = tokenizer.mask_id
    replaced = positions[(fate >= options.mask_share) & (fate < options.mask_share + options.random_share)]
    if len(replaced):
        of = np.searchsorted(np.cumsum(sequence_lengths), replaced, side="right")
        draws = uniforms(keys[of], position_ids[replaced] + _REPLACEMENT)
        masked[replaced] = tokenizer.replacements[scale_to_integers(draws, len(tokenizer.replacements))]
    return MaskedTokens(masked, positions, labels)


def _choose_tokens(
    candidates: Ints, sequence: Ints, count: Ints, budget: Ints, keys: UInt64s, position_ids: Ints
) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Exactly `budget` (N,) of each sequence's `count` (N,) candidates, all equally likely; draws for their fate."""
    position = position_ids[candidates]
    order = _order(sequence, hash_bits(keys[sequence], position + _SELECT) >> _34, position)
    rank = np.arange(len(candidates)) - np.repeat(np.cumsum(count) - count, count)
    chosen = np.sort(order[rank < np.repeat(budget, count)])
    positions = candidates[chosen]
    return positions, uniforms(keys[sequence[chosen]], position_ids[positions] + _FATE)


def _order(sequence: Ints, draw: UInt64s, position: Ints) -> Ints:
    """Sort by sequence (below 2^18), then draw (30 bits), then position (below 2^16): one sort for the whole batch."""
    packed = (sequence.astype(np.uint64) << _46) | (draw << _16) | position.astype(np.uint64)
    return np.argsort(packed)


def _find_words(candidates: Ints, token_ids: Ints, tokenizer: TokenizerInfo) -> Ints:
    """Numbers of the candidates that begin a word: not a continuation of the candidate just before.

    A continuation that lost its beginning (to truncation, or to an unknown piece) is a word of its own.
    """
    begins = ~tokenizer.continuation[token_ids[candidates]]
    if len(candidates):
        begins[0] = True
        begins[1:] |= np.diff(candidates) > 1
    return np.flatnonzero(begins)


def _choose_words(
    candidates: Ints,
    sequence: Ints,
    words: Ints,
    budget: Ints,
    keys: UInt64s,
    position_ids: Ints,
    unit: Unit,
) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Whole words of each sequence up to its budget of tokens, and a draw for the fate of each token.

    Words are taken in random order. The one that crosses the budget is taken with the chance that makes the expected
    number of tokens equal it; the reference skips it and so prefers short words.
    """
    length = np.diff(np.append(words, len(candidates)))
    position = position_ids[candidates[words]]
    owner = sequence[words]
    draw = hash_bits(keys[owner], position + _SELECT) >> _34
    if unit == "span":
        draw = _spread_spans(draw, candidates, words, length, uniforms(keys[owner], position + _SPAN_LENGTH))
    order = _order(owner, draw, position)  # words of one span have the same draw
    length_in_order, owner_in_order = length[order], owner[order]
    total = np.cumsum(length_in_order)
    tokens_in_sequence = np.bincount(owner, weights=length, minlength=len(keys)).astype(np.int64)
    before = total - length_in_order - (np.cumsum(tokens_in_sequence) - tokens_in_sequence)[owner_in_order]
    left = budget[owner_in_order] - before
    chance = uniforms(keys, _LAST_WORD)[owner_in_order]
    taken = (left > 0) & ((before == 0) | (chance * length_in_order < left))
    chosen = np.sort(order[taken])
    counts = length[chosen]
    token = np.repeat(words[chosen] - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
    positions = candidates[token]
    if unit == "span":  # SpanBERT decides once for a span
        which = np.repeat(draw[chosen].astype(np.int64), counts)
        return positions, uniforms(keys[sequence[token]], which + _FATE)
    return positions, uniforms(keys[sequence[token]], position_ids[positions] + _FATE)


def _spread_spans(
    draw: UInt64s, candidates: Ints, words: Ints, length: Ints, uniform: npt.NDArray[np.float64]
) -> UInt64s:
    """Let a span of geometric length begin at each word; give each word the lowest draw among the spans that hold it.

    Taking words by that draw takes span after span in random order, until the budget is full. A span ends at a special
    token.
    """
    shares = SPAN_PROBABILITY * (1 - SPAN_PROBABILITY) ** np.arange(LONGEST_SPAN)
    spans = 1 + np.searchsorted(np.cumsum(shares / shares.sum())[:-1], uniform, side="right")
    follows = np.ones(len(words), dtype=np.bool_)  # the word stands right after the one before it
    follows[1:] = candidates[words[1:]] == candidates[words[:-1]] + length[:-1]
    run = np.cumsum(~follows)
    lowest = draw.copy()
    for offset in range(1, min(LONGEST_SPAN, len(words))):
        held = (spans[:-offset] > offset) & (run[:-offset] == run[offset:])
        lowest[offset:] = np.where(held, np.minimum(lowest[offset:], draw[:-offset]), lowest[offset:])
    return lowest
