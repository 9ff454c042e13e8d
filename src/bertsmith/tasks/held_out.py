"""A share of the one labelled file, held out to score on: `--dev-share`.

In go the file's examples, out come the numbers of those that are held out. What is drawn are texts, not rows: copies of
a text, and all questions on one context, stay on one side, or dev would be scored on what was learnt. Texts are drawn
by a hash of themselves: the draw is the same for any seed and any order of the rows, and nearly the same when the file
has grown. Where examples are of one class each, every class gives its share.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from bertsmith.corpus.random_bits import derive_key
from bertsmith.errors import UserError
from bertsmith.progress import say
from bertsmith.tasks.examples import ChoiceExample, Example, QuestionExample, TextExample, class_name, label_names
from bertsmith.text.documents import join_names

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
    classes: Counter[str]
    """Of the examples held out; "" where they have none."""


def hold_out(path: str, examples: Iterable[Example], share: float) -> HeldOut:
    """Draw `share` of a file's examples, and say how many of what it is and which labels one of the two sides lacks.

    Raises UserError where no text can be held out: none is to spare, or every class has a single one.
    """
    texts: list[int] = []
    classes: list[str] = []
    labels: list[frozenset[str]] = []
    what = "texts"
    for example in examples:
        what = "contexts" if isinstance(example, QuestionExample) else "texts"
        texts.append(text_key(example))
        classes.append(class_name(example))
        labels.append(frozenset(label_names(example)))
    numbers = draw_examples(texts, classes, share)
    if not numbers:
        raise UserError(
            f"dev_share: nothing of {path} can be held out: examples that have their text or context in common stay "
            "together, and a class keeps one text to learn from; name a file to score on with --dev"
        )
    found = HeldOut(frozenset(numbers), len(texts), len(set(texts)), Counter(classes[number] for number in numbers))
    together = f" ({found.texts:,} {what}, each on one side)" if found.texts < found.examples else ""
    say(
        f"dev: {len(numbers):,} of the {found.examples:,} examples of {path}{together} are held out, "
        f"{len(numbers) / found.examples:.1%}"
    )
    warn_of_absent_labels(labels, found.numbers)
    return found


def text_key(example: Example) -> int:
    """A hash of what must not stand on both sides; differences in case and blanks, which models may not see, are none.

    Of a question its context; of a choice all its texts, in whichever order they are offered.
    """
    match example:
        case QuestionExample():
            parts: tuple[str, ...] = (example.context,)
        case ChoiceExample():
            parts = (example.context, *sorted(example.choices))
        case TextExample():
            parts = (example.text,) if example.pair is None else (example.text, example.pair)
        case _:
            parts = example.words
    return derive_key("dev share", *(" ".join(part.casefold().split()) for part in parts))


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


def warn_of_absent_labels(labels: Sequence[frozenset[str]], held: frozenset[int]) -> None:
    """Say which labels one of the two sides has no example of. `labels` (examples,): those of each."""
    both = frozenset[str]().union(*labels)
    dev = frozenset[str]().union(*(labels[number] for number in held))
    train = frozenset[str]().union(*(names for number, names in enumerate(labels) if number not in held))
    for side, there, so in (
        ("dev", dev, "dev scores do not show how well it is learnt"),
        ("train", train, "it cannot be learnt"),
    ):
        if absent := sorted(both - there - {""}):  # "" is a word's that is in no entity
            say(f"warning: {side}: no example of {join_names(absent, _NAMED)} is on this side; {so}")
