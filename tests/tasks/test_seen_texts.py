"""What comes up again: texts that the training file labels in two ways, and dev or test rows that it teaches."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.tasks.data import open_task_data
from bertsmith.text.tokenizer import BertTokenizer
from made_tasks import make_config, make_settings, questions, write_conll, write_rows, write_squad

TEXTS = ("good film", "Good  FILM", "bad film", "film good", "fine", "good film fine fine fine fine fine bad")
ROWS = st.lists(st.tuples(st.sampled_from(TEXTS), st.sampled_from("ab")), min_size=2, max_size=12)
BOTH = [("unlike all others", "a"), ("not like others", "b")]


def report_of(tokenizer: BertTokenizer, task: str, train: Path, dev: Path, **changes: Any) -> dict[str, Any]:
    return open_task_data(make_settings(task, Path("m"), train, dev, **changes), make_config(), tokenizer).report


def seen(text: str) -> tuple[str, ...]:
    """What a model that takes 8 tokens at once, the two at the ends among them, is shown of a text of single tokens."""
    return tuple(text.lower().split()[:6])


@settings(max_examples=30)
@given(train=ROWS, dev=ROWS, test=ROWS)
def test_counted_as_the_model_sees_them(
    tokenizer: BertTokenizer,
    tmp_path: Path,
    train: list[tuple[str, str]],
    dev: list[tuple[str, str]],
    test: list[tuple[str, str]],
) -> None:
    assert list(map(len, tokenizer.encode_ids(TEXTS))) == [len(text.split()) for text in TEXTS]
    files = {
        name: write_rows(tmp_path / f"{name}.tsv", ("text", "label"), rows)
        for name, rows in (("train", BOTH + train), ("dev", dev), ("test", test))
    }
    report = report_of(tokenizer, "classify", files["train"], files["dev"], test=files["test"], max_length=8)
    first = {seen(text) for text, _ in train}
    otherwise = [
        number
        for number, (text, label) in enumerate(train)
        if any(seen(other) == seen(text) and its != label for other, its in train[:number])
    ]
    assert report["train"].get("labelled_in_two_ways", 0) == len(otherwise)
    if otherwise:
        assert report["train"]["first_places"]["labelled_in_two_ways"] == f"{files['train']}:{otherwise[0] + 4}"
    for name, rows in (("dev", dev), ("test", test)):
        again = [number for number, (text, _) in enumerate(rows) if seen(text) in first]
        assert report[name].get("also_in_training", 0) == len(again)
        if again:
            assert report[name]["first_places"]["also_in_training"] == f"{files[name]}:{again[0] + 2}"
        assert "labelled_in_two_ways" not in report[name]
        assert "also_in_training" not in report["train"]


def test_it_is_said(tokenizer: BertTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write_rows(tmp_path / "train.csv", ("text", "label"), [*BOTH, ("fine", "a"), ("fine", "b"), ("fine", "a")])
    dev = write_rows(tmp_path / "dev.csv", ("text", "label"), [("good", "a"), ("Fine", "b"), ("fine", "b")])
    report_of(tokenizer, "classify", train, dev)
    said = capsys.readouterr().err
    assert (
        "warning: train: 2 of 5 examples look to the model just like an earlier one that has another label "
        f"(first {train}:5)\n" in said
    )
    assert (
        "warning: dev: 2 of 3 examples look to the model just like one that it learns from: their scores say nothing "
        f"of other texts (first {dev}:3)\n" in said
    )


def test_rows_that_are_left_out_teach_nothing(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    rows = [*BOTH, *((f"{first} {second}", "ab"[second == "bad"]) for first in ("good", "bad") for second in TEXTS[:5])]
    train = write_rows(tmp_path / "train.tsv", ("text", "label"), [*rows, *rows])
    assert report_of(tokenizer, "classify", train, train)["dev"]["also_in_training"] == 2 * len(rows)
    part = report_of(tokenizer, "classify", train, train, train_rows=3)
    assert part["train"]["rows"] == 3
    assert 3 <= part["dev"]["also_in_training"] <= 6
    whole = make_settings("classify", Path("m"), train, dev_share=0.3)
    held = open_task_data(whole, make_config(), tokenizer).report["dev"]
    assert held["rows"] > 2
    assert "also_in_training" not in held


def test_pairs_are_told_from_their_halves(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    columns = ("sentence1", "sentence2", "label")
    train = write_rows(tmp_path / "train.tsv", columns, [("good film", "fine", "a"), ("bad", "film", "b")])
    others = [("good", "film fine", "b"), ("fine", "good film", "b"), ("film", "bad", "b"), ("bad", "film", "a")]
    dev = write_rows(tmp_path / "dev.tsv", columns, others)
    report = report_of(tokenizer, "classify", train, dev, text_column=columns[0], text_pair_column=columns[1])
    assert report["dev"]["first_places"] == {"also_in_training": f"{dev}:5"}
    assert report["dev"]["also_in_training"] == 1


def test_tags_and_questions(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    one = [("good", "B-PER"), ("film", "O")]
    made = [one, [("good", "O"), ("film", "O")], [("good", "B-PER"), ("film", "O")], [("goodfilm", "B-PER")]]
    train, dev = write_conll(tmp_path / "train.conll", made), write_conll(tmp_path / "dev.conll", [one, one[:1]])
    report = report_of(tokenizer, "ner", train, dev)
    assert (report["train"]["labelled_in_two_ways"], report["dev"]["also_in_training"]) == (2, 1)

    paragraphs = questions(3)
    again = [{**paragraphs[0], "qas": [{**qa, "id": f"{qa['id']}-2"} for qa in paragraphs[0]["qas"]]}]
    again[0]["qas"][0]["answers"] = [{"text": paragraphs[0]["context"].split()[0], "answer_start": 0}]
    train = write_squad(tmp_path / "train.json", [*paragraphs, *again])
    dev = write_squad(tmp_path / "dev.json", paragraphs[1:])
    report = report_of(tokenizer, "squad1", train, dev, max_length=64, squad__stride=8)
    assert report["dev"]["also_in_training"] == 4
    assert "labelled_in_two_ways" not in report["train"], "a question may have several right answers"
