"""What reading is asked (ReadOptions), what it gives (Document), and what it must account for (ReadReport).

Nothing is lost in silence: whatever is replaced or left out is counted in the report, and the first places are named.
"""

import codecs
import dataclasses
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from bertsmith.errors import UserError

NOTATIONS = ("idna", "punycode", "raw-unicode-escape", "unicode-escape")
"""Python's codecs that write text in another way rather than encode it; no text file is in one."""
DOCUMENT_LAYOUTS = ("file", "blank-line")
INVALID_POLICIES = ("replace", "error")
PLACES = 20
"""How many places a report names; the counts go on."""
MAX_DOCUMENT = 8_000_000
"""Characters. A longer plain text goes on as the next document, so that memory stays flat (War and Peace has 3.2 M)."""

CONTROL_BYTES = bytes(b for b in (*range(0x20), 0x7F) if b not in b"\t\n\r")
C1_CONTROLS = re.compile(rb"\xc2[\x80-\x9f]")
SURROGATES = re.compile("[\\ud800-\\udfff]")
REPLACEMENT = "\ufffd"


@dataclass(frozen=True)
class ReadOptions:
    """How files become documents. Raises UserError naming every bad value at once."""

    documents: str = "file"
    """Plain text: "file" (a file is a document) or "blank-line" (a blank line ends a document: Google's layout)."""
    text_column: str = "text"
    """The key or column that holds the text in .jsonl, .csv, .tsv and .parquet."""
    encoding: str = "utf-8"
    """Python's name of the codec; a byte-order mark in the file wins over it."""
    on_invalid: str = "replace"
    """Bytes that the encoding does not allow: "replace" with U+FFFD, counted and named, or "error"."""

    def __post_init__(self) -> None:
        problems = []
        if self.documents not in DOCUMENT_LAYOUTS:
            problems.append(f"--documents: {self.documents!r} is not known; use one of {', '.join(DOCUMENT_LAYOUTS)}")
        if self.on_invalid not in INVALID_POLICIES:
            problems.append(f"--on-invalid: {self.on_invalid!r} is not known; use one of {', '.join(INVALID_POLICIES)}")
        if not self.text_column:
            problems.append("--text-column: the name is empty")
        try:
            text = codecs.getincrementaldecoder(self.encoding)("strict").decode(b"", True)
            known = isinstance(text, str) and codecs.lookup(self.encoding).name not in NOTATIONS
        except Exception:  # an unknown name, a codec of bytes to bytes, one that needs its own arguments
            known = False
        if not known:
            problems.append(
                f"--encoding: {self.encoding!r} is not a text encoding Python knows; utf-8, latin-1, cp1252, gb18030, "
                "shift_jis and utf-16 are some"
            )
        if problems:
            raise UserError("; ".join(problems))


@dataclass(frozen=True)
class Document:
    """One text with where it came from. Lines end in `\\n`; a blank line separates paragraphs."""

    text: str
    source: str
    """The file as it was named."""
    line: int
    """1-based line (rows of .parquet: 1-based row) where it starts."""


@dataclass
class ReadReport:
    """The account of reading: what came in, and everything that was replaced, cut or left out."""

    keep_blank: ClassVar[bool] = False
    """Whether a blank text is a text like any other, as where each row counts."""

    files: int = 0
    documents: int = 0
    bytes: int = 0
    """Read after decompression (.parquet: the UTF-8 bytes of the text column)."""
    characters: int = 0
    """In the documents given."""
    invalid_bytes: int = 0
    """Replaced by U+FFFD; a lone surrogate in a JSON escape counts its six bytes."""
    invalid_places: list[str] = field(default_factory=list)
    """The first 20 as "file:line:byte" (the byte is the 0-based offset in the decompressed file; rows: "file:row")."""
    control_characters: int = 0
    """Left in the documents: NUL and the rest of category Cc but tab and newline. BERT's tokenizer drops them."""
    continued_documents: int = 0
    """How often a plain-text document was longer than 8,000,000 characters and went on as the next document."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Reason → how many files, documents, lines or rows were left out for it."""
    skipped_places: list[str] = field(default_factory=list)
    """The first 20 as "file:line: reason"."""

    def skip(self, reason: str, place: str) -> None:
        """Count one thing left out."""
        self.skipped[reason] = self.skipped.get(reason, 0) + 1
        if len(self.skipped_places) < PLACES:
            self.skipped_places.append(f"{place}: {reason}")

    def invalid(self, count: int, place: str) -> None:
        """Count `count` invalid bytes at one place."""
        self.invalid_bytes += count
        if len(self.invalid_places) < PLACES:
            self.invalid_places.append(place)

    def merge(self, other: "ReadReport") -> None:
        """Add `other` to this report; merge in file order to name the same places for any number of workers."""
        for item in dataclasses.fields(self):
            mine, theirs = getattr(self, item.name), getattr(other, item.name)
            if isinstance(mine, int):
                setattr(self, item.name, mine + theirs)
            elif isinstance(mine, list):
                mine.extend(theirs[: PLACES - len(mine)])
            else:
                for reason, count in theirs.items():
                    mine[reason] = mine.get(reason, 0) + count

    def as_dict(self) -> dict[str, int | list[str] | dict[str, int]]:
        """For JSON; `ReadReport(**report.as_dict())` is the way back."""
        return dataclasses.asdict(self)


def normalize_newlines(text: str) -> str:
    """`\\r\\n` and a lone `\\r` (old Macintosh) become `\\n`. U+2028, U+0085 and form feed are no line ends."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    return text


def count_control_characters(data: bytes) -> int:
    """Characters of category Cc but `\\t \\n \\r` in UTF-8 `data`: U+0000–1F, U+007F, U+0080–9F."""
    count = len(data) - len(data.translate(None, CONTROL_BYTES))
    if b"\xc2" in data:
        count += len(C1_CONTROLS.findall(data))
    return count


def make_document(text: str, source: str, line: int, options: ReadOptions, report: ReadReport) -> Document | None:
    """The one door every text leaves through: line ends made `\\n`, surrogates replaced, all counted.

    None if blank, unless the report keeps blank ones.
    """
    text = normalize_newlines(text)
    try:
        data = text.encode("utf-8")
    except UnicodeEncodeError as error:
        # only JSON escapes bring these in (\\ud83d without its other half); no encoder downstream would take them
        place = f"{source}:{line}"
        if options.on_invalid == "error":
            raise UserError(
                f"{place}: \\u{ord(text[error.start]):04x} is half a character (a lone surrogate); mend the line, or "
                "let it be replaced: --on-invalid replace"
            ) from None
        text, surrogates = SURROGATES.subn(REPLACEMENT, text)
        report.invalid(6 * surrogates, place)
        data = text.encode("utf-8")
    if not report.keep_blank and (not text or text.isspace()):
        report.skip("empty document", f"{source}:{line}")
        return None
    report.documents += 1
    report.characters += len(text)
    report.control_characters += count_control_characters(data)
    return Document(text, source, line)


def join_names(names: Iterable[str], limit: int = 20) -> str:
    """Column names for a message: the first `limit`, quoted."""
    listed = [repr(name) for name in names]
    more = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(listed[:limit]) + more
