"""Each kind of task by itself: labels learnt, targets, answers out of scores, official metrics, degenerate runs."""

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bertsmith.errors import UserError
from bertsmith.tasks.conll import SCHEMES, from_iob2, to_iob2
from bertsmith.tasks.examples import (
    Answer,
    ChoiceExample,
    EncodingReport,
    QuestionExample,
    TaggedExample,
    TextExample,
)
from bertsmith.tasks.registry import make_task
from bertsmith.tasks.spec import TaskSpec
from bertsmith.tasks.task import Task, known_label, softmax, sort_labels
from bertsmith.text.tokenizer import BertTokenizer
from made_tasks import questions, sentences, write_conll, write_rows, write_squad


def task_of(tokenizer: BertTokenizer, name: str, *labels: str, **options: Any) -> Task:
    return make_task(TaskSpec(name, options.pop("max_length", 32), tuple(labels), stride=8, **options), tokenizer)


def text(label: Any, number: int = 1, content: str = "the cat") -> TextExample:
    return TextExample(f"f.csv:{number}", str(number), content, None, label)


def decode(task: Task, example: Any, *logits: Any) -> Any:
    """The row for an example whose sequences have these scores."""
    (encoded,) = task.encode([example], EncodingReport(), False)
    assert len(encoded) == len(logits)
    return task.decode(example, encoded, [np.array(rows, dtype=np.float32) for rows in logits])


# --- labels


def test_label_order() -> None:
    assert sort_labels({"b", "a", "B"}) == ("B", "a", "b")
    assert sort_labels({"10", "9", "-1", "0"}) == ("-1", "0", "9", "10")
    assert sort_labels({"01", "1"}) == ("01", "1"), "other texts, though one number"
    assert sort_labels({"10", "9", "x"}) == ("10", "9", "x")
    assert sort_labels({"²", "1"}) == ("1", "²"), "no digit that int() refuses"


def test_glue_has_its_own_order(tokenizer: BertTokenizer) -> None:
    """Whatever a training file begins with, and even if it lacks a class."""
    task = task_of(tokenizer, "mnli")
    assert task.learn_labels(iter([text("neutral")])) == ("contradiction", "entailment", "neutral")
    assert task_of(tokenizer, "classify").learn_labels(iter([text("b"), text("a"), text("b")])) == ("a", "b")


def test_an_unknown_label_is_named() -> None:
    with pytest.raises(UserError, match=r"f\.csv:7: label 'c' is not one of the training file's: a, b; mend one of"):
        known_label("c", {"a": 0, "b": 1}, "f.csv:7")
    with pytest.raises(UserError, match=r"l0, .*l19 and 30 more"):
        known_label("c", {f"l{number}": number for number in range(50)}, "x")


def test_softmax_of_any_scores() -> None:
    np.testing.assert_allclose(softmax(np.array([1e4, 1e4 + 1], dtype=np.float32)), [0.26894, 0.73106], atol=1e-4)
    np.testing.assert_allclose(softmax(np.array([[0.0, 0.0], [-1e30, 0.0]])), [[0.5, 0.5], [0, 1]])


# --- texts


def test_classes(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer, "classify", "neg", "pos")
    encoded = task.encode([text("pos"), text("neg")], EncodingReport(), True)
    assert [sequences[0].targets.tolist() for sequences in encoded] == [[1], [0]]
    assert list(task.class_counts(encoded)) == [1, 1]
    row = decode(task, text(None), [[0.0, math.log(3)]])
    assert row["label"] == "pos"
    assert row["scores"] == pytest.approx({"neg": 0.25, "pos": 0.75})
    scorer = task.scorer()
    assert scorer.compute() == {}
    scorer.add([text("pos"), text("neg"), text("neg")], [{"label": "pos"}] * 3)
    assert scorer.one_class_only
    assert scorer.compute() == pytest.approx({"accuracy": 1 / 3, "f1": 0.5, "macro_f1": 0.25, "matthews": 0})
    scorer.add([text("neg")], [{"label": "neg"}])
    assert not scorer.one_class_only
    assert scorer.details()["confusion"] == [[1, 2], [0, 1]]
    assert [row["support"] for row in scorer.details()["per_class"]] == [3, 1]
    with pytest.raises(UserError, match=r"f\.csv:9: label 'x'"):
        scorer.add([text("x", 9)], [{"label": "neg"}])


def test_f1_says_of_which_class_it_is(tokenizer: BertTokenizer) -> None:
    """Of two classes, where it is a metric; not of three, entities, answers or sets of labels."""
    for name, labels, expected in (
        ("classify", ("neg", "pos"), "pos"),
        ("pairs", ("1", "2"), "1"),
        ("classify", ("a", "b", "c"), None),
        ("mrpc", ("0", "1"), "1"),
        ("cola", ("0", "1"), None),
        ("multilabel", ("a", "b"), None),
        ("ner", ("O", "B-x", "I-x"), None),
        ("squad1", (), None),
        ("regress", (), None),
    ):
        assert task_of(tokenizer, name, *labels).f1_label == expected


def test_glue_has_its_own_metrics(tokenizer: BertTokenizer) -> None:
    for name, first, names in (
        ("cola", "matthews", ["matthews", "accuracy"]),
        ("mrpc", "f1", ["f1", "accuracy"]),
        ("rte", "accuracy", ["accuracy"]),
    ):
        task = task_of(tokenizer, name, *(("entailment", "not_entailment") if name == "rte" else ("0", "1")))
        assert task.metric == first
        scorer = task.scorer()
        scorer.add([text(task.spec.labels[1]), text(task.spec.labels[0])], [{"label": task.spec.labels[1]}] * 2)
        assert list(scorer.compute()) == names
    scorer = task_of(tokenizer, "cola", "0", "1").scorer()
    scorer.add([text("1"), text("0")], [{"label": "1"}] * 2)
    assert scorer.compute() == {"matthews": 0.0, "accuracy": 0.5}


def test_f1_is_of_the_label_1(tokenizer: BertTokenizer) -> None:
    """Where classes are called 0 and 1; else of the second one."""
    for labels in (("0", "1"), ("1", "2"), ("a", "b")):
        scorer = task_of(tokenizer, "classify", *labels).scorer()
        scorer.add([text(labels[1]), text(labels[0])], [{"label": labels[1]}] * 2)
        assert scorer.compute()["f1"] == pytest.approx(0 if labels == ("1", "2") else 2 / 3)


def test_numbers(tokenizer: BertTokenizer) -> None:
    """Nothing is rounded or kept within a range."""
    task = task_of(tokenizer, "regress")
    encoded = task.encode([text(2.5), text(5.0)], EncodingReport(), True)
    assert [sequences[0].targets.tolist() for sequences in encoded] == [[2.5], [5.0]]
    assert decode(task, text(None), [[7.25]]) == {"score": 7.25}
    scorer = task.scorer()
    scorer.add([text(float(y)) for y in (0, 1, 2, 5)], [{"score": p} for p in (-1.0, 1.5, 2.0, 9.0)])
    found = scorer.compute()
    assert found["mse"] == (1 + 0.25 + 0 + 16) / 4
    assert found["spearman"] == 1
    assert found["pearson"] == pytest.approx(np.corrcoef((0, 1, 2, 5), (-1, 1.5, 2, 9))[0, 1])
    assert not scorer.one_class_only
    scorer = task.scorer()
    scorer.add([text(0.0), text(1.0)], [{"score": 0.5}] * 2)
    assert scorer.one_class_only
    assert scorer.compute()["pearson"] == 0
    glue = task_of(tokenizer, "sts-b").scorer()
    glue.add([text(0.0), text(1.0)], [{"score": 0.1}, {"score": 0.2}])
    assert glue.compute() == pytest.approx({"pearson": 1, "spearman": 1})


def test_several_labels(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer, "multilabel", "a", "b", "c")
    examples = [text(("c", "a")), text(())]
    encoded = task.encode(examples, EncodingReport(), True)
    assert [sequences[0].targets.tolist() for sequences in encoded] == [[1, 0, 1], [0, 0, 0]]
    assert list(task.class_counts(encoded)) == [1, 0, 1]
    task.set_positive_weights(np.array([1, 3, 0]), 4)  # type: ignore[attr-defined]
    assert task.weights is not None
    np.testing.assert_allclose(task.weights, [3, 1 / 3, 4])
    row = decode(task, text(None), [[0.1, -0.1, 2.0]])
    assert row["labels"] == ["a", "c"]
    assert row["scores"]["c"] == pytest.approx(1 / (1 + math.exp(-2)))
    assert decode(task, text(None), [[-1e4, 0, 1e4]])["labels"] == ["c"], "one half is not enough; no overflow"
    assert task.learn_labels(iter([text(("b",)), text(()), text(("b", "a"))])) == ("a", "b")
    scorer = task.scorer()
    scorer.add(examples, [{"labels": ["a"]}, {"labels": ["a"]}])
    assert scorer.one_class_only
    assert scorer.compute()["micro_f1"] == pytest.approx(0.5)
    with pytest.raises(UserError, match="label 'z' is not one of"):
        scorer.add([text(("z",))], [{"labels": []}])


def test_windows_give_one_answer(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer, "classify", "neg", "pos", max_length=8, long="window")
    example = text(None, content="the cat dog house river tree day night man")
    row = decode(task, example, [[1.0, 0.0]], [[0.0, 3.0]])
    assert row["label"] == "pos"
    assert row["scores"]["pos"] == pytest.approx(1 / (1 + math.exp(-1)))


@pytest.mark.parametrize("name", ["plain.txt", "packed.txt.gz", "LOUD.TXT"])
def test_a_text_a_line(tokenizer: BertTokenizer, tmp_path: Path, name: str) -> None:
    """For prediction: a .txt has no columns, and every line is a text."""
    content = b'a "good" film\n\nNA\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    task = task_of(tokenizer, "classify", "neg", "pos")
    examples = list(task.read(str(tmp_path / name), "test", False))
    assert [example.text for example in examples] == ['a "good" film', "", "NA"]
    assert [example.place.rpartition(":")[2] for example in examples] == ["1", "2", "3"]
    assert not any(task.is_labelled(example) for example in task.read(str(tmp_path / name), "test", None))
    for refuses, part, labelled in ((task, "train", True), (task_of(tokenizer, "pairs", "a", "b"), "test", False)):
        with pytest.raises(UserError, match=r"is in text's format; give a \.csv, \.tsv, \.jsonl or \.parquet file"):
            list(refuses.read(str(tmp_path / name), part, labelled))


# --- choices


def test_choices(tokenizer: BertTokenizer) -> None:
    task = task_of(tokenizer, "choice")
    example = ChoiceExample("f.csv:1", "0", "the cat", ("was good", "was bad", "was"), 2)
    (encoded,) = task.encode([example], EncodingReport(), True)
    assert [sequence.targets.tolist() for sequence in encoded] == [[2], [], []]
    row = decode(task, example, [[1.0]], [[0.0]], [[1.0 + math.log(2)]])
    assert row["choice"] == 2
    assert sum(row["scores"]) == pytest.approx(1)
    assert row["scores"][2] == pytest.approx(2 * row["scores"][0])
    scorer = task.scorer()
    scorer.add([example, example], [{"choice": 2}, {"choice": 0}])
    assert scorer.compute() == {"accuracy": 0.5}
    assert not scorer.one_class_only
    assert scorer.details() == {}


# --- words


def test_tags_learnt(tokenizer: BertTokenizer) -> None:
    """Both prefixes of every type, so that an entity of two words can be said though none was seen."""
    task = task_of(tokenizer, "ner")
    made = [TaggedExample("f:1", "0", ("a",), ("B-PER",)), TaggedExample("f:3", "1", ("a",), ("O",))]
    assert task.learn_labels(iter(made)) == ("O", "B-PER", "I-PER")
    assert task.learn_labels(iter(made[1:])) == ("O",)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_file_is_answered_in_its_own_scheme(tokenizer: BertTokenizer, tmp_path: Path, scheme: str) -> None:
    made = sentences(12)
    written = [list(zip((word for word, _ in s), from_iob2([tag for _, tag in s], scheme), strict=True)) for s in made]
    path = str(write_conll(tmp_path / "train.conll", written))
    task = task_of(tokenizer, "ner")
    examples = list(task.read(path, "train", True))
    assert [list(example.tags) for example in examples] == [[tag for _, tag in s] for s in made], "IOB2 inside"
    assert task.learnt_scheme() == scheme
    task = task_of(tokenizer, "ner", *task.learn_labels(iter(examples)), scheme=scheme)
    scorer = task.scorer()
    for example, sentence in zip(examples, written, strict=True):
        (encoded,) = task.encode([example], EncodingReport(), True)
        gold = np.eye(task.outputs)[encoded[0].targets]
        row = task.decode(example, encoded, [gold.astype(np.float32)])
        assert row["tags"] == [tag for _, tag in sentence]
        scorer.add([example], [row])
    assert scorer.compute() == {"precision": 1, "recall": 1, "f1": 1, "accuracy": 1}
    # another file may be written otherwise
    other = str(write_conll(tmp_path / "dev.conll", made))
    assert [example.tags for example in task.read(other, "dev", True)] == [example.tags for example in examples]


def test_files_of_words(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    rows = [(["anna", "lives"], ["B-PER", "O"]), (["rome"], ["B-LOC"])]
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        path = str(write_rows(tmp_path / name, ("tokens", "tags"), rows))
        assert [(list(e.words), list(e.tags)) for e in task_of(tokenizer, "ner").read(path, "train", True)] == rows
    path = str(write_rows(tmp_path / "b.jsonl", ("w", "t"), rows))
    task = task_of(tokenizer, "ner", text_column="w", label_column="t")
    assert len(list(task.read(path, "train", True))) == 2
    # other columns, blanks between them, a digit to strip
    (tmp_path / "c.txt").write_text("1 安0 B-PER x\n2 a1 O x\n", encoding="utf-8")
    task = task_of(tokenizer, "ner", token_column=1, tag_column=2, separator="blank", strip_digit=True)
    (example,) = task.read(str(tmp_path / "c.txt"), "train", True)
    assert (example.words, example.tags) == (("安", "a"), ("B-PER", "O"))
    (tmp_path / "d.conll").write_text("a\tE-PER\nb\tU-PER\n", encoding="utf-8")
    with pytest.raises(UserError, match=r"d\.conll: tags with the prefixes E, U are of two schemes"):
        list(task_of(tokenizer, "ner").read(str(tmp_path / "d.conll"), "train", True))
    (tmp_path / "e.conll").write_text("a\tO\nb\tB-ORG\n", encoding="utf-8")
    task = task_of(tokenizer, "ner", "O", "B-PER", "I-PER")
    (example,) = task.read(str(tmp_path / "e.conll"), "dev", True)
    with pytest.raises(UserError, match=r"e\.conll:1: the sentence .* tags of type 'ORG'; .* types are 'PER'; mend"):
        task.scorer().add([example], [{"tags": ["O", "O"]}])


@settings(max_examples=30)
@given(
    st.lists(st.sampled_from(["anna", "\U000fe4fa", "abcdefgh", "zq" * 20, "", "É", "\u200d"]), max_size=300),
    st.sampled_from(SCHEMES),
    st.integers(3, 32),
)
def test_one_tag_a_word_always(tokenizer: BertTokenizer, words: list[str], scheme: str, max_length: int) -> None:
    """Words that give no piece or eight, sentences of many windows, scores of any kind."""
    task = task_of(tokenizer, "ner", "O", "B-x", "I-x", max_length=max_length, scheme=scheme)
    example = TaggedExample("f:1", "0", tuple(words), None)
    (encoded,) = task.encode([example], EncodingReport(), False)
    random = np.random.default_rng(len(words))
    logits = [random.normal(size=(len(s.positions), 3)).astype(np.float32) for s in encoded]
    assert all(len(sequence) <= max_length for sequence in encoded)
    row = task.decode(example, encoded, logits)
    assert len(row["tags"]) == len(words)
    assert from_iob2(to_iob2(row["tags"], scheme), scheme) == tuple(row["tags"]), "well-formed in its scheme"


def test_words_that_are_nothing(tokenizer: BertTokenizer) -> None:
    scorer = task_of(tokenizer, "ner", "O", "B-x", "I-x").scorer()
    example = TaggedExample("f:1", "0", ("a", "b"), ("B-x", "O"))
    scorer.add([example], [{"tags": ["O", "O"]}])
    assert scorer.one_class_only
    assert scorer.compute()["f1"] == 0
    assert [row["label"] for row in scorer.details()["per_class"]] == ["x"]


# --- answers


def gold_logits(encoded: list[Any]) -> list[Any]:
    """Scores that say what the targets say: a window without the answer points at [CLS]."""
    made = []
    for sequence in encoded:
        logits = np.full((len(sequence), 2), -10.0, dtype=np.float32)
        start, end = sequence.targets
        logits[start, 0] = logits[end, 1] = 10 if (start, end) != (0, 0) else 0
        made.append(logits)
    return made


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("max_length", [16, 32])
def test_gold_answers_give_100(tokenizer: BertTokenizer, tmp_path: Path, version: int, max_length: int) -> None:
    long = questions(1)
    long[0]["context"] += " and the cat" * 30 + " anna ."
    extra = {
        "id": "long",
        "question": "who ?",
        "answers": [{"text": "anna", "answer_start": len(long[0]["context"]) - 6}],
    }
    long[0]["qas"] = [extra]
    path = write_squad(tmp_path / "dev.json", [*questions(6, version == 2, seed=4), *long])
    task = task_of(tokenizer, f"squad{version}", max_length=max_length)
    examples = list(task.read(str(path), "dev", True))
    scorer = task.scorer()
    windows = 0
    for example, sequences in zip(examples, task.encode(examples, EncodingReport(), True), strict=True):
        row = task.decode(example, sequences, gold_logits(sequences))
        if example.answers:
            assert example.context[row["start"] : row["end"]] == row["answer"] == example.answers[0].text
        scorer.add([example], [row])
        windows = max(windows, len(sequences))
    assert windows > 3
    found = scorer.compute()
    assert (found["exact_match"], found["f1"]) == (100, 100)
    assert not scorer.one_class_only


def test_the_threshold_is_tuned_and_kept(tokenizer: BertTokenizer) -> None:
    """Null scores 1 and 5 of answerable questions, 7 of one without an answer: only a threshold in between is right."""
    examples, rows = [], []
    for number, (null, answers) in enumerate(((1.0, ("anna",)), (5.0, ("anna",)), (7.0, ()))):
        golds = tuple(Answer(answer, 0) for answer in answers)
        examples.append(QuestionExample("f", str(number), "who ?", "anna lives", golds))
        rows.append({"answer": "", "n_best": [{"text": ""}, {"text": "anna"}], "null_score": null})
    fresh = task_of(tokenizer, "squad2")
    assert fresh.metric == "f1"
    scorer = fresh.scorer()
    assert (scorer.compute(), scorer.details(), scorer.one_class_only) == ({}, {}, False)
    scorer.add(examples, rows)
    assert (scorer.compute()["f1"], scorer.compute()["NoAns_f1"]) == (100, 100)
    threshold = scorer.details()["null_threshold"]
    assert 5 <= threshold < 7
    for tuned, expected, none in ((threshold, 100, False), (0.0, 100 / 3, True), (3.0, 200 / 3, False)):
        scorer = task_of(tokenizer, "squad2", null_threshold=tuned).scorer()
        scorer.add(examples, rows)
        assert scorer.compute()["f1"] == pytest.approx(expected)
        assert scorer.one_class_only is none, "no question is answered"
        assert scorer.details() == {"null_threshold": tuned}


def test_silence_where_nothing_can_be_answered(tokenizer: BertTokenizer) -> None:
    """It is no sign of a run that learnt nothing."""
    row = {"answer": "", "n_best": [{"text": "anna"}], "null_score": 7.0}
    for answers, degenerate in (((), False), ((Answer("anna", 0),), True)):
        task = task_of(tokenizer, "squad2", null_threshold=0.0)
        scorer = task.scorer()
        scorer.add([QuestionExample("f", "0", "who ?", "anna lives", answers)], [row])
        assert scorer.one_class_only is degenerate
    assert task.degenerate_run == "in this run no question was answered"


def test_the_threshold_decides_answers(tokenizer: BertTokenizer, tmp_path: Path) -> None:
    path = write_squad(tmp_path / "dev.json", questions(1))
    for threshold, answered in ((None, False), (0.0, False), (30.0, True)):
        task = task_of(tokenizer, "squad2", null_threshold=threshold)
        example = next(iter(task.read(str(path), "dev", True)))
        (encoded,) = task.encode([example], EncodingReport(), False)
        (logits,) = gold_logits(task.encode([example], EncodingReport(), True)[0])
        logits[0] = 20
        row = task.decode(example, encoded, [logits])
        assert row["null_score"] == 20
        assert bool(row["answer"]) is answered
        assert (row["start"] >= 0) is answered


def test_questions_that_are_not_answered(tokenizer: BertTokenizer) -> None:
    scorer = task_of(tokenizer, "squad1").scorer()
    example = QuestionExample("f", "0", "who ?", "", (Answer("anna", -1),))
    scorer.add([example], [{"answer": "", "n_best": [{"text": ""}], "null_score": None}])
    assert scorer.one_class_only
    assert scorer.details() == {}
    assert scorer.compute() == {"exact_match": 0, "f1": 0}
