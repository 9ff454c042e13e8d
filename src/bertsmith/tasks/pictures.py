"""The confusion matrix as a picture: counts and class names in, a PNG out, to see which class is taken for which."""

import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bertsmith.storage import atomic_file

NAME_WIDTH = 24
"""Columns of a class name that are shown; an ideograph takes two."""
MOST_WITH_NUMBERS = 40
"""Classes up to which the cells hold numbers; of more the colours alone are shown."""
MOST_NAMES = 100
"""Class names on an axis; of more classes every other, third, … is named."""
_DEFAULT_FONT = "DejaVu Sans"  # matplotlib brings it along
_NO_FONTS = ("Last Resort", "cm", "STIXNonUnicode", "STIXSize")
"""Of matplotlib's own: boxes for every character there is, and fonts for formulas whose tables are not Unicode's."""


def plot_confusion(path: Path, matrix: npt.ArrayLike, labels: Sequence[str]) -> None:
    """Draw `matrix` (C, C), counts with true classes as rows and predicted ones as columns, as the PNG file `path`.

    Each cell shows its count and its share of the row, the colour is the share; empty cells stay blank. A name that no
    installed font can write stands as its class number. Raises ValueError where shapes and names do not match.
    """
    counts = np.asarray(matrix, dtype=np.int64)
    classes = len(labels)
    if not classes or counts.shape != (classes, classes):
        raise ValueError(f"a matrix {counts.shape} does not belong to {classes} classes")
    rows, total = counts.sum(axis=1), int(counts.sum())
    shares = counts / np.maximum(rows, 1)[:, None]

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    numbers = classes <= MOST_WITH_NUMBERS
    # inches and points: two lines of numbers in a cell, larger where classes are few
    cell = float(np.interp(classes, (3, 12, 40), (1.2, 0.56, 0.36))) if numbers else 16 / classes
    font = float(np.interp(classes, (3, 12, 40), (11, 8, 6.5)))
    side = cell * classes
    large = max(font + 2, 0.9 * side)  # titles are read with the whole picture in view
    names, families = _writable([_shorten(label) for label in labels])
    figure = Figure(figsize=(side, side), dpi=120)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))  # what stands around it is added when saving
    # the square root of the share: a class taken for another in 5 % of cases is to be seen
    norm = PowerNorm(0.5, vmin=0, vmax=1)
    image = axes.imshow(shares, cmap="Blues", norm=norm, interpolation="nearest")
    ticks = range(0, classes, -(-classes // MOST_NAMES))
    level = max(map(_width, names)) * 0.55 * font / 72 < cell
    axes.set_xticks(ticks, [names[i] for i in ticks], rotation=0 if level else 90)
    axes.set_yticks(ticks, [f"{names[i]}  ({rows[i]:,})" for i in ticks])
    for text in (*axes.get_xticklabels(), *axes.get_yticklabels()):
        text.set(fontsize=font, fontfamily=families, parse_math=False)  # "$" in a name is a dollar
    axes.set_xlabel("predicted", fontsize=large, labelpad=8)
    axes.set_ylabel("true (examples)", fontsize=large, labelpad=8)
    axes.tick_params(length=0)
    axes.spines[:].set_color("#bbbbbb")
    if numbers:
        axes.set_xticks(np.arange(1, classes) - 0.5, minor=True)
        axes.set_yticks(np.arange(1, classes) - 0.5, minor=True)
        axes.grid(which="minor", color="#d9d9d9", linewidth=0.5)
        axes.tick_params(which="minor", length=0)
        for true, predicted in zip(*np.nonzero(counts), strict=True):
            share = shares[true, predicted]
            axes.text(
                predicted,
                true,
                f"{_count(int(counts[true, predicted]), 5 if classes <= 20 else 4)}\n{_percent(share)}",
                ha="center",
                va="center",
                fontsize=font,
                color="white" if norm(share) > 0.6 else "#222222",
                fontweight="bold" if true == predicted else "normal",
                in_layout=False,  # measuring 1,600 texts takes as long as drawing them
            )
    # a bar 0.2 inches wide and at most 5 high, beside the cells
    place = axes.inset_axes((1 + 0.15 / side, max(0.0, 1 - 5 / side), 0.2 / side, min(1.0, 5 / side)))
    bar = figure.colorbar(image, cax=place, ticks=[0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 1])
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    bar.set_label("share of the true class", fontsize=0.5 * (font + large))
    bar.ax.tick_params(labelsize=0.5 * (font + large) - 1)
    bar.outline.set_visible(False)
    accuracy = f", accuracy {100 * np.trace(counts) / total:.1f} %" if total else ""
    axes.set_title(f"{total:,} examples{accuracy}", fontsize=large + 1, loc="left", pad=10)
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png", bbox_inches="tight", pad_inches=0.15)


def _count(count: int, digits: int) -> str:
    """All digits of a count of at most so many, else in thousands or millions."""
    if count < 10**digits:
        return f"{count:,}"
    return f"{count / 1e3:.0f}k" if count < 999_500 else f"{count / 1e6:.1f}M"


def _percent(share: float) -> str:
    """Whole percent; what is not all and not nothing is not written as such."""
    if 0 < share < 0.005:
        return "<1 %"
    return ">99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def _width(text: str) -> int:
    """Columns a text takes on a terminal."""
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def _shorten(name: str) -> str:
    """One line of at most NAME_WIDTH columns."""
    name = " ".join("".join(character if character.isprintable() else " " for character in name).split())
    if _width(name) <= NAME_WIDTH:
        return name
    while _width(name) > NAME_WIDTH - 1:
        name = name[:-1]
    return name.rstrip() + "…"


def _writable(names: list[str]) -> tuple[list[str], list[str]]:
    """Names that the fonts of this machine can write, and the fonts needed: matplotlib's own has no ideographs."""
    from matplotlib import font_manager

    families = [_DEFAULT_FONT]
    missing = set("".join(names)) - _characters(font_manager.findfont(_DEFAULT_FONT))
    # upright and of normal weight (400), or as near to it as there is: what matplotlib takes of a family
    found = []
    for entry in font_manager.fontManager.ttflist:
        if entry.style == "normal" and not entry.name.startswith(_NO_FONTS):
            weight = entry.weight if isinstance(entry.weight, int) else font_manager.weight_dict[entry.weight]
            found.append((abs(weight - 400), entry.name, entry.fname))
    for _, family, file in sorted(found):
        if missing and family not in families and missing & (covered := _characters(file)):
            families.append(family)
            missing -= covered
    return [f"class {i}" if missing & set(name) else name for i, name in enumerate(names)], families


def _characters(font_file: str) -> set[str]:
    """Characters a font has glyphs for."""
    from matplotlib.font_manager import get_font

    try:
        return set(map(chr, get_font(font_file).get_charmap()))
    except (OSError, RuntimeError):  # a font file that is gone or damaged
        return set()
