"""Real kills: processes of their own, SIGKILL at random moments and during saves, by the benchmark made for it."""

import importlib.util
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from watching import wait_until

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "kills.py"


@pytest.fixture(scope="module")
def kills() -> ModuleType:
    """benchmarks/kills.py, which is no package."""
    spec = importlib.util.spec_from_file_location("kills_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_killed_at_random_moments(kills: ModuleType, corpus: Path, tmp_path: Path) -> None:
    """Six kills, a truncated checkpoint, a full disk: always the bits of the unbroken run."""
    seed = random.randrange(1000)
    flags = ["--batch-size", "4", "--max-length", "32", "--precision", "fp32", "--micro-batch-size", "3"]
    job = kills.Job(corpus, "tiny", 20, 4, flags)
    result = kills.measure_kills(job, tmp_path, 6, seed)
    assert result["bit_equal"], (seed, result)
    assert result["faults"] == [], (seed, result)
    assert result["kills"] == 6
    assert result["kills_during_save"] >= 1, (seed, result)
    assert result["resumes"] >= 3, (seed, result)
    assert result["worst_resume_seconds"] < 2, (seed, result)
    truncated = result["truncated_newest"]
    assert truncated["stopped_with"] == 130
    assert truncated["named"]
    assert truncated["resumed_from_step"] < int(truncated["truncated"].removeprefix("step-"))
    assert truncated["exit"] == 0
    full_disk = result["full_disk"]
    if isinstance(full_disk, str):
        assert "left out" in full_disk
    else:
        assert full_disk["exit"] == 2
        assert "the disk is full" in full_disk["said"]
        assert full_disk["kept"]
        assert not full_disk["half_written_left"]
        assert full_disk["exit_after_growing"] == 0
        assert full_disk["resumed_from_step"] is not None


def group_is_there(process: int) -> bool:
    """Whether any process of a group is left."""
    try:
        os.killpg(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.slow
def test_the_whole_group_is_interrupted(kills: ModuleType, corpus: Path, tmp_path: Path) -> None:
    """Ctrl-C at a terminal, then a batch system's polite end: loader workers get them too, and the run is saved."""
    flags = ["--batch-size", "4", "--max-length", "32", "--precision", "fp32", "--examples.workers", "2"]
    job = kills.Job(corpus, "tiny", 120, 10, flags)
    whole, out = tmp_path / "whole", tmp_path / "run"
    assert job.finish(whole).returncode == 0
    for number in (signal.SIGINT, signal.SIGTERM):
        before = kills.checkpoint_folders(out)
        process = subprocess.Popen(
            job.command(out), stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", start_new_session=True
        )
        wait_until(lambda: kills.checkpoint_folders(out) != before, "a checkpoint", process=process)  # noqa: B023
        os.killpg(process.pid, number)
        output, said = process.communicate(timeout=60)
        assert process.returncode == 130, said
        assert output == ""
        assert "Traceback" not in said
        assert "interrupted: the run is saved at step" in said
        wait_until(lambda: not group_is_there(process.pid), "the end of its workers")  # noqa: B023
    assert job.finish(out).returncode == 0
    tally = kills.Tally()
    kills.compare(whole, out, tally)
    assert tally.unequal == []
