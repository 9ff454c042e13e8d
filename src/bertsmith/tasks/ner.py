"""Named entities: a tag for every word, from CoNLL columns or lists of tokens and tags.

Tags are learnt and scored in IOB2 whatever the file's scheme; predictions are written in the scheme of the training
file. A word's label is that of its first piece (Devlin et al. 2018, section 5.3).
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from bertsmith.errors import UserError
from bertsmith.tasks import losses
from bertsmith.tasks.batches import PackedBatch
from bertsmith.tasks.conll import count_violations, detect_scheme, from_iob2, read_conll, to_iob2
from bertsmith.tasks.examples import EncodedSequence, EncodingReport, TaggedExample
from bertsmith.tasks.metrics import EntityMetrics
from bertsmith.tasks.running_text import RunningExample, find_entities
from bertsmith.tasks.spec import TaskSpec
from bertsmith.tasks.tagged_table import read_tagged_examples_table
from bertsmith.tasks.tagging import check_tag_types, decode_tags, encode_words
from bertsmith.tasks.task import COMPRESSED, Floats, Row, Scorer, Task
from bertsmith.text.documents import ReadReport
from bertsmith.text.tokenizer import BertTokenizer

_TABLES = (".jsonl", ".json", ".parquet")


def is_word_table(path: str) -> bool:
    """Whether a file is a table with lists of words and tags, whose columns have names; else it is of CoNLL's kind."""
    suffixes = [suffix for suffix in PurePath(path.lower()).suffixes if suffix not in COMPRESSED]
    return suffixes[-1:] != [] and suffixes[-1] in _TABLES


class TaggingTask(Task):
    """Entities in sentences of words. Metric: entity F1 as seqeval (and conlleval) count it."""

    head = "token"
    metric = "f1"

    def __init__(self, spec: TaskSpec, tokenizer: BertTokenizer) -> None:
        super().__init__(spec, tokenizer)
        self.ids = {tag: number for number, tag in enumerate(spec.labels)}
        self._scheme = spec.scheme

    @property
    def outputs(self) -> int:
        return len(self.spec.labels)

    def read_file(
        self, path: str, part: str, labelled: bool | None, read: ReadReport | None, report: EncodingReport
    ) -> Iterator[TaggedExample]:
        """The sentences of a file, tags in IOB2. The file is read twice: its scheme shows in all of its tags only.

        Notes `tags_ill_formed`, those that the scheme does not allow where they stand.
        """
        scheme = "IOB2"
        if labelled is not False:
            try:
                scheme = detect_scheme(example.tags or () for example in self._read(path, labelled, ReadReport()))
            except UserError as error:
                raise UserError(str(error) if str(error).startswith(path) else f"{path}: {error}") from error
        if part == "train":
            self._scheme = scheme
        for example in self._read(path, labelled, read):
            if example.tags is None:
                yield example
                continue
            report.note("tags_ill_formed", count_violations([example.tags], scheme), example.place)
            yield replace(example, tags=to_iob2(example.tags, scheme))

    def _read(self, path: str, labelled: bool | None, read: ReadReport | None) -> Iterator[TaggedExample]:
        spec = self.spec
        if is_word_table(path):
            return read_tagged_examples_table(
                path, spec.text_column or "tokens", spec.label_column or "tags", labelled, spec.encoding, read
            )
        return read_conll(
            path,
            spec.token_column,
            spec.tag_column,
            spec.separator,
            strip_digit=spec.strip_digit,
            labelled=labelled,
            encoding=spec.encoding,
            report=read,
        )

    def is_table(self, path: str) -> bool:
        return is_word_table(path)

    def learn_labels(self, examples: Iterator[TaggedExample]) -> tuple[str, ...]:
        """O, then B- and I- of every type there is, so that any entity of a known type can be said."""
        types = {tag.partition("-")[2] for example in examples for tag in example.tags or () if tag != "O"}
        return ("O", *(f"{prefix}-{name}" for name in sorted(types) for prefix in "BI"))

    def learnt_scheme(self) -> str:
        return self._scheme

    def is_labelled(self, example: Any) -> bool:
        return example.tags is not None

    def encode(
        self, examples: Sequence[TaggedExample], report: EncodingReport, train: bool
    ) -> list[list[EncodedSequence]]:
        ids = self.ids if train else None
        return [encode_words(example, self.tokenizer, self.spec.max_length, ids, report) for example in examples]

    def loss(self, logits: Tensor, batch: PackedBatch) -> Tensor:
        return losses.tag_loss(logits, batch, self.weights)

    def weight(self, batch: PackedBatch) -> float:
        return float(len(batch.targets)) if self.weights is None else super().weight(batch)

    def class_counts(self, encoded: Sequence[Sequence[EncodedSequence]]) -> npt.NDArray[np.int64]:
        counts = np.zeros(self.outputs, dtype=np.int64)
        for sequences in encoded:
            for sequence in sequences:
                counts += np.bincount(sequence.targets, minlength=self.outputs)
        return counts

    def decode(self, example: TaggedExample, sequences: Sequence[EncodedSequence], logits: Sequence[Floats]) -> Row:
        found = decode_tags(example, sequences, logits, self.spec.labels)
        tags = {"tags": list(from_iob2(found, self.spec.scheme))}
        if isinstance(example, RunningExample):
            return {"words": list(example.words), **tags, "entities": find_entities(example, found)}
        return tags

    def scorer(self) -> Scorer:
        return _EntityScorer(self)


class _EntityScorer:
    def __init__(self, task: TaggingTask) -> None:
        self.task = task
        self.metrics = EntityMetrics()

    def add(self, examples: Sequence[TaggedExample], rows: Sequence[Row]) -> None:
        for example in examples:
            check_tag_types(example, self.task.ids)
        predicted = [to_iob2(row["tags"], self.task.spec.scheme) for row in rows]
        self.metrics.add(predicted, [example.tags or () for example in examples])

    def compute(self) -> dict[str, float]:
        return self.metrics.compute()

    @property
    def one_class_only(self) -> bool:
        return self.metrics.one_class_only

    def details(self) -> dict[str, Any]:
        return {"per_class": self.metrics.per_class()}
