"""The record of a run reads as one unbroken run after any kill; the line on the terminal; the picture."""

import io
import json
import math
import os
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import UserError
from bertsmith.training.metrics_log import (
    MetricsLog,
    ProgressLine,
    cut_after,
    describe_references,
    format_progress,
    plot_loss,
    read_metrics,
)


def log_steps(run: Path, resume: int | None, first: int, last: int) -> int:
    """Log every step and an evaluation every fifth, as a loop would; returns the lines cut at the start."""
    with MetricsLog(run, resume) as log:
        for step in range(first, last + 1):
            log.write(step, {"loss": 10.0 / step, "nsp_loss": None, "tokens": step * 100})
            if step % 5 == 0:
                log.write(step, {"eval_loss": 11.0 / step})
        return log.lines_cut


def scalars(run: Path, name: str) -> list[tuple[int, float]]:
    """What TensorBoard shows."""
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    accumulator = event_accumulator.EventAccumulator(str(run / "tensorboard"))
    accumulator.Reload()
    return [(event.step, event.value) for event in accumulator.Scalars(name)]


def test_resumed_twice_reads_as_one_run(tmp_path: Path) -> None:
    log_steps(tmp_path / "whole", None, 1, 30)
    run = tmp_path / "broken"
    log_steps(run, None, 1, 13)
    assert log_steps(run, 10, 11, 22) == 3
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 23, "los')  # killed in the middle of a line
    assert log_steps(run, 20, 21, 30) == 3
    assert (run / "metrics.jsonl").read_bytes() == (tmp_path / "whole" / "metrics.jsonl").read_bytes()
    for name in ("loss", "eval_loss", "tokens"):
        assert scalars(run, name) == scalars(tmp_path / "whole", name)
    assert len(scalars(run, "loss")) == 30


def test_a_run_that_starts_again_drops_the_attempt_before(tmp_path: Path) -> None:
    log_steps(tmp_path, None, 1, 7)
    assert log_steps(tmp_path, None, 1, 3) == 8
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]
    assert [step for step, _ in scalars(tmp_path, "loss")] == [1, 2, 3]


def test_without_tensorboard(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, None, tensorboard=False) as log:
        log.write(1, {"loss": 2.0})
        log.sync()
    assert read_metrics(tmp_path) == [{"step": 1, "loss": 2.0}]
    assert sorted(os.listdir(tmp_path)) == ["metrics.jsonl"]


def test_lines_are_json_and_reach_the_file_at_once(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, None) as log:
        log.write(1, {"loss": 0.1 + 0.2, "grad_norm": math.nan, "utilization": math.inf, "nsp_loss": None})
        log.sync()
        content = (tmp_path / "metrics.jsonl").read_bytes()
    assert content.endswith(b"}\n")

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    line = json.loads(content, parse_constant=refuse)
    assert line == {"step": 1, "loss": 0.1 + 0.2, "grad_norm": None, "utilization": None, "nsp_loss": None}


@pytest.mark.parametrize(
    ("content", "step", "left", "cut"),
    [
        (b"", 5, b"", 0),
        (b'{"step": 5}\n', 5, b'{"step": 5}\n', 0),
        (b'{"step": 5}\n{"step": 6}\n', 5, b'{"step": 5}\n', 1),
        (b'{"step": 5}\n{"step": 5', 9, b'{"step": 5}\n', 1),
        (b'{"step": 5}\n{"step": 6}', 9, b'{"step": 5}\n', 1),  # whole, but without its end of line
        (b'{"step": 5}\n\0\0\0\0\n\0', 9, b'{"step": 5}\n', 2),
        (b'{"step": 5}\n[]\n{}\nnull\n', 9, b'{"step": 5}\n', 3),
        (b'{"step": 5}\n{"step": 6}\n', -1, b"", 2),
        (b"\xff\xfe", 9, b"", 1),
    ],
)
def test_cutting(tmp_path: Path, content: bytes, step: int, left: bytes, cut: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(content)
    assert cut_after(path, step) == cut
    assert path.read_bytes() == left


def test_cutting_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert cut_after(tmp_path / "metrics.jsonl", 5) == 0


def test_a_full_disk_is_one_sentence(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full on this system")
    log = MetricsLog(tmp_path, None)
    log._file.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(UserError, match=r"metrics\.jsonl: the disk is full"):
        log.write(1, {"loss": 1.0})
    log.close()


METRICS = {
    "loss": 6.8123,
    "mlm_loss": 6.12,
    "nsp_loss": 0.6923,
    "learning_rate": 8.2e-4,
    "tokens_per_second": 6540.3,
    "utilization": 0.442,
    "seconds": 120.0,
}


def test_progress_text() -> None:
    assert format_progress(120, 2000, METRICS, 252.0) == (
        "step 120/2000  loss 6.812 (mlm 6.120 nsp 0.692)  lr 8.2e-04  6,540 tok/s  "
        "44 % of the measured matmul limit  4m12s left"
    )
    assert format_progress(7, None, {"loss": 6.8, "mlm_loss": 6.8, "nsp_loss": None, "skipped_steps": 0}, None) == (
        "step 7  loss 6.800"
    )
    assert format_progress(7, None, {"utilization": 1.19}, 3.0) == (
        "step 7  119 % of the measured matmul limit, which was measured on a busier machine  3s left"
    )
    held_out = {"eval_loss": 6.5, "eval_mlm_accuracy": 0.123, "eval_nsp_accuracy": 0.9, "skipped_steps": 2}
    assert format_progress(7, 9, held_out, None) == (
        "step 7/9  held-out loss 6.500  mlm accuracy 12.3 %  nsp accuracy 90.0 %  2 skipped"
    )


def test_progress_without_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine(2000)
    line.show(120, METRICS, 0.25)
    line.say("a word between")
    line.show(0, {"loss": 1.0, "seconds": 0.0}, 0.0)
    line.close()
    written = capsys.readouterr()
    assert written.out == ""
    lines = written.err.splitlines()
    assert lines[0].endswith("  6m00s left")
    assert lines[1:] == ["a word between", "step 0/2000  loss 1.000"]
    assert "\r" not in written.err
    assert "\x1b" not in written.err


def test_progress_on_a_terminal_is_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("COLUMNS", "40")
    line = ProgressLine(2000)
    line.show(120, METRICS, 0.25)
    line.show(130, METRICS, 0.26)
    line.say("checkpoint written")
    line.show(140, METRICS, 0.27)
    line.close()
    line.close()
    shown = [part.replace("\r\x1b[2K", "") for part in terminal.getvalue().split("\n")]
    assert [part[:15] for part in terminal.getvalue().split("\r\x1b[2K")[1:3]] == ["step 120/2000  ", "step 130/2000  "]
    assert shown[0].endswith("checkpoint written")
    assert len(shown) == 3  # what was said, the last state, and the rest after its end of line
    assert all(len(part) <= 39 for part in terminal.getvalue().replace("\n", "").split("\r\x1b[2K"))


def test_references_are_named() -> None:
    text = describe_references(math.log(30_522), 7.0812)
    assert "10.33 (ln V)" in text
    assert "7.08 (unigram entropy)" in text


def test_the_picture(tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    assert log_steps(tmp_path, None, 1, 1) == 0
    for nsp in (False, True):
        with MetricsLog(tmp_path, None) as log:
            for step in range(1, 60):
                nsp_part = {"mlm_loss": 7.0 / step, "nsp_loss": 0.7} if nsp else {}
                log.write(step, {"loss": 7.7 / step, **nsp_part})
                if step % 20 == 0:
                    log.write(step, {"eval_loss": 8.0 / step, "eval_mlm_loss": 7.5 / step, "eval_nsp_accuracy": 0.6})
        path = plot_loss(tmp_path, ln_vocab=10.3, unigram_entropy=7.1)
        assert path == tmp_path / "loss.png"
        pixels = image.imread(path)
        assert pixels.shape[0] > 600
        assert pixels.shape[1] > 1000
        assert len({tuple(pixel) for pixel in pixels[::3, ::3].reshape(-1, pixels.shape[2])}) > 20
    assert not list(tmp_path.glob(".loss.png*"))


def test_what_the_picture_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    figure_module = pytest.importorskip("matplotlib.figure")
    saved = figure_module.Figure.savefig

    def remember(self: Any, *arguments: Any, **options: Any) -> None:
        figures.append(self)
        saved(self, *arguments, **options)

    monkeypatch.setattr(figure_module.Figure, "savefig", remember)
    with MetricsLog(tmp_path, None) as log:
        for step in range(1, 201):
            log.write(step, {"loss": 5.0, "mlm_loss": 4.0 if step % 2 else 6.0})
        log.write(200, {"eval_loss": 5.9, "eval_mlm_loss": 5.2, "eval_nsp_accuracy": 0.75})
    plot_loss(tmp_path, ln_vocab=10.3, unigram_entropy=7.1)
    axes, second = figures[0].axes
    lines = {line.get_label(): line for line in axes.get_lines()}
    assert list(lines["training, each log line"].get_ydata()) == [4.0, 6.0] * 100
    assert all(4.5 < value < 5.5 for value in lines["training, moving average"].get_ydata())
    assert list(lines["held-out"].get_ydata()) == [5.2]
    assert [line.get_ydata()[0] for line in axes.get_lines()[-2:]] == [10.3, 7.1]
    assert [text.get_text() for text in axes.texts] == ["ln V = 10.30", "unigram entropy = 7.10"]
    assert list(second.get_lines()[0].get_ydata()) == [0.75]
    assert axes.get_title(loc="left") == "Pre-training loss: 200 steps, training 5.33, held-out 5.20"


def test_no_picture_without_losses(tmp_path: Path) -> None:
    with MetricsLog(tmp_path, None) as log:
        log.write(1, {"loss": math.nan})
    assert plot_loss(tmp_path) is None
    assert not (tmp_path / "loss.png").exists()
