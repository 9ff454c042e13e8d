"""Metrics equal scikit-learn's, scipy's, seqeval's and torchmetrics', in any chunks, and are numbers at every edge."""

import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from seqeval import metrics as seqeval
from sklearn import metrics as sk

from bertsmith.tasks.metrics import (
    ChoiceMetrics,
    ClassificationMetrics,
    EntityMetrics,
    MultilabelMetrics,
    RegressionMetrics,
)

torchmetrics = pytest.importorskip("torchmetrics.functional")

LABELS = ("negative", "neutral", "positive", "mixed")
TAGS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC", "B-working-group", "I-working-group", "B-O")
COLUMNS = ("precision", "recall", "f1", "support")
ALL_METRICS: dict[str, Callable[[], Any]] = {
    "classification": lambda: ClassificationMetrics(LABELS),
    "regression": RegressionMetrics,
    "multilabel": lambda: MultilabelMetrics(LABELS),
    "entity": EntityMetrics,
    "choice": ChoiceMetrics,
}


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """Ours must not warn whatever comes; what a reference warns of is caught where it is called."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def quietly(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """What a reference says, without its warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call(*arguments, **options)


def add_in_chunks(metrics: Any, predicted: Any, true: Any, chunk: int) -> Any:
    """The same metrics, filled `chunk` examples at a time."""
    for start in range(0, len(true), chunk):
        metrics.add(predicted[start : start + chunk], true[start : start + chunk])
    assert metrics.count == len(true)
    return metrics


def check_rows(rows: list[dict[str, Any]], labels: tuple[str, ...], columns: Any) -> None:
    """Rows by class hold a reference's four columns."""
    assert [row["label"] for row in rows] == list(labels)
    for row, *values in zip(rows, *columns, strict=True):
        assert list(row) == ["label", *COLUMNS]
        assert [row[name] for name in COLUMNS] == pytest.approx(values)


@st.composite
def class_ids(draw: st.DrawFn) -> tuple[int, np.ndarray, np.ndarray]:
    """(classes, predicted, true); often one class only, on either side."""
    classes, count = draw(st.integers(2, 4)), draw(st.integers(1, 40))
    predicted, true = (
        draw(st.lists(st.integers(0, draw(st.integers(0, classes - 1))), min_size=count, max_size=count))
        for _ in range(2)
    )
    return classes, np.array(predicted), np.array(true)


@given(class_ids(), st.integers(1, 10))
@settings(max_examples=60)
def test_classification_equals_scikit_learn(data: tuple[int, np.ndarray, np.ndarray], chunk: int) -> None:
    classes, predicted, true = data
    metrics = add_in_chunks(ClassificationMetrics(LABELS[:classes]), predicted, true, chunk)
    f1 = {"f1": quietly(sk.f1_score, true, predicted, zero_division=0)} if classes == 2 else {}
    f1["macro_f1"] = quietly(sk.f1_score, true, predicted, average="macro", zero_division=0)
    expected = {
        "accuracy": sk.accuracy_score(true, predicted),
        **f1,
        "matthews": quietly(sk.matthews_corrcoef, true, predicted),
    }
    computed = metrics.compute()
    assert list(computed) == list(expected)
    assert computed == pytest.approx(expected, abs=1e-12)
    ids = list(range(classes))
    np.testing.assert_array_equal(metrics.confusion(), sk.confusion_matrix(true, predicted, labels=ids))
    columns = quietly(sk.precision_recall_fscore_support, true, predicted, labels=ids, zero_division=0)
    check_rows(metrics.per_class(), LABELS[:classes], columns)
    assert metrics.one_class_only == (len(set(predicted.tolist())) == 1)


@given(class_ids())
@settings(max_examples=50)
def test_classification_equals_torchmetrics(data: tuple[int, np.ndarray, np.ndarray]) -> None:
    classes, predicted, true = data
    metrics = ClassificationMetrics(LABELS[:classes])
    metrics.add(predicted, true)
    computed = metrics.compute()
    ours, theirs = torch.from_numpy(predicted), torch.from_numpy(true)
    task = {"task": "multiclass", "num_classes": classes}
    accuracy = torchmetrics.accuracy(ours, theirs, **task, average="micro")
    assert computed["accuracy"] == pytest.approx(float(accuracy), abs=1e-6)
    if classes == 2:
        f1 = torchmetrics.f1_score(ours, theirs, task="binary")
    else:
        f1 = torchmetrics.f1_score(ours, theirs, **task, average="macro")
    assert computed["f1" if classes == 2 else "macro_f1"] == pytest.approx(float(f1), abs=1e-6)
    if not metrics.one_class_only and len(set(true.tolist())) > 1:  # torchmetrics has its own idea of the rest
        matthews = torchmetrics.matthews_corrcoef(ours, theirs, **task)
        assert computed["matthews"] == pytest.approx(float(matthews), abs=1e-5)


def test_one_class_predicted_is_matthews_zero_and_flagged() -> None:
    """Pains F1, F10: 68 % accuracy and 0.81 F1 on MRPC are those of a model that always says 1."""
    metrics = ClassificationMetrics(("0", "1"))
    metrics.add([1] * 408, [1] * 279 + [0] * 129)
    computed = metrics.compute()
    assert metrics.one_class_only
    assert computed["matthews"] == 0.0
    assert computed["accuracy"] == pytest.approx(0.684, abs=1e-3)
    assert computed["f1"] == pytest.approx(0.812, abs=1e-3)
    metrics.add([0], [0])
    assert not metrics.one_class_only
    assert metrics.compute()["matthews"] > 0


def test_f1_is_of_the_positive_label_that_is_named() -> None:
    predicted, true = [0, 0, 1, 1, 1], [0, 1, 1, 1, 0]
    for positive, expected in ((None, 2 / 3), ("yes", 2 / 3), ("no", 1 / 2)):
        metrics = ClassificationMetrics(("no", "yes"), positive=positive)
        metrics.add(predicted, true)
        assert metrics.compute()["f1"] == pytest.approx(expected)
    for labels, positive in ((("no", "yes"), "maybe"), (("a", "b", "c"), "b")):
        with pytest.raises(ValueError, match=positive):
            ClassificationMetrics(labels, positive=positive)


def test_many_classes_take_no_dense_matrix_until_asked() -> None:
    """50,000 classes squared would be 20 GB."""
    metrics = ClassificationMetrics([str(i) for i in range(50_000)])
    metrics.add([49_999, 3], [49_999, 4])
    computed = metrics.compute()
    assert (computed["accuracy"], computed["macro_f1"]) == pytest.approx((1 / 2, 1 / 3))
    assert metrics.per_class()[49_999]["f1"] == 1.0


@pytest.mark.parametrize(
    ("predicted", "true", "message"),
    [
        ([4], [0], "predicted ids from 4 to 4 are not all from 0 to 3"),
        ([0], [-1], "true ids from -1"),
        ([0, 1], [0], "not two arrays"),
        ([[0]], [[0]], "not two arrays"),
        ([0.0], [0], "not integers"),
    ],
)
def test_class_ids_are_checked(predicted: Any, true: Any, message: str) -> None:
    metrics = ClassificationMetrics(LABELS)
    with pytest.raises(ValueError, match=message):
        metrics.add(predicted, true)
    assert metrics.count == 0


@pytest.mark.parametrize("kind", [ClassificationMetrics, MultilabelMetrics])
@pytest.mark.parametrize("labels", [(), ("a", "a")])
def test_labels_are_checked(kind: Callable[..., Any], labels: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="not distinct"):
        kind(labels)


# Rounded: correlations of values that differ in the last bits only are rounding errors, scipy's as well as ours
NUMBERS = st.one_of(st.integers(0, 5).map(float), st.floats(-10, 10).map(lambda value: round(value, 3)))


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=40), st.integers(1, 10))
@settings(max_examples=60)
def test_regression_equals_scipy(pairs: list[tuple[float, float]], chunk: int) -> None:
    predicted, true = np.array(pairs).T
    metrics = add_in_chunks(RegressionMetrics(), predicted, true, chunk)
    computed = metrics.compute()
    assert list(computed) == ["pearson", "spearman", "mse"]
    assert computed["mse"] == pytest.approx(sk.mean_squared_error(true, predicted))
    for name, reference in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        expected = float(quietly(reference, predicted, true).statistic) if len(true) > 1 else 0.0
        assert computed[name] == pytest.approx(0.0 if np.isnan(expected) else expected, abs=1e-12)
    assert metrics.one_class_only == (len(set(predicted.tolist())) == 1)


def test_regression_equals_torchmetrics() -> None:
    generator = np.random.default_rng(5)
    true = generator.uniform(0, 5, 300).round(1)  # ties, as in STS-B
    predicted = (true + generator.normal(0, 1, 300)).round(1)
    metrics = add_in_chunks(RegressionMetrics(), predicted, true, 32)
    ours, theirs = torch.from_numpy(predicted), torch.from_numpy(true)
    expected = {
        "pearson": float(torchmetrics.pearson_corrcoef(ours, theirs)),
        "spearman": float(torchmetrics.spearman_corrcoef(ours, theirs)),
        "mse": float(torchmetrics.mean_squared_error(ours, theirs)),
    }
    assert metrics.compute() == pytest.approx(expected, abs=1e-6)


def test_scores_outside_the_range_are_neither_rounded_nor_cut() -> None:
    """Pains F9."""
    metrics = RegressionMetrics()
    metrics.add(np.array([-1, 1, 2, 9]), [0, 1, 2, 5])
    computed = metrics.compute()
    assert computed["mse"] == pytest.approx((1 + 0 + 0 + 16) / 4)
    assert computed["spearman"] == pytest.approx(1.0)
    assert computed["pearson"] == pytest.approx(0.99337009)  # cut to 0..5 it would be 1


@pytest.mark.parametrize(
    ("predicted", "true", "one_class_only"),
    [
        ([2.5, 2.5, 2.5], [0.0, 1.0, 5.0], True),
        ([0.1, 0.2, 0.3], [3.0, 3.0, 3.0], False),
        ([1.0], [1.0], True),
    ],
)
def test_correlation_of_constants_is_zero(predicted: list[float], true: list[float], one_class_only: bool) -> None:
    metrics = RegressionMetrics()
    metrics.add(predicted, true)
    computed = metrics.compute()
    assert (computed["pearson"], computed["spearman"]) == (0.0, 0.0)
    assert metrics.one_class_only == one_class_only


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf")])
def test_predictions_that_are_no_numbers_score_nothing(odd: float) -> None:
    metrics = RegressionMetrics()
    metrics.add([1.0, odd, 3.0], [1.0, 2.0, 3.0])
    assert metrics.compute() == {"pearson": 0.0, "spearman": 0.0, "mse": float("inf")}
    assert metrics.one_class_only
    with pytest.raises(ValueError, match="not a finite number"):
        metrics.add([1.0], [odd])
    with pytest.raises(ValueError, match="not two arrays"):
        metrics.add([[1.0]], [[1.0]])


@pytest.mark.parametrize("size", [1e-200, 1e-16, 1e200, 1.7e308])
def test_extreme_numbers_give_no_nan(size: float) -> None:
    metrics = RegressionMetrics()
    metrics.add([1 - size, 1 + size, 1.0], [1.0, 2.0, 3.0])
    metrics.add([-size, size, 0.0], [1.0, 2.0, 3.0])
    assert not any(np.isnan(value) for value in metrics.compute().values())


@st.composite
def label_sets(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    """(predicted, true), both (n, L), L ≥ 2 (of one column scikit-learn would think binary)."""
    count, labels = draw(st.integers(1, 20)), draw(st.integers(2, 4))
    predicted, true = (
        np.array(
            draw(st.lists(st.integers(0, draw(st.integers(0, 1))), min_size=count * labels, max_size=count * labels))
        ).reshape(count, labels)
        for _ in range(2)
    )
    return predicted, true


@given(label_sets(), st.integers(1, 10))
@settings(max_examples=60)
def test_multilabel_equals_scikit_learn_and_torchmetrics(data: tuple[np.ndarray, np.ndarray], chunk: int) -> None:
    predicted, true = data
    labels = true.shape[1]
    metrics = add_in_chunks(MultilabelMetrics(LABELS[:labels]), predicted, true, chunk)
    computed = metrics.compute()
    expected = {
        "micro_f1": sk.f1_score(true, predicted, average="micro", zero_division=0),
        "macro_f1": sk.f1_score(true, predicted, average="macro", zero_division=0),
        "accuracy": sk.accuracy_score(true, predicted),
        "hamming": sk.hamming_loss(true, predicted),
    }
    assert list(computed) == list(expected)
    assert computed == pytest.approx(expected, abs=1e-12)
    columns = sk.precision_recall_fscore_support(true, predicted, average=None, zero_division=0)
    check_rows(metrics.per_class(), LABELS[:labels], columns)
    ours, theirs = torch.from_numpy(predicted), torch.from_numpy(true)
    task = {"task": "multilabel", "num_labels": labels}
    for average in ("micro", "macro"):
        f1 = torchmetrics.f1_score(ours, theirs, **task, average=average)
        assert computed[f"{average}_f1"] == pytest.approx(float(f1), abs=1e-6)
    exact = torchmetrics.exact_match(ours, theirs, **task)
    assert computed["accuracy"] == pytest.approx(float(exact), abs=1e-6)
    hamming = torchmetrics.hamming_distance(ours, theirs, **task, average="micro")
    assert computed["hamming"] == pytest.approx(float(hamming), abs=1e-6)
    assert metrics.one_class_only == (len(np.unique(predicted, axis=0)) == 1)


def test_multilabel_takes_booleans_and_one_label_and_nothing_else() -> None:
    metrics = MultilabelMetrics(("weather",))
    metrics.add(np.array([[True], [False]]), [[1], [1]])
    assert metrics.compute() == pytest.approx({"micro_f1": 2 / 3, "macro_f1": 2 / 3, "accuracy": 0.5, "hamming": 0.5})
    for predicted, true in (([[0.5]], [[1]]), ([[1]], [[2]]), ([1], [1]), ([[1, 0]], [[1, 0]]), ([[1], [0]], [[1]])):
        with pytest.raises(ValueError, match=r"1 or 0|not two arrays"):
            metrics.add(predicted, true)
    assert metrics.count == 2


def tags_of(words: int) -> st.SearchStrategy[list[str]]:
    """Tags of a sentence, right or wrong; a third of them O only."""
    any_tags = st.lists(st.sampled_from(TAGS), min_size=words, max_size=words)
    return st.one_of(any_tags, any_tags, st.just(["O"] * words))


SENTENCES = st.lists(
    st.integers(0, 8).flatmap(lambda words: st.tuples(tags_of(words), tags_of(words))), min_size=1, max_size=12
)


@given(SENTENCES, st.integers(1, 5))
@settings(max_examples=60)
def test_entities_equal_seqeval(sentences: list[tuple[list[str], list[str]]], chunk: int) -> None:
    predicted, true = ([sentence[side] for sentence in sentences] for side in range(2))
    metrics = add_in_chunks(EntityMetrics(), predicted, true, chunk)
    computed = metrics.compute()
    words = sum(map(len, true))
    expected = {
        "precision": quietly(seqeval.precision_score, true, predicted, zero_division=0),
        "recall": quietly(seqeval.recall_score, true, predicted, zero_division=0),
        "f1": quietly(seqeval.f1_score, true, predicted, zero_division=0),
        "accuracy": seqeval.accuracy_score(true, predicted) if words else 0.0,
    }
    assert list(computed) == list(expected)
    assert computed == pytest.approx(expected, abs=1e-12)
    rows = metrics.per_class()
    if rows:
        report = quietly(seqeval.classification_report, true, predicted, output_dict=True, zero_division=0)
        kinds = tuple(kind for kind in report if not kind.endswith(" avg"))
        columns = zip(*(report[kind].values() for kind in kinds), strict=True)
        check_rows(rows, kinds, columns)
    assert metrics.one_class_only == (words > 0 and {tag for tags in predicted for tag in tags} == {"O"})


def test_entities_by_type() -> None:
    metrics = EntityMetrics()
    metrics.add(
        [["B-PER", "I-PER", "O", "I-LOC"], ["B-LOC", "B-LOC"]],
        [["B-PER", "I-PER", "O", "B-LOC"], ["B-LOC", "I-LOC"]],
    )
    assert metrics.per_class() == [
        {"label": "LOC", "precision": 1 / 3, "recall": 1 / 2, "f1": 2 / 5, "support": 2},
        {"label": "PER", "precision": 1.0, "recall": 1.0, "f1": 1.0, "support": 1},
    ]
    assert metrics.compute() == pytest.approx({"precision": 2 / 4, "recall": 2 / 3, "f1": 4 / 7, "accuracy": 4 / 6})


def test_no_entities_at_all_is_zero() -> None:
    metrics = EntityMetrics()
    metrics.add([["O", "O"], []], [["O", "O"], []])
    assert metrics.compute() == {"precision": 0.0, "recall": 0.0, "f1": 0.0, "accuracy": 1.0}
    assert metrics.per_class() == []
    assert metrics.one_class_only


@pytest.mark.parametrize(
    ("predicted", "true", "message"),
    [
        ([["O"]], [["O", "O"]], "1 tags are predicted for a sentence of 2 words"),
        ([["O"]], [], "1 sentences are predicted, 0 are true"),
        ([["PER"]], [["O"]], "'PER' is not a tag"),
        ([["O"]], [["S-PER"]], "'S-PER' is not a tag"),
        ([[""]], [["O"]], "'' is not a tag"),
    ],
)
def test_tags_are_checked(predicted: Any, true: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EntityMetrics().add(predicted, true)


@given(class_ids(), st.integers(1, 10))
@settings(max_examples=50)
def test_choice_is_accuracy(data: tuple[int, np.ndarray, np.ndarray], chunk: int) -> None:
    _, predicted, true = data
    metrics = add_in_chunks(ChoiceMetrics(), predicted, true, chunk)
    assert metrics.compute() == {"accuracy": pytest.approx(sk.accuracy_score(true, predicted))}
    assert metrics.one_class_only == (len(set(predicted.tolist())) == 1)
    with pytest.raises(ValueError, match="0 or more"):
        metrics.add([0], [-1])


@pytest.mark.parametrize("name", ALL_METRICS)
def test_nothing_added_is_an_empty_dict(name: str) -> None:
    metrics, nothing = ALL_METRICS[name](), np.empty((0, 4)) if name == "multilabel" else []
    for _ in range(2):
        assert (metrics.count, metrics.compute(), metrics.one_class_only) == (0, {}, False)
        metrics.add(nothing, nothing)


def test_per_class_before_the_first_example() -> None:
    zeros = {"precision": 0.0, "recall": 0.0, "f1": 0.0, "support": 0}
    for metrics in (ClassificationMetrics(LABELS), MultilabelMetrics(LABELS)):
        assert metrics.per_class() == [{"label": label, **zeros} for label in LABELS]
    assert ClassificationMetrics(LABELS).confusion().tolist() == [[0] * 4] * 4
    assert EntityMetrics().per_class() == []


@pytest.mark.parametrize("name", ALL_METRICS)
def test_values_are_plain_floats(name: str) -> None:
    """For json, which knows nothing of numpy."""
    metrics = ALL_METRICS[name]()
    if name == "entity":
        metrics.add([["B-PER", "O"]], [["B-PER", "B-LOC"]])
    elif name == "multilabel":
        metrics.add([[1, 0, 0, 1]], [[1, 1, 0, 0]])
    else:
        metrics.add([1, 2, 1], [1, 2, 2])
    assert {type(value) for value in metrics.compute().values()} == {float}
    if hasattr(metrics, "per_class"):
        kinds = {tuple(type(value) for value in row.values()) for row in metrics.per_class()}
        assert kinds == {(str, float, float, float, int)}


@pytest.mark.parametrize("name", ["classification", "multilabel", "entity", "choice"])
def test_memory_stays_flat(name: str) -> None:
    """Pains F22: nothing is kept of an example but counts."""
    metrics, generator = ALL_METRICS[name](), np.random.default_rng(7)

    def add(chunks: int) -> None:
        for _ in range(chunks):
            if name == "entity":
                metrics.add(*generator.choice(TAGS, size=(2, 10, 8)).tolist())
            elif name == "multilabel":
                metrics.add(*generator.integers(0, 2, size=(2, 1000, 4)))
            else:
                metrics.add(*generator.integers(0, 4, size=(2, 1000)))

    add(5)
    tracemalloc.start()
    try:
        add(5)
        before, _ = tracemalloc.get_traced_memory()
        add(20)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 5_000


def test_nothing_heavy_is_imported_before_a_number_is_asked_for() -> None:
    code = (
        "import sys, bertsmith.tasks.metrics\n"
        "print(*{'sklearn', 'scipy', 'seqeval', 'torch'} & {name.partition('.')[0] for name in sys.modules})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
