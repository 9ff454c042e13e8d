"""predict, evaluate and embed on several ranks: the rows, their order and the counts are those of one process."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from small_models import save_pretrained

from bertsmith.hardware import int8_weight_bits
from bertsmith.inference import chunks, features, predictor
from bertsmith.inference.predict import predict_file
from bertsmith.inference.products import can_multiply_int8
from bertsmith.tasks.conll import read_conll
from bertsmith.training.ranks import join_ranks
from command_line import Outcome, bertsmith
from made_tasks import phrase, questions, timeless, write_rows, write_squad
from rank_runs import run_ranks

Tuned = Callable[[str], Path]
FLAGS = ("--precision", "fp32", "--device", "cpu", "--json")


def command_rank(arguments: tuple[Any, ...], at_once: int) -> Outcome:
    """A command as one of several ranks, some rows at a time."""
    predictor.CHUNK = features.TEXTS_AT_ONCE = at_once
    chunks.KEPT_AT_ONCE = 4 * at_once
    return bertsmith(*arguments)


def on_ranks(size: int, *arguments: Any, at_once: int = 3) -> list[Outcome]:
    """What the command leaves on each of `size` ranks; `at_once`: rows that a rank takes at a time."""
    endings = run_ranks(size, command_rank, arguments, at_once)
    assert [ending.error for ending in endings] == [None] * size, endings
    return [ending.value for ending in endings]


def summary_of(outcomes: list[Outcome]) -> dict[str, Any]:
    """The first rank's; the others say and print nothing."""
    for outcome in outcomes[1:]:
        assert outcome == Outcome(0, "", "")
    return outcomes[0].json


def assert_alike(found: Any, expected: Any) -> None:
    """Predictions: the same up to the rounding of float32."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            assert_alike(found[key], expected[key])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_alike(one, other)
    else:
        assert found == (pytest.approx(expected, abs=1e-5) if isinstance(expected, float) else expected)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 rows of most different lengths, some cut, some with words that are not known."""
    rows = [(f"{'the cat ' * (n * n % 37)}{'☃ ' * (n % 3)}{n}",) for n in range(24)]
    return write_rows(tmp_path_factory.mktemp("texts") / "in.jsonl", ("text",), [*rows, ("cat",)])


@pytest.mark.parametrize("kind", ["classify", "squad2"])
def test_predict_and_evaluate(tuned: Tuned, tmp_path: Path, texts: Path, kind: str) -> None:
    source = texts
    if kind == "squad2":  # questions that are cut, which is counted
        paragraphs = questions(9, unanswerable=True)
        paragraphs[7]["qas"][0]["question"] = "who lives " * 40
        source = write_squad(tmp_path / "in.json", paragraphs)
    outputs = [tmp_path / f"{size}.jsonl" for size in (1, 3)]
    command = ("predict", tuned(kind), "--input", source, "--output")
    alone = bertsmith(*command, outputs[0], *FLAGS).json
    found = summary_of(on_ranks(3, *command, outputs[1], *FLAGS))
    assert timeless(found) == timeless(alone)
    assert alone["rows"] > 3 * 3 * 2, "several rounds"
    assert alone["truncated" if kind == "classify" else "questions_cut"]
    rows = [[json.loads(line) for line in output.read_text("utf-8").splitlines()] for output in outputs]
    assert_alike(rows[1], rows[0])
    if kind == "squad2":
        command = ("evaluate", tuned(kind), "--data", source, *FLAGS)
        assert_alike(timeless(summary_of(on_ranks(3, *command))), timeless(bertsmith(*command).json))


def predict_in_8_bits(run: Path, source: Path, output: Path) -> dict[str, Any]:
    """`predict` as one of several ranks."""
    with join_ranks() as ranks:
        return predict_file(run, str(source), output, "cpu", "int8+fp32", ranks=ranks)


@pytest.mark.skipif(int8_weight_bits() is None or not can_multiply_int8(), reason="no 8-bit products on this machine")
def test_predict_in_8_bits(tuned: Tuned, tmp_path: Path, texts: Path) -> None:
    outputs = [tmp_path / f"{size}.jsonl" for size in (1, 2)]
    alone = predict_in_8_bits(tuned("classify"), texts, outputs[0])
    endings = run_ranks(2, predict_in_8_bits, tuned("classify"), texts, outputs[1])
    assert [ending.error for ending in endings] == [None, None], endings
    assert timeless(endings[0].value) == timeless(alone)
    rows = [[json.loads(line) for line in output.read_text("utf-8").splitlines()] for output in outputs]
    assert_alike(rows[1], rows[0])


@pytest.mark.parametrize(
    ("ending", "flags"),
    [("npy", ("--layers", "-2:")), ("safetensors", ("--pool", "none")), ("parquet", ("--words", "--long", "window"))],
)
def test_embed(tmp_path: Path, texts: Path, ending: str, flags: tuple[str, ...]) -> None:
    folder = save_pretrained(tmp_path / "model")
    size = 3 if ending == "npy" else 2
    outputs = [tmp_path / f"{number}.{ending}" for number in (1, size)]
    command = ("embed", folder, "--input", texts, "--max-length", 24, *flags, *FLAGS, "--output")
    alone = bertsmith(*command, outputs[0]).json
    found = summary_of(on_ranks(size, *command, outputs[1]))
    assert timeless(found) == timeless(alone)
    assert alone["rows"] == 25
    assert alone["windowed" if "--words" in flags else "truncated"] > 3
    assert alone["unknown_rate"] > 0
    arrays = [read_vectors(output) for output in outputs]
    assert list(arrays[1]) == list(arrays[0])
    for name, array in arrays[0].items():
        assert arrays[1][name].dtype == array.dtype
        np.testing.assert_allclose(arrays[1][name], array, rtol=0, atol=1e-5)


def read_vectors(path: Path) -> dict[str, np.ndarray]:
    """All that an output of `embed` holds, by name."""
    if path.suffix == ".npy":
        return {"vectors": np.load(path)}
    if path.suffix == ".safetensors":
        return dict(load_file(path))
    import pyarrow.parquet as pq

    rows = pq.read_table(path)["vectors"].to_pylist()
    return {
        "counts": np.array([len(row) for row in rows]),
        "vectors": np.array([vector for row in rows for vector in row]),
    }


def test_kept_columns(tuned: Tuned, tmp_path: Path) -> None:
    """Each beside its own row, whichever rank computed it; mistakes, and values that make no column, are told once."""
    rows = [(f"{'the cat ' * (n * n % 17)}{n}", n) for n in range(25)]
    source = write_rows(tmp_path / "in.jsonl", ("text", "id"), rows)
    command = ("predict", tuned("classify"), "--input", source, "--output", tmp_path / "out.jsonl", *FLAGS, "--keep")
    assert summary_of(on_ranks(3, *command, "id,text"))["rows"] == 25
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert [(row["text"], row["id"]) for row in found] == rows
    assert "no key 'idd'" in told(on_ranks(2, *command, "idd"))
    folder, output = save_pretrained(tmp_path / "model"), tmp_path / "out.parquet"
    assert summary_of(on_ranks(3, "embed", folder, "--input", source, "--output", output, *FLAGS, "--keep", "id"))
    import pyarrow.parquet as pq

    assert pq.read_table(output)["id"].to_pylist() == list(range(25))
    write_rows(source, ("text", "id"), [*rows, ("a", "x")])
    command = ("embed", folder, "--input", source, "--output", output, *FLAGS, "--keep")
    assert "column 'id' holds values that make no column" in told(on_ranks(2, *command, "id"))
    assert "'vector' is what a column of the output" in told(on_ranks(2, *command, "vector"))


def test_conll(tuned: Tuned, tmp_path: Path) -> None:
    rows = [(["anna", str(number)],) for number in range(25)]
    command = ("predict", tuned("ner"), "--output", tmp_path / "out.conll", *FLAGS, "--input")
    source = write_rows(tmp_path / "in.jsonl", ("tokens",), rows)
    assert summary_of(on_ranks(3, *command, source))["rows"] == 25
    read = read_conll(str(tmp_path / "out.conll"), labelled=True)
    assert [example.words for example in read] == [tuple(words) for (words,) in rows]
    source = write_rows(tmp_path / "in.jsonl", ("tokens",), [*rows, (["a\tb"],)])
    assert "in.jsonl:26: the word 'a\\tb' cannot stand in a .conll" in told(on_ranks(2, *command, source))


def test_fewer_rows_than_ranks(tuned: Tuned, tmp_path: Path) -> None:
    for size, rows in ((2, 0), (3, 2)):
        source = write_rows(tmp_path / "in.csv", ("text",), [("a good film",)] * rows)
        command = ("predict", tuned("classify"), "--input", source, "--output", tmp_path / "out.csv", *FLAGS)
        assert summary_of(on_ranks(size, *command))["rows"] == rows
        assert len((tmp_path / "out.csv").read_text("utf-8").splitlines()) == 1 + rows


# --- mistakes


def told(outcomes: list[Outcome]) -> str:
    """What the first rank says of a mistake; all end with code 2, the others without a word."""
    for outcome in outcomes[1:]:
        assert outcome == Outcome(2, "", "")
    return outcomes[0].mistake


def test_a_mistake_is_told_once(tuned: Tuned, tmp_path: Path) -> None:
    """In a row that every rank reads, in one of another rank's share, found where predictions are counted."""
    rows = [(phrase_of(n), ("neg", "pos")[n % 2]) for n in range(20)]
    source = write_rows(tmp_path / "rows.jsonl", ("text", "label"), rows)
    with source.open("a", encoding="utf-8") as file:
        file.write("{broken\n")
    output = tmp_path / "out"
    command = ("predict", tuned("classify"), "--input", source, "--output", output, *FLAGS)
    assert told(on_ranks(2, *command)).startswith(f"{source}:21: ")
    rows[17] = (rows[17][0], "bad")
    source = write_rows(tmp_path / "labels.csv", ("text", "label"), rows)
    said = told(on_ranks(2, "evaluate", tuned("classify"), "--data", source, *FLAGS))
    assert said.startswith(f"{source}:19: label 'bad' is not one of the training file's")
    folder = save_pretrained(tmp_path / "model")
    limits = ("--long", "refuse", "--max-length", 60, *FLAGS)
    source = write_rows(tmp_path / "texts.csv", ("text",), [("the cat",)] * 5 + [("the cat " * 40,)])
    said = told(on_ranks(2, "embed", folder, "--input", source, "--output", tmp_path / "v.npy", *limits))
    assert "more tokens than 60; shorten the text" in said
    assert said.startswith("rank 1 of 2 on ")
    assert not output.exists()
    assert not list(tmp_path.glob("*partial*"))


def phrase_of(number: int) -> str:
    return phrase(random.Random(number), 3)


def test_what_can_be_read_once(tuned: Tuned, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "in.txt")
    command = ("predict", tuned("classify"), "--input", tmp_path / "in.txt", "--output", tmp_path / "out", *FLAGS)
    assert "can be read once only, and 2 processes are to read it" in told(on_ranks(2, *command))
