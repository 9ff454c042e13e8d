"""Rows out in four formats: what goes in comes out, in chunks of any kind, complete or absent."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.inference.row_writer import ENDINGS, find_ending, open_row_writer

ROWS: list[dict[str, Any]] = [
    {"label": 'é, "x"', "scores": {"a": 0.25, "b": 0.75}, "tags": [], "null": None, "n": 3},
    {"label": "two\nlines", "scores": {"a": 1e-20, "b": 1.0}, "tags": ["B-x", "O"], "null": None, "n": -1},
    {"label": "", "scores": {"a": 0.0, "b": 1.0}, "tags": ["中\t"], "null": None, "n": 0},
]


def write(path: Path, *chunks: list[dict[str, Any]]) -> Path:
    with open_row_writer(path) as writer:
        for chunk in chunks:
            writer.write(chunk)
    return path


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file, cells of .csv and .tsv as texts."""
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    if path.suffix == ".csv":
        with path.open(encoding="utf-8", newline="") as file:
            return list(csv.DictReader(file))
    lines = path.read_text("utf-8").split("\n")
    assert lines.pop() == ""
    if path.suffix == ".tsv":
        return [dict(zip(lines[0].split("\t"), line.split("\t"), strict=True)) for line in lines[1:]]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("chunks", [1, 3], ids=["one chunk", "a row a chunk"])
@pytest.mark.parametrize("ending", ENDINGS)
def test_rows_come_back(tmp_path: Path, ending: str, chunks: int) -> None:
    """Lists that are empty in the first chunk of a .parquet are lists of texts all the same."""
    parts = [ROWS] if chunks == 1 else [[row] for row in ROWS]
    found = read(write(tmp_path / f"out{ending}", *parts, []))
    if ending in (".jsonl", ".parquet"):
        assert found == ROWS
        return
    assert [json.loads(row["scores"]) for row in found] == [row["scores"] for row in ROWS]
    assert [json.loads(row["tags"]) for row in found] == [row["tags"] for row in ROWS]
    assert [row["n"] for row in found] == ["3", "-1", "0"]
    assert [row["null"] for row in found] == ["", "", ""]
    labels = [row["label"] for row in found]
    assert labels == ([row["label"] for row in ROWS] if ending == ".csv" else ['é, "x"', "two lines", ""])


@settings(max_examples=50)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=5), min_size=1, max_size=5))
def test_any_text_is_one_cell(tmp_path_factory: pytest.TempPathFactory, texts: list[str]) -> None:
    folder = tmp_path_factory.mktemp("rows")
    rows = [{"text": text, "more": 1} for text in texts]
    for ending in ENDINGS:
        found = read(write(folder / f"out{ending}", rows))
        assert len(found) == len(texts)
        if ending != ".tsv":  # which has no way to write a tab
            assert [row["text"] for row in found] == texts


def test_no_rows(tmp_path: Path) -> None:
    for ending in ENDINGS:
        path = write(tmp_path / f"out{ending}", [])
        assert path.is_file()
        assert pq.read_table(path).num_rows == 0 if ending == ".parquet" else path.read_bytes() == b""


@pytest.mark.parametrize("ending", ENDINGS)
def test_columns_are_known_before_rows(tmp_path: Path, ending: str) -> None:
    """No row comes, or the first ones hold null where a number is expected."""

    def write_some(rows: list[dict[str, Any]]) -> Path:
        with open_row_writer(tmp_path / f"out{ending}") as writer:
            writer.expect({"pll": 0.0, "tags": [""]})
            for row in rows:
                writer.write([row])
        return tmp_path / f"out{ending}"

    path = write_some([])
    if ending == ".parquet":
        assert pq.read_table(path).schema.names == ["pll", "tags"]
        assert pq.read_table(path).num_rows == 0
    else:
        assert path.read_text() == {".jsonl": "", ".csv": "pll,tags\n", ".tsv": "pll\ttags\n"}[ending]
    found = read(write_some([{"pll": None, "tags": []}, {"pll": -1.5, "tags": ["O"]}]))
    assert [row["pll"] for row in found] == ([None, -1.5] if ending in (".jsonl", ".parquet") else ["", "-1.5"])


def test_endings(tmp_path: Path) -> None:
    assert [find_ending(Path(name)) for name in ("a", "b.CSV", "c.x.tsv")] == [".jsonl", ".csv", ".tsv"]
    assert read(write(tmp_path / "plain", [{"a": 1}]).rename(tmp_path / "plain.jsonl")) == [{"a": 1}]
    with pytest.raises(UserError, match=r"out\.txt: an output ends in \.jsonl, \.csv, \.tsv, \.parquet, not in \.txt"):
        write(tmp_path / "out.txt")


@pytest.mark.parametrize("ending", ENDINGS)
def test_complete_or_absent(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"out{ending}"
    path.write_text("before")

    def fail() -> None:
        with open_row_writer(path) as writer:
            writer.write(ROWS)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert path.read_text() == "before"
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_csv_is_read_by_the_books(tmp_path: Path) -> None:
    text = write(tmp_path / "out.csv", [{"a": 'say "x"', "b": "1,2"}, {"a": "\r", "b": "\n"}]).read_bytes().decode()
    assert text == 'a,b\n"say ""x""","1,2"\n"\r","\n"\n'
    assert list(csv.reader(io.StringIO(text, newline=""))) == [["a", "b"], ['say "x"', "1,2"], ["\r", "\n"]]
