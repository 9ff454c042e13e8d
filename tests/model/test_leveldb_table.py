"""LevelDB tables: checksums against the published ones and plain division, compressed blocks, and damaged bytes."""

import contextlib

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from bertsmith.model.leveldb_table import crc32c, masked_crc32c, read_table, read_varint, varint, write_table


def plain_crc32c(data: bytes) -> int:
    """Bit by bit, from the definition: the polynomial 0x1EDC6F41, reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def block(content: bytes, compression: int = 0) -> bytes:
    """A block with its trailer."""
    content += bytes([compression])
    return content + masked_crc32c(content).to_bytes(4, "little")


def table_of(content: bytes, compression: int = 0, handles: int = 1) -> bytes:
    """A table with one data block of any content, which its index names `handles` times; checksums are right."""
    data = block(content, compression)
    handle = varint(0) + varint(len(content))
    entries = b"".join(
        varint(0) + varint(1) + varint(len(handle)) + bytes([number]) + handle for number in range(handles)
    )
    index = entries + bytes(4) + (1).to_bytes(4, "little")
    footer = varint(0) + varint(0) + varint(len(data)) + varint(len(index))
    return data + block(index) + footer.ljust(40, b"\0") + bytes.fromhex("57fb808b247547db")


def entry(key: bytes, value: bytes, shared: int = 0) -> bytes:
    return varint(shared) + varint(len(key)) + varint(len(value)) + key + value


RESTARTS = bytes(4) + (1).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("data", "crc"),
    [  # RFC 3720, B.4, and the customary check value
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_published_checksums(data: bytes, crc: int) -> None:
    assert crc32c(data) == crc


@pytest.mark.parametrize("length", [4095, 4096, 4097, 4099, 4100, 8191, 8192, 12_345, 70_001, 300_003])
def test_folded_checksums_equal_division_bit_by_bit(length: int) -> None:
    data = np.random.default_rng(length).bytes(length)
    assert crc32c(data) == plain_crc32c(data)


def test_long_checksums_equal_those_of_their_parts() -> None:
    """Over 2 MB the message passes through the buffer in pieces; a CRC is linear, so that it can be taken apart."""
    rng = np.random.default_rng(0)
    one, two = (rng.integers(0, 256, 5_000_003, dtype=np.uint8) for _ in range(2))
    zero = np.zeros_like(one)
    assert crc32c(one ^ two) == crc32c(one) ^ crc32c(two) ^ crc32c(zero)
    changed = one.copy()
    changed[2_500_000] ^= 1
    assert crc32c(changed) != crc32c(one)
    # zeros in front of a long message, and the same remainder computed over its last bytes alone
    tail = bytes(one[-5000:])
    padded = np.concatenate([np.zeros(4_000_000, np.uint8), one[-5000:]])
    assert crc32c(padded) ^ crc32c(np.zeros(4_005_000, np.uint8)) == crc32c(tail) ^ crc32c(bytes(5000))


@given(st.integers(0, 2**64 - 1), st.binary(max_size=3))
def test_numbers_return(value: int, before: bytes) -> None:
    data = before + varint(value)
    assert read_varint(data, len(before)) == (value, len(data))
    with pytest.raises(ValueError, match="cut off"):
        read_varint(data[:-1], len(before))


@settings(max_examples=60)
@given(st.dictionaries(st.binary(max_size=40), st.binary(max_size=60), max_size=60))
@example({b"": b"", b"\xff": b"a", b"\xff\xff": b"b"})
def test_tables_return(entries: dict[bytes, bytes]) -> None:
    ordered = dict(sorted(entries.items()))
    assert list(read_table(write_table(ordered.items())).items()) == list(ordered.items())


def test_a_table_of_many_blocks_returns() -> None:
    entries = {f"variable/{number:06}".encode(): bytes(40) for number in range(20_000)}
    table = write_table(entries.items())
    assert len(table) > 3 * 262_144
    assert read_table(table) == entries


def test_compressed_blocks_are_read() -> None:
    content = b"".join(entry(f"name/{number:04}".encode(), b"value" * 9) for number in range(500)) + RESTARTS
    compressed = pa.compress(content, codec="snappy", asbytes=True)
    assert len(compressed) < len(content) / 3
    assert read_table(table_of(compressed, 1)) == {f"name/{n:04}".encode(): b"value" * 9 for n in range(500)}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (b"", "does not end"),
        (bytes(1000), "does not end"),
        (table_of(b""), "restart points"),
        (table_of(b"\xff\xff\xff\xff"), "restart points"),
        (table_of(entry(b"b", b"") + entry(b"a", b"") + RESTARTS), "order"),
        (table_of(entry(b"b", b"") + entry(b"b", b"") + RESTARTS), "order"),
        (table_of(entry(b"b", b"", shared=1) + RESTARTS), "reaches past"),
        (table_of(entry(b"b", b"") + entry(b"a" * 4096, b"", shared=1) + RESTARTS), "longer than"),
        (table_of(varint(0) + varint(1) + varint(2**40) + b"a" + RESTARTS), "reaches past"),
        (table_of(b"\x80" * 9 + RESTARTS), "cut off|longer"),
        (table_of(entry(b"a", b"") + RESTARTS, handles=2), "overlap"),
        (table_of(entry(b"a", b"") + RESTARTS, compression=4), "compression"),
        (table_of(varint(2**40) + b"\0a", compression=1), "claims more"),
        (table_of(varint(100) + b"\0a" + bytes(9), compression=1), "damaged"),
    ],
)
def test_hostile_tables_are_refused(table: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_table(table)


def test_prefixes_do_not_multiply() -> None:
    """Each key shares all of the one before: a file of 100 kB that would unfold to 80 MB."""
    content = entry(b"a" * 3000, b"")
    for number in range(25_000):
        content += entry(number.to_bytes(3, "big"), b"", shared=3000)
    table = table_of(content + RESTARTS)
    assert len(table) < 200_000
    with pytest.raises(ValueError, match="more entries"):
        read_table(table)


def test_any_flipped_bit_of_keys_and_values_is_noticed() -> None:
    entries = {f"name/{number}".encode(): f"value {number}".encode() for number in range(9)}
    table = write_table(sorted(entries.items()))
    block_end = table.index(b"value 8") + len(b"value 8") + 8 + 5  # one restart point, their number, the trailer
    for position in range(len(table)):
        for bit in range(8):
            changed = bytearray(table)
            changed[position] ^= 1 << bit
            if position < block_end:
                with pytest.raises(ValueError, match=r"checksum|compression"):
                    read_table(bytes(changed))
            else:  # the footer's padding and the meta index are not used
                with contextlib.suppress(ValueError):
                    assert read_table(bytes(changed)) == entries


@settings(max_examples=300)
@given(st.binary(max_size=300), st.sampled_from([0, 1]))
def test_random_blocks_are_read_or_refused(content: bytes, compression: int) -> None:
    with contextlib.suppress(ValueError):
        read_table(table_of(content, compression))
