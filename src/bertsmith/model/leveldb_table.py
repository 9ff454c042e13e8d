"""LevelDB's table format, which TensorFlow's `.index` files are in: sorted keys with values, in checksummed blocks.

Bytes in, a dictionary out, and back. Whatever a file says about sizes is held against the file before it is believed:
damaged or hostile bytes raise ValueError with the reason, before much time or memory is spent on them.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_MAGIC = 0xDB4775248B80FB57
_FOOTER, _TRAILER = 48, 5
_BLOCK_SIZE, _RESTART_INTERVAL = 262_144, 16  # what TensorFlow writes with
_UNCOMPRESSED, _SNAPPY = 0, 1
_SNAPPY_LIMIT = 22  # a copy of 64 bytes takes at least three
# Shared prefixes and compression let a small table claim to be huge. Limits far above any checkpoint's, in bytes: of a
# key, and of all entries, where one counts as its key and what it takes in memory besides
_KEY_LIMIT, _TABLE_LIMIT, _ENTRY_SIZE = 4096, 2**26, 64


def varint(value: int) -> bytes:
    """An unsigned number below 2^64, seven bits a byte, low ones first."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def read_varint(data: bytes, position: int) -> tuple[int, int]:
    """The number that starts at `position`, and where it ends. Raises ValueError when it is cut off or too long."""
    value = 0
    for shift in range(0, 64, 7):
        if position >= len(data):
            raise ValueError("a number is cut off")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), position
    raise ValueError("a number is longer than 64 bits")


def read_table(data: bytes) -> dict[bytes, bytes]:
    """Every key with its value, in the table's (ascending) order. Raises ValueError, saying why, on damaged bytes."""
    if len(data) < _FOOTER or int.from_bytes(data[-8:], "little") != _MAGIC:
        raise ValueError("it does not end as a table does")
    footer = data[-_FOOTER:-8]
    _, position = _handle(footer, 0)  # of the meta index, which TensorFlow leaves empty
    table: dict[bytes, bytes] = {}
    newest, taken, end = b"", 0, 0
    for _, handle in _block_entries(_read_block(data, *_handle(footer, position)[0])):
        (offset, size), _ = _handle(handle, 0)
        if offset < end:  # or a small file could have one block read a million times
            raise ValueError("its blocks overlap")
        end = offset + size
        for key, value in _block_entries(_read_block(data, offset, size)):
            taken += len(key) + _ENTRY_SIZE
            if table and key <= newest:
                raise ValueError("its keys are not in order")
            if taken > _TABLE_LIMIT:
                raise ValueError("it has more entries than any checkpoint")
            table[key] = value
            newest = key
    return table


def write_table(entries: Iterable[tuple[bytes, bytes]]) -> bytes:
    """The table of `entries`, which come with ascending keys; as long as one block holds it, TensorFlow's own bytes."""
    out = bytearray()
    index: list[tuple[bytes, bytes]] = []
    block: list[tuple[bytes, bytes]] = []
    size = 0
    for entry in entries:
        block.append(entry)
        size += sum(map(len, entry)) + 3  # at most: what the shared prefix saves is not counted
        if size >= _BLOCK_SIZE:
            index.append((block[-1][0], _append_block(out, block, _RESTART_INTERVAL)))
            block, size = [], 0
    if block:
        index.append((_short_successor(block[-1][0]), _append_block(out, block, _RESTART_INTERVAL)))
    meta_index = _append_block(out, [], _RESTART_INTERVAL)
    footer = meta_index + _append_block(out, index, 1)
    return bytes(out + footer.ljust(_FOOTER - 8, b"\0") + _MAGIC.to_bytes(8, "little"))


def _handle(data: bytes, position: int) -> tuple[tuple[int, int], int]:
    """(offset, size) of a block as written at `position`, and where that ends."""
    offset, position = read_varint(data, position)
    size, position = read_varint(data, position)
    return (offset, size), position


def _read_block(data: bytes, offset: int, size: int) -> bytes:
    """A block's content, checked and decompressed."""
    end = offset + size + 1
    if end + 4 > len(data) - _FOOTER:
        raise ValueError("a block reaches past the end")
    if masked_crc32c(data[offset:end]) != int.from_bytes(data[end : end + 4], "little"):
        raise ValueError(f"the checksum of the block at byte {offset:,} differs")
    content, kind = data[offset : end - 1], data[end - 1]
    if kind == _UNCOMPRESSED:
        return content
    if kind != _SNAPPY:
        raise ValueError(f"a block's compression, {kind}, is not known")
    length, _ = read_varint(content, 0)
    if length > _SNAPPY_LIMIT * size:
        raise ValueError("a compressed block claims more than it can hold")
    try:
        return pa.decompress(content, decompressed_size=length, codec="snappy", asbytes=True)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"a compressed block is damaged ({error})") from error


def _block_entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keys and values of a block: entries that share a prefix with the one before, then the restart points."""
    restarts = int.from_bytes(block[-4:], "little")
    end = len(block) - 4 * (restarts + 1)
    if end < 0:
        raise ValueError("a block has no room for its restart points")
    position, key = 0, b""
    while position < end:
        shared, position = read_varint(block, position)
        added, position = read_varint(block, position)
        length, position = read_varint(block, position)
        if shared > len(key) or shared + added > _KEY_LIMIT or position + added + length > end:
            raise ValueError("an entry reaches past its block, or has a key longer than any tensor's name")
        key = key[:shared] + block[position : position + added]
        position += added + length
        yield key, block[position - length : position]


def _append_block(out: bytearray, entries: list[tuple[bytes, bytes]], restart_interval: int) -> bytes:
    """Append a block to `out` and return its handle. Every `restart_interval` entries a key is written in full."""
    block = bytearray()
    restarts = [0]
    previous = b""
    for count, (key, value) in enumerate(entries):
        shared = 0
        if count % restart_interval:
            while shared < min(len(key), len(previous)) and key[shared] == previous[shared]:
                shared += 1
        elif count:
            restarts.append(len(block))
        block += varint(shared) + varint(len(key) - shared) + varint(len(value)) + key[shared:] + value
        previous = key
    block += b"".join(number.to_bytes(4, "little") for number in (*restarts, len(restarts)))
    handle = varint(len(out)) + varint(len(block))
    block.append(_UNCOMPRESSED)
    out += block + masked_crc32c(bytes(block)).to_bytes(4, "little")
    return handle


def _short_successor(key: bytes) -> bytes:
    """A short key that is not below `key`: what the index block calls the last block by."""
    for position, byte in enumerate(key):
        if byte != 0xFF:
            return key[:position] + bytes([byte + 1])
    return key


# CRC-32C. numpy has no carry-less product, but squaring over GF(2) only spreads a polynomial: as P(x) = 0, so is
# P(x)^(8R) = P(x^(8R)) for every power of two R. In a message cut into rows of R bytes, a row is therefore worth the
# same when it is added to the rows 32 - e below it, e the lower exponents of P: 17 plain XORs, and no table look-ups.
_EXPONENTS = (28, 27, 26, 25, 23, 22, 20, 19, 18, 14, 13, 11, 10, 9, 8, 6, 0)
_BELOW = [32 - exponent for exponent in _EXPONENTS]
_AT_ONCE = min(_BELOW)  # rows whose targets are not among themselves
_ROW_MIN, _ROW_MAX, _BATCH = 64, 16_384, 128  # bytes, bytes, rows: the buffer stays within a core's cache


def _byte_table() -> list[int]:
    reflected = sum(1 << (31 - exponent) for exponent in _EXPONENTS)
    table = list(range(256))
    for _ in range(8):
        table = [(crc >> 1) ^ (reflected if crc & 1 else 0) for crc in table]
    return table


_BYTE_TABLE = _byte_table()


def masked_crc32c(data: bytes | npt.NDArray[np.uint8]) -> int:
    """The CRC-32C as LevelDB and TensorFlow store it: rotated and shifted, so that checksums can be checksummed."""
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def crc32c(data: bytes | npt.NDArray[np.uint8]) -> int:
    """The CRC-32C (Castagnoli; RFC 3720, B.4) of `data`, at half a gigabyte a second and more when it is long."""
    length = len(data)
    if length < 4096:
        return _crc_bytes(bytes(data), 0xFFFFFFFF) ^ 0xFFFFFFFF
    message = np.frombuffer(data, np.uint8)
    row = _ROW_MIN
    while row < _ROW_MAX and 64 * row <= length:
        row *= 2
    unit = _AT_ONCE * row
    # the first piece takes what is over, so that all others are whole; zeros before a message change nothing
    first = length % unit
    if first < 4:
        first += unit
    buffer = np.zeros((32 + _BATCH) * row, np.uint8)
    kept = buffer[: 32 * row]
    for start, stop in pairwise([0, *range(first, length, _BATCH * row), length]):
        end = len(kept) + -(-(stop - start) // unit) * unit
        buffer[end - (stop - start) : end] = message[start:stop]
        if start == 0:
            buffer[end - stop : end - stop + 4] ^= 0xFF  # the CRC's initial value
        kept[:] = _fold(buffer[:end], row).copy()
    rest = kept
    while row > _ROW_MIN:
        row //= 2
        rest = _fold(rest, row)
    return _crc_bytes(rest.tobytes(), 0) ^ 0xFFFFFFFF


def _fold(message: npt.NDArray[np.uint8], row: int) -> npt.NDArray[np.uint8]:
    """Add all rows but the last 32 to those below them, in place; what is left has the same remainder."""
    rows = message.view(np.uint64).reshape(-1, row // 8)
    for top in range(0, len(rows) - 32, _AT_ONCE):
        for below in _BELOW:
            rows[top + below : top + below + _AT_ONCE] ^= rows[top : top + _AT_ONCE]
    return message[-32 * row :]


def _crc_bytes(data: bytes, crc: int) -> int:
    for byte in data:
        crc = _BYTE_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc
