"""benchmarks/inference_memory.py at small size: memory is flat over calls of random length, and over a file.

In a process of its own. What this one freed before would hide, or pass for, what the calls take; and Linux counts to
the peak of a child what its parent held when it was started, which after a thousand tests is gigabytes.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow
SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "inference_memory.py"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the script prints."""
    command = [sys.executable, SCRIPT, "--calls", "2000", "--rows", "1500"]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_memory_is_flat_over_calls_of_random_length(found: dict[str, Any]) -> None:
    assert found["calls"] == 2000
    assert len(found["resident_mb"]) == 10
    assert found["added_mb"] < 8


def test_a_file_is_embedded_under_the_limit(found: dict[str, Any]) -> None:
    assert found["file"]["rows"] == 1500
    assert 100 < found["file"]["peak_mb"] < 1500
