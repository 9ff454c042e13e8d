"""What SIGTERM does for a while."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def sigterm_as(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    """SIGTERM is taken by `handler` in here; nothing changes off the main thread, where signals are another's."""
    try:
        before = signal.signal(signal.SIGTERM, handler)
    except ValueError:
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
