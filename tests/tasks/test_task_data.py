"""From files to encoded rows: labels learnt and matched by name, what is wrong said before training, losses counted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import UserError
from bertsmith.inference.predict import evaluate_file, predict_file
from bertsmith.tasks.data import make_spec, open_task_data
from bertsmith.tasks.files import find_files
from bertsmith.text.tokenizer import BertTokenizer
from made_tasks import (
    KINDS,
    StepProbe,
    make_config,
    make_model,
    make_settings,
    questions,
    reviews,
    tune,
    write_glue,
    write_rows,
    write_squad,
)

Files = dict[str, tuple[Path, Path]]
CONFIG = make_config()


def open_data(tokenizer: BertTokenizer, task: str, train: Path | None, dev: Path | None, **changes: Any) -> Any:
    return open_task_data(make_settings(task, Path("m"), train, dev, **changes), CONFIG, tokenizer)


# --- which files


def test_folders(files: Files, tmp_path: Path) -> None:
    def found(task: str, **changes: Any) -> tuple[str, dict[str, str], dict[str, str]]:
        made = find_files(make_settings(task, Path("m"), data=tmp_path, **changes))
        names = {split: Path(path).name for split, path in made.test.items()}
        return Path(made.train).name, {split: Path(path).name for split, path in made.dev.items()}, names

    with pytest.raises(UserError, match=r"holds no file called train with one of the endings \.tsv, \.csv, .*--train"):
        found("classify")
    for name in ("train.csv", "train.jsonl.gz", "notes.txt"):
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=r"holds no file called dev .* --train and --dev, or hold out .* --dev-share"):
        found("classify")
    assert found("classify", dev_share=0.1) == ("train.csv", {"dev": "train.csv"}, {})
    (tmp_path / "validation.parquet").touch()
    assert found("classify") == ("train.csv", {"dev": "validation.parquet"}, {})
    (tmp_path / "dev.tsv.zst").touch()
    (tmp_path / "test.conll").touch()
    assert found("ner") == ("train.csv", {"dev": "dev.tsv.zst"}, {"test": "test.conll"})
    with pytest.raises(
        UserError, match=r"--dev-share: .* holds a file to score on, dev\.tsv\.zst; leave --dev-share out"
    ):
        found("ner", dev_share=0.1)
    assert found("ner", dev="d.csv", test="t.csv")[1:] == ({"dev": "d.csv"}, {"test": "t.csv"})
    with pytest.raises(UserError, match=r"--data: .*notes\.txt is no folder"):
        find_files(make_settings("classify", Path("m"), data=tmp_path / "notes.txt"))


def test_folders_with_the_official_files_of_squad(tmp_path: Path) -> None:
    def found(task: str) -> list[str]:
        made = find_files(make_settings(task, Path("m"), data=tmp_path))
        return [Path(path).name for path in (made.train, made.dev["dev"])]

    for name in ("train-v1.1.json", "dev-v1.1.json.gz", "train-v2.0.json"):
        (tmp_path / name).touch()
    assert found("squad1") == ["train-v1.1.json", "dev-v1.1.json.gz"]
    with pytest.raises(UserError, match=r"holds no file called dev \(or dev-v2\.0\) with one of the endings"):
        found("squad2")
    (tmp_path / "dev-v2.0.json").touch()
    assert found("squad2") == ["train-v2.0.json", "dev-v2.0.json"]
    with pytest.raises(UserError, match="holds no file called train with"):
        found("classify")
    # the plain name is what the person wrote for us
    (tmp_path / "train.json").touch()
    assert found("squad2") == ["train.json", "dev-v2.0.json"]


def test_glue_folders(tmp_path: Path) -> None:
    glue = write_glue(tmp_path / "glue")

    def found(task: str, data: Path, **changes: Any) -> Any:
        return find_files(make_settings(task, Path("m"), data=data, **changes))

    assert found("mrpc", glue) == found("mrpc", glue / "MRPC")
    mnli = found("mnli", glue)
    assert list(mnli.dev) == ["dev_matched", "dev_mismatched"]
    assert list(mnli.test) == ["test_matched", "test_mismatched"]
    assert found("mrpc", glue, dev="x.tsv", test="y.tsv").dev == {"dev": "x.tsv"}
    assert found("mrpc", glue, dev="x.tsv", test="y.tsv").test == {"test": "y.tsv"}
    with pytest.raises(UserError, match=r"--dev-share: .* holds a file to score on, dev\.tsv"):
        found("rte", glue, dev_share=0.1)
    (glue / "RTE" / "dev.tsv").unlink()
    assert found("rte", glue, dev_share=0.1).dev == {"dev": str(glue / "RTE" / "train.tsv")}
    with pytest.raises(UserError, match=r"RTE: no 'dev\.tsv'; it holds"):
        found("rte", glue)
    shutil.rmtree(glue / "RTE")
    with pytest.raises(UserError, match="glue"):
        found("rte", glue)


# --- lengths and switches


def test_lengths() -> None:
    def length(task: str, positions: int, **changes: Any) -> int:
        settings = make_settings(
            task, Path("m"), Path("t"), Path("d"), **{"max_length": None, "squad__stride": 8, **changes}
        )
        return make_spec(settings, make_config(max_position_embeddings=positions)).max_length

    assert [length("classify", positions) for positions in (64, 128, 512)] == [64, 128, 128]
    assert [length("squad1", positions) for positions in (64, 384, 512)] == [64, 384, 384]
    assert length("classify", 512, max_length=512) == 512
    with pytest.raises(
        UserError, match="--max-length: sequences of 65 tokens are longer than the model's 64 positions"
    ):
        length("classify", 64, max_length=65)


@pytest.mark.parametrize("task", ["ner", "squad2", "choice", "swag"])
def test_windows_where_they_mean_nothing(files: Files, tmp_path: Path, task: str) -> None:
    settings = make_settings(task, Path("m"), Path("t"), Path("d"), long="window")
    with pytest.raises(UserError, match=f"--long: window is for tasks on whole texts; {task} needs no such switch"):
        make_spec(settings, CONFIG)


def test_lengths_too_short_for_anything(model: Path, files: Files, tmp_path: Path) -> None:
    for task, length, message in (
        ("classify", 2, "max_length: 2 tokens do not hold a text; use 3 or more"),
        ("pairs", 4, "max_length: 4 tokens do not hold a pair of texts; use 5 or more"),
        ("ner", 2, "max_length: 2 tokens do not hold a word; use 3 or more"),
        ("squad1", 3, "max_length: 3 tokens hold no context"),
    ):
        with pytest.raises(UserError, match=message):
            tune(tmp_path / "run", task, model, *files[task], max_length=length)
        assert not (tmp_path / "run").exists()


def test_a_stride_that_would_lose_tokens(model: Path, files: Files, tmp_path: Path, steps: StepProbe) -> None:
    for options, message in (
        (
            {"squad__stride": 128},
            r"stride: 128 is too much for windows of --max-length 32: .* use a stride of 28 or less",
        ),
        ({"squad__stride": 29}, r"stride: 29 is too much for windows of --max-length 32"),
        ({"squad__stride": 1, "max_length": 4}, "stride: 1 is too much .* of --max-length 4: .* larger --max-length"),
    ):
        with pytest.raises(UserError, match=message):
            tune(tmp_path / "run", "squad1", model, *files["squad1"], **options)
        assert not (tmp_path / "run").exists()
    assert steps.steps == 0
    tune(tmp_path / "run", "squad1", model, *files["squad1"], squad__stride=1, max_length=6, squad__max_question=2,
         epochs=0.1, squad__max_answer=1, squad__n_best=2)  # fmt: skip
    report = json.loads((tmp_path / "run" / "result.json").read_bytes())
    assert report["steps"] == 1


def test_no_question_is_too_long(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """However long one is that is met later: what the windows have no room for is cut, said and counted."""
    path = write_squad(tmp_path / "t.json", questions(2))
    tune(tmp_path / "run", "squad1", model, path, path, max_length=24, squad__stride=10, epochs=0.1)
    assert "questions are cut to 11 tokens, not 64: max_length 24 less 3 special tokens and a stride of 10" in (
        capfd.readouterr().err
    )
    paragraphs = questions(2)
    paragraphs[1]["qas"][0]["question"] = "who " * 600
    asked = write_squad(tmp_path / "asked.json", paragraphs)
    summary = predict_file(tmp_path / "run", str(asked), tmp_path / "p.jsonl", "cpu", "fp32")
    assert (summary["rows"], summary["questions_cut"], summary["truncated_tokens"]) == (4, 1, 600 - 11)


# --- labels


def test_labels_are_matched_by_name(model: Path, tmp_path: Path) -> None:
    """pains.md F2: trained on one order of names, scored on a file with another, read back from the folder."""
    labels = ("neutral", "entailment", "contradiction")
    rows = [(f"the cat {number}", labels[number % 3]) for number in range(12)]
    train = write_rows(tmp_path / "train.csv", ("text", "label"), rows)
    other = write_rows(tmp_path / "other.jsonl", ("label", "text"), [row[::-1] for row in reversed(rows)])
    summary = tune(tmp_path / "run", "classify", model, train, other, epochs=1)
    assert summary["labels"] == sorted(labels)
    config = json.loads((tmp_path / "run" / "model" / "config.json").read_bytes())
    assert config["id2label"] == {"0": "contradiction", "1": "entailment", "2": "neutral"}
    assert config["label2id"] == {"contradiction": 0, "entailment": 1, "neutral": 2}
    forward, backward = (evaluate_file(tmp_path / "run", str(path), "cpu", "fp32") for path in (train, other))
    assert forward["metrics"] == pytest.approx(summary["dev"])
    assert backward["metrics"] == pytest.approx(summary["dev"])
    assert [row["label"] for row in backward["per_class"]] == sorted(labels)
    assert [row["support"] for row in backward["per_class"]] == [4, 4, 4]
    predict_file(tmp_path / "run", str(train), tmp_path / "p.jsonl", "cpu", "fp32")
    predicted = [json.loads(line) for line in (tmp_path / "p.jsonl").read_text("utf-8").splitlines()]
    assert all(set(row["scores"]) == set(labels) for row in predicted)
    said = [row["label"] for row in predicted]
    assert forward["metrics"]["accuracy"] == sum(a == b for a, (_, b) in zip(said, rows, strict=True)) / 12


@pytest.mark.parametrize("ending", [".csv", ".tsv", ".jsonl", ".parquet", ".csv.gz"])
def test_labels_and_texts_stay_as_typed(tokenizer: BertTokenizer, tmp_path: Path, ending: str) -> None:
    """ "01" is no number, "NA" is no hole, "-1" and "?" are labels."""
    texts = ("NA", "null", "None", "nan", "a")
    labels = ("01", "1", "-1", "?", "NA")
    train = write_rows(tmp_path / f"t{ending}", ("text", "label"), list(zip(texts, labels, strict=True)))
    data = open_data(tokenizer, "classify", train, train)
    assert data.task.spec.labels == ("-1", "01", "1", "?", "NA")
    assert [example.text for example in data.dev["dev"].examples] == list(texts)
    assert data.report["train"]["labels"] == dict.fromkeys(sorted(labels), 1)
    assert data.report["train"]["rows"] == data.report["dev"]["rows"] == 5


@pytest.mark.parametrize(
    ("task", "ending", "labels", "message"),
    [
        ("classify", ".csv", ("good", "bad", "good ", "\tbad", "good "),
         r"t\.csv:4: label 'good ' looks like 'good', first at .*t\.csv:2; .*t\.csv:5: label '\\tbad' looks like "
         r"'bad', first at .*t\.csv:3; labels that look alike would be learnt as two classes; write each in one way"),
        ("classify", ".jsonl", ("caf\u00e9", "bar", "cafe\u0301"),
         r"t\.jsonl:3: label 'cafe\\u0301' looks like 'caf\\xe9', first at .*t\.jsonl:1"),
        ("multilabel", ".csv", ("caf\u00e9;bar", "bar;cafe\u0301"),
         r"t\.csv:3: label 'cafe\\u0301' looks like 'caf\\xe9'"),
        ("ner", ".jsonl", (["B-PER"], ["O"], ["I-PER "]), r"t\.jsonl:3: label 'PER ' looks like 'PER', first at .*:1"),
    ],
)  # fmt: skip
def test_labels_that_look_alike(
    tokenizer: BertTokenizer, tmp_path: Path, task: str, ending: str, labels: tuple[Any, ...], message: str
) -> None:
    columns = {"multilabel": ("text", "labels"), "ner": ("tokens", "tags")}.get(task, ("text", "label"))
    train = write_rows(tmp_path / f"t{ending}", columns, [(["a"] if task == "ner" else "a", label) for label in labels])
    with pytest.raises(UserError, match=message):
        open_data(tokenizer, task, train, train)


def test_labels_of_one_number_are_said(
    tokenizer: BertTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_rows(tmp_path / "t.csv", ("text", "label"), [("a", label) for label in ("1", "2", "1.0", "1.0", "x")])
    assert open_data(tokenizer, "classify", train, train).task.spec.labels == ("1", "1.0", "2", "x")
    told = [line for line in capsys.readouterr().err.splitlines() if "the same number" in line]
    assert told == [f"warning: {train}:4: label '1.0' is the same number as '1', first at {train}:2; they are two "
                    "classes, so if one is meant, write it in one way"]  # fmt: skip


def test_labels_of_one_word_are_said(
    tokenizer: BertTokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = write_rows(tmp_path / "t.csv", ("text", "label"), [("a", label) for label in ("dog", "cat", " Dog", "CAT")])
    assert open_data(tokenizer, "classify", train, train).task.spec.labels == (" Dog", "CAT", "cat", "dog")
    told = [line for line in capsys.readouterr().err.splitlines() if "in capitals" in line]
    assert told == [
        f"warning: {train}:{line}: label {label!r} differs from {other!r}, first at {train}:{first}, in capitals; they "
        "are two classes, so if one is meant, write it in one way"
        for line, label, other, first in ((4, " Dog", "dog", 2), (5, "CAT", "cat", 3))
    ]


def test_numbers_are_labels_too(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    train = write_rows(tmp_path / "t.jsonl", ("text", "label"), [("a", 10), ("b", 9), ("c", 9)])
    assert open_data(tokenizer, "classify", train, train).task.spec.labels == ("9", "10")


def test_several_labels_a_cell(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    rows = [("a", "weather;safety"), ("b", ""), ("c", "safety; weather ")]
    train = write_rows(tmp_path / "t.csv", ("text", "labels"), rows)
    data = open_data(tokenizer, "multilabel", train, train)
    assert data.task.spec.labels == ("safety", "weather")
    assert [sequences[0].targets.tolist() for sequences in data.train] == [[1, 1], [0, 0], [1, 1]]
    bars = write_rows(tmp_path / "u.csv", ("text", "topics"), [(text, cell.replace(";", "|")) for text, cell in rows])
    data = open_data(tokenizer, "multilabel", bars, bars, label_separator="|", label_column="topics")
    assert data.task.spec.labels == ("safety", "weather")
    lists = write_rows(tmp_path / "v.jsonl", ("text", "labels"), [("a", ["x", "y"]), ("b", [])])
    assert open_data(tokenizer, "multilabel", lists, lists).task.spec.labels == ("x", "y")


def test_columns_by_flags(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    rows = [("9", "pos", "the cat", "a dog"), ("8", "neg", "a man", "we")]
    train = write_rows(tmp_path / "t.tsv", ("id", "judgement", "body", "title"), rows)
    data = open_data(tokenizer, "classify", train, train, text_column="body", label_column="judgement")
    assert [example.text for example in data.dev["dev"].examples] == ["the cat", "a man"]
    named = {"text_column": "body", "text_pair_column": "title", "label_column": "judgement"}
    for task in ("classify", "pairs"):
        data = open_data(tokenizer, task, train, train, **named)
        assert [example.pair for example in data.dev["dev"].examples] == ["a dog", "we"]
        assert all(sequences[0].second_segment < len(sequences[0]) for sequences in data.train)
    with pytest.raises(
        UserError, match=r"t\.tsv:1: no columns 'text', 'label' in the first row.* there are 'id', 'judg"
    ):
        open_data(tokenizer, "classify", train, train)
    (tmp_path / "l.csv").write_bytes("text,label\ncafé,a\nx,b\n".encode("latin-1"))
    data = open_data(tokenizer, "classify", tmp_path / "l.csv", tmp_path / "l.csv", encoding="latin-1")
    assert data.dev["dev"].examples[0].text == "café"


def test_pairs_found_by_their_names_are_kept_in_the_spec(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    rows = [("a cat", "a dog", 1), ("a man", "we", 2)]
    train = write_rows(tmp_path / "t.csv", ("sentence1", "sentence2", "label"), rows)
    spec = open_data(tokenizer, "regress", train, train).task.spec
    assert (spec.text_column, spec.text_pair_column, spec.two_texts) == ("sentence1", "sentence2", True)
    train = write_rows(tmp_path / "t.csv", ("text", "sentence2", "label"), rows)
    spec = open_data(tokenizer, "regress", train, train).task.spec
    assert (spec.text_column, spec.text_pair_column, spec.two_texts) == (None, None, False)


def test_the_first_text_beside_a_named_pair(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    for first in ("text", "sentence", "sentence1"):
        train = write_rows(tmp_path / "t.csv", (first, "title", "label"), [("a cat", "x y", "p"), ("a dog", "z", "q")])
        for task in ("classify", "pairs"):
            examples = open_data(tokenizer, task, train, train, text_pair_column="title").dev["dev"].examples
            assert [(example.text, example.pair) for example in examples] == [("a cat", "x y"), ("a dog", "z")]
    train = write_rows(tmp_path / "u.csv", ("text", "sentence", "label"), [("a", "b", "p"), ("c", "d", "q")])
    (example, _) = open_data(tokenizer, "classify", train, train, text_pair_column="text").dev["dev"].examples
    assert (example.text, example.pair) == ("b", "a")


def test_columns_that_mean_nothing(tokenizer: BertTokenizer, files: Files, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "t.csv", ("text", "label", "choice0", "choice1"), [("a", "0", "b", "c")] * 2)
    words = write_rows(tmp_path / "w.jsonl", ("tokens", "tags"), [(["anna"], ["B-PER"])])
    contexts = write_rows(tmp_path / "c.jsonl", ("body", "question"), [("anna", "who")])
    for task, train, changes, message in (
        (
            "classify",
            table,
            {"text_column": "label"},
            r"t\.csv: column 'label' is to be read both as text and as label",
        ),
        ("classify", table, {"label_column": "text"}, "column 'text' is to be read both"),
        ("classify", table, {"text_pair_column": "label"}, "column 'label' is to be read both"),
        ("choice", table, {"text_column": "label"}, "column 'label' is to be read both"),
        ("ner", words, {"label_column": "tokens"}, r"w\.jsonl: column 'tokens' is to be read both"),
        (
            "ner",
            files["ner"][0],
            {"text_column": "tokens"},
            "--text-column: .* columns without names.* --ner.token-column",
        ),
        ("ner", files["ner"][0], {"label_column": "tags"}, "--label-column: .* as --ner.tag-column"),
        ("classify", table, {"ner__tag_column": 2}, "--ner.…: .* means nothing to classify; leave it out"),
        ("squad1", contexts, {"squad__stride": 8}, "no key 'context'; there are .*; these names are fixed"),
    ):
        with pytest.raises(UserError, match=message):
            open_data(tokenizer, task, train, train, **changes)


# --- what is wrong is said before training, and nothing is left


GOOD_CSV = "text,label\na cat,x\na dog,y\n"
MISTAKES: dict[str, tuple[str, dict[str, str], str]] = {
    "absent": ("classify", {"train.csv": ""}, r"train\.csv: empty file"),
    "no header": ("classify", {"train.csv": "a cat,x\na dog,y\n"}, r"train\.csv:1: no columns 'text', 'label' in the"),
    "one class": ("classify", {"train.csv": "text,label\na,x\nb,x\n"},
                  r"train\.csv: holds the one label 'x'; there is nothing to tell apart, two classes or more"),
    "header alone": ("classify", {"train.csv": "text,label\n"}, r"train\.csv: holds no label; there is nothing"),
    "dev is empty": ("classify", {"dev.csv": "text,label\n"}, r"dev\.csv: holds no example to learn from or to score"),
    "unseen in dev": ("classify", {"dev.csv": "text,label\na,x\nb,z\n"},
                      r"dev\.csv:3: label 'z' is not one of the training file's: x, y; mend one of the files"),
    "unseen in test": ("classify", {"test.csv": "text,label\na,x\nb,z\n"}, r"test\.csv:3: label 'z' is not one of"),
    "unseen among unlabelled": ("classify", {"test.csv": "text,label\na,\nb,z\nc,\n"}, r"test\.csv:3: label 'z'"),
    "empty text": ("classify", {"train.csv": "text,label\na,x\n,y\n   ,y\n"},
                   r"train\.csv:3: column 'text' is empty; .*train\.csv:4: column 'text' is empty"),
    "empty label": ("classify", {"dev.csv": "text,label\na,x\nb,\n"}, r"dev\.csv:3: column 'label' is empty"),
    "one cell more": ("classify", {"train.csv": "text,label\na,x\nb,y,z\n"}, r"train\.csv:3: 3 cells where the"),
    "no number": ("regress", {"train.csv": "text,label\na,1\nb,high\n"}, r"train\.csv:3: column 'label' holds 'high'"),
    "no label at all": ("multilabel", {"train.csv": "text,labels\na,\nb,\n", "dev.csv": "text,labels\na,\n"},
                        r"train\.csv: holds no label"),
    "unseen label of several": ("multilabel", {"train.csv": "text,labels\na,p\n", "dev.csv": "text,labels\na,p;q\n"},
                                r"dev\.csv:2: label 'q' is not one of the training file's: p"),
    "no choice": ("choice", {"train.csv": "context,choice0,choice1,label\na,b,c,2\n"}, r"train\.csv:2: column 'label'"),
    "pairs without": ("pairs", {}, r"train\.csv:1: no columns 'sentence1', 'sentence2'"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_tables(model: Path, tmp_path: Path, steps: StepProbe, mistake: str) -> None:
    task, contents, message = MISTAKES[mistake]
    for name in ("train.csv", "dev.csv", "test.csv"):
        (tmp_path / name).write_text(contents.get(name, GOOD_CSV), encoding="utf-8")
    train, dev, test = (tmp_path / name for name in ("train.csv", "dev.csv", "test.csv"))
    with pytest.raises(UserError, match=message) as caught:
        tune(tmp_path / "run", task, model, train, dev, test=test)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    assert steps.steps == 0


@pytest.mark.parametrize("part", ["train", "dev", "test"])
@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_not_there(model: Path, files: Files, tmp_path: Path, kind: str, part: str) -> None:
    named = dict(zip(("train", "dev", "test"), (*files[kind], files[kind][1]), strict=True))
    named[part] = tmp_path / "nowhere" / named[part].name
    with pytest.raises(UserError, match="nowhere"):
        tune(tmp_path / "run", kind, model, named["train"], named["dev"], test=named["test"], squad__stride=8)
    assert not (tmp_path / "run").exists()


def test_mistakes_in_tags(model: Path, files: Files, tmp_path: Path) -> None:
    def write(name: str, content: str) -> Path:
        (tmp_path / name).write_text(content, encoding="utf-8")
        return tmp_path / name

    train = files["ner"][0]
    for name, content, message in (
        ("a.conll", "anna\tB-PER\nlives\n", r"a\.conll:2: no tag beside 'lives'"),
        ("b.conll", "anna\tPERSON\n", r"b\.conll:1: 'PERSON' is no tag"),
        ("c.conll", "anna\tB-PER\n\nacme\tB-ORG\n", r"c\.conll:3: .* begins here has tags of type 'ORG'"),
    ):
        with pytest.raises(UserError, match=message):
            tune(tmp_path / "run", "ner", model, train, write(name, content))
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"train\.conll:1: 2 columns; the token was to be in column 7"):
        tune(tmp_path / "run", "ner", model, train, train, ner__token_column=7)


def test_models_that_do_not_fit(model: Path, files: Files, tmp_path: Path) -> None:
    small = make_model(tmp_path / "small")
    config = json.loads((small / "config.json").read_bytes())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 50}), encoding="utf-8")
    single = make_model(tmp_path / "single", type_vocab_size=1)
    for folder, task, message in (
        (small, "classify", "its tokenizer has [0-9]+ entries, its word table 50; they do not belong together"),
        (single, "pairs", r"train\.csv: holds pairs of texts, and the model has no embedding for a second segment"),
        (single, "squad1", r"train\.json: holds pairs of texts, .* \(type_vocab_size 1\); use another model"),
    ):
        with pytest.raises(UserError, match=message):
            tune(tmp_path / "run", task, folder, *files[task], squad__stride=8)
        assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="nowhere"):
        tune(tmp_path / "run", "classify", tmp_path / "nowhere", *files["classify"])
    tune(tmp_path / "run", "classify", single, *files["classify"], epochs=0.1)


# --- losses are counted


def test_what_is_cut_and_unknown_is_said(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    rows = [(f"{text} ☃ ☃", label) for text, label in reviews(8)]
    rows[3] = (f"{' '.join(['cat'] * 40)} ☃ ☃", rows[3][1])
    path = write_rows(tmp_path / "t.csv", ("text", "label"), rows)
    summary = tune(tmp_path / "run", "classify", model, path, path, epochs=0.1, max_length=32)
    said = capfd.readouterr().err
    train = summary["data_report"]["train"]
    assert (train["truncated"], train["truncated_tokens"]) == (1, 42 - 30)
    assert train["unknown_rate"] == pytest.approx(16 / train["tokens"])
    assert "train: 1 of 8 examples are longer than 32 tokens and cut" in said
    assert "--long window shows all of it" in said
    assert "warning: train: " in said
    assert "of the tokens are [UNK]" in said


def test_what_reading_mends_is_counted(
    tokenizer: BertTokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the data report of its file, with one line that names a place."""
    paragraphs = questions(3)
    paragraphs[0]["qas"][0]["answers"][0]["answer_start"] += 1
    paragraphs[1]["qas"][1]["answers"] = [{"text": "nobody", "answer_start": 0}]
    squad = write_squad(tmp_path / "t.json", paragraphs)
    words = tmp_path / "w.conll"
    words.write_text("-DOCSTART-\tO\n\nanna\tB-PER\nlives\tO\nin\tI-PER\nrome\tB-LOC\nrome\tI-PER\n", encoding="utf-8")
    table = tmp_path / "c.csv"
    table.write_bytes(b"text,label\na cat,x\ncaf\xe9,y\n")
    rows = write_rows(tmp_path / "s.csv", ("context", "choice0", "choice1", "label"), [("a", "b", "c", 0)])
    rows.write_bytes(rows.read_bytes().replace(b",b,", b",\xff,"))
    glue = write_glue(tmp_path / "glue", 3)
    mnli = glue / "MNLI" / "train.tsv"
    mnli.write_text(mnli.read_text("utf-8").replace("\tneutral\n", "\t-\n"), encoding="utf-8")
    for task, path, expected, first in (
        (
            "squad1",
            squad,
            {"answers_moved": 1, "answers_not_in_context": 1, "rows_not_learnt": 1, "answers_misplaced": 1},
            "warning: train: answers moved: 1 (first ",
        ),
        ("ner", words, {"tags_ill_formed": 2, "docstart_line": 1}, f"train: tags ill formed: 2 (first {words}:3)"),
        ("classify", table, {"invalid_bytes": 1}, f"warning: train: 1 bytes are not utf-8, first at {table}:3"),
        ("choice", rows, {"invalid_bytes": 1}, "warning: train: 1 bytes are not utf-8, first at "),
        ("mnli", None, {"no_gold_label": 1}, f"warning: train: no gold label: 1 (first {mnli}:2)"),
    ):
        files = {"data": glue} if path is None else {}
        report = open_data(tokenizer, task, path, path, squad__stride=8, **files).report
        assert {key: report["train"].get(key) for key in expected} == expected, task
        said = capfd.readouterr().err
        assert said.count("warning: train: ") == said.count(first) == 1, said
        if path is not None:
            scored = {
                key: count for key, count in expected.items() if key not in ("rows_not_learnt", "answers_misplaced")
            }
            assert {key: report["dev"].get(key) for key in expected if key in report["dev"]} == scored
    assert "0-who" in str(open_data(tokenizer, "squad1", squad, squad, squad__stride=8).report["dev"]["first_places"])


def test_questions_whose_answers_are_elsewhere(model: Path, tmp_path: Path) -> None:
    """Learnt from they cannot be, scored they are: by their text."""
    paragraphs = questions(6)
    paragraphs[0]["qas"][0]["answers"] = [{"text": "nobody", "answer_start": 0}]
    path = write_squad(tmp_path / "t.json", paragraphs)
    summary = tune(tmp_path / "run", "squad1", model, path, path, epochs=1, squad__stride=8)
    report = summary["data_report"]
    assert report["train"]["answers_misplaced"] == 1
    assert (report["train"]["rows"], report["train"]["sequences"]) == (12, 11)
    assert (report["dev"]["rows"], report["dev"]["sequences"]) == (12, 12)
    assert evaluate_file(tmp_path / "run", str(path), "cpu", "fp32")["metrics"] == pytest.approx(summary["dev"])
    lost = write_squad(tmp_path / "l.json", [paragraphs[0] | {"qas": paragraphs[0]["qas"][:1]}])
    with pytest.raises(UserError, match=r"l\.json: holds no example to learn from"):
        tune(tmp_path / "none", "squad1", model, lost, path, squad__stride=8)
    assert not (tmp_path / "none").exists()


def test_the_fingerprint(tokenizer: BertTokenizer, files: Files, tmp_path: Path) -> None:
    """Of contents: another path or packing is the same, another label, tag or answer of dev is not."""
    for kind, old, new in (
        ("classify", ",pos", ",neg"),
        ("regress", ",5", ",4"),
        ("ner", "B-LOC", "B-PER"),
        ("choice", ",1\n", ",0\n"),
        ("squad1", '"anna", "answer_start"', '"ann", "answer_start"'),
    ):
        train, dev = files[kind]
        before = open_data(tokenizer, kind, train, dev, squad__stride=8).sha256
        copy = tmp_path / dev.name
        shutil.copyfile(dev, copy)
        assert open_data(tokenizer, kind, train, copy, squad__stride=8).sha256 == before
        content = dev.read_text("utf-8")
        assert old in content
        copy.write_text(content.replace(old, new, 1), encoding="utf-8")
        assert open_data(tokenizer, kind, train, copy, squad__stride=8).sha256 != before, kind
        assert open_data(tokenizer, kind, copy, dev, squad__stride=8).sha256 != before, kind
