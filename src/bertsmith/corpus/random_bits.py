"""Random numbers that are looked up, not drawn in turn: bits = hash(key, counter), vectorised in numpy.

In go a 64-bit key (who asks: seed, purpose, epoch, example) and counters (the how-many-eth number); out come bits,
uniform floats or a permutation. There is no stream to advance, so a worker, a rank or a resumed run that asks for the
numbers of example 17 of epoch 3 gets what every other one gets. The hash is SplitMix64 (Steele, Lea and Flood, 2014)
with Stafford's finalizer "variant 13"; each key is the starting state of a sequence of its own.
"""

import hashlib

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _11 = (np.uint64(shift) for shift in (30, 27, 31, 11))


def derive_key(*parts: int | str) -> int:
    """A 64-bit key from the parts that name a purpose, e.g. `derive_key(seed, "masks", epoch)`.

    Any change of any part gives an unrelated key (BLAKE2b); integers may be of any size and sign.
    """
    text = "\x00".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def hash_bits(keys: int | npt.NDArray[np.integer], counters: int | npt.NDArray[np.integer]) -> UInt64s:
    """64 random bits for each (key, counter); both broadcast. A result may serve as a key in its turn."""
    state = np.add(np.asarray(counters).astype(np.uint64, copy=False), np.uint64(1), dtype=np.uint64)
    state = np.atleast_1d(np.multiply(state, _GOLDEN))
    state = state + np.asarray(keys, dtype=np.uint64)
    state ^= state >> _30
    state *= _FIRST
    state ^= state >> _27
    state *= _SECOND
    state ^= state >> _31
    return state


def to_uniform(bits: UInt64s) -> npt.NDArray[np.float64]:
    """Uniform floats in [0, 1), multiples of 2^-53, from the upper 53 bits of each number."""
    return (bits >> _11).astype(np.float64) * 2.0**-53


def uniforms(keys: int | npt.NDArray[np.integer], counters: int | npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
    """A uniform float in [0, 1) for each (key, counter); both broadcast."""
    return to_uniform(hash_bits(keys, counters))


def scale_to_integers(uniform: npt.NDArray[np.float64], below: int | npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """Turn uniform floats into integers in [0, below); the bias of each is under below · 2^-53.

    `below` ≥ 1, a number or one for each float.
    """
    limits = np.asarray(below, dtype=np.int64)
    # rounding can lift u · below to `below` itself only for limits past 2^52; the minimum rules it out for all
    return np.minimum((uniform * limits).astype(np.int64), limits - 1)


def permutation(key: int, count: int) -> npt.NDArray[np.int64]:
    """A uniformly drawn order of 0 … count - 1 that depends on `key` alone."""
    return np.argsort(hash_bits(key, np.arange(count)), kind="stable").astype(np.int64, copy=False)


def binomial_half(keys: UInt64s, trials: npt.NDArray[np.int64], first_counter: int = 0) -> npt.NDArray[np.int64]:
    """How many of `trials` fair coins fall heads, for each key: exact, by counting random bits.

    Uses the counters `first_counter`, `first_counter + 1`, … of each key, one for 64 coins.
    """
    heads = np.zeros(len(trials), dtype=np.int64)
    left = trials.astype(np.int64)
    active = np.flatnonzero(left > 0)
    counter = first_counter
    while len(active):
        bits = hash_bits(keys[active], counter)
        unused = np.maximum(64 - left[active], 0).astype(np.uint64)
        heads[active] += np.bitwise_count(bits >> unused)
        left[active] -= 64
        active = active[left[active] > 0]
        counter += 1
    return heads
