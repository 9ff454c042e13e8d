"""Real kills: processes of their own, SIGKILL at random moments and during saves, by the benchmark made for it."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
