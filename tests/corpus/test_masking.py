"""Masking: the paper's shares, whole words whole, special tokens untouched, and each sequence on its own."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_corpus import CLS, FIRST_ID, MASK, PAD, SEP, UNK, make_tokenizer

from bertsmith.corpus.masking import UNITS, MaskedTokens, MaskingOptions, TokenizerInfo, Unit, mask_tokens
from bertsmith.corpus.random_bits import derive_key, hash_bits
from bertsmith.errors import UserError

VOCABULARY = 1000
TOKENIZER = make_tokenizer(VOCABULARY, continuation_share=0.3)


@dataclass
class Packed:
    token_ids: np.ndarray
    position_ids: np.ndarray
    lengths: np.ndarray
    keys: np.ndarray

    def mask(self, unit: Unit = "token", tokenizer: TokenizerInfo = TOKENIZER, **options: float) -> MaskedTokens:
        masking = MaskingOptions(unit=unit, **options)  # type: ignore[arg-type]
        return mask_tokens(self.token_ids, self.position_ids, self.lengths, self.keys, tokenizer, masking)


def pack(texts: list[np.ndarray], keys: np.ndarray | None = None) -> Packed:
    """[CLS] text [SEP] for each text, packed."""
    rows: list[np.ndarray] = [np.concatenate([[CLS], text, [SEP]]).astype(np.int64) for text in texts]
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    position_ids = np.concatenate([np.arange(0), *(np.arange(n) for n in lengths)])
    if keys is None:
        keys = hash_bits(derive_key("test"), np.arange(len(texts)))
    return Packed(np.concatenate(rows or [np.zeros(0)]).astype(np.int64), position_ids, lengths, keys)


def random_texts(count: int, length: int, seed: int = 0) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    return [generator.integers(FIRST_ID, VOCABULARY, length) for _ in range(count)]


def words_of(text: np.ndarray) -> list[range]:
    """Ranges of positions in [CLS] text [SEP] that are one word."""
    words: list[range] = []
    for position, token in enumerate(text, start=1):
        if TOKENIZER.continuation[token] and words:
            words[-1] = range(words[-1].start, position + 1)
        else:
            words.append(range(position, position + 1))
    return words


def masked_by_sequence(packed: Packed, masked: MaskedTokens) -> list[set[int]]:
    """For each sequence, the masked positions in it."""
    starts = np.cumsum([0, *packed.lengths])
    return [
        set((masked.positions[(masked.positions >= low) & (masked.positions < high)] - low).tolist())
        for low, high in itertools.pairwise(starts)
    ]


@settings(max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 60), max_size=12),
    unit=st.sampled_from(UNITS),
    rate=st.floats(0.01, 0.99),
    seed=st.integers(0, 10_000),
)
def test_what_always_holds(lengths: list[int], unit: Unit, rate: float, seed: int) -> None:
    generator = np.random.default_rng(seed)
    texts = [generator.integers(0, VOCABULARY, n) for n in lengths]  # special tokens may occur in the text
    packed = pack(texts, hash_bits(seed, np.arange(len(texts))))
    masked = packed.mask(unit, rate=rate)
    assert (np.diff(masked.positions) > 0).all()
    assert np.array_equal(masked.labels, packed.token_ids[masked.positions])
    assert TOKENIZER.maskable[masked.labels].all(), "special tokens are never masked"
    others = np.ones(len(packed.token_ids), dtype=bool)
    others[masked.positions] = False
    assert np.array_equal(masked.token_ids[others], packed.token_ids[others]), "only masked positions change"
    seen = masked.token_ids[masked.positions]
    changed = seen[(seen != masked.labels) & (seen != MASK)]
    assert np.isin(changed, TOKENIZER.replacements).all()
    for text, positions in zip(texts, masked_by_sequence(packed, masked), strict=True):
        ordinary = int((text > MASK).sum())
        assert bool(positions) == bool(ordinary), "at least one a sequence that has an ordinary token"
        if unit == "token" and ordinary:
            assert len(positions) == max(1, round(ordinary * rate))


def test_a_sequence_is_masked_alike_in_any_batch() -> None:
    texts = random_texts(7, 40) + random_texts(3, 90, seed=1)
    keys = hash_bits(derive_key(1), np.arange(10))
    for unit in UNITS:
        packed = pack(texts, keys)
        together = masked_by_sequence(packed, packed.mask(unit))
        starts = np.cumsum([0, *packed.lengths])
        ids = packed.mask(unit).token_ids
        for n in (0, 4, 9):
            alone = pack([texts[n]], keys[n : n + 1])
            assert masked_by_sequence(alone, alone.mask(unit)) == [together[n]]
            assert np.array_equal(alone.mask(unit).token_ids, ids[starts[n] : starts[n + 1]])


def test_other_keys_give_other_masks() -> None:
    texts = random_texts(1, 100) * 2
    packed = pack(texts)
    first, second = masked_by_sequence(packed, packed.mask())
    assert first != second


@pytest.mark.parametrize("unit", UNITS)
def test_shares_are_the_papers(unit: Unit) -> None:
    packed = pack(random_texts(2000, 120))
    masked = packed.mask(unit)
    tokens = 2000 * 120
    assert len(masked.positions) / tokens == pytest.approx(0.15, abs=0.002)
    seen = masked.token_ids[masked.positions]
    # a random token is the right one once in 990 times, which hardly shows here
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.012)
    assert (seen == masked.labels).mean() == pytest.approx(0.1, abs=0.01)
    assert ((seen != MASK) & (seen != masked.labels)).mean() == pytest.approx(0.1, abs=0.01)


def test_shares_are_options() -> None:
    packed = pack(random_texts(500, 100))
    masked = packed.mask(rate=0.4, mask_share=1.0, random_share=0.0, keep_share=0.0)
    assert len(masked.positions) == 500 * 40
    assert (masked.token_ids[masked.positions] == MASK).all()
    kept = packed.mask(mask_share=0.0, random_share=0.0, keep_share=1.0)
    assert np.array_equal(kept.token_ids, packed.token_ids)
    assert len(kept.positions) == 500 * 15
    replaced = packed.mask(mask_share=0.0, random_share=1.0, keep_share=0.0)
    seen = replaced.token_ids[replaced.positions]
    assert seen.min() >= FIRST_ID, "neither special nor unused tokens"
    counts = np.bincount(seen, minlength=VOCABULARY)[FIRST_ID:]
    assert counts.std() == pytest.approx(np.sqrt(counts.mean()), rel=0.15), "all ordinary tokens are as likely"


@pytest.mark.parametrize("unit", UNITS)
def test_every_position_is_as_likely(unit: Unit) -> None:
    packed = pack(random_texts(20_000, 20))
    masked = packed.mask(unit)
    counts = np.bincount(packed.position_ids[masked.positions], minlength=22)[1:21]
    if unit == "span":  # at the edges fewer spans reach a word, as in SpanBERT
        counts = counts[6:]
        assert counts.max() / counts.min() < 1.2
    else:
        expected = counts.sum() / 20
        tolerance = 5 * np.sqrt(expected)
        assert np.abs(counts - expected).max() < (tolerance if unit == "token" else 0.1 * expected)


@pytest.mark.parametrize("unit", ["word", "span"])
def test_words_are_masked_whole(unit: Unit) -> None:
    texts = random_texts(300, 60)
    packed = pack(texts)
    for text, positions in zip(texts, masked_by_sequence(packed, packed.mask(unit)), strict=True):
        for word in words_of(text):
            assert positions.isdisjoint(word) or positions.issuperset(word)


def test_long_words_are_as_likely_as_short_ones() -> None:
    texts = random_texts(4000, 100)
    packed = pack(texts)
    chosen: dict[int, list[bool]] = {}
    for text, positions in zip(texts, masked_by_sequence(packed, packed.mask("word")), strict=True):
        for word in words_of(text):
            chosen.setdefault(len(word), []).append(word.start in positions)
    for length in (1, 2, 3, 4):
        assert np.mean(chosen[length]) == pytest.approx(0.15, rel=0.08), length


def test_pieces_of_one_word_are_all_masked() -> None:
    # "un ##aff ##able" as the only word: it is the one that must be masked
    pieces = np.flatnonzero(TOKENIZER.continuation)[:2]
    word = np.concatenate([[np.flatnonzero(~TOKENIZER.continuation & TOKENIZER.maskable)[9]], pieces])
    packed = pack([word])
    assert packed.mask("word").positions.tolist() == [1, 2, 3]
    assert len(packed.mask("token").positions) == 1


def test_spans_are_runs_of_words() -> None:
    plain = make_tokenizer(VOCABULARY)
    packed = pack(random_texts(3000, 200))
    runs: list[float] = []
    for unit in ("word", "span"):
        masked = packed.mask(unit, tokenizer=plain)
        breaks = np.flatnonzero(np.diff(masked.positions) > 1)
        runs.append(len(masked.positions) / (len(breaks) + 1))
    assert runs[0] == pytest.approx(1 / 0.85, rel=0.03)
    assert 3.0 < runs[1] < 4.5  # mean span 3.8; some are cut by the budget or the end, some meet


def test_a_span_shares_its_fate() -> None:
    plain = make_tokenizer(VOCABULARY)
    packed = pack(random_texts(2000, 200))
    masked = packed.mask("span", tokenizer=plain)
    is_mask = masked.token_ids[masked.positions] == MASK
    neighbours = np.diff(masked.positions) == 1
    alike = (is_mask[1:] == is_mask[:-1])[neighbours].mean()
    assert alike > 0.92  # 0.68 if each were decided alone
    by_token = packed.mask("token", tokenizer=plain)
    is_mask = by_token.token_ids[by_token.positions] == MASK
    neighbours = np.diff(by_token.positions) == 1
    assert (is_mask[1:] == is_mask[:-1])[neighbours].mean() == pytest.approx(0.68, abs=0.04)


def test_spans_end_at_special_tokens() -> None:
    # two words with a [SEP] between, both masked: were they of one span, they would share its fate
    packed = pack([np.array([500, SEP, 600])] * 4000)
    masked = packed.mask("span", tokenizer=make_tokenizer(VOCABULARY), rate=0.99)
    is_mask = (masked.token_ids[masked.positions] == MASK).reshape(4000, 2)
    assert (is_mask[:, 0] == is_mask[:, 1]).mean() == pytest.approx(0.8**2 + 0.2**2, abs=0.03)


@pytest.mark.parametrize("unit", UNITS)
def test_nothing_to_mask(unit: Unit) -> None:
    packed = pack([np.array([UNK, UNK]), np.array([PAD])])
    masked = packed.mask(unit)
    assert masked.positions.tolist() == masked.labels.tolist() == []
    assert np.array_equal(masked.token_ids, packed.token_ids)
    empty = pack([]).mask(unit)
    assert len(empty.token_ids) == len(empty.positions) == 0


def test_wrong_options_are_all_named_at_once() -> None:
    with pytest.raises(UserError) as caught:
        MaskingOptions(rate=1.5, mask_share=-0.2, unit="letter")  # type: ignore[arg-type]
    message = str(caught.value)
    for part in ("rate: 1.5", "mask_share: -0.2", "add up to 0", "unit: 'letter'", "token, word, span"):
        assert part in message
    for rate in (0.0, 1.0, float("nan")):
        with pytest.raises(UserError, match="rate"):
            MaskingOptions(rate=rate)
    with pytest.raises(UserError, match=r"add up to 1\.1"):
        MaskingOptions(mask_share=0.9)
    assert MaskingOptions().problems() == []


def test_info_is_read_off_a_tokenizer() -> None:
    class Made:
        vocab_size, cls_id, sep_id, mask_id, special_ids, fingerprint = 9, 2, 3, 4, (0, 1, 2, 3, 4), "f"
        tokens = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused1]", "un", "##able", "[unused]")
        continuation = np.array([False] * 7 + [True, False])

    info = TokenizerInfo.of(Made())
    assert np.flatnonzero(info.maskable).tolist() == [5, 6, 7, 8]
    assert info.replacements.tolist() == [6, 7, 8]
    assert info.continuation.tolist() == Made.continuation.tolist()
    assert (info.cls_id, info.sep_id, info.mask_id, info.vocab_size, info.fingerprint) == (2, 3, 4, 9, "f")
