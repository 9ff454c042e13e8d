"""`--dev-share`: two sides of one file that have no text in common, the same for any seed; the runs made of them."""

import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bertsmith.corpus.random_bits import derive_key
from bertsmith.errors import UserError
from bertsmith.inference.predict import evaluate_file
from bertsmith.options import load_settings
from bertsmith.tasks.data import open_task_data
from bertsmith.tasks.examples import Answer, ChoiceExample, Example, QuestionExample, TaggedExample, TextExample
from bertsmith.tasks.held_out import HeldOut, draw_examples, hold_out, key_splitter, text_key, warn_of_absent_labels
from bertsmith.tasks.runs import truth_of
from bertsmith.tasks.settings import FREE_TO_CHANGE, FinetuneSettings
from bertsmith.text.tokenizer import BertTokenizer
from bertsmith.text.words import Normalization
from bertsmith.training.setup import settings_of_run
from made_tasks import (
    KINDS,
    SETTINGS,
    Crash,
    StepProbe,
    log_lines,
    make_config,
    make_settings,
    questions,
    reviews,
    timeless,
    tune,
    weights_of,
    write_glue,
    write_rows,
    write_squad,
)

Files = dict[str, tuple[Path, Path]]
COLUMNS = ("text", "label")
UNCASED, CASED = Normalization(), Normalization(lowercase=False)


def open_data(tokenizer: BertTokenizer, task: str, train: Path, share: float = 0.25, **changes: Any) -> Any:
    settings = make_settings(task, Path("m"), train, **{"dev_share": share, "squad__stride": 8, **changes})
    return open_task_data(settings, make_config(), tokenizer)


def texts_of(rows: list[tuple[str, str]]) -> list[Example]:
    return [TextExample(f"f:{number}", str(number), text, None, label) for number, (text, label) in enumerate(rows)]


def hold(rows: list[Example], share: float) -> HeldOut:
    return hold_out("f.csv", rows, share, UNCASED)


def key(example: Example, normalization: Normalization = UNCASED) -> int:
    return text_key(example, key_splitter(normalization))


def distinct(count: int, label: str) -> list[tuple[str, str]]:
    return [(f"{label} {number}", label) for number in range(count)]


def tokens_of(encoded: list[Any]) -> Counter[Any]:
    """How often each example is there, as the model is shown it and with its targets."""
    return Counter(
        tuple((tuple(s.token_ids.tolist()), tuple(s.targets.tolist())) for s in sequences) for sequences in encoded
    )


# --- the draw


@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.sampled_from("abc")), min_size=1, max_size=80),
    share=st.floats(0.01, 0.99),
)
def test_sides_of_whole_texts(rows: list[tuple[int, str]], share: float) -> None:
    """The share of every class within what its texts' sizes allow, and something on both sides."""
    texts = [derive_key(text) for text, _ in rows]
    classes = [label for _, label in rows]
    held = draw_examples(texts, classes, share)
    assert held == sorted(set(held))
    assert set(held) <= set(range(len(rows)))
    assert {texts[number] for number in held}.isdisjoint(texts[n] for n in range(len(rows)) if n not in held)
    assert draw_examples(texts, classes, share) == held
    counted = {text: min(label for other, label in rows if other == text) for text, _ in rows}
    for label in "abc":
        own = {text for text, its in counted.items() if its == label}
        total = sum(text in own for text, _ in rows)
        taken = sum(rows[number][0] in own for number in held)
        if len(own) < 2:
            assert taken == 0, "it is needed to learn from"
        else:
            assert taken < total
            biggest = max(Counter(text for text, _ in rows).values())
            assert abs(taken - share * total) <= 2 + 2 * biggest
    assert bool(held) == any(count > 1 for count in Counter(counted.values()).values())


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ((100, 10, 5), 0.2, (20, 2, 1)),
        ((3, 3, 3, 3, 3, 3), 0.1, None),
        ((40, 4), 0.1, (4, 0)),
        ((2, 2), 0.9, (1, 1)),
        ((30, 1, 1, 1), 0.2, (6, 0, 0, 0)),
        ((4, 4), 0.01, None),
    ],
)
def test_every_class_gives_its_share(counts: tuple[int, ...], share: float, expected: tuple[int, ...] | None) -> None:
    classes = [str(label) for label, count in enumerate(counts) for _ in range(count)]
    held = draw_examples([derive_key(number) for number in range(len(classes))], classes, share)
    found = Counter(classes[number] for number in held)
    if expected is None:  # so small classes that some give none: the whole is right
        assert len(held) == max(1, round(share * len(classes)))
        assert max(found.values()) <= 1
    else:
        assert tuple(found[str(label)] for label in range(len(counts))) == expected


def test_a_text_with_many_copies_does_not_fill_dev() -> None:
    """It stays with what is learnt from where it is larger than the share; what fits is drawn instead."""
    texts = [derive_key("copied")] * 50 + [derive_key(number) for number in range(100)]
    held = draw_examples(texts, [""] * 150, 0.2)
    assert len(held) == 30
    assert min(held) >= 50
    pairs = [derive_key(number // 10) for number in range(100)]
    assert len(draw_examples(pairs, [""] * 100, 0.01)) == 10, "one at least, however large"
    assert len(draw_examples(pairs, [""] * 100, 0.19)) == 20, "the nearest there is"


def test_the_draw_is_by_the_texts_and_not_by_their_rows() -> None:
    rows = [*distinct(120, "x"), *distinct(60, "y")]
    found = hold(texts_of(rows), 0.2)
    drawn = {rows[number] for number in found.numbers}
    assert (len(drawn), found.examples, found.texts) == (36, 180, 180)
    assert Counter(label for _, label in drawn) == Counter(x=24, y=12)
    random.Random(1).shuffle(rows)
    assert {rows[number] for number in hold(texts_of(rows), 0.2).numbers} == drawn
    more = [*rows, *[(f"new {text}", label) for text, label in rows[:40]]]
    still = {more[number] for number in hold(texts_of(more), 0.2).numbers}
    assert len(drawn & still) > 25, "a file that has grown keeps most of its dev rows"
    assert abs(sum(int(text.split()[1]) < 60 for text, label in drawn if label == "x") - 12) < 9, "not the first rows"


def test_what_counts_as_one_text() -> None:
    def text(first: str, second: str | None = None) -> int:
        return key(TextExample("f:1", "0", first, second, None))

    assert text("A  good\tfilm ") == text("a good film")
    assert text("a", "b") == text("B", "a")
    assert len({text("a b"), text("ab"), text("a", "b"), text("a", "c"), text("b", "c"), text("a", "")}) == 6

    def choice(context: str, *choices: str) -> int:
        return key(ChoiceExample("f:1", "0", context, choices, None))

    assert choice("a", "B", "c\u0301") == choice("a", "\u0107", "b") != choice("a", "b", "d")
    assert choice("a", "b") != choice("b", "a")
    asked = [key(QuestionExample("f", q, q, c, ())) for q, c in (("who", "x"), ("where", "x"), ("who", "y"))]
    assert asked[0] == asked[1] != asked[2]
    sentences = ((("a", "b."), ("O", "O")), (("a", "b", "."), None), (("a", "B", ".", "c"), None))
    tagged = [key(TaggedExample("f:1", "0", words, tags)) for words, tags in sentences]
    assert tagged[0] == tagged[1] != tagged[2]


@pytest.mark.parametrize(
    ("first", "second", "cased"),
    [
        ("caf\u00e9", "cafe\u0301", True),
        ("caf\u00e9", "cafe", False),
        ("film.", "film .", True),
        ("film", "fi\u200blm", True),
        ("film", "fi\u00adlm", True),
        ("film", "Film", True),
        ("cafe\u200b\u0301", "CAF\u00c9", True),
        ("\u4e2d\u6587", "\u4e2d \u6587", True),
        ("\u200b", "\u00ad \x00", True),
    ],
)
def test_texts_that_a_model_cannot_tell_apart(first: str, second: str, cased: bool) -> None:
    """`cased`: whether they are one text for a model with capitals and accents as well."""
    one, other = (TextExample("f:1", "0", text, None, None) for text in (first, second))
    assert key(one) == key(other)
    assert (key(one, CASED) == key(other, CASED)) is cased


@given(*[st.text(st.sampled_from("aB\u00e9e\u0301 .\u00ad\u0130\u1fb3\u03b1\u0345\u00df\u2603"), max_size=5)] * 2)
def test_the_same_tokens_are_the_same_text(first: str, second: str) -> None:
    """And texts are no more alike for what the vocabulary does not know."""
    for normalization in (UNCASED, CASED):
        tokenizer = BertTokenizer(
            ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"aeBb.\u00e9\u03b1\u00df", "##a", "##e", "##b", "##B"],
            normalization,
        )
        one, other = tokenizer.encode_ids([first, second])
        examples = (TextExample("f:1", "0", text, None, None) for text in (first, second))
        keys = [key(example, normalization) for example in examples]
        known = tokenizer.unk_id not in one + other
        if known and one == other:
            assert keys[0] == keys[1]
        if known and one != other and normalization is UNCASED:
            assert keys[0] != keys[1]


def test_unknown_words_are_not_one_text(tokenizer: BertTokenizer) -> None:
    texts = ["\u2603", "\u2604", "\u2603 \u2604"]
    assert tokenizer.encode_ids(texts) == [[tokenizer.unk_id]] * 2 + [[tokenizer.unk_id] * 2]
    assert len({key(TextExample("f:1", "0", text, None, None), tokenizer.normalization) for text in texts}) == 3


def test_what_is_drawn_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    hold(texts_of([*distinct(20, "x"), *distinct(20, "y"), ("X 1", "x"), ("one", "z")]), 0.1)
    assert capsys.readouterr().err.splitlines() == [
        "dev: 4 of the 42 examples of f.csv (41 texts, each on one side) are held out, 9.5%"
    ]


def test_labels_that_one_side_lacks(capsys: pytest.CaptureFixture[str]) -> None:
    several = [TextExample("f:1", "0", f"text {n}", None, ("p", "q") if n == 3 else ("p", "")) for n in range(4)]
    labels = hold(several, 0.5).labels
    capsys.readouterr()
    warn_of_absent_labels(labels, [0, 3], [1, 2])
    warn_of_absent_labels(labels, [0], [3])
    assert capsys.readouterr().err.splitlines() == [
        "warning: dev: no example of 'q' is on this side; dev scores do not show how well it is learnt",
        "warning: train: no example of 'q' is on this side; it cannot be learnt",
    ]
    warn_of_absent_labels(labels, [3, 0], [3])
    assert not capsys.readouterr().err


# --- what is read of it


@pytest.mark.parametrize("kind", KINDS)
def test_two_sides_of_a_file(tokenizer: BertTokenizer, files: Files, kind: str) -> None:
    """Together they are the file; places are those of the file; no seed changes them."""
    path = files[kind][0]
    whole = open_task_data(make_settings(kind, Path("m"), path, path, squad__stride=8), make_config(), tokenizer)
    data = open_data(tokenizer, kind, path)
    dev, everything = data.dev["dev"], whole.dev["dev"].examples
    assert 0 < len(dev.examples) < len(everything)
    assert dev.examples == [example for example in everything if example in dev.examples], "in the file's order"
    assert data.task.spec == whole.task.spec
    held = [key(example) for example in dev.examples]
    assert sum(key(example) in held for example in everything) == len(dev.examples)
    assert len(data.train) == len(everything) - len(dev.examples)
    there = zip(everything, whole.train, strict=True)
    assert tokens_of(data.train) == tokens_of([made for example, made in there if key(example) not in held])
    report = data.report
    assert (report["train"]["path"], report["dev"]["path"]) == (str(path), str(path))
    assert report["train"]["rows"] + report["dev"]["rows"] == report["dev"]["held_out_of"] == len(everything)
    assert report["dev"]["texts"] == len({key(example) for example in everything})
    assert open_data(tokenizer, kind, path, seed=5, seeds=2).sha256 == data.sha256
    assert open_data(tokenizer, kind, path, share=0.5).sha256 != data.sha256


def test_questions_of_one_context(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    paragraphs = questions(20, seed=2)
    again = [{**paragraphs[n], "qas": [{**paragraphs[n]["qas"][0], "id": f"again-{n}"}]} for n in range(20)]
    data = open_data(tokenizer, "squad1", write_squad(tmp_path / "t.json", [*paragraphs, *again]), 0.2)
    contexts = {example.context for example in data.dev["dev"].examples}
    asked = [q["id"] for p in [*paragraphs, *again] if p["context"] in contexts for q in p["qas"]]
    assert [example.id for example in data.dev["dev"].examples] == asked
    assert abs(len(asked) - 12) <= 3


def test_labels_are_counted_and_mended_rows_said_once(
    tokenizer: BertTokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "t.csv", COLUMNS, [*distinct(10, "x"), *distinct(20, "y"), ("caf", "y")])
    path.write_bytes(path.read_bytes().replace(b"caf", b"caf\xe9"))
    report = open_data(tokenizer, "classify", path, 0.2).report
    assert report["train"]["labels"] == {"x": 8, "y": 17}
    assert (report["train"]["rows"], report["dev"]["rows"]) == (25, 6)
    assert (report["train"]["invalid_bytes"], report["dev"].get("invalid_bytes")) == (1, None)
    said = capfd.readouterr().err
    assert said.count("1 bytes are not utf-8, first at ") == said.count("name it with --encoding") == 1
    assert "dev: 6 of the 31 examples of " in said


def test_train_rows_are_drawn_from_the_rest(
    tokenizer: BertTokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "t.csv", COLUMNS, [(f"cat {n}", "xy"[n % 2]) for n in range(40)])
    every, part = open_data(tokenizer, "classify", path), open_data(tokenizer, "classify", path, train_rows=10)
    assert part.dev["dev"].examples == every.dev["dev"].examples
    assert (len(every.train), len(part.train), len(part.dev["dev"].examples)) == (30, 10, 10)
    assert tokens_of(part.train) <= tokens_of(every.train)
    assert len(open_data(tokenizer, "classify", path, train_rows=30).train) == 30
    assert "warning" not in capfd.readouterr().err
    assert len(open_data(tokenizer, "classify", path, train_rows=31).train) == 30
    assert "warning: --train-rows 31: there are 30 rows to learn from; all are used" in capfd.readouterr().err


def test_labels_are_those_of_the_rows_that_are_drawn(
    tokenizer: BertTokenizer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_rows(tmp_path / "t.csv", COLUMNS, [(f"cat {n}", "xyz"[n % 3]) for n in range(60)])
    data = open_data(tokenizer, "classify", path, 0.3, train_rows=2)
    drawn = Counter(data.task.spec.labels[int(sequences[0].targets[0])] for sequences in data.train)
    assert data.report["train"]["labels"] == {label: drawn[label] for label in "xyz"}
    assert sum(drawn.values()) == 2
    absent = ", ".join(repr(label) for label in "xyz" if not drawn[label])
    (warning,) = [line for line in capfd.readouterr().err.splitlines() if "no example" in line]
    assert warning == f"warning: train: no example of {absent} is on this side; it cannot be learnt"
    dev = write_rows(tmp_path / "dev.csv", COLUMNS, [("dog", "x")])
    settings = make_settings("classify", Path("m"), path, dev, train_rows=2)
    counted = open_task_data(settings, make_config(), tokenizer).report["train"]["labels"]
    assert (sorted(counted), sum(counted.values())) == (["x", "y", "z"], 2)


def test_a_training_file_of_glue_alone(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    path = write_glue(tmp_path / "glue", 12) / "MNLI" / "train.tsv"
    data = open_data(tokenizer, "mnli", path)
    assert (len(data.train), len(data.dev["dev"].examples)) == (9, 3)
    assert {example.label for example in data.dev["dev"].examples} == set(data.task.spec.labels), "of each class one"


def test_nothing_to_hold_out(model: Path, tmp_path: Path, steps: StepProbe) -> None:
    for task, rows, message in (
        (
            "classify",
            [("a", "x"), ("A", "x"), ("b", "y")],
            r"--dev-share: nothing of .*t\.csv can be held out: .* --dev",
        ),
        ("regress", [("a", 1), ("a ", 2)], r"--dev-share: nothing of .*t\.csv can be held out"),
        ("regress", [], r"t\.csv: holds no example to learn from or to score"),
    ):
        path = write_rows(tmp_path / "t.csv", COLUMNS, rows)
        with pytest.raises(UserError, match=message) as caught:
            tune(tmp_path / "run", task, model, path, dev_share=0.5)
        assert "\n" not in str(caught.value)
        assert not (tmp_path / "run").exists()
    assert steps.steps == 0


@pytest.mark.parametrize(("text", "hint"), [("nan", ""), ("x", ""), ("50%", ": 50% is 0.5"), ("", "")])
def test_a_share_that_is_no_number(text: str, hint: str) -> None:
    """Nothing else is said to be wrong: there would be something to score on."""
    given = [("task", "classify"), ("model", "m"), ("train", "t.csv"), ("dev_share", text)]
    with pytest.raises(UserError) as caught:
        load_settings(FinetuneSettings, None, given)
    assert str(caught.value) == f"command line: dev_share = {text!r} is not allowed; give a number or none{hint}"


# --- runs


def test_dev_scores_are_those_of_what_was_held_out(model: Path, tokenizer: BertTokenizer, tmp_path: Path) -> None:
    """Every seed is scored on the same rows, which are nobody's to learn from; the file of them gives the same."""
    path = write_rows(tmp_path / "t.csv", COLUMNS, reviews(48))
    summary = tune(tmp_path / "run", "classify", model, path, dev_share=0.25, seeds=2, seed=3)
    dev = open_data(tokenizer, "classify", path).dev["dev"].examples
    lines = path.read_text("utf-8").splitlines()
    assert [example.place for example in dev] == [f"{path}:{lines.index(f'{e.text},{e.label}') + 1}" for e in dev]
    apart = write_rows(tmp_path / "dev.csv", COLUMNS, [(example.text, example.label) for example in dev])
    assert evaluate_file(tmp_path / "run", str(apart), "cpu", "fp32")["metrics"] == pytest.approx(summary["dev"])
    assert sum(row["support"] for row in summary["per_class"]) == len(dev) == 12
    assert summary["runs"][0]["steps"] == 2 * math.ceil(36 / 8)
    assert summary["data_report"]["dev"]["held_out_of"] == 48
    predicted = [json.loads(line) for line in Path(summary["held_out_predictions"]).read_text("utf-8").splitlines()]
    assert [row["place"] for row in predicted] == [example.place for example in dev]
    assert [row["true_label"] for row in predicted] == [example.label for example in dev]
    right = sum(row["label"] == example.label for row, example in zip(predicted, dev, strict=True))
    assert right / len(dev) == summary["dev"]["accuracy"]


@pytest.mark.parametrize(
    ("example", "truth"),
    [
        (TextExample("f:1", "0", "a", None, ("x", "y")), {"true_labels": ["x", "y"]}),
        (ChoiceExample("f:1", "0", "a", ("b", "c"), 1), {"true_label": 1}),
        (TaggedExample("f:1", "0", ("a",), ("O",)), {"true_tags": ["O"]}),
        (QuestionExample("f:1", "0", "q", "c", (Answer("c", 0),)), {"true_answers": ["c"]}),
    ],
)
def test_what_is_right_stands_beside_what_is_predicted(example: Example, truth: dict[str, Any]) -> None:
    assert truth_of(example) == truth


def test_a_killed_run_goes_on_with_the_same_share_only(
    model: Path, files: Files, tmp_path: Path, steps: StepProbe
) -> None:
    train, dev = files["classify"]
    options = {"dev_share": 0.25, "checkpoint__every": 2}

    def given(**changes: Any) -> FinetuneSettings:
        values = SETTINGS | {"task": "classify", "model": model, "train": train} | changes
        pairs = [(key, str(value)) for key, value in values.items()]
        return settings_of_run(FinetuneSettings, FREE_TO_CHANGE, tmp_path / "run", None, pairs)

    whole = tune(tmp_path / "whole", "classify", model, train, **options)
    steps.crash_at(4)
    with pytest.raises(Crash):
        tune(tmp_path / "run", "classify", model, train, **options)
    assert "dev_share = 0.25" in (tmp_path / "run" / "config.toml").read_text("utf-8")
    assert given().dev_share == 0.25
    with pytest.raises(UserError, match=r"started with other settings.*dev_share was 0\.25 and is now 0\.5"):
        given(dev_share=0.5)
    with pytest.raises(UserError, match="dev_share: means nothing beside --dev"):
        given(dev=dev)
    assert timeless(tune(tmp_path / "run", "classify", model, train, **options)) == timeless(whole)
    assert log_lines(tmp_path / "run") == log_lines(tmp_path / "whole")
    assert weights_of(tmp_path / "run") == weights_of(tmp_path / "whole")
