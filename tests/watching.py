"""For tests that watch other processes: wait until something is there, and look where things come and go meanwhile."""

import contextlib
import glob
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

Found = TypeVar("Found")


def wait_until(
    condition: Callable[[], Found],
    what: str,
    *,
    process: "subprocess.Popen[bytes] | subprocess.Popen[str] | None" = None,
    said: Callable[[], str] = str,
    seconds: float = 120,
) -> Found:
    """What `condition()` gives once it is true.

    Raises AssertionError, with `said()`, after `seconds`, and where `process` ended without its having come true.
    """
    deadline = time.monotonic() + seconds
    while True:
        ended = process is not None and process.poll() is not None  # asked first: its last deed may be what is awaited
        if found := condition():
            return found
        assert not ended, f"it ended without {what}: {said()}"
        assert time.monotonic() < deadline, f"{what}: not within {seconds:.0f} seconds. {said()}"
        time.sleep(0.01)


def found_in(folder: Path, pattern: str) -> list[Path]:
    """The paths that match, sorted; a folder that vanishes during the search (`Path.glob` raises then) holds none."""
    return sorted(folder / path for path in glob.glob(pattern, root_dir=folder))


class Process(NamedTuple):
    parent: int
    group: int
    command: str


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks processes up in /proc")


def living_processes() -> dict[int, Process]:
    """Every process there is, by its id, but for those that have ended and wait for their parents (zombies)."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
                state, parent, group = (folder / "stat").read_bytes().rpartition(b")")[2].split()[:3]
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
                if state != b"Z":
                    found[int(folder.name)] = Process(int(parent), int(group), command)
    return found
