"""The confusion picture: what is written in it, names of any script and length, one class and a thousand."""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bertsmith.tasks import pictures
from bertsmith.tasks.pictures import plot_confusion

figure_module = pytest.importorskip("matplotlib.figure")


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    """matplotlib warns where a font lacks a character, or a layout fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


class Drawn:
    """What the last saved figure holds."""

    def __init__(self, figure: Any) -> None:
        axes = figure.axes[0]
        self.title = axes.get_title(loc="left")
        self.cells = {text.get_position(): text.get_text() for text in axes.texts}
        self.columns = [label.get_text() for label in axes.get_xticklabels()]
        self.rows = [label.get_text() for label in axes.get_yticklabels()]
        self.rotation = {label.get_rotation() for label in axes.get_xticklabels()}
        renderer = figure.canvas.get_renderer()
        cell = axes.get_window_extent(renderer).width / len(axes.images[0].get_array())
        longest = {text.get_fontweight(): text for text in sorted(axes.texts, key=lambda text: len(text.get_text()))}
        self.fits = all(text.get_window_extent(renderer).width < cell for text in longest.values())
        self.shares = np.asarray(axes.images[0].get_array())
        self.boxes = [label.get_window_extent(renderer) for label in axes.get_xticklabels()]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Drawn]:
    """Filled by each plot."""
    found: list[Drawn] = []
    save = figure_module.Figure.savefig

    def savefig(figure: Any, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        found.append(Drawn(figure))

    monkeypatch.setattr(figure_module.Figure, "savefig", savefig)
    return found


def test_counts_shares_and_names(tmp_path: Path, drawn: list[Drawn]) -> None:
    path = tmp_path / "deeper" / "confusion.png"
    matrix = [[1_997, 3, 0], [10, 12_345, 0], [0, 0, 0]]
    plot_confusion(path, matrix, ["contradiction", "neutral", "entailment"])
    (picture,) = drawn
    assert picture.title == "14,355 examples, accuracy 99.9 %"
    assert picture.cells == {  # (predicted, true)
        (0, 0): "1,997\n>99 %",
        (1, 0): "3\n<1 %",
        (0, 1): "10\n<1 %",
        (1, 1): "12,345\n>99 %",
    }
    assert picture.columns == ["contradiction", "neutral", "entailment"]
    assert picture.rows == ["contradiction  (2,000)", "neutral  (12,355)", "entailment  (0)"]
    np.testing.assert_allclose(
        picture.shares, [[1_997 / 2_000, 3 / 2_000, 0], [10 / 12_355, 12_345 / 12_355, 0], [0] * 3]
    )
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["confusion.png"]  # nothing half-written beside it


@pytest.mark.parametrize("classes", [1, 3, 12, 20, 40])
def test_numbers_fit_their_cells_and_names_do_not_overlap(tmp_path: Path, drawn: list[Drawn], classes: int) -> None:
    image = pytest.importorskip("matplotlib.image")
    matrix = np.eye(classes, dtype=int) * 99_999  # the rest is left out only for the time it takes to draw
    matrix[0] = 9_999
    plot_confusion(tmp_path / "c.png", matrix, [f"class number {i}" for i in range(classes)])
    (picture,) = drawn
    assert len(picture.cells) == 2 * classes - 1
    assert picture.fits
    assert not any(a.overlaps(b) for a, b in zip(picture.boxes, picture.boxes[1:], strict=False))
    height, width, _ = image.imread(tmp_path / "c.png").shape
    assert 200 < height < 2_200
    assert 200 < width < 2_400


def test_many_classes_are_colours_and_every_other_name(tmp_path: Path, drawn: list[Drawn]) -> None:
    plot_confusion(tmp_path / "c.png", np.eye(120, dtype=int), [str(i) for i in range(120)])
    (picture,) = drawn
    assert picture.cells == {}
    assert picture.columns == [str(i) for i in range(0, 120, 2)]
    assert not any(a.overlaps(b) for a, b in zip(picture.boxes, picture.boxes[1:], strict=False))


def test_large_counts_are_shortened(tmp_path: Path, drawn: list[Drawn]) -> None:
    plot_confusion(tmp_path / "c.png", [[100_400, 999_499], [999_500, 12_345_678]], ["no", "yes"])
    assert [text.split("\n")[0] for text in drawn[0].cells.values()] == ["100k", "999k", "1.0M", "12.3M"]
    assert drawn[0].rotation == {0.0}  # short names stand level
    assert pictures._count(99_999, 5) == "99,999"
    assert pictures._count(99_999, 4) == "100k"


def test_no_example_at_all(tmp_path: Path, drawn: list[Drawn]) -> None:
    plot_confusion(tmp_path / "c.png", np.zeros((2, 2), dtype=int), ["no", "yes"])
    assert (drawn[0].title, drawn[0].cells) == ("0 examples", {})
    assert not np.isnan(drawn[0].shares).any()


def test_names_of_any_script(tmp_path: Path, drawn: list[Drawn]) -> None:
    names = [
        "спорт",
        "θ",
        "$x_1$ and $",
        "أخبار",
        "two\nlines\tand \x07a bell",
        "",
        "a name that is far too long to be shown",
    ]
    plot_confusion(tmp_path / "c.png", np.eye(7, dtype=int), names)
    shown = ["спорт", "θ", "$x_1$ and $", "أخبار", "two lines and a bell", "", "a name that is far too…"]
    assert drawn[0].columns == shown


def test_long_names_are_cut_by_columns() -> None:
    assert pictures._shorten("x" * 24) == "x" * 24
    assert pictures._shorten("x" * 25) == "x" * 23 + "…"
    assert pictures._shorten("体" * 12) == "体" * 12
    assert pictures._shorten("体" * 13) == "体" * 11 + "…"
    assert pictures._shorten("e\u0301" * 24) == "e\u0301" * 24  # a combining accent takes no column


def test_a_name_no_font_can_write_is_its_class_number(tmp_path: Path, drawn: list[Drawn]) -> None:
    """U+10FFFD belongs to no script; matplotlib's last-resort font has a box for it all the same."""
    plot_confusion(tmp_path / "c.png", np.eye(3, dtype=int), ["fine", "too", "体\U0010fffd"])
    assert drawn[0].columns == ["fine", "too", "class 2"]


FONTS = ("DejaVu Sans", "STIXGeneral")


def test_another_font_steps_in_for_missing_characters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a font with ideographs does where one is installed."""
    import matplotlib
    from matplotlib import font_manager

    # matplotlib's own files: what else there is, and what its cache knows, differs from machine to machine
    files = {name: Path(matplotlib.get_data_path(), "fonts", "ttf", f"{name.replace(' ', '')}.ttf") for name in FONTS}
    default, other = (pictures._characters(str(files[name])) for name in FONTS)
    odd = f"x{min(other - default)}"
    fonts = [font_manager.FontEntry(fname=str(file), name=name, weight=400) for name, file in files.items()]
    gone = font_manager.FontEntry(fname=str(tmp_path / "gone.ttf"), name="A font that is gone", weight=400)
    monkeypatch.setattr(font_manager.fontManager, "ttflist", [gone, *fonts])
    assert pictures._writable([odd, "x\U0010fffd", "plain"]) == (
        [odd, "class 1", "plain"],
        list(FONTS),
    )
    plot_confusion(tmp_path / "c.png", [[1]], [odd])  # matplotlib would warn of a missing glyph


@pytest.mark.parametrize(("matrix", "labels"), [([[1]], ["a", "b"]), ([[1, 2]], ["a"]), (np.zeros((0, 0)), [])])
def test_shapes_are_checked(tmp_path: Path, matrix: Any, labels: list[str]) -> None:
    with pytest.raises(ValueError, match="does not belong"):
        plot_confusion(tmp_path / "c.png", matrix, labels)
    assert not list(tmp_path.iterdir())
