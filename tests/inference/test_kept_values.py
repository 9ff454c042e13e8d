"""Values of columns that are carried along: what each kind of file makes of them, and what it cannot hold."""

import datetime
import decimal
import json
from operator import itemgetter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_files import OUTPUTS, copy, read

from bertsmith.errors import UserError
from bertsmith.inference import kept_columns
from bertsmith.inference.kept_columns import KeptColumns
from bertsmith.inference.row_writer import open_row_writer
from made_tasks import write_rows


@settings(max_examples=40)
@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), min_size=1, max_size=8),
    st.sampled_from([".csv", ".jsonl", ".parquet"]),
    st.sampled_from([".csv", ".jsonl", ".parquet"]),
)
def test_any_text_comes_back(
    tmp_path_factory: pytest.TempPathFactory, texts: list[str], ending: str, output: str
) -> None:
    folder = tmp_path_factory.mktemp("kept")
    source, out = folder / f"in{ending}", folder / f"out{output}"
    with open_row_writer(source) as writer:
        writer.write([{"id": text, "n": number} for number, text in enumerate(texts)])
    copy(source, out, ["id"])
    # a line end inside a cell of a .csv is one however it is spelled
    expected = [text.replace("\r\n", "\n") if ending == ".csv" else text for text in texts]
    assert [row["id"] for row in read(out)] == expected


VALUES = [3, -1, None, 2**60], [0.5, 1.0, None, 2.5], [True, None, False, True], [["a"], [], None, ["b", "é"]]


@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
def test_values_stay_what_they_are(tmp_path: Path, ending: str, output: str) -> None:
    rows = list(zip(*VALUES, [{"x": 1}, {"x": None}, {"x": 2}, None], strict=True))
    source, out = write_rows(tmp_path / f"in{ending}", list("abcde"), rows), tmp_path / f"out{output}"
    copy(source, out, list("abcde"), at_once=1)
    expected = [dict(zip("abcde", row, strict=True)) for row in rows]
    if output in (".jsonl", ".parquet"):
        assert [{name: row[name] for name in "abcde"} for row in read(out)] == expected
    else:
        spelled = [
            {key: "" if value is None else json.dumps(value, ensure_ascii=False) for key, value in row.items()}
            for row in expected
        ]
        assert [{name: row[name] for name in "abcde"} for row in read(out)] == spelled


def test_dates_and_other_types_of_parquet(tmp_path: Path) -> None:
    """The types of a .parquet stay; elsewhere values are text as ISO 8601 and JSON have it."""
    moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    columns = {
        "day": pa.array([datetime.date(2024, 2, 29), None]),
        "moment": pa.array([moment, None], pa.timestamp("us", tz="UTC")),
        "time": pa.array([datetime.time(1, 2), None], pa.time32("ms")),
        "price": pa.array([decimal.Decimal("1.10"), None], pa.decimal128(9, 2)),
        "small": pa.array([7, None], pa.int8()),
        "number": pa.array([float("nan"), 1.5], pa.float32()),
        "code": pa.array(["x", None]).dictionary_encode(),
        "bytes": pa.array(["é".encode(), None]),
        "nothing": pa.array([None, None], pa.null()),
        "days": pa.array([[datetime.date(2024, 1, 1)], None]),
        "map": pa.array([[("k", b"v")], None], pa.map_(pa.string(), pa.binary())),
    }
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table(columns), source)
    copy(source, tmp_path / "out.parquet", list(columns))
    found = pq.read_table(tmp_path / "out.parquet")
    for name, column in columns.items():
        assert found[name].type == (pa.string() if name == "code" else column.type)
        assert str(found[name].to_pylist()) == str(column.to_pylist())  # NaN is not itself
    copy(source, tmp_path / "out.jsonl", list(columns))
    first, second = read(tmp_path / "out.jsonl")
    assert first == {
        "day": "2024-02-29", "moment": "2024-02-29T12:30:00+00:00", "time": "01:02:00", "price": "1.10", "small": 7,
        "number": None, "code": "x", "bytes": "é", "nothing": None, "days": ["2024-01-01"], "map": [["k", "v"]],
        "row": 0,
    }  # fmt: skip
    assert second == dict.fromkeys(columns) | {"number": 1.5, "row": 0}


FINER = "times finer than microseconds, outside the years 1 to 9999 or of an unknown time zone"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (pa.array([1000, 1], pa.timestamp("ns")), FINER),
        (pa.array([1000, 1], pa.duration("ns")), FINER),
        (pa.array([[None], [1]], pa.list_(pa.timestamp("ns"))), FINER),
        (pa.array([10**7, 1], pa.int32()).cast(pa.date32()), FINER),
        (pa.array([1, None], pa.timestamp("ms", tz="Mars/Olympus")), FINER),
        (pa.array([b"\xff\x01", b"\xfe\x01"]), "bytes that are no utf-8 text"),
        (pa.array([b"\xff\x01", b"\xfe\x01"]).dictionary_encode(), "bytes that are no utf-8 text"),
        (pa.array([{"k": [b"\xff"]}, None]), "bytes that are no utf-8 text"),
        (pa.array([[[1], None], None]), None),
        (pa.array([b"\xff", None], pa.binary_view()), "bytes that are no utf-8 text"),
    ],
)
def test_from_parquet_to_parquet_nothing_is_touched(tmp_path: Path, values: pa.Array, told: str | None) -> None:
    """What only a .parquet can hold is told elsewhere, when the file is read over first."""
    source = tmp_path / "in.parquet"
    pq.write_table(pa.table({"at": values}), source, row_group_size=1)
    copy(source, tmp_path / "out.parquet", ["at"], at_once=2)
    found = pq.read_table(tmp_path / "out.parquet")["at"].combine_chunks()
    expected = values.dictionary_decode() if pa.types.is_dictionary(values.type) else values
    assert found.type == expected.type
    assert found.equals(expected)
    kept = KeptColumns(str(source), ["at"], tmp_path / "out.jsonl", [])
    rows = kept.follow(((f"{source}:{row}", row) for row in (1, 2)), itemgetter(0))
    if told is None:
        assert kept.count(rows) == 2
        return
    with pytest.raises(
        UserError, match=rf"in\.parquet \(from row \d on\): --keep: column 'at' is .* holds {told}; name"
    ):
        kept.count(rows)


def test_a_parquet_column_is_one_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What all lines of a .jsonl hold decides, however late: told before anything is computed."""
    monkeypatch.setattr(kept_columns, "_ROWS_AT_ONCE", 2)
    late = write_rows(tmp_path / "late.jsonl", ["id"], [(None,), (None,), (3,), (0.5,), (None,), (7,)])
    copy(late, tmp_path / "out.parquet", ["id"])
    assert [row["id"] for row in read(tmp_path / "out.parquet")] == [None, None, 3, 0.5, None, 7]
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    for number, values in enumerate(([1, 2, "x"], [1, "x"], [2**70], [{}], [2**53 + 1, 1, 0.5], [deep])):
        mixed = write_rows(tmp_path / f"{number}.jsonl", ["id"], [(value,) for value in values])
        kept = KeptColumns(str(mixed), ["id"], tmp_path / "out.parquet", [])
        with pytest.raises(
            UserError, match=r"column 'id' holds values that make no column of a \.parquet file \(.*\);"
        ):
            kept.arrow_types()
        copy(mixed, tmp_path / "out.jsonl", ["id"])
        assert [row["id"] for row in read(tmp_path / "out.jsonl")] == values


@pytest.mark.parametrize("output", [".jsonl", ".parquet"])
def test_halves_of_characters_and_depths(tmp_path: Path, output: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Keys are mended as values are, and counted, unless two become one; what is too deep to be read is told."""
    source, out = tmp_path / "in.jsonl", tmp_path / f"out{output}"
    source.write_text('{"id": {"\\ud800x": "\\udc00"}}\n', encoding="utf-8")
    copy(source, out, ["id"])
    assert read(out)[0]["id"] == {"\ufffdx": "\ufffd"}
    assert "12 bytes are not utf-8" in capsys.readouterr().err
    source.write_text('{"id": {"\\ud800x": 1, "\\ud801x": 2}}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"in\.jsonl:1: keys that differ in halves of characters"):
        copy(source, out, ["id"])
    source.write_text(f'{{"id": {"[" * 900}{"]" * 900}}}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"nested too deeply|broken JSON"):
        copy(source, out, ["id"])
    with pytest.raises(UserError, match="half a character"):
        KeptColumns(str(source), ["\ud800"], out, [])
