"""Progress on stderr: a bar with rate and time left on a terminal, plain lines a few seconds apart elsewhere."""

import contextlib
import shutil
import sys
import time
from collections.abc import Hashable, Iterator
from types import TracebackType

# set in `silenced` only
_silent = False
# what `say_once` has said in this process
_said = set[Hashable]()


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Say nothing in here: of several processes that do the same, one talks."""
    global _silent
    before, _silent = _silent, True
    try:
        yield
    finally:
        _silent = before


def format_seconds(seconds: float) -> str:
    """`75` → `1m15s`, `4000` → `1h06m`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def write_stderr(text: str) -> None:
    """Write to stderr, if anybody still listens: a terminal that was closed must not end hours of work."""
    if _silent:
        return
    with contextlib.suppress(OSError, ValueError):  # ValueError: the stream was closed
        print(text, end="", file=sys.stderr, flush=True)


def say(text: str) -> None:
    """One line for the person at the terminal (stderr; stdout belongs to results)."""
    write_stderr(f"{text}\n")


def say_once(text: str, about: Hashable) -> None:
    """`say`, unless this process has said something of `about` before: a command meets the same fact many times."""
    if not _silent and about not in _said:
        _said.add(about)
        say(text)


class Progress:
    """`with Progress("tokenizing", total=…, unit="MB", scale=1e6) as bar: bar.advance(n)`; `total` None: rate only."""

    def __init__(self, label: str, total: float | None, unit: str, scale: float = 1.0, every: float = 5.0) -> None:
        self.label, self.total, self.unit, self.scale, self.every = label, total, unit, scale, every
        self.done = 0.0
        self.started = self.shown = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self._open = False  # a line that is written over stands on the terminal

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self.done:
            self._show(final=True)
        elif self._open:
            write_stderr("\n")

    def advance(self, amount: float) -> None:
        """Count `amount` more (in units before scaling) and show it when it is time."""
        self.done += amount
        now = time.monotonic()
        if now - self.shown >= (0.2 if self.terminal else self.every):
            self.shown = now
            self._show(final=False)

    def _show(self, final: bool) -> None:
        seconds = max(time.monotonic() - self.started, 1e-9)
        rate = self.done / seconds
        line = f"{self.label}: {self._amount(self.done)}"
        if self.total:
            line += f"/{self._amount(self.total)}"
        line += f" {self.unit}, {rate / self.scale:,.2f} {self.unit}/s"
        if final:
            line += f", took {format_seconds(seconds)}"
        elif self.total and rate > 0:
            line += f", {format_seconds(max(self.total - self.done, 0) / rate)} left"
            if self.terminal:
                filled = int(min(self.done / self.total, 1.0) * 24)
                line = f"[{'█' * filled}{'·' * (24 - filled)}] {line}"
        if self.terminal:
            # a line longer than the terminal would wrap and could not be written over
            line = f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}"
        self._open = self.terminal and not final
        write_stderr(line if self._open else f"{line}\n")

    def _amount(self, count: float) -> str:
        return f"{count / self.scale:,.1f}" if self.scale != 1 else f"{count:,.0f}"
