"""TensorFlow's checkpoints (format V2, the "tensor bundle"), read and written without TensorFlow.

PREFIX.index is a table from tensor names to small protocol-buffer messages (type, shape, place, checksum);
PREFIX.data-00000-of-00001 and its like hold the numbers. Opening reads the index alone and holds every size and place
in it against the files; a tensor is read, and its checksum checked, when it is asked for.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError
from bertsmith.model.leveldb_table import masked_crc32c, read_table, read_varint, varint, write_table
from bertsmith.storage import atomic_file

# in order of their numbers, from 1 on (tensorflow/core/framework/types.proto); numpy's names where it has them
_TYPES = (
    "float32 float64 int32 uint8 int16 int8 string complex64 int64 bool qint8 quint8 qint32 bfloat16 qint16 quint16"
    " uint16 complex128 float16 resource variant uint32 uint64"
)
_TYPE_NAMES = dict(enumerate(_TYPES.split(), start=1))
_NOT_NUMBERS = {"string", "qint8", "quint8", "qint32", "qint16", "quint16", "resource", "variant"}
_STORED = {  # the little-endian numbers on disk
    name: np.dtype({"bfloat16": "uint16", "bool": "uint8"}.get(name, name)).newbyteorder("<")
    for name in _TYPE_NAMES.values()
    if name not in _NOT_NUMBERS
}
_TYPE_NUMBERS = {name: number for number, name in _TYPE_NAMES.items() if name in _STORED and name != "bfloat16"}
_VERSION = 1
_INDEX_LIMIT = 2**22  # bytes; BERT-large with Adam's slots takes 50 kB
_DIMENSIONS_LIMIT = 32
_SUFFIX = re.compile(r"\.(index|meta|data-\d{5}-of-\d{5})$")


@dataclass(frozen=True, slots=True)
class BundleEntry:
    """What the index says about a tensor."""

    dtype: str
    """numpy's name of its type, or TensorFlow's where numpy has none (bfloat16, string, …)."""
    shape: tuple[int, ...]
    shard: int
    offset: int
    size: int
    """Bytes in its shard, from `offset`."""
    checksum: int
    """Masked CRC-32C of these bytes."""
    slices: int
    """Pieces that a partitioned variable is stored in; 0 for all others."""

    @property
    def readable(self) -> bool:
        """Whether `TensorBundle.tensor` can read it: numbers, in one piece."""
        return self.dtype in _STORED and not self.slices


class TensorBundle(Mapping[str, BundleEntry]):
    """A checkpoint that was opened: its entries by name, in order of names."""

    def __init__(self, prefix: str, entries: dict[str, BundleEntry], shards: int) -> None:
        self.prefix = prefix
        self._entries, self._shards = entries, shards

    def __getitem__(self, name: str) -> BundleEntry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def tensor(self, name: str) -> npt.NDArray[Any]:
        """Read one tensor; bfloat16, which numpy does not have, comes as float32, exactly.

        Raises UserError when there is none of that name, it is no array of numbers in one piece, or it is damaged.
        """
        if name not in self:
            raise UserError(f"{self.prefix}: has no tensor {name}")
        entry = self[name]
        if entry.slices:
            raise UserError(
                f"{self.prefix}: tensor {name} is stored in slices, as a partitioned variable, which is not read; save "
                "it in one piece"
            )
        if not entry.readable:
            known = ", ".join(sorted(_STORED))
            raise UserError(f"{self.prefix}: tensor {name} is of type {entry.dtype}; those read are {known}")
        path = _shard_path(self.prefix, entry.shard, self._shards)
        try:
            with path.open("rb") as file:
                file.seek(entry.offset)
                content = np.fromfile(file, np.uint8, entry.size)
        except OSError as error:
            raise UserError(f"{path}: cannot be read ({error.strerror})") from error
        if len(content) < entry.size or masked_crc32c(content) != entry.checksum:
            raise UserError(f"{path}: tensor {name} is damaged (its checksum differs); copy the checkpoint again")
        stored = content.view(_STORED[entry.dtype]).reshape(entry.shape)
        if entry.dtype == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(bool) if entry.dtype == "bool" else stored


def read_bundle(prefix: Path | str) -> TensorBundle:
    """Open the checkpoint whose files begin with `prefix` (or any one of its files); no tensor is read yet.

    Raises UserError when it is not there, not whole, damaged, or of a kind that is not read.
    """
    prefix = _SUFFIX.sub("", str(prefix))
    index = Path(f"{prefix}.index")
    if not index.is_file():
        if Path(prefix).is_file():
            raise UserError(f"{prefix}: is no checkpoint of TensorFlow's format V2, which has a .index and .data files")
        raise UserError(
            f"{index}: no such file; name a TensorFlow checkpoint by what its files have in common, such as "
            "bert_model.ckpt"
        )
    try:
        if index.stat().st_size > _INDEX_LIMIT:
            raise ValueError(f"it is larger than {_INDEX_LIMIT:,} bytes")
        table = read_table(index.read_bytes())
        if b"" not in table:
            raise ValueError("it has no header")
        shards = _parse_header(index, table[b""])
        # keys that begin with a zero byte are the pieces of partitioned variables
        entries = {key.decode(): _parse_entry(value) for key, value in table.items() if key[:1] not in (b"", b"\0")}
        pieces = [_parse_entry(value) for key, value in table.items() if key[:1] == b"\0"]
        if not all(name.isprintable() for name in entries):
            raise ValueError("a tensor has an impossible name")
        _check_places(prefix, shards, [*entries.values(), *pieces])
    except ValueError as error:  # UnicodeDecodeError, of a name that is none, is one
        raise UserError(f"{index}: damaged or no TensorFlow checkpoint ({error}); copy the checkpoint again") from error
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read ({error.strerror})") from error
    return TensorBundle(prefix, entries, shards)


def write_bundle(prefix: Path | str, tensors: Mapping[str, npt.ArrayLike]) -> None:
    """Write PREFIX.index and PREFIX.data-00000-of-00001 for TensorFlow to read; equal tensors give equal bytes.

    `tensors` are asked for one at a time, in order of names. Raises UserError when the disk refuses, or for a type that
    is not numbers.
    """
    records = [(b"", _number(1, 1) + _message(3, _number(1, _VERSION)))]
    # the data take their place before the index that makes a checkpoint of them does
    with atomic_file(Path(f"{prefix}.index")) as index, atomic_file(_shard_path(str(prefix), 0, 1)) as data:
        with data.open("wb") as file:
            for name in sorted(tensors):
                assert not name.startswith("\0"), "names of zero bytes are the format's own"
                array = np.asarray(tensors[name])
                if array.dtype.name not in _TYPE_NUMBERS:
                    raise UserError(f"{prefix}: tensor {name} is of type {array.dtype}, which cannot be written")
                content = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).reshape(-1).view(np.uint8)
                dimensions = b"".join(_message(2, _number(1, size)) for size in array.shape)
                entry = (
                    _number(1, _TYPE_NUMBERS[array.dtype.name])
                    + _message(2, dimensions)
                    + _number(4, file.tell())
                    + _number(5, content.nbytes)
                    + varint(6 << 3 | 5)
                    + masked_crc32c(content).to_bytes(4, "little")
                )
                records.append((name.encode(), entry))
                file.write(content.data)
        index.write_bytes(write_table(records))


def _shard_path(prefix: str, shard: int, shards: int) -> Path:
    return Path(f"{prefix}.data-{shard:05d}-of-{shards:05d}")


def _parse_header(index: Path, message: bytes) -> int:
    """BundleHeaderProto (tensorflow/core/protobuf/tensor_bundle.proto): the number of shards."""
    header = _fields(message)
    shards = _integer(header, 1)
    if not 1 <= shards <= 99_999:
        raise ValueError(f"it claims {shards:,} data files")
    if _integer(header, 2):
        raise UserError(f"{index}: was written on a big-endian machine, which is not read; save it on another one")
    if (least := _integer(_fields(_bytes(header, 3)), 2)) > _VERSION:
        raise UserError(f"{index}: its format is {least}, this bertsmith reads {_VERSION}; save it as a V2 checkpoint")
    return shards


def _parse_entry(message: bytes) -> BundleEntry:
    """BundleEntryProto, with the size it says held against type and shape."""
    fields = _fields(message)
    number, shape_fields = _integer(fields, 1), _fields(_bytes(fields, 2))
    dtype = _TYPE_NAMES.get(number, f"number {number}")
    if _integer(shape_fields, 3):
        raise ValueError("a tensor's shape is unknown")
    shape = tuple(_integer(_fields(_as_bytes(dimension)), 1) for dimension in shape_fields.get(2, []))
    checksum = _integer(fields, 6)
    slices = len(fields.get(7, []))
    entry = BundleEntry(dtype, shape, _integer(fields, 3), _integer(fields, 4), _integer(fields, 5), checksum, slices)
    # numpy bounds the product of the dimensions even where one of them is zero
    if len(shape) > _DIMENSIONS_LIMIT or min(shape, default=0) < 0 or math.prod(filter(None, shape)) >= 2**56:
        raise ValueError("a tensor's shape is impossible")
    if min(entry.shard, entry.offset, entry.size) < 0:
        raise ValueError("a tensor's place is negative")
    if entry.readable and entry.size != math.prod(shape) * _STORED[dtype].itemsize:
        raise ValueError(f"a tensor of type {dtype} and shape {shape} has {entry.size:,} bytes")
    return entry


def _check_places(prefix: str, shards: int, entries: list[BundleEntry]) -> None:
    """Raise UserError unless every entry lies within its data file, ValueError where two share bytes.

    (As they do not, the tensors together take no more memory than the files have bytes.)
    """
    shard, end = -1, 0
    for entry in sorted(entries, key=lambda entry: (entry.shard, entry.offset)):
        if entry.shard >= shards:
            raise ValueError(f"a tensor is in data file {entry.shard} of {shards}")
        if entry.shard != shard:
            shard, end = entry.shard, 0
            path = _shard_path(prefix, shard, shards)
            if not path.is_file():
                raise UserError(f"{path}: no such file, though {Path(prefix).name}.index asks for it; copy it there")
            available = path.stat().st_size
        if not entry.size:
            continue
        if entry.offset < end:
            raise ValueError("two tensors share bytes")
        end = entry.offset + entry.size
        if end > available:
            raise UserError(
                f"{path}: has {available:,} bytes where {Path(prefix).name}.index asks for {end:,}; copy the "
                "checkpoint again"
            )


# Protocol buffers, as much of them as the two messages take: a field is a varint (its number and wire type), its value


def _number(field: int, value: int) -> bytes:
    """An integer field; one that is zero is left out, as proto3 does."""
    return varint(field << 3) + varint(value) if value else b""


def _message(field: int, content: bytes) -> bytes:
    return varint(field << 3 | 2) + varint(len(content)) + content


def _fields(message: bytes) -> dict[int, list[int | bytes]]:
    """All values of a message by field number. Raises ValueError when it is damaged."""
    fields: dict[int, list[int | bytes]] = {}
    position = 0
    while position < len(message):
        tag, position = read_varint(message, position)
        value: int | bytes
        if tag & 7 == 0:
            value, position = read_varint(message, position)
        elif tag & 7 in (1, 2, 5):
            length = {1: 8, 5: 4}.get(tag & 7)
            if length is None:
                length, position = read_varint(message, position)
            value = message[position : position + length]
            position += length
            if tag & 7 == 5:
                value = int.from_bytes(value, "little")
        else:
            raise ValueError("an entry is no protocol-buffer message")
        if position > len(message):
            raise ValueError("an entry is cut off")
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def _integer(fields: dict[int, list[int | bytes]], number: int) -> int:
    """The field as a signed integer, 0 where it is absent."""
    value = fields.get(number, [0])[-1]
    if not isinstance(value, int):
        raise ValueError("an entry has a field of the wrong type")
    return value - 2**64 if value >= 2**63 else value


def _bytes(fields: dict[int, list[int | bytes]], number: int) -> bytes:
    """The field as a nested message, empty where it is absent."""
    return _as_bytes(fields.get(number, [b""])[-1])


def _as_bytes(value: int | bytes) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("an entry has a field of the wrong type")
    return value
