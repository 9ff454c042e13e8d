"""Texts as they are read → stretches of them that are in memory at a time, with what waits beside each of them.

Stretches are long enough that batches of like lengths fill up, and end early where texts, or what is carried along with
them, are long: memory is flat whatever a file's rows are like.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

from bertsmith.errors import UserError
from bertsmith.tasks.table import kind_of

_Item = TypeVar("_Item")
Text = str | Sequence[str]
"""A text; for vectors of words also a list of them."""

TEXTS_AT_ONCE = 4096
KEPT_AT_ONCE = 32 << 20
"""Bytes of what is carried along, about."""


def check_text(place: str, text: Text) -> None:
    """Raise UserError for what is neither a text nor a sequence of words."""
    words = [text] if isinstance(text, str | bytes) or not hasattr(text, "__iter__") else text
    for word in words:
        if not isinstance(word, str):
            raise UserError(f"{place}: is or holds {kind_of(word)}, not a text")


def count_characters(text: Text) -> int:
    """Of a text, or of all its words."""
    return len(text) if isinstance(text, str) else sum(map(len, text))


def split_chunks(
    texts: Iterable[tuple[str, Text]],
    most_characters: int,
    most_texts: int = TEXTS_AT_ONCE,
    weigh: Callable[[], int] = lambda: 0,
) -> Iterator[list[tuple[str, Text]]]:
    """(place, text) pairs in stretches of `most_texts`, or of about `most_characters`.

    `weigh`: the bytes that wait beside the pair read last, of which a stretch has about KEPT_AT_ONCE at most.
    """

    def checked() -> Iterator[tuple[str, Text]]:
        for place, text in texts:
            check_text(place, text)
            yield place, text

    characters = (most_characters, lambda pair: count_characters(pair[1]))
    return split_stretches(checked(), most_texts, characters, (KEPT_AT_ONCE, lambda _: weigh()))


def split_stretches(
    items: Iterable[_Item], most: int, *bounds: tuple[int, Callable[[_Item], int]]
) -> Iterator[list[_Item]]:
    """`items` in stretches of `most`, or of fewer whose sizes together reach a bound (bound, size of an item)."""
    stretch, sizes = list[_Item](), [0] * len(bounds)
    for item in items:
        stretch.append(item)
        sizes = [size + measure(item) for size, (_, measure) in zip(sizes, bounds, strict=True)]
        if len(stretch) >= most or any(size >= bound for size, (bound, _) in zip(sizes, bounds, strict=True)):
            yield stretch
            stretch, sizes = [], [0] * len(bounds)
    if stretch:
        yield stretch
