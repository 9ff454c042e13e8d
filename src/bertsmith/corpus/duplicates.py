"""Which documents were seen before: a set of 128-bit hashes in two flat arrays, 21 to 43 bytes a document.

A Python set of the same keys takes about 120 bytes each. At a hundred million documents the chance that two different
ones share a key is below 1e-22: a document is dropped when an equal one came before, and not otherwise.
"""

import hashlib
from array import array

KEY_BYTES = 16
_AT_ONCE = 1 << 20  # characters: no second copy of an enormous document


def hash_document(text: str) -> bytes:
    """16 bytes that depend on the text alone (blanks around it left out), not on locale, process or machine."""
    digest = hashlib.blake2b(digest_size=KEY_BYTES)
    text = text.strip()
    for start in range(0, len(text), _AT_ONCE):
        digest.update(text[start : start + _AT_ONCE].encode("utf-8"))
    return digest.digest()


class SeenDocuments:
    """`add(key)` is True the first time. Open addressing with linear probing, at most three quarters full."""

    def __init__(self, slots: int = 1 << 12) -> None:
        assert slots & (slots - 1) == 0, "a power of two"
        self._slots = slots
        self._high = array("Q", [0]) * slots
        self._low = array("Q", [0]) * slots  # 0 marks a free slot
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, key: bytes) -> bool:
        """Remember a 16-byte key; False if it was there already."""
        if 4 * self._count >= 3 * self._slots:
            self._grow()
        high, low = int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little") or 1
        if self._insert(high, low):
            self._count += 1
            return True
        return False

    def _insert(self, high: int, low: int) -> bool:
        mask, slot = self._slots - 1, high & (self._slots - 1)
        while found := self._low[slot]:
            if found == low and self._high[slot] == high:
                return False
            slot = (slot + 1) & mask
        self._high[slot], self._low[slot] = high, low
        return True

    def _grow(self) -> None:
        old_high, old_low = self._high, self._low
        self._slots *= 2
        self._high, self._low = array("Q", [0]) * self._slots, array("Q", [0]) * self._slots
        for high, low in zip(old_high, old_low, strict=True):
            if low:
                self._insert(high, low)
