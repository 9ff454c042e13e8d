"""Rows: .jsonl, .csv, .tsv, .parquet. What is read, what is counted, what is refused."""

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_files import COMPRESS, read, read_texts, write

from bertsmith.errors import UserError
from bertsmith.text.readers import ReadOptions, ReadReport, read_documents

ODD_CELLS = [
    "NA",
    "null",
    "None",
    "nan",
    "01",
    "-1",
    "true",
    'a "quoted" word',
    "tab\tinside",
    "two\nlines",
    "中，文",
    "'",
]


def to_jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": i, "text": t}) + "\n" for i, t in enumerate(texts)).encode()


def to_csv(texts: list[str]) -> bytes:
    out = io.StringIO(newline="")
    writer = csv.writer(out)
    writer.writerow(["id", "text"])
    writer.writerows([i, t] for i, t in enumerate(texts))
    return out.getvalue().encode()


def to_parquet(texts: list[str]) -> bytes:
    out = io.BytesIO()
    pq.write_table(pa.table({"id": range(len(texts)), "text": pa.array(texts, pa.string())}), out)
    return out.getvalue()


@pytest.mark.parametrize(("name", "make"), [("x.jsonl", to_jsonl), ("x.csv", to_csv), ("x.parquet", to_parquet)])
def test_cells_are_text_as_they_stand(tmp_path: Path, name: str, make: Callable[[list[str]], bytes]) -> None:
    assert read_texts(write(tmp_path / name, make(ODD_CELLS))) == ODD_CELLS


@settings(max_examples=80)
@given(
    texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=8),
    layout=st.sampled_from(["jsonl", "csv", "parquet"]),
    suffix=st.sampled_from(sorted(COMPRESS)),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
)
def test_any_text_in_any_layout_comes_back(
    tmp_path: Path, texts: list[str], layout: str, suffix: str, mark: bytes
) -> None:
    """Characters in = characters out + rows counted as empty."""
    padding = "enough letters that the file is no heap of control characters " * 12
    texts = [*texts, padding]
    if layout == "parquet":
        path = write(tmp_path / "x", to_parquet(texts))
    else:
        data = {"jsonl": to_jsonl, "csv": to_csv}[layout](texts)
        path = write(tmp_path / f"x.{layout}{suffix}", COMPRESS[suffix](mark + data))
    documents, report = read(path)
    expected = [t.replace("\r\n", "\n").replace("\r", "\n") for t in texts]
    assert [d.text for d in documents] == [t for t in expected if t and not t.isspace()]
    assert report.documents + sum(report.skipped.values()) == len(texts)
    assert report.characters == sum(len(d.text) for d in documents)
    assert not report.invalid_bytes


def test_broken_json_lines_are_counted_with_line_and_reason(tmp_path: Path) -> None:
    lines = [
        '{"text": "one"}',
        "",
        '{"text": ""}',
        '{"text": null}',
        '{"txt": "wrong key"}',
        '{"text": "broken',
        '["no", "object"]',
        '{"text": 5}',
        "[" * 100_000,
        '{"text": "n", "big": ' + "9" * 5000 + "}",
        '\ufeff{"text": "joined files"}',
        '{"text": "raw\ttab"}\r',
        '{"text":"no newline at end \\u0000 \\ud83d\\ude00"}',
    ]
    path = write(tmp_path / "x.jsonl", "\n".join(lines))
    documents, report = read(path)
    assert [(d.line, d.text) for d in documents] == [
        (1, "one"),
        (11, "joined files"),
        (12, "raw\ttab"),
        (13, "no newline at end \0 😀"),
    ]
    assert report.skipped == {
        "blank line": 1,
        "empty document": 1,
        "text is null": 1,
        "no text column": 1,
        "broken JSON": 3,
        "not a JSON object": 1,
        "text is not a string": 1,
    }
    assert report.skipped_places[:3] == [
        f"{path}:2: blank line",
        f"{path}:3: empty document",
        f"{path}:4: text is null",
    ]
    assert report.control_characters == 1


def test_json_files_that_cannot_work_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"no line has the key 'text'; there are 'id', 'body'; choose one with --text-c"
    ):
        read(write(tmp_path / "a.jsonl", '{"id": 1, "body": "x"}\n{"id": 2}\n'))
    assert read_texts(tmp_path / "a.jsonl", text_column="body") == ["x"]
    with pytest.raises(UserError, match=r"choose one with --text-column; did you mean 'body'\?$"):
        read(tmp_path / "a.jsonl", text_column="Bodi")
    with pytest.raises(UserError, match=r"no line is a JSON object \(line 1 holds list\)"):
        read(write(tmp_path / "b.json", '[{"text": "x"}]'))
    with pytest.raises(UserError, match="no line is a JSON object"):
        read(write(tmp_path / "c.json", '{\n  "text":\n "x"\n}\n'))
    # a key that no line has is told from a key whose values are all null
    assert read(write(tmp_path / "d.jsonl", '{"text": null}'))[1].skipped == {"text is null": 1}


def test_a_key_given_twice_is_counted_with_line_and_key(tmp_path: Path) -> None:
    lines = ['{"text": "a"}', '{"text": "b", "id": 1, "text": "c"}', '{"text": "d", "more": [{"url": 1, "url": 1}]}']
    path = write(tmp_path / "x.jsonl", "\n".join(lines))
    documents, report = read(path)
    assert [document.text for document in documents] == ["a"]
    assert report.skipped == {"a key given twice": 2}
    assert report.skipped_places == [f"{path}:2: 'text': a key given twice", f"{path}:3: 'url': a key given twice"]
    with pytest.raises(UserError, match=r"no line is a JSON object \(line 1: the key 'text' is given twice\)"):
        read(write(tmp_path / "y.jsonl", lines[1]))


def test_half_characters_in_json_are_replaced_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "half \\ud83d smile \\ude00"}\n')
    documents, report = read(path)
    assert documents[0].text == "half \ufffd smile \ufffd"
    documents[0].text.encode()
    assert report.invalid_bytes == 12
    assert report.invalid_places == [f"{path}:1"]
    with pytest.raises(UserError, match=r"x.jsonl:1: \\ud83d is half a character"):
        read(path, on_invalid="error")


def test_the_inner_name_gives_the_layout_and_content_where_there_is_none(tmp_path: Path) -> None:
    for name in ("x.jsonl.gz", "x.ndjson", "x.json.xz", "part-00000", "x.jsonl.gz.bak"):
        assert read_texts(write(tmp_path / name, COMPRESS[".gz"](to_jsonl(["one", "two"])))) == ["one", "two"]
    assert len(read_texts(write(tmp_path / "x.txt", to_jsonl(["one", "two"])))) == 1


def test_a_json_line_of_many_megabytes(tmp_path: Path) -> None:
    text = "word " * 2_000_000
    path = write(tmp_path / "x.jsonl.gz", COMPRESS[".gz"](to_jsonl(["a", text, "b"])))
    assert read_texts(path) == ["a", text, "b"]


def test_csv_by_rfc_4180(tmp_path: Path) -> None:
    data = '\ufeffid,text\r\n1,"two\r\nlines, ""quoted"""\r\n2,plain\r\n\r\n3,"x"y\r\n4,one,too many\r\n5\r\n6,last'
    path = write(tmp_path / "x.csv", data)
    documents, report = read(path)
    assert [(d.line, d.text) for d in documents] == [(2, 'two\nlines, "quoted"'), (4, "plain"), (9, "last")]
    assert report.skipped == {"blank line": 1, "broken CSV row": 1, "not as many cells as the header (2)": 2}
    assert [place.split(":")[1] for place in report.skipped_places] == ["5", "6", "7", "8"]


def test_csv_refusals(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="line 3: a quote opened in this row is never closed"):
        read(write(tmp_path / "a.csv", 'text\nfine\n"open\nmore\nmore'))
    with pytest.raises(UserError, match="no column 'text'; there are 'id;body'; choose one with --text-column"):
        read(write(tmp_path / "b.csv", "id;body\n1;x\n"))
    with pytest.raises(UserError, match="2 columns are named 'text'"):
        read(write(tmp_path / "c.csv", "text,text\n1,x\n"))
    assert read(write(tmp_path / "d.csv", ""))[1].skipped == {"empty file": 1}


def test_a_csv_cell_over_the_modules_own_limit(tmp_path: Path) -> None:
    text = "long " * 100_000
    assert read_texts(write(tmp_path / "x.csv", to_csv([text, "b\0c"]))) == [text, "b\0c"]


def test_tsv_has_no_quoting(tmp_path: Path) -> None:
    rows = ['"lone quote', 'a " b', '"both"', "NA", " spaces "]
    data = "id\ttext\n" + "".join(f"{i}\t{t}\n" for i, t in enumerate(rows)) + "5\n6\ta\tb\n\n"
    documents, report = read(write(tmp_path / "x.tsv", data))
    assert [d.text for d in documents] == rows
    assert report.skipped == {"not as many cells as the header (2)": 2, "blank line": 1}


@pytest.mark.parametrize("compression", ["NONE", "SNAPPY", "GZIP", "BROTLI", "ZSTD", "LZ4"])
def test_parquet_compressions_and_row_groups(tmp_path: Path, compression: str) -> None:
    texts = [f"text {i} 中" for i in range(1000)]
    path = tmp_path / "no_suffix"
    pq.write_table(pa.table({"text": texts}), path, compression=compression, row_group_size=300)
    documents, report = read(path)
    assert [(d.line, d.text) for d in documents] == list(enumerate(texts, 1))
    assert report.bytes == sum(len(t.encode()) for t in texts)


@pytest.mark.parametrize(
    "kind",
    [
        pa.string(),
        pa.large_string(),
        pa.string_view(),
        pa.dictionary(pa.int32(), pa.string()),
        pa.binary(),
        pa.binary_view(),
    ],
    ids=str,
)
def test_parquet_types_and_nulls(tmp_path: Path, kind: pa.DataType) -> None:
    values = ["one", None, "", "NA", "one", "zwö\r\nlf"]
    if "binary" in str(kind):
        column = pa.array([v and v.encode() for v in values], kind)
    else:
        column = pa.array(values).cast(kind)
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": range(6), "text": column}), path)
    documents, report = read(path)
    assert [(d.line, d.text) for d in documents] == [(1, "one"), (4, "NA"), (5, "one"), (6, "zwö\nlf")]
    assert report.skipped == {"text is null": 1, "empty document": 1}


def test_parquet_bad_bytes_and_encodings(tmp_path: Path) -> None:
    broken = pa.Array.from_buffers(pa.string(), 2, pa.array([b"good", b"b\xffd"]).buffers())
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": broken}), path)
    documents, report = read(path)
    assert [d.text for d in documents] == ["good", "b\ufffdd"]
    assert report.invalid_bytes == 1
    assert report.invalid_places == [f"{path}:2:1"]
    with pytest.raises(UserError, match="line 2, byte 1"):
        read(path, on_invalid="error")
    pq.write_table(pa.table({"text": ["déjà".encode("latin-1")]}), path)
    assert read_texts(path, encoding="latin-1") == ["déjà"]


def test_parquet_refusals(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": [1], "body": ["x"], "text": pa.array([[1]])}), path)
    with pytest.raises(UserError, match=r"column 'text' holds list<.*>, not text"):
        read(path)
    with pytest.raises(
        UserError, match=r"no column 'words'; there are 'id', 'body', 'text'; choose one with --text-column$"
    ):
        read(path, text_column="words")
    whole = path.read_bytes()
    with pytest.raises(UserError, match="damaged Parquet"):
        read(write(path, whole[:-9]), text_column="body")
    with pytest.raises(UserError, match="inside gzip; decompress it first"):
        read(write(path, COMPRESS[".gz"](whole)))
    with pytest.raises(UserError, match=r"named \.parquet, but it is no Parquet file"):
        read(write(path, "hello"))


def test_parquet_progress_reaches_the_files_size(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(
        pa.table({"text": [str(i) * 200 for i in range(5000)]}), path, row_group_size=700, compression="none"
    )
    told: list[int] = []
    list(read_documents(str(path), ReadOptions(), ReadReport(), told.append))
    assert sum(told) == path.stat().st_size
    assert len(told) > 5
