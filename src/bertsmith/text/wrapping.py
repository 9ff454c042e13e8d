"""Hard-wrapped text (Project Gutenberg's books, e-mail, man pages) → one paragraph a line.

A document counts as hard-wrapped by what wrapping does to it: nearly every line inside its paragraphs is full, that is,
the next line's first word would not have fitted, and the breaks fall in mid sentence. Text with a paragraph or a
sentence a line, lists and verse do not look so.
"""

import re
from itertools import pairwise

NARROWEST, WIDEST = 30, 130
"""Columns between which people and programs wrap."""
FEWEST_BREAKS = 4
"""Fewer line breaks inside paragraphs prove nothing."""
FULL = 0.85
"""A line is full if it and the next word together fill this share of the width: wrapping by hand is not exact."""
FULL_SHARE = 0.7
"""Of the breaks inside paragraphs, at least so many come after a full line,"""
MID_SENTENCE_SHARE = 0.5
"""so many after no sentence mark,"""
SMALL_LETTER_SHARE = 0.4
"""and, in scripts with capitals, so many before a small letter (German prose has about 0.6)."""

SENTENCE_END = re.compile(r"[.!?…:。！？：｡۔؟।]['\"”’»」』）)\]]*$")
WIDE_RANGES = (
    "\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\U00020000-\U0003fffd"
)
WIDE = re.compile(f"[{WIDE_RANGES}]")
WIDE_JOINT = re.compile(f"[{WIDE_RANGES}]\n[{WIDE_RANGES}]")


def display_width(text: str) -> int:
    """Columns on a terminal: two for an East Asian wide character."""
    return len(text) if text.isascii() else len(text) + len(WIDE.findall(text))


def unwrap_lines(lines: list[str]) -> list[str]:
    """The lines, those of hard-wrapped paragraphs joined; unchanged where the document is not hard-wrapped.

    In a hard-wrapped document a newline still stands after a line that is not full (headings, verse, a paragraph's last
    line), unless the next starts with a small letter, and before a line that is indented more than the one above.
    """
    width = find_wrap_width(lines)
    if not width:
        return lines
    joined = [lines[0]]
    for above, below in pairwise(lines):
        if is_break(above, below) and (is_full(above, below, width) or below.lstrip()[0].islower()):
            joined[-1] = join(joined[-1].rstrip(), below.strip())
        else:
            joined.append(below)
    return joined


def find_wrap_width(lines: list[str]) -> int:
    """The width in columns a document is hard-wrapped to; 0 if it is not."""
    lengths = sorted(len(line) for line in lines if line and not line.isspace())
    if len(lengths) <= FEWEST_BREAKS or lengths[len(lengths) * 9 // 10] > WIDEST:
        return 0  # most documents: a look at the lengths is enough
    breaks = [pair for pair in pairwise(lines) if is_break(*pair)]
    if len(breaks) < FEWEST_BREAKS:
        return 0
    widths = sorted(display_width(above.rstrip()) for above, _ in breaks)
    width = widths[len(widths) * 95 // 100]
    if not NARROWEST <= width <= WIDEST:
        return 0
    full = sum(is_full(above, below, width) for above, below in breaks)
    mid_sentence = sum(not SENTENCE_END.search(above.rstrip()) for above, _ in breaks)
    starts = [below.lstrip()[0] for _, below in breaks]
    small = sum(map(str.islower, starts))
    # a digit or mark starts a list's next item rather than a line of prose; letters without case say nothing
    telling = sum(c.islower() or c.isupper() or not c.isalpha() for c in starts)
    if full < FULL_SHARE * len(breaks) or mid_sentence < MID_SENTENCE_SHARE * len(breaks):
        return 0
    return 0 if telling > len(breaks) / 2 and small < SMALL_LETTER_SHARE * telling else width


def is_break(above: str, below: str) -> bool:
    """Whether a newline between two lines may be inside a paragraph: no blank line, no new indentation."""
    if not above or not below or above.isspace() or below.isspace():
        return False
    return indentation(below) <= indentation(above) + 1


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def is_full(above: str, below: str, width: int) -> bool:
    """Whether the first word of `below` (the first character, in scripts without spaces) had no room above."""
    above, below = above.rstrip(), below.lstrip()
    word = below[0] if WIDE.match(below) else below.split(None, 1)[0]
    return display_width(above) + 1 + display_width(word) > FULL * width


def join(above: str, below: str) -> str:
    """One line of two: no space after a hyphen or dash inside words, nor between wide characters."""
    if above[-1] in "-—\xad" and len(above) > 1 and not above[-2].isspace() and below[0].isalnum():
        return above + below
    return above + below if WIDE_JOINT.match(f"{above[-1]}\n{below[0]}") else f"{above} {below}"
