"""Everything of a run that is neither weights nor optimizer: how far it is, what it counted, what it last saw.

It is small and goes into a checkpoint's state.json as it is, so that a resumed run continues in the middle of a log
interval, of an epoch and of a budget, and counts on.
"""

import contextlib
import fcntl
import math
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from bertsmith.corpus.batches import BatchCounts, StreamPosition
from bertsmith.errors import UserError
from bertsmith.storage import disk_errors
from bertsmith.training.evaluation import Evaluation

# so many bad steps in a row are no accident
MOST_BAD_STEPS = 10


@dataclass
class LogWindow:
    """Sums since the last log line."""

    steps: int = 0
    mlm_loss: float = 0.0
    nsp_loss: float = 0.0
    grad_norm: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Divergence:
    """Tells a loss that runs away from one that is merely noisy: the moving average 2 nats above the best it has been,
    or above what guessing at random gives, for five log lines in a row."""

    average: float | None = None
    best: float = math.inf
    strikes: int = 0

    def update(self, loss: float, worst: float) -> bool:
        """Take a log line's loss; `worst`: the loss of a guess at random. True when the run should stop."""
        self.average = loss if self.average is None else 0.7 * self.average + 0.3 * loss
        self.best = min(self.best, self.average)
        bad = not self.average < min(self.best + 2.0, worst + 1.0)
        self.strikes = self.strikes + 1 if bad else 0
        return self.strikes >= 5


@dataclass
class RunState:
    """How far a run is. `step`: updates applied; `seconds`: training time over all its parts."""

    step: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    flops: float = 0.0
    phase: int = 0
    position: StreamPosition = field(default_factory=StreamPosition)
    counts: BatchCounts = field(default_factory=BatchCounts)
    window: LogWindow = field(default_factory=LogWindow)
    divergence: Divergence = field(default_factory=Divergence)
    train_loss: float | None = None
    evaluated_step: int = -1
    evaluation: Evaluation | None = None

    def as_dict(self) -> dict[str, Any]:
        """For state.json."""
        values = asdict(self)
        if not math.isfinite(values["divergence"]["best"]):
            values["divergence"]["best"] = None  # JSON has no word for infinity
        return values

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunState":
        """What `as_dict` gave."""
        divergence = dict(values["divergence"])
        if divergence["best"] is None:
            divergence["best"] = math.inf
        return cls(
            **values
            | {
                "position": StreamPosition(**values["position"]),
                "counts": BatchCounts(**values["counts"]),
                "window": LogWindow(**values["window"]),
                "divergence": Divergence(**divergence),
                "evaluation": None if values["evaluation"] is None else Evaluation(**values["evaluation"]),
            }
        )


@contextlib.contextmanager
def locked_run(out: Path) -> Iterator[None]:
    """Hold the run folder for this process: two writers would remove each other's half-written files.

    Raises UserError when another process holds it. The lock goes with the process, however it ends.
    """
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = (out / ".lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise UserError(
            f"{out}: another process is training in this run folder; wait for it or choose another --out"
        ) from error
    try:
        yield
    finally:
        lock.close()


class Interrupts:
    """Ctrl-C and SIGTERM ask for a stop at the next step's end (`requested`); a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self._before[number] = signal.signal(number, self._take)
            except ValueError:  # not the main thread: whoever runs it there handles signals
                break
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
