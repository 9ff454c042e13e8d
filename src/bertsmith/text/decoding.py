"""From decompressed bytes to text: byte-order marks, encodings, and every bad byte counted and named.

In: a path. Out: blocks of text, or numbered lines, whose only line end is `\\n`. A file that is no text, or mostly
undecodable, is refused by its first 64 KiB, with its name and the reason, before any of it is given out.
"""

import codecs
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain

from bertsmith.errors import UserError
from bertsmith.text.documents import CONTROL_BYTES, PLACES, REPLACEMENT, ReadOptions, ReadReport, normalize_newlines
from bertsmith.text.streams import HEAD, Source, decompressed_blocks, detect_compression

RETRY = 1 << 12
"""Bytes decoded at a time where a block holds bad ones: Python copies the whole input for each error it reports."""
FEW = 32
BAD_SHARE = 0.10
"""A head with more bad bytes, or more control characters, than both is another encoding or no text."""

BYTE_ORDER_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # before UTF-16, whose mark is its first half
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
PROLOG = r"(?>\s|<\?xml\b[^>]*>|<!--.*?-->|<!DOCTYPE\b[^\[>]*(?:\[.*?\]\s*)?>)*+"
MEDIAWIKI = re.compile(rf"{PROLOG}<mediawiki[\s>]", re.DOTALL | re.IGNORECASE)
MARKUP = re.compile(r"\s*(?:<\?xml\b|<!doctype\b|<html[\s>])", re.IGNORECASE)
PARQUET = b"PAR1"
NOT_TEXT = (
    (b"PK\x03\x04", "a ZIP archive; unpack it first"),
    (b"Rar!\x1a\x07", "a RAR archive; unpack it first"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive; unpack it first"),
    (b"\x04\x22\x4d\x18", "LZ4 data; decompress it first"),
    (b"%PDF-", "a PDF document; extract its text first"),
    (b"{\\rtf", "an RTF document; extract its text first"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office document; extract its text first"),
    (b"\x89PNG\r\n", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"\x7fELF", "a program"),
    (b"ARROW1\0\0", "an Arrow file; write it as Parquet"),
    (b"Obj\x01", "an Avro file; write it as Parquet"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF\r\n", "an HDF5 file"),
    (b"SQLite format 3\x00", "an SQLite database"),
)


def split_byte_order_mark(head: bytes) -> tuple[bytes, str | None]:
    """The byte-order mark `head` starts with and the encoding it stands for; (b"", None) without one."""
    return next(((mark, name) for mark, name in BYTE_ORDER_MARKS if head.startswith(mark)), (b"", None))


def find_encoding(head: bytes, encoding: str) -> tuple[int, str]:
    """(length of the byte-order mark, encoding) of a file: the mark decides, without one what was asked for."""
    mark, marked = split_byte_order_mark(head)
    name = codecs.lookup(encoding).name
    if not marked and name in ("utf-16", "utf-32"):  # Python's codecs of these names insist on a mark
        encoding = (looks_like_utf16(head) if name == "utf-16" else None) or f"{name}-le"
    return len(mark), marked or encoding


def looks_like_utf16(head: bytes) -> str | None:
    """ "utf-16-le" or "utf-16-be" where every other byte is mostly one value: an alphabet's upper byte."""
    half = len(head) // 2
    if half < FEW:
        return None
    (even, even_count), (odd, odd_count) = (Counter(head[i::2]).most_common(1)[0] for i in (0, 1))
    if max(even_count, odd_count) < 0.5 * half or (even == odd and min(even_count, odd_count) > 0.2 * half):
        return None
    upper = even if even_count > odd_count else odd
    # upper bytes of the alphabets are 00 (Latin) to 1E; a lower byte as common as that would be a space or a letter
    return ("utf-16-be" if even_count > odd_count else "utf-16-le") if upper < 0x20 else None


def known_format(head: bytes) -> str | None:
    """The name of a file format that is not text, by its first bytes, and what to do."""
    if head[257:262] == b"ustar":
        return "a tar archive; unpack it first"
    return next((name for magic, name in NOT_TEXT if head.startswith(magic)), None)


def why_binary(head: bytes) -> str | None:
    """What a file that starts with `head` is if it is clearly no text in any encoding; None otherwise."""
    if name := known_format(head):
        return name
    if split_byte_order_mark(head)[1] or looks_like_utf16(head):
        return None
    controls = len(head) - len(head.translate(None, CONTROL_BYTES)) - head.count(b"\x1b")  # ESC: ISO 2022, terminals
    if controls > max(FEW, BAD_SHARE * len(head)):
        return f"binary data ({controls:,} of its first {len(head):,} bytes are control characters)"
    return None


def why_not_text(head: bytes, encoding: str) -> str | None:
    """Why a file that starts with `head` (after decompression) cannot be read in `encoding`; None if it can."""
    if name := known_format(head):
        return name
    if inner := detect_compression(head):
        return f"compressed twice ({inner} inside); decompress it once"
    mark, encoding = find_encoding(head, encoding)
    bad = ReadReport()
    text = Decoder("", ReadOptions(encoding=encoding), bad).decode(head[mark:], final=len(head) < HEAD)
    controls = len(text) - len(text.translate(dict.fromkeys(CONTROL_BYTES)))
    if max(bad.invalid_bytes, controls) > max(FEW, BAD_SHARE * len(head)):
        if utf16 := looks_like_utf16(head):
            return f"UTF-16 without a byte-order mark; read it with --encoding {utf16}"
        if controls > bad.invalid_bytes:
            return f"binary data ({controls:,} of its first {len(text):,} characters are control characters)"
        return (
            f"not {encoding} ({bad.invalid_bytes:,} of its first {len(head):,} bytes are invalid); "
            "name its encoding with --encoding, e.g. latin-1, gb18030 or shift_jis, or leave the file out"
        )
    if MARKUP.match(text) and not MEDIAWIKI.match(text):
        return "an HTML or XML file that is no MediaWiki dump; extract its text first"
    return None


def find_cut(text: str, most: int) -> int:
    """Where to cut off at most `most` characters: after a blank line, else a line, else a word, else there."""
    for mark in ("\n\n", "\n", " "):
        if (place := text.rfind(mark, most // 2, most)) >= 0:
            return place + len(mark)
    return most


class Decoder:
    """Incremental decoding of one file: text with `\\n` line ends out, bad bytes replaced by U+FFFD and reported."""

    def __init__(self, path: str, options: ReadOptions, report: ReadReport, offset: int = 0) -> None:
        encoding = options.encoding
        if codecs.lookup(encoding).name == "utf-8-sig":
            encoding = "utf-8"  # the mark is dropped by TextFile; this codec cannot go on after an error
        self.codec = codecs.getincrementaldecoder(encoding)("strict")
        self.path, self.options, self.report, self.encoding = path, options, report, encoding
        self.offset = offset  # of the next byte in the file
        self.line = 1
        self.held = ""  # a "\r" at the end of a block, until it is known whether "\n" follows

    def decode(self, data: bytes, final: bool = False) -> str:
        """The text of the next bytes; with `final` also of what an incomplete character left behind."""
        state = self.codec.getstate()
        try:
            pieces = [self.codec.decode(data, final)]
        except UnicodeDecodeError:
            self.codec.setstate(state)
            pieces = []
            for start in range(0, max(len(data), 1), RETRY):
                piece = data[start : start + RETRY]
                pieces += self.decode_with_errors(piece, start, pieces, final and start + RETRY >= len(data))
        self.offset += len(data)
        text = self.held + "".join(pieces)
        self.held = ""
        if text.endswith("\r") and not final:
            text, self.held = text[:-1], "\r"
        text = normalize_newlines(text)
        self.line += text.count("\n")
        return text

    def decode_with_errors(self, data: bytes, start: int, before: list[str], final: bool) -> list[str]:
        """Decode a piece with bad bytes; `start` is its place in the block, `before` the block's text so far."""
        pieces: list[str] = []
        taken = start
        while True:
            pending, flags = self.codec.getstate()
            try:
                pieces.append(self.codec.decode(data, final))
                return pieces
            except UnicodeDecodeError as error:
                # all the codec knew of is in error.object: what it had kept, then `data`
                everything = pending + data
                self.codec.setstate((b"", flags))
                pieces.append(self.codec.decode(everything[: error.start]))
                self.codec.setstate((b"", self.codec.getstate()[1]))
                position = taken - len(pending) + error.start
                self.count(error.end - error.start, position, before, pieces)
                pieces.append(REPLACEMENT)
                taken += error.end - len(pending)
                data = everything[error.end :]

    def count(self, size: int, position: int, before: list[str], pieces: list[str]) -> None:
        """Report `size` bad bytes at `position` of the block; the text before them tells the line."""
        if len(self.report.invalid_places) >= PLACES and self.options.on_invalid == "replace":
            self.report.invalid_bytes += size
            return
        line = self.line + normalize_newlines(self.held + "".join(before) + "".join(pieces)).count("\n")
        place = f"{self.path}:{line}:{self.offset + position}"
        if self.options.on_invalid == "error":
            raise UserError(
                f"{self.path}: line {line}, byte {self.offset + position}: not {self.encoding}; name the file's "
                "encoding with --encoding, or let such bytes be replaced: --on-invalid replace"
            )
        self.report.invalid(size, place)


class TextFile:
    """One file, open: its first bytes (`head`) and their text (`head_text`) to tell its kind, then blocks or lines.

    A byte-order mark wins over the encoding asked for (UTF-16 and UTF-32 are decoded too) and is dropped. Raises
    UserError where the file cannot be opened, is no text, or (while reading) is cut off.
    """

    def __init__(
        self, path: str, options: ReadOptions, report: ReadReport, on_bytes: Callable[[int], None] | None = None
    ) -> None:
        self.path, self.options, self.report = path, options, report
        self.source = Source(path, on_bytes)
        try:
            self.compression = detect_compression(self.source.peek(16))
            self.bytes = decompressed_blocks(self.source)
            self.head = b""
            while len(self.head) < HEAD and (block := next(self.bytes, b"")):
                self.head += block
        except BaseException:
            self.close()
            raise
        self.mark, self.encoding = find_encoding(self.head[:HEAD], options.encoding)
        self.head_text = self.decoder(ReadReport(), on_invalid="replace").decode(self.head[self.mark : HEAD])
        self.is_parquet = self.head.startswith(PARQUET) and self.head[4:5] < b" "

    def decoder(self, report: ReadReport, on_invalid: str) -> Decoder:
        options = ReadOptions(encoding=self.encoding, on_invalid=on_invalid)
        return Decoder(self.path, options, report, offset=self.mark)

    def refuse_if_not_text(self) -> None:
        """UserError with the reason where the head is no text in this encoding."""
        if reason := why_not_text(self.head[:HEAD], self.encoding):
            raise UserError(f"{self.path}: {reason}")

    def blocks(self) -> Iterator[str]:
        """The whole text, a block at a time."""
        self.refuse_if_not_text()
        decoder = self.decoder(self.report, self.options.on_invalid)
        skip = self.mark
        for block in chain([self.head], self.bytes):
            self.report.bytes += len(block)
            if text := decoder.decode(block[skip:]):
                yield text
            skip = 0
        if text := decoder.decode(b"", final=True):
            yield text

    def lines(self, longest: int | None = None) -> Iterator[tuple[int, list[str]]]:
        """(1-based number of the first, lines without their `\\n`), a batch at a time; linear in a line's length.

        With `longest`, a line of more characters comes in parts, each a batch of its own with the line's number.
        """
        number, begun, length = 1, [""], 0
        for block in self.blocks():
            lines = block.split("\n")
            begun.append(lines[0])
            length += len(lines[0])
            if len(lines) > 1:
                lines[0] = "".join(begun)
                begun = [lines.pop()]
                length = len(begun[0])
                yield number, lines
                number += len(lines)
            elif longest and length > longest:
                line = "".join(begun)
                cut = find_cut(line, longest)
                yield number, [line[:cut]]
                begun, length = [line[cut:]], length - cut
        if last := "".join(begun):
            yield number, [last]

    def close(self) -> None:
        self.source.close()
