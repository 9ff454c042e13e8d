"""Files of choices: SWAG, CODAH and one's own; the right choice by number or text, mistakes named."""

import csv
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bertsmith.errors import UserError
from bertsmith.tasks.choice_files import read_choice_examples, read_choices
from bertsmith.tasks.examples import ChoiceExample
from bertsmith.text.documents import ReadReport

SWAG = ["", "video-id", "fold-ind", "startphrase", "sent1", "sent2", "gold-source", "ending0", "ending1", "ending2",
        "ending3", "label"]  # fmt: skip
SWAG_ROW = ["0", "v_1", "7", "Students look down. She", "Students look down.", "She", "gold", "pats her, then goes.",
            'says "no".', "walks.", "turns\naround.", "2"]  # fmt: skip


def write(path: Path, data: str | list[list[str]]) -> str:
    if not isinstance(data, str):
        out = io.StringIO(newline="")
        csv.writer(out).writerows(data)
        data = out.getvalue()
    path.write_bytes(data.encode())
    return str(path)


def write_lines(path: Path, *rows: dict[str, Any]) -> str:
    return write(path, "".join(json.dumps(row) + "\n" for row in rows))


def refusal(path: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        list(read_choices(path, **{"labelled": True, **options}))
    return str(caught.value)


def test_swag(tmp_path: Path) -> None:
    path = write(tmp_path / "val.csv", [SWAG, SWAG_ROW, [*SWAG_ROW[:-1], "0"]])
    choices = ("She pats her, then goes.", 'She says "no".', "She walks.", "She turns\naround.")
    expected = [
        ChoiceExample(f"{path}:2", "0", "Students look down.", choices, 2),
        ChoiceExample(f"{path}:4", "1", "Students look down.", choices, 0),
    ]
    assert list(read_choices(path, labelled=True)) == expected
    assert list(read_choices(path)) == expected
    assert [e.label for e in read_choices(path, labelled=False)] == [None, None]
    # its test.csv has no label
    path = write(tmp_path / "test.csv", [SWAG[:-1], SWAG_ROW[:-1]])
    assert [(e.choices, e.label) for e in read_choices(path)] == [(choices, None)]
    assert "test.csv:1: no column 'label'" in refusal(path)


def test_swag_of_numbers_and_wrong_labels(tmp_path: Path) -> None:
    row = [*SWAG_ROW[:5], "", "gold", "3", "2", "1", "0"]
    path = write(tmp_path / "train.csv", [SWAG, [*row, "3"]])
    assert [(e.choices, e.label) for e in read_choices(path, labelled=True)] == [(("3", "2", "1", "0"), 3)]
    path = write(tmp_path / "train.csv", [SWAG, [*row, "4"], [*row, "-1"], [*row, ""], [*row, "right"]])
    told = refusal(path)
    assert "train.csv:2: column 'label' holds '4', which is no choice: they are 0 to 3" in told
    assert "train.csv:3: column 'label' holds '-1', which is no choice" in told
    assert "train.csv:4: column 'label' is empty" in told
    assert "train.csv:5: column 'label' holds 'right', which is no choice" in told


def test_the_full_files_of_swag_are_refused(tmp_path: Path) -> None:
    header = ["video-id", "fold-ind", "startphrase", "gold-ending", "distractor-0", "gold-type", "sent1", "sent2"]
    path = write(tmp_path / "val_full.csv", [header, ["x"] * len(header)])
    assert "val_full.csv:1: is one of SWAG's *_full.csv" in refusal(path)


def test_codah(tmp_path: Path) -> None:
    rows = ['o\tI feel "sick. I\ta\t"b\tc\td\t1', "q\tTen minus nine is\t3\t2\t1\t0\t2"]
    path = write(tmp_path / "train.tsv", "\n".join(rows))
    assert list(read_choices(path, labelled=True)) == [
        ChoiceExample(f"{path}:1", "0", 'I feel "sick. I', ("a", '"b', "c", "d"), 1),
        ChoiceExample(f"{path}:2", "1", "Ten minus nine is", ("3", "2", "1", "0"), 2),
    ]
    assert [e.label for e in read_choices(path, labelled=False)] == [None, None]
    path = write(tmp_path / "bad.tsv", "\n".join([*rows, "o\tp\ta\tb\tc\td\t4", "o\tp\ta\t\tc\td\t0"]))
    told = refusal(path)
    assert "bad.tsv:3: column '7' holds '4', which is no choice: they are 0 to 3; bad" in told.replace(path, "bad.tsv")
    assert "bad.tsv:4: column '4' is empty" in told
    assert "bad.tsv:3: 6 cells where CODAH has 7" in refusal(
        write(tmp_path / "bad.tsv", "\n".join([*rows, rows[0][:-2]]))
    )


def test_own_tables_of_lists(tmp_path: Path) -> None:
    rows = [
        {"context": "c", "choices": ["x", "y"], "label": 1},
        {"context": "d", "choices": ["x", "y", "1"], "label": "y"},
        {"context": "e", "choices": ["2", "1"], "label": 1},
        {"context": "f", "choices": ["x", "y"], "label": 0.0},
        {"context": "g", "choices": ["10", "20"], "label": "20"},
    ]
    path = write_lines(tmp_path / "x.jsonl", *rows)
    found = list(read_choices(path, labelled=True))
    assert [e.label for e in found] == [1, 1, 1, 0, 1]
    assert [e.place for e in found] == [f"{path}:{line}" for line in range(1, 6)]
    assert found[1] == ChoiceExample(f"{path}:2", "1", "d", ("x", "y", "1"), 1)
    table = {"sentence1": ["c", "d"], "choices": [["x", "y"], ["x", "y", "z"]], "label": [0, 2]}
    pq.write_table(pa.table(table), tmp_path / "x.parquet")
    found = list(read_choices(str(tmp_path / "x.parquet"), labelled=True))
    assert [(e.context, e.choices, e.label) for e in found] == [("c", ("x", "y"), 0), ("d", ("x", "y", "z"), 2)]


def test_own_tables_of_columns(tmp_path: Path) -> None:
    path = write(tmp_path / "x.tsv", 'choice1\ttext\tchoice0\tright\tchoice2\nb\tc\ta\t1\t\n"b\tc\ta\tx y\tx y\n')
    found = list(read_choices(path, label_column="right", labelled=True))
    assert [(e.choices, e.label) for e in found] == [(("a", "b"), 1), (("a", '"b', "x y"), 2)]
    path = write(tmp_path / "x.csv", "q,ending0,ending1\nc,a,b\n")
    assert [e.context for e in read_choice_examples(path, context_column="q")] == ["c"]
    assert [e.label for e in read_choices(path, text_column="q")] == [None]


@pytest.mark.parametrize("columns", [("context", "sentence1"), ("sentence1", "text"), ("text", "other")])
def test_the_context_is_the_first_of_the_default_columns(columns: tuple[str, str], tmp_path: Path) -> None:
    path = write(tmp_path / "x.csv", f"{columns[1]},{columns[0]},choice0,choice1\nno,yes,a,b\n")
    assert [e.context for e in read_choices(path)] == ["yes"]
    assert [e.context for e in read_choices(path, text_column=columns[1])] == ["no"]


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("x.csv", "context,choice1,choice2,label\nc,a,b,1\n",
         "x.csv:1: no choices: a column 'choices' that holds lists, or columns 'choice0', 'choice1' and so on are "
         "needed; there are 'context', 'choice1', 'choice2', 'label'"),
        ("x.csv", "q,choice0,choice1,label\nc,a,b,1\n", "x.csv:1: no column 'context'"),
        ("x.csv", "context; choice0; choice1\nc;a;b\n", "x.csv:1: looks separated by ';'"),
        ("x.csv", "context,choice0,choice1\nc,a,b\n", "x.csv:1: no column 'label'"),
        ("x.csv", "context,choice0,choice1,label\nc,a,,0\n", "x.csv:2: 1 choice, where two are needed"),
        ("x.csv", "context,choice0,choice1,label\nc,,a,0\n", "x.csv:2: column 'choice0' is empty"),
        ("x.csv", "context,choice0,choice1,label\nc,1,0,0\n",
         "x.csv:2: column 'label' holds '0', the number of one choice and the text of another"),
        ("x.csv", "context,choice0,choice1,label\nc,a,b,2\n", "holds '2', which is no choice: they are 0 to 1; every"),
        ("x.jsonl", '{"context": "c", "choices": ["a"], "label": 0}', "x.jsonl:1: 1 choice, where two"),
        ("x.jsonl", '{"context": "c", "choices": [], "label": 0}', "x.jsonl:1: 0 choices, where two"),
        ("x.jsonl", '{"context": "c", "choices": "ab", "label": 0}', "x.jsonl:1: 'choices' holds text, not a list"),
        ("x.jsonl", '{"context": "c", "choices": ["a", 5], "label": 0}', "'choices[1]' holds a number, not text"),
        ("x.jsonl", '{"context": "c", "choices": ["a", "b"], "label": true}', "holds 'True', which is no choice"),
        ("x.jsonl", '{"context": "c", "choices": ["a", "b"], "label": -1}', "holds '-1', which is no choice"),
        ("x.jsonl", '{"context": "c", "choices": ["a", "b"], "label": null}', "x.jsonl:1: column 'label' is empty"),
        ("x.jsonl", '{"context": "c", "choices": ["a", "b"], "label": 0}\n{"context": "c"}', "x.jsonl:2: no 'choices'"),
        ("x.jsonl", '{"context": "c", "choices": ["a", "b"], "label": 0}\n{"choices": ["a", "b"], "label": 0}',
         "x.jsonl:2: no 'context'"),
        ("x.jsonl", '{"context": "c", "choices": ["a", "b"], "label": 0}\n{"context": "c", "choices": ["a", "b"]}',
         "x.jsonl:2: no 'label'; every row needs a context, two choices or more and a label"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(name: str, content: str, told: str, tmp_path: Path) -> None:
    assert told in refusal(write(tmp_path / name, content))


def test_empty_texts_and_labels_of_prediction(tmp_path: Path) -> None:
    path = write_lines(
        tmp_path / "x.jsonl", {"context": "", "choices": ["", "b"]}, {"context": "c", "choices": ["a", ""]}
    )
    found = [(e.context, e.choices, e.label) for e in read_choices(path, allow_empty=True)]
    assert found == [("", ("", "b"), None), ("c", ("a", ""), None)]
    assert "x.jsonl:1: column 'context' is empty" in refusal(path, labelled=None)


def test_every_row_of_codah(shared_data: Path) -> None:
    for name, count in (("full_data.tsv", 2776), ("fold_0/train.tsv", 1665), ("fold_0/dev.tsv", 556)):
        path = shared_data / "tasks/swag_codah" / name
        rows = [line.split("\t") for line in path.read_text("utf-8").removesuffix("\n").split("\n")]
        report = ReadReport()
        found = list(read_choices(str(path), labelled=True, report=report))
        assert len(found) == len(rows) == count
        assert [[e.context, *e.choices, str(e.label)] for e in found] == [row[1:] for row in rows]
        assert not report.invalid_bytes
    assert Counter(e.label for e in read_choices(str(shared_data / "tasks/swag_codah/full_data.tsv"))) == {
        0: 689, 1: 684, 2: 697, 3: 706,
    }  # fmt: skip
