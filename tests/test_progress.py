"""Progress: plain lines in a file, a bar on a terminal that never wraps, and no harm when nobody reads."""

import io
import sys

import pytest

from bertsmith import progress
from bertsmith.progress import Progress, format_seconds, say, write_stderr


class Clock:
    """time.monotonic under the test's control."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(progress, "time", clock)
    return clock


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0s"), (59.9, "59s"), (75, "1m15s"), (3600, "1h00m"), (4000, "1h06m"), (90000, "25h00m")]
)
def test_seconds_for_people(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_plain_lines_a_few_seconds_apart(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", 40e6, "MB", scale=1e6) as bar:
        for _ in range(4):
            clock.now += 2
            bar.advance(10e6)
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines() == [
        "reading: 30.0/40.0 MB, 5.00 MB/s, 2s left",
        "reading: 40.0/40.0 MB, 5.00 MB/s, took 8s",
    ]


def test_without_a_total_only_the_rate(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("counting", None, "entries") as bar:
        clock.now += 10
        bar.advance(12345)
    assert capsys.readouterr().err.splitlines()[0] == "counting: 12,345 entries, 1,234.50 entries/s"


def test_more_than_was_expected_is_no_negative_time(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", 10, "files") as bar:
        clock.now += 10
        bar.advance(20)
    assert "0s left" in capsys.readouterr().err


def test_nothing_done_nothing_said(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress("reading", 10, "files"):
        pass
    assert not capsys.readouterr().err


def test_a_bar_on_a_terminal_is_written_over(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("COLUMNS", "50")
    with Progress("tokenizing a good deal of text", 100, "files") as bar:
        clock.now += 1
        bar.advance(50)
        clock.now += 0.1
        bar.advance(10)  # too soon to be shown
        clock.now += 1
        bar.advance(40)
    shown = terminal.getvalue().split("\r\x1b[2K")[1:]
    assert len(shown) == 3
    assert shown[0].startswith("[████████████············] ")
    assert shown[1].startswith("[████████████████████████] ")
    assert shown[2].endswith("\n")
    assert "\n" not in "".join(shown[:2])
    assert max(map(len, shown)) <= 50


def test_an_error_leaves_the_bar_standing(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)

    def advance_and_fail(bar: Progress) -> None:
        clock.now += 1
        bar.advance(50)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), Progress("reading", 100, "files") as bar:
        advance_and_fail(bar)
    assert terminal.getvalue().endswith(" left\n")
    with pytest.raises(ZeroDivisionError), Progress("reading", 100, "files"):
        raise ZeroDivisionError
    assert terminal.getvalue().count("\n") == 1  # where nothing stood, nothing is left standing


class Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("closed", [False, True])
def test_nobody_listening_is_no_error(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stream: io.StringIO = io.StringIO() if closed else Broken()
    if closed:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    say("x")
    write_stderr("x")
    if not closed:
        with Progress("reading", 10, "files", every=0) as bar:
            bar.advance(1)
