"""Predictions: a row in, a row out, in order, whatever else is in the file; alone as in a batch; memory flat."""

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import bertsmith
from bertsmith import progress
from bertsmith.commands.tasks import show_evaluate
from bertsmith.errors import UserError
from bertsmith.hardware import int8_weight_bits
from bertsmith.inference import int8, loaded, predict, predictor
from bertsmith.inference.predict import evaluate_file, predict_file
from bertsmith.inference.predictor import CHUNK, compute_logits, predict_examples
from bertsmith.inference.products import can_multiply_int8
from bertsmith.tasks.examples import EncodingReport, TextExample
from bertsmith.tasks.model_folder import load_task_model
from bertsmith.tasks.table import read_text_examples
from bertsmith.text.tokenizer import BertTokenizer
from made_tasks import KINDS, make_model, questions, reviews, sentences, tune, write_conll, write_rows, write_squad

Files = dict[str, tuple[Path, Path]]
Tuned = Callable[[str], Path]


def rows_of(path: Path) -> list[dict[str, Any]]:
    """A .jsonl's rows."""
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def predicted(run: Path, source: Path, out: Path, **options: Any) -> list[dict[str, Any]]:
    summary = predict_file(run, str(source), out, "cpu", "fp32", **options)
    found = rows_of(out)
    assert summary["rows"] == len(found)
    return found


UNLABELLED = [("a good film",), ("NA",), ('say "x"',), ("the day was bad , very bad",), ("",), ("☃",)]


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet", ".tsv.gz", ".txt"])
def test_rows_in_rows_out(tuned: Tuned, tmp_path: Path, ending: str) -> None:
    source = tmp_path / f"in{ending}"
    if ending == ".txt":
        source.write_text("".join(f"{text}\n" for (text,) in UNLABELLED), encoding="utf-8")
    else:
        write_rows(source, ("text",), UNLABELLED)
    found = predicted(tuned("classify"), source, tmp_path / "out.jsonl")
    assert len(found) == len(UNLABELLED)
    one_by_one = [
        predicted(tuned("classify"), write_rows(tmp_path / "one.jsonl", ("text",), [row]), tmp_path / "o.jsonl")[0]
        for row in UNLABELLED[:3]
    ]
    for row, alone in zip(found, one_by_one, strict=False):
        assert row["label"] == alone["label"]
        assert row["scores"] == pytest.approx(alone["scores"], abs=1e-6)


def test_empty_texts_are_counted_and_said(tuned: Tuned, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A row each, as for any text; of a pair, one that is empty is enough."""
    lines, pairs = tmp_path / "in.txt", tmp_path / "pairs.csv"
    lines.write_text("a good film\n\n \t\nthe day\n", encoding="utf-8")
    write_rows(pairs, ("sentence1", "sentence2"), [("anna lives", "anna works"), ("anna lives", " ")])
    for kind, source, rows, empty, first in (("classify", lines, 4, 2, 2), ("pairs", pairs, 2, 1, 3)):
        summary = predict_file(tuned(kind), str(source), tmp_path / "out.jsonl", "cpu", "fp32")
        assert (summary["rows"], len(rows_of(tmp_path / "out.jsonl")), summary["empty_texts"]) == (rows, rows, empty)
        so = "have an empty text: what is predicted for them comes from no words"
        warning = f"warning: {source.name}: {empty} of {rows} examples {so} (first {source}:{first})"
        assert capfd.readouterr().err.count(warning) == 1
    lines.write_text("a good film\n", encoding="utf-8")
    assert predict_file(tuned("classify"), str(lines), tmp_path / "out.jsonl", "cpu", "fp32")["empty_texts"] == 0
    assert "empty text" not in capfd.readouterr().err


@pytest.mark.parametrize("label", ["-1", "?", "", "some other class", "1;2"])
@pytest.mark.parametrize("kind", ["classify", "regress", "multilabel"])
def test_labels_are_not_looked_at(tuned: Tuned, tmp_path: Path, kind: str, label: str) -> None:
    source = write_rows(tmp_path / "in.csv", ("label", "text", "labels"), [(label, "a good film", label)] * 3)
    plain = write_rows(tmp_path / "plain.csv", ("text",), [("a good film",)] * 3)
    assert predicted(tuned(kind), source, tmp_path / "a") == predicted(tuned(kind), plain, tmp_path / "b")


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_row_holds(tuned: Tuned, files: Files, tmp_path: Path, kind: str) -> None:
    """In every format the same."""
    keys = {
        "classify": ["label", "scores"],
        "pairs": ["label", "scores"],
        "regress": ["score"],
        "multilabel": ["labels", "scores"],
        "choice": ["choice", "scores"],
        "ner": ["tags"],
        "squad1": ["id", "answer", "start", "end", "null_score", "n_best"],
        "squad2": ["id", "answer", "start", "end", "null_score", "n_best"],
    }
    found = predicted(tuned(kind), files[kind][1], tmp_path / "out.jsonl")
    assert list(found[0]) == keys[kind]
    for ending in (".csv", ".tsv", ".parquet"):
        path = tmp_path / f"out{ending}"
        assert predict_file(tuned(kind), str(files[kind][1]), path, "cpu", "fp32")["rows"] == len(found)
        if ending == ".parquet":
            assert pq.read_table(path).to_pylist() == found
            continue
        with path.open(encoding="utf-8", newline="") as file:
            quoting: Any = csv.QUOTE_MINIMAL if ending == ".csv" else csv.QUOTE_NONE
            cells = list(csv.DictReader(file, delimiter="," if ending == ".csv" else "\t", quoting=quoting))
        assert list(cells[0]) == keys[kind]
        for row, cell in zip(found, cells, strict=True):
            for key, value in row.items():
                assert cell[key] == ("" if value is None else value if isinstance(value, str) else json.dumps(value))


@pytest.mark.parametrize("kind", ["classify", "regress", "multilabel", "choice", "ner"])
def test_no_rows_in_no_rows_out(
    tuned: Tuned, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A valid file with the columns that a row would have."""
    whole = predicted(tuned(kind), files[kind][1], tmp_path / "whole.jsonl")
    if kind == "ner":
        source = tmp_path / "in.parquet"
        pq.write_table(pa.table({"tokens": pa.array([], pa.list_(pa.string()))}), source)
    else:
        source = tmp_path / "in.csv"
        with files[kind][1].open(encoding="utf-8") as file:
            source.write_text(file.readline(), encoding="utf-8")
    for ending in (".csv", ".tsv", ".jsonl", ".parquet"):
        out = tmp_path / f"out{ending}"
        capsys.readouterr()
        assert predict_file(tuned(kind), str(source), out, "cpu", "fp32")["rows"] == 0
        assert f"warning: {source}: no rows, and so none in {out}\n" in capsys.readouterr().err
        if ending == ".parquet":
            assert pq.read_table(out).schema.names == list(whole[0])
            assert pq.read_table(out).num_rows == 0
        else:
            expected = "" if ending == ".jsonl" else (",\t"[ending == ".tsv"]).join(whole[0]) + "\n"
            assert out.read_text("utf-8") == expected


def test_unknown_words_are_said(tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_rows(tmp_path / "in.csv", ("text", "label"), [("☃ ☃ ☃ ♡", "pos"), ("a cat", "neg")])
    said = "of the tokens are [UNK]: the vocabulary does not know these texts' words"
    predict_file(tuned("classify"), str(source), tmp_path / "out.jsonl", "cpu", "fp32")
    assert said in capsys.readouterr().err
    evaluate_file(tuned("classify"), str(source), "cpu", "fp32")
    assert said in capsys.readouterr().err
    write_rows(source, ("text", "label"), [("a cat", "pos")])
    evaluate_file(tuned("classify"), str(source), "cpu", "fp32")
    assert said not in capsys.readouterr().err


def test_words_without_tags(tuned: Tuned, tmp_path: Path) -> None:
    """One column, or a column of something else; a 300-word sentence; words that are nothing to the tokenizer."""
    made = [*sentences(4), [("\U000fe4fa", "O"), ("zq" * 30, "O")] * 150, [("anna", "O")]]
    source = write_conll(tmp_path / "in.conll", made, tagged=False)
    found = predicted(tuned("ner"), source, tmp_path / "out.jsonl")
    assert [len(row["tags"]) for row in found] == [len(sentence) for sentence in made]
    odd = write_conll(tmp_path / "odd.conll", [[(word, "what-ever") for word, _ in sentence] for sentence in made])
    assert predicted(tuned("ner"), odd, tmp_path / "odd.jsonl") == found
    lists = write_rows(tmp_path / "in.jsonl", ("tokens",), [([word for word, _ in s],) for s in made] + [([],)])
    assert predicted(tuned("ner"), lists, tmp_path / "lists.jsonl") == [*found, {"tags": []}]


def test_questions_without_answers(tuned: Tuned, tmp_path: Path) -> None:
    paragraphs = questions(3)
    for number, paragraph in enumerate(paragraphs):
        for question in paragraph["qas"]:
            del question["answers"]
        paragraph["context"] = paragraph["context"] if number else ""
    source = write_squad(tmp_path / "in.json", paragraphs)
    found = predicted(tuned("squad1"), source, tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == [question["id"] for p in paragraphs for question in p["qas"]]
    assert [(row["answer"], row["start"], row["end"]) for row in found[:2]] == [("", -1, -1)] * 2, "an empty context"
    for row, paragraph in zip(found[2:], [p for p in paragraphs[1:] for _ in range(2)], strict=True):
        assert row["answer"] == paragraph["context"][row["start"] : row["end"]] != ""


def test_other_columns(tuned: Tuned, tmp_path: Path) -> None:
    plain = write_rows(tmp_path / "plain.csv", ("text", "label"), [("a good film", "pos"), ("a cat", "neg")])
    source = write_rows(
        tmp_path / "in.csv", ("body", "text", "verdict"), [("a good film", "x", "pos"), ("a cat", "y", "neg")]
    )
    options: dict[str, Any] = {"text_column": "body"}
    assert predicted(tuned("classify"), source, tmp_path / "a", **options) == predicted(
        tuned("classify"), plain, tmp_path / "b"
    )
    named = evaluate_file(tuned("classify"), str(source), "cpu", "fp32", text_column="body", label_column="verdict")
    assert named["metrics"] == evaluate_file(tuned("classify"), str(plain), "cpu", "fp32")["metrics"]
    (tmp_path / "l.csv").write_bytes("text\ncafé\n".encode("latin-1"))
    assert predicted(tuned("classify"), tmp_path / "l.csv", tmp_path / "c", encoding="latin-1")
    with pytest.raises(UserError, match="--text-pair-column: the files of ner have no second text"):
        predict_file(tuned("ner"), str(plain), tmp_path / "d", "cpu", "fp32", text_pair_column="x")
    with pytest.raises(UserError, match=r"text_pair_column: .*model takes one text; leave it out"):
        predict_file(tuned("classify"), str(source), tmp_path / "d", "cpu", "fp32", text_pair_column="body")


def test_a_command_that_opens_several_models_warns_of_a_vocabulary_once(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_said", set())
    padded = make_model(tmp_path / "padded", vocab_size=2000)
    train, dev = files["classify"]
    tune(tmp_path / "run", "classify", padded, train, dev, test=str(dev), epochs=0.1)
    assert (tmp_path / "run" / "test.predictions.jsonl").is_file(), "predicted with the model opened again"
    assert capfd.readouterr().err.count("is vocab.txt this model's?") == 1


# --- alone, in a batch, in any order


def scores(task: Any, model: Any, examples: list[Any]) -> list[dict[str, float]]:
    found = predict_examples(task, model, examples, torch.device("cpu"), EncodingReport())
    return [row["scores"] for _, rows in found for row in rows]


def test_alone_as_in_a_batch(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    """pains.md S4: the same numbers in any company and order, within rounding."""
    task, model = load_task_model(tuned("classify"))
    random = np.random.default_rng(0)
    words = ["cat", "good", "bad", "dog", "was", "☃", "xyz"]
    examples = [
        TextExample("f", str(n), " ".join(random.choice(words, random.integers(0, 60))), None, None) for n in range(40)
    ]
    together = scores(task, model, examples)
    order = random.permutation(len(examples)).tolist()
    shuffled = scores(task, model, [examples[number] for number in order])
    monkeypatch.setattr(predictor, "TOKENS_AT_ONCE", {"cpu": 20})
    in_small_batches = scores(task, model, examples)
    for number, example in enumerate(examples):
        for found in (
            scores(task, model, [example])[0],
            shuffled[order.index(number)],
            in_small_batches[number],
        ):
            assert found == pytest.approx(together[number], abs=1e-5)


@pytest.mark.parametrize("kind", ["regress", "choice", "ner", "squad1"])
def test_scores_alone_and_in_a_batch(tuned: Tuned, files: Files, kind: str) -> None:
    task, model = load_task_model(tuned(kind))
    examples = list(task.read(str(files[kind][1]), "dev", True))
    encoded = [sequence for made in task.encode(examples, EncodingReport(), False) for sequence in made]
    together = compute_logits(model, encoded, torch.device("cpu"))
    for sequence, found in zip(encoded, together, strict=True):
        assert found.shape == (len(sequence.positions), task.outputs)
        (alone,) = compute_logits(model, [sequence], torch.device("cpu"))
        np.testing.assert_allclose(alone, found, rtol=0, atol=1e-5)


def test_a_row_at_the_end_that_is_none_is_told_before_anything_is_predicted(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"text": "good"}\n' * 300 + '{"text": ["good"]}\n', encoding="utf-8")
    monkeypatch.setattr(predict, "predict_examples", lambda *more: pytest.fail("predicted already"))
    with pytest.raises(UserError, match=r"in\.jsonl:301"):
        predict_file(tuned("classify"), str(source), tmp_path / "o.jsonl", "cpu", "fp32")
    assert not (tmp_path / "o.jsonl").exists()


def test_the_end_is_in_sight(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.tsv", ("text",), [("good",)] * 7)
    totals: list[float | None] = []
    bar = predict.Progress
    monkeypatch.setattr(predict, "Progress", lambda label, total, unit: totals.append(total) or bar(label, total, unit))
    predict_file(tuned("classify"), str(source), tmp_path / "o.jsonl", "cpu", "fp32")
    evaluate_file(tuned("classify"), str(write_rows(tmp_path / "e.tsv", ("text", "label"), reviews(9))), "cpu", "fp32")
    assert totals == [7, 9]


def test_dropout_is_off(tuned: Tuned) -> None:
    task, model = load_task_model(tuned("classify"))
    example = TextExample("f", "0", "a good film", None, None)
    assert model.config.hidden_dropout_prob > 0
    assert scores(task, model.train(), [example]) == scores(task, model, [example])


def test_memory_is_that_of_a_chunk(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more rows are read ahead, and none are kept, whatever the length of the file."""
    task, model = load_task_model(tuned("classify"))
    monkeypatch.setattr(predictor, "CHUNK", 16)
    read, done = 0, 0

    def endless() -> Iterator[TextExample]:
        nonlocal read
        for read in range(1, 100):
            yield TextExample("f", str(read), "a cat", None, None)

    for examples, rows in predict_examples(task, model, endless(), torch.device("cpu"), EncodingReport()):
        done += len(rows)
        assert len(examples) == len(rows) <= 16
        assert read == done
    assert done == 99
    assert CHUNK < 10_000


# --- evaluation


def test_test_files_are_scored_where_labelled(tuned: Tuned, tmp_path: Path) -> None:
    rows = [("a good film", "pos"), ("a bad film", "neg")]
    labelled = write_rows(tmp_path / "a.csv", ("text", "label"), rows)
    partly = write_rows(tmp_path / "b.csv", ("text", "label"), [*rows, ("a cat", "")])
    bare = write_rows(tmp_path / "c.csv", ("text",), [row[:1] for row in rows])
    found = [predict_file(tuned("classify"), str(path), tmp_path / "p", "cpu", "fp32", score=True)
             for path in (labelled, partly, bare)]  # fmt: skip
    assert found[0]["metrics"] == evaluate_file(tuned("classify"), str(labelled), "cpu", "fp32")["metrics"]
    assert [summary["metrics"] for summary in found[1:]] == [None, None]
    assert "metrics" not in predict_file(tuned("classify"), str(labelled), tmp_path / "p", "cpu", "fp32")


def test_metrics_are_imported_before_the_bar(tuned: Tuned, files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its end it would stand still for seconds."""
    happened: list[str] = []

    class Bar(predict.Progress):
        def __enter__(self) -> "Bar":
            happened.append("bar")
            return self

    monkeypatch.setattr(predict, "Progress", Bar)
    monkeypatch.setattr(predict.importlib, "import_module", happened.append)
    evaluate_file(tuned("classify"), str(files["classify"][1]), "cpu", "fp32")
    assert happened == ["sklearn.metrics", "bar"]


def test_evaluation_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    """Metrics first, a line a class, and which class is taken for which, unless there are too many."""
    row = {"precision": 0.5, "recall": 1.0, "f1": 2 / 3, "support": 1_234}
    report = {"truncated": 2, "windowed": 0, "unknown_rate": 0.125}
    summary = {
        "task": "classify",
        "metrics": {"accuracy": 0.75, "f1": 0.5},
        "f1_label": "positive",
        "one_class_only": False,
        "per_class": [{"label": "neg", **row}, {"label": "positive", **row}],
        "confusion": [[1_234, 0], [7, 12]],
        "labels": ["neg", "positive"],
        "rows": 1_253,
        "data_report": report,
        "seconds": 1.5,
    }
    show_evaluate(summary)
    assert capsys.readouterr().out.splitlines() == [
        "task: classify",
        "accuracy: 0.75",
        "f1: 0.5",
        "f1 is that of label 'positive'",
        "  neg                  precision 0.500  recall 1.000  f1 0.667  (1,234)",
        "  positive             precision 0.500  recall 1.000  f1 0.667  (1,234)",
        "  true \\ predicted    neg  positive",
        "  neg               1,234         0",
        "  positive              7        12",
        "1,253 rows in 1s: 2 cut, 0 in windows, 12.5% of the tokens [UNK]",
    ]
    show_evaluate(summary | {"labels": list("abcdefghijklm"), "confusion": [[0] * 13] * 13, "one_class_only": True})
    shown = capsys.readouterr().out
    assert "predicted" not in shown
    assert "every prediction is one and the same\n" in shown
    show_evaluate(summary | {"labels": [], "confusion": None, "per_class": None, "f1_label": None})
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_evaluation_names_what_is_wrong(tuned: Tuned, tmp_path: Path) -> None:
    for content, message in (
        ("text,label\na,pos\nb,other\n", r"in\.csv:3: label 'other' is not one of the training file's: neg, pos"),
        ("text,label\na,pos\nb,\n", r"in\.csv:3: column 'label' is empty"),
        ("text\na\n", r"in\.csv:1: no column 'label'"),
        ("text,label\n", r"in\.csv: holds no example to score"),
    ):
        (tmp_path / "in.csv").write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            evaluate_file(tuned("classify"), str(tmp_path / "in.csv"), "cpu", "fp32")


# --- refusals


def test_folders_that_were_not_fine_tuned(model: Path, tuned: Tuned, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.csv", ("text",), [("a",)])
    with pytest.raises(UserError, match=r"was not fine-tuned for a task, so that it has no trained output layer"):
        predict_file(model, str(source), tmp_path / "out.jsonl", "cpu", "fp32")
    for name, message in (("nowhere", "no such folder; name a model folder"),):
        with pytest.raises(UserError, match=message):
            predict_file(tmp_path / name, str(source), tmp_path / "out.jsonl", "cpu", "fp32")
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.toml").touch()
    with pytest.raises(UserError, match="begun: this run has no finished model yet"):
        evaluate_file(tmp_path / "begun", str(source), "cpu", "fp32")
    assert not (tmp_path / "out.jsonl").exists()
    other = make_model(tmp_path / "other")
    (other / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        predict_file(other, str(source), tmp_path / "out.jsonl", "cpu", "fp32")


def test_outputs(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_rows(tmp_path / "in.csv", ("text",), [("a",)])
    before = source.read_bytes()
    for name, message in (
        ("out.xlsx", r"out\.xlsx: an output ends in \.jsonl"),
        ("in.csv", r"in\.csv: is the input as well, and would be replaced; choose another --output"),
        ("in.csv/x.csv", "a file stands where a folder is needed"),
        ("/dev/null", "/dev/null: is a pipe or a device"),
    ):
        with pytest.raises(UserError, match=message):
            predict_file(tuned("classify"), str(source), tmp_path / name, "cpu", "fp32")
    assert source.read_bytes() == before
    broken = tmp_path / "broken.csv"
    broken.write_text("text,x\na,b\nc\n", encoding="utf-8")
    (tmp_path / "old.jsonl").write_text("old", encoding="utf-8")
    for path, message in ((broken, r"broken\.csv:3: 1 cell "), (tmp_path / "nowhere.csv", "nowhere")):
        with pytest.raises(UserError, match=message):
            predict_file(tuned("classify"), str(path), tmp_path / "old.jsonl", "cpu", "fp32")
        assert (tmp_path / "old.jsonl").read_text("utf-8") == "old"
    # a new folder is made, and an absent ending means .jsonl
    assert predicted(tuned("classify"), source, tmp_path / "new" / "out")[0].keys() == {"label", "scores"}


def test_precision(tuned: Tuned, files: Files, tmp_path: Path) -> None:
    source = files["classify"][1]
    exact = predicted(tuned("classify"), source, tmp_path / "a")
    predict_file(tuned("classify"), str(source), tmp_path / "b", "cpu", "bf16")
    rounded = rows_of(tmp_path / "b")
    differences = [abs(a["scores"]["pos"] - b["scores"]["pos"]) for a, b in zip(exact, rounded, strict=True)]
    assert 0 < max(differences) < 0.05


@pytest.mark.skipif(int8_weight_bits() is None or not can_multiply_int8(), reason="no 8-bit products on this machine")
@pytest.mark.parametrize("kind", ["classify", "ner", "squad2"])
def test_in_8_bits(
    tuned: Tuned, files: Files, tmp_path: Path, kind: str, capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """What the loaded model predicts in this arithmetic, near what is exact; and the metrics say how near."""
    monkeypatch.setattr(loaded, "_faster_precision", lambda device: "fp32")
    run, source = tuned(kind), files[kind][1]
    predict_file(run, str(source), tmp_path / "8", "cpu", "int8")
    assert "computes in int8 and fp32; the least cosine" in capfd.readouterr().err
    found, exact = rows_of(tmp_path / "8"), predicted(run, source, tmp_path / "exact")
    numbers, others = (list(numbers_in(rows)) for rows in (found, exact))
    if kind != "ner":
        assert numbers != others
    if kind == "classify":
        assert numbers == pytest.approx(others, abs=0.05)
    model = bertsmith.load(run, "cpu", "int8")
    examples = list(model.task.read(str(source), "test", False, EncodingReport()))
    rows = {
        "classify": lambda example: example.text,
        "ner": lambda example: example.words,
        "squad2": lambda example: (example.question, example.context),
    }
    again = model.predict([rows[kind](example) for example in examples])
    assert [row | {"id": None} for row in again] == [row | {"id": None} for row in found]
    metrics = [evaluate_file(run, str(source), "cpu", precision)["metrics"] for precision in ("fp32", "int8")]
    assert metrics[0].keys() == metrics[1].keys()


def numbers_in(value: Any) -> Iterator[float]:
    """All numbers with a fraction that rows hold."""
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            yield from numbers_in(item)
    elif isinstance(value, float):
        yield value


def test_mistakes_are_told_before_8_bits_are_chosen(
    tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict, "use_bert", lambda *_: pytest.fail("takes half a minute for a large model"))
    monkeypatch.setattr(predict, "check_int8", lambda device: 8)
    source = str(write_rows(tmp_path / "in.csv", ("txt", "label"), [("a", "pos")]))
    for columns, keep, message in (
        ({}, (), "no column 'text'"),
        ({"text_column": "txt"}, ("id",), "no column 'id'"),
        ({"text_column": "txt"}, ("label",), "'label' is what a column of the output itself is called"),
    ):
        with pytest.raises(UserError, match=message):
            predict_file(tuned("classify"), source, tmp_path / "out", "cpu", "int8", keep=keep, **columns)
    with pytest.raises(UserError, match="no column 'text'"):
        evaluate_file(tuned("classify"), source, "cpu", "int8")


def test_8_bits_where_there_are_none(tuned: Tuned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "int8_weight_bits", lambda: None)
    source = write_rows(tmp_path / "in.csv", ("text",), [("a",)])
    with pytest.raises(UserError, match="precision: int8 needs a CPU with AVX2"):
        predict_file(tuned("classify"), str(source), tmp_path / "out", "cpu", "int8")
    assert not (tmp_path / "out.jsonl").exists()


def test_the_tokenizer_travels(tuned: Tuned, tokenizer: BertTokenizer, files: Files) -> None:
    task, _ = load_task_model(tuned("classify"))
    assert task.tokenizer.fingerprint == tokenizer.fingerprint
    examples = list(read_text_examples(str(files["classify"][1]), "classify"))
    assert (
        task.encode(examples, EncodingReport(), True)[0][0].token_ids.tolist()[1:-1]
        == tokenizer.encode_ids([examples[0].text])[0]
    )
