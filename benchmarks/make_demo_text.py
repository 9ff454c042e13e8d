"""Makes the demo text in src/bertsmith/demo_text from the published collections it was chosen from.

Reads `corpora/books_en-*.jsonl.gz` and `corpora/zh_novels-00.jsonl.gz` of the folder given (or BERTSMITH_SHARED_DATA),
cuts the books named below into chapters and long chapters into parts, and writes english.jsonl.gz and chinese.jsonl.gz.
The same bytes come out every time: `python benchmarks/make_demo_text.py DATA --check` compares with what ships.
"""

import argparse
import gzip
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

DEMO_TEXT = Path(__file__).resolve().parents[1] / "src" / "bertsmith" / "demo_text"

# A document is a chapter, or a part of one: among hundreds of documents of fifty sentences, next-sentence prediction
# has many to draw its negatives from, and the held-out split gets more than one or two.
LONGEST_DOCUMENT = 8_000  # bytes of UTF-8


@dataclass(frozen=True)
class Book:
    """What is taken of one book: its first `chapters` chapters, found by the lines that `heading` matches."""

    title: str
    heading: str | None = None  # None: a story without chapters
    chapters: int | None = None  # None: all


# Written in English, published before 1908, by authors who died before 1931: public domain in the United States
# (published before 1930) and wherever copyright ends 70 (or 90) years after the author's death.
ENGLISH = (
    Book("Black Beauty", r"Chapter \d+ - .+"),
    Book("Ozma of Oz", r"[A-Z][a-z',]+( [A-Za-z][a-z',]*)+"),
    Book("Five Children and It", r"CHAPTER [IVX]+.* - .+", 7),
    Book("Andy Gordon", r"CHAPTER [IVXL]+ - .+", 22),
    Book("Little Men", r"CHAPTER [IVX]+\. .+", 7),
    Book("Up from Slavery", r"Chapter [IVX]+\. .+", 8),
    Book("The Adventure of the Golden Pince-Nez"),
    Book("The Musgrave Ritual"),
    Book("The Gloria Scott"),
    Book("The Adventure of the Noble Bachelor"),
    Book("Silver Blaze"),
)

# Vernacular, published before 1830. The collection's "chapter" names the chapter before: entry n is chapter n + 1.
CHINESE = {"镜花缘": range(16), "红楼梦": (0, 1, 2, 3, 4, 6, 7, 8)}


def read_rows(path: Path) -> Iterator[dict[str, str]]:
    """The rows of one gzip-compressed JSON-lines file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def split_chapters(text: str, book: Book) -> list[tuple[str, list[str]]]:
    """(heading, paragraphs) of each chapter; what stands before the first heading (prefaces) is left out."""
    text = text.replace("â\x80\x98", "'").replace("_", "")  # a quotation mark decoded wrongly (once), marks of italics
    paragraphs = [re.sub(r"[ \t]+", " ", paragraph).strip() for paragraph in text.split("\n\n")]
    paragraphs = [paragraph for paragraph in paragraphs if paragraph and paragraph != "THE END."]
    if book.heading is None:
        return [("", paragraphs)]
    chapters: list[tuple[str, list[str]]] = []
    for paragraph in paragraphs:
        if re.fullmatch(book.heading, paragraph) and len(paragraph) < 100:
            chapters.append((paragraph, []))
        elif re.fullmatch(r"Part [IVX]+", paragraph):
            continue
        elif chapters:
            chapters[-1][1].append(paragraph)
    return chapters[: book.chapters]


def split_parts(paragraphs: list[str]) -> list[str]:
    """Join paragraphs to the fewest parts of about equal length that are not longer than a document may be."""
    sizes = [len(paragraph.encode("utf-8")) for paragraph in paragraphs]
    count = -(-sum(sizes) // LONGEST_DOCUMENT)
    parts: list[list[str]] = [[] for _ in range(count)]
    before = 0
    for paragraph, size in zip(paragraphs, sizes, strict=True):
        # a paragraph belongs to the part in which its middle falls
        parts[min((before + size // 2) * count // sum(sizes), count - 1)].append(paragraph)
        before += size
    return ["\n\n".join(part) for part in parts if part]


def make_documents(
    name: str, title: str, author: str, chapters: list[tuple[str, list[str]]]
) -> Iterator[dict[str, str]]:
    """One row a document, named after book, chapter and part."""
    for number, (heading, paragraphs) in enumerate(chapters, start=1):
        parts = split_parts(paragraphs)
        for part, text in enumerate(parts, start=1):
            full_title = ", ".join([title, heading] if heading else [title])
            if len(parts) > 1:
                full_title += f" ({part} of {len(parts)})"
            yield {"id": f"{name}-{number:02d}-{part}", "title": full_title, "author": author, "text": text}


def make_english(corpora: Path) -> list[dict[str, str]]:
    rows = {row["title"]: row for path in sorted(corpora.glob("books_en-*.jsonl.gz")) for row in read_rows(path)}
    documents: list[dict[str, str]] = []
    for book in ENGLISH:
        row = rows[book.title]
        name = re.sub(r"[^a-z]+", "-", book.title.lower())
        documents += make_documents(name, book.title, row["author"], split_chapters(row["text"], book))
    return documents


def make_chinese(corpora: Path) -> list[dict[str, str]]:
    rows = list(read_rows(corpora / "zh_novels-00.jsonl.gz"))
    documents: list[dict[str, str]] = []
    for title, wanted in CHINESE.items():
        book = [row for row in rows if row["book"] == title]
        chapters = []
        for number in wanted:
            heading = re.sub(r"\s+", " ", book[number + 1]["chapter"])
            paragraphs = [re.sub(r"[ \t\u3000]+", " ", line).strip() for line in book[number]["text"].split("\n")]
            # in the first chapters the heading stands in the text as well
            chapters.append((heading, [line for line in paragraphs if line and line != heading]))
        documents += make_documents(title, title, book[0]["author"], chapters)
    return documents


def pack(documents: list[dict[str, str]]) -> bytes:
    """JSON lines, gzip-compressed without a time stamp."""
    lines = "".join(json.dumps(document, ensure_ascii=False) + "\n" for document in documents)
    return gzip.compress(lines.encode("utf-8"), compresslevel=9, mtime=0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="?", default=os.environ.get("BERTSMITH_SHARED_DATA"), help="folder of real data")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the text that ships differs")
    arguments = parser.parse_args()
    if arguments.data is None:
        parser.error("name the folder of real data, or set BERTSMITH_SHARED_DATA")
    corpora = Path(arguments.data) / "corpora"
    differ = False
    for name, documents in (("english", make_english(corpora)), ("chinese", make_chinese(corpora))):
        path = DEMO_TEXT / f"{name}.jsonl.gz"
        size = sum(len(document["text"].encode("utf-8")) for document in documents)
        print(f"{name}: {len(documents)} documents, {size:,} bytes of text")
        if arguments.check:
            # compared unpacked: another zlib may pack the same text otherwise
            differ |= gzip.decompress(pack(documents)) != gzip.decompress(path.read_bytes())
        else:
            path.write_bytes(pack(documents))
    if differ:
        print("the text that ships differs from the sources", file=sys.stderr)
    return int(differ)


if __name__ == "__main__":
    sys.exit(main())
