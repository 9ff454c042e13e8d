"""From a path or fsspec URL to blocks of decompressed bytes.

gzip, bzip2, xz and zstd are known by their first bytes, never by a name; several members in a row are one stream. A cut
or damaged stream is an error that names the file. Memory is a few blocks of 1 MiB whatever the file's size.
"""

import bz2
import lzma
import os
import re
import zlib
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, Protocol

from bertsmith.errors import UserError

BLOCK = 1 << 20
HEAD = 1 << 16
"""Bytes looked at to tell a file's kind."""
URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*(://|::)")

COMPRESSIONS = (
    ("gzip", re.compile(rb"\x1f\x8b\x08")),
    ("bzip2", re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)")),
    ("xz", re.compile(rb"\xfd7zXZ\x00")),
    ("zstd", re.compile(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18")),
)


def is_url(path: str) -> bool:
    """Whether `path` is for fsspec (`s3://…`, `memory://…`, `simplecache::…`) and not a plain local path."""
    return URL.match(path) is not None


def local_path(path: str) -> str:
    """Where `path` is on this machine's disk: `file://` and `local://` URLs name a file there as well."""
    return file_system(path)[1] if path.startswith(("file://", "local://")) else path


def is_read_once(path: str) -> bool:
    """Whether `path` is a pipe or its like, which gives what it holds to its first reader only."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of `url` and the path in it; UserError where the protocol or its package is unknown."""
    import fsspec.core

    try:
        return fsspec.core.url_to_fs(url)
    except (ImportError, ValueError, OSError) as error:
        raise UserError(f"{url}: cannot be opened: {error}") from error


def open_bytes(path: str) -> BinaryIO:
    """Open a local file or fsspec URL for reading; UserError names the path and the reason."""
    try:
        if is_url(path):
            system, inner = file_system(path)
            return system.open(inner, "rb")
        return open(path, "rb", buffering=0)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise UserError(f"{path}: a folder where a file was expected") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:
        if not is_url(path) or isinstance(error, UserError):
            raise
        # remote file systems raise their own libraries' kinds
        raise UserError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error


class Source:
    """The raw bytes of a file, each block counted as it is read; `peek` looks ahead without taking."""

    def __init__(self, path: str, on_bytes: Callable[[int], None] | None = None) -> None:
        self.path, self.on_bytes = path, on_bytes
        self.file = open_bytes(path)
        self.ahead = b""
        self.taken = 0
        """Stored bytes read so far, the ones looked at included."""
        self.closed = False  # pyarrow asks

    def read(self, size: int = BLOCK) -> bytes:
        """Up to `size` bytes; b"" at the end."""
        if self.ahead:
            data, self.ahead = self.ahead[:size], self.ahead[size:]
            return data
        try:
            data = self.file.read(size) or b""
        except Exception as error:
            if not isinstance(error, OSError) and not is_url(self.path):
                raise
            raise UserError(f"{self.path}: reading failed: {getattr(error, 'strerror', None) or error}") from error
        self.taken += len(data)
        if data and self.on_bytes:
            self.on_bytes(len(data))
        return data

    def peek(self, size: int) -> bytes:
        """The next `size` bytes (fewer only at the end of the file)."""
        while len(self.ahead) < size:
            ahead, self.ahead = self.ahead, b""
            data = self.read(max(size - len(ahead), HEAD))
            self.ahead = ahead + data
            if not data:
                break
        return self.ahead[:size]

    def close(self) -> None:
        self.file.close()
        self.closed = True


def detect_compression(head: bytes) -> str | None:
    """ "gzip", "bzip2", "xz", "zstd" or None, by the first bytes."""
    return next((name for name, magic in COMPRESSIONS if magic.match(head)), None)


def decompressed_blocks(source: Source) -> Iterator[bytes]:
    """Blocks of at most 1 MiB of the file's content, decompressed if its first bytes say so.

    Several members or frames in a row are one stream. Raises UserError where the data is cut off, damaged, or followed
    by bytes that belong to no member: what was given before is the sound part, and the caller must not pass it off as
    the whole.
    """
    kind = detect_compression(source.peek(16))
    if kind is None:
        while block := source.read(BLOCK):
            yield block
    elif kind == "zstd":
        yield from zstd_blocks(source)
    else:
        yield from member_blocks(source, kind)


def truncated(path: str, kind: str, given: int) -> UserError:
    return UserError(
        f"{path}: the {kind} data is cut off (a broken download or copy?): it ends in the middle of the stream, "
        f"{given:,} bytes can be read; get the whole file or leave it out"
    )


def zstd_blocks(source: Source) -> Iterator[bytes]:
    import pyarrow as pa

    given = 0
    stream = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), "zstd")
    while True:
        try:
            block = stream.read(BLOCK)
        except OSError as error:
            if "runcated" in str(error):
                raise truncated(source.path, "zstd", given) from None
            raise UserError(f"{source.path}: damaged zstd data after {given:,} good bytes: {error}") from None
        if not block:
            return
        given += len(block)
        yield block


class Decompressor(Protocol):
    """What zlib's, bz2's and lzma's objects have in common."""

    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


def member_blocks(source: Source, kind: str) -> Iterator[bytes]:
    """gzip, bzip2 and xz: one member after another, zero padding between and after them allowed."""
    make: Callable[[], Any] = {
        "gzip": lambda: zlib.decompressobj(wbits=31),
        "bzip2": bz2.BZ2Decompressor,
        "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ),
    }[kind]
    given = 0
    data = source.read(BLOCK)
    while True:
        engine: Decompressor = make()
        ended = False
        while not engine.eof:
            # bz2 and lzma keep what they have not used and say when they need more; zlib hands it back
            if not data and getattr(engine, "needs_input", True):
                data = source.read(BLOCK)
                ended = not data
            try:
                block = engine.decompress(data, BLOCK)
            except (zlib.error, lzma.LZMAError, OSError, EOFError) as error:
                raise UserError(f"{source.path}: damaged {kind} data after {given:,} good bytes: {error}") from None
            data = getattr(engine, "unconsumed_tail", b"")
            if block:
                given += len(block)
                yield block
            elif ended and not engine.eof:
                raise truncated(source.path, kind, given)
        data = engine.unused_data.lstrip(b"\0")
        while len(data) < 16 and (block := source.read(BLOCK)):
            data = (data + block).lstrip(b"\0")
        if not data:
            return
        if detect_compression(data) != kind:
            raise UserError(
                f"{source.path}: after {given:,} good bytes the {kind} data ends and bytes follow that are no {kind}: "
                "the file is damaged, or something was appended to it"
            )
