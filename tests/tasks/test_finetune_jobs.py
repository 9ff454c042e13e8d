"""Whole jobs of fine-tuning and prediction under torchrun: killed, asked to stop, and given a mistake."""

import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bertsmith.training.metrics_log import read_metrics
from made_tasks import reviews, write_rows
from torchrun_jobs import Job, on_this_machine, started

pytestmark = pytest.mark.slow
Files = dict[str, tuple[Path, Path]]


def command(model: Path, files: Files, out: Path, *more: Any) -> list[Any]:
    train, dev = files["classify"]
    named = ("--model", model, "--train", train, "--dev", dev, "--out", out, "--precision", "fp32", "--device", "cpu")
    flags = ("--max-length", 32, "--batch-size", 4, "--eval.every", 1000, "--log.every", 1, "--checkpoint.minutes", 0)
    return ["finetune", "classify", *named, *flags, *more]


def wait_for_steps(job: Job, run: Path, count: int) -> None:
    """Until `count` log lines are written."""
    job.wait_until(lambda: (run / "metrics.jsonl").is_file() and len(read_metrics(run)) >= count, f"{count} steps")


def test_saved_killed_and_finished(model: Path, files: Files, tmp_path: Path) -> None:
    """SIGTERM saves; a killed rank ends the job within seconds, its error first; the same command finishes."""
    run = tmp_path / "run"
    with started(tmp_path, on_this_machine(2), command(model, files, run, "--epochs", 400)) as job:
        wait_for_steps(job, run, 5)
        job.process.send_signal(signal.SIGTERM)
        said = job.wait(60)
    saved = re.search(r"interrupted: the run is saved at step (\d+)", said)
    assert saved, said
    assert [path.name for path in (run / "checkpoints").glob("step-*")] == [f"step-{int(saved[1]):08d}"]
    assert said.count("bertsmith: interrupted") <= 1
    assert "fault of bertsmith" not in said
    with started(tmp_path, on_this_machine(2), command(model, files, run, "--epochs", 400)) as job:
        wait_for_steps(job, run, int(saved[1]) + 5)
        said = job.kill_and_wait()
    assert "resuming from" in said
    assert "fault of bertsmith" not in said.partition("Traceback")[0], said


def test_a_row_that_is_wrong_is_one_sentence(tuned: Callable[[str], Path], tmp_path: Path) -> None:
    rows = [*reviews(30), ("a film", "unheard of")]
    source = write_rows(tmp_path / "new.csv", ("text", "label"), rows)
    with started(
        tmp_path, on_this_machine(2), ["evaluate", tuned("classify"), "--data", source, "--device", "cpu"]
    ) as job:
        said = job.wait(60)
    assert job.process.returncode == 1
    assert re.search(r"Root Cause.*rank\s+: 0 .*exitcode\s+: 2 ", said, re.DOTALL), said
    sentences = [line for line in said.splitlines() if line.startswith("bertsmith: ")]
    assert len(sentences) == 1, said
    assert sentences[0].startswith(f"bertsmith: {source}:32: label 'unheard of' is not one of")
