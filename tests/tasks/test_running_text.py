"""Running text: cut into words as annotators cut it, nothing lost; entities given back by their places."""

import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.inference.loaded import load
from bertsmith.inference.predict import predict_file
from bertsmith.tasks.running_text import find_entities, find_words, make_running
from command_line import bertsmith
from made_tasks import quicken, sentences, tune, write_rows

Tuned = Callable[[str], Path]


def words(text: str) -> list[str]:
    return [text[first:last] for first, last in find_words(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Barack Obama (born 1961) visited the U.S., too.", "Barack Obama ( born 1961 ) visited the U.S. , too ."),
        ('"Yes!" said J. Smith-Jones, didn\'t he?', '" Yes ! " said J. Smith-Jones , didn\'t he ?'),
        (
            "New York's and the dogs' l'homme d\u2019Italie\u2019s",
            "New York 's and the dogs ' l'homme d\u2019Italie \u2019s",
        ),
        ("Wait... $3.5m (50%), 1,000.00; and/or -5!!", "Wait ... $ 3.5m ( 50 % ) , 1,000.00 ; and/or - 5 !!"),
        ("@user: #tag, a@b.com", "@user : #tag , a@b.com"),
        ("天地，宇宙。ABC中", "天 地 ， 宇 宙 。 ABC 中"),
        ("हिन्दी में। cafe\u0301, \u00abBonjour\u00bb", "हिन्दी में । cafe\u0301 , \u00ab Bonjour \u00bb"),
        ("ok\U0001f44d\U0001f44d z.B. in Köln.", "ok \U0001f44d\U0001f44d z.B. in Köln ."),
        ("'s ... _", "' s ... _"),
        (" \t\u3000\n", ""),
        ("", ""),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert words(text) == expected.split()


@given(st.text(st.sampled_from("ab9.,''\u2019s@#_- \u0301\u200d\u4e2d\U0001f44d\n\x00\ud800"), max_size=20) | st.text())
def test_nothing_is_lost(text: str) -> None:
    spans = list(find_words(text))
    assert "".join(text[first:last] for first, last in spans) == "".join(text.split())
    assert all(first < last for first, last in spans)
    assert all(before[1] <= after[0] for before, after in pairwise(spans))
    assert all(not any(letter.isspace() for letter in text[first:last]) for first, last in spans)


@pytest.mark.parametrize("piece", ["!?", "a.", "'s", "x'", "@", "\u0301", "\u4e2d", "ab"])
def test_a_line_without_blanks_takes_no_longer_a_character(piece: str) -> None:
    begun = time.perf_counter()
    assert sum(last - first for first, last in find_words("a" + piece * 200_000 + "!?" * 1000)) > 200_000
    assert time.perf_counter() - begun < 10


def test_entities_by_their_places() -> None:
    text = "In the U.S., Mary Ann  Smith (Paris) met Bob's Bob."
    example = make_running("x:1", "0", text)
    assert example.words == ("In", "the", "U.S.", ",", "Mary", "Ann", "Smith", "(", "Paris", ")", "met", "Bob", "'s",
                             "Bob", ".")  # fmt: skip
    tags = ["O", "B-LOC", "I-LOC", "O", "B-PER", "I-PER", "I-PER", "O", "I-LOC", "O", "O", "B-PER", "O", "B-PER", "I-X"]
    found = find_entities(example, tags)
    assert [(entity["type"], entity["text"]) for entity in found] == [
        ("LOC", "the U.S."), ("PER", "Mary Ann  Smith"), ("LOC", "Paris"), ("PER", "Bob"), ("PER", "Bob"), ("X", ".")
    ]  # fmt: skip
    assert all(text[entity["start"] : entity["end"]] == entity["text"] for entity in found)


@given(st.lists(st.sampled_from(["O", "B-A", "I-A", "B-B-C", "I-B-C"]), max_size=12))
def test_entities_are_those_that_seqeval_counts(tags: list[str]) -> None:
    from seqeval.metrics.sequence_labeling import get_entities

    example = make_running("x:1", "0", " ".join("w" * (number + 1) for number in range(len(tags))))
    expected = [(kind, example.spans[first][0], example.spans[last][1]) for kind, first, last in get_entities(tags)]
    assert [(e["type"], e["start"], e["end"]) for e in find_entities(example, tags)] == expected


# --- the whole way


@pytest.fixture(scope="module")
def knowing(model: Path, files: dict[str, tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was long enough to find entities."""
    folder = tmp_path_factory.mktemp("knowing") / "run"
    with pytest.MonkeyPatch.context() as patch:
        quicken(patch)
        tune(folder, "ner", model, *files["ner"], epochs=8)
    return folder


def texts_and_words() -> tuple[list[str], list[list[str]]]:
    made = [[word for word, _ in sentence] for sentence in sentences(9, seed=3)]
    return [*(" ".join(each) for each in made), "", "Alice, 'Bob'."], [*made, [], words("Alice, 'Bob'.")]


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
        import csv

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

    assert "raw_text: is for models that tag words; classify takes its files as they are" in refused(
        tuned("classify"), source
    )
    assert "no columns with names that --keep could mean" in refused(knowing, source, "--keep", "id")
    table = write_rows(tmp_path / "in.jsonl", ("tokens",), [(["Alice"],)])
    assert "in.jsonl:1" in refused(knowing, table)
    assert not (tmp_path / "o.jsonl").exists()
