"""Answers as stretches of a context: SQuAD v1.1 and v2.0, and files of that layout.

Start and end scores for every token (Devlin et al. 2018, sections 4.2 and 4.3); v2.0's "no answer" is the span at
[CLS], given where it beats the best answer by more than a threshold tuned on dev.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from torch import Tensor

from bertsmith.tasks import losses
from bertsmith.tasks.batches import PackedBatch
from bertsmith.tasks.examples import EncodedSequence, EncodingReport, QuestionExample
from bertsmith.tasks.spans import SpanOptions, check_questions, decode_spans, encode_questions
from bertsmith.tasks.spec import TaskSpec
from bertsmith.tasks.squad_files import AnswerReport, is_document, read_squad
from bertsmith.tasks.squad_metrics import SquadMetrics
from bertsmith.tasks.task import Floats, Row, Scorer, Task
from bertsmith.text.documents import ReadReport
from bertsmith.text.tokenizer import BertTokenizer

# counts of AnswerReport → their names in the data report
_ANSWER_NOTES = {
    "unanswerable": "unanswerable",
    "moved": "answers_moved",
    "moved_to_nearest": "answers_moved_to_nearest",
    "not_in_context": "answers_not_in_context",
    "empty_answers": "empty_answers",
    "empty_contexts": "empty_contexts",
    "empty_questions": "empty_questions",
}


class SpanTask(Task):
    """The answer to a question in its context. Metric: F1 of the answers' words, in percent (official scripts)."""

    head = "span"
    metric = "f1"
    outputs = 2
    degenerate_run = "in this run no question was answered"

    def __init__(self, spec: TaskSpec, tokenizer: BertTokenizer) -> None:
        super().__init__(spec, tokenizer)
        self.version: Literal[1, 2] = 2 if spec.name == "squad2" else 1
        self.options = SpanOptions(spec.max_length, spec.stride, spec.max_question, spec.n_best, spec.max_answer)

    def read_file(
        self, path: str, part: str, labelled: bool | None, read: ReadReport | None, report: EncodingReport
    ) -> Iterator[QuestionExample]:
        """The questions of a file. Notes what AnswerReport counts: answers moved, answers that are nowhere, …"""
        answers = AnswerReport()
        yield from read_squad(path, self.version, labelled, self.spec.encoding, answers, read)
        for what, name in _ANSWER_NOTES.items():
            sought = f": answer {what.replace('_', ' ')}"
            place = next((place for place in answers.places if place.endswith(sought)), "")
            report.note(name, getattr(answers, what), place.removesuffix(sought))

    def is_table(self, path: str) -> bool:
        return not is_document(path, self.spec.encoding)

    def is_labelled(self, example: Any) -> bool:
        return example.answers is not None

    def encode(
        self, examples: Sequence[QuestionExample], report: EncodingReport, train: bool
    ) -> list[list[EncodedSequence]]:
        check_questions(examples, self.tokenizer, self.options)
        return list(encode_questions(examples, self.tokenizer, self.options, report, train))

    def loss(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        return losses.span_loss(logits, batch)

    def weight(self, batch: PackedBatch) -> float:
        return float(len(batch.row_counts))

    def decode(self, example: QuestionExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Row:
        found = decode_spans(example, sequences, logits, self.options, self.version, self.spec.null_threshold or 0.0)
        return {
            "id": example.id,
            "answer": found.text,
            "start": found.start,
            "end": found.end,
            "null_score": found.null_score if self.version == 2 else None,
            "n_best": found.n_best,
        }

    def scorer(self) -> Scorer:
        return _AnswerScorer(self)

    def folder_keys(self) -> dict[str, Any]:
        return {}


class _AnswerScorer:
    """Scores best answers, and for v2.0 null scores.

    v2.0: `compute` is at the spec's threshold or, where none is tuned yet, at the best one for what was added.
    """

    def __init__(self, task: SpanTask) -> None:
        self.tuned = task.spec.null_threshold
        self.metrics = SquadMetrics(task.version)
        self.least_null_score = math.inf

    def add(self, examples: Sequence[QuestionExample], rows: Sequence[Row]) -> None:
        for example, row in zip(examples, rows, strict=True):
            answer = row["answer"] or next((found["text"] for found in row["n_best"] if found["text"]), "")
            self.metrics.add(example, answer, row["null_score"])
            if row["null_score"] is not None:
                self.least_null_score = min(self.least_null_score, row["null_score"])

    def threshold(self) -> float | None:
        """Of null scores, beyond which there is no answer; None for v1.1, which always answers."""
        if self.metrics.version == 1 or not self.metrics.count:
            return None
        return self.metrics.best_threshold() if self.tuned is None else self.tuned

    def compute(self) -> dict[str, float]:
        return self.metrics.compute(self.threshold())

    @property
    def one_class_only(self) -> bool:
        threshold = self.threshold()
        if threshold is None:
            return self.metrics.one_class_only
        # nothing is answered, though something could have been
        return self.metrics.answerable > 0 and self.least_null_score > threshold

    def details(self) -> dict[str, Any]:
        threshold = self.threshold()
        return {} if threshold is None else {"null_threshold": threshold}
