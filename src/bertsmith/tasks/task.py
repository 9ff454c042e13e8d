"""What the one fine-tuning path asks of a task: read a file, encode examples, lose, answer, score.

A Task is a spec (what a model folder keeps) with a tokenizer. The kinds stand in classification.py, choice.py, ner.py
and squad.py; registry.py finds the one a name means.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.tasks.batches import PackedBatch
from bertsmith.tasks.examples import EncodedSequence, EncodingReport, Example
from bertsmith.tasks.spec import TaskSpec
from bertsmith.text.documents import ReadReport
from bertsmith.text.tokenizer import BertTokenizer

Floats = npt.NDArray[np.float32]
Row = dict[str, Any]
"""A prediction as `bertsmith predict` writes it."""
PARTS = ("train", "dev", "test")
COMPRESSED = (".gz", ".bz2", ".xz", ".zst")


class Scorer(Protocol):
    """Takes examples with their predictions, chunk by chunk, and gives the official metrics at the end."""

    def add(self, examples: Sequence[Any], rows: Sequence[Row]) -> None:
        """Count a chunk; every example is labelled."""

    def compute(self) -> dict[str, float]:
        """Metric → value; empty when nothing was counted."""

    @property
    def one_class_only(self) -> bool:
        """Whether every prediction was one and the same: a degenerate run."""

    def details(self) -> dict[str, Any]:
        """Scores by class (`per_class`) and the confusion matrix (`confusion`), where the task has them."""


class Task(ABC):
    """A task as it is learnt and used. `weights` (classes,): how much each class counts in the loss."""

    head: str
    """One of model.task_model.ARCHITECTURES."""
    metric: str
    """The official metric, by which the best weights are chosen; higher is better."""
    degenerate_run = "this run predicts one class only; it learnt nothing"
    """What `Scorer.one_class_only` means, for the warning."""

    def __init__(self, spec: TaskSpec, tokenizer: BertTokenizer) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.weights: Tensor | None = None

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Scores a position."""

    def read(self, path: str, part: str, labelled: bool | None, report: EncodingReport | None = None) -> Iterator[Any]:
        """The examples of a file in order. `part`: what it is used as, one of PARTS.

        `labelled` True: a row without a label is an error; False: labels are not looked at; None: taken where there.
        `report`: counts, at the file's end, what was replaced, moved or left out; without one the worst of it is said.
        Raises UserError naming file, line and column.
        """
        if report is None:
            yield from self.read_file(path, part, labelled, None, EncodingReport())
            return
        read = ReadReport()
        yield from self.read_file(path, part, labelled, read, report)
        report.note_reading(read)

    @abstractmethod
    def read_file(
        self, path: str, part: str, labelled: bool | None, read: ReadReport | None, report: EncodingReport
    ) -> Iterator[Any]:
        """`read`, as each kind of task does it: `read` is for the file's reader, `report` for the task's own notes."""

    def is_table(self, path: str) -> bool:
        """Whether a file, as the task reads it, is a table with a row for each example; layouts of its own are none."""
        return True

    def learn_labels(self, examples: Iterator[Any]) -> tuple[str, ...]:
        """The classes that a training file holds, in a fixed order; () for tasks whose outputs have no names."""
        for _ in examples:
            pass
        return ()

    @property
    def named_classes(self) -> bool:
        """Whether outputs are classes with names, which a training file teaches."""
        return self.outputs == len(self.spec.labels)

    @property
    def f1_label(self) -> str | None:
        """The class that the metric `f1` is of; None where it is of no single one, or is none of the metrics."""
        return None

    def learnt_scheme(self) -> str:
        """The tagging scheme of the file last read (ner); else what the spec says."""
        return self.spec.scheme

    @abstractmethod
    def encode(self, examples: Sequence[Any], report: EncodingReport, train: bool) -> list[list[EncodedSequence]]:
        """The sequences of each example, with targets where `train` and the example is labelled."""

    @abstractmethod
    def loss(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        """The sum over the batch's targets; see losses.py."""

    def weight(self, batch: PackedBatch) -> float:
        """What the loss of a whole optimizer step is divided by, of this part of it: its targets, weighted."""
        if self.weights is None:
            return float(batch.examples)
        return float(self.weights.to(batch.targets.device)[batch.targets].sum())

    def class_counts(self, encoded: Sequence[Sequence[EncodedSequence]]) -> npt.NDArray[np.int64] | None:
        """How often each class is a target, (classes,), for `--class-weights balanced`; None: there are no classes."""
        return None

    @abstractmethod
    def decode(self, example: Any, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Row:
        """The prediction for an example from the scores of its sequences, each (positions, outputs)."""

    @abstractmethod
    def scorer(self) -> Scorer:
        """A new scorer."""

    def folder_keys(self) -> dict[str, Any]:
        """What config.json holds for transformers besides the architecture: label names and the kind of problem."""
        return label_keys(self.spec.labels)

    def is_labelled(self, example: Example) -> bool:
        """Whether the example can be scored."""
        return getattr(example, "label", None) is not None


def label_keys(labels: Sequence[str]) -> dict[str, Any]:
    """id2label and label2id as transformers writes them."""
    return {
        "id2label": {str(number): label for number, label in enumerate(labels)},
        "label2id": {label: number for number, label in enumerate(labels)},
    }


def known_label(label: str, ids: Mapping[str, int], place: str) -> int:
    """The class of a label. Raises UserError naming the place and the labels there are."""
    number = ids.get(label)
    if number is None:
        names = ", ".join(list(ids)[:20]) + (f" and {len(ids) - 20} more" if len(ids) > 20 else "")
        raise UserError(f"{place}: label {label!r} is not one of the training file's: {names}; mend one of the files")
    return number


def softmax(scores: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Probabilities over the last axis."""
    shifted = np.exp(scores.astype(np.float64) - scores.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


def sort_labels(labels: set[str]) -> tuple[str, ...]:
    """A fixed order for class names: by number where all are whole numbers, else by text."""
    if all(label.isascii() and label.lstrip("-").isdigit() for label in labels):
        return tuple(sorted(labels, key=lambda label: (int(label), label)))
    return tuple(sorted(labels))


def to_weights(counts: npt.NDArray[np.int64]) -> Tensor:
    """Balanced class weights: examples / (classes · examples of the class); 0 for a class that never occurs."""
    present = counts > 0
    weights = np.where(present, counts.sum() / (present.sum() * np.maximum(counts, 1)), 0.0)
    return torch.from_numpy(weights.astype(np.float32))
