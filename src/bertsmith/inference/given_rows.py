"""What a loaded model is given in Python: texts and rows → examples of its task, or what is wrong with them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from bertsmith.errors import UserError
from bertsmith.tasks.examples import ChoiceExample, Example, QuestionExample, TaggedExample, TextExample
from bertsmith.tasks.table import kind_of
from bertsmith.tasks.task import Task


def listed(texts: Sequence[Any]) -> list[Any]:
    """A single text is a slip: its characters would be texts; so is a dictionary, whose keys would be.

    Raises UserError for what is no list of any kind.
    """
    if isinstance(texts, bytes | bytearray):
        raise UserError("texts: are bytes; give a list of texts, each decoded")
    # NumPy's and PyTorch's single values have the methods of a list too
    if isinstance(texts, str | dict) or not isinstance(texts, Iterable) or getattr(texts, "ndim", 1) == 0:
        raise UserError(f"texts: give a list of texts, not {'one text' if isinstance(texts, str) else kind_of(texts)}")
    return list(texts)


def only_texts(texts: Sequence[Any]) -> list[str]:
    """Raises UserError naming the first that is no text."""
    given = listed(texts)
    for number, text in enumerate(given, 1):
        if not isinstance(text, str):
            raise UserError(f"text {number}: is {kind_of(text)}, not a text")
    return given


def make_examples(task: Task, rows: Sequence[Any]) -> list[Example]:
    """An example a row (see `LoadedModel.predict`). Raises UserError naming the first row of another kind."""
    make = _pair_example if task.head == "sequence" and task.spec.two_texts else _MAKERS[task.head]
    return [make(f"row {number}", row) for number, row in enumerate(listed(rows), 1)]


def _text_example(place: str, row: Any) -> Example:
    if isinstance(row, str):
        return TextExample(place, place, row, None, None)
    raise UserError(f"{place}: the model takes one text; give {'no pair' if _are_texts(row, 2) else 'a text'}")


def _pair_example(place: str, row: Any) -> Example:
    if _are_texts(row, 2):
        return TextExample(place, place, row[0], row[1], None)
    raise UserError(f"{place}: the model compares two texts; give (text, text)")


def _choice_example(place: str, row: Any) -> Example:
    if isinstance(row, list | tuple) and len(row) == 2 and isinstance(row[0], str) and _are_texts(row[1]) and row[1]:
        return ChoiceExample(place, place, row[0], tuple(row[1]), None)
    raise UserError(f"{place}: give (context, [ending, …])")


def _tagged_example(place: str, row: Any) -> Example:
    if isinstance(row, str):
        row = row.split()
    if _are_texts(row):
        return TaggedExample(place, place, tuple(row), None)
    raise UserError(f"{place}: give a list of words, or a text")


def _question_example(place: str, row: Any) -> Example:
    if _are_texts(row, 2):
        return QuestionExample(place, place, row[0], row[1], None)
    raise UserError(f"{place}: give (question, context)")


def _are_texts(row: Any, count: int | None = None) -> bool:
    """Whether `row` is a list of `count` texts (None: any number)."""
    if not isinstance(row, list | tuple) or (count is not None and len(row) != count):
        return False
    return all(isinstance(text, str) for text in row)


_MAKERS: dict[str, Callable[[str, Any], Example]] = {
    "sequence": _text_example,
    "choice": _choice_example,
    "token": _tagged_example,
    "span": _question_example,
}
