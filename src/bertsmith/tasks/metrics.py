"""What a task is scored by: predictions and true labels in, chunk after chunk; the numbers people compare out.

Streaming: what is kept of an example is a count, or two floats where ranks need them, never a text or a logit, so that
memory stays flat over any test set. scikit-learn, scipy and seqeval (for what an entity is) do the arithmetic; they are
imported when a number is asked for. SQuAD's metrics are in squad_metrics.
"""

import warnings
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


class ClassificationMetrics:
    """One class an example: accuracy, F1 and Matthews correlation, and the same by class.

    labels: class names in the order of their ids. positive: of two classes, the one F1 is of; the second unless named
    (GLUE's MRPC and QQP: 1). Raises ValueError for no or repeated labels, or a positive one that is not there.
    """

    def __init__(self, labels: Sequence[str], positive: str | None = None) -> None:
        self.labels = _check_labels(labels)
        if positive is not None and (len(labels) != 2 or positive not in labels):
            raise ValueError(f"positive label {positive!r} of {self.labels}: F1 of one class is for two classes")
        self.positive = self.labels[1] if positive is None and len(labels) == 2 else positive
        self._pairs: Counter[int] = Counter()  # of true id · C + predicted id; a dense matrix may be large

    @property
    def count(self) -> int:
        """Examples so far."""
        return self._pairs.total()

    @property
    def one_class_only(self) -> bool:
        """Every prediction is one and the same class: a run that learnt nothing, however high its accuracy."""
        return len({pair % len(self.labels) for pair in self._pairs}) == 1

    def add(self, predicted_ids: npt.ArrayLike, true_ids: npt.ArrayLike) -> None:
        """Count a chunk: two (n,) arrays of class ids. Raises ValueError for other shapes and ids out of range."""
        predicted, true = _check_ids(predicted_ids, true_ids, len(self.labels))
        self._pairs.update((true * len(self.labels) + predicted).tolist())

    def compute(self) -> dict[str, float]:
        """accuracy, f1 (of the positive one, where there are two classes), macro_f1, matthews; {} before any example.

        macro_f1 is the mean over the classes that occur, as predictions or in truth (scikit-learn's default). Where a
        number is undefined, as the correlation of predictions of one class, it is 0.
        """
        if not self._pairs:
            return {}
        from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

        true, predicted, weight = self._weighted_pairs()
        f1 = {"macro_f1": f1_score(true, predicted, average="macro", sample_weight=weight, zero_division=0)}
        if self.positive is not None:
            of = [self.labels.index(self.positive)]
            by_class = f1_score(true, predicted, labels=of, average=None, sample_weight=weight, zero_division=0)
            f1 = {"f1": by_class[0]} | f1
        with warnings.catch_warnings():  # scikit-learn warns where there is one class only
            warnings.simplefilter("ignore")
            matthews = matthews_corrcoef(true, predicted, sample_weight=weight)
        return {
            "accuracy": float(accuracy_score(true, predicted, sample_weight=weight)),
            **{name: float(value) for name, value in f1.items()},
            "matthews": _number(matthews),
        }

    def per_class(self) -> list[dict[str, Any]]:
        """{label, precision, recall, f1, support} for each class, in order; zeros for what does not occur."""
        if not self._pairs:
            return [_row(label, 0, 0, 0) for label in self.labels]
        from sklearn.metrics import precision_recall_fscore_support

        true, predicted, weight = self._weighted_pairs()
        columns = precision_recall_fscore_support(
            true, predicted, labels=range(len(self.labels)), average=None, sample_weight=weight, zero_division=0
        )
        return [
            {"label": label, "precision": float(p), "recall": float(r), "f1": float(f1), "support": int(support)}
            for label, p, r, f1, support in zip(self.labels, *columns, strict=True)
        ]

    def confusion(self) -> Ints:
        """(C, C) counts: rows are true classes, columns predicted ones."""
        matrix = np.zeros(len(self.labels) ** 2, dtype=np.int64)
        matrix[list(self._pairs.keys())] = list(self._pairs.values())
        return matrix.reshape(len(self.labels), len(self.labels))

    def _weighted_pairs(self) -> tuple[Ints, Ints, Ints]:
        """(true, predicted, how often), each pair once: to scikit-learn the same as the examples one by one."""
        pairs = np.fromiter(self._pairs.keys(), dtype=np.int64)
        true, predicted = np.divmod(pairs, len(self.labels))
        return true, predicted, np.fromiter(self._pairs.values(), dtype=np.int64)


class RegressionMetrics:
    """A number an example: Pearson and Spearman correlation, mean squared error."""

    def __init__(self) -> None:
        # 16 bytes an example: ranks need them all
        self._predicted, self._true = array("d"), array("d")

    @property
    def count(self) -> int:
        """Examples so far."""
        return len(self._true)

    @property
    def one_class_only(self) -> bool:
        """All predictions are equal, or one is not a finite number: a run that learnt nothing, or came apart."""
        predicted = np.array(self._predicted)
        return bool(len(predicted) and (_all_equal(predicted) or not np.isfinite(predicted).all()))

    def add(self, predicted: npt.ArrayLike, true: npt.ArrayLike) -> None:
        """Keep a chunk: two (n,) arrays. Raises ValueError for other shapes and true values that are not finite."""
        ours, theirs = (np.asarray(values, dtype=np.float64) for values in (predicted, true))
        if ours.ndim != 1 or ours.shape != theirs.shape:
            raise ValueError(f"predicted {ours.shape} and true {theirs.shape} are not two arrays (n,)")
        if not np.isfinite(theirs).all():
            raise ValueError("a true value is not a finite number")
        self._predicted.frombytes(ours.tobytes())
        self._true.frombytes(theirs.tobytes())

    def compute(self) -> dict[str, float]:
        """pearson, spearman, mse; {} before the first example.

        A correlation that is undefined (all values equal, on either side, or fewer than two) is 0. Predictions that
        are not finite correlate with nothing and are infinitely wrong.
        """
        if not self._true:
            return {}
        predicted, true = np.array(self._predicted), np.array(self._true)
        if not np.isfinite(predicted).all():
            return {"pearson": 0.0, "spearman": 0.0, "mse": float("inf")}
        with np.errstate(over="ignore"):
            mse = float(np.mean((predicted - true) ** 2))
        if _all_equal(predicted) or _all_equal(true):
            return {"pearson": 0.0, "spearman": 0.0, "mse": mse}
        from scipy.stats import pearsonr, spearmanr

        with warnings.catch_warnings(), np.errstate(all="ignore"):  # values that are equal but for rounding
            warnings.simplefilter("ignore")
            pearson, spearman = pearsonr(predicted, true).statistic, spearmanr(predicted, true).statistic
        return {"pearson": _number(pearson), "spearman": _number(spearman), "mse": mse}


class MultilabelMetrics:
    """Any number of labels an example. Raises ValueError for no or repeated labels."""

    def __init__(self, labels: Sequence[str]) -> None:
        self.labels = _check_labels(labels)
        self.count = 0
        """Examples so far."""
        self._exact = 0
        self._both, self._predicted, self._true = (np.zeros(len(self.labels), dtype=np.int64) for _ in range(3))
        self._sets: set[bytes] = set()  # the first two different predictions

    @property
    def one_class_only(self) -> bool:
        """Every prediction is one and the same set of labels."""
        return len(self._sets) == 1

    def add(self, predicted: npt.ArrayLike, true: npt.ArrayLike) -> None:
        """Count a chunk: two (n, L) arrays of zeros and ones. Raises ValueError for anything else."""
        ours, theirs = np.asarray(predicted), np.asarray(true)
        if ours.ndim != 2 or ours.shape != theirs.shape or ours.shape[1] != len(self.labels):
            raise ValueError(
                f"predicted {ours.shape} and true {theirs.shape} are not two arrays (n, {len(self.labels)})"
            )
        if not np.isin(ours, (0, 1)).all() or not np.isin(theirs, (0, 1)).all():
            raise ValueError("a label is given or not: 1 or 0")
        ours, theirs = ours.astype(np.bool_), theirs.astype(np.bool_)
        self.count += len(ours)
        self._exact += int((ours == theirs).all(axis=1).sum())
        self._both += (ours & theirs).sum(axis=0)
        self._predicted += ours.sum(axis=0)
        self._true += theirs.sum(axis=0)
        if len(self._sets) < 2:
            self._sets.update(row.tobytes() for row in np.unique(ours, axis=0)[:2])

    def compute(self) -> dict[str, float]:
        """micro_f1, macro_f1, accuracy (all labels of an example right), hamming; {} before the first example.

        macro_f1 is the mean over all labels, 0 for one that never occurs, as scikit-learn has it for multilabel data.
        hamming is the Hamming loss: the share of the n · L decisions that are wrong.
        """
        if not self.count:
            return {}
        wrong = int((self._predicted + self._true - 2 * self._both).sum())
        return {
            "micro_f1": _row("", int(self._both.sum()), int(self._predicted.sum()), int(self._true.sum()))["f1"],
            "macro_f1": sum(row["f1"] for row in self.per_class()) / len(self.labels),
            "accuracy": self._exact / self.count,
            "hamming": wrong / (self.count * len(self.labels)),
        }

    def per_class(self) -> list[dict[str, Any]]:
        """{label, precision, recall, f1, support} for each label, in order."""
        counts = (column.tolist() for column in (self._both, self._predicted, self._true))
        return [_row(*row) for row in zip(self.labels, *counts, strict=True)]


class EntityMetrics:
    """Entities in tagged sentences: exact span and type, as conlleval and seqeval (its default mode) count them.

    Tags are `O`, `B-type` and `I-type`; an entity also begins at an I- that continues none, for models predict such.
    """

    def __init__(self) -> None:
        self.count = 0
        """Sentences so far."""
        self._tokens = self._right_tokens = 0
        self._both, self._predicted, self._true = (Counter[str]() for _ in range(3))
        self._known = {"O"}
        self._tagged = False

    @property
    def one_class_only(self) -> bool:
        """Nothing but O was predicted."""
        return self._tokens > 0 and not self._tagged

    def add(self, predicted_tags: Sequence[Sequence[str]], true_tags: Sequence[Sequence[str]]) -> None:
        """Count a chunk of sentences, a tag a word. Raises ValueError for lengths that differ and unknown tags."""
        from seqeval.metrics.sequence_labeling import get_entities

        if len(predicted_tags) != len(true_tags):
            raise ValueError(f"{len(predicted_tags)} sentences are predicted, {len(true_tags)} are true")
        for ours, theirs in zip(predicted_tags, true_tags, strict=True):
            if len(ours) != len(theirs):
                raise ValueError(f"{len(ours)} tags are predicted for a sentence of {len(theirs)} words")
            self._check_tags((*ours, *theirs))
            found, wanted = set(get_entities(list(ours))), set(get_entities(list(theirs)))
            for counter, entities in ((self._both, found & wanted), (self._predicted, found), (self._true, wanted)):
                counter.update(kind for kind, _, _ in entities)
            self.count += 1
            self._tokens += len(theirs)
            self._right_tokens += sum(a == b for a, b in zip(ours, theirs, strict=True))
            self._tagged = self._tagged or any(tag != "O" for tag in ours)

    def _check_tags(self, tags: Sequence[str]) -> None:
        for tag in set(tags) - self._known:
            if not tag.startswith(("B-", "I-")):
                raise ValueError(f"{tag!r} is not a tag of IOB2 (O, B-type, I-type)")
            self._known.add(tag)

    def compute(self) -> dict[str, float]:
        """precision, recall, f1 over all entities (micro), accuracy over words; {} before the first sentence."""
        if not self.count:
            return {}
        row = _row("", self._both.total(), self._predicted.total(), self._true.total())
        return {
            "precision": row["precision"],
            "recall": row["recall"],
            "f1": row["f1"],
            "accuracy": self._right_tokens / self._tokens if self._tokens else 0.0,
        }

    def per_class(self) -> list[dict[str, Any]]:
        """{label, precision, recall, f1, support} for each type of entity, predicted or true, by name."""
        kinds = sorted(self._predicted.keys() | self._true.keys())
        return [_row(kind, self._both[kind], self._predicted[kind], self._true[kind]) for kind in kinds]


class ChoiceMetrics:
    """Which of N texts follows: accuracy. Examples may have different N."""

    def __init__(self) -> None:
        self.count = 0
        """Examples so far."""
        self._right = 0
        self._predicted: set[int] = set()

    @property
    def one_class_only(self) -> bool:
        """Every prediction is one and the same place, such as always the first."""
        return len(self._predicted) == 1

    def add(self, predicted: npt.ArrayLike, true: npt.ArrayLike) -> None:
        """Count a chunk: two (n,) arrays of places, from 0. Raises ValueError for other shapes and negative places."""
        ours, theirs = _check_ids(predicted, true, None)
        self.count += len(ours)
        self._right += int((ours == theirs).sum())
        self._predicted.update(np.unique(ours).tolist())

    def compute(self) -> dict[str, float]:
        """accuracy; {} before the first example."""
        return {"accuracy": self._right / self.count} if self.count else {}


def _check_labels(labels: Sequence[str]) -> tuple[str, ...]:
    if not labels or len(set(labels)) != len(labels):
        raise ValueError(f"labels {list(labels)} are none or not distinct")
    return tuple(labels)


def _check_ids(predicted: npt.ArrayLike, true: npt.ArrayLike, classes: int | None) -> tuple[Ints, Ints]:
    """Both as (n,) int64, checked: an id out of range is a fault upstream, not a wrong prediction."""
    arrays = [np.asarray(ids) for ids in (predicted, true)]
    if arrays[0].ndim != 1 or arrays[0].shape != arrays[1].shape:
        raise ValueError(f"predicted {arrays[0].shape} and true {arrays[1].shape} are not two arrays (n,)")
    for name, ids in zip(("predicted", "true"), arrays, strict=True):
        if len(ids) == 0:
            continue
        if ids.dtype.kind not in "iu":
            raise ValueError(f"{name} ids are {ids.dtype}, not integers")
        if ids.min() < 0 or (classes is not None and ids.max() >= classes):
            allowed = f"from 0 to {classes - 1}" if classes is not None else "0 or more"
            raise ValueError(f"{name} ids from {ids.min()} to {ids.max()} are not all {allowed}")
    return arrays[0].astype(np.int64), arrays[1].astype(np.int64)


def _row(label: str, both: int, predicted: int, true: int) -> dict[str, Any]:
    """Precision, recall and F1 from three counts: right, predicted and true ones; 0 where there are none."""
    return {
        "label": label,
        "precision": both / predicted if predicted else 0.0,
        "recall": both / true if true else 0.0,
        "f1": 2 * both / (predicted + true) if predicted + true else 0.0,
        "support": true,
    }


def _all_equal(values: Floats) -> bool:
    return bool(values.min() == values.max())


def _number(value: float) -> float:
    """0 for a correlation that is undefined."""
    return float(value) if np.isfinite(value) else 0.0
