"""A share of the one labelled file, held out to score on: `--dev-share`.

In go the file's examples, out come the numbers of those that are held out. What is drawn are texts, not rows: copies of
a text, and all questions on one context, stay on one side, or dev would be scored on what was learnt. Of pairs and
choices the whole counts: those that have only a premise or a context in common may stand on both sides. Texts are drawn
by a hash of themselves: the draw is the same for any seed and any order of the rows, and nearly the same when the file
has grown. Where examples are of one class each, every class gives its share.
"""

import math
import unicodedata
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from bertsmith.corpus.random_bits import derive_key
from bertsmith.errors import UserError
from bertsmith.progress import say
from bertsmith.tasks.examples import ChoiceExample, Example, QuestionExample, TextExample, class_name, label_names
from bertsmith.text.documents import join_names
from bertsmith.text.words import Normalization, WordSplitter

_NAMED = 5


@dataclass(frozen=True)
class HeldOut:
    """Which examples of a file are held out, and how many there are of what."""

    numbers: frozenset[int]
    """Of the examples held out, in the file's order from 0."""
    examples: int
    """In the whole file."""
    texts: int
    """Different ones in the whole file; contexts, where examples are questions."""
    labels: Sequence[frozenset[str]]
    """(examples,): the names that each one's label teaches."""


def hold_out(path: str, examples: Iterable[Example], share: float, normalization: Normalization) -> HeldOut:
    """Draw `share` of a file's examples, and say how many of what it is. `normalization`: of the model's tokenizer.

    Raises UserError where no text can be held out: none is to spare, or every class has a single one.
    """
    texts: list[int] = []
    classes: list[str] = []
    labels: list[frozenset[str]] = []
    splitter = key_splitter(normalization)
    what = "texts"
    for example in examples:
        what = "contexts" if isinstance(example, QuestionExample) else "texts"
        texts.append(text_key(example, splitter))
        classes.append(class_name(example))
        labels.append(frozenset(label_names(example)))
    numbers = draw_examples(texts, classes, share)
    if not numbers:
        raise UserError(
            f"--dev-share: nothing of {path} can be held out: examples that have their text or context in common stay "
            "together, and a class keeps one text to learn from; name a file to score on with --dev"
        )
    found = HeldOut(frozenset(numbers), len(texts), len(set(texts)), labels)
    together = f" ({found.texts:,} {what}, each on one side)" if found.texts < found.examples else ""
    say(
        f"dev: {len(numbers):,} of the {found.examples:,} examples of {path}{together} are held out, "
        f"{len(numbers) / found.examples:.1%}"
    )
    return found


def key_splitter(normalization: Normalization) -> WordSplitter:
    """Text → words as a tokenizer's model sees them, but for capitals: "Film" and "film" are one text for any model."""
    return WordSplitter(replace(normalization, lowercase=True, strip_accents=normalization.strips_accents))


def text_key(example: Example, splitter: WordSplitter) -> int:
    """A hash of what must not stand on both sides; `splitter` is `key_splitter`'s.

    What is hashed are words before they are cut into tokens: texts with the same words have the same tokens, and texts
    with other words have others, but for [UNK], which stands for many that have nothing to do with each other. A model
    sees the same of all texts without any word (control characters alone): they are one text.

    Of a question its context; of a pair or a choice all its texts, in whichever order they come.
    """
    match example:
        case QuestionExample():
            parts: tuple[str, ...] = (example.context,)
        case ChoiceExample():
            parts = (example.context, *example.choices)
        case TextExample():
            parts = (example.text,) if example.pair is None else (example.text, example.pair)
        case _:
            parts = (" ".join(example.words),)
    # a tokenizer that keeps accents keeps the two ways to write one, too
    words = [unicodedata.normalize("NFC", " ".join(splitter.words(part))) for part in parts]
    fixed = 1 if isinstance(example, ChoiceExample) else 0  # a context is not exchanged for a choice
    return derive_key("dev share", *words[:fixed], *sorted(words[fixed:]))


def draw_examples(texts: Sequence[int], classes: Sequence[str], share: float) -> list[int]:
    """The numbers of the examples that are held out, ascending; [] where no class has two texts.

    `texts`, `classes` (examples,): the hash of each one's text, and its class. A text's examples go together. Every
    class gives its share, up to rounding, which is carried on to the next; of its texts one is always kept.
    """
    copies: dict[int, list[int]] = {}
    for number, text in enumerate(texts):
        copies.setdefault(text, []).append(number)
    sizes = {text: len(numbers) for text, numbers in copies.items()}
    of_class: dict[str, list[int]] = {}
    for text in sorted(copies):  # hashes are random, and so is their order
        # a text may be labelled in two ways; it is counted with the one that does not depend on the rows' order
        of_class.setdefault(min(classes[number] for number in copies[text]), []).append(text)
    divisible = [its_texts for its_texts in of_class.values() if len(its_texts) > 1]
    divisible.sort(key=lambda its_texts: sum(sizes[text] for text in its_texts))  # the largest evens out the others
    held: list[int] = []
    seen = taken = 0
    for its_texts in divisible:
        rows = sum(sizes[text] for text in its_texts)
        seen += rows
        # what the classes before could not give is not all taken from this one
        drawn = fill(its_texts, sizes, min(round(share * seen) - taken, math.ceil(share * rows), rows - 1))
        taken += sum(sizes[text] for text in drawn)
        held += drawn
    if divisible and not held:
        held.append(min((text for its_texts in reversed(divisible) for text in its_texts), key=sizes.__getitem__))
    return sorted(number for text in held for number in copies[text])


def fill(texts: Sequence[int], sizes: Mapping[int, int], room: int) -> list[int]:
    """Those of the texts, in order, whose examples fit into `room` (less than all); one more if that is nearer."""
    chosen: list[int] = []
    left: list[int] = []
    for text in texts:
        fits = sizes[text] <= room
        (chosen if fits else left).append(text)
        room -= sizes[text] if fits else 0
    smallest = min(left, key=sizes.__getitem__)
    if len(left) > 1 and abs(room - sizes[smallest]) < room:
        chosen.append(smallest)
    return chosen


def warn_of_absent_labels(labels: Sequence[frozenset[str]], train: Collection[int], dev: Collection[int]) -> None:
    """Say which labels one of the two sides has no example of.

    `labels` (examples,): those of each. `train`, `dev`: the numbers of the examples that are learnt from and scored on.
    """
    everything = frozenset[str]().union(*labels)
    for side, numbers, so in (
        ("dev", dev, "dev scores do not show how well it is learnt"),
        ("train", train, "it cannot be learnt"),
    ):
        there = frozenset[str]().union(*(labels[number] for number in numbers))
        if absent := sorted(everything - there - {""}):  # "" is a word's that is in no entity
            say(f"warning: {side}: no example of {join_names(absent, _NAMED)} is on this side; {so}")
