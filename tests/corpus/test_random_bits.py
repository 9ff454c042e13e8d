"""The numbers that everything random in a corpus is looked up from: uniform, independent, and never to change."""

import numpy as np
import pytest

from bertsmith.corpus.random_bits import (
    binomial_half,
    derive_key,
    hash_bits,
    permutation,
    scale_to_integers,
    to_uniform,
    uniforms,
)


def chi_square(counts: np.ndarray) -> float:
    """How many standard deviations the chi-square statistic lies above its mean, for equal expected counts."""
    expected = counts.sum() / counts.size
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.corrcoef(to_uniform(a), to_uniform(b))[0, 1])


def test_the_numbers_never_change() -> None:
    # a run resumed by a later version must see the same order, pairs and masks
    assert derive_key(0, "training") == 0x32EE9CB11E11D0FA
    assert hash_bits(derive_key(1, "x"), np.arange(2)).tolist() == [281446812415842602, 13828799326891424138]


def test_splitmix64_reference_values() -> None:
    # the published sequence of SplitMix64 started at 1234567 (Vigna's splitmix64.c)
    assert hash_bits(1234567, np.arange(3)).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("shift", [0, 24, 56])
def test_every_byte_is_uniform(shift: int) -> None:
    by_counter = hash_bits(derive_key("a"), np.arange(200_000))
    by_key = hash_bits(hash_bits(derive_key("a"), np.arange(200_000)), 3)
    for bits in (by_counter, by_key):
        counts = np.bincount(((bits >> np.uint64(shift)) & np.uint64(255)).astype(int), minlength=256)
        assert abs(chi_square(counts)) < 5


def test_neighbouring_keys_and_counters_are_independent() -> None:
    count = 200_000
    keys = hash_bits(derive_key(5), np.arange(count))
    bound = 5 / np.sqrt(count)
    assert abs(correlation(hash_bits(keys[:-1], 0), hash_bits(keys[1:], 0))) < bound
    assert abs(correlation(hash_bits(keys, 0), hash_bits(keys, 1))) < bound
    assert abs(correlation(hash_bits(np.arange(count), 0), hash_bits(np.arange(1, count + 1), 0))) < bound
    assert (
        abs(correlation(hash_bits(derive_key(5), np.arange(count)), hash_bits(derive_key(6), np.arange(count)))) < bound
    )
    # pairs of draws fill the square evenly
    x, y = (to_uniform(hash_bits(keys, counter)) for counter in (0, 1))
    cells = np.bincount((x * 16).astype(int) * 16 + (y * 16).astype(int), minlength=256)
    assert abs(chi_square(cells)) < 5


def test_one_changed_bit_changes_half_of_all_bits() -> None:
    counters = np.arange(20_000)
    plain = hash_bits(99, counters)
    for bit in (0, 1, 7, 31, 63):
        flipped = hash_bits(99 ^ (1 << bit), counters)
        assert np.bitwise_count(plain ^ flipped).mean() == pytest.approx(32, abs=0.2)


def test_uniforms_lie_in_the_unit_interval() -> None:
    draws = uniforms(derive_key("u"), np.arange(100_000))
    assert draws.min() >= 0
    assert draws.max() < 1
    assert draws.mean() == pytest.approx(0.5, abs=0.005)
    assert draws.var() == pytest.approx(1 / 12, abs=0.002)
    assert to_uniform(np.array([2**64 - 1], dtype=np.uint64))[0] < 1


def test_integers_are_below_their_limit_and_even() -> None:
    draws = uniforms(derive_key("i"), np.arange(70_000))
    counts = np.bincount(scale_to_integers(draws, 7), minlength=7)
    assert len(counts) == 7
    assert abs(chi_square(counts)) < 5
    limits = np.array([1, 2, 1 << 60])
    assert (scale_to_integers(np.full(3, 1 - 2.0**-53), limits) < limits).all()


def test_permutations_are_permutations_and_all_as_likely() -> None:
    assert sorted(permutation(3, 1000).tolist()) == list(range(1000))
    assert permutation(3, 0).tolist() == []
    orders: dict[tuple[int, ...], int] = {}
    for key in range(4800):
        order = tuple(permutation(derive_key(key), 4).tolist())
        orders[order] = orders.get(order, 0) + 1
    assert len(orders) == 24
    assert abs(chi_square(np.array(list(orders.values())))) < 5


@pytest.mark.parametrize("trials", [1, 3, 64, 65, 1000])
def test_coins_are_fair(trials: int) -> None:
    heads = binomial_half(hash_bits(derive_key("coins"), np.arange(20_000)), np.full(20_000, trials))
    assert heads.min() >= 0
    assert heads.max() <= trials
    assert heads.mean() == pytest.approx(trials / 2, abs=5 * np.sqrt(trials / 4 / 20_000))
    assert heads.var() == pytest.approx(trials / 4, rel=0.1)


def test_no_coins_no_heads() -> None:
    assert binomial_half(hash_bits(1, np.arange(3)), np.array([0, 5, 0]))[[0, 2]].tolist() == [0, 0]


def test_keys_tell_parts_apart() -> None:
    keys = [derive_key(1, 2), derive_key(12), derive_key("1", 2), derive_key(1, "2"), derive_key(2, 1), derive_key(-1)]
    assert len(set(keys)) == len(keys)
