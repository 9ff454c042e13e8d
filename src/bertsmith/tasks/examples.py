"""What a task's files become: examples as read, and the sequences of tokens an example is shown to the model as.

Readers (glue, table, choice, ner, squad) make examples; `place` says where each came from, for messages. Encoders
(classification, tagging, spans) make one or more EncodedSequences of each: a text is one, a question one a window, a
choice one an ending. Label None (or tags, answers None) means unlabelled.
"""

import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bertsmith.errors import UserError
from bertsmith.progress import say
from bertsmith.text.documents import ReadReport

MANY_UNKNOWN = 0.05
"""Share of [UNK] among the tokens from which on a model's vocabulary is said not to fit the texts."""
Label = str | float | tuple[str, ...]
"""A class name, a number (regression), or the names that apply (multilabel)."""


class NoLabels(UserError):
    """A table lacks the column of the label alone: it may be one to predict."""


@dataclass(frozen=True, slots=True)
class TextExample:
    """A text or a pair of texts with one label."""

    place: str
    """`file:line`, as messages name it."""
    id: str
    text: str
    pair: str | None
    label: Label | None


@dataclass(frozen=True, slots=True)
class ChoiceExample:
    """A context and N texts of which one continues it; `label` is the number of the right one, from 0."""

    place: str
    id: str
    context: str
    choices: tuple[str, ...]
    label: int | None


@dataclass(frozen=True, slots=True)
class TaggedExample:
    """A sentence that is split into words already, a tag a word."""

    place: str
    id: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Answer:
    """A stretch of a context: its text, and the character it starts at."""

    text: str
    start: int


@dataclass(frozen=True, slots=True)
class QuestionExample:
    """A question on a context. `answers` () means that the context holds none (SQuAD v2.0)."""

    place: str
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...] | None


Example = TextExample | ChoiceExample | TaggedExample | QuestionExample


def label_names(example: Example) -> tuple[str, ...]:
    """The names that an example's label teaches: a class, those of multilabel, the types in a sentence's tags."""
    if isinstance(example, TaggedExample):
        return tuple(tag.partition("-")[2] for tag in example.tags or ())
    label = getattr(example, "label", None)
    return (label,) if isinstance(label, str) else label if isinstance(label, tuple) else ()


def class_name(example: Example) -> str:
    """The one class that an example is of; "" where its label is no name."""
    label = getattr(example, "label", None)
    return label if isinstance(label, str) else ""


@dataclass(slots=True)
class EncodedSequence:
    """One sequence as the model takes it: [CLS] A [SEP], or [CLS] A [SEP] B [SEP].

    `positions` (P,): tokens whose last hidden state the head looks at, ascending. `targets` by head: a class number
    (1,), a number (1,), zeros and ones (labels,), a class a position with -1 for none (P,), or the first and last token
    of the answer (2,); empty when unlabelled. `origin`: whatever the task needs to read its answer out of the logits.
    """

    token_ids: npt.NDArray[np.int32]
    second_segment: int
    """The first token of B; the length where there is no B."""
    positions: npt.NDArray[np.int32]
    targets: npt.NDArray[Any]
    origin: Any = None

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass
class EncodingReport:
    """What reading and encoding lost: counted, shown in the data report."""

    examples: int = 0
    sequences: int = 0
    tokens: int = 0
    unknown_tokens: int = 0
    truncated: int = 0
    """Examples of which tokens were cut off."""
    truncated_tokens: int = 0
    windowed: int = 0
    """Examples that took more than one window; nothing of them is lost."""
    notes: dict[str, int] = field(default_factory=dict)
    """Anything else, by name: count."""
    first_places: dict[str, str] = field(default_factory=dict)
    """Where some of the notes were first so, for a person to look there."""

    def note(self, what: str, count: int = 1, place: str = "") -> None:
        """Count `what`."""
        if count:
            self.notes[what] = self.notes.get(what, 0) + count
            if place:
                self.first_places.setdefault(what, place)

    def note_reading(self, read: ReadReport) -> None:
        """Count what a reader replaced, joined or left out: `invalid_bytes`, and each reason by its name."""
        self.note("invalid_bytes", read.invalid_bytes, next(iter(read.invalid_places), ""))
        for reason, count in read.skipped.items():
            place = next((place for place in read.skipped_places if place.endswith(f": {reason}")), "")
            self.note(re.sub(r"\W+", "_", reason.lower()).strip("_"), count, place.removesuffix(f": {reason}"))

    def merge(self, other: "EncodingReport") -> None:
        """Add what another report counted."""
        for name in ("examples", "sequences", "tokens", "unknown_tokens", "truncated", "truncated_tokens", "windowed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, count in other.notes.items():
            self.note(name, count, other.first_places.get(name, ""))

    def as_dict(self) -> dict[str, Any]:
        """For the JSON summary."""
        return {
            "rows": self.examples,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "unknown_rate": self.unknown_tokens / self.tokens if self.tokens else 0.0,
            "truncated": self.truncated,
            "truncated_tokens": self.truncated_tokens,
            "windowed": self.windowed,
            **self.notes,
            **({"first_places": dict(self.first_places)} if self.first_places else {}),
        }


def replaced_bytes(count: int, encoding: str, place: str) -> str:
    """For a warning: what bytes that a file's encoding does not allow became, and what to do."""
    return (
        f"{count:,} bytes are not {encoding}, first at {place}, and became \ufffd; where the file is in another "
        "encoding, name it with --encoding, such as latin-1"
    )


def say_unknown(share: float, part: str = "") -> None:
    """Warn where `share` of the tokens of `part` are [UNK] and that is many."""
    if share > MANY_UNKNOWN:
        say(
            f"warning: {part}{': ' if part else ''}{share:.0%} of the tokens are [UNK]: the vocabulary does not know "
            "these texts' words (another language, or cased text for an uncased model?)"
        )
