"""Batches on several threads, each batch on one core, instead of each product spread over all cores.

Between the products of a BERT lie many small steps. On one core they cost what they are; spread over all cores they
cost a wait for the slowest each. So as many batches as there are cores go through side by side. PyTorch frees Python's
lock while it computes.
"""

import collections
import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def map_on_threads(
    function: Callable[[Item], Result], items: Iterable[Item], device: torch.device
) -> Iterator[tuple[Item, Result]]:
    """Each item with function(item), in order; on a CPU as many at once as PyTorch has threads, each on one of them.

    `items` is read as far ahead as is computed, so that results of any number of items fit into memory. What PyTorch
    keeps for each thread, inference mode among it, is for `function` to set.
    """
    count = torch.get_num_threads() if device.type == "cpu" else 1
    first = list(itertools.islice(items := iter(items), 2))
    if count == 1 or len(first) < 2:  # a single batch has all cores to itself
        for item in itertools.chain(first, items):
            yield item, function(item)
        return
    pool = _pool(count)
    waiting: collections.deque[tuple[Item, Future[Result]]] = collections.deque()
    try:
        for item in itertools.chain(first, items):
            waiting.append((item, pool.submit(function, item)))
            if len(waiting) > 2 * count:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        for _, future in waiting:
            future.cancel()
        for _, future in waiting:  # nothing may go on computing behind the caller's back
            with contextlib.suppress(BaseException):
                future.result()


def _pool(count: int) -> ThreadPoolExecutor:
    """`count` threads that compute on one core each; made once a process."""
    with _lock:
        if count not in _pools:
            ready = threading.Barrier(count + 1)
            pool = ThreadPoolExecutor(count, "bertsmith-stream", _compute_alone)
            for _ in range(count):
                pool.submit(ready.wait)
            ready.wait()
            # what a thread sets for itself is also what threads to come begin with
            torch.set_num_threads(count)
            _pools[count] = pool
        return _pools[count]


def _forget_threads() -> None:
    """In a forked process there are none of the threads; whoever asked them would wait for ever."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_threads)


def _compute_alone() -> None:
    torch.get_num_threads()  # a thread's first question sets the number to everybody's, now instead of later
    torch.set_num_threads(1)
