"""`predict --raw-text`: running text into a model that tags words, from and to every kind of file."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bertsmith.errors import UserError
from bertsmith.inference.loaded import load
from bertsmith.inference.predict import predict_file
from command_line import bertsmith
from made_tasks import sentences, write_rows

Tuned = Callable[[str], Path]


def texts_and_words() -> tuple[list[str], list[list[str]]]:
    made = [[word for word, _ in sentence] for sentence in sentences(9, seed=3)]
    made += [[], ["Alice", ",", "'", "Bob", "'", "."]]
    return [*(" ".join(each) for each in made[:-1]), "Alice, 'Bob'."], made


def test_the_tags_are_those_of_the_words(knowing: Path, tmp_path: Path) -> None:
    texts, expected = texts_and_words()
    lists = write_rows(tmp_path / "words.jsonl", ("tokens",), [(each,) for each in expected])
    predict_file(knowing, str(lists), tmp_path / "tags.jsonl", "cpu", "fp32")
    tags = [json.loads(line)["tags"] for line in (tmp_path / "tags.jsonl").read_text("utf-8").splitlines()]
    source = tmp_path / "in.txt"
    source.write_text("\n".join(texts) + "\n", encoding="utf-8")
    summary = predict_file(knowing, str(source), tmp_path / "out.jsonl", "cpu", "fp32", raw_text=True)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [(row["words"], row["tags"]) for row in rows] == list(zip(expected, tags, strict=True))
    assert summary["rows"] == len(texts)
    assert sum(len(row["entities"]) for row in rows) > 5
    assert all(
        text[e["start"] : e["end"]] == e["text"] for text, row in zip(texts, rows, strict=True) for e in row["entities"]
    )
    loaded = load(knowing, precision="fp32")
    assert loaded.entities(texts) == [row["entities"] for row in rows]
    assert loaded.tag(expected) == tags
    assert "entities" in loaded.abilities
    with pytest.raises(UserError, match=r"^text 1: is a list, not a text"):
        loaded.entities([["Alice"]])  # type: ignore[list-item]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_table_in_and_out(knowing: Path, tmp_path: Path, ending: str) -> None:
    """Texts without entities first: the columns of .parquet are known all the same."""
    texts = ["", "a", *texts_and_words()[0]]
    rows = [(number, text) for number, text in enumerate(texts) if text or ending in (".jsonl", ".parquet")]
    source = write_rows(tmp_path / f"in{ending}", ("id", "says"), rows)
    out = tmp_path / f"out{ending}"
    done = bertsmith("predict", knowing, "--input", source, "--output", out, "--raw-text", "--text-column", "says",
                     "--keep", "id", "--precision", "fp32", "--device", "cpu", "--json")  # fmt: skip
    assert done.json["rows"] == len(rows)
    expected = load(knowing, precision="fp32").entities([text for _, text in rows])
    if ending == ".parquet":
        import pyarrow.parquet as pq

        found = pq.read_table(out).to_pylist()
    elif ending == ".jsonl":
        found = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    else:
        with out.open(encoding="utf-8", newline="") as file:
            read = (
                csv.DictReader(file)
                if ending == ".csv"
                else csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE)
            )
            found = [row | {"entities": json.loads(row["entities"]), "id": int(row["id"])} for row in read]
    assert [row["id"] for row in found] == [number for number, _ in rows]
    assert [row["entities"] for row in found] == expected


def test_texts_become_a_conll(knowing: Path, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("Alice lives here.\n(Bob)\n", encoding="utf-8")
    predict_file(knowing, str(source), tmp_path / "out.conll", "cpu", "fp32", raw_text=True)
    lines = (tmp_path / "out.conll").read_text("utf-8").splitlines()
    assert [line.split("\t")[0] for line in lines] == ["Alice", "lives", "here", ".", "", "(", "Bob", ")", ""]


def test_mistakes(knowing: Path, tuned: Tuned, tmp_path: Path) -> None:
    source = tmp_path / "in.txt"
    source.write_text("Alice\n", encoding="utf-8")

    def refused(run: Path, path: Path, *more: object) -> str:
        return bertsmith("predict", run, "--input", path, "--output", tmp_path / "o.jsonl", "--raw-text", *more).mistake

    assert "--raw-text: is for models that tag words; classify takes its files as they are" in refused(
        tuned("classify"), source
    )
    assert "no columns with names that --keep could mean" in refused(knowing, source, "--keep", "id")
    table = write_rows(tmp_path / "in.jsonl", ("tokens",), [(["Alice"],)])
    assert "in.jsonl:1" in refused(knowing, table)
    columns = write_rows(tmp_path / "in.conll", ("Alice", "O"), [("lives", "O")])
    assert f"{columns}: holds a word a line, as its name says; leave --raw-text out" in refused(knowing, columns)
    assert not (tmp_path / "o.jsonl").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", "Alice lives here.\nBob does not live there.\n", r"a\.txt:2: 5 columns where the first word has 3"),
        ("a.csv", "text\nAlice lives here.\n", r"a\.csv:2: 3 columns where the first word has 1"),
        ("a.jsonl", '{"text": "Alice lives here."}\n', r"a\.jsonl:1: no key 'tokens'; there are 'text'"),
        ("a.jsonl", '{"tokens": "Alice lives here."}\n', r"column 'tokens' holds text, not a list"),
    ],
)
def test_running_text_without_the_switch(knowing: Path, tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message) as refused:
        predict_file(knowing, str(tmp_path / name), tmp_path / "o.jsonl", "cpu", "fp32")
    assert "for running text add --raw-text to predict" in str(refused.value)


@pytest.mark.parametrize(
    ("content", "noted"), [("Alice lives here.\n", True), ("Alice\tO\n", False), ("Alice\n", False)]
)
def test_lines_of_as_many_words_are_taken_for_columns_which_is_said(
    knowing: Path, tmp_path: Path, content: str, noted: bool, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text(content * 2, encoding="utf-8")
    predict_file(knowing, str(tmp_path / "a.txt"), tmp_path / "o.jsonl", "cpu", "fp32")
    note = f"note: {tmp_path / 'a.txt'}:1: of 3 columns one is read, and there are no tags (for running text add "
    assert capfd.readouterr().err.count(f"{note}--raw-text to predict, or give embed a .txt)\n") == noted
