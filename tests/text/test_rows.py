"""A file of texts gives one text a row, whatever its format; a row without a text is an error with its line."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from made_files import write

from bertsmith.errors import UserError
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.rows import read_rows, read_texts

TEXTS = ["first é 中", 'a "quote", a comma', "NA", "01"]


def write_rows(path: Path, texts: list[str] = TEXTS) -> Path:
    """`texts` in the format that the name's ending says."""
    suffix = path.name.partition(".")[2]
    if suffix == "parquet":
        pq.write_table(pa.table({"id": range(len(texts)), "text": texts}), path)
        return path
    rows = {
        "txt": texts,
        "jsonl": [json.dumps({"text": text}) for text in texts],
        "csv": ["id,text", *(f'{n},"{text.replace(chr(34), chr(34) * 2)}"' for n, text in enumerate(texts))],
        "tsv": ["id\ttext", *(f"{n}\t{text}" for n, text in enumerate(texts))],
    }[suffix.removesuffix(".gz")]
    data = ("\n".join(rows) + "\n").encode()
    return write(path, gzip.compress(data) if suffix.endswith(".gz") else data)


@pytest.mark.parametrize(
    ("name", "first"), [("x.txt", 1), ("x.jsonl", 1), ("x.csv", 2), ("x.tsv", 2), ("x.parquet", 1), ("x.jsonl.gz", 1)]
)
def test_every_format_gives_the_same_texts(name: str, first: int, tmp_path: Path) -> None:
    path = write_rows(tmp_path / name)
    assert list(read_rows(str(path), ReadOptions())) == list(enumerate(TEXTS, first))
    texts, places = read_texts(str(path))
    assert texts == TEXTS
    assert places == [f"{path}:{line}" for line in range(first, first + len(TEXTS))]


def test_line_ends_and_byte_order_mark_are_not_text(tmp_path: Path) -> None:
    path = write(tmp_path / "x.txt", "\ufeffone\r\ntwo\u2028three\r\n\r\nfour".encode())
    assert read_texts(str(path))[0] == ["one", "two\u2028three", "", "four"]


def test_another_column_and_encoding(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "Satz\nschön\n".encode("latin-1"))
    assert read_texts(str(path), "Satz", "latin-1")[0] == ["schön"]


def test_invalid_bytes_are_replaced_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.txt", b"caf\xe9\nplain\n")
    assert read_texts(str(path))[0] == ["caf\ufffd", "plain"]
    assert f"1 bytes are not utf-8, first at {path}:1:3" in capsys.readouterr().err
    report = ReadReport()
    assert len(list(read_rows(str(path), ReadOptions(), report))) == 2
    assert report.invalid_bytes == 1


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.jsonl", '{"text": "a"}\n{broken\n', "x.jsonl:2: broken JSON; every row must hold a text"),
        ("x.jsonl", '{"text": "a"}\n\n{"text": null}\n', "x.jsonl:3: text is null"),
        ("x.jsonl", '{"text": "a"}\n{"other": "b"}\n', "x.jsonl:2: no text column"),
        ("x.jsonl", '{"text": "a"}\n[1]\n', "x.jsonl:2: not a JSON object"),
        ("x.jsonl", '{"text": "a"}\n{"text": "b", "text": "b"}\n', "x.jsonl:2: 'text': a key given twice"),
        ("x.csv", "id,text\n1,a\n2,b,c\n", "x.csv:3: not as many cells"),
        ("x.csv", "id,body\n1,a\n", "no column 'text'; there are 'id', 'body'"),
        ("x.txt", "", "x.txt: empty file"),
        ("x.csv", "", "x.csv: empty file"),
        ("x.txt", '<doc id="1" url="x" title="y">\ny\n\ntext\n</doc>\n', "is in wikiextractor's format"),
    ],
)
def test_a_row_without_a_text_is_an_error(name: str, content: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_texts(str(write(tmp_path / name, content)))
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.txt", "a\n\nb\n"),
        ("x.csv", "id,text\n1,a\n2,\n3,b\n"),
        ("x.tsv", "id\ttext\n1\ta\n2\t\n3\tb\n"),
        ("x.jsonl", '{"text": "a"}\n{"text": ""}\n{"text": "b"}\n'),
    ],
)
def test_an_empty_text_is_a_text(name: str, content: str, tmp_path: Path) -> None:
    """In the millionth row it must not end a command that has worked for an hour."""
    assert read_texts(str(write(tmp_path / name, content)))[0] == ["a", "", "b"]


def test_blank_lines_between_json_lines_are_nothing(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "a"}\n\n \n{"text": "b"}\n\n')
    assert list(read_rows(str(path), ReadOptions())) == [(1, "a"), (4, "b")]
