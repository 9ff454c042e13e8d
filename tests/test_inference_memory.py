"""benchmarks/inference_memory.py at small size: memory is flat over calls of random length, and over a file."""

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def benchmark() -> Iterator[ModuleType]:
    """The script, which is no package's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("inference_memory")


@pytest.fixture(scope="module")
def folder(benchmark: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return benchmark.make_model(tmp_path_factory.mktemp("tiny"))


def test_memory_is_flat_over_calls_of_random_length() -> None:
    """In a process of its own: what this one freed before would hide, or pass for, what the calls take."""
    command = [sys.executable, BENCHMARKS / "inference_memory.py", "--calls", "400", "--rows", "0"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["resident_mb"]) == 10
    assert found["added_mb"] < 8


def test_a_file_is_embedded_in_a_process_of_its_own(benchmark: ModuleType, folder: Path, tmp_path: Path) -> None:
    found = benchmark.measure_file(folder, 1500, tmp_path)
    assert found["rows"] == 1500
    assert np.load(tmp_path / "x.npy").shape == (1500, 128)
    assert found["peak_mb"] < 1500
