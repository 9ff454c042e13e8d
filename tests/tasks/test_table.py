"""The user's own tables: rows out = rows in, cells as typed, and every unusable row named by file, line and column."""

import csv
import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.tasks.examples import TaggedExample, TextExample
from bertsmith.tasks.table import read_table, read_text_examples
from bertsmith.tasks.tagged_table import read_tagged_examples_table
from bertsmith.text.documents import ReadReport

ODD = ["NA", "null", "None", "nan", "01", "-1", "?", "true", '"', 'a "b" c', "'", " x ", "1e5", "中，文", "a,b;c"]


def write(path: Path, data: bytes | str) -> str:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(path)


def write_table(path: Path, columns: dict[str, list[Any]]) -> str:
    """A table in the format that the name's ending says."""
    kind = path.name.split(".")[1]
    rows = list(zip(*columns.values(), strict=True))
    if kind == "parquet":
        pq.write_table(pa.table(columns), path)
        return str(path)
    if kind == "jsonl":
        text = "".join(json.dumps(dict(zip(columns, row, strict=True))) + "\n" for row in rows)
    elif kind == "csv":
        out = io.StringIO(newline="")
        csv.writer(out, quoting=csv.QUOTE_ALL, lineterminator="\n").writerows([list(columns), *rows])
        text = out.getvalue()
    else:
        text = "".join("\t".join(row) + "\n" for row in [tuple(columns), *rows])
    return write(path, gzip.compress(text.encode()) if path.name.endswith(".gz") else text)


def refusal(path: str, kind: str = "classify", **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(read_text_examples(path, kind, **{"labelled": True, **options}))
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "first"), [("x.csv", 2), ("x.tsv", 2), ("x.jsonl", 1), ("x.parquet", 1), ("x.csv.gz", 2), ("x.tsv.gz", 2)]
)
def test_every_format_gives_the_same_examples(name: str, first: int, tmp_path: Path) -> None:
    path = write_table(tmp_path / name, {"n": ["9"] * len(ODD), "label": ODD[::-1], "text": ODD})
    assert list(read_text_examples(path, "classify", labelled=True)) == [
        TextExample(f"{path}:{first + index}", str(index), text, None, label)
        for index, (text, label) in enumerate(zip(ODD, ODD[::-1], strict=True))
    ]
    assert [row.cells for row in read_table(path, ["text"], ["nowhere"])] == [{"text": text} for text in ODD]


CELLS = st.text(
    st.characters(exclude_categories=["Cs", "Cc"]) | st.sampled_from("\r\"\u2028\x85\x1c,;'\\"), max_size=20
)


@settings(max_examples=80)
@given(
    rows=st.lists(st.tuples(CELLS, CELLS), max_size=8),
    name=st.sampled_from(["x.csv", "x.tsv", "x.jsonl", "x.parquet"]),
    mark=st.booleans(),
    line_end=st.sampled_from(["\n", "\r\n"]),
)
def test_any_cells_come_back_row_for_row(
    tmp_path: Path, rows: list[tuple[str, str]], name: str, mark: bool, line_end: str
) -> None:
    texts, others = [a for a, _ in rows], [b for _, b in rows]
    kind = name[2:]
    if kind == "tsv":
        others = [text.rstrip("\r") for text in others]  # at the end of a row it would be the line end's
    columns: dict[str, Any] = {"text": texts, "b": others}
    if kind == "parquet":  # an empty list has no type of its own
        columns = {key: pa.array(value, pa.string()) for key, value in columns.items()}
    path = write_table(tmp_path / name, columns)
    if kind != "parquet":
        data = Path(path).read_bytes().replace(b"\n", line_end.encode())
        write(Path(path), b"\xef\xbb\xbf" * mark + data if data else "\n")
    if kind == "csv":  # inside quotes too, the two characters of Windows are one line end
        texts = [text.replace("\r\n", "\n") for text in texts]
    if kind == "jsonl" and not rows:
        return
    found = list(read_text_examples(path, "classify", allow_empty=True))
    assert [example.text for example in found] == texts
    assert [example.id for example in found] == [str(index) for index in range(len(rows))]
    assert [row.cells["b"] for row in read_table(path, ["b"])] == others


@settings(max_examples=40)
@given(texts=st.lists(st.sampled_from(["", "a", '"', "\u2028", "b\rc"]), min_size=1, max_size=8))
def test_a_single_column_keeps_its_empty_cells(tmp_path: Path, texts: list[str]) -> None:
    texts.append("end")  # blank lines at the end are no rows
    path = write(tmp_path / "x.tsv", "text\n" + "\n".join(texts) + "\n\n\n")
    found = list(read_text_examples(path, "classify", allow_empty=True))
    assert [(example.place, example.text) for example in found] == [
        (f"{path}:{line}", text) for line, text in enumerate(texts, 2)
    ]


def test_quoted_line_ends_and_lone_quotes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", 'text,label\n"two\nlines, one ""cell""",a\nplain,b\n')
    assert [(e.place[-1], e.text) for e in read_text_examples(path, "classify")] == [
        ("2", 'two\nlines, one "cell"'),
        ("4", "plain"),
    ]
    path = write(tmp_path / "x.tsv", 'text\tlabel\n"lone\t1\n"\t2\nb "\t3\n""\t4\n')
    assert [e.text for e in read_text_examples(path, "classify")] == ['"lone', '"', 'b "', '""']


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "latin-1"])
def test_encodings_and_byte_order_marks(encoding: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "text,label\r\nschön und gut,é\r\n".encode(encoding))
    found = list(read_text_examples(path, "classify", labelled=True, encoding=encoding))
    assert [(e.text, e.label) for e in found] == [("schön und gut", "é")]


def test_the_line_ends_of_old_macintoshes(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", "text\tlabel\rone\ta\rtwo\tb\r")
    assert [(e.text, e.label) for e in read_text_examples(path, "classify")] == [("one", "a"), ("two", "b")]


def test_invalid_bytes_are_counted_or_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "x.tsv", b"text\tlabel\ncaf\xe9\rx\ta\n")
    report = ReadReport()
    assert [e.text for e in read_text_examples(path, "classify", report=report)] == ["caf\ufffd\rx"]
    assert report.invalid_bytes == 1
    assert report.invalid_places == [f"{path}:2:14"]
    assert not capsys.readouterr().err
    list(read_text_examples(path, "classify"))
    assert f"1 bytes are not utf-8, first at {path}:2:14" in capsys.readouterr().err


def test_half_characters_of_json_are_replaced_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "a \\ud83d b", "label": ["\\udc00"], "x": "\\ud83d\\ude00"}\n')
    report = ReadReport()
    [row] = read_table(path, ["text", "label", "x"], report=report)
    assert row.cells == {"text": "a \ufffd b", "label": ["\ufffd"], "x": "😀"}
    assert report.invalid_bytes == 12


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", "text,label\na,b\nc\n", "x.csv:3: 1 cell where the first row names 2 columns; a comma is missing"),
        ("x.csv", "text,label\na,b\n\nc, d, e\n", "x.csv:4: 3 cells where the first row names 2 columns; put quotes"),
        ("x.tsv", "text\tlabel\na\n", "x.tsv:2: 1 cell where the first row names 2 columns; a tab is missing"),
        ("x.tsv", "text\tlabel\na\tb\tc\n", "x.tsv:2: 3 cells where the first row names 2 columns; take out stray"),
        ("x.csv", 'text,label\n"a" b,c\n', "x.csv:2: broken CSV row"),
        ("x.csv", 'text,label\n"a,b\nc,d\n', "x.csv: line 2: a quote opened in this row is never closed"),
        ("x.csv", "text,label,text\na,b,c\n", "x.csv:1: 2 columns are named 'text'"),
        ("x.csv", "Text,label\na,b\n", "x.csv:1: no column 'text' in the first row, which must name the columns; "
                                       "there are 'Text', 'label'; name yours with --text-column, --text-pair-column "
                                       "or --label-column; did you mean 'Text'?"),
        ("x.tsv", "texts\tlable\na\tb\n", "--label-column; did you mean 'texts' for 'text'?; did you mean 'lable' for "
                                               "'label'?"),
        ("x.csv", "body,class\na,b\n", "no columns 'text', 'label' in the first row"),
        ("x.csv", "text;label\na;b\n", "x.csv:1: looks separated by ';', and .csv files are split at commas: save it "
                                       "with commas, or as .tsv"),
        ("x.csv", "Customer ID;Comment\na;b\n", "x.csv:1: looks separated by ';'"),
        ("x.csv", "ID, own;text;label\na;b;c\n", "x.csv:1: looks separated by ';'"),
        ("x.tsv", "text, label\na, b\n", "looks separated by ',', and .tsv files are split at tabs: save it with tabs"),
        ("x.csv", '"text,label"\na\n', "there are 'text,label'"),
        ("x.tsv", "A cat; or, a dog\nb\n", "no columns 'text', 'label' in the first row"),
        ("x.tsv", "a long text, no header " * 9 + "\tpos\n", "'a long text, no header a long text, no h…', 'pos'"),
        ("x.jsonl", '{"text": "a", "label": "b"}\n{"text": \n', "x.jsonl:2: broken JSON; every line must be a row"),
        ("x.jsonl", '{"text": "a", "label": "b"}\n["a"]\n', "x.jsonl:2: not a JSON object"),
        ("x.jsonl", '{"text": "a", "label": "b"}\n{"text": "a", "label": "b", "label": "c"}\n',
         "x.jsonl:2: 'label': a key given twice; every line must be a row; mend it"),
        ("x.jsonl", '{"txt": "a", "label": "b"}\n', "x.jsonl:1: no key 'text'; there are 'txt', 'label'"),
        ("x.jsonl", '{"text": "a", "label": "b"}\n{"label": "b"}\n', "x.jsonl:2: no 'text'"),
        ("x.jsonl", '{"text": "a", "label": "b"}\n{"text": "b"}\n', "x.jsonl:2: no 'label'"),
        ("x.jsonl", '{"text": 5, "label": "b"}\n', "x.jsonl:1: column 'text' holds a number, not text"),
        ("x.jsonl", '{"text": null, "label": "b"}\n', "x.jsonl:1: column 'text' is empty"),
        ("x.jsonl", '{"text": "a", "label": null}\n', "x.jsonl:1: column 'label' is empty"),
        ("x.jsonl", '{"text": "a", "label": ["b"]}\n', "x.jsonl:1: column 'label' holds a list, not one label"),
        ("x.tsv", "text\tlabel\na\t\n", "x.tsv:2: column 'label' is empty; every row needs a text and a label"),
        ("x.tsv", "text\tlabel\n \u3000\tb\n", "x.tsv:2: column 'text' is empty"),
        ("x.txt", "a\nb\n", "x.txt: is in text's format; give a .csv, .tsv, .jsonl or .parquet file"),
        ("x.parquet", "text,label\na,b\n", "x.parquet: named .parquet, but it is no Parquet file"),
        ("x.csv", "", "x.csv: empty file"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(name: str, content: str, told: str, tmp_path: Path) -> None:
    assert told in refusal(write(tmp_path / name, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    assert "no such file" in refusal(str(tmp_path / "x.csv"))


def test_parquet_columns_are_checked(tmp_path: Path) -> None:
    path = write_table(tmp_path / "x.parquet", {"text": ["a"], "label": [1], "n": [1]})
    assert "x.parquet:1: no column 'sentence'; there are 'text', 'label', 'n'" in refusal(path, text_column="sentence")
    assert refusal(path, label_column="lable").endswith("--label-column; did you mean 'label'?")
    assert "did you mean" not in refusal(path, text_column="sentence")
    assert "x.parquet:1: column 'n' holds a number, not text" in refusal(path, text_column="n")
    path = write_table(tmp_path / "y.parquet", {"text": ["a", None], "label": [1.0, float("nan")]})
    assert "y.parquet:2: column 'text' is empty" in refusal(path)
    assert "y.parquet:2: column 'label' is empty" in refusal(path, allow_empty=True)


def test_parquet_of_other_types_and_more_than_a_batch(tmp_path: Path) -> None:
    count = 20_000
    texts = [f"text {number} é" for number in range(count)]
    table = pa.table({
        "text": pa.array(texts).dictionary_encode(),
        "label": pa.array([number % 3 for number in range(count)], pa.int8()),
        "bytes": pa.array([text.encode() for text in texts]),
        "list": pa.array([[text, "b"] for text in texts]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "x.parquet", row_group_size=7_000)
    path = str(tmp_path / "x.parquet")
    rows = list(read_table(path, ["bytes", "list"], ["label", "nowhere"]))
    assert [row.line for row in rows] == list(range(1, count + 1))
    assert rows[-1].cells == {"bytes": texts[-1], "list": [texts[-1], "b"], "label": (count - 1) % 3}
    assert [e.label for e in read_text_examples(path, "classify")][:4] == ["0", "1", "2", "0"]
    assert sum(1 for _ in read_table(path, [])) == count


def test_five_rows_are_named_and_the_others_counted(tmp_path: Path) -> None:
    lines = ["text\tlabel", "good\ta", *(f"row {number}\t" for number in range(1_207)), "good\tb"]
    path = write(tmp_path / "x.tsv", "\n".join(lines))
    examples = read_text_examples(path, "classify", labelled=True)
    assert next(examples).text == "good"
    with pytest.raises(UserError) as caught:  # and no example after an unusable row
        next(examples)
    message = str(caught.value)
    assert [f"x.tsv:{line}: column 'label' is empty" in message for line in (3, 7, 8)] == [True, True, False]
    assert "and 1,202 more rows like these; every row needs a text and a label" in message


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "text,label\n" + f"{'a few words ' * 80},a\n" * 12_000)  # 11.5 MB
    examples = read_text_examples(path, "classify", labelled=True)
    next(examples)
    tracemalloc.start()
    assert sum(1 for _ in examples) == 11_999
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20, peak  # two blocks of 1 MiB, their lines, the decoded text


def test_unlabelled_files(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "text\na\nb\n")
    assert [e.label for e in read_text_examples(path, "classify")] == [None, None]
    path = write(tmp_path / "y.csv", "text,label\na,-1\nb,?\nc,\nd,NA\n")
    assert [e.label for e in read_text_examples(path, "classify")] == ["-1", "?", None, "NA"]
    assert [e.label for e in read_text_examples(path, "classify", labelled=False)] == [None] * 4
    assert "y.csv:4: column 'label' is empty" in refusal(path)
    path = write(tmp_path / "z.jsonl", '{"text": "a", "label": 2}\n{"text": "b"}\n{"text": "c", "label": null}\n')
    assert [e.label for e in read_text_examples(path, "classify")] == ["2", None, None]


def test_empty_texts_are_for_prediction_only(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", '{"text": "a"}\n{"text": ""}\n{"text": null}\n')
    assert [e.text for e in read_text_examples(path, "classify", allow_empty=True)] == ["a", "", ""]
    assert "x.jsonl:2: column 'text' is empty; " in refusal(path, labelled=None)
    path = write(tmp_path / "x.tsv", "sentence1\tsentence2\na\t\n")
    assert "x.tsv:2: column 'sentence2' is empty" in refusal(path, "pairs", labelled=False)


@pytest.mark.parametrize(
    ("kind", "header", "options", "expected"),
    [
        ("classify", "text,sentence", {}, ("A", None)),
        ("classify", "sentence,other", {}, ("A", None)),
        ("classify", "other,title", {"text_column": "title"}, ("B", None)),
        ("classify", "text,other", {"pair_column": "other", "text_column": "text"}, ("A", "B")),
        ("pairs", "sentence2,sentence1", {}, ("B", "A")),
        ("pairs", "question,sentence2", {"text_column": "question"}, ("A", "B")),
        ("pairs", "q,a", {"text_column": "a", "pair_column": "q"}, ("B", "A")),
        ("regress", "sentence1,sentence2", {}, ("A", "B")),
        ("regress", "text,sentence2", {}, ("A", None)),
        ("regress", "sentence1,sentence2", {"text_column": "sentence1"}, ("A", None)),
        ("multilabel", "sentence,text", {}, ("B", None)),
    ],
)
def test_columns_are_those_named_or_the_defaults(
    kind: str, header: str, options: dict[str, str], expected: tuple[str, str | None], tmp_path: Path
) -> None:
    path = write(tmp_path / "x.csv", f"{header}\nA,B\n")
    assert [(e.text, e.pair) for e in read_text_examples(path, kind, **options)] == [expected]


def test_another_label_column(tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", "label,text,class\n1,a,x\n")
    assert [e.label for e in read_text_examples(path, "classify", label_column="class", labelled=True)] == ["x"]


def test_json_labels_become_their_json_text(tmp_path: Path) -> None:
    values = ["1", "1.0", "true", '"01"', '"x"', "-1", "9007199254740993"]
    path = write(tmp_path / "x.jsonl", "".join(f'{{"text": "a", "label": {value}}}\n' for value in values))
    found = [e.label for e in read_text_examples(path, "classify", labelled=True)]
    assert found == ["1", "1.0", "true", "01", "x", "-1", "9007199254740993"]


def test_numbers_of_regression(tmp_path: Path) -> None:
    path = write(tmp_path / "x.jsonl", "".join(f'{{"text": "a", "label": {v}}}\n' for v in ("0", "1.5", '" -2e1 "')))
    assert [e.label for e in read_text_examples(path, "regress", labelled=True)] == [0.0, 1.5, -20.0]
    cells = ["1", "nan", "inf", "1_000", "3,5", "five", "0x1", "", "1e999", "٣"]
    path = write(tmp_path / "x.tsv", "text\tlabel\n" + "".join(f"a\t{cell}\n" for cell in cells))
    message = refusal(path, "regress")
    assert "x.tsv:3: column 'label' holds 'nan', not a finite number" in message
    assert "x.tsv:6: column 'label' holds '3,5', not a finite number" in message
    assert "and 4 more rows like these" in message  # the bare 1 is the only number
    path = write(tmp_path / "y.jsonl", '{"text": "a", "label": true}\n')
    assert "y.jsonl:1: column 'label' holds 'True', not a finite number" in refusal(path, "regress")


def test_multilabel_cells(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", "text\tlabels\na\tweather; safety;;weather\nb\t\nc\t;\nd\tNA\n")
    expected = [("weather", "safety"), (), (), ("NA",)]
    assert [e.label for e in read_text_examples(path, "multilabel", labelled=True)] == expected
    path = write(tmp_path / "y.tsv", "text\tlabels\na\tx|y;z\n")
    assert [e.label for e in read_text_examples(path, "multilabel", label_separator="|")] == [("x", "y;z")]
    values = ['["x", 1, "a;b"]', "[]", '"x;y"', "null"]
    path = write(tmp_path / "z.jsonl", "".join(f'{{"text": "a", "labels": {value}}}\n' for value in values))
    assert [e.label for e in read_text_examples(path, "multilabel")] == [("x", "1", "a;b"), (), ("x", "y"), None]
    assert "z.jsonl:4: column 'labels' is empty" in refusal(path, "multilabel")
    path = write(tmp_path / "w.jsonl", '{"text": "a", "labels": {"x": 1}}\n{"text": "a", "labels": [["x"]]}\n')
    assert "w.jsonl:1: column 'labels' holds an object, not a list of labels; " in refusal(path, "multilabel")
    assert "w.jsonl:2: column 'labels' holds a list, not one label" in refusal(path, "multilabel")


def test_an_unknown_kind_is_refused(tmp_path: Path) -> None:
    assert "use one of classify, pairs, regress, multilabel" in refusal(write(tmp_path / "x.csv", "text\na\n"), "ner")


@pytest.mark.parametrize("name", ["x.jsonl", "x.parquet"])
def test_lists_of_words_and_tags(name: str, tmp_path: Path) -> None:
    words, tags = [["Anna", "sings"], [], ["\u200d", ""]], [["B-PER", "O"], [], ["O", "O"]]
    path = write_table(tmp_path / name, {"tokens": words, "tags": tags})
    expected = [
        TaggedExample(f"{path}:{index + 1}", str(index), tuple(w), tuple(t))
        for index, (w, t) in enumerate(zip(words, tags, strict=True))
    ]
    assert list(read_tagged_examples_table(path, labelled=True)) == expected
    assert list(read_tagged_examples_table(path)) == expected
    assert [e.tags for e in read_tagged_examples_table(path, labelled=False)] == [None] * 3
    swapped = read_tagged_examples_table(path, tokens_column="tags", tags_column="tokens", labelled=False)
    assert [e.words for e in swapped] == [tuple(t) for t in tags]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"tokens": ["a", "b"], "tags": ["O"]}', "x.jsonl:1: 2 tokens and 1 tags; "),
        ('{"tokens": "a b", "tags": ["O"]}', "x.jsonl:1: column 'tokens' holds text, not a list"),
        ('{"tokens": ["a"], "tags": [3]}', "x.jsonl:1: column 'tags' item 0 is 3, not text"),
        ('{"tokens": ["a"]}', "x.jsonl:1: no key 'tags'"),
        ('{"tokens": ["a"], "tags": ["O"]}\n{"tokens": ["a"]}', "x.jsonl:2: no 'tags'"),
        ('{"tokens": ["a"], "tags": null}', "x.jsonl:1: column 'tags' holds nothing"),
    ],
)
def test_lists_that_cannot_be_used_are_named(content: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        list(read_tagged_examples_table(write(tmp_path / "x.jsonl", content), labelled=True))
    assert told in str(caught.value)


def test_a_csv_holds_no_lists(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"a \.csv cell holds no list"):
        list(read_tagged_examples_table(write(tmp_path / "x.csv", "tokens,tags\na,O\n")))


def test_chinese_reviews(shared_data: Path) -> None:
    """A real .csv with quoted commas and doubled quotes; its one empty review is named."""
    path = str(shared_data / "tasks/chnsenticorp/ChnSentiCorp_htl_all.csv")
    with open(path, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = list(read_text_examples(path, "classify", text_column="review", labelled=True, allow_empty=True))
    assert [(e.text, e.label) for e in found] == [(row["review"], row["label"]) for row in rows]
    empty = [index + 2 for index, row in enumerate(rows) if not row["review"]]
    assert len(found) == 7766
    assert empty == [6376]
    assert refusal(path, text_column="review").startswith(f"{path}:6376: column 'review' is empty")
