"""What a run reports while it learns: RUN/metrics.jsonl, TensorBoard, the line on the terminal, RUN/loss.png.

metrics.jsonl is the record: one JSON object a line, in step order. A resumed run cuts off the lines its checkpoint does
not know of, so the file reads as one unbroken run however often it was killed.
"""

import json
import math
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from bertsmith.progress import format_seconds, say, write_stderr
from bertsmith.storage import atomic_file, disk_errors, sync

Number = float | int | None


class MetricsLog:
    """Appends to RUN/metrics.jsonl and RUN/tensorboard; a line reaches the operating system before `write` returns.

    `resume_step`: the step of the checkpoint the run continues from; lines of later steps, and a last line cut by a
    kill, are removed (`lines_cut` counts them). None: the run starts, whatever an attempt before it left is dropped.
    """

    def __init__(self, run: Path, resume_step: int | None, tensorboard: bool = True) -> None:
        self.path = run / "metrics.jsonl"
        with disk_errors(self.path):
            run.mkdir(parents=True, exist_ok=True)
            self.lines_cut = cut_after(self.path, -1 if resume_step is None else resume_step)
            self._file = self.path.open("ab", buffering=0)
        self._tensorboard = None
        if tensorboard:
            # here, not at the top: only training needs it, and it is slow to import
            from torch.utils.tensorboard import SummaryWriter

            try:
                with disk_errors(run / "tensorboard"):
                    # TensorBoard forgets what it has seen from `purge_step` on
                    self._tensorboard = SummaryWriter(
                        str(run / "tensorboard"), purge_step=0 if resume_step is None else resume_step + 1
                    )
            except UnicodeEncodeError:
                say(
                    f"warning: TensorBoard cannot write to {run} under this locale (use LC_ALL=C.UTF-8) and is left out"
                )

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        """One line for the state after `step` updates. NaN and infinity become null (JSON has no word for them).

        Raises UserError when the disk is full.
        """
        line = {"step": step} | {name: _finite(value) for name, value in metrics.items()}
        with disk_errors(self.path):
            # one write call for the whole line: a kill leaves it out or leaves it whole, short of a full disk
            self._file.write(json.dumps(line, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n")
            if self._tensorboard is not None:
                for name, value in metrics.items():
                    if value is not None:
                        self._tensorboard.add_scalar(name, value, step)

    def sync(self) -> None:
        """Put everything on the disk. Called before a checkpoint, so that what it relies on survives a power cut."""
        with disk_errors(self.path):
            sync(self.path)
            if self._tensorboard is not None:
                self._tensorboard.flush()

    def close(self) -> None:
        """Write what is left and close the files."""
        with disk_errors(self.path):
            self._file.close()
            if self._tensorboard is not None:
                self._tensorboard.close()


class NoMetricsLog(MetricsLog):
    """For the ranks that write nothing."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, metrics: Mapping[str, Number]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _finite(value: Number) -> Number:
    return value if value is None or math.isfinite(value) else None


def cut_after(path: Path, step: int) -> int:
    """Remove the lines at the end of a metrics file that are broken or of steps after `step`; returns how many."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    end, cut = len(content), 0
    while end:
        start = content.rfind(b"\n", 0, end - 1) + 1
        if content[end - 1 : end] == b"\n" and (found := _step_of(content[start:end])) is not None and found <= step:
            break
        end, cut = start, cut + 1
    if cut:
        with path.open("r+b") as file:
            file.truncate(end)
        sync(path)
    return cut


def _step_of(line: bytes) -> int | None:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of RUN/metrics.jsonl in step order; a last line that a kill has cut is left out."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith(b"\n") and _step_of(line) is not None]


def describe_references(ln_vocab: float, unigram_entropy: float) -> str:
    """The sentence said once at the start: what the MLM loss is to be compared with."""
    return (
        f"reference: MLM loss is {ln_vocab:.2f} (ln V) when every token is equally likely and {unigram_entropy:.2f} "
        "(unigram entropy) when only token frequencies are known; a model that uses context falls below both"
    )


def format_progress(step: int, total_steps: int | None, metrics: Mapping[str, Number], seconds_left: Number) -> str:
    """`step 120/2000  loss 6.812 (mlm 6.120 nsp 0.692)  lr 8.2e-04  6,540 tok/s  44 % of the …  4m12s left`.

    Whatever `metrics` does not hold is left out.
    """

    def value(name: str) -> float | None:
        return metrics.get(name)

    parts = [f"step {step}/{total_steps}" if total_steps is not None else f"step {step}"]
    if (loss := value("loss")) is not None:
        text = f"loss {loss:.3f}"
        if (mlm := value("mlm_loss")) is not None and (nsp := value("nsp_loss")) is not None:
            text += f" (mlm {mlm:.3f} nsp {nsp:.3f})"
        parts.append(text)
    if (held_out := value("eval_loss")) is not None:
        text = f"held-out loss {held_out:.3f}"
        if (accuracy := value("eval_mlm_accuracy")) is not None:
            text += f"  mlm accuracy {100 * accuracy:.1f} %"
        if (accuracy := value("eval_nsp_accuracy")) is not None:
            text += f"  nsp accuracy {100 * accuracy:.1f} %"
        parts.append(text)
    if (rate := value("learning_rate")) is not None:
        parts.append(f"lr {rate:.1e}")
    if (speed := value("tokens_per_second")) is not None:
        parts.append(f"{speed:,.0f} tok/s")
    if (share := value("utilization")) is not None:
        # what other programs took while the limit was measured, the run has now
        busier = ", which was measured on a busier machine" if share > 1 else ""
        parts.append(f"{100 * share:.0f} % of the measured matmul limit{busier}")
    if skipped := value("skipped_steps"):
        parts.append(f"{skipped:.0f} skipped")
    if seconds_left is not None:
        parts.append(f"{format_seconds(seconds_left)} left")
    return "  ".join(parts)


class ProgressLine:
    """The run on stderr: one line that is written over on a terminal, a line for each call elsewhere."""

    def __init__(self, total_steps: int | None) -> None:
        self.total_steps = total_steps
        self._terminal = sys.stderr.isatty()
        self._open = False

    def show(self, step: int, metrics: Mapping[str, Number], progress: float) -> None:
        """Show the state after `step` updates; `progress`: share of the budget used, `metrics["seconds"]`: time so far.

        The time left is that of the pace so far.
        """
        seconds = metrics.get("seconds")
        left = seconds * (1 - progress) / progress if seconds is not None and progress > 0 else None
        line = format_progress(step, self.total_steps, metrics, left)
        if self._terminal:
            # a line longer than the terminal would wrap and could not be written over
            write_stderr(f"\r\x1b[2K{line[: shutil.get_terminal_size().columns - 1]}")
            self._open = True
        else:
            write_stderr(f"{line}\n")

    def say(self, text: str) -> None:
        """A line that stays, above the one that is written over."""
        clear = "\r\x1b[2K" if self._open else ""
        write_stderr(f"{clear}{text}\n")
        self._open = False

    def close(self) -> None:
        """Leave the last state standing and go to the next line."""
        if self._open:
            write_stderr("\n")
        self._open = False


def plot_loss(
    run: Path, ln_vocab: float | None = None, unigram_entropy: float | None = None, title: str = "Pre-training loss"
) -> Path | None:
    """Draw RUN/metrics.jsonl as RUN/loss.png; None, and nothing written, when no loss is logged yet.

    The MLM loss in training (each log line, and their moving average) and on the held-out split (`eval_mlm_loss`), the
    two values to compare it with, and the held-out NSP accuracy on an axis of its own where there is one. The total
    loss (`loss`, `eval_loss`) stands in where the MLM loss is not logged apart.
    """
    lines = read_metrics(run)
    name = "mlm_loss" if any(line.get("mlm_loss") is not None for line in lines) else "loss"
    training = _series(lines, name)
    if not training[0]:
        return None
    held_out = _series(lines, f"eval_{name}")
    accuracy = _series(lines, "eval_nsp_accuracy")

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

    figure = Figure(figsize=(9.6, 5.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    dots = "." if len(training[0]) < 30 else None  # a curve of few points is these points
    axes.plot(*training, color="#4c78a8", alpha=0.45, linewidth=0.8, marker=dots, label="training, each log line")
    axes.plot(training[0], _moving_average(training[1]), color="#2b5c8f", linewidth=2, label="training, moving average")
    if held_out[0]:
        axes.plot(*held_out, color="#e4572e", linewidth=1.6, marker="o", markersize=4, label="held-out")
    for value, text in ((ln_vocab, "ln V"), (unigram_entropy, "unigram entropy")):
        if value is not None:
            axes.axhline(value, color="#777777", linewidth=1, linestyle=(0, (5, 3)), zorder=1)
            # text at the right end, above its line: the curve is far below there
            axes.annotate(
                f"{text} = {value:.2f}",
                (1, value),
                xycoords=("axes fraction", "data"),
                xytext=(-6, 4),
                textcoords="offset points",
                ha="right",
                color="#555555",
                fontsize=9,
            )
    axes.set_xlabel("step (optimizer updates)")
    axes.set_ylabel("masked-LM loss (nats per masked token)" if name == "mlm_loss" else "loss (nats)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlim(left=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: f"{step:,.0f}"))
    axes.margins(x=0.01)
    axes.grid(color="#e4e4e4", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if accuracy[0]:
        second = axes.twinx()
        second.plot(
            *accuracy, color="#3a923a", linestyle="--", marker="s", markersize=3.5, label="held-out NSP accuracy"
        )
        second.set_ylabel("held-out NSP accuracy", color="#2f7a2f")
        second.tick_params(axis="y", colors="#2f7a2f")
        second.set_ylim(min(0.4, *accuracy[1]), 1.0)
        second.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        second.margins(x=0.01)
        second.spines["top"].set_visible(False)
        more = second.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    last = f"{training[0][-1]:,} steps, training {_moving_average(training[1])[-1]:.2f}"
    if held_out[0]:
        last += f", held-out {held_out[1][-1]:.2f}"
    axes.set_title(f"{title}: {last}", loc="left", fontsize=11)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    path = run / "loss.png"
    with atomic_file(path) as partial:
        figure.savefig(partial, format="png")
    return path


def _series(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of the lines that hold `name`."""
    points = [(line["step"], line[name]) for line in lines if line.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _moving_average(values: list[float]) -> list[float]:
    """Mean over a fortieth of the curve around each point: no lag, and at both ends over what there is."""
    half = max(1, len(values) // 80)
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    windows = ((max(0, i - half), min(len(values), i + half + 1)) for i in range(len(values)))
    return [(sums[last] - sums[first]) / (last - first) for first, last in windows]
