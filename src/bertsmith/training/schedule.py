"""How long a run is, how fast it learns at each step, and when it moves to longer sequences.

Everything is a pure function of what a checkpoint stores (updates done, epochs read, training seconds), so a resumed
run takes exactly the learning rates of the unbroken one. A step is an optimizer update that was applied: a step skipped
for a NaN does not advance the counter and so does not advance the schedule.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from bertsmith.errors import UserError, one_of

# Shares such as 0.1 + 0.2 are not exact in binary; a boundary this close counts as reached, so that with a budget of
# steps a phase begins at the exact step one computes by hand.
_ROUNDING = 1e-9

# What a warm-up given as a share of minutes or epochs starts from. The first step knows no pace yet and its progress
# is 0; a learning rate of 0 would waste it.
_FIRST_STEP_FACTOR = 0.01


@dataclass(frozen=True)
class Budget:
    """When a run ends: after `steps` updates, `epochs` passes over the corpus or `minutes` of training; exactly one.

    Raises UserError when none or several are given, or one that is not a positive number.
    """

    steps: int | None = None
    epochs: float | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        given = {name: value for name, value in self._amounts() if value is not None}
        if len(given) != 1:
            found = " and ".join(f"{name} = {value}" for name, value in given.items()) or "none of them"
            raise UserError(f"the length of the run: exactly one of steps, epochs, minutes is needed, found {found}")
        for name, value in given.items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{name}: {value} is not a length of training; give a number above 0")
        if self.steps is not None and self.steps != int(self.steps):
            raise UserError(f"steps: {self.steps} is not a whole number")

    def _amounts(self) -> tuple[tuple[str, float | None], ...]:
        return (("steps", self.steps), ("epochs", self.epochs), ("minutes", self.minutes))

    def progress(self, step: int, epochs: float, seconds: float) -> float:
        """The share of the budget used, in [0, 1].

        `step`: updates applied so far; `epochs`: passes over the corpus so far, with fraction; `seconds`: time spent
        training so far, over all parts of a resumed run.
        """
        if self.steps is not None:
            used = step / self.steps
        elif self.epochs is not None:
            used = epochs / self.epochs
        else:
            assert self.minutes is not None
            used = seconds / (60 * self.minutes)
        return min(max(used, 0.0), 1.0)

    def done(self, step: int, epochs: float, seconds: float) -> bool:
        """Whether the run is over. Arguments as for `progress`."""
        return self.progress(step, epochs, seconds) >= 1.0

    def describe(self) -> str:
        """`2,000 steps`, `3 epochs`, `6 minutes`: for the person at the terminal."""
        name, value = next((name, value) for name, value in self._amounts() if value is not None)
        return f"{value:,} {name}" if value != 1 else f"1 {name.removesuffix('s')}"


@dataclass(frozen=True)
class LearningRateSchedule:
    """Linear warm-up to `peak`, then linear decay to `floor` × `peak` (or none).

    With a budget of N steps and a warm-up of W, step k = 0 … N - 1 takes

        peak · min((k + 1) / W, 1)                           while k < W
        peak · (floor + (1 - floor) · (N - k) / (N - W))     from k = W on

    so the first step learns (its rate is peak / W, not 0), steps W - 1 and W both take the peak, and the last one still
    learns; only step N, never taken, would reach the floor. From step W on this is transformers'
    `get_linear_schedule_with_warmup`; its warm-up lags ours by one step and wastes step 0. The reference
    (google-research/bert, optimization.py) takes k / W and then falls from step 0 on, peak · (1 - k / N), so that it
    jumps down by W / N of the peak where its warm-up ends; the paper's 10,000 of 1,000,000 steps make that 1 %.

    With a budget of epochs or minutes, N is not known. The same formula is used with what can be told at step k: for
    W given in steps, the share of the budget that W steps take at the mean pace so far; for a share, progress over
    that share, and 1 % of the peak at least, because the first step's progress is 0.

    Raises UserError for a peak, warm-up or floor out of range, or a warm-up longer than the budget.
    """

    peak: float
    """Highest learning rate."""
    warmup: float
    """Steps (a whole number ≥ 1), or a share of the budget (below 1); 0: none."""
    budget: Budget
    """What the run's progress is measured against."""
    decay: str = "linear"
    """`linear` or `constant` (no decay after the warm-up)."""
    floor: float = 0.0
    """Share of the peak the decay ends at."""

    def __post_init__(self) -> None:
        one_of("decay", self.decay, ("linear", "constant"))
        if not (math.isfinite(self.peak) and self.peak > 0):
            raise UserError(f"learning rate: {self.peak} is not a number above 0")
        if not 0 <= self.floor < 1:
            raise UserError(f"floor: {self.floor} is not a share of the peak; give a number from 0 to below 1")
        if not (math.isfinite(self.warmup) and self.warmup >= 0) or (
            self.warmup >= 1 and self.warmup != int(self.warmup)
        ):
            raise UserError(f"warm-up: {self.warmup} is neither a whole number of steps nor a share below 1")
        if self.budget.steps is not None and self.warmup > self.budget.steps:
            raise UserError(
                f"warm-up: {self.warmup:.0f} steps are longer than the whole run of {self.budget.steps}; shorten the "
                "warm-up or give it as a share, such as 0.1"
            )

    def factor(self, step: int, progress: float) -> float:
        """The share of the peak, in (0, 1], for the update after `step` applied ones, at `progress` of the budget."""
        return min(self._rise(step, progress), self._fall(step, progress))

    def learning_rate(self, step: int, progress: float) -> float:
        """`peak` × `factor`."""
        return self.peak * self.factor(step, progress)

    def _warmup_steps(self) -> int | None:
        """The warm-up in steps, None where it is a share of epochs or minutes."""
        if self.warmup >= 1 or self.warmup == 0:
            return int(self.warmup)
        return None if self.budget.steps is None else max(1, round(self.warmup * self.budget.steps))

    def _rise(self, step: int, progress: float) -> float:
        steps = self._warmup_steps()
        if steps is None:
            return min(max(progress / self.warmup, _FIRST_STEP_FACTOR), 1.0)
        return min((step + 1) / steps, 1.0) if steps else 1.0

    def _fall(self, step: int, progress: float) -> float:
        if self.decay == "constant":
            return 1.0
        steps = self._warmup_steps()
        if steps is None:
            line = (1 - progress) / (1 - self.warmup)
        elif step <= steps:
            line = 1.0
        elif self.budget.steps is not None:
            line = (self.budget.steps - step) / (self.budget.steps - steps)
        else:
            # `progress` took `step` updates, so the warm-up took this much of it at the mean pace so far.
            line = (1 - progress) / (1 - progress * steps / step)
        return self.floor + (1 - self.floor) * min(max(line, 0.0), 1.0)


@dataclass(frozen=True)
class LengthPhase:
    """A stretch of the run with its own sequence length."""

    share: float
    """Share of the budget, in (0, 1]."""
    max_length: int
    """Longest sequence, in tokens, [CLS] and [SEP] among them."""


# Appendix A.2 of the paper: 90 % of the steps at length 128, the rest at 512 to learn the late positions.
PAPER_PHASES = (LengthPhase(0.9, 128), LengthPhase(0.1, 512))


def check_phases(phases: Sequence[LengthPhase]) -> None:
    """Raise UserError unless the shares are positive and add up to 1."""
    if not phases:
        raise UserError("phases: none given; one phase with share 1 is the least")
    for phase in phases:
        if not 0 < phase.share <= 1:
            raise UserError(f"phases: a share of {phase.share} is not in (0, 1]")
    total = sum(phase.share for phase in phases)
    if abs(total - 1) > 1e-6:
        raise UserError(f"phases: the shares add up to {total:g}, not to 1")


def phase_of(progress: float, phases: Sequence[LengthPhase]) -> int:
    """The index of the phase that the next step belongs to, given the share of the budget used so far.

    With a budget of N steps, phase i begins at the first step k with k / N ≥ the shares before it: for the paper's
    two, k = 0.9 N exactly.
    """
    reached = 0.0
    for index, phase in enumerate(phases):
        reached += phase.share
        if progress < reached - _ROUNDING:
            return index
    return len(phases) - 1
