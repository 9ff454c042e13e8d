"""The seven tasks of benchmarks/finetune.py as the transformers side sees them: files → rows → features → metrics.

Reading, windows, post-processing and metrics are this file's own, so that a fault of ours cannot hide on both sides.
Three classes with the same methods: texts (GLUE), words (entities), spans (SQuAD v1.1). `write_part` makes a smaller
training file in the task's own format, for both sides to train on the same rows.
"""

import collections
import json
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PART_SEED = 20181011
"""Which rows a part holds does not depend on the run's seed."""


def read_lines(path: Path) -> list[str]:
    """The lines of a UTF-8 file, with or without a byte-order mark; only \\n ends one."""
    lines = path.read_bytes().decode("utf-8-sig").split("\n")
    return [line.removesuffix("\r") for line in (lines if lines[-1] else lines[:-1])]


def write_lines(path: Path, lines: list[str]) -> None:
    """UTF-8, each line ended by \\n on every system."""
    path.write_bytes("".join(f"{line}\n" for line in lines).encode("utf-8"))


@dataclass(frozen=True)
class TextTask:
    """A GLUE task: rows are the lines of its .tsv file as split at tabs, which know no quoting."""

    header: str | None
    """First line of the file; None where it has none, and columns are numbers."""
    texts: tuple[str | int, ...]
    """Columns of the text, or of the two texts."""
    label: str | int
    classes: tuple[str, ...] = ()
    """In the order of their numbers; () for a score."""
    metrics: tuple[str, ...] = ("accuracy",)

    def column(self, name: str | int) -> int:
        """The number of a column."""
        return name if isinstance(name, int) else (self.header or "").split("\t").index(name)

    def read(self, path: Path) -> list[list[str]]:
        """All rows, the header left out."""
        rows = [line.split("\t") for line in read_lines(path)]
        if self.header is not None and rows.pop(0) != self.header.split("\t"):
            raise SystemExit(f"{path}: the first line is not {self.header!r}")
        return rows

    def write(self, rows: list[list[str]], path: Path) -> None:
        """The same rows as a file."""
        write_lines(path, [*([] if self.header is None else [self.header]), *("\t".join(row) for row in rows)])

    def targets(self, rows: list[list[str]]) -> list[Any]:
        """Class numbers, or scores."""
        labels = [row[self.column(self.label)] for row in rows]
        return [self.classes.index(label) if self.classes else float(label) for label in labels]

    def features(self, tokenizer: Any, rows: list[list[str]], max_length: int, training: bool) -> list[dict[str, Any]]:
        """One a row; the longer of two texts is cut first."""
        texts = [[row[self.column(name)] for row in rows] for name in self.texts]
        encoded = tokenizer(*texts, truncation=True, max_length=max_length)
        labels = self.targets(rows)
        return [{name: encoded[name][i] for name in encoded} | {"labels": labels[i]} for i in range(len(rows))]

    def model(self, folder: str, rows: list[list[str]], **options: Any) -> Any:
        """The encoder with a new classification (or regression) layer."""
        from transformers import AutoModelForSequenceClassification

        labels = max(len(self.classes), 1)
        return AutoModelForSequenceClassification.from_pretrained(folder, num_labels=labels, **options)

    def measure(self, rows: list[list[str]], features: list[Any], logits: list[Any], names: Any) -> dict[str, float]:
        """Metrics of logits (classes,) a row, in their usual units (0…1)."""
        from scipy import stats
        from sklearn import metrics

        gold = self.targets(rows)
        found = [int(scores.argmax()) if self.classes else float(scores[0]) for scores in logits]
        functions = {
            "accuracy": metrics.accuracy_score,
            "f1": metrics.f1_score,
            "matthews": metrics.matthews_corrcoef,
            "pearson": lambda gold, found: stats.pearsonr(gold, found).statistic,
            "spearman": lambda gold, found: stats.spearmanr(gold, found).statistic,
        }
        return {name: float(functions[name](gold, found)) for name in self.metrics}


@dataclass(frozen=True)
class WordTask:
    """Named entities: rows are sentences, a word and its tag a line, blank lines between them."""

    metrics: tuple[str, ...] = ("f1",)

    def read(self, path: Path) -> list[list[list[str]]]:
        """All sentences, each a list of [word, tag]."""
        sentences: list[list[list[str]]] = [[]]
        for line in read_lines(path):
            if line.strip():
                sentences[-1].append(line.split("\t"))
            elif sentences[-1]:
                sentences.append([])
        return sentences if sentences[-1] else sentences[:-1]

    def write(self, rows: list[list[list[str]]], path: Path) -> None:
        """The same sentences as a file."""
        write_lines(path, [line for row in rows for line in [*map("\t".join, row), ""]])

    def tags(self, rows: list[list[list[str]]]) -> list[str]:
        """Every tag there is, sorted."""
        return sorted({tag for row in rows for _, tag in row})

    def features(
        self, tokenizer: Any, rows: list[list[list[str]]], max_length: int, training: bool
    ) -> list[dict[str, Any]]:
        """One a sentence. In training the first piece of a word carries its tag; in testing it is told by `words`."""
        encoded = tokenizer(
            [[word for word, _ in row] for row in rows],
            is_split_into_words=True,
            truncation=True,
            max_length=max_length,
        )
        numbers = {tag: number for number, tag in enumerate(self.tags(rows))}
        features = []
        for i, row in enumerate(rows):
            words = encoded.word_ids(i)
            first = [w if w is not None and w != words[at - 1] else None for at, w in enumerate(words)]
            feature = {name: encoded[name][i] for name in encoded}
            if training:
                feature["labels"] = [-100 if w is None else numbers[row[w][1]] for w in first]
            else:
                feature["words"] = first
            features.append(feature)
        return features

    def model(self, folder: str, rows: list[list[list[str]]], **options: Any) -> Any:
        """The encoder with a new layer over each token; the tags are those of the training rows."""
        from transformers import AutoModelForTokenClassification

        names = dict(enumerate(self.tags(rows)))
        options |= {"id2label": names, "label2id": {tag: number for number, tag in names.items()}}
        return AutoModelForTokenClassification.from_pretrained(folder, num_labels=len(names), **options)

    def measure(
        self, rows: list[list[list[str]]], features: list[Any], logits: list[Any], names: dict[int, str]
    ) -> dict[str, float]:
        """Entity F1 of logits (tokens, tags) a sentence; a word that was cut off or gave no piece counts as O."""
        from seqeval.metrics import f1_score

        found = []
        for row, feature, scores in zip(rows, features, logits, strict=True):
            answer = ["O"] * len(row)
            for word, best in zip(feature["words"], scores.argmax(-1), strict=True):
                if word is not None:
                    answer[word] = names[int(best)]
            found.append(answer)
        return {"f1": float(f1_score([[tag for _, tag in row] for row in rows], found))}


@dataclass(frozen=True)
class Question:
    """A question on a context, with the answers that people gave: (text, first character)."""

    id: str
    text: str
    context: str
    answers: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class SpanTask:
    """SQuAD v1.1: rows are questions; a long context is seen in windows that share `stride` tokens."""

    stride: int = 128
    best: int = 20
    longest_answer: int = 30
    metrics: tuple[str, ...] = ("exact_match", "f1")

    def read(self, path: Path) -> list[Question]:
        """All questions."""
        return [
            Question(
                question["id"],
                question["question"],
                paragraph["context"],
                tuple((answer["text"], answer["answer_start"]) for answer in question["answers"]),
            )
            for article in json.loads(path.read_bytes().decode("utf-8-sig"))["data"]
            for paragraph in article["paragraphs"]
            for question in paragraph["qas"]
        ]

    def write(self, rows: list[Question], path: Path) -> None:
        """The same questions as a file, one paragraph a context."""
        paragraphs: dict[str, list[Any]] = {}
        for row in rows:
            answers = [{"text": text, "answer_start": start} for text, start in row.answers]
            question = {"id": row.id, "question": row.text, "answers": answers}
            paragraphs.setdefault(row.context, []).append(question)
        listed = [{"context": context, "qas": questions} for context, questions in paragraphs.items()]
        content = {"version": "1.1", "data": [{"title": "part", "paragraphs": listed}]}
        path.write_text(json.dumps(content), encoding="utf-8")

    def features(self, tokenizer: Any, rows: list[Question], max_length: int, training: bool) -> list[dict[str, Any]]:
        """One a window. In training: first and last token of the answer, [CLS] where the window does not hold it.

        In testing: the number of the question and, for each token of the context, its characters there.
        """
        encoded = tokenizer(
            [row.text.lstrip() for row in rows],
            [row.context for row in rows],
            truncation="only_second",
            max_length=max_length,
            stride=self.stride,
            return_overflowing_tokens=True,
            return_offsets_mapping=True,
        )
        owners, all_offsets = encoded.pop("overflow_to_sample_mapping"), encoded.pop("offset_mapping")
        features = []
        for i, owner in enumerate(owners):
            sides = encoded.sequence_ids(i)
            offsets = [tuple(pair) if side == 1 else None for pair, side in zip(all_offsets[i], sides, strict=True)]
            feature = {name: encoded[name][i] for name in encoded}
            if training:
                first, last = answer_tokens(offsets, *rows[owner].answers[0])
                feature |= {"start_positions": first, "end_positions": last}
            else:
                feature |= {"question": owner, "offsets": offsets}
            features.append(feature)
        return features

    def model(self, folder: str, rows: list[Question], **options: Any) -> Any:
        """The encoder with a new layer that scores each token as an answer's first and last."""
        from transformers import AutoModelForQuestionAnswering

        return AutoModelForQuestionAnswering.from_pretrained(folder, **options)

    def answers(self, rows: list[Question], features: list[dict[str, Any]], logits: list[Any]) -> list[str]:
        """The best span of all windows of each question, from logits (tokens, 2) a window."""
        found = [(-float("inf"), "")] * len(rows)
        for feature, scores in zip(features, logits, strict=True):
            offsets, owner = feature["offsets"], feature["question"]
            starts, ends = ((-scores[:, side]).argsort()[: self.best] for side in (0, 1))
            for start in starts:
                for end in ends:
                    if offsets[start] is None or offsets[end] is None or not 0 <= end - start < self.longest_answer:
                        continue
                    score = float(scores[start, 0] + scores[end, 1])
                    if score > found[owner][0]:
                        found[owner] = (score, rows[owner].context[offsets[start][0] : offsets[end][1]])
        return [text for _, text in found]

    def measure(self, rows: list[Question], features: list[Any], logits: list[Any], names: Any) -> dict[str, float]:
        """Exact match and F1 in per cent, as the official script gives them."""
        pairs = list(zip(rows, self.answers(rows, features, logits), strict=True))
        scores = {"exact_match": exact_match, "f1": word_f1}
        return {
            name: 100 * sum(max(score(gold, found) for gold, _ in row.answers) for row, found in pairs) / len(pairs)
            for name, score in scores.items()
        }


def answer_tokens(offsets: list[tuple[int, int] | None], text: str, start: int) -> tuple[int, int]:
    """First and last token whose characters touch the answer; (0, 0) where the window does not hold all of it."""
    inside = [at for at, pair in enumerate(offsets) if pair is not None]
    end = start + len(text)
    touching = [at for at in inside if offsets[at][0] < end and offsets[at][1] > start]  # type: ignore[index]
    if not touching or offsets[inside[0]][0] > start or offsets[inside[-1]][1] < end:  # type: ignore[index]
        return 0, 0
    return touching[0], touching[-1]


def normalized(answer: str) -> list[str]:
    """The words that SQuAD's metrics compare: lower case, without punctuation and articles."""
    plain = answer.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact_match(gold: str, found: str) -> float:
    """1 for the same words in the same order."""
    return float(normalized(gold) == normalized(found))


def word_f1(gold: str, found: str) -> float:
    """F1 of the words as a bag; 0 where nothing is common, as in the script of v1.1."""
    left, right = normalized(gold), normalized(found)
    common = (collections.Counter(left) & collections.Counter(right)).total()
    return 2 * common / (len(left) + len(right)) if common else 0.0


STS_B = "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore"
RTE = "index\tsentence1\tsentence2\tlabel"
TASKS: dict[str, Any] = {
    "cola": TextTask(None, (3,), 1, ("0", "1"), ("matthews",)),
    "mrpc": TextTask(
        "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", ("#1 String", "#2 String"), 0, ("0", "1"), ("accuracy", "f1")
    ),
    "sts-b": TextTask(STS_B, ("sentence1", "sentence2"), "score", metrics=("pearson", "spearman")),
    "rte": TextTask(RTE, ("sentence1", "sentence2"), "label", ("entailment", "not_entailment")),
    "sst-2": TextTask("sentence\tlabel", ("sentence",), "label", ("0", "1")),
    "ner": WordTask(),
    "squad1": SpanTask(),
}


def write_part(task: str, source: Path, rows: int, target: Path) -> int:
    """Write the first `rows` of a fixed permutation, in the file's order, as a file of the same format; their number.

    A smaller part lies within a larger one. Ours is given this very file.
    """
    import numpy as np

    everything = TASKS[task].read(source)
    chosen = sorted(np.random.default_rng(PART_SEED).permutation(len(everything))[:rows])
    TASKS[task].write([everything[row] for row in chosen], target)
    return len(chosen)
