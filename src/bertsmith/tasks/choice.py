"""Which of N texts continues a context (SWAG, and files of one's own): one score for each context + choice.

Devlin et al. 2018, section 4.4: each choice is a sequence of its own, a vector gives its score, a softmax over an
example's choices its probabilities.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from bertsmith.tasks import losses
from bertsmith.tasks.batches import PackedBatch
from bertsmith.tasks.choice_files import is_codah, read_choices
from bertsmith.tasks.examples import ChoiceExample, EncodedSequence, EncodingReport
from bertsmith.tasks.long_texts import encode_texts
from bertsmith.tasks.metrics import ChoiceMetrics
from bertsmith.tasks.task import Floats, Row, Scorer, Task, softmax
from bertsmith.text.documents import ReadReport


class ChoiceTask(Task):
    """The number of the right choice, from 0. Metric: accuracy."""

    head = "choice"
    metric = "accuracy"
    outputs = 1

    def read_file(
        self, path: str, part: str, labelled: bool | None, read: ReadReport | None, report: EncodingReport
    ) -> Iterator[ChoiceExample]:
        spec = self.spec
        return read_choices(path, spec.text_column, spec.label_column, labelled, spec.encoding, report=read)

    def is_table(self, path: str) -> bool:
        return self.spec.text_column is not None or not is_codah(path, self.spec.encoding)

    def encode(
        self, examples: Sequence[ChoiceExample], report: EncodingReport, train: bool
    ) -> list[list[EncodedSequence]]:
        encoded = encode_texts(examples, self.tokenizer, self.spec.max_length, "cut", report)
        if train:
            for example, sequences in zip(examples, encoded, strict=True):
                sequences[0].targets = np.array([example.label], dtype=np.int64)
        return encoded

    def loss(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        return losses.choice_loss(logits, batch)

    def decode(self, example: ChoiceExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Row:
        shares = softmax(np.concatenate(logits)[:, 0])
        return {"choice": int(shares.argmax()), "scores": shares.tolist()}

    def scorer(self) -> Scorer:
        return _ChoiceScorer()

    def folder_keys(self) -> dict[str, Any]:
        return {}


class _ChoiceScorer:
    def __init__(self) -> None:
        self.metrics = ChoiceMetrics()

    def add(self, examples: Sequence[ChoiceExample], rows: Sequence[Row]) -> None:
        self.metrics.add(
            [row["choice"] for row in rows], [example.label for example in examples if example.label is not None]
        )

    def compute(self) -> dict[str, float]:
        return self.metrics.compute()

    @property
    def one_class_only(self) -> bool:
        return self.metrics.one_class_only

    def details(self) -> dict[str, Any]:
        return {}
