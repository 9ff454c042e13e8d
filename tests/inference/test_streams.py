"""Batches side by side: everything once and in order, on one core each, and whatever fails is said by the caller."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from bertsmith.inference.streams import map_on_threads

CPU = torch.device("cpu")


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_everything_once_and_in_order(two_threads: None) -> None:
    def square(number: int) -> int:
        time.sleep(0.002 * (number % 3))
        return number**2

    assert list(map_on_threads(square, range(40), CPU)) == [(number, number**2) for number in range(40)]
    assert list(map_on_threads(square, [], CPU)) == []


def test_several_run_at_once_on_one_core_each(two_threads: None) -> None:
    together = threading.Barrier(2)

    def ask(_: int) -> tuple[int, int]:
        together.wait(10)  # both threads are in here, or this fails
        return threading.get_ident(), torch.get_num_threads()

    found = [result for _, result in map_on_threads(ask, range(4), CPU)]
    assert {threads for _, threads in found} == {1}
    assert len({ident for ident, _ in found}) == 2
    assert torch.get_num_threads() == 2
    # what is computed here goes on on all cores
    assert threading.get_ident() not in {ident for ident, _ in found}


def test_a_single_item_has_all_cores(two_threads: None) -> None:
    def ask(_: int) -> tuple[int, int]:
        return threading.get_ident(), torch.get_num_threads()

    assert list(map_on_threads(ask, [1], CPU)) == [(1, (threading.get_ident(), 2))]


def test_one_thread_needs_no_others() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = {result for _, result in map_on_threads(lambda _: threading.get_ident(), range(5), CPU)}
    finally:
        torch.set_num_threads(before)
    assert found == {threading.get_ident()}


def test_items_are_read_only_a_little_ahead(two_threads: None) -> None:
    read = []

    def items() -> Iterator[int]:
        for number in range(1000):
            read.append(number)
            yield number

    results = map_on_threads(lambda number: number, items(), CPU)
    for _ in range(10):
        next(results)
    assert len(read) < 20
    results.close()


def test_what_fails_is_raised_and_nothing_goes_on(two_threads: None) -> None:
    begun: list[int] = []

    def fail(number: int) -> int:
        begun.append(number)
        if number == 3:
            raise ValueError("three")
        return number

    results = map_on_threads(fail, range(1000), CPU)
    assert [next(results)[0] for _ in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="three"):
        next(results)
    count = len(begun)
    time.sleep(0.05)
    assert len(begun) == count < 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_makes_threads_of_its_own() -> None:
    program = """
import os, torch
from bertsmith.inference.streams import map_on_threads
torch.set_num_threads(2)
def run(): return [result for _, result in map_on_threads(lambda x: x * 2, range(3), torch.device("cpu"))]
assert run() == [0, 2, 4]
child = os.fork()
if child == 0:
    os._exit(7 if run() == [0, 2, 4] else 1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_the_caller_computes_where_threads_take_no_more_work() -> None:
    """After the main thread has ended, no pool takes anything."""
    program = """
import threading, time, torch
from bertsmith.inference.streams import map_on_threads
torch.set_num_threads(2)
def run(): return [result for _, result in map_on_threads(lambda x: x * 2, range(6), torch.device("cpu"))]
BEFORE
def late():
    threading.main_thread().join()
    print(run())
threading.Thread(target=late).start()
"""
    for before in ("", "run()"):
        command = [sys.executable, "-c", program.replace("BEFORE", before)]
        done = subprocess.run(command, check=True, timeout=60, capture_output=True, text=True)
        assert done.stdout == "[0, 2, 4, 6, 8, 10]\n"
