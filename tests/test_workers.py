"""The worker pool: order, bounded look-ahead, errors instead of hangs, and no process left behind."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bertsmith.errors import UserError
from bertsmith.workers import WorkerPool, available_cores, peak_memory
from watching import living_processes, needs_proc, wait_until

# A worker imports its function by name: these live in a module on disk, as bertsmith's own do.
FUNCTIONS = """
import os, signal, threading, time

def slow_square(number):
    time.sleep(0.002 * (number % 7))
    return number * number

def settings(_):
    return os.getpid(), os.environ["TOKENIZERS_PARALLELISM"], os.environ["OMP_NUM_THREADS"]

def refuse(number):
    raise ValueError(f"number {number}")

def die(number):
    os.kill(os.getpid(), signal.SIGKILL)

def wait(path):
    open(os.path.join(path, str(os.getpid())), "w").close()
    time.sleep(1)
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    (tmp_path / "pool_functions.py").write_text(FUNCTIONS, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    import pool_functions  # type: ignore[import-not-found]

    yield pool_functions
    sys.modules.pop("pool_functions")


@pytest.mark.parametrize("workers", [1, 3])
def test_results_come_in_order(functions, workers: int) -> None:  # type: ignore[no-untyped-def]
    with WorkerPool(workers) as pool:
        assert list(pool.map_in_order(functions.slow_square, range(40))) == [n * n for n in range(40)]
        assert pool.peak_memory >= peak_memory() > 5_000_000


def test_items_are_taken_no_faster_than_needed(functions) -> None:  # type: ignore[no-untyped-def]
    taken = 0

    def items() -> Iterator[int]:
        nonlocal taken
        for number in range(100):
            taken += 1
            yield number

    with WorkerPool(2) as pool:
        for done, _ in enumerate(pool.map_in_order(functions.slow_square, items()), start=1):
            assert taken <= done + 2 * 2 + 1
    assert taken == 100


def test_workers_are_other_processes_with_one_thread(functions) -> None:  # type: ignore[no-untyped-def]
    with WorkerPool(2) as pool:
        found = list(pool.map_in_order(functions.settings, range(20)))
    assert os.getpid() not in {process for process, *_ in found}
    assert {(parallel, threads) for _, parallel, threads in found} == {("false", "1")}


def test_an_error_in_a_worker_reaches_the_caller(functions) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match="number 0"), WorkerPool(2) as pool:
        list(pool.map_in_order(functions.refuse, range(5)))


def test_a_killed_worker_is_an_error_not_a_hang(functions) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=r"2 worker processes was killed.*fewer --workers"), WorkerPool(2) as pool:
        list(pool.map_in_order(functions.die, range(5)))


def test_at_least_one_worker() -> None:
    with pytest.raises(UserError, match="--workers 0"):
        WorkerPool(0)
    assert available_cores() >= 1


@needs_proc
@pytest.mark.parametrize("way", [signal.SIGINT, signal.SIGKILL])
def test_no_worker_outlives_its_parent(functions, tmp_path: Path, way: signal.Signals) -> None:  # type: ignore[no-untyped-def]
    seen = tmp_path / "seen"
    seen.mkdir()
    # no `if __name__ == "__main__"`, and read from stdin: spawn alone would fail on either
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from pool_functions import wait\n"
        "from bertsmith.workers import WorkerPool\n"
        "with WorkerPool(2) as pool:\n"
        f"    list(pool.map_in_order(wait, [{str(seen)!r}] * 100))\n"
    )
    parent = subprocess.Popen(
        [sys.executable, "-"], stdin=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    assert parent.stdin
    assert parent.stderr
    parent.stdin.write(script.encode())
    parent.stdin.close()
    wait_until(lambda: len(os.listdir(seen)) == 2, "two workers", process=parent)
    workers = [int(name) for name in os.listdir(seen)]
    if way == signal.SIGINT:
        os.killpg(parent.pid, way)  # Ctrl-C reaches the whole group
    else:
        parent.kill()
    errors = parent.stderr.read().decode()
    parent.wait(timeout=30)
    wait_until(lambda: not {*workers} & living_processes().keys(), "the end of the workers")
    if way == signal.SIGINT:
        assert errors.count("Traceback") == 1, errors  # the parent's own, none of a worker
        assert errors.rstrip().endswith("KeyboardInterrupt")
