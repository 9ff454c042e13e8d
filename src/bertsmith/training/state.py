"""Everything of a run that is neither weights nor optimizer: how far it is, what it counted, what it last saw.

It is small and goes into a checkpoint's state.json as it is, so that a resumed run continues in the middle of a log
interval, of an epoch and of a budget, and counts on.
"""

import contextlib
import fcntl
import math
import os
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, BinaryIO

import torch

from bertsmith.corpus.batches import BatchCounts, StreamPosition
from bertsmith.corpus.windows import CorpusIndex
from bertsmith.errors import UserError
from bertsmith.hardware import Machine
from bertsmith.model.config import BertConfig, useful_flops
from bertsmith.progress import say
from bertsmith.storage import disk_errors
from bertsmith.training.evaluation import Evaluation

# so many bad steps in a row are no accident
MOST_BAD_STEPS = 10


@dataclass
class LogWindow:
    """Sums since the last log line; `learning_rate` is that of the last step."""

    steps: int = 0
    mlm_loss: float = 0.0
    nsp_loss: float = 0.0
    grad_norm: float = 0.0
    learning_rate: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    seconds: float = 0.0


@dataclass
class Divergence:
    """Tells a loss that runs away from one that is merely noisy.

    A run should stop when the moving average of its loss stays, for five log lines in a row, 2 nats above the best it
    has been or 1 above what guessing at random gives, and as much more as noise explains: six standard deviations of
    that average (the best of many is a lucky one), estimated from the differences between neighbouring lines, which a
    trend hardly touches.
    """

    average: float | None = None
    best: float | None = None
    last: float | None = None
    variance: float = 0.0
    strikes: int = 0

    def update(self, loss: float, worst: float) -> bool:
        """Take a log line's loss; `worst`: the loss of a guess at random. True when the run should stop."""
        average = loss if self.average is None else 0.7 * self.average + 0.3 * loss
        step = 0.0 if self.last is None else loss - self.last
        self.best = average if self.best is None else min(self.best, average)
        self.variance = 0.9 * self.variance + 0.1 * step**2 / 2
        self.average, self.last = average, loss
        noise = 6 * math.sqrt(self.variance * 0.3 / 1.7)
        self.strikes = self.strikes + 1 if not average < min(self.best + 2, worst + 1) + noise else 0
        return self.strikes >= 5


@dataclass(frozen=True)
class Arithmetic:
    """What rounding depends on: a run is bit-equal to another only if all of this is."""

    precision: str
    device: str
    threads: int
    instructions: str
    """The widest vector instructions PyTorch uses on this CPU."""
    torch: str
    ranks: int = 1
    compiled: bool = False

    @classmethod
    def of(cls, machine: Machine, ranks: int = 1, compiled: bool = False) -> "Arithmetic":
        """What it is here and now."""
        on_cpu = machine.device.type == "cpu"
        return cls(
            precision=machine.precision,
            device="cpu" if on_cpu else torch.cuda.get_device_name(machine.device),
            threads=torch.get_num_threads(),
            instructions=torch.backends.cpu.get_cpu_capability(),
            torch=torch.__version__,
            ranks=ranks,
            compiled=compiled,
        )

    def differences(self, now: "Arithmetic") -> str:
        """What is not the same now, such as `threads 2 → 4, torch 2.12.0 → 2.13.0`; empty when all is."""
        return ", ".join(
            f"{entry.name} {before} → {after}"
            for entry in fields(self)
            if (before := getattr(self, entry.name)) != (after := getattr(now, entry.name))
        )


def warn_of_changes(before: Arithmetic | None, now: Arithmetic) -> None:
    """Say what rounding depends on and is not as when the run began."""
    if before is not None and (changes := before.differences(now)):
        say(f"warning: the run began otherwise ({changes}): from here on it equals an unbroken run up to rounding only")


@dataclass
class RunState:
    """How far a run is. `step`: updates applied; `seconds`: training time over all its parts."""

    step: int = 0
    skipped_steps: int = 0
    bad_in_a_row: int = 0
    seconds: float = 0.0
    step_seconds: float = 0.0
    flops: float = 0.0
    possible_flops: float = 0.0
    """What the measured matrix-product rate would have allowed in `step_seconds`."""
    phase: int = 0
    micro_batch_size: int = 0
    """Sequences at once in this phase; 0: not chosen yet."""
    position: StreamPosition = field(default_factory=StreamPosition)
    epochs_passed_over: float = 0.0
    """Share of the corpus that was left out where a phase began (see `enter_phase`)."""
    counts: BatchCounts = field(default_factory=BatchCounts)
    window: LogWindow = field(default_factory=LogWindow)
    divergence: Divergence = field(default_factory=Divergence)
    train_loss: float | None = None
    evaluated_step: int = -1
    evaluated_examples: int = 0
    """What `eval.examples` was at that evaluation."""
    evaluation: Evaluation | None = None
    arithmetic: Arithmetic | None = None
    corpus_sha256: str = ""
    architecture: dict[str, Any] = field(default_factory=dict)
    """config.json's content, so that a resumed run needs no other folder."""
    settings: dict[str, Any] = field(default_factory=dict)
    """The settings that must not change, by key: config.toml may be edited between the parts of a run."""
    budget: dict[str, Any] = field(default_factory=dict)
    """The length asked for, to tell a repetition of a finished run from a shorter one."""

    @property
    def epochs(self) -> float:
        """Passes over the corpus so far, without what was passed over."""
        return self.position.fraction - self.epochs_passed_over

    def count_update(self, mlm_loss: float, nsp_loss: float, norm: float, learning_rate: float) -> None:
        """An update was applied."""
        self.step += 1
        self.bad_in_a_row = 0
        self.window.steps += 1
        self.window.mlm_loss += mlm_loss
        self.window.nsp_loss += nsp_loss
        self.window.grad_norm += norm
        self.window.learning_rate = learning_rate

    def count_skip(self) -> None:
        """A batch gave no finite loss or gradient; the step counter, and with it the schedule, stays where it is."""
        self.skipped_steps += 1
        self.bad_in_a_row += 1

    def enter_phase(self, phase: int, corpus: CorpusIndex) -> None:
        """Go on at another sequence length, from the start of the next window of the corpus.

        That is the one kind of place that means the same text at every length. What is left of the window before it is
        passed over and does not count as read.
        """
        before = self.position
        if before.offset:
            blocks = (before.window + 1) * corpus.window_blocks
            if blocks < corpus.blocks:
                fraction = before.epoch + blocks / corpus.blocks
                self.position = StreamPosition(before.epoch, before.window + 1, 0, fraction)
            else:
                self.position = StreamPosition(before.epoch + 1, 0, 0, before.epoch + 1.0)
            self.epochs_passed_over += self.position.fraction - before.fraction
        self.phase, self.micro_batch_size = phase, 0

    def as_dict(self) -> dict[str, Any]:
        """For state.json."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunState":
        """What `as_dict` gave. Raises UserError when it is not of this version of bertsmith."""
        try:
            evaluation, arithmetic = values["evaluation"], values["arithmetic"]
            return cls(
                **values
                | {
                    "position": StreamPosition(**values["position"]),
                    "counts": BatchCounts(**values["counts"]),
                    "window": LogWindow(**values["window"]),
                    "divergence": Divergence(**values["divergence"]),
                    "evaluation": None if evaluation is None else Evaluation(**evaluation),
                    "arithmetic": None if arithmetic is None else Arithmetic(**arithmetic),
                }
            )
        except (KeyError, TypeError) as error:
            raise UserError(
                f"the checkpoint's state was written by another version of bertsmith ({error}); resume with that one"
            ) from error


def count_work(
    state: RunState, config: BertConfig, counts: BatchCounts, squares: int, paired: bool, seconds: float, limit: float
) -> None:
    """Count a step's tokens, its useful arithmetic, its time, and what the machines could have computed in it."""
    tokens = counts.tokens
    flops = useful_flops(config, tokens, squares, counts.masked, counts.examples if paired else 0)
    state.step_seconds += seconds
    state.flops += flops
    state.possible_flops += limit * seconds
    state.window.seconds += seconds
    state.window.flops += flops
    state.window.tokens += tokens


def window_metrics(state: RunState, limit: float, paired: bool) -> dict[str, Any]:
    """A line of metrics.jsonl: means over the window's steps, and how far the run is."""
    window = state.window
    mlm, nsp = window.mlm_loss / window.steps, window.nsp_loss / window.steps
    return {
        "loss": mlm + nsp,
        "mlm_loss": mlm,
        "nsp_loss": nsp if paired else None,
        "learning_rate": window.learning_rate,
        "grad_norm": window.grad_norm / window.steps,
        "tokens": state.counts.tokens,
        "tokens_per_second": window.tokens / window.seconds,
        "utilization": window.flops / window.seconds / limit,
        "seconds": state.seconds,
        "skipped_steps": state.skipped_steps,
        "epochs": state.epochs,
    }


@contextlib.contextmanager
def locked_run(out: Path) -> Iterator[None]:
    """Hold the run folder for this process: two writers would remove each other's half-written files.

    Raises UserError when another process holds it. The lock goes with the process, however it ends. A folder that did
    not exist and in which nothing was written is removed again.
    """
    path, existed = out / ".lock", out.exists()
    with disk_errors(out):
        out.mkdir(parents=True, exist_ok=True)
        lock = path.open("wb")
    try:
        _lock(lock, out)
        yield
    finally:
        if not existed and os.listdir(out) == [path.name]:
            path.unlink()
            out.rmdir()
        lock.close()


def _lock(file: BinaryIO, out: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UserError(
            f"{out}: another process is training in this run folder; wait for it or choose another --out"
        ) from error
    except OSError:
        pass  # some network file systems know no locks: whether another process is there cannot be told


class Interrupts:
    """Ctrl-C and SIGTERM ask for a stop at the next step's end (`requested`); a second one stops at once.

    `patient`: a second one changes nothing. torchrun hands on a signal that its processes may have got themselves, and
    has its own means against one that does not end.
    """

    def __init__(self, patient: bool = False) -> None:
        self.requested = False
        self.patient = patient
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
        if self.requested and not self.patient:
            raise KeyboardInterrupt
        self.requested = True
