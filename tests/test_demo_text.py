"""The demo text is what PROVENANCE.md says, is fit to learn from, and can be made again from its sources."""

import gzip
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bertsmith.demo_text import demo_text_paths

Row = dict[str, str]


@pytest.fixture(scope="module")
def rows() -> dict[str, list[Row]]:
    """File name → its rows."""
    return {
        Path(path).name: [json.loads(line) for line in gzip.decompress(Path(path).read_bytes()).splitlines()]
        for path in demo_text_paths()
    }


@pytest.fixture(scope="module")
def provenance() -> str:
    return (Path(demo_text_paths()[0]).parent / "PROVENANCE.md").read_text(encoding="utf-8")


def test_provenance_states_the_sizes(rows: dict[str, list[Row]], provenance: str) -> None:
    stated = re.findall(r"^\| `(\S+)` \| (\d+) \| ([\d,]+) bytes \|$", provenance, flags=re.MULTILINE)
    found = [
        (name, str(len(documents)), f"{sum(len(row['text'].encode()) for row in documents):,}")
        for name, documents in rows.items()
    ]
    assert sorted(stated) == sorted(found)
    assert sorted(rows) == ["chinese.jsonl.gz", "english.jsonl.gz"]


def test_provenance_names_every_book_and_its_author(rows: dict[str, list[Row]], provenance: str) -> None:
    counts: dict[str, int] = {}
    for row in (row for documents in rows.values() for row in documents):
        book = re.split(r", | \(\d", row["title"])[0]
        counts[book] = counts.get(book, 0) + 1
        assert row["author"] in provenance
    table = re.findall(r"^\| (\S[^|(]*?) (?:\([^|]*\) )?\|.*\| (\d+) \|$", provenance, flags=re.MULTILINE)
    assert {book: int(count) for book, count in table if not book.startswith("`")} == counts


def test_documents_are_fit_for_sentence_pairs(rows: dict[str, list[Row]]) -> None:
    documents = [row for rows_of_file in rows.values() for row in rows_of_file]
    assert len({row["id"] for row in documents}) == len({row["text"] for row in documents}) == len(documents) > 200
    for row in documents:
        assert row["text"] == row["text"].strip()
        assert len(re.findall(r"[.!?。！？]", row["text"])) >= 10, row["id"]
        assert len(row["text"].encode()) < 10_000
        assert re.search(r"(?i)^ *(chapter|part) [ivx\d]+|[\x80-\x9f\ufeff_]", row["text"]) is None, row["id"]


def test_chinese_is_chinese_and_english_is_english(rows: dict[str, list[Row]]) -> None:
    for name, low, high in (("chinese.jsonl.gz", 0.75, 1.0), ("english.jsonl.gz", 0.0, 0.0)):
        text = "".join(row["text"] for row in rows[name])
        assert low <= len(re.findall(r"[\u4e00-\u9fff]", text)) / len(text) <= high


@pytest.mark.shared_data
def test_demo_text_is_made_again_from_its_sources(shared_data: Path) -> None:
    script = Path(__file__).resolve().parents[1] / "benchmarks" / "make_demo_text.py"
    command = [sys.executable, str(script), str(shared_data), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert (done.returncode, done.stderr) == (0, "")
