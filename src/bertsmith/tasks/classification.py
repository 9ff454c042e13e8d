"""Tasks on a text or a pair of texts: one class, a number, or several labels (GLUE, and the user's own files).

[CLS] through the pooler and one linear layer (Devlin et al. 2018, section 4.1). GLUE's tasks are these with fixed
files, classes and metrics.
"""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.tasks import losses
from bertsmith.tasks.batches import PackedBatch
from bertsmith.tasks.examples import EncodedSequence, EncodingReport, TextExample
from bertsmith.tasks.glue_files import GLUE_TASKS, read_glue
from bertsmith.tasks.long_texts import encode_texts, pool_windows
from bertsmith.tasks.metrics import ClassificationMetrics, MultilabelMetrics, RegressionMetrics
from bertsmith.tasks.spec import TaskSpec
from bertsmith.tasks.table import StrictReport, read_text_examples
from bertsmith.tasks.task import (
    COMPRESSED,
    Floats,
    Row,
    Scorer,
    Task,
    known_label,
    label_keys,
    softmax,
    sort_labels,
)
from bertsmith.text.documents import ReadOptions, ReadReport
from bertsmith.text.rows import read_rows
from bertsmith.text.tokenizer import BertTokenizer


class TextTask(Task):
    """What tasks on texts have in common: how they are read and shown."""

    head = "sequence"
    table_kind: Any
    """The kind of the user's own files, as table.read_text_examples calls it."""

    def __init__(self, spec: TaskSpec, tokenizer: BertTokenizer) -> None:
        super().__init__(spec, tokenizer)
        self.glue = GLUE_TASKS.get(spec.name)

    def read_file(
        self, path: str, part: str, labelled: bool | None, read: ReadReport | None, report: EncodingReport
    ) -> Iterator[TextExample]:
        if self.glue is not None:
            return read_glue(self.glue, path, part, labelled, read)
        if part == "test" and not labelled and not self.spec.two_texts:
            suffixes = [suffix for suffix in PurePath(path.lower()).suffixes if suffix not in COMPRESSED]
            if suffixes[-1:] == [".txt"]:
                return self._read_lines(path, read)
        return read_text_examples(
            path,
            self.table_kind,
            self.spec.text_column,
            self.spec.text_pair_column,
            self.spec.label_column,
            labelled,
            self.spec.label_separator,
            self.spec.encoding,
            allow_empty=part == "test",
            report=read,
        )

    def _read_lines(self, path: str, read: ReadReport | None) -> Iterator[TextExample]:
        """A text a line: what a .txt can hold is texts to predict."""
        strict = StrictReport()
        try:
            rows = read_rows(path, ReadOptions(encoding=self.spec.encoding), strict)
            for index, (line, text) in enumerate(rows):
                yield TextExample(f"{path}:{line}", str(index), text, None, None)
        finally:
            strict.settle(read, self.spec.encoding)

    def encode(
        self, examples: Sequence[TextExample], report: EncodingReport, train: bool
    ) -> list[list[EncodedSequence]]:
        long: Any = self.spec.long
        encoded = encode_texts(examples, self.tokenizer, self.spec.max_length, long, report)
        for example in examples:
            if not example.text.strip() or (example.pair is not None and not example.pair.strip()):
                report.note("empty_texts", 1, example.place)
        if train:
            for example, sequences in zip(examples, encoded, strict=True):
                target = self.target(example)
                for number, sequence in enumerate(sequences):  # once an example: its windows' scores are averaged
                    sequence.targets = target if number == 0 else target[:0]
        return encoded

    @abstractmethod
    def target(self, example: TextExample) -> npt.NDArray[Any]:
        """What the loss compares the example's scores with."""


class ClassifyTask(TextTask):
    """One of several classes. Metrics: accuracy, Matthews correlation, F1."""

    metric = "accuracy"

    def __init__(self, spec: TaskSpec, tokenizer: BertTokenizer) -> None:
        super().__init__(spec, tokenizer)
        self.table_kind = "pairs" if spec.name == "pairs" else "classify"
        if self.glue is not None:
            self.metric = self.glue.metrics[0]
        self.ids = {label: number for number, label in enumerate(spec.labels)}

    @property
    def outputs(self) -> int:
        return len(self.spec.labels)

    @property
    def positive(self) -> str | None:
        """Of two classes, the one that f1 is of: "1", else the last."""
        labels = self.spec.labels
        return None if len(labels) != 2 else "1" if "1" in labels else labels[1]

    @property
    def f1_label(self) -> str | None:
        return self.positive if self.glue is None or "f1" in self.glue.metrics else None

    def learn_labels(self, examples: Iterator[TextExample]) -> tuple[str, ...]:
        found = {str(example.label) for example in examples}
        return sort_labels(found) if self.glue is None or self.glue.labels is None else self.glue.labels

    def target(self, example: TextExample) -> npt.NDArray[np.int64]:
        return np.array([known_label(str(example.label), self.ids, example.place)], dtype=np.int64)

    def loss(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        return losses.class_loss(logits, batch, self.weights)

    def class_counts(self, encoded: Sequence[Sequence[EncodedSequence]]) -> npt.NDArray[np.int64]:
        return np.bincount([int(example[0].targets[0]) for example in encoded], minlength=self.outputs)

    def decode(self, example: TextExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Row:
        shares = softmax(pool_windows(np.concatenate(logits)))
        scores = dict(zip(self.spec.labels, shares.tolist(), strict=True))
        return {"label": self.spec.labels[int(shares.argmax())], "scores": scores}

    def scorer(self) -> Scorer:
        return _ClassScorer(self)


class _ClassScorer:
    def __init__(self, task: ClassifyTask) -> None:
        self.task = task
        self.metrics = ClassificationMetrics(task.spec.labels, task.positive)

    def add(self, examples: Sequence[TextExample], rows: Sequence[Row]) -> None:
        ids = self.task.ids
        true = [known_label(str(example.label), ids, example.place) for example in examples]
        self.metrics.add([ids[row["label"]] for row in rows], true)

    def compute(self) -> dict[str, float]:
        found = self.metrics.compute()
        if self.task.glue is not None:
            return {name: found[name] for name in self.task.glue.metrics} if found else {}
        return found

    @property
    def one_class_only(self) -> bool:
        return self.metrics.one_class_only

    def details(self) -> dict[str, Any]:
        return {"per_class": self.metrics.per_class(), "confusion": self.metrics.confusion().tolist()}


class RegressTask(TextTask):
    """A number. Metrics: Pearson and Spearman correlation, mean squared error; nothing is rounded or clipped."""

    metric = "pearson"
    table_kind = "regress"
    outputs = 1

    def target(self, example: TextExample) -> npt.NDArray[np.float32]:
        return np.array([example.label], dtype=np.float32)

    def loss(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        return losses.number_loss(logits, batch)

    def decode(self, example: TextExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Row:
        return {"score": float(pool_windows(np.concatenate(logits))[0])}

    def scorer(self) -> Scorer:
        return _NumberScorer(self)

    def folder_keys(self) -> dict[str, Any]:
        return label_keys(["score"]) | {"problem_type": "regression"}


class _NumberScorer:
    def __init__(self, task: RegressTask) -> None:
        self.task = task
        self.metrics = RegressionMetrics()

    def add(self, examples: Sequence[TextExample], rows: Sequence[Row]) -> None:
        self.metrics.add([row["score"] for row in rows], [float(str(example.label)) for example in examples])

    def compute(self) -> dict[str, float]:
        found = self.metrics.compute()
        if self.task.glue is not None:
            return {name: found[name] for name in self.task.glue.metrics} if found else {}
        return found

    @property
    def one_class_only(self) -> bool:
        return self.metrics.one_class_only

    def details(self) -> dict[str, Any]:
        return {}


class MultilabelTask(TextTask):
    """Any number of labels, each by itself: those whose probability exceeds one half. Metrics: micro and macro F1."""

    metric = "micro_f1"
    table_kind = "multilabel"

    def __init__(self, spec: TaskSpec, tokenizer: BertTokenizer) -> None:
        super().__init__(spec, tokenizer)
        self.ids = {label: number for number, label in enumerate(spec.labels)}

    @property
    def outputs(self) -> int:
        return len(self.spec.labels)

    def learn_labels(self, examples: Iterator[TextExample]) -> tuple[str, ...]:
        return sort_labels({label for example in examples for label in _names(example)})

    def target(self, example: TextExample) -> npt.NDArray[np.float32]:
        return self.table([example])[0].astype(np.float32)

    def table(self, examples: Sequence[TextExample]) -> npt.NDArray[np.int64]:
        """Which labels apply, (examples, labels) of 0 and 1."""
        applies = np.zeros((len(examples), self.outputs), dtype=np.int64)
        for row, example in zip(applies, examples, strict=True):
            row[[known_label(name, self.ids, example.place) for name in _names(example)]] = 1
        return applies

    def loss(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        return losses.labels_loss(logits, batch, self.weights)

    def weight(self, batch: PackedBatch) -> float:
        return float(batch.examples)

    def class_counts(self, encoded: Sequence[Sequence[EncodedSequence]]) -> npt.NDArray[np.int64]:
        return np.sum([example[0].targets for example in encoded], axis=0).astype(np.int64)

    def set_positive_weights(self, counts: npt.NDArray[np.int64], examples: int) -> None:
        """Balanced: a label that applies counts as often as it does not apply."""
        self.weights = torch.from_numpy(((examples - counts) / np.maximum(counts, 1)).astype(np.float32))

    def decode(self, example: TextExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Row:
        pooled = pool_windows(np.concatenate(logits)).astype(np.float64)
        shares = np.exp(-np.logaddexp(0, -pooled))  # the sigmoid, for any score
        scores = dict(zip(self.spec.labels, shares.tolist(), strict=True))
        return {"labels": [label for label, share in scores.items() if share > 0.5], "scores": scores}

    def scorer(self) -> Scorer:
        return _LabelsScorer(self)

    def folder_keys(self) -> dict[str, Any]:
        return label_keys(self.spec.labels) | {"problem_type": "multi_label_classification"}


def _names(example: TextExample) -> tuple[str, ...]:
    return example.label if isinstance(example.label, tuple) else ()


class _LabelsScorer:
    def __init__(self, task: MultilabelTask) -> None:
        self.task = task
        self.metrics = MultilabelMetrics(task.spec.labels)

    def add(self, examples: Sequence[TextExample], rows: Sequence[Row]) -> None:
        predicted = [[int(label in row["labels"]) for label in self.task.spec.labels] for row in rows]
        self.metrics.add(predicted, self.task.table(examples))

    def compute(self) -> dict[str, float]:
        return self.metrics.compute()

    @property
    def one_class_only(self) -> bool:
        return self.metrics.one_class_only

    def details(self) -> dict[str, Any]:
        return {"per_class": self.metrics.per_class()}
